"""The slab: copies of hot blocks in device memory that the engines of one GPU share.

                 second read: a slot to fill          Release says that it was filled
    RAM READY  -------------------------->  WRITING  --------------------------------->  READY
                                                                                            | read by others' leases,
                                                     RAM gives the block up, no room <------+ before the arena

A copy here is one more beside that in RAM, never the only one: a block whose copy here cannot be read is read from the arena,
under the same lease. So the slab needs no verbs of its own. Acquire grants a read lease, and with it, for each block, where its
copy in the slab is to be read, or is to be made once the load is over; Release says which were made. Engines copy; nothing is
copied here. A pin keeps a block in RAM, and not here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.core.blocks import SlotArrays
from kvstore.core.errors import ProtocolError
from kvstore.core.plans import SlabGrant, SlabUse
from kvstore.core.ports import SlotSpace
from kvstore.eviction import LeafLru
from kvstore.index import NO_PARENT, NO_ROWS, BlockIndex, Namespace, Rows
from kvstore.inventory import Inventory
from kvstore.placements import ARRIVING, LEAVING, NONE, READY, WRITING, PlacementTable

SLAB = "slab"

_HOT_HITS = 2  # reads, the present one among them: what is read a second time may be read a third time
_MAX_FILL_FRACTION = 0.25
"""Of the slab, that one lease may fill, so that a long prompt does not push out all others; and that may be in limbo, so that an
engine that stands still does not take it all: beyond it nothing is filled."""


class _Held(NamedTuple):
    """What a lease has of the slab."""

    grant: SlabGrant
    read: Rows
    fill: Rows


class Slab:
    """Loop thread only. `pinned` are the copies in RAM. Leases are the store's, by id; each ends here too, by `end`."""

    def __init__(self, index: BlockIndex, pinned: PlacementTable, slots: SlotSpace, counters: dict[str, int]) -> None:
        self._blocks = Inventory(SLAB, index, slots, LeafLru, None, pins=False)
        self._index = index
        self._pinned = pinned
        self._counters = counters
        self._held: dict[int, _Held] = {}  # by lease
        self._limbo: dict[int, SlotArrays] = {}  # by lease that expired: what it was to fill, and may be filling yet

    @property
    def blocks(self) -> Inventory:
        """The copies here, with a place for every row that the index has now."""
        self._blocks.table.grow()
        return self._blocks

    def grant(self, lease_id: int, entry: Namespace, rows: Rows) -> SlabGrant:
        """For a live read lease on `rows`: which of them to read here, and which to copy here. Asked again it answers alike."""
        if lease_id in self._held:
            return self._held[lease_id].grant
        table = self.blocks.table
        uses = np.full(len(rows), SlabUse.NONE, np.uint8)
        uses[(table.state[rows] == READY) & (self._pinned.state[rows] == READY)] = SlabUse.READ
        read = rows[uses == SlabUse.READ]
        wanted = np.flatnonzero(
            (table.state[rows] == NONE)
            & np.isin(self._pinned.state[rows], (READY, ARRIVING))
            & (self._index.hits[rows] >= _HOT_HITS)
        )
        most_bytes = int(_MAX_FILL_FRACTION * self.blocks.slots.capacity_bytes)
        wanted = wanted[: most_bytes // entry.slot_nbytes if self.blocks.slots.limbo_bytes <= most_bytes else 0]
        if len(wanted):
            evicted = self.blocks.make_room(entry, len(wanted), read)
            self._counters["slab_evicted_blocks_total"] += evicted.num_blocks
            wanted = wanted[: self.blocks.slots.num_free(entry.slot_nbytes)]
        if len(wanted):
            self.blocks.place(entry, rows[wanted])
            uses[wanted] = SlabUse.FILL
        self.blocks.ref(read)
        self._counters["slab_read_blocks_total"] += len(read)
        grant = SlabGrant(uses.tobytes(), table.slots(rows[uses != SlabUse.NONE]))
        if len(grant.slots.offsets):
            self._held[lease_id] = _Held(grant, read, rows[wanted])
        return grant

    def filled(self, lease_id: int, which: bytes) -> None:
        """A live lease ends well: `which` says of each block that was to be copied here, in order, whether (1) it was. Raises
        ProtocolError when it does not say so of each."""
        fill = self._held[lease_id].fill if lease_id in self._held else NO_ROWS
        if len(which) != len(fill):
            raise ProtocolError(
                f"filled: {len(which)} bytes; lease {lease_id} was to fill {len(fill)} slots of the slab, say it of each",
                field="filled",
                value=len(which),
            )
        good = np.frombuffer(which, np.uint8) == 1
        good &= (self.blocks.table.state[fill] == WRITING) & (self._pinned.state[fill] == READY)
        self.blocks.publish(fill[good])
        self._counters["slab_filled_blocks_total"] += int(np.count_nonzero(good))

    def expire(self, lease_id: int) -> None:
        """The lease has no rights any more, but its holder may still read, and write, what it was granted."""
        held = self._held.get(lease_id)
        if held is None or not len(held.fill):
            return
        self._limbo[lease_id] = self.blocks.table.slots(held.fill)
        self.blocks.to_limbo(held.fill)
        self._held[lease_id] = held._replace(fill=NO_ROWS)

    def end(self, lease_id: int) -> None:
        """Its holder touches nothing of it any more."""
        limbo = self._limbo.pop(lease_id, None)
        if limbo is not None:
            self.blocks.slots.free_many(limbo)
        held = self._held.pop(lease_id, None)
        if held is not None:
            self.blocks.discard(self._unfilled(held.fill))
            self.blocks.unref(held.read)

    def drop(self, entry: Namespace, rows: Rows) -> None:
        """As Inventory.drop. Before RAM drops them."""
        self.blocks.drop(entry, rows)

    def forget(self, entry: Namespace, keys: Sequence[bytes]) -> None:
        """RAM has given these up."""
        rows = self._index.find_all(entry, keys)
        rows = rows[rows != NO_PARENT]
        table = self.blocks.table
        ready = rows[table.state[rows] == READY]
        in_use = table.refs[ready] > 0
        table.move(ready[in_use], READY, LEAVING)
        self.blocks.discard(ready[~in_use])

    def check(self) -> None:
        """A copy here is beside one in RAM (I4: or in use and not given to anybody any more); users, and slots in limbo."""
        self.blocks.check()
        table = self.blocks.table
        assert (self._pinned.state[: len(table.state)][table.state == READY] == READY).all()
        refs = np.zeros(len(table.refs), np.int64)
        for held in self._held.values():
            np.add.at(refs, held.read, 1)
            unfilled = self._unfilled(held.fill)
            refs[unfilled] += 1
            assert np.isin(table.state[held.read], (READY, LEAVING)).all()
            used = np.frombuffer(held.grant.uses, np.uint8)
            slots = held.grant.slots
            of_reads = used[used != SlabUse.NONE] == SlabUse.READ
            assert (table.offset[held.read] == slots.offsets[of_reads]).all()  # I4
            assert (table.generation[held.read] == slots.generations[of_reads]).all()  # I7
        assert (refs == table.refs).all()
        num_limbo = sum(len(slots.offsets) for slots in self._limbo.values())
        assert (self.blocks.slots.limbo_bytes > 0) == (num_limbo > 0)

    def _unfilled(self, fill: Rows) -> Rows:
        """Those that were not published; what was dropped meanwhile among them."""
        return fill[np.isin(self.blocks.table.state[fill], (WRITING, LEAVING))]
