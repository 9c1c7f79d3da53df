"""Message in, message out: every field is checked here, whichever carrier brought it.

A wrong field raises an error that names the field, the value and what would be right; the carrier answers it and the
connection goes on. Runs on the loop thread, inside one turn: between two calls every invariant of the store holds.
"""

import hmac
import logging
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
from google.protobuf.message import DecodeError, Message

from kvstore import __version__
from kvstore.advisor import Advisor
from kvstore.cluster import Cluster, NoCluster
from kvstore.core.blocks import NO_SLOTS
from kvstore.core.clock import Clock
from kvstore.core.errors import KVStoreError, LeaseRefused, Overloaded, SpecMismatch
from kvstore.core.keys import NAMESPACE_NBYTES, KVSpec, unpack_keys
from kvstore.core.limits import (
    DEFAULT_LEASE_TTL_S,
    MAX_EXPLAINED_PLANS,
    MAX_KEYS_PER_CALL,
    MAX_LEASE_TTL_S,
    MAX_LEASES_PER_INSTANCE,
    MAX_LOANS_PER_PEER,
    MAX_PLANS_OF_BLOCK,
    MAX_REQUEST_ID_BYTES,
    MAX_SPECS_PER_HELLO,
    PEER_LEASE_TTL_S,
)
from kvstore.core.plans import TIERS, Match, MatchWish, NamespaceInfo, ReadGrant
from kvstore.core.traces import Attributes
from kvstore.field_checks import check_duration, check_enum, check_first_needed, check_label, check_request_id, wrong
from kvstore.inspect_messages import block_reply, namespace_reply, read_hex
from kvstore.live_curve import LiveCurve
from kvstore.mover import Mover, NoMover
from kvstore.peer_identity import proof as peer_proof
from kvstore.plan_messages import check_copy, outcome_name, read_samples, read_wish, record_reply
from kvstore.presence_messages import read_pool_report
from kvstore.proto import kvstore_pb2 as pb
from kvstore.recorder import Recorder
from kvstore.request_traces import RequestTraces
from kvstore.sessions import Peer, Session, Sessions
from kvstore.stats_reply import stats_reply
from kvstore.store import Store
from kvstore.transport.frames import Verb
from kvstore.usage import Usage

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
INSTANCE_NBYTES = 16
MAX_TENANT_BYTES = 256
MAX_RANK = 65535
HOST = "host"  # the slab's device that is none
_PINNED = TIERS[0]
_MAX_ERROR_TEXT = 1024  # characters of a message or field that travel back
_U64_NBYTES = 8
_DEFAULT_EXPLAINED = 10
_PEER_VERBS = (Verb.RELEASE, Verb.PREFETCH, Verb.STATS, Verb.LOCATE)
_ORDERS = {number: name for name, number in pb.Order.items()}
_OUTCOMES = {number: name for name, number in pb.Outcome.items() if number}  # a caller has to say which
_ROLES = {number: name for name, number in pb.Role.items() if number}


class ArenaSize(Protocol):
    """What Hello says of the arena (tiers/arena.py)."""

    @property
    def nbytes(self) -> int:
        """Whole size."""
        ...

    @property
    def segment_bytes(self) -> int:
        """Size of a segment."""
        ...

    @property
    def faulted_nbytes(self) -> int:
        """From the start, touched so far."""
        ...


class SlabSize(NamedTuple):
    """What Hello says of the slab."""

    device: str
    nbytes: int


class _Route(NamedTuple):
    handler: Callable[[Session, Any], Message]
    who: Callable[[Session], None]


