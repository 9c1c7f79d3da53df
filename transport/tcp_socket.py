"""A connected socket of the TCP link: how it is tuned, secured, written and read, with a deadline where one is due."""

import contextlib
import hmac
import math
import os
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore.core.errors import ConfigError, RemoteProtocolError
from kvstore.core.limits import LINK_CONNECT_DEADLINE_S, LINK_STALL_S
from kvstore.transport import link_frames as frames
from kvstore.transport.link import LinkProblem

MIN_SECRET_NBYTES = 16
_BUFFER_BYTES = 4 << 20
"""Of the kernel, either direction: one block of a large model under way while the next is written. The kernel may give less."""
_TLS_SEND_BYTES = 1 << 20
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4))


_Frame = TypeVar("_Frame")


class LinkFailure(Exception):
    """Why a connection cannot be used any more. Never leaves transport/."""

    def __init__(self, problem: LinkProblem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSecurity:
    """Who may connect. `secret` is shared by the nodes (MIN_SECRET_NBYTES or more); `cert`, `key` and `ca` (PEM files, all or
    none) turn TLS on, with certificates of that CA demanded from both sides. One of the two is needed."""

    secret: bytes = b""
    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __post_init__(self) -> None:
        files = (self.cert, self.key, self.ca)
        if any(files) and not all(files):
            missing = [name for name, path in zip(("cert", "key", "ca"), files, strict=True) if path is None]
            raise ConfigError(f"link {missing[0]}: missing; TLS needs cert, key and ca", field=missing[0], value="")
        if not self.tls and not self.secret:
            raise ConfigError("link secret: empty; without TLS peers need a shared secret", field="secret", value="")
        if self.secret and len(self.secret) < MIN_SECRET_NBYTES:
            raise ConfigError(
                f"link secret: {len(self.secret)} bytes are too few; use {MIN_SECRET_NBYTES} random ones or more",
                field="secret",
                value=len(self.secret),
            )

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.cert is not None

    def context(self, *, owner: bool) -> ssl.SSLContext | None:
        """For one side's connections. Raises ConfigError when the files do not do."""
        if self.cert is None or self.key is None or self.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if owner else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # nodes are known by their CA and by the endpoint id, not by a name
        context.verify_mode = ssl.CERT_REQUIRED
        if owner:
            context.num_tickets = 0  # a reader takes what comes unasked for the end of its connection
        try:
            context.load_cert_chain(self.cert, self.key)
            context.load_verify_locations(self.ca)
        except OSError as err:  # ssl.SSLError is one
            raise ConfigError(
                f"link cert {self.cert}, key {self.key}, ca {self.ca}: {err}; expected PEM files that fit together",
                field="cert",
                value=str(self.cert),
            ) from err
        return context


class LinkSocket:
    """A connection after its handshake. One thread reads and writes; any other may `interrupt` it, after which every call
    fails. Calls raise LinkFailure with GONE when the connection has ended, TIMEOUT where a deadline is given."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._recv_s = self._send_s = 0.0

    @property
    def may_send_pages(self) -> bool:
        """Whether `send_pages` works: the bytes leave as they are."""
        return not self._tls

    def recv(self, views: Sequence[memoryview]) -> int:
        """Fill `views`, one after the other. Fewer bytes than they hold: the connection has ended."""
        done, rest = 0, list(views)
        while rest:
            try:
                got = self._recv_tls(rest[0]) if self._tls else self._sock.recvmsg_into(rest, 0, socket.MSG_WAITALL)[0]
            except OSError:
                break
            if not got:
                break
            done += got
            _skip(rest, got)
        return done

    def recv_exactly(self, view: memoryview) -> None:
        """Fill it, or raise GONE."""
        if self.recv([view]) < view.nbytes:
            raise LinkFailure(LinkProblem.GONE, "the connection ended")

    def send(self, views: Sequence[bytes | memoryview], *, more: bool = False, ends_s: float = math.inf) -> None:
        """Send them all. `more`: other bytes follow at once, so these may wait for them."""
        rest = [memoryview(view) for view in views]
        with _translated():
            if self._tls:
                self._send_tls(rest, ends_s)
                return
            flags = socket.MSG_MORE if more else 0
            while rest:
                _skip(rest, self._sock.sendmsg(rest, [], flags))
                if rest:
                    _require_time(ends_s)

    def send_pages(self, fd: int, offset: int, nbytes: int, *, ends_s: float) -> None:
        """Send bytes of a file in memory. They are read when the network takes them, which may be after this returns."""
        end = offset + nbytes
        with _translated():
            while offset < end:
                _require_time(ends_s)
                sent = os.sendfile(self._sock.fileno(), fd, offset, end - offset)
                if not sent:
                    raise LinkFailure(LinkProblem.SHORT, "the arena's file is shorter than the arena")
                offset += sent

    def is_quiet(self) -> bool:
        """Whether nothing has come, neither bytes nor an end."""
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def set_deadlines(self, *, recv_s: float, send_s: float) -> None:
        """How long one wait for the peer's bytes, or for the peer to take ours, may last. 0: for ever, which is what a new
        one does; somebody must watch it then."""
        self._recv_s, self._send_s = recv_s, send_s
        for option, seconds in ((socket.SO_RCVTIMEO, recv_s), (socket.SO_SNDTIMEO, send_s)):
            timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)

    def interrupt(self) -> None:
        """Any thread: whoever reads or writes stops at once."""
        with contextlib.suppress(OSError):  # it has ended already
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # not SSLSocket's, which would go on in the clear

    def close(self) -> None:
        """By the thread that reads and writes."""
        self._sock.close()

    def _send_tls(self, views: Sequence[memoryview], ends_s: float) -> None:
        self._sock.settimeout(self._send_s or None)
        for view in views:
            for start in range(0, view.nbytes, _TLS_SEND_BYTES):
                _require_time(ends_s)
                self._sock.sendall(view[start : start + _TLS_SEND_BYTES])

    def _recv_tls(self, view: memoryview) -> int:
        self._sock.settimeout(self._recv_s or None)  # the kernel's own deadline would only make OpenSSL ask again
        return self._sock.recv_into(view)


def connect(descriptor: frames.Descriptor, security: TcpSecurity, context: ssl.SSLContext | None) -> LinkSocket:
    """Connect and shake hands as a reader. Blocks at most LINK_CONNECT_DEADLINE_S or little more. Raises LinkFailure."""
    ends_s = time.monotonic() + LINK_CONNECT_DEADLINE_S
    with _translated():
        sock = socket.create_connection((descriptor.host, descriptor.port), LINK_CONNECT_DEADLINE_S)
    try:
        with _translated():
            tune(sock)
            if descriptor.tls:
                assert context is not None
                sock = context.wrap_socket(sock)
        _shake_as_reader(sock, descriptor.endpoint_id, security.secret, ends_s)
        with _translated():
            sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return LinkSocket(sock)


def accept(
    sock: socket.socket,
    *,
    endpoint_id: bytes,
    security: TcpSecurity,
    context: ssl.SSLContext | None,
    problem: LinkProblem | None,
) -> LinkSocket:
    """Shake hands as the owner; `problem`: turn the reader away with it. Blocks and raises as `connect`; the socket is closed
    when it raises."""
    ends_s = time.monotonic() + LINK_CONNECT_DEADLINE_S
    try:
        with _translated():
            tune(sock)
            sock.settimeout(LINK_CONNECT_DEADLINE_S)
            if context is not None:
                sock = _secured(sock, context, ends_s)
        _shake_as_owner(sock, endpoint_id, security.secret, problem, ends_s)
        with _translated():
            sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return LinkSocket(sock)


def tune(sock: socket.socket) -> None:
    """Large buffers, no waiting for company, and an end for a peer that does not acknowledge."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LINK_STALL_S * 1000))


def _shake_as_reader(sock: socket.socket, endpoint_id: bytes, secret: bytes, ends_s: float) -> None:
    hello = frames.encode_hello(frames.Hello(endpoint_id, secrets.token_bytes(frames.NONCE_NBYTES)))
    _say(sock, hello, ends_s)
    challenge = _hear(sock, frames.CHALLENGE_NBYTES, ends_s)
    _stop_at(_decoded(frames.decode_challenge, challenge).problem, "the owner's challenge")
    _say(sock, frames.proof(secret, b"reader", hello, challenge), ends_s)
    ready = _decoded(frames.decode_ready, _hear(sock, frames.READY_NBYTES, ends_s))
    _stop_at(ready.problem, "the owner's answer to the proof")
    if not hmac.compare_digest(ready.mac, frames.proof(secret, b"owner", hello, challenge)):
        raise LinkFailure(LinkProblem.REFUSED, "the owner does not know the secret")


def _shake_as_owner(
    sock: socket.socket, endpoint_id: bytes, secret: bytes, problem: LinkProblem | None, ends_s: float
) -> None:
    hello = _hear(sock, frames.HELLO_NBYTES, ends_s)
    if _decoded(frames.decode_hello, hello).endpoint_id != endpoint_id:
        problem = LinkProblem.GONE
    challenge = frames.encode_challenge(frames.Challenge(problem, secrets.token_bytes(frames.NONCE_NBYTES)))
    _say(sock, challenge, ends_s)
    _stop_at(problem, "turned away")
    mac = _hear(sock, frames.MAC_NBYTES, ends_s)
    if not hmac.compare_digest(mac, frames.proof(secret, b"reader", hello, challenge)):
        _say(sock, frames.encode_ready(frames.Ready(LinkProblem.REFUSED, bytes(frames.MAC_NBYTES))), ends_s)
        raise LinkFailure(LinkProblem.REFUSED, "the reader does not know the secret")
    answer = frames.Ready(None, frames.proof(secret, b"owner", hello, challenge))
    _say(sock, frames.encode_ready(answer), ends_s)


class _translated(contextlib.AbstractContextManager[None]):  # noqa: N801 - reads like contextlib.suppress
    """OSError -> LinkFailure."""

    def __exit__(self, _: object, err: BaseException | None, __: object) -> None:
        if isinstance(err, (TimeoutError, BlockingIOError)):
            raise LinkFailure(LinkProblem.TIMEOUT, "the peer does not answer, or takes nothing") from err
        if isinstance(err, ssl.SSLCertVerificationError):
            raise LinkFailure(LinkProblem.REFUSED, f"the peer's certificate: {err.verify_message}") from err
        if isinstance(err, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise LinkFailure(LinkProblem.GONE, "the connection ended") from err
        if isinstance(err, ssl.SSLError):
            refused = "ALERT" in (err.reason or "")  # the peer says that it does not like our certificate
            raise LinkFailure(LinkProblem.REFUSED if refused else LinkProblem.BROKEN, f"TLS: {err.reason}") from err
        if isinstance(err, OSError):
            raise LinkFailure(LinkProblem.GONE, err.strerror or str(err)) from err


def _skip(views: list[memoryview], nbytes: int) -> None:
    """Drop their first `nbytes`."""
    while views and nbytes >= views[0].nbytes:
        nbytes -= views.pop(0).nbytes
    if nbytes:
        views[0] = views[0][nbytes:]


def _secured(sock: socket.socket, context: ssl.SSLContext, ends_s: float) -> ssl.SSLSocket:
    """As the owner. A reader that is turned away has said Hello already; closing before that is read would take back the
    alert that tells it why."""
    secured = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
    except OSError:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(secured, socket.SHUT_WR)
            while socket.socket.recv(secured, 4096) and time.monotonic() < ends_s:
                pass
        secured.close()
        raise
    return secured


def _say(sock: socket.socket, frame: bytes, ends_s: float) -> None:
    with _translated():
        sock.settimeout(_left_s(ends_s))
        sock.sendall(frame)


def _hear(sock: socket.socket, nbytes: int, ends_s: float) -> bytes:
    heard = b""
    while len(heard) < nbytes:
        with _translated():
            sock.settimeout(_left_s(ends_s))
            got = sock.recv(nbytes - len(heard))
        if not got:
            raise LinkFailure(LinkProblem.GONE, "the connection ended in its handshake")
        heard += got
    return heard


def _require_time(ends_s: float) -> None:
    if time.monotonic() > ends_s:
        raise LinkFailure(LinkProblem.TIMEOUT, "the peer takes bytes too slowly")


def _left_s(ends_s: float) -> float:
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _decoded(decode: Callable[[bytes], _Frame], raw: bytes) -> _Frame:
    try:
        return decode(raw)
    except RemoteProtocolError as err:
        raise LinkFailure(LinkProblem.BROKEN, err.message) from err


def _stop_at(problem: LinkProblem | None, where: str) -> None:
    if problem is not None:
        raise LinkFailure(problem, f"{where}: {problem}")
