"""Where in one tier blocks lie: a column table by row of the index."""

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import Extent, PlacementState, SlotArrays
from kvstore.index import KEPT, NO_PARENT, BlockIndex, Rows, grown

NONE, WRITING, READY, LEAVING, ARRIVING = (int(state) for state in PlacementState)
"""PlacementState as plain ints: comparing a column with an enum member is five times slower."""


class PlacementTable:
    """State, slot and users of each row's copy in a tier (I2: at most one).

        row       | state | offset | generation | refs | children
        0         | READY | 8192   | 3          | 2    | 1

    `refs` counts who keeps the copy: leases that read it, ended read leases not yet confirmed, moves that read it, and its one
    writer. `children` counts the row's children that are alive in this tier: placed in it, or a ghost with somebody alive
    below. A leaf is a row without any; evicting leaves only therefore never takes the head of a prefix before its tail.

    Another tier is another table. `upper`, when there is one, is the table of a faster tier whose blocks rely on ours: the
    last copy of a block does not go while that tier has descendants of it. `pins`: whether pinned blocks stay here.
    """

    def __init__(
        self, tier: str, index: BlockIndex, *, upper: "PlacementTable | None" = None, pins: bool = True
    ) -> None:
        self.tier = tier
        self._kept = KEPT if pins else 0
        self._upper = upper
        self.other: PlacementTable | None = upper  # or the lower one, which makes itself known
        self.shared: list[int] = [0] if upper is None else upper.shared  # one cell for both
        if upper is not None:
            upper.other = self
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

    @property
    def num_shared(self) -> int:
        """Blocks that are READY both here and in the other tier; kept, since counting ten million takes 20 ms."""
        return self.shared[0]

    def num_blocks(self, state: int) -> int:
        """Copies in that state."""
        return sum(count[state] for count in self.counts)

    def num_placed(self) -> int:
        """Copies in any state."""
        return sum(map(sum, self.counts))

    def bytes_by_tenant(self) -> dict[str, int]:
        """Bytes, by slot, of each tenant's copies in any state."""
        held: dict[str, int] = {}
        for count, entry in zip(self.counts, self._index.namespaces, strict=False):
            held[entry.tenant] = held.get(entry.tenant, 0) + sum(count) * entry.slot_nbytes
        return held

    def num_bytes(self, state: int) -> int:
        """Bytes, by slot, of the copies in that state."""
        namespaces = self._index.namespaces
        return sum(count[state] * entry.slot_nbytes for count, entry in zip(self.counts, namespaces, strict=False))

    def is_evictable(self, row: int) -> bool:
        """READY, used by nobody, not pinned, and nothing below it lives in this tier, or only by it in the upper one."""
        if self.state_at[row] != READY or self.refs_at[row] or self.children_at[row]:
            return False
        if self._index.marks_at[row] & self._kept:
            return False
        upper = self._upper
        return upper is None or upper.state_at[row] == READY or not upper.children_at[row]

    def slots(self, rows: Rows) -> SlotArrays:
        """The slots of placed rows."""
        return SlotArrays(self.offset[rows], self.generation[rows])

    def extent(self, row: int) -> Extent:
        """The slot of a placed row."""
        return Extent(self.offset_at[row], self._index.namespace_of(row).slot_nbytes, self.generation_at[row])

    def place(self, rows: Rows, slots: SlotArrays, state: int = WRITING) -> None:
        """NONE -> WRITING, or another state, for rows of one namespace; one ref each, the writer's."""
        assert not self.state[rows].any()
        fresh = rows[self.children[rows] == 0]
        self.state[rows] = state
        self._share(rows, int(state == READY))
        self.offset[rows] = slots.offsets
        self.generation[rows] = slots.generations
        self.refs[rows] = 1
        self._index.num_placed[rows] += 1
        self._count(rows, state, len(rows))
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
        self._share(rows, int(new == READY) - int(old == READY))
        self._count(rows, old, -len(rows))
        self._count(rows, new, len(rows))

    def unplace(self, row: int) -> list[int]:
        """Any state -> NONE. Returns the ancestors that have nothing below them in this tier any more, ghosts among them."""
        index = self._index
        self.counts[index.namespace_at[row]][self.state_at[row]] -= 1
        if self.other is not None and self.state_at[row] == READY == self.other.state_at[row]:
            self.shared[0] -= 1
        self.state_at[row] = NONE
        self.refs_at[row] = 0
        index.num_placed_at[row] -= 1
        return [] if self.children_at[row] else self._count_down(row)

    def unplace_subtrees(self, gone: Rows, dead: Rows, tops: Rows) -> list[int]:
        """Any state -> NONE for `gone`, rows of one namespace. Returns the ancestors outside with nothing below them any more.

        `dead` are rows with nothing alive at or below them afterwards; `tops` those of them whose parent lies outside the
        subtrees that are being removed.
        """
        alive = (self.state[dead] != NONE) | (self.children[dead] > 0)
        for state in (WRITING, READY, LEAVING, ARRIVING):
            self._count(gone, state, -int(np.count_nonzero(self.state[gone] == state)))
        self._share(gone[self.state[gone] == READY], -1)
        self.state[gone] = NONE
        self.refs[gone] = 0
        self._index.num_placed[gone] -= 1
        inner = np.setdiff1d(dead[alive], tops, assume_unique=True)
        parents = self._index.parent[inner]
        np.subtract.at(self.children, parents[parents != NO_PARENT], 1)
        ends = np.intersect1d(tops, dead[alive], assume_unique=True).tolist()
        return [leaf for row in ends for leaf in self._count_down(row)]

    def check(self) -> None:
        """I2 and the counts, from scratch. A free row has no copy; copies never share a slot."""
        index = self._index
        placed = np.flatnonzero(self.state)
        assert len(np.unique(self.offset[placed])) == len(placed)
        assert (self.refs >= 0).all()
        assert not self.refs[self.state == NONE].any()
        if self.other is not None:
            assert self.num_shared == np.count_nonzero((self.state == READY) & (self.other.state == READY))
        assert (self.refs[self.state == WRITING] == 1).all()
        assert (self.refs[self.state == ARRIVING] > 0).all()
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

    def _share(self, rows: NDArray[np.int64], change: int) -> None:
        """So many copies more or less for each of `rows`, of which the other tier may have one too."""
        if change and self.other is not None:
            self.shared[0] += change * int(np.count_nonzero(self.other.state[rows] == READY))

    def _alive_rows(self) -> set[int]:
        alive: set[int] = set()
        for placed in np.flatnonzero(self.state).tolist():
            row = placed
            while row != NO_PARENT and row not in alive:
                alive.add(row)
                row = self._index.parent_at[row]
        return alive

    def _count_down(self, row: int) -> list[int]:
        """`row` has nothing alive any more: tell its ancestors, up to the first that still has. See `unplace`."""
        childless: list[int] = []
        row = self._index.parent_at[row]
        while row != NO_PARENT:
            self.children_at[row] -= 1
            if self.children_at[row]:
                break
            childless.append(row)
            if self.state_at[row] != NONE:
                break
            row = self._index.parent_at[row]
        return childless

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
