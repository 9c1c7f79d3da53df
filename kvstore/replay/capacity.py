"""How much a tier under replay holds: so many blocks, whatever their size, or so many bytes in segments, as in a sidecar."""

from typing import NamedTuple

from kvstore.config import parse_size
from kvstore.core.errors import ConfigError
from kvstore.core.ports import DriveSlots, SlotSpace
from kvstore.replay.trace import Recorded
from kvstore.replay.unit_slots import UnitDrive, UnitSlots
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots
from kvstore.tiers.striped import StripedSlots

MAX_SEGMENTS = 1 << 24  # 1 PiB of the default size; a replay has an entry for each
MAX_BLOCKS = 1 << 26  # likewise, of 40 bytes


class Capacity(NamedTuple):
    """Of a tier."""

    amount: int
    segment_bytes: int = 0  # 0: the amount is blocks, else bytes

    @property
    def in_bytes(self) -> bool:
        """Whether blocks count by their size."""
        return self.segment_bytes > 0

    def slots(self) -> SlotSpace:
        """For RAM."""
        return self._segmented() if self.in_bytes else UnitSlots(self.amount)

    def drive(self) -> DriveSlots:
        """For a tier below."""
        return StripedSlots([self._segmented()]) if self.in_bytes else UnitDrive(self.amount)

    def _segmented(self) -> SegmentedSlots:
        slots = SegmentedSlots(self.amount, segment_bytes=self.segment_bytes, generations=CountedGenerations())
        slots.add_segments(self.amount // self.segment_bytes)
        return slots


def read_capacity(text: str, field: str, recorded: Recorded | None) -> Capacity:
    """`10000` blocks, or of a recording `8GiB`, in whole segments. Raises ConfigError."""
    digits = text.strip()
    if 0 < (num_blocks := int(digits) if digits.isdecimal() else 0) <= MAX_BLOCKS:
        return Capacity(num_blocks)
    try:
        nbytes = parse_size(digits)
    except ValueError:
        nbytes = 0
    if num_blocks:
        right = f"use at most {MAX_BLOCKS} blocks"
    elif nbytes > 0 and recorded is None:
        right = "a trace does not say how large a block is: use blocks, such as 10000"
    elif recorded is not None and nbytes < recorded.segment_bytes:
        right = f"use blocks, such as 10000, or a size of at least a segment, {recorded.segment_bytes} bytes"
    elif recorded is not None and nbytes // recorded.segment_bytes > MAX_SEGMENTS:
        right = f"use at most {MAX_SEGMENTS} segments of {recorded.segment_bytes} bytes"
    elif recorded is not None:
        return Capacity(nbytes - nbytes % recorded.segment_bytes, recorded.segment_bytes)
    else:
        right = "use blocks, such as 1000,3000,10000"
    raise ConfigError(f"--{field}: {text!r}; {right}", field=field, value=text)
