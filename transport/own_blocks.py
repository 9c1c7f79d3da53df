"""What we publish: a bounded queue that the loop fills, and the log that the directory's thread makes of it."""

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.transport.block_log import BlockLog, removed, stored
from kvstore.transport.directory import MAX_SAMPLE_EVERY, Fingerprints, fingerprints

MAX_QUEUED_UPDATES = 1 << 20
"""Updates that the directory's thread has not come to; it comes several times a second. Beyond it the oldest are dropped."""


class OwnBlocks:
    """Ours, on the way to the others.

    `publish`, `withdraw`, `resync` and the properties: the loop's thread. `take`: the directory's. `log.read`: any.
    """

    def __init__(self, epoch: int, *, sample_every: int = 1) -> None:
        if sample_every & (sample_every - 1) or not 1 <= sample_every <= MAX_SAMPLE_EVERY:
            raise ConfigError(
                f"sample_every: {sample_every} given; use a power of two from 1 to {MAX_SAMPLE_EVERY}",
                field="sample_every",
                value=sample_every,
            )
        self.log = BlockLog(epoch)
        self.dropped = 0
        self._sample_mask = np.uint64((sample_every - 1) << 1)
        self._lock = threading.Lock()
        self._queue: deque[NDArray[np.uint64]] = deque()
        self._num_queued = 0
        self._starts_anew = False
        self._resync_needed = False

    @property
    def resync_needed(self) -> bool:
        """See Directory."""
        return self._resync_needed

    def publish(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See Directory."""
        self._put(stored(self._sample(fingerprints(namespace, hashes))))

    def withdraw(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See Directory."""
        self._put(removed(self._sample(fingerprints(namespace, hashes))))

    def resync(self) -> None:
        """See Directory."""
        with self._lock:
            self._queue.clear()
            self._num_queued = 0
            self._starts_anew, self._resync_needed = True, False

    def take(self) -> None:
        """Bring the queue into the log."""
        with self._lock:
            parts, starts_anew = list(self._queue), self._starts_anew
            self._queue.clear()
            self._num_queued = 0
            self._starts_anew = False
        if starts_anew:
            self.log.clear()
        if parts:
            self.log.append(np.concatenate(parts))

    def check(self) -> None:
        """The queue is as long as counted and within its limit."""
        with self._lock:
            assert self._num_queued == sum(map(len, self._queue)) <= MAX_QUEUED_UPDATES

    def _sample(self, prints: Fingerprints) -> Fingerprints:
        return prints[(prints & self._sample_mask) == 0] if self._sample_mask else prints

    def _put(self, records: NDArray[np.uint64]) -> None:
        if not len(records):
            return
        with self._lock:
            self._queue.append(records)
            self._num_queued += len(records)
            while self._num_queued > MAX_QUEUED_UPDATES:
                lost = len(self._queue.popleft())
                self._num_queued -= lost
                self.dropped += lost
                self._resync_needed = True
