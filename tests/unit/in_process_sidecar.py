"""The real store behind the client's interface, without sockets: what the connector's two sides are tested against.

It can be away (calls raise PeerUnavailable and the connection is lost), lose a reply on its way (the store has acted, the
caller does not know), and restart (an empty store, another arena, another boot id).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Acquired, Reserved
from kvstore.client_slab import ClientSlab
from kvstore.core.blocks import Extent, Holder
from kvstore.core.clock import ManualClock
from kvstore.core.errors import Overloaded, PeerUnavailable
from kvstore.core.keys import KVSpec, unpack_keys
from kvstore.core.plans import FetchPlan, Match, MatchWish, NamespaceInfo
from kvstore.presence import HeldRun, PoolReport
from kvstore.store import Store
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

T = TypeVar("T")
SEGMENT_BYTES = 64 << 10
INSTANCE = b"engine under test"[:16]


@dataclass
class Arena:
    """As kvstore.client_arena.ClientArena."""

    boot_id: bytes
    array: NDArray[np.uint8]
    generations: NDArray[np.uint64]


class InProcessSidecar:
    """One boot after another of a store with `num_segments` segments of 64 KiB."""

    def __init__(self, *, num_segments: int = 4, slab_segments: int = 0, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.num_segments = num_segments
        self.slab_segments = slab_segments
        self.away = False
        self.lose_next_reply = False
        self._boots = itertools.count(1)
        self._sessions = itertools.count(1)
        self.restart()

    def restart(self) -> None:
        nbytes = self.num_segments * SEGMENT_BYTES
        generations = np.zeros(nbytes // 4096, np.uint64)
        slots = SegmentedSlots(nbytes, generations=SharedGenerations(generations), segment_bytes=SEGMENT_BYTES)
        slots.add_segments(self.num_segments)
        self.store = Store(pinned=slots, slab=self._slab() if self.slab_segments else None)
        self.arena = Arena(next(self._boots).to_bytes(16, "little"), np.zeros(nbytes, np.uint8), generations)

    def _slab(self) -> SegmentedSlots:
        nbytes = self.slab_segments * SEGMENT_BYTES
        self.slab_generations = np.zeros(nbytes // 4096, np.uint64)
        slots = SegmentedSlots(
            nbytes, generations=SharedGenerations(self.slab_generations), segment_bytes=SEGMENT_BYTES
        )
        slots.add_segments(self.slab_segments)
        return slots

    def next_session_id(self) -> int:
        return next(self._sessions)

    @property
    def limbo_bytes(self) -> int:
        return self.store.stats().tiers[0].limbo_bytes

    def check_no_lease(self) -> None:
        """Nothing is leased or in limbo, and every invariant holds."""
        self.store.check()
        stats = self.store.stats()
        assert stats.num_leases == stats.num_expired_leases == 0
        assert stats.tiers[0].limbo_bytes == stats.tiers[0].writing_bytes == 0


@dataclass
class InProcessClient:
    """As kvstore.client.Client, which answers each wish with `plan`. `calls` names the verbs that reached the store, in order;
    the others say what came with them."""

    sidecar: InProcessSidecar
    spec: KVSpec
    instance: bytes = INSTANCE
    boot_id: bytes = b""
    arena: Arena | None = None
    namespaces: tuple[NamespaceInfo, ...] = ()
    calls: list[str] = field(default_factory=list)
    plan: FetchPlan | None = None
    match_wishes: list[MatchWish | None] = field(default_factory=list)
    match_names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of its Reserves
    acquired: list[tuple[bool, int]] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)  # of Match and Acquire
    released: list[tuple[int, int, float]] = field(default_factory=list)
    reports: list[tuple[tuple, int, float]] = field(default_factory=list)
    filled: list[bytes] = field(default_factory=list)
    slab: ClientSlab | None = None
    pool_reports: list[PoolReport] = field(default_factory=list)
    refuses_pools: bool = False
    closed: bool = False
    _holder: Holder | None = None

    def connect(self) -> None:
        if self.sidecar.away:
            raise PeerUnavailable("absent")
        self._lose()
        self._holder = Holder(self.instance, self.sidecar.next_session_id())
        self.boot_id, self.arena = self.sidecar.arena.boot_id, self.sidecar.arena
        info = self.sidecar.store.open_namespace(self.spec, "")
        self.sidecar.store.presence.join(self._holder, [info.namespace])
        self.namespaces = (NamespaceInfo(info.namespace, info.block_nbytes, info.num_blocks, ()),)

    def match(
        self,
        namespace: bytes,
        keys: list[bytes],
        wish: MatchWish | None = None,
        *,
        further_group: bool = False,
        each: bool = False,
        **named: str,
    ) -> Match:
        if each:
            return self._call("match", lambda store, _now_s: store.match_each(namespace, keys))
        match = self._call("match", lambda store, now_s: store.match(namespace, keys, now_s))
        self.match_wishes.append(wish)
        self.match_names.append(named.get("request_id", ""))
        self.traceparents.append(named.get("traceparent", ""))
        return match if wish is None or self.plan is None else match._replace(plan=self.plan, plan_id=1)

    def acquire(
        self,
        request_id: str,
        namespace: bytes,
        keys: list[bytes],
        *,
        first_needed: int = 0,
        from_back: bool = False,
        plan_id: int = 0,
        traceparent: str = "",
        further_group: bool = False,
        slab: bool = False,
    ) -> Acquired:
        self.acquired.append((from_back, plan_id))
        self.traceparents.append(traceparent)

        def run(store: Store, now_s: float) -> Acquired:
            grant = store.acquire(self._held_by(), request_id, namespace, keys, first_needed, 0.0, now_s, slab=slab)
            ready = b"\x01" * len(grant.extents)
            answer = Acquired(
                grant.lease_id, grant.expires_s - now_s, grant.num_blocks, *_columns(grant.extents), ready
            )
            if grant.slab is None:
                return answer
            offsets, generations = (column.astype(np.uint64) for column in grant.slab.slots)
            return answer._replace(slab=grant.slab.uses, slab_offsets=offsets, slab_generations=generations)

        return self._call("acquire", run)

    def reserve(
        self,
        request_id: str,
        namespace: bytes,
        keys: list[bytes],
        *,
        parent: bytes = b"",
        keep_s: float = 0.0,
        label: str = "",
    ) -> Reserved:
        self.labels.append(label)

        def run(store: Store, now_s: float) -> Reserved:
            grant = store.reserve(self._held_by(), request_id, namespace, parent, keys, 0.0, now_s, keep_s=keep_s)
            return Reserved(
                grant.lease_id,
                grant.expires_s - now_s,
                bytes(grant.statuses),
                *_columns(grant.extents),
                grant.declined_reason,
            )

        return self._call("reserve", run)

    def commit(self, lease_id: int, keys: list[bytes] | None = None) -> int:
        return self._call("commit", lambda store, now_s: store.commit(self._held_by(), lease_id, keys, now_s))

    def abort(self, lease_id: int) -> None:
        self._call("abort", lambda store, now_s: store.abort(self._held_by(), lease_id, now_s))

    def release(
        self, lease_id: int, outcome: int, *, num_loaded: int = 0, seconds: float = 0.0, filled: bytes = b""
    ) -> None:
        self.released.append((outcome, num_loaded, seconds))
        self.filled.append(filled)
        self._call("release", lambda store, now_s: store.release(self._held_by(), lease_id, now_s, filled=filled))

    def renew(self, lease_ids: list[int], ttl_s: float = 0.0, *, others_ended: bool = False) -> list[int]:
        def run(store: Store, now_s: float) -> list[int]:
            return store.renew(self._held_by(), lease_ids, ttl_s, now_s, others_ended=others_ended)

        return self._call("renew", run)

    def pin(self, namespace: bytes, keys: Sequence[bytes], pin_s: float) -> int:
        return self._call("pin", lambda store, now_s: store.pin(namespace, keys, pin_s, now_s))

    def cool(self, namespace: bytes, keys: bytes) -> int:
        unpacked = unpack_keys(keys, self.spec.hash.digest_nbytes)
        return self._call("cool", lambda store, now_s: store.cool(namespace, unpacked, now_s))

    def report(
        self, namespace: bytes, *, prefill: Sequence[tuple[float, float, float]], copy_nbytes: int, copy_s: float
    ) -> None:
        assert namespace == self.spec.namespace()
        self._call("report", lambda _store, _now_s: self.reports.append((tuple(prefill), copy_nbytes, copy_s)))

    def report_pool(
        self,
        namespace: bytes,
        *,
        cleared: bool = False,
        removed: Sequence[bytes] = (),
        stored: Sequence[tuple[bytes, Sequence[bytes]]] = (),
        num_blocks: int = 0,
    ) -> None:
        if self.refuses_pools:
            raise Overloaded("no pools here", limit="MAX_REPORTED_BLOCKS", value=0)
        report = PoolReport(cleared, removed, [HeldRun(*run) for run in stored], num_blocks)
        self.pool_reports.append(report)
        self._call("report_pool", lambda store, _now_s: store.report_pool(self._held_by(), namespace, report))

    def close(self) -> None:
        self._lose()
        self.closed = True

    def _call(self, verb: str, run: Callable[[Store, float], T]) -> T:
        sidecar = self.sidecar
        if self._holder is None or sidecar.away or self.boot_id != sidecar.arena.boot_id:
            self._lose()
            raise PeerUnavailable("absent")
        self.calls.append(verb)
        answer = run(sidecar.store, sidecar.clock.now_s())
        sidecar.store.check()
        if sidecar.lose_next_reply:
            sidecar.lose_next_reply = False
            self._lose()
            raise PeerUnavailable("no answer within the deadline")
        return answer

    def _lose(self) -> None:
        """The connection ends; the store hears of it if it is the one we were connected to."""
        if self._holder is not None and self.boot_id == self.sidecar.arena.boot_id:
            self.sidecar.store.end_session(self._holder, self.sidecar.clock.now_s())
        self._holder = None

    def _held_by(self) -> Holder:
        assert self._holder is not None
        return self._holder


def _columns(extents: Sequence[Extent]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Offsets and generations, as they travel."""
    return (
        np.array([extent.offset for extent in extents], np.uint64),
        np.array([extent.generation for extent in extents], np.uint64),
    )
