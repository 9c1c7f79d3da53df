"""Blocks between RAM and the drives: which are written when, which are read back, what the drives give up.

                    order_reads                              finish: bytes checked
    nvme READY  ------------------>  pinned ARRIVING  ------------------------------>  pinned READY
                    _order_write                             finish: bytes written
    pinned READY ----------------->  nvme WRITING     ------------------------------>  nvme READY, durable soon

Everything here is a decision or the account of one; the I/O is done by whoever takes the orders.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from itertools import repeat
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.budget import WriteBudget
from kvstore.core.blocks import Extent, SlotArrays
from kvstore.core.events import Event
from kvstore.core.limits import (
    DRIVE_RETRY_S,
    EVICTION_SLICE_BLOCKS,
    MAX_TOUCHES_PER_TURN,
    MAX_WRITE_BACKLOG_BLOCKS,
    MAX_WRITES_IN_FLIGHT_BYTES,
    MAX_WRITES_PER_TURN,
    MAX_WRITING_FRACTION,
)
from kvstore.core.moves import BAD_SLOT, DRIVE_SHIFT, BlockRecord, Forget, Move, MoveDone, MoveProblem, Touch, Urgency
from kvstore.core.plans import TIERS
from kvstore.core.ports import DriveSlots
from kvstore.costs import LoadCost, TierQuote
from kvstore.eviction import LeafLru, MakePolicy
from kvstore.index import MORTAL, NO_PARENT, BlockIndex, Namespace, Rows, grown
from kvstore.inventory import Inventory
from kvstore.meters import Meters
from kvstore.placements import ARRIVING, LEAVING, NONE, READY, WRITING, PlacementTable
from kvstore.tier_speed import TierSpeed

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]

_CLEAN_FRACTION = 0.25  # of the arena: so much is kept free or already on a drive, ahead of demand
_EVICTED_AT_ONCE_FRACTION = 1 / 64  # of the drives, when they are full: removals are committed in groups
_MAX_RUN_BLOCKS = 256  # ordered to be written together
_PRIOR = LoadCost(0.001, 1e9)  # of drives that nobody has measured: a slow one
_UNREADABLE_S = 5.0  # a drive that is gone is not promised to anybody for so long


class SpillPolicy(NamedTuple):
    """When a block is written to a drive, and how much may be.

    write_through: when it is committed. write_through_selective: when it is read for the first time, which earns it the
    write. write_back: before it would be evicted from RAM. Budgets in bytes, 0: none.
    """

    write_policy: WritePolicy = "write_through"
    bytes_per_s: int = 0
    bytes_per_day: int = 0


class Orders(NamedTuple):
    """What is to be done now, in this order: namespaces (id, tenant, canonical spec) made known, removals, slots whose
    prefetches become reads, moves, slots whose reads nobody waits for any more."""

    namespaces: tuple[tuple[bytes, str, bytes], ...]
    forgets: tuple[Forget, ...]
    moves: tuple[Move, ...]
    hastens: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()


class RestoredBlocks(Protocol):
    """Blocks of one namespace that the drives have, as columns; parents before children (tiers/nvme)."""

    @property
    def keys(self) -> Sequence[bytes]: ...  # noqa: D102 - see core/moves.BlockRecord
    @property
    def parents(self) -> Sequence[bytes]: ...  # noqa: D102
    @property
    def offsets(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def generations(self) -> NDArray[np.uint64]: ...  # noqa: D102
    @property
    def checksums(self) -> NDArray[np.uint64]: ...  # noqa: D102
    @property
    def last_use(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def hits(self) -> NDArray[np.uint32]: ...  # noqa: D102


class _Flight(NamedTuple):
    """A move that was ordered and is not done."""

    urgency: Urgency
    row: int
    drive: int
    nbytes: int  # of the slot


class BudgetFigures(NamedTuple):
    """What was written, against what may be; limits of 0: none. Named as in WriteBudget (kvstore.proto)."""

    policy: str
    bytes_per_s: int
    bytes_per_day: int
    written_bytes: int
    day_bytes: int


class QueueDepth(NamedTuple):
    """Something that waits, and the most that may; 0: no limit of its own."""

    queue: str
    length: int
    limit: int


class Spill:
    """The moves between `pinned` and the drives. Loop thread only; counts into `counters`.

    A block is written only behind its parent, so that what is on the drives is always a usable prefix. While a block is
    written it cannot be evicted from RAM, so the writes in flight are limited in bytes; what waits (`backlog`) pins nothing,
    is limited in blocks, and is looked at again when its turn comes.

    `give_up(row)` is called before a block that was on its way is taken back: nobody may hold it afterwards. `is_wanted(row)`:
    whether somebody waits for a block that is on its way.
    """

    def __init__(
        self,
        pinned: Inventory,
        slots: DriveSlots,
        policy: SpillPolicy,
        *,
        counters: dict[str, int],
        give_up: Callable[[int], None],
        is_wanted: Callable[[int], bool],
        on_event: Callable[[Event], None] | None,
        meters: Meters,
        make_policy: MakePolicy = LeafLru,
    ) -> None:
        self._meters = meters
        self._index: BlockIndex = pinned.index
        self.pinned = pinned
        self.nvme = Inventory(TIERS[1], self._index, slots, make_policy, on_event, upper=pinned, release=self._retire)
        self.active = False
        self.speed = TierSpeed(_PRIOR)  # of reading
        self._slots = slots
        self._policy = policy
        self._budget = WriteBudget(bytes_per_s=policy.bytes_per_s, bytes_per_day=policy.bytes_per_day)
        self._counters = counters
        self._give_up = give_up
        self._is_wanted = is_wanted
        self._checksums = np.empty(0, np.uint64)  # by row, of blocks on the drives
        self._dirty = LeafLru(self._index, _DirtyLeaves(pinned.table, self.nvme.table))
        if slots.open_drives:
            pinned.tell(self._dirty)
        self._backlog: deque[tuple[int, bytes]] = deque()  # row and key: the row may be another block's by then
        self._behind: dict[
            int, list[tuple[int, bytes]]
        ] = {}  # likewise, by the row of an ancestor that is not stored yet
        self._num_behind = 0
        self._flights: dict[int, _Flight] = {}
        self._ordered_s: dict[int, float] = {}  # of flights that were handed out
        self._reads: dict[int, int] = {}  # by row: the move that brings it
        self._num_moves = 0
        self._writing_bytes = 0
        self._awaited_bytes = 0  # of reads that somebody waits for
        self._removing_bytes: Counter[int] = Counter()  # by drive, of these:
        self._retired: dict[tuple[int, int], Forget] = {}  # by offset and generation: removals that are not durable yet
        self._quarantined: dict[int, Extent] = {}  # by offset
        self._orphans: list[Forget] = []  # restored, and to be forgotten at the start
        self._moves: list[Move] = []
        self._hastens: list[int] = []
        self._cancels: list[int] = []
        self._forgets: list[Forget] = []
        self._namespaces: list[tuple[bytes, str, bytes]] = []
        self._told: set[bytes] = set()  # namespaces that the drives know
        self._pauses: dict[int, _Pause] = {}  # of drives that refused a write
        self._unreadable_until_s: dict[int, float] = {}
        self._flushed_sequence = self._index.sequence

    @property
    def quarantined_bytes(self) -> int:
        """Slots that are not used any more."""
        return sum(extent.nbytes for extent in self._quarantined.values())

    @property
    def _max_writing_bytes(self) -> int:
        """Bytes of RAM that writes may keep from eviction: a drive that hangs must not take the arena with it."""
        return min(MAX_WRITES_IN_FLIGHT_BYTES, int(self.pinned.slots.capacity_bytes * MAX_WRITING_FRACTION))

    @property
    def _takes_writes(self) -> bool:
        """Whether a drive takes writes, or will again after its pause."""
        return bool(self._slots.open_drives or self._pauses)

    def grow(self) -> None:
        """Follow the index's capacity; called after rows were added."""
        self.pinned.table.grow()
        self.nvme.table.grow()
        if len(self._checksums) < self._index.capacity:
            self._checksums = grown(self._checksums, self._index.capacity)

    # --- start ----------------------------------------------------------------------------------------------------------

    def restore(self, entry: Namespace, blocks: RestoredBlocks) -> None:
        """Blocks of one namespace that the drives have. Before `start`. One whose parent was dropped meanwhile goes too."""
        assert not self.active
        self._told.add(entry.namespace)
        rows = self._restore_rows(entry, blocks)
        known, orphans = np.flatnonzero(rows != NO_PARENT), np.flatnonzero(rows == NO_PARENT)
        nbytes = entry.spec.block_nbytes
        self._orphans += [
            Forget(entry.namespace, blocks.keys[i], int(blocks.offsets[i]), nbytes, int(blocks.generations[i]))
            for i in orphans.tolist()
        ]
        self._slots.restore(nbytes, SlotArrays(blocks.offsets[orphans], blocks.generations[orphans]))
        rows = rows[known]
        self.nvme.restore(entry, rows, SlotArrays(blocks.offsets[known], blocks.generations[known]))
        self._checksums[rows] = blocks.checksums[known]
        self._index.restore_use(rows, blocks.last_use[known], blocks.hits[known])
        self._counters["restored_blocks_total"] += len(rows)

    def restore_quarantined(self, offset: int, nbytes: int) -> None:
        """A slot that is not to be used. Before `start`."""
        slots = SlotArrays(np.array([offset], np.int64), np.zeros(1, np.uint64))
        self._slots.restore(nbytes, slots)
        self._quarantined[offset] = Extent(offset, self._slots.slot_nbytes(nbytes), 0)

    def start(self, written: Mapping[int, int], wall_offset_s: float) -> None:
        """All is restored and the drives' segments are added: move blocks from now on. The arguments are WriteBudget's."""
        assert not self.active
        self.active = True
        self._budget.start(written, wall_offset_s)
        for extent in self._quarantined.values():
            self._slots.to_limbo(extent)
        self._order_forgets(self._orphans)
        self._orphans.clear()
        self._flushed_sequence = self._index.sequence  # what was restored is written down already
        table = self.nvme.table
        for row in np.flatnonzero((table.state == READY) & (table.children == 0)).tolist():
            self.nvme.policy.offer(row)

    def _restore_rows(self, entry: Namespace, blocks: RestoredBlocks) -> Rows:
        """A row for each block, found or added; -1 for those whose parent is not known (any more), and what follows them."""
        rows = self._index.find_all(entry, blocks.keys)
        numbers: dict[bytes, int] = {}  # of the new ones, in their order
        new: list[int] = []
        for i in np.flatnonzero(rows == NO_PARENT).tolist():
            parent = blocks.parents[i]
            if not parent or parent in numbers or parent in entry.rows:
                numbers[blocks.keys[i]] = len(new)
                new.append(i)
        fresh = self._index.new_rows(len(new))
        self.grow()
        parents = [blocks.parents[i] for i in new]
        among_new, known = _look_up(numbers, parents), _look_up(entry.rows, parents)
        parent_rows = np.where(among_new < 0, known, np.append(fresh, NO_PARENT)[among_new])
        self._index.add(entry, list(numbers), parent_rows, fresh)
        rows[new] = fresh
        return rows

    # --- questions ------------------------------------------------------------------------------------------------------

    def readable(self, rows: Rows) -> NDArray[np.bool_]:
        """Which of the rows a drive can give."""
        table = self.nvme.table
        if not self.active:
            return np.zeros(len(rows), np.bool_)
        found: NDArray[np.bool_] = table.state[rows] == READY
        if self._unreadable_until_s:
            found &= ~np.isin(table.offset[rows] >> DRIVE_SHIFT, list(self._unreadable_until_s))
        return found

    def budget(self, now_s: float) -> BudgetFigures:
        """What was written, against what may be."""
        name, per_s, per_day = self._policy
        return BudgetFigures(name, per_s, per_day, self._budget.written_bytes, self._budget.day_bytes(now_s))

    def queues(self) -> list[QueueDepth]:
        """What waits for the drives."""
        num_reads = len(self._reads)
        return [
            QueueDepth("write_backlog", len(self._backlog), MAX_WRITE_BACKLOG_BLOCKS),
            QueueDepth("writes_behind_parent", self._num_behind, MAX_WRITE_BACKLOG_BLOCKS),
            QueueDepth("drive_reads", num_reads, 0),
            QueueDepth("drive_writes", len(self._flights) - num_reads, 0),
            QueueDepth("drive_removals", len(self._retired), 0),
        ]

    # --- what happens in RAM --------------------------------------------------------------------------------------------

    def on_stored(self, rows: Rows) -> None:
        """Blocks were committed. What waits to be written behind them may be now."""
        if self._behind:
            for row in rows.tolist():
                waited = self._behind.pop(row, [])
                self._num_behind -= len(waited)
                for behind in waited:
                    self._queue_write(*behind)
        if self._policy.write_policy == "write_through" and self._takes_writes:
            self._want_written(rows)

    def on_read(self, rows: Rows) -> None:
        """Blocks in RAM were leased to a reader."""
        if self._policy.write_policy == "write_through_selective" and self._takes_writes:
            self._want_written(rows[self.pinned.table.state[rows] == READY])

    def order_reads(self, entry: Namespace, rows: Rows, urgency: Urgency, *, from_back: bool = False) -> None:
        """Bring blocks that a drive can give and that have no copy in RAM; there is room for them. They are ARRIVING. From the
        back: the last ones first, of which a drive reads as many together as its speed is worth."""
        self.pinned.place(entry, rows, ARRIVING)
        self.nvme.ref(rows)
        self._order(entry, rows[::-1] if from_back else rows, urgency)

    def hasten(self, rows: Rows) -> None:
        """Somebody waits now for those of the rows that are being prefetched."""
        for row in rows.tolist():
            move_id = self._reads.get(row)
            if move_id is None or self._flights[move_id].urgency is not Urgency.PREFETCH:
                continue
            flight = self._flights[move_id] = self._flights[move_id]._replace(urgency=Urgency.READ)
            self._awaited_bytes += flight.nbytes
            self._hastens.append(self.nvme.table.offset_at[row])

    def cancel(self, rows: Sequence[int]) -> None:
        """Nobody waits any more for these rows: what has not begun to be read need not be. Prefetches go on."""
        for row in rows:
            move_id = self._reads.get(row)
            if move_id is not None and self._flights[move_id].urgency is Urgency.READ:
                self._cancels.append(self.nvme.table.offset_at[row])

    def drop(self, entry: Namespace, rows: Rows) -> None:
        """As Inventory.drop, for the drives."""
        self.nvme.drop(entry, rows)

    def tick(self, now_s: float) -> None:
        """Twice a second or so: write ahead of demand, and try again what was put off."""
        if not self.active:
            return
        for drive, pause in self._pauses.items():
            if pause.until_s <= now_s:
                self._slots.set_open(drive, is_open=True)
        self._unreadable_until_s = {
            drive: until_s for drive, until_s in self._unreadable_until_s.items() if until_s > now_s
        }
        if self._policy.write_policy != "write_through_selective" and not self._backlog:
            self._clean_ahead()

    # --- orders ---------------------------------------------------------------------------------------------------------

    def take_orders(self, now_s: float) -> Orders:
        """What is to be done now, writes that can begin among it."""
        if self._backlog and self.active:
            self._begin_writes(now_s)
        for move in self._moves:
            self._ordered_s[move.move_id] = now_s
            if move.urgency is not Urgency.WRITE:
                self.speed.ordered(move.record.nbytes, now_s)
        orders = Orders(
            tuple(self._namespaces),
            tuple(self._forgets),
            tuple(self._moves),
            tuple(self._hastens),
            tuple(self._cancels),
        )
        if any(orders):
            self._namespaces, self._forgets, self._hastens, self._moves, self._cancels = [], [], [], [], []
        return orders

    def take_touches(self) -> list[Touch]:
        """Recency of blocks on the drives that changed since it was last asked; at most MAX_TOUCHES_PER_TURN, the
        least recent first, and the rest next time."""
        index, table = self._index, self.nvme.table
        rows = index.used_since(self._flushed_sequence)
        rows = rows[table.state[rows] == READY]
        most = MAX_TOUCHES_PER_TURN
        if len(rows) > most:  # a tenth of the time that it takes to sort a million
            rows = rows[np.argpartition(index.last_use[rows], most - 1)[:most]]
        rows = rows[np.argsort(index.last_use[rows])]
        self._flushed_sequence = int(index.last_use[rows[-1]]) if len(rows) == most else index.sequence
        return [
            Touch(
                index.namespace_of(row).namespace,
                index.keys[row],
                table.offset_at[row],
                index.last_use_at[row],
                index.hits_at[row],
            )
            for row in rows.tolist()
        ]

    def finish_move(self, done: MoveDone, now_s: float) -> int:
        """A move has ended; which row it moved."""
        flight = self._flights.pop(done.move_id)
        ordered_s = self._ordered_s.pop(done.move_id)
        if done.problem is None:
            nbytes = self._index.namespace_of(flight.row).spec.block_nbytes
            direction = "write" if flight.urgency is Urgency.WRITE else "read"
            self._meters.transfer(TIERS[1], direction, nbytes, now_s - ordered_s)
        if flight.urgency is Urgency.WRITE:
            self._writing_bytes -= flight.nbytes
            self._finish_write(flight, done, now_s)
        else:
            self._end_read(flight, done.problem, now_s)
        return flight.row

    def finish_forgets(self, forgets: Sequence[Forget]) -> None:
        """Removals have become durable: their slots are free, but for the quarantined ones."""
        retired = [f for f in forgets if self._retired.pop((f.offset, f.generation), None) is not None]
        for forget in retired:
            self._removing_bytes[forget.offset >> DRIVE_SHIFT] -= self._slots.slot_nbytes(forget.nbytes)
        self._slots.free_many(_slots_of(retired))

    def check(self, borrowed: Collection[int] = ()) -> None:
        """I3 on the drives, once their segments are added, and that every move holds what it moves. `borrowed`: rows that come
        from elsewhere than the drives."""
        (self.nvme if self.active else self.nvme.table).check()
        pinned, nvme = self.pinned.table, self.nvme.table
        retired = sum(self._slots.slot_nbytes(forget.nbytes) for forget in self._retired.values())
        assert retired == self._removing_bytes.total()
        assert not self.active or retired + self.quarantined_bytes == self._slots.limbo_bytes
        reads = [flight.row for flight in self._flights.values() if flight.urgency is not Urgency.WRITE]
        writes = [flight.row for flight in self._flights.values() if flight.urgency is Urgency.WRITE]
        refs = np.zeros(len(nvme.refs), np.int64)
        np.add.at(refs, reads + writes, 1)
        assert (refs == nvme.refs).all()
        assert np.isin(pinned.state[reads], (ARRIVING, LEAVING)).all()
        assert np.isin(pinned.state[writes], (READY, LEAVING)).all()
        assert np.isin(nvme.state[reads], (READY, LEAVING)).all()
        assert np.isin(nvme.state[writes], (WRITING, LEAVING)).all()
        assert set(np.flatnonzero(pinned.state == ARRIVING).tolist()) <= {*reads, *borrowed}
        assert self._writing_bytes == sum(self._flights[i].nbytes for i in self._flights if self._is_write(i))
        assert self._reads == {self._flights[i].row: i for i in self._flights if not self._is_write(i)}
        awaited = [flight.nbytes for flight in self._flights.values() if flight.urgency is Urgency.READ]
        assert self._awaited_bytes == sum(awaited)
        self.speed.check()

    def rows_in_flight(self) -> list[int]:
        """Rows whose copy in RAM a move holds; for Store.check."""
        return [flight.row for flight in self._flights.values()]

    # --- writing --------------------------------------------------------------------------------------------------------

    def _want_written(self, rows: Rows) -> None:
        keys = self._index.keys
        for row in rows[self.nvme.table.state[rows] == NONE].tolist():
            self._queue_write(row, keys[row])

    def _queue_write(self, row: int, key: bytes) -> None:
        if len(self._backlog) == MAX_WRITE_BACKLOG_BLOCKS:
            self._backlog.popleft()
            self._counters["skipped_writes_backlog_total"] += 1
        self._backlog.append((row, key))

    def _begin_writes(self, now_s: float) -> None:
        """Order writes from the backlog until something has to be waited for: moves in flight, the budget, or slots."""
        num_before = len(self._moves)
        while self._backlog and self._writing_bytes < self._max_writing_bytes and self._slots.open_drives:
            if len(self._moves) - num_before >= MAX_WRITES_PER_TURN:
                return  # the first of them to end brings the next turn
            row, key = self._backlog[0]
            chain = self._unwritten_chain(row, key)
            if not chain:
                self._backlog.popleft()
                self._set_aside(row, key)
                continue
            entry = self._index.namespace_of(row)
            num_free = self._slots.num_free(entry.slot_nbytes)
            if not num_free:
                if self._evict_for(entry, chain[0]):
                    return
                self._backlog.popleft()
                self._counters["skipped_writes_no_space_total"] += 1
                continue
            if not self._budget.allows(entry.slot_nbytes, now_s):
                return
            self._order_writes(entry, self._next_run(entry, num_free), now_s)

    def _set_aside(self, row: int, key: bytes) -> None:
        """A block that cannot be written is looked at again when the ancestor that it waits for is stored: another engine may
        be writing that one still."""
        if self._index.keys[row] != key or self._num_behind >= MAX_WRITE_BACKLOG_BLOCKS:
            return
        pinned, nvme = self.pinned.table.state_at, self.nvme.table.state_at
        above = row
        while above != NO_PARENT and nvme[above] == NONE and pinned[above] == READY:
            above = self._index.parent_at[above]
        if above not in {row, NO_PARENT} and nvme[above] == NONE:
            self._behind.setdefault(above, []).append((row, key))
            self._num_behind += 1

    def _next_run(self, entry: Namespace, num_free: int) -> list[int]:
        """What the front of the backlog wants written in one namespace, parents before children: ordered together, since a call
        for each block takes ten times as long. It leaves the backlog when it is looked at again."""
        most = min(num_free, _MAX_RUN_BLOCKS)
        run: dict[int, None] = {}
        for row, key in self._backlog:
            chain = self._unwritten_chain(row, key, run)
            if len(run) >= most or (chain and self._index.namespace_of(row) is not entry):
                break
            run.update(dict.fromkeys(chain))
        return list(run)[:most]

    def _order_writes(self, entry: Namespace, run: list[int], now_s: float) -> None:
        """Begin to write a run of blocks, as far as the budget and the limit of what is in flight let it."""
        in_flight, limit = self._writing_bytes, self._max_writing_bytes
        taken: list[int] = []
        for row in run:
            if in_flight >= limit or not self._budget.allows(entry.slot_nbytes, now_s):
                break
            self._budget.spend(entry.slot_nbytes, now_s)
            in_flight += entry.slot_nbytes
            taken.append(row)
        self._writing_bytes = in_flight
        rows = np.array(taken, np.int64)
        if entry.namespace not in self._told:
            self._told.add(entry.namespace)
            self._namespaces.append((entry.namespace, entry.tenant, entry.spec.canonical()))
        self.nvme.place(entry, rows)
        self.pinned.ref(rows)
        self._order(entry, rows, Urgency.WRITE)

    def _unwritten_chain(self, row: int, key: bytes, run: Container[int] = ()) -> list[int]:
        """The block and those of its ancestors that are on no drive nor in `run`, head first. Empty when there is nothing to
        write, or one of them cannot be written now, or has a time to live: what is behind it could not be found."""
        pinned, nvme, parent = self.pinned.table.state_at, self.nvme.table.state_at, self._index.parent_at
        marks = self._index.marks_at
        if self._index.keys[row] != key:
            return []
        chain: list[int] = []
        while row != NO_PARENT and nvme[row] == NONE and row not in run:
            if pinned[row] != READY or marks[row] & MORTAL:
                return []
            chain.append(row)
            row = parent[row]
        return [] if row != NO_PARENT and nvme[row] == LEAVING else chain[::-1]

    def _evict_for(self, entry: Namespace, row: int) -> bool:
        """Take the coldest blocks from the drives, whatever their size, but not the block that `row` follows: a slice in a turn
        of the loop, until a good part is being removed on each drive, since removals are committed in groups, and one
        drive's may hang. Their slots come back later. Whether there are any to wait for."""
        drives = self._slots.open_drives
        wanted = max(entry.slot_nbytes, int(self._slots.capacity_bytes * _EVICTED_AT_ONCE_FRACTION) // len(drives))
        parent = self._index.parent_at[row]
        kept = np.array([parent] if parent != NO_PARENT else [], np.int64)
        self.nvme.ref(kept)
        num_evicted = 0
        while (missing := wanted - min(self._removing_bytes[drive] for drive in drives)) > 0:
            count = min(max(1, missing // entry.slot_nbytes), EVICTION_SLICE_BLOCKS - num_evicted)
            evicted = self.nvme.evict(count, entry.slot_nbytes).num_blocks if count else 0
            if not evicted:
                break
            num_evicted += evicted
        self.nvme.unref(kept)
        self._counters["nvme_evicted_blocks_total"] += num_evicted
        return any(self._removing_bytes[drive] for drive in drives)

    def _clean_ahead(self) -> None:
        """Enough of the arena is free, or on a drive too, that a burst of puts need not drop what is nowhere else."""
        slots, pinned, nvme = self.pinned.slots, self.pinned.table, self.nvme.table
        target = int(slots.capacity_bytes * _CLEAN_FRACTION)
        safe = slots.free_slots_bytes
        if safe >= target:
            return
        clean = np.flatnonzero((pinned.state == READY) & np.isin(nvme.state, (READY, WRITING)))
        sizes = np.array([entry.slot_nbytes for entry in self._index.namespaces], np.int64)
        safe += int(sizes[self._index.namespace[clean]].sum())
        while safe < target and (row := self._dirty.next_victim()) is not None:
            key = self._index.keys[row]
            chain = self._unwritten_chain(row, key)
            self._want_written(np.array(chain[:MAX_WRITE_BACKLOG_BLOCKS], np.int64))
            if not chain:
                self._set_aside(row, key)
            safe += len(chain) * self._index.namespace_of(row).slot_nbytes

    def _finish_write(self, flight: _Flight, done: MoveDone, now_s: float) -> None:
        row, rows = flight.row, np.array([flight.row], np.int64)
        if done.problem is None:
            self._checksums[row] = done.checksum
            self._end_pause(flight.drive, now_s)
            if self.nvme.table.state_at[row] == WRITING:
                self._counters["demoted_blocks_total"] += 1
                self.nvme.publish(rows)
            else:  # dropped meanwhile
                self.nvme.discard(rows)
            self.pinned.unref(rows)
            return
        self._counters[f"failed_writes_{done.problem}_total"] += 1
        forget = self._forget(row, done.problem)
        extent = self.nvme.table.extent(row)
        self.nvme.to_limbo(rows)
        if done.problem in BAD_SLOT:
            self._quarantine(forget, extent)
        else:
            self._slots.free(extent)  # the index never heard of it
        if done.problem is not MoveProblem.STOPPED:
            self._pause(flight.drive, now_s)
        self.pinned.unref(rows)
        self._dirty.offer(row)

    def _pause(self, drive: int, now_s: float) -> None:
        """Write nothing to a drive for a while, twice as long as the last time."""
        first_s, longest_s = DRIVE_RETRY_S
        last = self._pauses.get(drive)
        if last is not None and last.until_s > now_s:
            return  # others that were in flight with the one that failed
        length_s = first_s if last is None else min(2 * last.length_s, longest_s)
        self._pauses[drive] = _Pause(now_s + length_s, length_s)
        self._slots.set_open(drive, is_open=False)

    def _end_pause(self, drive: int, now_s: float) -> None:
        """A write ended well. One that was in flight with a write that failed says nothing about those to come."""
        pause = self._pauses.get(drive)
        if pause is not None and pause.until_s <= now_s:
            del self._pauses[drive]
            self._slots.set_open(drive, is_open=True)

    # --- reading --------------------------------------------------------------------------------------------------------

    def quote(self, now_s: float) -> TierQuote | None:
        """What a read would need that is ordered now; None: the drives do not answer, or nobody knows how fast they are."""
        quote = self.speed.quote(now_s)
        return None if quote is None else quote._replace(queued_bytes=self._awaited_bytes)

    def _end_read(self, flight: _Flight, problem: MoveProblem | None, now_s: float) -> None:
        row = flight.row
        nbytes = self._index.namespace_of(row).spec.block_nbytes
        del self._reads[row]
        if flight.urgency is Urgency.READ:
            self._awaited_bytes -= flight.nbytes
        if problem is not MoveProblem.CANCELLED:
            self.speed.ended(nbytes, now_s, ok=problem is None)
            if problem is None:
                self._finish_read(row)
            else:
                self._fail_read(flight, problem, now_s)
            return
        self.speed.cancelled(nbytes, now_s)
        if self._is_wanted(row):  # since it was cancelled
            self._order(self._index.namespace_of(row), np.array([row], np.int64), Urgency.READ)
        else:
            self._fail_read(flight, problem, now_s)

    def _finish_read(self, row: int) -> None:
        rows = np.array([row], np.int64)
        table = self.pinned.table
        self.pinned.slots.announce(table.slots(rows))
        if table.state_at[row] == ARRIVING:
            self.pinned.publish(rows)
        else:  # dropped meanwhile
            self.pinned.unref(rows)
        self._counters["promoted_blocks_total"] += 1
        self.nvme.unref(rows)

    def _fail_read(self, flight: _Flight, problem: MoveProblem, now_s: float) -> None:
        row, rows = flight.row, np.array([flight.row], np.int64)
        cancelled = problem is MoveProblem.CANCELLED
        self._counters["cancelled_reads_total" if cancelled else f"failed_reads_{problem}_total"] += 1
        forget = self._forget(row, problem)
        extent = self.nvme.table.extent(row)
        self._give_up(row)
        self.pinned.discard(rows)
        if problem in BAD_SLOT:
            self.nvme.lose(row)
            self._slots.to_limbo(extent)
            self._quarantine(forget, extent)
            return
        if not cancelled and problem is not MoveProblem.STOPPED:
            self._unreadable_until_s[flight.drive] = now_s + _UNREADABLE_S
        self.nvme.unref(rows)

    # --- both -----------------------------------------------------------------------------------------------------------

    def _order(self, entry: Namespace, rows: Rows, urgency: Urgency) -> None:
        index, nvme = self._index, self.nvme.table
        arena = self.pinned.table.offset[rows].tolist()
        for row, arena_offset in zip(rows.tolist(), arena, strict=True):
            self._num_moves += 1
            parent = index.parent_at[row]
            offset = nvme.offset_at[row]
            record = BlockRecord(
                entry.namespace,
                index.keys[row],
                b"" if parent == NO_PARENT else index.keys[parent],
                offset,
                entry.spec.block_nbytes,
                nvme.generation_at[row],
                0 if urgency is Urgency.WRITE else int(self._checksums[row]),
                index.last_use_at[row],
                index.hits_at[row],
            )
            self._flights[self._num_moves] = _Flight(urgency, row, offset >> DRIVE_SHIFT, entry.slot_nbytes)
            if urgency is not Urgency.WRITE:
                self._reads[row] = self._num_moves
            self._moves.append(Move(self._num_moves, urgency, arena_offset, record))
        if urgency is Urgency.READ:
            self._awaited_bytes += len(rows) * entry.slot_nbytes

    def _retire(self, rows: Rows) -> None:
        """Blocks have left the drives: their slots are free when the removal is durable (I8). Before the start there are no
        segments yet whose slots could go to limbo."""
        index, table = self._index, self.nvme.table
        entries = [index.namespaces[number] for number in index.namespace[rows].tolist()]
        keys = [index.keys[row] for row in rows.tolist()]
        columns = entries, keys, table.offset[rows].tolist(), table.generation[rows].tolist()
        retired = [
            Forget(entry.namespace, key, offset, entry.spec.block_nbytes, generation)
            for entry, key, offset, generation in zip(*columns, strict=True)
        ]
        if self.active:
            self._order_forgets(retired)
        else:
            self._orphans += retired

    def _order_forgets(self, forgets: Sequence[Forget]) -> None:
        """A Drop may have a million."""
        self._slots.to_limbo_many(_slots_of(forgets))
        self._retired.update(zip([(f.offset, f.generation) for f in forgets], forgets, strict=True))
        for forget in forgets:
            self._removing_bytes[forget.offset >> DRIVE_SHIFT] += self._slots.slot_nbytes(forget.nbytes)
        self._forgets += forgets

    def _quarantine(self, forget: Forget, extent: Extent) -> None:
        self._quarantined[extent.offset] = extent
        self._forgets.append(forget)

    def _forget(self, row: int, problem: MoveProblem) -> Forget:
        entry, table = self._index.namespace_of(row), self.nvme.table
        return Forget(
            entry.namespace,
            self._index.keys[row],
            table.offset_at[row],
            entry.spec.block_nbytes,
            table.generation_at[row],
            problem,
        )

    def _is_write(self, move_id: int) -> bool:
        return self._flights[move_id].urgency is Urgency.WRITE


def _look_up(numbers: Mapping[bytes, int], keys: Sequence[bytes]) -> Rows:
    """A number for each key, -1 where there is none."""
    return np.fromiter(map(numbers.get, keys, repeat(-1)), np.int64, len(keys))


def _slots_of(forgets: Sequence[Forget]) -> SlotArrays:
    offsets, generations = [forget.offset for forget in forgets], [forget.generation for forget in forgets]
    return SlotArrays(np.array(offsets, np.int64), np.array(generations, np.uint64))


class _Pause(NamedTuple):
    until_s: float
    length_s: float


class _DirtyLeaves:
    """Candidates (eviction.py): leaves in RAM that are on no drive."""

    def __init__(self, pinned: PlacementTable, nvme: PlacementTable) -> None:
        self._pinned = pinned
        self._nvme = nvme

    def is_evictable(self, row: int) -> bool:
        """See Candidates."""
        pinned = self._pinned
        return pinned.state_at[row] == READY and not pinned.children_at[row] and self._nvme.state_at[row] == NONE
