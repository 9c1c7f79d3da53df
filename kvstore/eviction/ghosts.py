"""What a tier has evicted lately: when, by which expert, and when it was last used."""

import math
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import MAX_GHOSTS
from kvstore.eviction.policy import TierRows
from kvstore.index import NO_PARENT, BlockIndex, Rows

HISTORY = 32
"""Times as many evicted blocks as the tier holds are remembered: blocks come back after long."""

_WAYS = 8
_STAMP_BITS = 30  # of 32; the other two are the mark
_STAMP_MASK = (1 << _STAMP_BITS) - 1
_FIRST_SLOTS = 1024
_BATCH_EVICTIONS = 256
_NUMBER = struct.Struct("<Q").unpack_from  # of a key: it is a hash


class Ghost(NamedTuple):
    """A block that is remembered."""

    mark: int
    age: float  # blocks used since it was evicted, in blocks that the tier holds
    last_use: int
    uses: int


class Ghosts:
    """The last evictions, `history` for each block that the tier holds, MAX_GHOSTS at most, in a table of 16 bytes a slot.

        slot            | tag (32 bits of the key) | stamp (30 bits of the clock), mark (2) | last use (56), uses (8)
        8 x hash + 0    | 9a41 03bb                | 17, 1                                  | 16, 2
        ...        + 7  | 0000 0000: free          |                                        |

    A key, a hash already, has eight slots, which are filled in turn: one in a hundred is lost too early.
    Two keys whose slots and tags agree are taken for one another: one look-up in a billion. Growing forgets; a tier that
    fills grows.
    The clock counts blocks used (`index.num_uses`). The last evictions wait in a dict and are written in
    one go, before anything is taken.
    """

    def __init__(self, index: BlockIndex, tier: TierRows, *, history: int = HISTORY) -> None:
        self._index = index
        self._tier = tier
        self._history = history
        self._num_evicted = 0
        self.capacity = 1  # blocks that the tier holds
        self._last_stored = NO_PARENT
        self._waiting: dict[bytes, tuple[int, int]] = {}  # by key: stamp and mark, last use and uses
        self._allocate(_FIRST_SLOTS)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self._tags.nbytes + self._stamps.nbytes + self._uses.nbytes + self._turns.nbytes

    def add(self, row: int, mark: int) -> None:
        """The row's block is being evicted; `mark` is 0 to 3."""
        if self._num_evicted % _BATCH_EVICTIONS == 0:
            self._write()
            self._resize()
        self._num_evicted += 1
        index = self._index
        use = index.last_use_at[row] << 8 | index.uses_at[row]
        self._waiting[index.keys[row]] = ((index.num_uses & _STAMP_MASK) << 2 | mark, use)

    def take(self, row: int) -> Ghost | None:
        """What is known of the row's block, which is here again; it is forgotten."""
        self._write()
        (number,) = _NUMBER(self._index.keys[row])
        first, tag = (number & self._mask) * _WAYS, (number >> 32) or 1
        tags = self._tags_at[first : first + _WAYS].tolist()
        if tag not in tags:
            return None
        slot = first + tags.index(tag)
        self._tags_at[slot] = 0
        stamp, use = self._stamps_at[slot], self._uses_at[slot]
        age = (self._index.num_uses - (stamp >> 2)) & _STAMP_MASK
        return Ghost(stamp & 3, age / self.capacity, use >> 8, use & 255)

    def take_first(self, rows: Rows) -> Ghost | None:
        """A request's new blocks are here again: give the rows their uses back, and say what is known of the first that is
        remembered. None too when the rows continue those of the call before: then that was the first."""
        first: Ghost | None = None
        index = self._index
        numbers = rows.tolist()
        for row in self._perhaps_known(numbers):
            ghost = self.take(row)
            if ghost is not None:
                first = first or ghost
                if not index.last_use_at[row]:
                    index.last_use_at[row] = ghost.last_use
                    index.uses_at[row] = ghost.uses
        if not numbers:
            return None
        parent, before = index.parent_at[numbers[0]], self._last_stored
        self._last_stored = numbers[-1]
        return None if parent != NO_PARENT and parent == before else first

    def _perhaps_known(self, rows: list[int]) -> list[int]:
        """Those that wait, or whose tags are in one of their slots; most new blocks are unknown, and one call for all is soon
        done."""
        keys = [self._index.keys[row] for row in rows]
        places, tags = self._places(keys)
        known = (self._tags.reshape(-1, _WAYS)[places] == tags[:, None]).any(axis=1)
        if not self._waiting.keys().isdisjoint(keys):
            known |= [key in self._waiting for key in keys]
        return [rows[i] for i in np.flatnonzero(known).tolist()]

    def _places(self, keys: Iterable[bytes]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Where to look for them, and the tags to look for."""
        numbers = np.frombuffer(b"".join([key[:8] for key in keys]), "<u8")
        tags = np.maximum(numbers >> np.uint64(32), np.uint64(1)).astype(np.uint32)
        return (numbers & np.uint64(self._mask)).astype(np.int64), tags

    def _write(self) -> None:
        """What waits into the table, in order: of two in one slot the later stays."""
        if not self._waiting:
            return
        places, tags = self._places(self._waiting)
        order = np.argsort(places, kind="stable")
        places = places[order]
        before = np.arange(len(places)) - np.searchsorted(places, places)  # others of the same place
        turns = (self._turns[places] + before) % _WAYS
        slots = places * _WAYS + turns
        stamps, uses = np.array(list(self._waiting.values()), np.int64).T
        self._tags[slots] = tags[order]
        self._stamps[slots] = stamps[order]
        self._uses[slots] = uses[order]
        self._turns[places] = (turns + 1) % _WAYS
        self._waiting.clear()

    def _resize(self) -> None:
        self.capacity = max(1, self._tier.num_placed())
        wanted = min(self._history * self.capacity, MAX_GHOSTS)
        num_slots = 1 << math.ceil(math.log2(max(_FIRST_SLOTS, wanted)))
        if num_slots > len(self._tags):
            self._allocate(num_slots)

    def _allocate(self, num_slots: int) -> None:
        num_places = num_slots // _WAYS
        self._mask = num_places - 1
        self._tags = np.zeros(num_slots, np.uint32)
        self._stamps = np.zeros(num_slots, np.uint32)
        self._uses = np.zeros(num_slots, np.int64)
        self._turns = np.zeros(num_places, np.uint8)
        self._tags_at = self._tags.data
        self._stamps_at = self._stamps.data
        self._uses_at = self._uses.data
