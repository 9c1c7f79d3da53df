"""gRPC: the same verbs for tools, other languages, other nodes (transport/WIRE.md, section 2).

Worker threads of grpcio take a call's bytes to the brain loop and wait; parsing and serving happen there, by the same
dispatcher as for the local socket. The synchronous server: it was leaner than grpc.aio here (0.34 against 0.49 ms for 8 KiB, the
same memory). Import this module late: grpc costs 60 ms and 15 MB.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from kvstore.cluster import Cluster, NoCluster
from kvstore.config import Config
from kvstore.core.clock import Clock
from kvstore.core.errors import (
    ConfigError,
    CorruptBlock,
    KVStoreError,
    LeaseExpired,
    LeaseRefused,
    Overloaded,
    PeerUnavailable,
    ProtocolError,
    RemoteProtocolError,
    SpecMismatch,
    StaleExtent,
    TierIOError,
    UnknownLease,
)
from kvstore.core.limits import (
    GRPC_CALL_DEADLINE_S,
    MAX_FRAME_BYTES,
    MAX_GRPC_CALLS,
    MAX_GRPC_SESSIONS,
    MAX_UNPROVEN_SESSIONS,
    SESSION_IDLE_S,
)
from kvstore.dispatcher import Dispatcher
from kvstore.loop_calls import call_on_loop
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Peer, Session, Sessions
from kvstore.socket_path import private_files
from kvstore.transport.frames import Verb

logger = logging.getLogger(__name__)

SESSION_METADATA = "kvstore-session"
ERROR_METADATA = "kvstore-error-bin"
_NUM_WORKERS = 4  # they only wait for the loop
_NUM_LENDERS = 8  # more, where there are peers: a loan may wait for a drive
_TOKEN_NBYTES = 16


class UnknownSession(RemoteProtocolError):
    """A call without the token of a session that is open."""


STATUS = {
    UnknownSession: grpc.StatusCode.UNAUTHENTICATED,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    SpecMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    UnknownLease: grpc.StatusCode.NOT_FOUND,
    LeaseExpired: grpc.StatusCode.FAILED_PRECONDITION,
    LeaseRefused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    StaleExtent: grpc.StatusCode.ABORTED,
    CorruptBlock: grpc.StatusCode.DATA_LOSS,
    TierIOError: grpc.StatusCode.UNAVAILABLE,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
    KVStoreError: grpc.StatusCode.INTERNAL,
}
"""The status of an error is that of the first class here that it is an instance of."""


@dataclass(slots=True, eq=False)
class _Caller:
    """A session that is kept alive by calls instead of a connection."""

    session: Session
    last_call_s: float
    idle_timer: asyncio.TimerHandle


class GrpcServer:
    """Serves `dispatcher` on a Unix socket and, if configured, on TCP."""

    def __init__(
        self,
        unix_path: str,
        config: Config,
        *,
        dispatcher: Dispatcher,
        sessions: Sessions,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        idle_s: float = SESSION_IDLE_S,
        cluster: Cluster | NoCluster | None = None,
    ) -> None:
        self._unix_path = unix_path
        self._config = config
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._loop = loop
        self._clock = clock
        self._idle_s = idle_s
        self._cluster = cluster or NoCluster()
        self._callers: dict[str, _Caller] = {}  # by token; loop thread only
        self._server: Any = None

    def start(self) -> None:
        """Bind and serve. Blocks shortly; any thread but the loop's. Raises ConfigError."""
        self._server = grpc.server(
            ThreadPoolExecutor(
                _NUM_WORKERS + (_NUM_LENDERS if isinstance(self._cluster, Cluster) else 0),
                thread_name_prefix="kvstore-grpc",
            ),
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_FRAME_BYTES)),
            maximum_concurrent_rpcs=MAX_GRPC_CALLS,
        )
        service = pb.DESCRIPTOR.services_by_name["KVStore"]
        methods = {method.name: self._method(Verb[method.name.upper()]) for method in service.methods}
        handler = grpc.method_handlers_generic_handler(service.full_name, methods)
        self._server.add_generic_rpc_handlers((handler,))
        with private_files():
            self._bind("socket", self._server.add_insecure_port, f"unix:{self._unix_path}")
        if self._config.grpc_tcp:
            self._bind_tcp()
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, wait for those under way, at most `grace_s`. Any thread but the loop's."""
        self._server.stop(grace_s).wait(grace_s)

    def _bind_tcp(self) -> None:
        config = self._config
        if not config.grpc_tls_cert:
            self._bind("grpc_tcp", self._server.add_insecure_port, config.grpc_tcp)
            return
        key, certificate, authorities = (
            _read_pem(name, getattr(config, name)) for name in ("grpc_tls_key", "grpc_tls_cert", "grpc_tls_client_ca")
        )
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], root_certificates=authorities, require_client_auth=True
        )
        self._bind("grpc_tcp", self._server.add_secure_port, config.grpc_tcp, credentials)

    def _bind(self, field: str, bind: Callable[..., int], address: str, *credentials: Any) -> None:
        try:
            port = bind(address, *credentials)
        except RuntimeError as err:  # what grpcio raises for an address that it cannot have
            raise ConfigError(f"{field}: gRPC cannot listen on {address}: {err}", field=field, value=address) from err
        logger.info("gRPC listens address=%s port=%d", address, port)

    def _method(self, verb: Verb) -> Any:
        def serve(body: bytes, context: Any) -> bytes:
            left_s = context.time_remaining()
            deadline_s = GRPC_CALL_DEADLINE_S if left_s is None else left_s
            try:
                if verb is Verb.HELLO:
                    return call_on_loop(self._loop, deadline_s, self._hello, body, context.peer())
                token = str(dict(context.invocation_metadata()).get(SESSION_METADATA, ""))
                if verb in {Verb.LEND, Verb.DIGEST}:
                    return self._serve_peer(verb, body, token, deadline_s)
                return call_on_loop(self._loop, deadline_s, self._call, verb, body, token)
            except KVStoreError as err:
                self._refuse(context, deadline_s, err, partial(self._dispatcher.error_reply, err))
            except Exception as err:  # noqa: BLE001 - outermost frame of a request: logged, counted, answered
                crash = KVStoreError("the sidecar has a bug; its log says more")
                self._refuse(context, deadline_s, crash, partial(self._dispatcher.crashed, err))
            return b""

        return grpc.unary_unary_rpc_method_handler(serve)

    def _serve_peer(self, verb: Verb, body: bytes, token: str, deadline_s: float) -> bytes:
        """What takes longer than a turn of the loop, on this thread."""
        cluster = self._cluster
        if not isinstance(cluster, Cluster):
            raise RemoteProtocolError(f"verb: {verb.name} needs peers in the settings", field="verb", value=verb.name)
        session = call_on_loop(self._loop, deadline_s, self._peer_session, token)
        request = self._dispatcher.parse(verb, body)
        if isinstance(request, pb.DigestRequest):
            return pb.DigestReply(body=cluster.digest(request.body)).SerializeToString()
        assert isinstance(request, pb.LendRequest)
        reply = cluster.lender.lend(
            lambda: call_on_loop(self._loop, deadline_s, self._dispatcher.lend, session, request),
            lambda lease_id: call_on_loop(self._loop, deadline_s, self._dispatcher.give_back, session, lease_id),
            request.first_needed,
            min(request.deadline_s, deadline_s),
        )
        return reply.SerializeToString()

    def _refuse(
        self, context: Any, deadline_s: float, err: KVStoreError, make_reply: Callable[[], pb.ErrorReply]
    ) -> None:
        """Answer with an error. Counting and logging it is the loop's; when the loop cannot, the caller still learns that we
        are unavailable."""
        try:
            _answer_error(context, err, call_on_loop(self._loop, deadline_s, make_reply))
        except PeerUnavailable as away:
            reply = pb.ErrorReply(code=away.code, message=away.message, retryable=away.retryable)
            _answer_error(context, away, reply)

    # --- loop thread --------------------------------------------------------------------------------------------------

    def _hello(self, body: bytes, address: str) -> bytes:
        request = self._dispatcher.parse(Verb.HELLO, body)
        assert isinstance(request, pb.HelloRequest)
        self._require_room(is_peer=request.role == pb.PEER)
        token = secrets.token_hex(_TOKEN_NBYTES)
        trusted = address.startswith("unix:")
        peer = Peer(
            0,
            None,
            local=False,
            trusted=trusted,
            close=lambda _: self._forget(token),
            verified=not trusted and bool(self._config.grpc_tls_cert),
        )
        session, reply = self._dispatcher.hello(request, peer)
        timer = self._loop.call_later(self._idle_s, self._on_idle, token)
        self._callers[token] = _Caller(session, self._clock.now_s(), timer)
        reply.session_token = token.encode()
        return reply.SerializeToString()

    def _require_room(self, *, is_peer: bool) -> None:
        num_others = sum(caller.session.role != pb.PEER for caller in self._callers.values())
        for limit, most, count in (
            ("MAX_GRPC_SESSIONS", MAX_GRPC_SESSIONS, len(self._callers)),
            ("MAX_UNPROVEN_SESSIONS", MAX_UNPROVEN_SESSIONS, 0 if is_peer else num_others),
        ):
            if count >= most:
                raise Overloaded(f"sessions: {count} over gRPC are open ({limit})", limit=limit, value=most)

    def _call(self, verb: Verb, body: bytes, token: str) -> bytes:
        session = self._session(token)
        request = self._dispatcher.parse(verb, body)
        reply = self._dispatcher.call(session, verb, request)
        if isinstance(request, pb.ReleaseRequest) and isinstance(self._cluster, Cluster):
            self._cluster.lender.end(request.lease_id)
        return reply.SerializeToString()

    def _peer_session(self, token: str) -> Session:
        session = self._session(token)
        if session.role != pb.PEER:
            raise RemoteProtocolError("role: only PEER says this", field="role", value=session.role)
        return session

    def _session(self, token: str) -> Session:
        caller = self._callers.get(token)
        if caller is None:
            raise UnknownSession(
                f"{SESSION_METADATA}: {'not open' if token else 'missing'}; send the token of a Hello reply as metadata",
                field=SESSION_METADATA,
                value=token,
            )
        caller.last_call_s = self._clock.now_s()
        return caller.session

    def _on_idle(self, token: str) -> None:
        caller = self._callers[token]
        left_s = caller.last_call_s + self._idle_s - self._clock.now_s()
        if left_s > 0:
            caller.idle_timer = self._loop.call_later(left_s, self._on_idle, token)
        else:
            logger.info("session idle session=%d", caller.session.session_id)
            self._forget(token)

    def _forget(self, token: str) -> None:
        caller = self._callers.pop(token, None)
        if caller is not None:
            caller.idle_timer.cancel()
            self._sessions.end(caller.session)


def _answer_error(context: Any, err: KVStoreError, reply: pb.ErrorReply) -> None:
    status = next(status for kind, status in STATUS.items() if isinstance(err, kind))
    context.set_code(status)
    context.set_details(reply.message)
    context.set_trailing_metadata(((ERROR_METADATA, reply.SerializeToString()),))


def _read_pem(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as err:
        raise ConfigError(f"{field}: cannot read {path}: {err.strerror}", field=field, value=path) from err
