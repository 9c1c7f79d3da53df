"""LeafLru in lockstep with a search over all rows, on random trees far larger than the store's model test uses."""

import random

import numpy as np
import pytest

from kvstore.core.blocks import SlotArrays
from kvstore.core.keys import KVSpec
from kvstore.eviction import LeafLru
from kvstore.index import NO_PARENT, BlockIndex
from kvstore.placements import LEAVING, READY, WRITING, PlacementTable


class Tree:
    """Rows in one tier, grown and used at random; `coldest` is the oracle."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.index = BlockIndex()
        self.table = PlacementTable("pinned", self.index)
        self.namespace = self.index.open_namespace(b"n" * 16, KVSpec(**SHAPE), "", 4096)
        self.table.grow()
        self.policy = LeafLru(self.index, self.table)
        self.num_stored = 0

    def store(self, parent: int, count: int) -> None:
        rows = self.index.new_rows(count)
        self.table.grow()
        numbers = np.arange(self.num_stored, self.num_stored + count)
        self.num_stored += count
        parents = np.append(parent, rows[:-1])
        self.index.add(self.namespace, [b"%016d" % number for number in numbers], parents, rows)
        self.table.place(rows, SlotArrays(numbers * 4096, numbers.astype(np.uint64)))
        self.index.touch(rows)
        self.table.move(rows, WRITING, READY)
        self.table.refs[rows] = 0
        for row in rows.tolist():
            self.policy.offer(row)

    def known(self) -> list[int]:
        return list(self.namespace.rows.values())

    def path_to(self, row: int) -> np.ndarray:
        path = []
        while row != NO_PARENT:
            path.append(row)
            row = self.index.parent_at[row]
        return np.array(path[::-1])

    def coldest(self) -> int | None:
        parents = {self.index.parent_at[row] for row in self.known()}
        leaves = [
            row
            for row in self.known()
            if row not in parents and self.table.state_at[row] == READY and not self.table.refs_at[row]
        ]
        return min(leaves, key=lambda row: self.index.last_use_at[row], default=None)

    def remove(self, row: int) -> None:
        leaves = self.table.unplace(row)
        self.index.forget(row)
        for leaf in leaves:
            self.policy.offer(leaf)

    def check(self) -> None:
        self.index.check()
        self.table.check()
        self.policy.check()


SHAPE = {"weights": "w", "num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "dtype": "int8"}


@pytest.mark.parametrize("seed", range(5))
def test_victims_are_those_of_a_search_over_all_rows(seed: int):
    tree = Tree(seed)
    leased: list[int] = []
    num_victims = 0
    for step in range(1500):
        action = tree.draw.choices(["store", "use", "lease", "release", "evict", "leave"], [5, 8, 3, 3, 12, 0.2])[0]
        known = tree.known()
        if action == "store" or not known:
            parent = tree.draw.choice([NO_PARENT, *tree.draw.choices(known, k=2)]) if known else NO_PARENT
            tree.store(parent, tree.draw.randint(1, 12))
        elif action == "use":
            tree.index.touch(tree.path_to(tree.draw.choice(known)))
        elif action == "lease":
            leased.append(tree.draw.choice(known))
            tree.table.refs_at[leased[-1]] += 1
        elif action == "release" and leased:
            row = leased.pop(tree.draw.randrange(len(leased)))
            tree.table.refs_at[row] -= 1
            if tree.table.state_at[row] == LEAVING and not tree.table.refs_at[row]:
                tree.remove(row)
            else:
                tree.policy.offer(row)
        elif action == "leave" and leased and tree.table.state_at[leased[0]] == READY:
            tree.table.move(np.array(leased[:1]), READY, LEAVING)
        elif action == "evict":
            expected = tree.coldest()
            victim = tree.policy.next_victim()
            assert victim == expected
            if victim is not None:
                tree.remove(victim)
                num_victims += 1
        if step % 100 == 0:
            tree.check()
    assert num_victims > 400
    for row in leased:
        tree.table.refs_at[row] = 0
        tree.policy.offer(row)
    while (expected := tree.coldest()) is not None:
        assert tree.policy.next_victim() == expected
        tree.remove(expected)
    assert tree.policy.next_victim() is None
