"""A Store over a small arena without memory, with keys made from names: what store tests stand on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.core.blocks import Holder
from kvstore.core.events import Event
from kvstore.core.keys import KVSpec
from kvstore.core.plans import ReadGrant, WriteGrant
from kvstore.store import Store
from kvstore.store_stats import TierStats
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

PAGE = 4096
SEGMENT = 16 * PAGE


def spec(*, pages: int = 1, **fields: Any) -> KVSpec:
    """A spec whose blocks are `pages` pages."""
    shape = {"num_layers": pages, "num_kv_heads": 2, "head_dim": 64, "block_tokens": 16, "dtype": "int8"}
    return KVSpec(**{"weights": "w", **shape, **fields})


class SmallStore:
    """Names stand for keys, a string for the names of its letters. Every verb is followed by `check()`."""

    def __init__(self, *, num_segments: int = 4, ready_segments: int | None = None, **limits: Any) -> None:
        self.generations = np.zeros(num_segments * SEGMENT // PAGE, np.uint64)
        self.slots = SegmentedSlots(
            num_segments * SEGMENT, generations=SharedGenerations(self.generations, PAGE), segment_bytes=SEGMENT
        )
        self.slots.add_segments(num_segments if ready_segments is None else ready_segments)
        self.events: list[Event] = []
        self.store = Store(pinned=self.slots, on_event=self.events.append, **limits)
        self.spec = spec()
        self.namespace = self.open(self.spec)
        self._num_requests = 0

    def open(self, wanted: KVSpec) -> bytes:
        return self.store.open_namespace(wanted, "").namespace

    def keys(self, names: Sequence[str]) -> list[bytes]:
        return [name.encode().ljust(16, b".") for name in names]

    def reserve(
        self,
        holder: Holder,
        names: Sequence[str],
        *,
        parent: str = "",
        request_id: str = "",
        ttl_s: float = 30.0,
        now_s: float = 0.0,
        namespace: bytes = b"",
    ) -> WriteGrant:
        key = self.keys([parent])[0] if parent else b""
        grant = self.store.reserve(
            holder, request_id or self._new_id(), namespace or self.namespace, key, self.keys(names), ttl_s, now_s
        )
        self.store.check()
        return grant

    def put(self, holder: Holder, names: Sequence[str], *, now_s: float = 0.0, **options: Any) -> WriteGrant:
        """Reserve and commit."""
        grant = self.reserve(holder, names, now_s=now_s, **options)
        if grant.lease_id:
            self.store.commit(holder, grant.lease_id, None, now_s)
        self.store.check()
        return grant

    def acquire(
        self,
        holder: Holder,
        names: Sequence[str],
        *,
        first_needed: int = 0,
        request_id: str = "",
        ttl_s: float = 30.0,
        now_s: float = 0.0,
        from_back: bool = False,
    ) -> ReadGrant:
        grant = self.store.acquire(
            holder,
            request_id or self._new_id(),
            self.namespace,
            self.keys(names),
            first_needed,
            ttl_s,
            now_s,
            from_back=from_back,
        )
        self.store.check()
        return grant

    def match(self, names: Sequence[str], *, namespace: bytes = b"") -> int:
        return self.store.match(namespace or self.namespace, self.keys(names), 0.0).num_blocks

    def tier(self) -> TierStats:
        self.store.check()
        tier = self.store.stats().tiers[0]
        used = tier.ready_bytes + tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes
        assert used + tier.free_bytes == tier.capacity_bytes
        return tier

    def counter(self, name: str) -> int:
        return self.store.stats().counters[name]

    def _new_id(self) -> str:
        self._num_requests += 1
        return f"request-{self._num_requests}"
