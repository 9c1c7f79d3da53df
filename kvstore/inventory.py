"""The blocks of the pinned tier: index, placements, slots and eviction order, changed together."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import PlacementState
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.limits import EVICTION_SLICE_BLOCKS
from kvstore.core.plans import TIERS
from kvstore.core.ports import SlotSpace
from kvstore.eviction import EvictionPolicy
from kvstore.index import NO_PARENT, BlockIndex, Namespace, Rows
from kvstore.placements import LEAVING, READY, WRITING, PlacementTable


class Inventory:
    """Moves of blocks between their states, with everything that follows from a move: slots, ghosts, events.

    Speaks of rows, not of keys or leases. Between calls I1 to I3 hold. Rows of a call belong to one namespace and come
    in prefix order. Reports a block when it becomes READY and when it can no longer be found.
    """

    def __init__(
        self,
        slots: SlotSpace,
        make_policy: Callable[[BlockIndex, PlacementTable], EvictionPolicy],
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self.slots = slots
        self.index = BlockIndex()
        self.table = PlacementTable(TIERS[0], self.index)
        self.policy = make_policy(self.index, self.table)
        self._on_event = on_event

    def ready_prefix(self, entry: Namespace, keys: Sequence[bytes]) -> Rows:
        """Rows of the longest READY prefix (I1)."""
        rows = self.index.find_prefix(entry, keys)
        ready = self.table.state[rows] == READY
        return rows if ready.all() else rows[: int(ready.argmin())]

    def num_ready(self, entry: Namespace) -> int:
        """READY blocks of a namespace."""
        return self.table.counts[entry.number][READY]

    def make_room(self, entry: Namespace, count: int, needed: Rows) -> int:
        """Evict the coldest leaves until `count` more blocks fit or nothing is left to evict; how many were evicted.

        Leaves of other sizes go too when they are the coldest: that does not help at once, but empties a segment in the
        end, so that a model that comes later is not starved by one that is gone. `needed` rows are kept. Rows of
        ghosts may vanish: look keys up again when anything was evicted.
        """
        self.table.refs[needed] += 1
        evicted: dict[int, list[bytes]] = {}
        while (missing := count - self.slots.num_free(entry.slot_nbytes)) > 0:
            if not self._evict_slice(min(missing, EVICTION_SLICE_BLOCKS), entry.slot_nbytes, evicted):
                break
        self.table.refs[needed] -= 1
        self._offer_leaves(needed)
        for number, hashes in evicted.items():
            self._emit_removed(self.index.namespaces[number], tuple(hashes), RemovalReason.EVICTED)
        return sum(len(hashes) for hashes in evicted.values())

    def place(
        self, entry: Namespace, keys: Sequence[bytes], rows: Rows, parent_row: int, wanted: NDArray[np.int64]
    ) -> Rows:
        """NONE -> WRITING for `keys[wanted]`; returns the rows of all keys. -1 in `rows` means a key without a row yet."""
        unknown = np.flatnonzero(rows == NO_PARENT)
        rows = rows.copy()
        rows[unknown] = self.index.new_rows(len(unknown))
        self.table.grow()
        parents = np.append(parent_row, rows[:-1])
        self.index.add(entry, [keys[i] for i in unknown.tolist()], parents[unknown], rows[unknown])
        self.table.place(rows[wanted], self.slots.reserve_many(entry.slot_nbytes, len(wanted)))
        return rows

    def publish(self, rows: Rows) -> None:
        """WRITING -> READY; the writer's ref ends."""
        self.table.move(rows, WRITING, READY)
        self.table.refs[rows] -= 1
        self._offer_leaves(rows)
        self._emit_stored(rows)

    def discard(self, rows: Rows) -> None:
        """WRITING or LEAVING -> NONE: nobody uses them any more, their slots are free."""
        self.slots.free_many(self.table.slots(rows))
        for row in rows[::-1].tolist():
            self._unplace(row)

    def to_limbo(self, rows: Rows) -> None:
        """WRITING or LEAVING -> NONE: their writer may still write, so their slots go to limbo."""
        for row in rows[::-1].tolist():
            self.slots.to_limbo(self.table.extent(row))
            self._unplace(row)

    def ref(self, rows: Rows) -> None:
        """One more reader of READY blocks; keeps them from eviction (I4)."""
        assert (self.table.state[rows] == READY).all()
        self.table.refs[rows] += 1
        self.index.hits[rows] += 1

    def unref(self, rows: Rows) -> None:
        """One reader less; a LEAVING block goes with its last."""
        table = self.table
        table.refs[rows] -= 1
        unused = rows[table.refs[rows] == 0]
        self.discard(unused[table.state[unused] == LEAVING])
        self._offer_leaves(unused)

    def drop(self, entry: Namespace, rows: Rows) -> int:
        """Take back READY and WRITING blocks among `rows`, which has every descendant of its members; how many.

        READY without a reader is gone; with one, and WRITING, it is LEAVING until its last user ends.
        """
        table = self.table
        ready = rows[table.state[rows] == READY]
        writing = rows[table.state[rows] == WRITING]
        hashes = tuple([self.index.keys[row] for row in ready.tolist()])
        table.move(ready[table.refs[ready] > 0], READY, LEAVING)
        table.move(writing, WRITING, LEAVING)
        self._remove_subtrees(rows, gone=ready[table.state[ready] == READY])
        self._emit_removed(entry, hashes, RemovalReason.DROPPED)
        return len(ready) + len(writing)

    def check(self) -> None:
        """I2, I3, and what each part asserts of itself."""
        for part in (self.slots, self.index, self.table, self.policy):
            part.check()
        placed = sum(self.table.num_bytes(state) for state in PlacementState)
        assert placed == self.slots.reserved_bytes

    def _evict_slice(self, count: int, slot_nbytes: int, evicted: dict[int, list[bytes]]) -> int:
        """Evict up to `count` blocks with slots of that size, and stop behind one of another: its room must be looked at."""
        index = self.index
        victims: list[int] = []
        while len(victims) < count:
            row = self.policy.next_victim()
            if row is None:
                break
            number = index.namespace_at[row]
            evicted.setdefault(number, []).append(index.keys[row])
            victims.append(row)
            self._unplace(row)
            if index.namespaces[number].slot_nbytes != slot_nbytes:
                break
        self.slots.free_many(self.table.slots(np.array(victims, np.int64)))
        return len(victims)

    def _offer_leaves(self, rows: Rows) -> None:
        for row in rows[self.table.children[rows] == 0].tolist():
            self.policy.offer(row)

    def _unplace(self, row: int) -> None:
        leaf = self.table.unplace(row)
        self.index.forget(row)
        if leaf != NO_PARENT:
            self.policy.offer(leaf)

    def _remove_subtrees(self, rows: Rows, gone: Rows) -> None:
        """Free `gone`, and forget those of `rows` with no copy left at or below them. Fast for a million rows."""
        index, table = self.index, self.table
        self.slots.free_many(table.slots(gone))
        dead = self._without_survivors(rows, gone)
        inside = np.zeros(index.capacity, np.bool_)
        inside[rows] = True
        parents = index.parent[dead]
        tops = dead[(parents != NO_PARENT) & ~inside[parents]]
        outer = index.parent[tops].tolist()
        for leaf in table.unplace_subtrees(gone, dead, tops):
            self.policy.offer(leaf)
        index.forget_subtrees(dead)
        for row in outer:
            index.forget(row)

    def _without_survivors(self, rows: Rows, gone: Rows) -> Rows:
        """Those of `rows` with no copy at or below them once `gone` is gone."""
        index = self.index
        survives = np.zeros(index.capacity, np.bool_)
        placed = self.table.state[rows] != 0
        for leaving in rows[placed & ~np.isin(rows, gone)].tolist():
            row = leaving
            while row != NO_PARENT and not survives[row]:
                survives[row] = True
                row = index.parent_at[row]
        return rows[~survives[rows]]

    def _emit_stored(self, rows: Rows) -> None:
        """One event for each run of blocks that follow each other."""
        if self._on_event is None or not len(rows):
            return
        index = self.index
        entry = index.namespace_of(int(rows[0]))
        breaks = np.flatnonzero(index.parent[rows[1:]] != rows[:-1]) + 1
        for run in np.split(rows, breaks):
            parent = index.parent_at[int(run[0])]
            hashes = tuple([index.keys[row] for row in run.tolist()])
            nbytes = len(hashes) * entry.spec.block_nbytes
            parent_hash = b"" if parent == NO_PARENT else index.keys[parent]
            self._on_event(BlockStored(entry.namespace, self.table.tier, parent_hash, hashes, nbytes))

    def _emit_removed(self, entry: Namespace, hashes: tuple[bytes, ...], reason: RemovalReason) -> None:
        if self._on_event is not None and hashes:
            nbytes = len(hashes) * entry.spec.block_nbytes
            self._on_event(BlockRemoved(entry.namespace, self.table.tier, hashes, nbytes, reason))
