"""ClassOrder in lockstep with a search over all rows."""

import random

import numpy as np
import pytest

from kvstore.core.keys import KVSpec
from kvstore.eviction.class_order import ClassOrder
from kvstore.eviction.reuse_rate import CLASS_OF_USES, NUM_CLASSES
from kvstore.index import NO_PARENT, BlockIndex


class Leaves:
    """Single blocks; which of them may go is a set."""

    def __init__(self, num_rows: int) -> None:
        self.index = BlockIndex()
        shape = KVSpec(weights="w", num_layers=1, num_kv_heads=2, head_dim=64, dtype="int8")
        entry = self.index.open_namespace(b"n" * 16, shape, "", 4096)
        self.rows = self.index.new_rows(num_rows)
        keys = [b"%016d" % row for row in range(num_rows)]
        self.index.add(entry, keys, np.full(num_rows, NO_PARENT), self.rows)
        self.evictable: set[int] = set()
        self.order = ClassOrder(self.index, self)

    def is_evictable(self, row: int) -> bool:
        return row in self.evictable

    def of_class(self, number: int) -> list[int]:
        rows = [row for row in self.evictable if CLASS_OF_USES[self.index.uses_at[row]] == number]
        return sorted(rows, key=self.index.last_use_at.__getitem__)


@pytest.mark.parametrize("seed", range(5))
def test_both_ends_of_every_class_are_those_of_a_search(seed: int) -> None:
    draw = random.Random(seed)
    leaves = Leaves(60)
    num_taken = 0
    for step in range(3000):
        row, number = draw.randrange(60), draw.randrange(NUM_CLASSES)
        action = draw.choices(["use", "hold", "oldest", "newest"], [6, 1, 2, 1])[0]
        if action == "use":
            leaves.index.use(np.array([row]))
            leaves.evictable.add(row)
            leaves.order.push(row)
        elif action == "hold":
            leaves.evictable.discard(row)
        elif rows := leaves.of_class(number):
            if action == "oldest":
                expected, taken = rows[0], leaves.order.pop_oldest(number)
            else:
                expected, taken = rows[-1], leaves.order.pop_newest(number)
            assert taken == expected
            leaves.evictable.remove(expected)
            leaves.index.uses_at[expected] = draw.choice([0, 1, 3])  # another block's, from here on
            num_taken += 1
        if step % 100 == 0:
            leaves.order.check()
    assert num_taken > 300
    for number in range(NUM_CLASSES):
        for row in leaves.of_class(number):
            assert leaves.order.pop_oldest(number) == row
        assert leaves.order.oldest(number) is None
        assert leaves.order.newest(number) is None


def test_memory_stays_bounded_by_rows_however_often_they_are_used() -> None:
    leaves = Leaves(10)
    leaves.evictable.update(range(10))
    for step in range(60_000):
        leaves.index.use(np.array([step % 10]))
        leaves.order.push(step % 10)

    assert leaves.order.nbytes < 500_000
    leaves.order.check()
