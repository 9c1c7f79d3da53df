"""What the brains need from outside, as contracts from which a second implementation can be made."""

from typing import Protocol

from kvstore.core.blocks import Extent, SlotArrays


class SlotSpace(Protocol):
    """Slots of a tier: who may use which bytes. Pure bookkeeping; touches no byte of the tier.

    Called by the loop thread only; nothing blocks. A slot is in exactly one of: free, reserved, limbo.
    """

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be given out, whole segments. Grows while the tier is being prepared."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slots that hold a block or are being written."""
        ...

    @property
    def limbo_bytes(self) -> int:
        """Bytes of the slots in limbo. What is neither reserved nor in limbo is free."""
        ...

    @property
    def free_slots_bytes(self) -> int:
        """Bytes of free slots and free segments: of all that is free, what is not too short for a slot of its segment."""
        ...

    def slot_nbytes(self, nbytes: int) -> int:
        """Size of the slot that a block of `nbytes` occupies. Raises SpecMismatch when it exceeds a segment."""
        ...

    def reserve(self, nbytes: int) -> Extent | None:
        """A free slot for `nbytes`, or None when its size class has none and no whole segment is free."""
        ...

    def num_free(self, nbytes: int) -> int:
        """How many blocks of `nbytes` could be reserved now: free slots of its size class, and free whole segments."""
        ...

    def reserve_many(self, nbytes: int, count: int, *, announced: bool = True) -> SlotArrays:
        """`min(count, num_free(nbytes))` slots for blocks of `nbytes`. Not `announced`: whoever looks at a slot's generation
        sees the one before, until `announce`; that is how a reader knows that the bytes are still to come."""
        ...

    def announce(self, slots: SlotArrays) -> None:
        """The bytes of slots reserved without announcement are there."""
        ...

    def restore(self, nbytes: int, slots: SlotArrays) -> None:
        """Free -> reserved for slots of blocks of `nbytes` that were in use before a restart."""
        ...

    def to_limbo(self, extent: Extent) -> None:
        """The slot is nobody's block any more, but somebody may still touch it: neither free nor reserved."""
        ...

    def to_limbo_many(self, slots: SlotArrays) -> None:
        """`to_limbo` for each of them; they may be of different sizes."""
        ...

    def free(self, extent: Extent) -> None:
        """The slot (reserved or in limbo) may be given out again, under another generation. Asserts the generation."""
        ...

    def free_many(self, slots: SlotArrays) -> None:
        """`free` for each of them; they may be of different sizes."""
        ...

    def check(self) -> None:
        """Assert that free + reserved + limbo = capacity, by slot and by segment."""
        ...


class DriveSlots(SlotSpace, Protocol):
    """Slots of a tier of drives, named as in core/moves.py. A drive that takes no writes is closed for a while."""

    @property
    def open_drives(self) -> tuple[int, ...]:
        """Drives that new slots are given out on."""
        ...

    def set_open(self, drive: int, *, is_open: bool) -> None:
        """Whether new slots are given out on that drive. Slots in use stay as they are."""
        ...
