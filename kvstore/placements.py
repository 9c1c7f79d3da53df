"""Where in one tier blocks lie: a column table by row of the index."""

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import Extent, PlacementState, SlotArrays
from kvstore.index import NO_PARENT, BlockIndex, Rows, grown

NONE, WRITING, READY, LEAVING = (int(state) for state in PlacementState)
"""PlacementState as plain ints: comparing a column with an enum member is five times slower."""


class PlacementTable:
    """State, slot and users of each row's copy in a tier (I2: at most one).

        row       | state | offset | generation | refs | children
        0         | READY | 8192   | 3          | 2    | 1

    `refs` counts who keeps the copy: leases that read it, ended read leases not yet confirmed, or its one writer. `children`
    counts the row's children that are alive in this tier: placed in it, or a ghost with somebody alive below. A leaf is
    a row without any; evicting leaves only therefore never takes the head of a prefix before its tail.

    Another tier is another table; nothing here knows which tier it is.
    """

    def __init__(self, tier: str, index: BlockIndex) -> None:
        self.tier = tier
        self.counts: list[list[int]] = []  # by namespace number: copies in each state
        self._index = index
        self.state = np.empty(0, np.uint8)
        self.offset = np.empty(0, np.int64)
        self.generation = np.empty(0, np.uint64)
        self.refs = np.empty(0, np.int32)
        self.children = np.empty(0, np.int32)
        self.grow()

    def grow(self) -> None:
        """Follow the index's capacity; called after rows were added."""
        capacity = self._index.capacity
        if len(self.state) < capacity:
            self.state = grown(self.state, capacity)
            self.offset = grown(self.offset, capacity)
            self.generation = grown(self.generation, capacity)
            self.refs = grown(self.refs, capacity)
            self.children = grown(self.children, capacity)
            self.state_at = self.state.data
            self.offset_at = self.offset.data
            self.generation_at = self.generation.data
            self.refs_at = self.refs.data
            self.children_at = self.children.data
        while len(self.counts) < len(self._index.namespaces):
            self.counts.append([0] * len(PlacementState))

    def num_blocks(self, state: int) -> int:
        """Copies in that state."""
        return sum(count[state] for count in self.counts)

    def num_bytes(self, state: int) -> int:
        """Bytes, by slot, of the copies in that state."""
        namespaces = self._index.namespaces
        return sum(count[state] * entry.slot_nbytes for count, entry in zip(self.counts, namespaces, strict=False))

    def is_evictable(self, row: int) -> bool:
        """READY, used by nobody, and nothing below it lives in this tier."""
        return self.state_at[row] == READY and not self.refs_at[row] and not self.children_at[row]

    def slots(self, rows: Rows) -> SlotArrays:
        """The slots of placed rows."""
        return SlotArrays(self.offset[rows], self.generation[rows])

    def extent(self, row: int) -> Extent:
        """The slot of a placed row."""
        return Extent(self.offset_at[row], self._index.namespace_of(row).slot_nbytes, self.generation_at[row])

    def place(self, rows: Rows, slots: SlotArrays) -> None:
        """NONE -> WRITING, for rows of one namespace; one ref each, the writer's."""
        assert not self.state[rows].any()
        fresh = rows[self.children[rows] == 0]
        self.state[rows] = WRITING
        self.offset[rows] = slots.offsets
        self.generation[rows] = slots.generations
        self.refs[rows] = 1
        self._index.num_placed[rows] += 1
        self._count(rows, WRITING, len(rows))
        parents = self._index.parent[fresh]
        parents = parents[parents != NO_PARENT]
        woken = parents[(self.state[parents] == NONE) & (self.children[parents] == 0)]
        np.add.at(self.children, parents, 1)
        for row in set(woken.tolist()):
            self._count_up(row)

    def move(self, rows: Rows, old: int, new: int) -> None:
        """Change the state of rows of one namespace, all now in `old`."""
        assert (self.state[rows] == old).all()
        self.state[rows] = new
        self._count(rows, old, -len(rows))
        self._count(rows, new, len(rows))

    def unplace(self, row: int) -> int:
        """Any state -> NONE. Returns the placed ancestor that has become a leaf by it, or NO_PARENT."""
        index = self._index
        self.counts[index.namespace_at[row]][self.state_at[row]] -= 1
        self.state_at[row] = NONE
        self.refs_at[row] = 0
        index.num_placed_at[row] -= 1
        return NO_PARENT if self.children_at[row] else self._count_down(row)

    def unplace_subtrees(self, gone: Rows, dead: Rows, tops: Rows) -> list[int]:
        """Any state -> NONE for `gone`, rows of one namespace. Returns the placed ancestors that became leaves by it.

        `dead` are rows with nothing alive at or below them afterwards; `tops` those of them whose parent lies outside the
        subtrees that are being removed.
        """
        alive = (self.state[dead] != NONE) | (self.children[dead] > 0)
        for state in (WRITING, READY, LEAVING):
            self._count(gone, state, -int(np.count_nonzero(self.state[gone] == state)))
        self.state[gone] = NONE
        self.refs[gone] = 0
        self._index.num_placed[gone] -= 1
        inner = np.setdiff1d(dead[alive], tops, assume_unique=True)
        parents = self._index.parent[inner]
        np.subtract.at(self.children, parents[parents != NO_PARENT], 1)
        leaves = [self._count_down(row) for row in np.intersect1d(tops, dead[alive], assume_unique=True).tolist()]
        return [leaf for leaf in leaves if leaf != NO_PARENT]

    def check(self) -> None:
        """I2 and the counts, from scratch. A free row has no copy; copies never share a slot."""
        index = self._index
        placed = np.flatnonzero(self.state)
        assert len(np.unique(self.offset[placed])) == len(placed)
        assert (self.refs >= 0).all()
        assert not self.refs[self.state == NONE].any()
        assert (self.refs[self.state == WRITING] == 1).all()
        assert (self.refs[self.state == LEAVING] > 0).all()
        assert all(index.keys[row] for row in placed.tolist())
        for number, count in enumerate(self.counts):
            states = self.state[placed][index.namespace[placed] == number]
            assert count[1:] == np.bincount(states, minlength=len(PlacementState)).tolist()[1:]
        children = np.zeros(len(self.children), np.int64)
        for row in self._alive_rows():
            parent = index.parent_at[row]
            if parent != NO_PARENT:
                children[parent] += 1
        assert (children == self.children).all()

    def _alive_rows(self) -> set[int]:
        alive: set[int] = set()
        for placed in np.flatnonzero(self.state).tolist():
            row = placed
            while row != NO_PARENT and row not in alive:
                alive.add(row)
                row = self._index.parent_at[row]
        return alive

    def _count_down(self, row: int) -> int:
        """`row` has nothing alive any more: tell its ancestors, up to the first that still has. See `unplace`."""
        row = self._index.parent_at[row]
        while row != NO_PARENT:
            self.children_at[row] -= 1
            if self.state_at[row] != NONE:
                return NO_PARENT if self.children_at[row] else row
            if self.children_at[row]:
                return NO_PARENT
            row = self._index.parent_at[row]
        return NO_PARENT

    def _count_up(self, row: int) -> None:
        """`row`, which had nothing alive, now has: tell its ancestors up to the first that was alive before."""
        row = self._index.parent_at[row]
        while row != NO_PARENT:
            self.children_at[row] += 1
            if self.state_at[row] != NONE or self.children_at[row] > 1:
                return
            row = self._index.parent_at[row]

    def _count(self, rows: NDArray[np.int64], state: int, change: int) -> None:
        if len(rows):
            self.counts[self._index.namespace_at[int(rows[0])]][state] += change
