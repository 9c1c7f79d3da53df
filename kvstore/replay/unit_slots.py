"""Slots that are all alike, for a tier that exists in a replay only."""

import numpy as np

from kvstore.core.blocks import Extent, SlotArrays


class UnitSlots:
    """A SlotSpace (core/ports.py) of `num_slots` slots of one byte, whatever a block has."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._limbo: set[int] = set()

    @property
    def capacity_bytes(self) -> int:
        """See SlotSpace."""
        return self._num_slots

    @property
    def reserved_bytes(self) -> int:
        """See SlotSpace."""
        return self._num_slots - len(self._free) - len(self._limbo)

    @property
    def limbo_bytes(self) -> int:
        """See SlotSpace."""
        return len(self._limbo)

    @property
    def free_slots_bytes(self) -> int:
        """See SlotSpace."""
        return len(self._free)

    def slot_nbytes(self, nbytes: int) -> int:  # noqa: ARG002 - all are alike
        """See SlotSpace."""
        return 1

    def num_free(self, nbytes: int) -> int:  # noqa: ARG002
        """See SlotSpace."""
        return len(self._free)

    def reserve(self, nbytes: int) -> Extent | None:
        """See SlotSpace."""
        return Extent(self._free.pop(), nbytes, 0) if self._free else None

    def reserve_many(self, nbytes: int, count: int, *, announced: bool = True) -> SlotArrays:  # noqa: ARG002
        """See SlotSpace."""
        count = min(count, len(self._free))
        start = len(self._free) - count
        taken = self._free[start:]
        del self._free[start:]
        return SlotArrays(np.array(taken, np.int64), np.zeros(count, np.uint64))

    def announce(self, slots: SlotArrays) -> None:
        """See SlotSpace."""

    def restore(self, nbytes: int, slots: SlotArrays) -> None:  # noqa: ARG002
        """See SlotSpace."""
        taken = set(slots.offsets.tolist())
        assert taken <= set(self._free)
        self._free = [slot for slot in self._free if slot not in taken]

    def to_limbo(self, extent: Extent) -> None:
        """See SlotSpace."""
        assert extent.offset not in self._limbo
        self._limbo.add(extent.offset)

    def to_limbo_many(self, slots: SlotArrays) -> None:
        """See SlotSpace."""
        self._limbo.update(slots.offsets.tolist())

    def free(self, extent: Extent) -> None:
        """See SlotSpace."""
        self._limbo.discard(extent.offset)
        self._free.append(extent.offset)

    def free_many(self, slots: SlotArrays) -> None:
        """See SlotSpace."""
        offsets = slots.offsets.tolist()
        self._limbo.difference_update(offsets)
        self._free.extend(offsets)

    def check(self) -> None:
        """No slot is free twice, or free and in limbo."""
        assert len(set(self._free)) == len(self._free)
        assert not self._limbo & set(self._free)


class UnitDrive(UnitSlots):
    """A DriveSlots of one drive."""

    _is_open = True

    @property
    def open_drives(self) -> tuple[int, ...]:
        """See DriveSlots."""
        return (0,) if self._is_open else ()

    def set_open(self, drive: int, *, is_open: bool) -> None:  # noqa: ARG002 - there is one
        """See DriveSlots."""
        self._is_open = is_open
