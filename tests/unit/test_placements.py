"""Two tiers over one tree: a second table needs no second class, and each tier has leaves of its own."""

import numpy as np
import pytest

from kvstore.core.blocks import SlotArrays
from kvstore.core.keys import KVSpec
from kvstore.index import NO_PARENT, BlockIndex
from kvstore.placements import READY, WRITING, PlacementTable


class TwoTiers:
    """A chain of `count` rows 0, 1, 2..., placed nowhere yet."""

    def __init__(self, count: int) -> None:
        self.index = BlockIndex()
        self.pinned, self.nvme = PlacementTable("pinned", self.index), PlacementTable("nvme", self.index)
        spec = KVSpec(weights="w", num_layers=1, num_kv_heads=2, head_dim=64, dtype="int8")
        self.namespace = self.index.open_namespace(b"n" * 16, spec, "", 4096)
        self.rows = self.index.new_rows(count)
        for table in (self.pinned, self.nvme):
            table.grow()
        keys = [b"%016d" % row for row in self.rows.tolist()]
        self.index.add(self.namespace, keys, np.append(NO_PARENT, self.rows[:-1]), self.rows)

    def place(self, table: PlacementTable, *rows: int) -> None:
        numbers = np.array(rows, np.int64)
        table.place(numbers, SlotArrays(numbers * 4096, numbers.astype(np.uint64)))
        table.move(numbers, WRITING, READY)
        table.refs[numbers] = 0

    def remove(self, table: PlacementTable, row: int) -> list[int]:
        leaves = table.unplace(row)
        self.index.forget(row)
        return leaves

    def check(self) -> None:
        self.index.check()
        self.pinned.check()
        self.nvme.check()


def test_a_leaf_in_one_tier_may_have_children_in_another():
    tiers = TwoTiers(3)
    tiers.place(tiers.pinned, 0, 1)
    tiers.place(tiers.nvme, 0, 1, 2)
    tiers.check()
    assert [tiers.pinned.is_evictable(row) for row in range(3)] == [False, True, False]
    assert [tiers.nvme.is_evictable(row) for row in range(3)] == [False, False, True]


def test_a_row_stays_while_any_tier_has_it_or_a_descendant():
    tiers = TwoTiers(3)
    tiers.place(tiers.pinned, 0, 1)
    tiers.place(tiers.nvme, 2)
    tiers.check()

    assert tiers.remove(tiers.pinned, 1) == [0]
    assert tiers.remove(tiers.pinned, 0) == []
    tiers.check()
    assert tiers.index.num_blocks == 3

    tiers.remove(tiers.nvme, 2)
    assert tiers.index.num_blocks == 0
    tiers.check()


def test_a_block_placed_far_below_others_keeps_them_from_being_leaves_across_the_gap():
    """0 in pinned, 1 and 2 only in nvme, 3 in pinned: evicting 0 before 3 would take a head before its tail."""
    tiers = TwoTiers(4)
    tiers.place(tiers.nvme, 1, 2)
    tiers.place(tiers.pinned, 0)
    assert tiers.pinned.is_evictable(0)

    tiers.place(tiers.pinned, 3)

    tiers.check()
    assert not tiers.pinned.is_evictable(0)
    assert tiers.remove(tiers.pinned, 3) == [2, 1, 0]
    assert tiers.pinned.is_evictable(0)
    tiers.check()


@pytest.mark.parametrize("order", [(0, 3, 5), (5, 3, 0), (3, 5, 0), (3, 0, 5)])
def test_counts_are_right_whatever_the_order_in_which_a_chain_fills(order: tuple[int, ...]):
    tiers = TwoTiers(6)
    tiers.place(tiers.nvme, *range(6))
    for row in order:
        tiers.place(tiers.pinned, row)
        tiers.check()
    for row in order:
        tiers.pinned.unplace(row)
        tiers.check()


def test_a_fork_inside_the_gap_counts_once_for_those_above_it():
    """0-1-2-3 and 1-4-5 in nvme; 0, 3 and 5 in pinned: 0 has one child that is alive there, by two descendants."""
    tiers = TwoTiers(4)
    fork = tiers.index.new_rows(2)
    tiers.index.add(tiers.namespace, [b"fork", b"end."], np.array([1, fork[0]]), fork)
    tiers.place(tiers.nvme, *range(6))
    tiers.place(tiers.pinned, 0)

    tiers.place(tiers.pinned, 3)
    tiers.place(tiers.pinned, 5)

    tiers.check()
    assert tiers.remove(tiers.pinned, 3) == [2]
    tiers.check()
    assert tiers.remove(tiers.pinned, 5) == [4, 1, 0]
    tiers.check()


def test_use_makes_a_parent_more_recent_than_its_children():
    tiers = TwoTiers(3)
    tiers.place(tiers.pinned, 0, 1, 2)
    tiers.index.touch(tiers.rows)
    first, second, third = tiers.index.last_use[tiers.rows].tolist()
    assert first > second > third
    tiers.index.touch(tiers.rows[:1])
    assert tiers.index.last_use_at[0] > first


def test_columns_grow_with_the_index_and_keep_what_they_hold():
    tiers = TwoTiers(3)
    tiers.place(tiers.pinned, 0, 1, 2)
    capacity = tiers.index.capacity

    rows = tiers.index.new_rows(capacity)
    tiers.pinned.grow()
    tiers.nvme.grow()
    keys = [b"%016d" % row for row in rows.tolist()]
    tiers.index.add(tiers.namespace, keys, np.append(2, rows[:-1]), rows)
    tiers.place(tiers.pinned, *rows.tolist())

    assert tiers.index.capacity == 2 * capacity
    assert tiers.pinned.num_blocks(READY) == capacity + 3
    tiers.check()
