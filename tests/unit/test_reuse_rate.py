"""Rates of reuse, learnt from what is used."""

import random

import numpy as np
import pytest
from still_tier import StillTier, index_of_single_blocks

from kvstore.eviction.reuse_rate import CLASS_OF_USES, NUM_CLASSES, ReuseRates


class Used:
    """An index of single blocks, and what is learnt from their uses."""

    def __init__(self, num_rows: int, *, num_blocks: int = 1000) -> None:
        self.index, self.rows = index_of_single_blocks(num_rows)
        self.rates = ReuseRates(self.index, StillTier(num_blocks))

    def use(self, *rows: int) -> None:
        self.rates.used(self.index.use(np.array(rows)))


def test_classes_double() -> None:
    uses = [0, 1, 2, 3, 4, 7, 8, 255]

    assert [CLASS_OF_USES[number] for number in uses] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(CLASS_OF_USES) == set(range(NUM_CLASSES))


def test_without_evidence_the_oldest_has_the_lowest_rate_in_every_class() -> None:
    rates = Used(1).rates

    for number in range(NUM_CLASSES):
        by_age = [rates.rate(number, 1 << power) for power in range(30)]
        assert by_age == sorted(by_age, reverse=True)


@pytest.mark.parametrize("restored_use", [0, 10**9])
def test_blocks_used_by_chance_have_the_rate_at_which_they_are_used(restored_use: int) -> None:
    """Each of 64 blocks is one in 64 uses, however long ago its last use was; after a restart too, where the clock jumps."""
    used = Used(64)
    if restored_use:
        used.index.restore_use(used.rows, np.full(64, restored_use), np.zeros(64, np.uint32))
    draw = random.Random(1)
    for _ in range(20_000):
        used.use(draw.randrange(64))

    for age in (2, 10, 50, 120):
        assert used.rates.rate(CLASS_OF_USES[255], age) == pytest.approx(1 / 64, rel=0.15)


def test_blocks_that_come_back_once_they_came_back_differ_from_those_that_never_do() -> None:
    """Eight blocks in turn, with 24 between that nobody has twice."""
    used = Used(30_000)
    new = iter(range(8, 30_000))
    for turn in range(1000):
        used.use(turn % 8)
        used.use(*(next(new) for _ in range(24)))
    once, often = CLASS_OF_USES[1], CLASS_OF_USES[255]

    assert used.rates.rate(often, 20) > 100 * used.rates.rate(once, 20)
    assert used.rates.rate(often, 150) > 2 * used.rates.rate(often, 20), "the next use is near"
    assert used.rates.rate(often, 5000) < used.rates.rate(often, 20), "it has not come when it should"


def test_what_was_long_ago_counts_less_and_less() -> None:
    """The same blocks, first in turn and then never again."""
    used = Used(60_000, num_blocks=10)
    for turn in range(4000):
        used.use(turn % 50)
    before = used.rates.rate(CLASS_OF_USES[255], 30)
    for row in range(50, 60_000):
        used.use(row)

    assert used.rates.rate(CLASS_OF_USES[1], 30) < before / 100
    assert used.rates.rate(CLASS_OF_USES[255], 30) < before / 2
