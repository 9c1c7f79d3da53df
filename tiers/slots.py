"""Which bytes of a tier belong to which block: segments given to size classes, slots inside them."""

import heapq
from array import array
from bisect import bisect_left, insort

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

    `generations[offset // align]` is the generation of the slot that starts at `offset`. It goes up when the slot is
    reserved and again when it is freed: whoever still holds an older extent sees a difference, also after the segment
    went to a class whose slots start elsewhere. Begins without segments; `add_segments` gives it those that are ready.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        generations: NDArray[np.uint64],
        segment_bytes: int = SEGMENT_BYTES,
        align: int = SLOT_ALIGN_BYTES,
    ) -> None:
        assert segment_bytes % align == 0
        assert capacity_bytes % segment_bytes == 0
        assert generations.dtype == np.uint64
        assert len(generations) == capacity_bytes // align
        self._segment_bytes = segment_bytes
        self._align = align
        self._generations = generations
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
    def num_free_segments(self) -> int:
        """Segments that no size class has."""
        return len(self._free_segments)

    def add_segments(self, count: int) -> None:
        """The next `count` segments of the tier may be given out from now on."""
        first = len(self._segments)
        assert first + count <= self._max_segments
        self._segments.extend([None] * count)
        for number in range(first, first + count):
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

    def reserve_many(self, nbytes: int, count: int) -> SlotArrays:
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
        pages = offsets // self._align
        generations = self._generations[pages] + np.uint64(1)
        self._generations[pages] = generations
        return SlotArrays(offsets, generations)

    def to_limbo(self, extent: Extent) -> None:
        """Reserved -> limbo. The generation stays: nobody new gets the slot."""
        segment, slot = self._locate(extent.offset)
        assert self._generations[extent.offset // self._align] == extent.generation
        assert segment.states[slot] == _RESERVED
        segment.states[slot] = _LIMBO
        self._reserved_bytes -= segment.slot_nbytes
        self._limbo_bytes += segment.slot_nbytes

    def free(self, extent: Extent) -> None:
        """Reserved or limbo -> free."""
        page = extent.offset // self._align
        assert self._generations[page] == extent.generation
        self._generations[page] += np.uint64(1)
        self._release(extent.offset)

    def free_many(self, slots: SlotArrays) -> None:
        """Reserved or limbo -> free, for each."""
        pages = slots.offsets // self._align
        assert (self._generations[pages] == slots.generations).all()
        self._generations[pages] += np.uint64(1)
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
