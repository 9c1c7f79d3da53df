"""The owner's side of the TCP link: answers peers' requests from the arena, a thread for each connection."""

import logging
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.blocks import Extent
from kvstore.core.errors import PeerUnavailable, RemoteProtocolError
from kvstore.core.limits import (
    LINK_IDLE_S,
    LINK_REQUEST_DEADLINE_S,
    LINK_STALL_S,
    MAX_LINK_CONNECTIONS,
    MAX_LINK_REQUEST_EXTENTS,
    SLOT_ALIGN_BYTES,
)
from kvstore.transport import link_frames as frames
from kvstore.transport.link import Gatekeeper, LinkProblem
from kvstore.transport.tcp_socket import LinkFailure, LinkSocket, TcpSecurity, accept

_log = logging.getLogger(__name__)

_BACKLOG = 256
_MAX_HANDSHAKES = 64
_ACCEPT_PAUSE_S = 0.1
"""Before the next accept when there is no room for another thread, or no descriptor for another socket."""


class TcpOwner:
    """Listens, and serves what the gatekeeper allows. `fd`, if given, is the file in memory that `memory` maps: then bytes
    for which the reader has a checksum go from its pages to the network without a copy here."""

    def __init__(
        self,
        *,
        memory: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        gatekeeper: Gatekeeper,
        endpoint_id: bytes,
        security: TcpSecurity,
        fd: int | None,
        max_connections: int = MAX_LINK_CONNECTIONS,
    ) -> None:
        self._arena = memory.data
        self._generations = generations
        self._gatekeeper = gatekeeper
        self._endpoint_id = endpoint_id
        self._security = security
        self._fd = fd
        self._max_connections = max_connections
        self._context: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._acceptor = threading.Thread(target=self._accept_all, name="kvstore-tcp-accept", daemon=True)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, socket.socket | LinkSocket] = {}  # guarded by the lock

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._listener is not None, "not open"
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Connections being served, and those in the handshake."""
        with self._lock:
            return len(self._serving)

    def open(self, host: str, port: int) -> Self:
        """Listen. Raises ConfigError (certificates) or PeerUnavailable (no such address, port taken)."""
        self._context = self._security.context(owner=True)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as err:
            raise PeerUnavailable(f"link: cannot listen on {host} port {port}: {err.strerror}", peer="") from err
        self._acceptor.start()
        return self

    def close(self, deadline_s: float) -> bool:
        """End all connections; whether every thread is gone. Idempotent."""
        ends_s = time.monotonic() + deadline_s
        self._closing.set()
        if self._listener is not None:
            LinkSocket(self._listener).interrupt()
            self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for sock in serving.values():
            (sock if isinstance(sock, LinkSocket) else LinkSocket(sock)).interrupt()
        threads = [thread for thread in (self._acceptor, *serving) if thread.ident is not None]
        for thread in threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        assert self._listener is not None
        while not self._closing.is_set():
            if self.num_connections >= self._max_connections + _MAX_HANDSHAKES:
                self._closing.wait(_ACCEPT_PAUSE_S)
                continue
            try:
                sock, _ = self._listener.accept()
            except OSError as err:
                if not self._closing.wait(_ACCEPT_PAUSE_S):
                    _log.warning("link: cannot accept: %s", err.strerror)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name="kvstore-tcp-owner", daemon=True)
        with self._lock:
            if self._closing.is_set():
                sock.close()
                return
            self._serving[thread] = sock
            try:
                thread.start()
            except RuntimeError as err:
                _log.warning("link: no thread for another reader: %s", err)
                del self._serving[thread]
                sock.close()

    def _serve(self, accepted: socket.socket) -> None:
        thread = threading.current_thread()
        try:
            sock = self._shake(accepted, thread)
            try:
                self._answer_all(sock)
            finally:
                sock.close()
        except LinkFailure as failure:
            level = logging.DEBUG if failure.problem is LinkProblem.GONE else logging.WARNING
            _log.log(level, "link: a reader's connection is closed: %s", failure)
        except RemoteProtocolError as err:
            _log.warning("link: a reader's connection is closed: %s", err.message)
        except Exception:  # noqa: BLE001 - outermost frame of a connection: logged, and the connection ends
            _log.exception("link: serving a reader crashed")
        finally:
            with self._lock:
                del self._serving[thread]

    def _shake(self, accepted: socket.socket, thread: threading.Thread) -> LinkSocket:
        problem = LinkProblem.OVERLOADED if self.num_connections > self._max_connections else None
        sock = accept(
            accepted,
            endpoint_id=self._endpoint_id,
            security=self._security,
            context=self._context,
            problem=problem,
        )
        sock.set_deadlines(recv_s=4 * LINK_IDLE_S, send_s=LINK_STALL_S)
        with self._lock:
            self._serving[thread] = sock
        if self._closing.is_set():
            sock.interrupt()
        return sock

    # --- requests -----------------------------------------------------------------------------------------------------

    def _answer_all(self, sock: LinkSocket) -> None:
        header = memoryview(bytearray(frames.REQUEST_NBYTES))
        body = memoryview(bytearray(frames.EXTENT_NBYTES * MAX_LINK_REQUEST_EXTENTS))
        while True:
            sock.recv_exactly(header)
            request = frames.decode_request_header(header)
            extents_raw = body[: frames.EXTENT_NBYTES * request.num_extents]
            sock.recv_exactly(extents_raw)
            self._answer(sock, request, frames.decode_extents(extents_raw))

    def _answer(self, sock: LinkSocket, request: frames.RequestHeader, extents: Sequence[Extent]) -> None:
        inside = all(extent.offset + extent.nbytes <= self._arena.nbytes for extent in extents)
        if inside and self._gatekeeper.may_read(request.lease, extents):
            before = tuple(map(self._staleness, extents))
        else:
            before = (LinkProblem.REFUSED,) * len(extents)
        granted = [extent for extent, problem in zip(extents, before, strict=True) if problem is None]
        nbytes = sum(extent.nbytes for extent in granted)
        head = frames.encode_head(frames.Statuses(request.request_id, before, nbytes))
        ends_s = time.monotonic() + LINK_REQUEST_DEADLINE_S
        if request.checked and self._fd is not None and sock.may_send_pages:
            sock.send([head], more=bool(granted))
            for extent in granted:
                sock.send_pages(self._fd, extent.offset, extent.nbytes, ends_s=ends_s)
        else:
            views = [self._arena[extent.offset : extent.offset + extent.nbytes] for extent in granted]
            sock.send([head, *views], ends_s=ends_s)
        after = tuple(problem or self._staleness(extent) for extent, problem in zip(extents, before, strict=True))
        sock.send([frames.encode_tail(frames.Statuses(request.request_id, after))])

    def _staleness(self, extent: Extent) -> LinkProblem | None:
        found = self._generations[extent.offset // SLOT_ALIGN_BYTES]
        return None if int(found) == extent.generation else LinkProblem.STALE
