"""A node's published blocks as a log that others follow: what is held, then what was stored and removed since."""

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import RemoteProtocolError
from kvstore.transport.directory import Fingerprints

RECORD_NBYTES = 8

COMPACT_RECORDS = 1 << 16
"""A log is rewritten when it has this many records more than twice its base: then at most some two thirds of it are void."""

TAIL_RECORDS = 1 << 16
"""Records of the generation before that are kept, so that a follower that was a little behind need not start anew."""

_STORED = np.uint64(1)
_IDENTITY = ~_STORED
_NOTHING: NDArray[np.uint64] = np.empty(0, np.uint64)


class Cursor(NamedTuple):
    """How far a follower is: it has the first `offset` records of that generation. Of generation 0 there are none."""

    epoch: int = 0
    generation: int = 0
    offset: int = 0


class Head(NamedTuple):
    """Where a log stands. Its first `base` records are the same set of blocks as all `previous_end` of the generation before,
    so who has those goes on at `base`; -1: nobody can."""

    epoch: int
    generation: int
    previous_end: int
    base: int
    end: int

    def next_for(self, cursor: Cursor) -> Cursor:
        """Where a follower at `cursor` reads on: in the same generation, at the base of the next, in what is left of its own
        (then the answer is of `cursor`'s generation), or at the start, having forgotten what it had."""
        if cursor.epoch == self.epoch:
            if cursor.generation == self.generation and cursor.offset <= self.end:
                return cursor
            if cursor.generation == self.generation - 1 and cursor.offset == self.previous_end:
                return Cursor(self.epoch, self.generation, self.base)
            if cursor.generation == self.generation - 1 and cursor.offset < self.previous_end:
                return cursor
        return Cursor(self.epoch, self.generation, 0)

    def start(self) -> Cursor:
        """Where a follower starts that has nothing."""
        return Cursor(self.epoch, self.generation, 0)


class LogChunk(NamedTuple):
    """Records from `at` on, u64le each, and where the log stands."""

    head: Head
    at: Cursor
    records: bytes

    @property
    def after(self) -> Cursor:
        """Where the follower is when it has applied them."""
        return self.at._replace(offset=self.at.offset + len(self.records) // RECORD_NBYTES)

    @property
    def is_last(self) -> bool:
        """Whether the follower has then all there is."""
        return self.head.next_for(self.after) == Cursor(self.head.epoch, self.head.generation, self.head.end)


class Updates(NamedTuple):
    """What records say, the last word on each block only."""

    stored: Fingerprints
    removed: Fingerprints


class BlockLog:
    """Ours. One thread appends and compacts; any thread reads.

        generation n:    | base: what is held, stored records | updates: stored and removed, in order | ...
        record, u64le:   | fingerprint, 63 bits | 1 stored, 0 removed |

    The log is the set: the last record of a block says whether it is held. Compaction writes the set as the base of the
    next generation. 8 bytes a block and update; a million blocks fold in some 0.15 s.
    """

    def __init__(self, epoch: int) -> None:
        self._lock = threading.Lock()
        self._records = np.empty(1024, np.uint64)
        self._tail = _NOTHING  # the last records of the generation before, those up to previous_end
        self._head = Head(epoch, 1, -1, 0, 0)

    @property
    def head(self) -> Head:
        """Where it stands."""
        return self._head

    def append(self, records: NDArray[np.uint64]) -> None:
        """Add what `stored` and `removed` made."""
        head = self._head
        end = head.end + len(records)
        if end > len(self._records):
            grown = np.empty(max(end, 2 * len(self._records)), np.uint64)
            grown[: head.end] = self._records[: head.end]
            with self._lock:
                self._records = grown
        self._records[head.end : end] = records  # beyond what anybody reads
        with self._lock:
            self._head = head._replace(end=end)

    def is_long(self) -> bool:
        """Whether it is time to compact."""
        return self._head.end > 2 * self._head.base + COMPACT_RECORDS

    def compact(self, at: int | None = None) -> None:
        """The next generation: as base what was held after the first `at` records (default: all), then the other records."""
        head, records = self._head, self._records
        at = head.end if at is None else at
        assert 0 <= at <= head.end
        base = fold(records[:at]).stored | _STORED
        compacted = np.concatenate([base, records[at : head.end]])
        with self._lock:
            self._tail = records[max(0, at - TAIL_RECORDS) : at].copy()
            self._records = compacted
            self._head = Head(head.epoch, head.generation + 1, at, len(base), len(compacted))

    def clear(self) -> None:
        """The next generation, empty, and of a set of which nobody knows how it came about."""
        with self._lock:
            self._tail, self._records = _NOTHING, np.empty(1024, np.uint64)
            self._head = Head(self._head.epoch, self._head.generation + 1, -1, 0, 0)

    def read(self, cursor: Cursor, max_bytes: int) -> LogChunk:
        """What comes after `cursor`, at most `max_bytes` of it. Any thread."""
        assert max_bytes >= RECORD_NBYTES
        with self._lock:
            head, records, tail = self._head, self._records, self._tail
        at = head.next_for(cursor)
        if at.generation != head.generation and at.offset < head.previous_end - len(tail):
            at = head.start()
        if at.generation == head.generation:
            part = records[at.offset : head.end]
        else:
            part = tail[len(tail) - (head.previous_end - at.offset) :]
        return LogChunk(head, at, part[: max_bytes // RECORD_NBYTES].astype("<u8").tobytes())

    def num_blocks(self) -> int:
        """Blocks held, if none was stored or removed twice. Any thread."""
        with self._lock:
            head, records = self._head, self._records
        updates = records[head.base : head.end]
        num_stored = int(np.count_nonzero(updates & _STORED))
        return head.base + 2 * num_stored - len(updates)


def stored(fingerprints: Fingerprints) -> NDArray[np.uint64]:
    """Records that say so."""
    return fingerprints | _STORED


def removed(fingerprints: Fingerprints) -> NDArray[np.uint64]:
    """Records that say so."""
    return fingerprints & _IDENTITY


def fold(records: NDArray[np.uint64]) -> Updates:
    """The last word on each block."""
    backwards = records[::-1]
    identities, last = np.unique(backwards & _IDENTITY, return_index=True)
    is_stored = (backwards[last] & _STORED) != 0
    return Updates(identities[is_stored], identities[~is_stored])


def records_of(payload: bytes) -> NDArray[np.uint64]:
    """Bytes of a log as records. Raises RemoteProtocolError when the last one is cut off."""
    if len(payload) % RECORD_NBYTES:
        raise RemoteProtocolError(
            f"records: {len(payload)} bytes are not a whole number of {RECORD_NBYTES}-byte records",
            field="records",
            value=len(payload),
        )
    return np.frombuffer(payload, "<u8").astype(np.uint64, copy=False)
