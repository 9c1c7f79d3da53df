"""A peer's arena as this node reads it: where it lies, whether it is connected, and its prepared descriptors."""

import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import slot_nbytes
from kvstore.core.errors import ConfigError, RemoteProtocolError
from kvstore.core.limits import MAX_DESCRIPTOR_BYTES, SEGMENT_BYTES
from kvstore.transport.link import ReadExtent
from kvstore.transport.nixl import Agent, Rows

BEACON_NBYTES = 16

MAX_PREPARED = 1 << 16
"""Descriptors of a prepared list, some 100 bytes each. An arena that has more slots of a size is read without one."""

MAX_PREPARED_SIZES = 16
"""Sizes of blocks that lists are kept for, on either side; a model's layer groups have two or three. Others are read by
address, which takes 0.1 ms more for 32 of them."""

_MAX_ADDRESS = 1 << 57
"""Of a process, on any machine there is."""
_MAX_ARENA_BYTES = 1 << 46
_MAGIC = b"KVR1"
_HEADER = struct.Struct(f"<4s{BEACON_NBYTES}sQQQQI")


class ArenaPlace(NamedTuple):
    """Addresses in the owner's process, all registered with its agent.

        | "KVR1" | beacon, 16 bytes | u64le: its address | arena | its bytes | generations | u32le: bytes of metadata | metadata |

    The beacon is a random number that the owner keeps at that address while the arena is served, and clears when it
    closes. Who reads it unchanged after the data has read from this very owner: not from another process that has its
    addresses by now, not from memory that is somebody else's again.
    """

    beacon: bytes
    beacon_at: int
    memory_at: int
    memory_nbytes: int
    generations_at: int
    metadata: bytes

    def encode(self) -> bytes:
        """As it travels."""
        encoded = _HEADER.pack(_MAGIC, *self[:-1], len(self.metadata)) + self.metadata
        if len(encoded) > MAX_DESCRIPTOR_BYTES:
            raise ConfigError(
                f"rdma: a descriptor of {len(encoded)} bytes; at most {MAX_DESCRIPTOR_BYTES}: set fewer UCX_NET_DEVICES",
                field="rdma",
                value=len(encoded),
            )
        return encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Self:
        """The inverse of `encode`. Raises RemoteProtocolError."""
        if len(encoded) >= _HEADER.size:
            magic, beacon, beacon_at, memory_at, memory_nbytes, generations_at, metadata_nbytes = _HEADER.unpack_from(
                encoded
            )
            places = beacon_at, memory_at, memory_nbytes, generations_at
            is_whole = len(encoded) == _HEADER.size + metadata_nbytes <= MAX_DESCRIPTOR_BYTES
            is_sane = memory_nbytes <= _MAX_ARENA_BYTES and max(beacon_at, memory_at, generations_at) <= _MAX_ADDRESS
            if magic == _MAGIC and is_whole and is_sane:
                return cls(beacon, *places, encoded[_HEADER.size :])
        raise RemoteProtocolError(
            f"descriptor: {encoded[:32].hex()} ({len(encoded)} bytes) is not that of an rdma endpoint",
            field="descriptor",
            value=encoded[:32].hex(),
        )


class Grid:
    """Slots of one size in an arena of segments, as prepared descriptors: slot n of segment s has index s * per_segment + n."""

    def __init__(self, base: int, arena_nbytes: int, nbytes: int) -> None:
        self._base, self._arena_nbytes, self._nbytes = base, arena_nbytes, nbytes
        self.slot_nbytes = slot_nbytes(nbytes)
        self.per_segment = SEGMENT_BYTES // self.slot_nbytes
        num_whole, rest = divmod(arena_nbytes, SEGMENT_BYTES)
        self.size = num_whole * self.per_segment + rest // self.slot_nbytes

    @property
    def rows(self) -> Rows:
        """A row for each segment that has slots. Not to be asked for before it is known that `size` will do."""
        starts = range(0, self._arena_nbytes, SEGMENT_BYTES)
        counts = [min(SEGMENT_BYTES, self._arena_nbytes - start) // self.slot_nbytes for start in starts]
        return np.array(
            [
                (self._base + start, self._nbytes, 0, self.slot_nbytes, count)
                for start, count in zip(starts, counts, strict=True)
                if count
            ],
            np.uint64,
        ).reshape(-1, 5)

    def indexes(self, offsets: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """Of slots that start at these offsets; None when one of them is no slot's start."""
        segments = offsets // SEGMENT_BYTES
        inside = offsets - segments * SEGMENT_BYTES
        numbers = inside // self.slot_nbytes
        indexes = segments * self.per_segment + numbers
        is_slot = (numbers * self.slot_nbytes == inside) & (numbers < self.per_segment) & (indexes < self.size)
        if not is_slot.all():
            return None
        return indexes.astype(np.int32)


class PreparedGrids:
    """Prepared lists of one arena, for the block sizes that come first: one that is in use cannot be given back. `name` is the
    peer's, "" for our own arena."""

    def __init__(self, agent: Agent, name: str, base: int, arena_nbytes: int) -> None:
        self._agent = agent
        self._name = name
        self._base, self._arena_nbytes = base, arena_nbytes
        self._lists: dict[int, tuple[Grid, Any] | None] = {}

    def get(self, nbytes: int) -> tuple[Grid, Any] | None:
        """The grid of blocks of `nbytes` and its list; None when it would be too long, or one too many. Raises
        TransferFailed."""
        if nbytes not in self._lists:
            if len(self._lists) >= MAX_PREPARED_SIZES:
                return None
            grid = Grid(self._base, self._arena_nbytes, nbytes)
            prepared = self._agent.prepare(self._name, grid.rows) if 0 < grid.size <= MAX_PREPARED else None
            self._lists[nbytes] = None if prepared is None else (grid, prepared)
        return self._lists[nbytes]

    def release(self) -> None:
        """Give all lists back."""
        for kept in self._lists.values():
            if kept is not None:
                self._agent.release(kept[1])
        self._lists.clear()


@dataclass(slots=True, eq=False)
class Remote:
    """A peer's arena, shared by all links to it. The endpoint's thread alone touches it.

    `is_connected`: a transfer has succeeded since it was loaded. `is_broken`: one failed; it is loaded anew before the next,
    once the last transfer that knows it has ended.
    """

    place: ArenaPlace
    name: str = ""  # "" when it is not loaded
    is_connected: bool = False
    is_broken: bool = False
    num_groups: int = 0
    grids: PreparedGrids | None = field(default=None)

    def load(self, agent: Agent) -> bool:
        """Make it ready to be read from. False while old transfers are in the way. Raises as Agent.load does."""
        if self.is_broken:
            if self.num_groups:
                return False
            self.unload(agent)
        if not self.name:
            self.name = agent.load(self.place.metadata)
            self.grids = PreparedGrids(agent, self.name, self.place.memory_at, self.place.memory_nbytes)
        return True

    def unload(self, agent: Agent) -> None:
        """Forget the connection and all that was prepared for it."""
        if self.grids is not None:
            self.grids.release()
            self.grids = None
        if self.name:
            agent.forget(self.name)
        self.name, self.is_connected, self.is_broken = "", False, False

    def holds(self, extent: ReadExtent) -> bool:
        """Whether it lies in the arena."""
        return extent.remote_offset + extent.nbytes <= self.place.memory_nbytes