class Dispatcher:
    """The verbs over one store. `on_leases_changed` is called after every verb that may move the next expiry; after every verb
    `mover` carries out what the store ordered of the drives."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        arena: ArenaSize,
        boot_id: bytes,
        clock: Clock,
        lease_ttl_s: float = DEFAULT_LEASE_TTL_S,
        on_leases_changed: Callable[[], None] = lambda: None,
        mover: Mover | NoMover | None = None,
        cluster: Cluster | NoCluster | None = None,
        traces: RequestTraces | None = None,
        recorder: Recorder | None = None,
        slab: SlabSize | None = None,
    ) -> None:
        self._traces = traces
        self._slab = slab
        self._store = store
        self._sessions = sessions
        self._arena = arena
        self._boot_id = boot_id
        self._clock = clock
        self._lease_ttl_s = lease_ttl_s
        self._on_leases_changed = on_leases_changed
        self._mover = mover or NoMover()
        self._cluster = cluster or NoCluster()
        self._recorder = recorder
        self.advisor = Advisor()
        self.usage = Usage()
        self.curve = LiveCurve()
        self._started_s = clock.now_s()
        self.counters: Counter[str] = Counter()
        self._routes = {
            Verb.MATCH: _Route(self._match, self._anyone),
            Verb.ACQUIRE: _Route(self._acquire, self._engines),
            Verb.RELEASE: _Route(self._release, self._engines),
            Verb.RENEW: _Route(self._renew, self._engines),
            Verb.RESERVE: _Route(self._reserve, self._writers),
            Verb.COMMIT: _Route(self._commit, self._engines),
            Verb.ABORT: _Route(self._abort, self._engines),
            Verb.DROP: _Route(self._drop, self._anyone),
            Verb.STATS: _Route(self._stats, self._anyone),
            Verb.PREFETCH: _Route(self._prefetch, self._anyone),
            Verb.PIN: _Route(self._pin, self._anyone),
            Verb.REPORT: _Route(self._report, self._engines),
            Verb.EXPLAIN: _Route(self._explain, self._anyone),
            Verb.LOCATE: _Route(self._locate, self._anyone),
            Verb.INSPECT: _Route(self._inspect, self._operators),
        }

    def parse(self, verb: Verb, body: bytes) -> Message:
        """The request in a body. Raises RemoteProtocolError."""
        request = _REQUESTS[verb]()
        try:
            request.ParseFromString(body)
        except DecodeError as err:
            raise wrong("body", f"{len(body)} bytes", f"a {request.DESCRIPTOR.name} is expected: {err}") from err
        return request

    def hello(self, request: pb.HelloRequest, peer: Peer) -> tuple[Session, pb.HelloReply]:
        """Open a session for a connection. Takes `peer.pidfd` unless it raises. Carriers without a connection of their own
        add a token to the reply."""
        self.counters["calls_hello_total"] += 1
        specs = _check_hello(request, peer)
        if request.role == pb.PEER:
            self._check_peer(request, peer)
        named = frozenset(spec.namespace(request.tenant) for spec in specs)

        def in_use() -> frozenset[bytes]:
            return named.union(self._sessions.namespaces())

        infos = [self._store.open_namespace(spec, request.tenant, in_use) for spec in specs]
        slab = self._slab if request.want_slab else None
        session = self._sessions.open(
            instance=request.instance,
            tenant=request.tenant,
            role=request.role,
            rank=request.rank,
            namespaces=named,
            has_arena=request.want_arena,
            has_slab=slab is not None,
            cuda_registered=request.cuda_registered or (slab is not None and slab.device != HOST),
            peer=peer,
        )
        if session.holder.instance and session.role != pb.PEER:
            self._store.presence.join(session.holder, [info.namespace for info in infos])
        return session, pb.HelloReply(
            protocol_version=PROTOCOL_VERSION,
            server_version=__version__,
            boot_id=self._boot_id,
            session_id=session.session_id,
            namespaces=[_namespace_reply(info) for info in infos],
            arena_nbytes=self._arena.nbytes,
            segment_nbytes=self._arena.segment_bytes,
            faulted_nbytes=self._arena.faulted_nbytes,
            lease_ttl_s=self._lease_ttl_s,
            slab_nbytes=0 if slab is None else slab.nbytes,
            slab_device="" if slab is None else slab.device,
        )

    def call(self, session: Session, verb: Verb, request: Message) -> Message:
        """Any verb but Hello. Raises KVStoreError; then nothing has changed, but for what Release and Abort confirm."""
        route = self._routes.get(verb)
        if route is None:
            raise wrong("verb", "Hello", "it is said once, as the first frame of a connection")
        name, started_s = verb.name.lower(), self._clock.now_s()
        self.counters[f"calls_{name}_total"] += 1
        try:
            if session.role == pb.PEER and verb not in _PEER_VERBS:
                raise wrong(
                    "role", "PEER", f"peers say Lend, Digest and {', '.join(each.name for each in _PEER_VERBS)}"
                )
            route.who(session)
            reply = route.handler(session, request)
            self.pump()
        finally:
            self._store.meters.rpc(name, self._clock.now_s() - started_s)
        return reply

    def pump(self) -> None:
        """Have what the store ordered carried out."""
        self._mover.pump()
        self._cluster.pump()

    def lend(self, session: Session, request: pb.LendRequest) -> ReadGrant:
        """The lease behind a loan (kvstore/lending.py), for a session of a peer; its `num_blocks` counts from the first key. A
        namespace that nobody here knows has no blocks."""
        self.counters["calls_lend_total"] += 1
        self._peers(session)
        check_duration("deadline_s", request.deadline_s)
        if (num_loans := self._store.num_leases_of(session.holder.instance)) >= MAX_LOANS_PER_PEER:
            raise LeaseRefused(
                f"the node has {num_loans} loans; give some back (MAX_LOANS_PER_PEER)",
                limit="MAX_LOANS_PER_PEER",
                value=num_loans,
            )
        try:
            digest_nbytes = self._store.digest_nbytes(request.namespace)
        except SpecMismatch:
            return ReadGrant(0, 0.0, 0, NO_SLOTS, 0, b"")
        keys = _unpacked(request.keys, digest_nbytes)
        check_first_needed(request.first_needed, len(keys))
        now_s = self._clock.now_s()
        grant = self._store.acquire(
            session.holder,
            "",
            request.namespace,
            keys,
            request.first_needed,
            PEER_LEASE_TTL_S,
            now_s,
            borrow=False,
        )
        if self._traces is not None and request.traceparent:
            self._trace_lease("kvstore.lend", request.traceparent, grant, now_s)
        if grant.lease_id:
            self._store.meters.transfer("peer", "write", len(grant.slots.offsets) * grant.block_nbytes, None)
        self._on_leases_changed()
        self.pump()
        return grant

    def give_back(self, session: Session, lease_id: int) -> None:
        """A loan that came to nothing."""
        if self._traces is not None:
            self._traces.released(lease_id, "not lent", 0)
        self._store.release(session.holder, lease_id, self._clock.now_s())
        self.pump()

    def error_reply(self, err: KVStoreError) -> pb.ErrorReply:
        """An error as it travels; counted."""
        self.counters[f"errors_{err.code}_total"] += 1
        return pb.ErrorReply(
            code=err.code,
            message=_travelling(err.message),
            fields={name: _travelling(str(value)) for name, value in err.fields.items()},
            retryable=err.retryable,
            boot_id=self._boot_id,
        )

    def crashed(self, err: Exception) -> pb.ErrorReply:
        """What a client is told when we have a bug. The carrier closes the connection behind it."""
        logger.error("request crashed", exc_info=err)
        self.counters["crashes_total"] += 1
        return pb.ErrorReply(
            code=KVStoreError.code, message="the sidecar has a bug; its log says more", boot_id=self._boot_id
        )

    def stats(self) -> pb.StatsReply:
        """A snapshot for tools and metrics."""
        now_s = self._clock.now_s()
        return stats_reply(
            self._store,
            self.usage,
            self.curve,
            self.advisor,
            self._mover,
            self._cluster,
            {**self.counters, **_span_counters(self._traces), **(self._recorder.counters() if self._recorder else {})},
            now_s,
            boot_id=self._boot_id,
            uptime_s=now_s - self._started_s,
            num_sessions=len(self._sessions),
            arena_nbytes=self._arena.nbytes,
            faulted_nbytes=self._arena.faulted_nbytes,
        )

    # --- verbs --------------------------------------------------------------------------------------------------------

    def _match(self, session: Session, request: pb.MatchRequest) -> pb.MatchReply:
        keys = self._keys(session, request.namespace, request.keys)
        wish = read_wish(request.wish, len(keys)) if request.HasField("wish") else None
        if wish is not None:
            self._engines(session)
        if request.request_id:
            check_request_id(request.request_id)
        if request.each and not request.further_group:
            raise wrong("each", "true", "only a further layer group's keys are looked up one by one (further_group)")
        if wish is not None and request.further_group:
            raise wrong("wish", wish.request_id, "a request is planned with the Match that counts it (further_group)")
        now_s = self._clock.now_s()
        if request.each:
            match = self._store.match_each(request.namespace, keys)
        else:
            match = self._store.match(request.namespace, keys, now_s)
        reply = pb.MatchReply(num_blocks=match.num_blocks, tiers=match.tiers, boot_id=self._boot_id)
        if wish is not None:
            match = self._plan(session, request.namespace, keys, wish, match, now_s)
            assert match.plan is not None
            reply.plan.CopyFrom(pb.Plan(plan_id=match.plan_id, **match.plan._asdict()))
        if session.holder.instance and session.role != pb.PEER and not request.further_group:
            self._count_match(session, request, keys, wish, match, now_s)
        if self._traces is not None and request.traceparent:
            record = next(self.advisor.records("", None)) if wish is not None else None
            self._traces.matched(request.traceparent, match.num_blocks, record, now_s)
        return reply

    def _count_match(  # noqa: PLR0917 - likewise
        self,
        session: Session,
        request: pb.MatchRequest,
        keys: list[bytes],
        wish: MatchWish | None,
        match: Match,
        now_s: float,
    ) -> None:
        namespace, num_had = request.namespace, wish.first_needed if wish else 0
        behind = keys[max(match.num_blocks, num_had) :]
        missing = self._store.why_missing(namespace, behind) if behind else {}
        spec, instance = self._store.spec(namespace), session.holder.instance
        is_new = self.usage.matched(
            instance, session.tenant, spec.block_tokens, keys, match, missing, wish, request.request_id, now_s
        )
        if is_new:
            num_tokens = max(wish.num_tokens if wish else 0, len(keys) * spec.block_tokens)
            counts = {"num_tokens": num_tokens, "num_had": num_had, "num_found": match.num_blocks}
            self.curve.wanted(namespace, spec, request.keys, now_s, **counts)
            if self._recorder is not None and keys:
                self._recorder.wanted(namespace, session.tenant, spec, request.keys, now_s, **counts)

    def _plan(  # noqa: PLR0917 - the rest of _match
        self,
        session: Session,
        namespace: bytes,
        keys: list[bytes],
        wish: MatchWish,
        match: Match,
        now_s: float,
    ) -> Match:
        spec = self._store.spec(namespace)
        plan_id, plan = self.advisor.plan(
            session.holder.instance,
            namespace,
            spec.block_tokens,
            spec.block_nbytes,
            wish,
            match,
            self._store.quotes(namespace, keys, match, now_s),
            now_s,
            last_key=keys[match.num_blocks - 1] if match.num_blocks else b"",
        )
        first = wish.first_needed + plan.num_blocks
        if first < match.num_blocks:
            self._store.probe(namespace, keys, first, now_s)
        logger.debug(
            "planned request=%s plan=%d tokens=%d found=%d fetch=%d total_s=%.4f recompute_s=%.4f reason=%s",
            wish.request_id,
            plan_id,
            wish.num_tokens,
            match.num_blocks - wish.first_needed,
            plan.num_blocks,
            plan.total_s,
            plan.recompute_s,
            plan.reason,
        )
        return match._replace(plan=plan, plan_id=plan_id)

    def _acquire(self, session: Session, request: pb.AcquireRequest) -> pb.AcquireReply:
        keys = self._keys(session, request.namespace, request.keys)
        check_request_id(request.request_id)
        check_first_needed(request.first_needed, len(keys))
        check_enum("order", request.order, _ORDERS)
        now_s = self._clock.now_s()
        grant = self._store.acquire(
            session.holder,
            request.request_id,
            request.namespace,
            keys,
            request.first_needed,
            self._ttl_s(request.ttl_s),
            now_s,
            from_back=request.order == pb.BACK,
            slab=request.slab and self._sessions.may_use_slab(session),
        )
        self._on_leases_changed()
        if request.plan_id:
            self.advisor.granted(request.plan_id, session.holder.instance, grant.lease_id)
        spec = self._store.spec(request.namespace)
        if request.further_group:
            self.curve.used(request.namespace, spec, request.keys)
            if self._recorder is not None:
                self._recorder.used(request.namespace, session.tenant, spec, request.keys, now_s)
        else:
            self.usage.acquired(
                session.holder.instance,
                session.tenant,
                spec,
                keys,
                request.first_needed,
                request.plan_id,
                grant.lease_id,
                grant.ready,
                now_s,
            )
        if self._traces is not None and request.traceparent:
            about: Attributes = {"kvstore.tenant": session.tenant, "kvstore.plan.id": request.plan_id}
            self._trace_lease("kvstore.fetch", request.traceparent, grant, now_s, about)
        logger.debug(
            "leased request=%s plan=%d lease=%d blocks=%d on_their_way=%d",
            request.request_id,
            request.plan_id,
            grant.lease_id,
            len(grant.ready),
            grant.ready.count(0),
        )
        if all(grant.ready):
            self._cluster.on_read(request.namespace, keys[: grant.num_blocks], grant.block_nbytes)
        reply = pb.AcquireReply(
            lease_id=grant.lease_id,
            expires_in_s=grant.expires_s - now_s if grant.lease_id else 0.0,
            num_blocks=grant.num_blocks,
            offsets=grant.slots.offsets.tobytes(),
            generations=grant.slots.generations.tobytes(),
            ready=grant.ready,
            boot_id=self._boot_id,
        )
        if grant.slab is not None and len(grant.slab.slots.offsets):
            reply.slab = grant.slab.uses
            reply.slab_offsets = grant.slab.slots.offsets.tobytes()
            reply.slab_generations = grant.slab.slots.generations.tobytes()
        return reply

    def _prefetch(self, session: Session, request: pb.PrefetchRequest) -> pb.PrefetchReply:
        keys = self._keys(session, request.namespace, request.keys)
        check_first_needed(request.first_needed, len(keys))
        prefetch = self._store.prefetch(request.namespace, keys, request.first_needed, self._clock.now_s())
        return pb.PrefetchReply(num_blocks=prefetch.num_blocks, num_started=prefetch.num_started, boot_id=self._boot_id)

    def _release(self, session: Session, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        check_enum("outcome", request.outcome, _OUTCOMES)
        check_duration("seconds", request.seconds)
        outcome = outcome_name(request.outcome, request.num_loaded)
        logger.debug(
            "released lease=%d outcome=%s loaded=%d seconds=%.4f",
            request.lease_id,
            outcome,
            request.num_loaded,
            request.seconds,
        )
        ended = session.holder.instance, request.lease_id, outcome, request.num_loaded, request.seconds
        self.advisor.released(*ended)
        if self._traces is not None:
            self._traces.released(request.lease_id, outcome, request.num_loaded)
        loaded_nbytes = self.usage.released(*ended, self._store.num_awaited(request.lease_id))
        if loaded_nbytes:
            self._store.meters.transfer(_PINNED, "read", loaded_nbytes, request.seconds or None)
        self._store.release(session.holder, request.lease_id, self._clock.now_s(), filled=request.filled)
        return pb.ReleaseReply(boot_id=self._boot_id)

    def _renew(self, session: Session, request: pb.RenewRequest) -> pb.RenewReply:
        packed = request.lease_ids
        if len(packed) % _U64_NBYTES:
            raise wrong("lease_ids", f"{len(packed)} bytes", f"use {_U64_NBYTES} bytes for each id, little-endian")
        if len(packed) > MAX_LEASES_PER_INSTANCE * _U64_NBYTES:
            raise Overloaded(
                f"lease_ids: {len(packed) // _U64_NBYTES} in one call; at most {MAX_LEASES_PER_INSTANCE} are allowed",
                limit="MAX_LEASES_PER_INSTANCE",
                value=len(packed) // _U64_NBYTES,
            )
        lease_ids = np.frombuffer(packed, "<u8").tolist()
        ended = self._store.renew(
            session.holder,
            lease_ids,
            self._ttl_s(request.ttl_s),
            self._clock.now_s(),
            others_ended=request.others_ended,
        )
        self._on_leases_changed()
        return pb.RenewReply(ended_lease_ids=np.array(ended, "<u8").tobytes(), boot_id=self._boot_id)

    def _reserve(self, session: Session, request: pb.ReserveRequest) -> pb.ReserveReply:
        keys = self._keys(session, request.namespace, request.keys)
        check_request_id(request.request_id)
        digest_nbytes = self._store.digest_nbytes(request.namespace)
        if len(request.parent) not in (0, digest_nbytes):
            raise wrong("parent", f"{len(request.parent)} bytes", f"use {digest_nbytes}, or none for a first block")
        check_duration("keep_s", request.keep_s)
        check_label(request.label)
        now_s = self._clock.now_s()
        grant = self._store.reserve(
            session.holder,
            request.request_id,
            request.namespace,
            request.parent,
            keys,
            self._ttl_s(request.ttl_s),
            now_s,
            keep_s=request.keep_s,
        )
        if request.label:
            self._store.label(request.namespace, keys, request.label)
        self._on_leases_changed()
        spec = self._store.spec(request.namespace)
        self.curve.stored(request.namespace, spec, request.keys)
        if self._recorder is not None:
            self._recorder.stored(request.namespace, session.tenant, spec, request.parent, request.keys, now_s)
        logger.debug(
            "reserved request=%s lease=%d offered=%d granted=%d declined=%s",
            request.request_id,
            grant.lease_id,
            len(keys),
            len(grant.slots.offsets),
            grant.declined_reason,
        )
        return pb.ReserveReply(
            lease_id=grant.lease_id,
            expires_in_s=grant.expires_s - now_s if grant.lease_id else 0.0,
            statuses=bytes(grant.statuses),
            offsets=grant.slots.offsets.tobytes(),
            generations=grant.slots.generations.tobytes(),
            declined_reason=grant.declined_reason,
            boot_id=self._boot_id,
        )

    def _commit(self, session: Session, request: pb.CommitRequest) -> pb.CommitReply:
        keys = None
        if request.keys:
            digest_nbytes = self._store.lease_digest_nbytes(session.holder, request.lease_id)
            keys = _unpacked(request.keys, digest_nbytes)
        num_committed = self._store.commit(session.holder, request.lease_id, keys, self._clock.now_s())
        return pb.CommitReply(num_committed=num_committed, boot_id=self._boot_id)

    def _abort(self, session: Session, request: pb.AbortRequest) -> pb.AbortReply:
        self._store.abort(session.holder, request.lease_id, self._clock.now_s())
        return pb.AbortReply(boot_id=self._boot_id)

    def _drop(self, session: Session, request: pb.DropRequest) -> pb.DropReply:
        if request.all == bool(request.keys):
            raise wrong("all", request.all, "give keys, or all = true and no keys")
        keys = self._keys(session, request.namespace, request.keys)
        num_dropped = self._store.drop(request.namespace, None if request.all else keys)
        return pb.DropReply(num_dropped=num_dropped, boot_id=self._boot_id)

    def _pin(self, session: Session, request: pb.PinRequest) -> pb.PinReply:
        keys = self._keys(session, request.namespace, request.keys)
        check_duration("pin_s", request.pin_s)
        if request.cool and request.pin_s:
            raise wrong("cool", "true", "it ends the pin; give no pin_s with it")
        now_s = self._clock.now_s()
        if request.cool:
            num_blocks = self._store.cool(request.namespace, keys, now_s)
        else:
            num_blocks = self._store.pin(request.namespace, keys, request.pin_s, now_s)
        self._on_leases_changed()
        return pb.PinReply(num_blocks=num_blocks, boot_id=self._boot_id)

    def _report(self, session: Session, request: pb.ReportRequest) -> pb.ReportReply:
        self._keys(session, request.namespace, b"")
        check_copy(request.copy_bytes, request.copy_s)
        samples = read_samples(request.prefill)
        pool = read_pool_report(request, self._store.digest_nbytes(request.namespace))
        if pool is not None:
            self._store.report_pool(session.holder, request.namespace, pool)
        self.advisor.report(session.holder.instance, request.namespace, samples, request.copy_bytes, request.copy_s)
        return pb.ReportReply(boot_id=self._boot_id)

    def _explain(self, session: Session, request: pb.ExplainRequest) -> pb.ExplainReply:
        if len(request.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise wrong(
                "request_id", f"{len(request.request_id.encode())} bytes", f"use at most {MAX_REQUEST_ID_BYTES}"
            )
        last = min(request.last or _DEFAULT_EXPLAINED, MAX_EXPLAINED_PLANS)
        now_s = self._clock.now_s()
        self.advisor.settle_old(now_s)
        records = self.advisor.records(request.request_id, None if self._is_operator(session) else session.namespaces)
        return pb.ExplainReply(
            plans=[record_reply(record, now_s) for record in islice(records, last)], boot_id=self._boot_id
        )

    def _locate(self, session: Session, request: pb.LocateRequest) -> pb.LocateReply:
        keys = self._keys(session, request.namespace, request.keys)
        holders = [
            pb.NodeHolding(
                node_id=holding.node.node_id, address=holding.node.control_address, num_blocks=holding.num_blocks
            )
            for holding in self._cluster.locate(request.namespace, keys)
        ]
        if num_here := self._store.num_held(request.namespace, keys):
            holders.append(pb.NodeHolding(num_blocks=num_here, here=True))
        holders.sort(key=lambda holder: (-holder.num_blocks, not holder.here))
        pools = [pb.PoolHolding(**each._asdict()) for each in self._store.presence.holdings(request.namespace, keys)]
        return pb.LocateReply(holders=holders, pools=pools, boot_id=self._boot_id)

    def _inspect(self, _session: Session, request: pb.InspectRequest) -> pb.InspectReply:
        inspector, now_s = self._store.inspector(), self._clock.now_s()
        if not request.hex:
            names = [namespace_reply(*each) for each in inspector.namespaces("")]
            return pb.InspectReply(namespaces=names, boot_id=self._boot_id)
        digits = read_hex(request.hex)
        found = inspector.find(digits, request.first_row)
        reply = pb.InspectReply(next_row=found.next_row, num_found=found.num_found, boot_id=self._boot_id)
        if not request.first_row:
            reply.namespaces.extend(namespace_reply(*each) for each in inspector.namespaces(digits))
            if len(digits) % 2 == 0:
                absences = self._store.absences(bytes.fromhex(digits))
                reply.absences.extend(pb.Absence(namespace=namespace, reason=why) for namespace, why in absences)
        for row in found.rows:
            view = inspector.block(row)
            holdings = [
                holding
                for holding in self._cluster.locate(view.namespace, view.chain)
                if holding.num_blocks == len(view.chain)
            ]
            plans = inspector.plans_of(view, self.advisor.records("", {view.namespace}), MAX_PLANS_OF_BLOCK)
            pools = self._store.presence.instances_with(view.namespace, view.chain[-1])
            reply.blocks.append(block_reply(view, holdings, pools, plans, now_s))
        return reply

    def _stats(self, _session: Session, _request: pb.StatsRequest) -> pb.StatsReply:
        return self.stats()

    def _trace_lease(
        self, name: str, traceparent: str, grant: ReadGrant, since_s: float, about: Attributes | None = None
    ) -> None:
        assert self._traces is not None
        self._traces.leased(name, traceparent, grant, about or {}, since_s=since_s, now_s=self._clock.now_s())

    # --- who may ------------------------------------------------------------------------------------------------------

    def _anyone(self, _session: Session) -> None:
        return

    def _engines(self, session: Session) -> None:
        if not session.holder.instance:
            raise wrong(
                "instance", "none", "leases belong to an engine: say Hello with an instance and an engine's role"
            )

    def _operators(self, session: Session) -> None:
        if not self._is_operator(session):
            raise wrong("role", _ROLES[session.role], "only TOOL, over a Unix socket, may look at all blocks")

    @staticmethod
    def _peers(session: Session) -> None:
        if session.role != pb.PEER:
            raise wrong("role", _ROLES[session.role], "only PEER borrows")

    def _check_peer(self, request: pb.HelloRequest, peer: Peer) -> None:
        """Whether to believe that it is another node of ours."""
        if not 0 < len(request.node_id.encode()) <= MAX_TENANT_BYTES:
            raise wrong("node_id", request.node_id, f"use 1 to {MAX_TENANT_BYTES} bytes")
        secret = self._cluster.secret
        proven = bool(secret) and hmac.compare_digest(
            request.proof, peer_proof(secret, request.node_id, request.instance)
        )
        if not (proven or peer.trusted or peer.verified):
            raise wrong("proof", "not right", "show the secret of this cluster, or a certificate of its authority")

    def _writers(self, session: Session) -> None:
        self._engines(session)
        if not self._sessions.may_write(session):
            raise wrong("want_arena", "false", "to write, one of the instance says Hello with it over the local socket")

    # --- fields -------------------------------------------------------------------------------------------------------

    def _keys(self, session: Session, namespace: bytes, packed: bytes) -> list[bytes]:
        """The keys, after checking that the session may name the namespace."""
        if len(namespace) != NAMESPACE_NBYTES:
            raise wrong("namespace", f"{len(namespace)} bytes", f"use the {NAMESPACE_NBYTES} bytes of the Hello reply")
        if namespace not in session.namespaces and not (self._is_operator(session) or session.role == pb.PEER):
            raise SpecMismatch(
                f"namespace: {namespace.hex()} was not opened by this session; name its spec in Hello",
                field="namespace",
                value=namespace.hex(),
            )
        return _unpacked(packed, self._store.digest_nbytes(namespace))

    @staticmethod
    def _is_operator(session: Session) -> bool:
        """May name whatever the store knows."""
        return session.role == pb.TOOL and session.peer.trusted

    def _ttl_s(self, wish_s: float) -> float:
        check_duration("ttl_s", wish_s)
        return min(wish_s or self._lease_ttl_s, MAX_LEASE_TTL_S)


_REQUESTS: dict[Verb, type[Message]] = {
    Verb.HELLO: pb.HelloRequest,
    Verb.MATCH: pb.MatchRequest,
    Verb.ACQUIRE: pb.AcquireRequest,
    Verb.RELEASE: pb.ReleaseRequest,
    Verb.RENEW: pb.RenewRequest,
    Verb.RESERVE: pb.ReserveRequest,
    Verb.COMMIT: pb.CommitRequest,
    Verb.ABORT: pb.AbortRequest,
    Verb.DROP: pb.DropRequest,
    Verb.STATS: pb.StatsRequest,
    Verb.PREFETCH: pb.PrefetchRequest,
    Verb.PIN: pb.PinRequest,
    Verb.REPORT: pb.ReportRequest,
    Verb.EXPLAIN: pb.ExplainRequest,
    Verb.LOCATE: pb.LocateRequest,
    Verb.LEND: pb.LendRequest,
    Verb.DIGEST: pb.DigestRequest,
    Verb.INSPECT: pb.InspectRequest,
}


def _check_hello(request: pb.HelloRequest, peer: Peer) -> list[KVSpec]:
    """Everything that needs no store; the specs, read."""
    if request.protocol_version != PROTOCOL_VERSION:
        raise wrong("protocol_version", request.protocol_version, f"this sidecar speaks {PROTOCOL_VERSION}")
    check_enum("role", request.role, _ROLES)
    tool = request.role == pb.TOOL
    if len(request.instance) != (0 if tool else INSTANCE_NBYTES):
        right = (
            "tools give none"
            if tool
            else f"engines give {INSTANCE_NBYTES} random ones, the same in all their processes"
        )
        raise wrong("instance", f"{len(request.instance)} bytes", right)
    if request.want_arena and (tool or not peer.local):
        raise wrong("want_arena", request.want_arena, "only engines get the arena, and only over the local socket")
    if request.want_slab and not request.want_arena:
        raise wrong("want_slab", "true", "it is mapped beside the arena: give want_arena too")
    if request.session_token:
        raise wrong("session_token", "given", "leave it empty in Hello; later gRPC calls send it as metadata")
    if request.rank > MAX_RANK:
        raise wrong("rank", request.rank, f"use at most {MAX_RANK}")
    if len(request.tenant.encode()) > MAX_TENANT_BYTES:
        raise wrong("tenant", request.tenant, f"use at most {MAX_TENANT_BYTES} bytes")
    if len(request.specs) > MAX_SPECS_PER_HELLO:
        raise wrong("specs", f"{len(request.specs)} specs", f"use at most {MAX_SPECS_PER_HELLO}")
    return [_read_spec(encoded) for encoded in request.specs]


def _read_spec(encoded: bytes) -> KVSpec:
    try:
        return KVSpec.from_canonical(encoded)
    except RecursionError as err:
        raise SpecMismatch("spec: nested too deeply to be one", field="spec", value=len(encoded)) from err


def _span_counters(traces: RequestTraces | None) -> dict[str, int]:
    counts = traces.counts() if traces is not None else {}
    return {f"trace_spans_{result}_total": count for result, count in counts.items()}


def _namespace_reply(info: NamespaceInfo) -> pb.NamespaceReply:
    return pb.NamespaceReply(
        namespace=info.namespace,
        block_nbytes=info.block_nbytes,
        num_blocks=info.num_blocks,
        near_misses=[
            pb.NearMiss(namespace=miss.namespace, differing_fields=miss.differing_fields, num_blocks=miss.num_blocks)
            for miss in info.near_misses
        ],
    )


def _unpacked(packed: bytes, digest_nbytes: int) -> list[bytes]:
    num_keys = len(packed) // digest_nbytes
    if num_keys > MAX_KEYS_PER_CALL:
        raise Overloaded(
            f"keys: {num_keys} in one call; at most {MAX_KEYS_PER_CALL} are allowed",
            limit="MAX_KEYS_PER_CALL",
            value=num_keys,
        )
    return unpack_keys(packed, digest_nbytes)


def _travelling(text: str) -> str:
    """Text that fits into a protobuf string: no lone surrogates, not endless."""
    return text[:_MAX_ERROR_TEXT].encode("utf-8", "backslashreplace").decode()
