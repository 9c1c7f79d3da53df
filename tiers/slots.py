"""Which bytes of a tier belong to which block: segments given to size classes, slots inside them."""

import heapq
from array import array
from bisect import bisect_left, insort
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import Extent, SlotArrays
from kvstore.core.errors import SpecMismatch
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES

_FREE, _RESERVED, _LIMBO = 0, 1, 2


class SegmentedSlots:
    """A SlotSpace (core/ports.py) over equal segments, each given to one size class while any of its slots is in use.

        tier      | segment 0             | segment 1             | segment 2 (free) | ...
        classes   | A   | A   | A   | tail| B        | B        |tail|

    A class takes slots from its lowest segment that has one, so that the higher segments run empty and go back; inside
    a segment the slot freed last comes first, since its lines may still be in the CPU's caches. The tail that is too
    short for a slot counts as free: it is, as soon as its segment is empty.

    Begins without segments; `restore` tells it of slots in use from before a restart, and `add_segments` then gives it the
    segments that are ready.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        generations: "Generations",
        segment_bytes: int = SEGMENT_BYTES,
        align: int = SLOT_ALIGN_BYTES,
    ) -> None:
        assert segment_bytes % align == 0
        assert capacity_bytes % segment_bytes == 0
        self._segment_bytes = segment_bytes
        self._align = align
        self._generations = generations
        self._restored: dict[int, list[NDArray[np.int64]]] = {}  # by slot size, until the segments are added
        self._max_segments = capacity_bytes // segment_bytes
        self._segments: list[_Segment | None] = []  # by number; None: free
        self._free_segments: list[int] = []  # heap
        self._classes: dict[int, _SizeClass] = {}
        self._reserved_bytes = 0
        self._limbo_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the segments added so far."""
        return len(self._segments) * self._segment_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of reserved slots."""
        return self._reserved_bytes

    @property
    def limbo_bytes(self) -> int:
        """Bytes of slots in limbo."""
        return self._limbo_bytes

    @property
    def free_slots_bytes(self) -> int:
        """Bytes of free slots and free segments, without the tails of segments in use."""
        in_classes = sum(entry.num_free * entry.slot_nbytes for entry in self._classes.values())
        return in_classes + len(self._free_segments) * self._segment_bytes

    @property
    def num_free_segments(self) -> int:
        """Segments that no size class has."""
        return len(self._free_segments)

    def add_segments(self, count: int) -> None:
        """The next `count` segments of the tier may be given out from now on."""
        first = len(self._segments)
        assert first + count <= self._max_segments
        self._segments.extend([None] * count)
        for slot_nbytes, runs in self._restored.items():
            self._restore_segments(self._class_of(slot_nbytes), np.concatenate(runs))
        self._restored.clear()
        for number in range(first, first + count):
            if self._segments[number] is None:
                heapq.heappush(self._free_segments, number)

    def slot_nbytes(self, nbytes: int) -> int:
        """`nbytes` rounded up to whole pages."""
        assert nbytes > 0
        slot = -(-nbytes // self._align) * self._align
        if slot > self._segment_bytes:
            raise SpecMismatch(
                f"block_nbytes: a block of {nbytes} bytes does not fit a segment; use at most {self._segment_bytes}",
                field="block_nbytes",
                value=nbytes,
            )
        return slot

    def num_free(self, nbytes: int) -> int:
        """Slots for `nbytes` in its class's segments and in free segments."""
        size_class = self._class_of(nbytes)
        return size_class.num_free + len(self._free_segments) * size_class.slots_per_segment

    def reserve(self, nbytes: int) -> Extent | None:
        """One slot for `nbytes`, or None."""
        slots = self.reserve_many(nbytes, 1)
        if not len(slots.offsets):
            return None
        return Extent(int(slots.offsets[0]), nbytes, int(slots.generations[0]))

    def reserve_many(self, nbytes: int, count: int, *, announced: bool = True) -> SlotArrays:
        """Up to `count` slots for `nbytes`, in the order in which a sequence should fill them."""
        size_class = self._class_of(nbytes)
        slot_nbytes = size_class.slot_nbytes
        runs: list[NDArray[np.int64]] = []
        missing = count
        while missing and (size_class.open or self._give_segment(size_class)):
            number = size_class.open[0]
            segment = self._segments[number]
            assert segment is not None
            taken = segment.take(missing)
            if not segment.free:
                del size_class.open[0]
            runs.append(taken.astype(np.int64) * slot_nbytes + number * self._segment_bytes)
            missing -= len(taken)
        offsets = np.concatenate(runs) if runs else np.empty(0, np.int64)
        size_class.num_free -= len(offsets)
        self._reserved_bytes += len(offsets) * slot_nbytes
        return SlotArrays(offsets, self._generations.begin(offsets, announced=announced))

    def announce(self, slots: SlotArrays) -> None:
        """Reserved slots whose bytes have come: readers may look."""
        self._generations.announce(slots)

    def restore(self, nbytes: int, slots: SlotArrays) -> None:
        """Free -> reserved as soon as the segments are added. No slot twice, none across the end of a segment."""
        assert not self._segments
        slot_nbytes = self.slot_nbytes(nbytes)
        inside = slots.offsets % self._segment_bytes
        assert not (inside % slot_nbytes).any()
        assert (inside + slot_nbytes <= self._segment_bytes).all()
        self._restored.setdefault(slot_nbytes, []).append(slots.offsets)
        self._generations.restore(slots)

    def to_limbo(self, extent: Extent) -> None:
        """Reserved -> limbo. The generation stays: nobody new gets the slot."""
        self.to_limbo_many(_one(extent))

    def to_limbo_many(self, slots: SlotArrays) -> None:
        """Reserved -> limbo, for each."""
        assert self._generations.are_current(slots)
        nbytes = 0
        for offset in slots.offsets.tolist():
            segment, slot = self._locate(offset)
            assert segment.states[slot] == _RESERVED
            segment.states[slot] = _LIMBO
            nbytes += segment.slot_nbytes
        self._reserved_bytes -= nbytes
        self._limbo_bytes += nbytes

    def free(self, extent: Extent) -> None:
        """Reserved or limbo -> free."""
        self.free_many(_one(extent))

    def free_many(self, slots: SlotArrays) -> None:
        """Reserved or limbo -> free, for each."""
        assert self._generations.are_current(slots)
        self._generations.end(slots)
        for offset in slots.offsets.tolist():
            self._release(offset)

    def check(self) -> None:
        """I3: free + reserved + limbo = capacity, slot by slot and segment by segment."""
        used = {_RESERVED: 0, _LIMBO: 0}
        num_free = dict.fromkeys(self._classes, 0)
        for number, segment in enumerate(self._segments):
            if segment is None:
                assert number in self._free_segments
                continue
            free = list(segment.free)
            assert len(set(free)) == len(free)
            assert all(segment.states[slot] == _FREE for slot in free)
            assert segment.states.count(_FREE) == len(free)
            assert len(free) < len(segment.states), "an empty segment was not returned"
            assert (number in self._classes[segment.slot_nbytes].open) == bool(free)
            num_free[segment.slot_nbytes] += len(free)
            for state in used:
                used[state] += segment.states.count(state) * segment.slot_nbytes
        assert len(set(self._free_segments)) == len(self._free_segments) == self._segments.count(None)
        assert num_free == {slot_nbytes: entry.num_free for slot_nbytes, entry in self._classes.items()}
        assert all(entry.open == sorted(set(entry.open)) for entry in self._classes.values())
        assert used == {_RESERVED: self._reserved_bytes, _LIMBO: self._limbo_bytes}
        assert self._reserved_bytes + self._limbo_bytes <= self.capacity_bytes

    def _class_of(self, nbytes: int) -> "_SizeClass":
        slot_nbytes = self.slot_nbytes(nbytes)
        size_class = self._classes.get(slot_nbytes)
        if size_class is None:
            size_class = self._classes[slot_nbytes] = _SizeClass(slot_nbytes, self._segment_bytes // slot_nbytes)
        return size_class

    def _restore_segments(self, size_class: "_SizeClass", offsets: NDArray[np.int64]) -> None:
        """Segments as they were, from the slots of one size that are in use."""
        offsets = np.sort(offsets)
        assert (np.diff(offsets) > 0).all()
        self._reserved_bytes += len(offsets) * size_class.slot_nbytes
        numbers = offsets // self._segment_bytes
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for number, used in zip(numbers[starts].tolist(), np.split(offsets, starts[1:]), strict=True):
            assert self._segments[number] is None, f"segment {number} has slots of two sizes"
            segment = _Segment(size_class.slot_nbytes, size_class.slots_per_segment)
            segment.mark(used % self._segment_bytes // size_class.slot_nbytes)
            self._segments[number] = segment
            if segment.free:
                insort(size_class.open, number)
                size_class.num_free += len(segment.free)

    def _give_segment(self, size_class: "_SizeClass") -> bool:
        if not self._free_segments:
            return False
        number = heapq.heappop(self._free_segments)
        self._segments[number] = _Segment(size_class.slot_nbytes, size_class.slots_per_segment)
        insort(size_class.open, number)
        size_class.num_free += size_class.slots_per_segment
        return True

    def _locate(self, offset: int) -> "tuple[_Segment, int]":
        number, inside = divmod(offset, self._segment_bytes)
        segment = self._segments[number]
        assert segment is not None, f"offset {offset} lies in a free segment"
        slot, rest = divmod(inside, segment.slot_nbytes)
        assert rest == 0, f"offset {offset} is not the start of a slot"
        return segment, slot

    def _release(self, offset: int) -> None:
        segment, slot = self._locate(offset)
        number = offset // self._segment_bytes
        size_class = self._classes[segment.slot_nbytes]
        state = segment.states[slot]
        assert state != _FREE, f"slot at {offset} is free already"
        if state == _RESERVED:
            self._reserved_bytes -= segment.slot_nbytes
        else:
            self._limbo_bytes -= segment.slot_nbytes
        segment.states[slot] = _FREE
        if not segment.free:
            insort(size_class.open, number)
        segment.free.append(slot)
        size_class.num_free += 1
        if len(segment.free) == size_class.slots_per_segment:
            del size_class.open[bisect_left(size_class.open, number)]
            size_class.num_free -= size_class.slots_per_segment
            self._segments[number] = None
            heapq.heappush(self._free_segments, number)


def _one(extent: Extent) -> SlotArrays:
    return SlotArrays(np.array([extent.offset], np.int64), np.array([extent.generation], np.uint64))


class _SizeClass:
    """Segments whose slots have one size. `open`: numbers of those with a free slot, ascending."""

    __slots__ = ("num_free", "open", "slot_nbytes", "slots_per_segment")

    def __init__(self, slot_nbytes: int, slots_per_segment: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.slots_per_segment = slots_per_segment
        self.num_free = 0
        self.open: list[int] = []


class _Segment:
    """The slots of one segment: a state byte each, and a stack of the free ones (4 bytes a slot)."""

    __slots__ = ("free", "slot_nbytes", "states")

    def __init__(self, slot_nbytes: int, num_slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self.states = bytearray(num_slots)
        self.free = array("I", range(num_slots - 1, -1, -1))

    def take(self, count: int) -> NDArray[np.uint32]:
        """Pop up to `count` free slots and mark them reserved."""
        first = max(0, len(self.free) - count)
        slots = np.array(self.free[first:], np.uint32)[::-1]
        del self.free[first:]
        np.frombuffer(self.states, np.uint8)[slots] = _RESERVED
        return slots

    def mark(self, slots: NDArray[np.int64]) -> None:
        """Reserved, in a segment without any."""
        states = np.frombuffer(self.states, np.uint8)
        states[slots] = _RESERVED
        self.free = array("I", np.flatnonzero(states == _FREE)[::-1].astype(np.uint32).tobytes())


class Generations(Protocol):
    """What tells one use of a slot from the next: a number that goes up when the slot is reserved and ends when it is freed."""

    def begin(self, offsets: NDArray[np.int64], *, announced: bool) -> NDArray[np.uint64]:
        """Generations for slots that are being reserved."""
        ...

    def announce(self, slots: SlotArrays) -> None:
        """Let the generation of slots begun without announcement be seen."""
        ...

    def restore(self, slots: SlotArrays) -> None:
        """These were begun before a restart."""
        ...

    def are_current(self, slots: SlotArrays) -> bool:
        """Whether these may be the generations of the slots' present use; as far as we can know."""
        ...

    def end(self, slots: SlotArrays) -> None:
        """Slots that are being freed."""
        ...


class SharedGenerations:
    """For a tier that others map: `table[offset // align]` is the generation of the slot that starts at `offset`.

        free     reserved, announced     reserved, not announced     freed
        2n       2n + 1                  2n, then 2n + 1             2n + 2

    Whoever still holds an older extent sees a difference, also after the segment went to a class whose slots start
    elsewhere: a table entry never goes back.
    """

    def __init__(self, table: NDArray[np.uint64], align: int = SLOT_ALIGN_BYTES) -> None:
        assert table.dtype == np.uint64
        self._table = table
        self._align = align

    def begin(self, offsets: NDArray[np.int64], *, announced: bool) -> NDArray[np.uint64]:
        """See Generations."""
        pages = offsets // self._align
        generations = self._table[pages] + np.uint64(1)
        if announced:
            self._table[pages] = generations
        return generations

    def announce(self, slots: SlotArrays) -> None:
        """See Generations."""
        pages = slots.offsets // self._align
        assert (self._table[pages] == slots.generations - np.uint64(1)).all()
        self._table[pages] = slots.generations

    def restore(self, slots: SlotArrays) -> None:
        """See Generations."""
        self._table[slots.offsets // self._align] = slots.generations

    def are_current(self, slots: SlotArrays) -> bool:
        """See Generations."""
        found = self._table[slots.offsets // self._align]
        return bool(((found == slots.generations) | (found + np.uint64(1) == slots.generations)).all())

    def end(self, slots: SlotArrays) -> None:
        """See Generations."""
        self._table[slots.offsets // self._align] = slots.generations + np.uint64(1)


class CountedGenerations:
    """For drives, which nobody maps: one number for each use of any slot, over all drives that share the counter and over
    restarts. A table would cost 8 bytes of RAM for each 4 KiB of disk."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def begin(self, offsets: NDArray[np.int64], *, announced: bool) -> NDArray[np.uint64]:  # noqa: ARG002 - nobody looks
        """See Generations."""
        first, self._next = self._next, self._next + len(offsets)
        return np.arange(first, self._next, dtype=np.uint64)

    def announce(self, slots: SlotArrays) -> None:
        """See Generations."""

    def restore(self, slots: SlotArrays) -> None:
        """See Generations."""
        if len(slots.generations):
            self._next = max(self._next, int(slots.generations.max()) + 1)

    def are_current(self, slots: SlotArrays) -> bool:
        """See Generations."""
        return bool((slots.generations < self._next).all())

    def end(self, slots: SlotArrays) -> None:
        """See Generations."""
