"""Which blocks of the arena each lease of a peer covers, and until when, as the threads that serve peers see it."""

import math
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.core.blocks import Extent
from kvstore.core.clock import Clock


class _Grant(NamedTuple):
    extents: frozenset[Extent]
    until_s: float


class LeaseGate:
    """A Gatekeeper (transport/link.py). Whoever lends grants and releases; serving threads ask. Any thread.

    Whole blocks are granted and whole blocks are read. Those who ask take no lock: a grant is put in place and taken away in
    one step of the interpreter. A read that has begun goes on after the end of its lease: its slot's generation changes when
    the slot is given out again, and the reader is told.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._granted: dict[bytes, _Grant] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def grant(self, lease: bytes, extents: Iterable[Extent], until_s: float = math.inf) -> None:
        """Until then, or `release`, whoever shows `lease` may read these, besides what it covers already."""
        with self._lock:
            now_s = self._clock.now_s()
            for old in [key for key, grant in self._granted.items() if grant.until_s <= now_s]:
                del self._granted[old]
            before = self._granted.get(lease)
            covered = before.extents if before else frozenset()
            self._granted[lease] = _Grant(covered.union(extents), until_s)

    def release(self, lease: bytes) -> None:
        """The lease has ended. Idempotent."""
        self._granted.pop(lease, None)

    def may_read(self, lease: bytes, extents: Sequence[Extent]) -> bool:
        """Gatekeeper.may_read."""
        grant = self._granted.get(lease)
        return grant is not None and self._clock.now_s() < grant.until_s and grant.extents.issuperset(extents)
