"""The nouns of block storage: where a block's bytes lie, in which state, and for whom they are held."""

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import SLOT_ALIGN_BYTES


class Extent(NamedTuple):
    """A range inside a tier. `generation` changes whenever the range is given to another block, so that a stale extent is
    noticed. `offset` is in bytes from the start of the tier and a multiple of SLOT_ALIGN_BYTES."""

    offset: int
    nbytes: int
    generation: int


def slot_nbytes(nbytes: int) -> int:
    """Bytes of the slot of a block of `nbytes`: whole pages."""
    return -(-nbytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


class SlotArrays(NamedTuple):
    """Many slots of a tier as two columns of equal length: a call handles 512 blocks, too many for an object each."""

    offsets: NDArray[np.int64]
    generations: NDArray[np.uint64]

    def extents(self, nbytes: int) -> tuple[Extent, ...]:
        """An object each, for blocks of `nbytes`."""
        columns = self.offsets.tolist(), self.generations.tolist()
        return tuple([Extent(offset, nbytes, generation) for offset, generation in zip(*columns, strict=True)])


NO_SLOTS = SlotArrays(np.empty(0, np.int64), np.empty(0, np.uint64))


class PlacementState(enum.IntEnum):
    """Life of a copy of a block in a tier: NONE -> WRITING -> READY -> LEAVING -> NONE; abort goes WRITING -> NONE.

    Only READY is given to readers. ARRIVING is WRITING by ourselves, from a slower tier: it may be leased, and its reader
    waits until the slot's generation is announced. LEAVING is no longer found by match and takes no new lease; its bytes
    stay until the last lease on it has ended.
    """

    NONE = 0
    WRITING = 1
    READY = 2
    LEAVING = 3
    ARRIVING = 4


class Holder(NamedTuple):
    """Who holds a lease: an engine instance (all processes of one engine share its uuid) and the connection it used."""

    instance: bytes  # 16 bytes
    session_id: int


class KeyStatus(enum.IntEnum):
    """What Reserve says of each key, in one byte of the reply."""

    GRANTED = 1  # a slot is reserved; write it and commit
    HELD = 2  # READY or being written already; nothing to do
    DECLINED = 3  # no room, or its parent is not held; so are all keys after it
