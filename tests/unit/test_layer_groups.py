"""Layer groups: what each needs of a prefix, and the longest prefix that all support, against trying every length."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.plans import NOWHERE
from kvstore.engine_connector.layer_groups import LayerGroup, longest_prefix

SPEC = KVSpec(weights="w", num_layers=2, num_kv_heads=1, head_dim=64, dtype="float16")
FULL = LayerGroup()
MAX_BLOCKS = 24


class Lookup:
    """`here[g]`: own blocks of group g that can be read."""

    def __init__(self, here: list[set[int]]) -> None:
        self.here = here
        self.asked: Counter[tuple[int, str]] = Counter()

    def has_run(self, group: int, blocks: range) -> bool:
        self.asked[group, "run"] += 1
        return self.here[group].issuperset(blocks)

    def tiers(self, group: int, blocks: range) -> bytes:
        self.asked[group, "each"] += 1
        return bytes(0 if block in self.here[group] else NOWHERE for block in blocks)


@pytest.mark.parametrize(
    ("group", "block_tokens", "expected"),
    [
        ("full", 16, FULL),
        ("full.global", 32, LayerGroup(span=2)),
        ("window:40", 16, LayerGroup(num_needed=3)),
        ("window:33", 16, LayerGroup(num_needed=2)),
        ("window:34", 16, LayerGroup(num_needed=3)),
        ("window:1", 16, LayerGroup(num_needed=0)),
        ("window:4096.local", 16, LayerGroup(num_needed=256)),
        ("state", 512, LayerGroup(span=32, num_needed=1)),
    ],
)
def test_a_specs_group_says_what_it_needs(group: str, block_tokens: int, expected: LayerGroup) -> None:
    spec = replace(SPEC, group=group, block_tokens=block_tokens, hash=HashScheme(block_tokens=16))

    assert LayerGroup.of(spec) == expected


@pytest.mark.parametrize("group", ["", "sliding", "window", "window:", "window:0", "window:-1", "full:2", "state "])
def test_a_group_that_says_nothing_is_refused(group: str) -> None:
    with pytest.raises(SpecMismatch, match="group:") as caught:
        LayerGroup.of(replace(SPEC, group=group))
    assert caught.value.fields["field"] == "group"


def test_what_is_needed_at_the_end_of_a_prefix() -> None:
    window, state = LayerGroup(num_needed=3), LayerGroup(span=4, num_needed=1)

    assert [FULL.needed(0, 8), window.needed(0, 8), state.needed(0, 8)] == [range(8), range(5, 8), range(1, 2)]
    assert [FULL.needed(6, 8), window.needed(6, 8), state.needed(4, 8)] == [range(6, 8), range(6, 8), range(1, 2)]
    assert window.needed(0, 2) == range(2)
    hashes = [bytes([i]) for i in range(8)]
    assert window.keys(hashes, range(5, 8)) == hashes[5:]
    assert state.keys(hashes, range(2)) == [hashes[3], hashes[7]]


groups = st.builds(
    LayerGroup, span=st.sampled_from([1, 1, 2, 3]), num_needed=st.sampled_from([FULL.num_needed, 0, 1, 2, 3, 5])
)
holes = st.sets(st.integers(0, MAX_BLOCKS - 1), max_size=4)


@given(st.lists(st.tuples(groups, holes), min_size=1, max_size=4), st.integers(0, 3), st.integers(0, MAX_BLOCKS))
def test_the_fold_is_the_longest_prefix_that_all_support(
    drawn: list[tuple[LayerGroup, set[int]]], first: int, length: int
) -> None:
    model = [group for group, _ in drawn]
    alignment = math.lcm(*(group.span for group in model))
    first *= alignment
    here = [set(range(MAX_BLOCKS)) - missing for _, missing in drawn]
    lookup = Lookup(here)

    found = longest_prefix(model, first, length, lookup)

    supported = [
        n
        for n in range(first + 1, length + 1)
        if n % alignment == 0
        and all(mine.issuperset(group.needed(first, n)) for group, mine in zip(model, here, strict=True))
    ]
    assert found == max(supported, default=first)
    assert all(count == 1 for count in lookup.asked.values())


def test_a_hit_costs_one_question_for_each_group_and_a_hole_one_more() -> None:
    model = [FULL, LayerGroup(num_needed=3), LayerGroup(num_needed=2)]
    all_here = [set(range(8)) for _ in model]

    hit = Lookup(all_here)
    assert longest_prefix(model, 0, 8, hit) == 8
    assert hit.asked == {(number, "run"): 1 for number in range(3)}

    hole = Lookup([all_here[0], all_here[1] - {6}, all_here[2]])
    assert longest_prefix(model, 0, 8, hole) == 6
    asked_twice = {(number, kind): 1 for number in (0, 1) for kind in ("run", "each")}
    assert hole.asked == asked_twice | {(2, "run"): 1}, "group 2 was asked about the shorter prefix only"
