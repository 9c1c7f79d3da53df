"""The engine's and the tools' end of the local socket: plain blocking calls, each within a deadline."""

import hashlib
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from kvstore.client_arena import ClientArena
from kvstore.client_slab import ClientSlab, map_slab
from kvstore.config import MAX_SOCKET_PATH_BYTES, default_socket_path
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import (
    ConfigError,
    LocalProtocolError,
    PeerUnavailable,
    RemoteProtocolError,
    error_from_wire,
)
from kvstore.core.keys import KVSpec, pack_keys
from kvstore.core.limits import CALL_DEADLINE_S, CONNECT_DEADLINE_S, MAX_REQUEST_ID_BYTES
from kvstore.core.plans import FetchPlan, Match, MatchWish, NamespaceInfo, NearMiss
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.frames import FROM_SERVER, MAX_CALL_ID, Frame, FrameDecoder, Kind, Verb, encode_frame

__all__ = ["Client", "ClientArena", "Acquired", "Prefetched", "Reserved"]

PROTOCOL_VERSION = 1
INSTANCE_NBYTES = 16
_BUFFER_NBYTES = 64 << 10  # most replies whole in one read
_U64_NBYTES = 8
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_NUM_DESCRIPTORS = 2  # arena, generation table; and as many of the slab
NO_U64: NDArray[np.uint64] = np.empty(0, np.uint64)
Reply = TypeVar("Reply", bound=Message)


class Acquired(NamedTuple):
    """A read lease on `keys[first_needed:num_blocks]`; lease_id 0: nothing granted, nothing to release."""

    lease_id: int
    expires_in_s: float
    num_blocks: int  # READY prefix from the first key
    offsets: NDArray[np.uint64]  # bytes from the start of the arena
    generations: NDArray[np.uint64]
    ready: bytes  # one byte per granted block: 1 = usable now; 0 = on its way (transport/WIRE.md, section 5)
    slab: bytes = b""  # one core/plans.SlabUse per granted block, or none: nothing of the slab
    slab_offsets: NDArray[np.uint64] = NO_U64  # bytes from the start of the slab; of those that have a slot there
    slab_generations: NDArray[np.uint64] = NO_U64


class Prefetched(NamedTuple):
    """How much of a prefix is held, and how much of that is on its way to RAM since this call."""

    num_blocks: int  # from the first key
    num_started: int


class Reserved(NamedTuple):
    """A write lease on the slots of the keys whose status is GRANTED (core/blocks.KeyStatus); lease_id 0: none."""

    lease_id: int
    expires_in_s: float
    statuses: bytes  # one per key
    offsets: NDArray[np.uint64]  # of the granted keys in order
    generations: NDArray[np.uint64]
    declined_reason: str


