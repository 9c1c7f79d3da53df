"""The blocks of one tier: placements, slots and eviction order, changed together."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.core.blocks import PlacementState, SlotArrays
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.limits import EVICTION_SLICE_BLOCKS
from kvstore.core.ports import SlotSpace
from kvstore.eviction import EvictionPolicy, MakePolicy
from kvstore.index import NO_PARENT, BlockIndex, Namespace, Rows
from kvstore.placements import ARRIVING, LEAVING, NONE, READY, WRITING, PlacementTable


class Evicted(NamedTuple):
    """What make_room gave up. `num_lost` of the blocks are in no slower tier."""

    num_blocks: int
    num_lost: int


class Inventory:
    """Moves of blocks between their states in a tier, with everything that follows from a move: slots, ghosts, events.

    Speaks of rows, not of keys or leases. Between calls I1 to I3 hold. Rows of a call belong to one namespace and come
    in prefix order. Reports a block when it becomes READY and when it can no longer be found in the tier.

    `upper` is the faster tier that relies on this one, `pins` likewise (PlacementTable): what happens there may make a block
    here evictable. `release` is told the rows whose slots nobody needs any more, while their keys are still known; without it
    they are free at once.
    """

    def __init__(
        self,
        tier: str,
        index: BlockIndex,
        slots: SlotSpace,
        make_policy: MakePolicy,
        on_event: Callable[[Event], None] | None,
        *,
        upper: "Inventory | None" = None,
        pins: bool = True,
        release: Callable[[Rows], None] | None = None,
    ) -> None:
        self.slots = slots
        self.index = index
        self.table: PlacementTable = PlacementTable(tier, index, upper=upper.table if upper else None, pins=pins)
        self.policy = make_policy(index, self.table)
        self._lower: PlacementTable | None = None
        self._watchers = [self.policy]
        self._release = release or self._free
        self._on_event = on_event
        self.removed = dict.fromkeys(RemovalReason, (0, 0))  # blocks and bytes since start
        if upper is not None:
            upper.rely_on(self.table, self.policy)

    def rely_on(self, lower: PlacementTable, policy: EvictionPolicy) -> None:
        """There is a slower tier below; what changes here may make blocks evictable there."""
        self._lower = lower
        self.tell(policy)

    def tell(self, policy: EvictionPolicy) -> None:
        """Offer to `policy` too what may have become a candidate of it by a change here."""
        self._watchers.append(policy)

    def num_ready(self, entry: Namespace) -> int:
        """READY blocks of a namespace."""
        return self.table.counts[entry.number][READY]

    def make_room(self, entry: Namespace, count: int, needed: Rows) -> Evicted:
        """Evict the coldest leaves until `count` more blocks fit or nothing is left to evict.

        Leaves of other sizes go too when they are the coldest: that does not help at once, but empties a segment in the
        end, so that a model that comes later is not starved by one that is gone. `needed` rows are kept. Rows of
        ghosts may vanish: look keys up again when anything was evicted.
        """
        num_blocks = num_lost = 0
        if count > self.slots.num_free(entry.slot_nbytes):
            self.policy.needs(entry.tenant, count * entry.slot_nbytes, self.slots.capacity_bytes)
        self.table.refs[needed] += 1
        while (missing := count - self.slots.num_free(entry.slot_nbytes)) > 0:
            evicted = self.evict(min(missing, EVICTION_SLICE_BLOCKS), entry.slot_nbytes)
            num_blocks += evicted.num_blocks
            num_lost += evicted.num_lost
            if not evicted.num_blocks:
                break
        self.table.refs[needed] -= 1
        self._offer(needed)
        return Evicted(num_blocks, num_lost)

    def evict(self, count: int, slot_nbytes: int) -> Evicted:
        """Evict up to `count` blocks with slots of that size, and stop behind one of another: its room must be looked at."""
        index = self.index
        victims: list[int] = []
        hashes: dict[int, list[bytes]] = {}
        while len(victims) < count:
            row = self.policy.next_victim()
            if row is None:
                break
            number = index.namespace_at[row]
            hashes.setdefault(number, []).append(index.keys[row])
            victims.append(row)
            self._unplace(row)
            if index.namespaces[number].slot_nbytes != slot_nbytes:
                break
        num_lost = 0
        if self._lower is not None:
            num_lost = int(np.count_nonzero(self._lower.state[victims] == NONE))
        self._leave(victims)
        for number, removed in hashes.items():
            self._emit_removed(index.namespaces[number], tuple(removed), RemovalReason.EVICTED)
        return Evicted(len(victims), num_lost)

    def place(self, entry: Namespace, rows: Rows, state: int = WRITING) -> None:
        """NONE -> WRITING or ARRIVING, in slots that there are; one ref each, the writer's."""
        slots = self.slots.reserve_many(entry.slot_nbytes, len(rows), announced=state == WRITING)
        assert len(slots.offsets) == len(rows)
        self.table.place(rows, slots, state)
        self.policy.stored(rows)

    def restore(self, entry: Namespace, rows: Rows, slots: SlotArrays) -> None:
        """NONE -> READY, where they were before a restart. Their leaves are offered by whoever restores, at the end."""
        self.slots.restore(entry.slot_nbytes, slots)
        self.table.place(rows, slots, READY)
        self.table.refs[rows] -= 1
        self.policy.stored(rows)

    def publish(self, rows: Rows) -> None:
        """WRITING or ARRIVING -> READY; the writer's ref ends."""
        if not len(rows):
            return
        self.table.move(rows, int(self.table.state[rows[0]]), READY)
        self.table.refs[rows] -= 1
        self._offer(rows)
        self._emit_stored(rows)

    def discard(self, rows: Rows) -> None:
        """Any state but READY -> NONE: nobody uses them any more."""
        numbers = rows[::-1].tolist()
        for row in numbers:
            self._unplace(row)
        self._leave(numbers)

    def to_limbo(self, rows: Rows) -> None:
        """Any state -> NONE, but somebody may still touch the slots, so they go to limbo."""
        numbers = rows[::-1].tolist()
        for row in numbers:
            self.slots.to_limbo(self.table.extent(row))
            self._unplace(row)
            self.index.forget(row)

    def lose(self, row: int) -> None:
        """READY or LEAVING -> NONE, whoever uses it: its bytes are gone. The slot stays as it is; the caller knows why."""
        entry, key, found = self.index.namespace_of(row), self.index.keys[row], self.table.state_at[row] == READY
        self._unplace(row)
        self.index.forget(row)
        self._emit_removed(entry, (key,) if found else (), RemovalReason.DAMAGED)

    def offer(self, rows: Rows) -> None:
        """These may have become evictable by something that is no move between states: the end of a pin."""
        self._offer(rows)

    def ref(self, rows: Rows) -> None:
        """One more user of READY or ARRIVING blocks; keeps them from eviction (I4)."""
        self.table.refs[rows] += 1

    def unref(self, rows: Rows) -> None:
        """One user less; a LEAVING block goes with its last."""
        table = self.table
        table.refs[rows] -= 1
        unused = rows[table.refs[rows] == 0]
        self.discard(unused[table.state[unused] == LEAVING])
        self._offer(unused)

    def drop(self, entry: Namespace, rows: Rows) -> None:
        """Take back what `rows`, which have every descendant of their members, have here. Keys stay known: the caller
        forgets them when every tier has dropped.

        READY without a user is gone; with one, and WRITING and ARRIVING, it is LEAVING until its last user ends.
        """
        table, index = self.table, self.index
        ready = rows[table.state[rows] == READY]
        hashes = tuple([index.keys[row] for row in ready.tolist()])
        gone = ready[table.refs[ready] == 0]
        table.move(ready[table.refs[ready] > 0], READY, LEAVING)
        for state in (WRITING, ARRIVING):
            table.move(rows[table.state[rows] == state], state, LEAVING)
        dead = self._without_survivors(rows, gone)
        inside = np.zeros(index.capacity, np.bool_)
        inside[rows] = True
        parents = index.parent[dead]
        tops = dead[(parents != NO_PARENT) & ~inside[parents]]
        self._release(gone)
        for leaf in table.unplace_subtrees(gone, dead, tops):
            self._offer_row(leaf)
        self._emit_removed(entry, hashes, RemovalReason.DROPPED)

    def held_events(self, first_row: int, num_rows: int) -> list[BlockStored]:
        """What is READY among these rows, as if it had just become so."""
        rows = first_row + np.flatnonzero(self.table.state[first_row : first_row + num_rows] == READY)
        return list(self._stored_events(rows)) if len(rows) else []

    def check(self) -> None:
        """I2, I3, and what each part asserts of itself."""
        for part in (self.slots, self.table, self.policy):
            part.check()
        placed = sum(self.table.num_bytes(state) for state in PlacementState if state)
        assert placed == self.slots.reserved_bytes

    def _free(self, rows: Rows) -> None:
        self.slots.free_many(self.table.slots(rows))

    def _leave(self, rows: Sequence[int]) -> None:
        """Rows just unplaced, tail to head: give up their slots, then forget those that nothing keeps."""
        if rows:
            self._release(np.array(rows, np.int64))
            for row in rows:
                self.index.forget(row)

    def _offer(self, rows: Rows) -> None:
        leaf = self.table.children[rows] == 0
        if self._lower is not None:
            leaf |= (self._lower.state[rows] == READY) & (self._lower.children[rows] == 0)
        for row in rows[leaf].tolist():
            self._offer_row(row)

    def _offer_row(self, row: int) -> None:
        for policy in self._watchers:
            policy.offer(row)

    def _unplace(self, row: int) -> None:
        for leaf in self.table.unplace(row):
            self._offer_row(leaf)

    def _without_survivors(self, rows: Rows, gone: Rows) -> Rows:
        """Those of `rows` with no copy here at or below them once `gone` is gone."""
        index = self.index
        survives = np.zeros(index.capacity, np.bool_)
        placed = self.table.state[rows] != NONE
        for leaving in rows[placed & ~np.isin(rows, gone)].tolist():
            row = leaving
            while row != NO_PARENT and not survives[row]:
                survives[row] = True
                row = index.parent_at[row]
        return rows[~survives[rows]]

    def _emit_stored(self, rows: Rows) -> None:
        if self._on_event is not None and len(rows):
            for event in self._stored_events(rows):
                self._on_event(event)

    def _stored_events(self, rows: Rows) -> Iterator[BlockStored]:
        """One for each run of blocks that follow each other."""
        index = self.index
        breaks = np.flatnonzero(index.parent[rows[1:]] != rows[:-1]) + 1
        for run in np.split(rows, breaks):
            parent, entry = index.parent_at[int(run[0])], index.namespace_of(int(run[0]))
            hashes = tuple([index.keys[row] for row in run.tolist()])
            nbytes = len(hashes) * entry.spec.block_nbytes
            parent_hash = b"" if parent == NO_PARENT else index.keys[parent]
            yield BlockStored(entry.namespace, self.table.tier, parent_hash, hashes, nbytes)

    def _emit_removed(self, entry: Namespace, hashes: tuple[bytes, ...], reason: RemovalReason) -> None:
        if not hashes:
            return
        nbytes = len(hashes) * entry.spec.block_nbytes
        num_blocks, total_nbytes = self.removed[reason]
        self.removed[reason] = num_blocks + len(hashes), total_nbytes + nbytes
        if self._on_event is not None:
            self._on_event(BlockRemoved(entry.namespace, self.table.tier, hashes, nbytes, reason))
