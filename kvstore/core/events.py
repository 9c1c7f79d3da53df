"""What happened to blocks, as values. Metrics, router events and tests count the same ones."""

import enum
from typing import NamedTuple


class RemovalReason(enum.StrEnum):
    """Why a block left a tier."""

    EVICTED = "evicted"
    DROPPED = "dropped"
    DAMAGED = "damaged"


class BlockStored(NamedTuple):
    """Blocks became READY in a tier. `hashes` in prefix order; `parent` is b"" for the first block of a sequence."""

    namespace: bytes
    tier: str
    parent: bytes
    hashes: tuple[bytes, ...]
    nbytes: int


class BlockRemoved(NamedTuple):
    """Blocks are no longer found in a tier."""

    namespace: bytes
    tier: str
    hashes: tuple[bytes, ...]
    nbytes: int
    reason: RemovalReason


Event = BlockStored | BlockRemoved