class Client:
    """One connection to a sidecar.

    Thread-safe by one lock: a call waits for the one before it, within its own deadline. Constructing stores and checks;
    `connect()` opens, so make the connection after any fork; in a forked child every call raises LocalProtocolError. A
    call that meets its deadline, end of file or a broken reply closes the connection and raises PeerUnavailable; from then
    on every call does, at once, until `connect()` succeeds. What the sidecar answers as an error is raised as that class.

    `role` is a `Role` of kvstore_pb2. `instance` names the engine: 16 random bytes that all its processes share, b"" for
    tools. `want_arena` maps the sidecar's memory into this process, `want_slab` its device memory too, where it has some. A
    process that uses a GPU says so, since the driver may copy into the arena a while longer than it lives.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        instance: bytes = b"",
        role: int,
        rank: int = 0,
        tenant: str = "",
        specs: Sequence[KVSpec] = (),
        want_arena: bool = True,
        want_slab: bool = False,
        connect_deadline_s: float = CONNECT_DEADLINE_S,
        call_deadline_s: float = CALL_DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        self.path = default_socket_path() if path is None else path
        if not 0 < len(os.fsencode(self.path)) <= MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"path: {self.path!r} is not right; a Unix socket's path has 1 to {MAX_SOCKET_PATH_BYTES} bytes",
                field="path",
                value=self.path,
            )
        if len(instance) != (0 if role == pb.TOOL else INSTANCE_NBYTES):
            raise ConfigError(
                f"instance: {len(instance)} bytes given; engines give {INSTANCE_NBYTES} random ones, tools none",
                field="instance",
                value=len(instance),
            )
        self._hello = pb.HelloRequest(
            protocol_version=PROTOCOL_VERSION,
            instance=instance,
            role=role,  # type: ignore[arg-type]  # the stub wants the enum's own type for an int
            rank=rank,
            tenant=tenant,
            specs=[spec.canonical() for spec in specs],
            want_arena=want_arena and role != pb.TOOL,
            want_slab=want_slab and want_arena and role != pb.TOOL,
        )
        self._connect_deadline_s = connect_deadline_s
        self._call_deadline_s = call_deadline_s
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._pid = 0  # of the process that connected
        self._last_call_id = 0
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._decoder = FrameDecoder(FROM_SERVER)
        self.boot_id = b""
        self.session_id = 0
        self.server_version = ""
        self.lease_ttl_s = 0.0
        self.namespaces: tuple[NamespaceInfo, ...] = ()
        self.arena: ClientArena | None = None
        self.slab: ClientSlab | None = None

    @property
    def connected(self) -> bool:
        """Whether the last call found the sidecar there."""
        return self._socket is not None

    @property
    def alive(self) -> bool:
        """Whether the sidecar holds its end of the connection now. Takes no lock and reads nothing, so that a thread may look
        while another one's call is under way: the end of a process closes its connections at once."""
        sock = self._socket
        if sock is None or (fd := sock.fileno()) < 0:
            return False
        poll = select.poll()  # not a peek: unread bytes would hide the end behind them
        poll.register(fd, select.POLLRDHUP)
        return not poll.poll(0)

    def connect(self) -> None:
        """Connect and say Hello; replaces a connection that is there. Raises PeerUnavailable within the connect deadline,
        ConfigError when the sidecar is neither our own user's nor root's, SpecMismatch and others as the sidecar answers.

        After a restart of the sidecar (another boot id) the old mapping is dropped before the new one is made, and every
        lease id is void.
        """
        with self._locked(self._connect_deadline_s) as until_s:
            self._refuse_other_process()
            self._disconnect()
            self._pid = os.getpid()
            try:
                self._socket = _open_socket(self.path, self._left_s(until_s))
                reply = self._say_hello(self._socket, until_s)
            except (OSError, DecodeError, RemoteProtocolError) as err:
                self._lose(err, self._connect_deadline_s)
            if isinstance(reply, pb.ErrorReply):
                self._disconnect()
                raise error_from_wire(reply.code, reply.message, dict(reply.fields))
            self._take_hello(reply)

    def match(
        self,
        namespace: bytes,
        keys: Sequence[bytes] | bytes,
        wish: MatchWish | None = None,
        *,
        request_id: str = "",
        traceparent: str = "",
        further_group: bool = False,
        each: bool = False,
    ) -> Match:
        """Length of the longest READY prefix of `keys`, and where each block lies; with a `wish`, which only engines have, also
        how much of it is worth fetching. Owns nothing. `request_id` names the request where no wish does; `traceparent` is of
        the span that this belongs to (core/traces.py).

        `further_group`: of a layer group whose request is counted with another one's Match. Then `each` asks for the tier of
        every key, plans.NOWHERE where it cannot be read."""
        request = pb.MatchRequest(
            namespace=namespace,
            keys=_packed(keys),
            wish=None if wish is None else pb.PlanWish(**wish._asdict()),
            request_id=request_id,
            traceparent=traceparent,
            further_group=further_group,
            each=each,
        )
        reply = self._call(Verb.MATCH, request, pb.MatchReply)
        plan = _plan(reply.plan) if reply.HasField("plan") else None
        return Match(reply.num_blocks, reply.tiers, plan, reply.plan.plan_id)

    def acquire(
        self,
        request_id: str,
        namespace: bytes,
        keys: Sequence[bytes] | bytes,
        *,
        first_needed: int = 0,
        ttl_s: float = 0.0,
        from_back: bool = False,
        plan_id: int = 0,
        traceparent: str = "",
        further_group: bool = False,
        slab: bool = False,
    ) -> Acquired:
        """Lease the READY prefix of `keys` from `first_needed` on, for reading. What lies on drives is read `from_back` to
        front, or in order. `plan_id`: of the plan that this carries out. `traceparent`, `further_group`: as in match.
        `slab`: who copies has the slab mapped."""
        request = pb.AcquireRequest(
            request_id=request_id,
            namespace=namespace,
            keys=_packed(keys),
            first_needed=first_needed,
            ttl_s=ttl_s,
            order=pb.BACK if from_back else pb.FRONT,
            plan_id=plan_id,
            traceparent=traceparent,
            further_group=further_group,
            slab=slab,
        )
        reply = self._call(Verb.ACQUIRE, request, pb.AcquireReply)
        return Acquired(
            reply.lease_id,
            reply.expires_in_s,
            reply.num_blocks,
            _u64(reply.offsets),
            _u64(reply.generations),
            reply.ready,
            reply.slab,
            _u64(reply.slab_offsets),
            _u64(reply.slab_generations),
        )

    def prefetch(self, namespace: bytes, keys: Sequence[bytes] | bytes, *, first_needed: int = 0) -> Prefetched:
        """Begin to bring the held prefix of `keys`, from `first_needed` on, to RAM for an acquire that will follow. Owns
        nothing and waits for nothing."""
        request = pb.PrefetchRequest(namespace=namespace, keys=_packed(keys), first_needed=first_needed)
        reply = self._call(Verb.PREFETCH, request, pb.PrefetchReply)
        return Prefetched(reply.num_blocks, reply.num_started)

    def release(
        self, lease_id: int, outcome: int, *, num_loaded: int = 0, seconds: float = 0.0, filled: bytes = b""
    ) -> None:
        """Give a read lease back; `outcome` is an `Outcome` of kvstore_pb2, `seconds` from acquire until the last of
        `num_loaded` blocks was in its page; `filled` says of each slot of the slab to fill whether (1) it was, empty: none was.
        This process does not touch its slots any more. Raises LeaseExpired when it had ended before, and UnknownLease."""
        request = pb.ReleaseRequest(
            lease_id=lease_id,
            outcome=outcome,  # type: ignore[arg-type]  # as for role
            num_loaded=num_loaded,
            seconds=seconds,
            filled=filled,
        )
        self._call(Verb.RELEASE, request, pb.ReleaseReply)

    def renew(self, lease_ids: Sequence[int], ttl_s: float = 0.0, *, others_ended: bool = False) -> list[int]:
        """Keep leases for `ttl_s` from now on; answers the ids that have ended.

        `others_ended`: no process of the instance touches any more what its other, expired leases keep in limbo. Said after a
        reconnection, it confirms the end of leases too whose grant never arrived.
        """
        request = pb.RenewRequest(
            lease_ids=np.array(lease_ids, "<u8").tobytes(), ttl_s=ttl_s, others_ended=others_ended
        )
        ended: list[int] = _u64(self._call(Verb.RENEW, request, pb.RenewReply).ended_lease_ids).tolist()
        return ended

    def reserve(
        self,
        request_id: str,
        namespace: bytes,
        keys: Sequence[bytes] | bytes,
        *,
        parent: bytes = b"",
        ttl_s: float = 0.0,
        keep_s: float = 0.0,
        label: str = "",
    ) -> Reserved:
        """Slots for the keys that nobody holds yet. `parent` is the hash before keys[0]; b"" when that is the first. The
        granted blocks live for `keep_s` from now on and no longer; 0: without end. `label`: what a person calls the prompt."""
        request = pb.ReserveRequest(
            request_id=request_id,
            namespace=namespace,
            parent=parent,
            keys=_packed(keys),
            ttl_s=ttl_s,
            keep_s=keep_s,
            label=label,
        )
        reply = self._call(Verb.RESERVE, request, pb.ReserveReply)
        return Reserved(
            reply.lease_id,
            reply.expires_in_s,
            reply.statuses,
            _u64(reply.offsets),
            _u64(reply.generations),
            reply.declined_reason,
        )

    def commit(self, lease_id: int, keys: Sequence[bytes] | bytes | None = None) -> int:
        """Publish blocks that are written; None: all that the lease still holds. Answers how many became READY. The caller
        has finished writing them. Raises LeaseExpired (nothing was published) and UnknownLease."""
        request = pb.CommitRequest(lease_id=lease_id, keys=b"" if keys is None else _packed(keys))
        return self._call(Verb.COMMIT, request, pb.CommitReply).num_committed

    def abort(self, lease_id: int) -> None:
        """Give slots back unpublished. This process does not touch them any more. Raises as `release`."""
        self._call(Verb.ABORT, pb.AbortRequest(lease_id=lease_id), pb.AbortReply)

    def drop(self, namespace: bytes, keys: Sequence[bytes] | bytes | None = None) -> int:
        """Forget blocks, or a whole namespace (None). Answers how many."""
        packed = b"" if keys is None else _packed(keys)
        request = pb.DropRequest(namespace=namespace, keys=packed, all=keys is None)
        return self._call(Verb.DROP, request, pb.DropReply).num_dropped

    def pin(self, namespace: bytes, keys: Sequence[bytes] | bytes, pin_s: float) -> int:
        """Keep the prefix that the store has of `keys` from eviction for `pin_s` from now on, 0: no longer. How many blocks."""
        request = pb.PinRequest(namespace=namespace, keys=_packed(keys), pin_s=pin_s)
        return self._call(Verb.PIN, request, pb.PinReply).num_blocks

    def cool(self, namespace: bytes, keys: Sequence[bytes] | bytes) -> int:
        """Say that nobody is going to need this prefix soon: it is evicted before anything else. How many blocks it has."""
        request = pb.PinRequest(namespace=namespace, keys=_packed(keys), cool=True)
        return self._call(Verb.PIN, request, pb.PinReply).num_blocks

    def report(
        self,
        namespace: bytes,
        *,
        prefill: Sequence[tuple[float, float, float]] = (),
        copy_nbytes: int = 0,
        copy_s: float = 0.0,
    ) -> None:
        """Tell what this engine's speed is: of each step (tokens, pairs, seconds), where a share of n tokens behind s has
        n*s + n*n/2 pairs; and how long it took to copy so many bytes from the arena into pages."""
        packed = np.array(prefill, "<f8").tobytes()
        request = pb.ReportRequest(namespace=namespace, prefill=packed, copy_bytes=copy_nbytes, copy_s=copy_s)
        self._call(Verb.REPORT, request, pb.ReportReply)

    def report_pool(
        self,
        namespace: bytes,
        *,
        cleared: bool = False,
        removed: Sequence[bytes] = (),
        stored: Sequence[tuple[bytes, Sequence[bytes]]] = (),
        num_blocks: int = 0,
    ) -> None:
        """Tell what changed in this engine's own pool, in this order: all is gone, `removed` are gone, `stored` are there. That
        is runs of blocks that follow each other: (key before the first or b"", keys). The pool can hold `num_blocks`.
        At most MAX_REPORTED_BLOCKS keys in MAX_REPORTED_RUNS runs. Known until this connection ends."""
        request = pb.ReportRequest(
            namespace=namespace,
            cleared=cleared,
            removed=pack_keys(removed),
            stored=[pb.HeldRun(parent=parent, keys=pack_keys(keys)) for parent, keys in stored],
            pool_blocks=num_blocks,
        )
        self._call(Verb.REPORT, request, pb.ReportReply)

    def explain(self, *, request_id: str = "", last: int = 0) -> list[pb.PlanRecord]:
        """The last plans, newest first: of one request, by its engine's id, or of all; 0: ten."""
        request = pb.ExplainRequest(request_id=wire_request_id(request_id), last=last)
        return list(self._call(Verb.EXPLAIN, request, pb.ExplainReply).plans)

    def locate(self, namespace: bytes, keys: Sequence[bytes] | bytes) -> list[pb.NodeHolding]:
        """Which nodes hold how much of the prefix `keys`, farthest first: this one, and those that it has heard of. For routers;
        owns nothing, and asks nobody else."""
        return list(self._locate(namespace, keys).holders)

    def locate_pools(self, namespace: bytes, keys: Sequence[bytes] | bytes) -> list[pb.PoolHolding]:
        """Which engines of this node have how much of the prefix `keys` in their own pools, farthest first; likewise."""
        return list(self._locate(namespace, keys).pools)

    def _locate(self, namespace: bytes, keys: Sequence[bytes] | bytes) -> pb.LocateReply:
        request = pb.LocateRequest(namespace=namespace, keys=_packed(keys))
        return self._call(Verb.LOCATE, request, pb.LocateReply)

    def inspect(self, hex_digits: str) -> pb.InspectReply:
        """Blocks and namespaces whose hash or id begins so; "": all namespaces and no block. Tools only. A call for each part
        of a large index."""
        hex_digits = hex_digits.encode(errors="replace").decode()  # a terminal's, refused there: they may be any bytes
        whole = self._call(Verb.INSPECT, pb.InspectRequest(hex=hex_digits), pb.InspectReply)
        while whole.next_row:
            part = self._call(
                Verb.INSPECT, pb.InspectRequest(hex=hex_digits, first_row=whole.next_row), pb.InspectReply
            )
            whole.blocks.extend(part.blocks)
            whole.num_found, whole.next_row = whole.num_found + part.num_found, part.next_row
        return whole

    def stats(self) -> pb.StatsReply:
        """Bytes, blocks, sessions, leases and counters."""
        return self._call(Verb.STATS, pb.StatsRequest(), pb.StatsReply)

    def close(self) -> None:
        """End the session, and with it its leases. Idempotent. Waits for a call under way."""
        with self._locked(self._call_deadline_s):
            if os.getpid() == self._pid:
                self._disconnect()
                if self.arena is not None:
                    self.arena.close()
                    self.arena = None
                self.slab = None

    def __enter__(self) -> "Client":
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, verb: Verb, request: Message, reply_class: type[Reply]) -> Reply:
        with self._locked(self._call_deadline_s) as until_s:
            self._refuse_other_process()
            if self._socket is None:
                raise PeerUnavailable(f"not connected to {self.path}", peer=self.path, deadline_s=self._call_deadline_s)
            try:
                call_id = self._send(self._socket, verb, request, until_s)
                frame = self._receive(self._socket, verb, call_id, until_s)
                reply = _parse(frame, reply_class)
                self._check_boot(reply.boot_id)  # type: ignore[union-attr]  # every reply has one
            except (OSError, DecodeError, RemoteProtocolError) as err:
                self._lose(err, self._call_deadline_s)
        if isinstance(reply, pb.ErrorReply):
            raise error_from_wire(reply.code, reply.message, dict(reply.fields))
        return reply

    def _send(self, sock: socket.socket, verb: Verb, request: Message, until_s: float) -> int:
        self._last_call_id = self._last_call_id % MAX_CALL_ID + 1
        sock.settimeout(self._left_s(until_s))  # sendall keeps it over all its sends
        sock.sendall(encode_frame(verb, Kind.REQUEST, self._last_call_id, request.SerializeToString()))
        return self._last_call_id

    def _receive(self, sock: socket.socket, verb: Verb, call_id: int, until_s: float) -> Frame:
        """The answer to this call. Events are let pass: nobody here has asked for any."""
        while True:
            while (frame := self._decoder.next_frame()) is None:
                sock.settimeout(self._left_s(until_s))
                received = sock.recv_into(self._buffer)
                if not received:
                    raise ConnectionResetError("the sidecar closed the connection")
                self._decoder.feed(memoryview(self._buffer)[:received])
            if frame.kind is not Kind.EVENT:
                break
        if (frame.verb, frame.call_id) != (verb, call_id):
            raise RemoteProtocolError(
                f"call_id: {frame.verb.name} {frame.call_id} answered, {verb.name} {call_id} asked",
                field="call_id",
                value=frame.call_id,
            )
        return frame

    def _say_hello(self, sock: socket.socket, until_s: float) -> pb.HelloReply | pb.ErrorReply:
        """Hello, and the arena if we want it and do not have it."""
        self._hello.cuda_registered = self._hello.want_arena and _uses_cuda()
        call_id = self._send(sock, Verb.HELLO, self._hello, until_s)
        sock.settimeout(self._left_s(until_s))
        chunk, fds, flags, _ = socket.recv_fds(sock, _BUFFER_NBYTES, 2 * _NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        with ExitStack() as received:
            for fd in fds:
                received.callback(os.close, fd)
            if not chunk:
                raise ConnectionResetError("the sidecar closed the connection")
            self._decoder.feed(chunk)
            reply = _parse(self._receive(sock, Verb.HELLO, call_id, until_s), pb.HelloReply)
            if isinstance(reply, pb.HelloReply):
                wanted = _NUM_DESCRIPTORS * (self._hello.want_arena + bool(reply.slab_nbytes))
                _check_hello(reply, num_descriptors=len(fds), wanted=wanted, cut=bool(flags & socket.MSG_CTRUNC))
                if wanted and (self.arena is None or self.arena.boot_id != reply.boot_id):
                    received.pop_all()
                    self._map_arena(reply, *fds)
        return reply

    def _map_arena(self, reply: pb.HelloReply, fd: int, generations_fd: int, *slab_fds: int) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        self.slab = map_slab(reply.boot_id, reply.slab_device, reply.slab_nbytes, *slab_fds) if slab_fds else None
        self.arena = ClientArena(reply.boot_id, reply.arena_nbytes, reply.segment_nbytes, fd, generations_fd)
        self.arena.start()

    def _take_hello(self, reply: pb.HelloReply) -> None:
        self.boot_id = reply.boot_id
        self.session_id = reply.session_id
        self.server_version = reply.server_version
        self.lease_ttl_s = reply.lease_ttl_s
        self.namespaces = tuple(
            NamespaceInfo(
                space.namespace,
                space.block_nbytes,
                space.num_blocks,
                tuple(
                    NearMiss(miss.namespace, tuple(miss.differing_fields), miss.num_blocks)
                    for miss in space.near_misses
                ),
            )
            for space in reply.namespaces
        )

    def _check_boot(self, boot_id: bytes) -> None:
        if boot_id != self.boot_id:
            raise RemoteProtocolError("boot_id: another boot answers", field="boot_id", value=boot_id.hex())

    def _refuse_other_process(self) -> None:
        if self._pid not in (0, os.getpid()):
            raise LocalProtocolError(
                f"pid: connected by process {self._pid}, used by {os.getpid()}; make a Client after the fork",
                field="pid",
                value=os.getpid(),
            )

    def _left_s(self, until_s: float) -> float:
        left_s = until_s - self._clock.now_s()
        if left_s <= 0:
            raise TimeoutError("deadline is over")
        return left_s

    def _lose(self, err: Exception, deadline_s: float) -> NoReturn:
        self._disconnect()
        reason = (err.strerror if isinstance(err, OSError) else None) or str(err) or type(err).__name__
        raise PeerUnavailable(f"{self.path}: {reason}", peer=self.path, deadline_s=deadline_s) from err

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._decoder = FrameDecoder(FROM_SERVER)

    @contextmanager
    def _locked(self, deadline_s: float) -> Iterator[float]:
        """Holds the lock; yields the time at which the deadline is over."""
        until_s = self._clock.now_s() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            raise PeerUnavailable(f"{self.path}: another call is still waiting", peer=self.path, deadline_s=deadline_s)
        try:
            yield until_s
        finally:
            self._lock.release()


def _open_socket(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        _check_owner(sock, path)
    except (OSError, ConfigError):
        sock.close()
        raise
    return sock


def _check_owner(sock: socket.socket, path: str) -> None:
    """Another user could have been first to put a socket at a path in a shared folder; its memory would be our cache."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"path: {path} is served by user {uid}, we are user {os.geteuid()}; use a sidecar of our own user or of root",
            field="path",
            value=path,
            peer_uid=uid,
            own_uid=os.geteuid(),
        )


def _parse(frame: Frame, reply_class: type[Reply]) -> Reply | pb.ErrorReply:
    return pb.ErrorReply.FromString(frame.body) if frame.kind is Kind.ERROR else reply_class.FromString(frame.body)


def _uses_cuda() -> bool:
    """Whether torch has begun to use a GPU here, as it has wherever pages in its memory are copied (kernels/pinned.py)."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _check_hello(reply: pb.HelloReply, *, num_descriptors: int, wanted: int, cut: bool) -> None:
    if reply.protocol_version != PROTOCOL_VERSION:
        raise RemoteProtocolError(
            f"protocol_version: the sidecar speaks {reply.protocol_version}, this client {PROTOCOL_VERSION}",
            field="protocol_version",
            value=reply.protocol_version,
        )
    if num_descriptors != wanted or cut:
        raise RemoteProtocolError(
            f"descriptors: {num_descriptors} came with Hello, {wanted} were asked for",
            field="descriptors",
            value=num_descriptors,
        )


def wire_request_id(request_id: str) -> str:
    """An engine's own id, which may be a caller's: any text, of any length. One that the wire has no room for ends with a digest
    of all of it, so that two of them stay two."""
    encoded = request_id.encode(errors="replace")
    if len(encoded) <= MAX_REQUEST_ID_BYTES:
        return encoded.decode()
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return encoded[: MAX_REQUEST_ID_BYTES - len(digest) - 1].decode(errors="ignore") + "~" + digest


def _packed(keys: Sequence[bytes] | bytes) -> bytes:
    return keys if isinstance(keys, bytes) else pack_keys(keys)


def _plan(plan: pb.Plan) -> FetchPlan:
    return FetchPlan(*[getattr(plan, field) for field in FetchPlan._fields])


def _u64(packed: bytes) -> NDArray[np.uint64]:
    if len(packed) % _U64_NBYTES:
        raise RemoteProtocolError(f"{len(packed)} bytes are no whole u64 values", field="u64", value=len(packed))
    return np.frombuffer(packed, "<u8")
