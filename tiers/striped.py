"""Slots over several drives, named by one number each."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import Extent, SlotArrays, slot_nbytes
from kvstore.core.moves import DRIVE_SHIFT
from kvstore.tiers.slots import SegmentedSlots

_OFFSET_MASK = (1 << DRIVE_SHIFT) - 1


class StripedSlots:
    """A DriveSlots (core/ports.py) over the slots of each drive: a slot is `drive << DRIVE_SHIFT | offset`.

    Blocks are dealt out in turn, so that a prefix lies on all drives and is read from all at once; a drive that is full is
    passed over. Without drives it has no slot, and is a tier that is not there.
    """

    def __init__(self, drives: Sequence[SegmentedSlots]) -> None:
        self._drives = tuple(drives)
        self._turn = 0
        self._closed: set[int] = set()

    def set_open(self, drive: int, *, is_open: bool) -> None:
        """See DriveSlots."""
        (self._closed.discard if is_open else self._closed.add)(drive)

    @property
    def open_drives(self) -> tuple[int, ...]:
        """See DriveSlots."""
        return tuple([number for number in range(len(self._drives)) if number not in self._closed])

    @property
    def capacity_bytes(self) -> int:
        """Of all drives."""
        return sum(drive.capacity_bytes for drive in self._drives)

    @property
    def reserved_bytes(self) -> int:
        """Of all drives."""
        return sum(drive.reserved_bytes for drive in self._drives)

    @property
    def limbo_bytes(self) -> int:
        """Of all drives."""
        return sum(drive.limbo_bytes for drive in self._drives)

    @property
    def free_slots_bytes(self) -> int:
        """Of all drives."""
        return sum(drive.free_slots_bytes for drive in self._drives)

    def slot_nbytes(self, nbytes: int) -> int:
        """As on each drive; without drives, `nbytes` rounded up to whole pages."""
        if self._drives:
            return self._drives[0].slot_nbytes(nbytes)
        return slot_nbytes(nbytes)

    def num_free(self, nbytes: int) -> int:
        """Of all drives that are open."""
        return sum(self._free(nbytes))

    def reserve(self, nbytes: int) -> Extent | None:
        """See SlotSpace."""
        slots = self.reserve_many(nbytes, 1)
        return next(iter(slots.extents(nbytes)), None)

    def reserve_many(self, nbytes: int, count: int, *, announced: bool = True) -> SlotArrays:
        """See SlotSpace. Slot i of the answer is on the drive whose turn it is, as long as that one has room."""
        owners = self._deal(self._free(nbytes), count)
        offsets, generations = np.empty(len(owners), np.int64), np.empty(len(owners), np.uint64)
        for number, drive in enumerate(self._drives):
            mine = owners == number
            taken = drive.reserve_many(nbytes, int(np.count_nonzero(mine)), announced=announced)
            offsets[mine] = taken.offsets + (number << DRIVE_SHIFT)
            generations[mine] = taken.generations
        return SlotArrays(offsets, generations)

    def announce(self, slots: SlotArrays) -> None:
        """See SlotSpace."""
        for drive, own in self._split(slots):
            drive.announce(own)

    def restore(self, nbytes: int, slots: SlotArrays) -> None:
        """See SlotSpace."""
        for drive, own in self._split(slots):
            drive.restore(nbytes, own)

    def to_limbo(self, extent: Extent) -> None:
        """See SlotSpace."""
        drive = self._drives[extent.offset >> DRIVE_SHIFT]
        drive.to_limbo(extent._replace(offset=extent.offset & _OFFSET_MASK))

    def to_limbo_many(self, slots: SlotArrays) -> None:
        """See SlotSpace."""
        for drive, own in self._split(slots):
            drive.to_limbo_many(own)

    def free(self, extent: Extent) -> None:
        """See SlotSpace."""
        drive = self._drives[extent.offset >> DRIVE_SHIFT]
        drive.free(extent._replace(offset=extent.offset & _OFFSET_MASK))

    def free_many(self, slots: SlotArrays) -> None:
        """See SlotSpace."""
        for drive, own in self._split(slots):
            drive.free_many(own)

    def check(self) -> None:
        """See SlotSpace."""
        for drive in self._drives:
            drive.check()

    def _free(self, nbytes: int) -> list[int]:
        return [0 if i in self._closed else drive.num_free(nbytes) for i, drive in enumerate(self._drives)]

    def _deal(self, free: list[int], count: int) -> NDArray[np.int64]:
        """A drive's number for each of up to `count` slots."""
        owners: list[int] = []
        count = min(count, sum(free))
        while len(owners) < count:
            if free[self._turn]:
                free[self._turn] -= 1
                owners.append(self._turn)
            self._turn = (self._turn + 1) % len(free)
        return np.array(owners, np.int64)

    def _split(self, slots: SlotArrays) -> list[tuple[SegmentedSlots, SlotArrays]]:
        owners = slots.offsets >> DRIVE_SHIFT
        offsets = slots.offsets & _OFFSET_MASK
        return [
            (drive, SlotArrays(offsets[owners == number], slots.generations[owners == number]))
            for number, drive in enumerate(self._drives)
            if (owners == number).any()
        ]
