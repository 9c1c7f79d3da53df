"""The TCP transport of an arena: straight from arena to socket to arena (transport/LINK.md)."""

import logging
import math
import secrets
import ssl
import threading
import time
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import LINK_STREAMS, MAX_DESCRIPTOR_BYTES, MAX_LINK_CONNECTIONS
from kvstore.transport import link_frames as frames
from kvstore.transport.link import Gatekeeper
from kvstore.transport.tcp_owner import TcpOwner
from kvstore.transport.tcp_reader import TcpLink
from kvstore.transport.tcp_socket import TcpSecurity, connect

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 60.0
"""The keeper looks at its links so often, though whoever needs it wakes it."""


class TcpEndpoint:
    """An Endpoint (transport/link.py) that listens on `host` and `port` (0: any), one network interface.

    Threads: one that accepts and one for each connection served; up to `max_streams` for each link; and a keeper, which
    makes connections and watches deadlines, so that `read` never waits. `advertise`: the host that peers connect to, where
    it is not `host`. `fd`: see TcpOwner.
    """

    kind = "tcp"

    def __init__(
        self,
        *,
        memory: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        gatekeeper: Gatekeeper,
        security: TcpSecurity,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str = "",
        fd: int | None = None,
        max_streams: int = LINK_STREAMS,
        max_connections: int = MAX_LINK_CONNECTIONS,
    ) -> None:
        self._memory = memory
        self._security = security
        self._host, self._port = host, port
        self._advertise = advertise or host
        self._max_streams = max_streams
        self._endpoint_id = secrets.token_bytes(frames.ID_NBYTES)
        self._context: ssl.SSLContext | None = None
        self._owner = TcpOwner(
            memory=memory,
            generations=generations,
            gatekeeper=gatekeeper,
            endpoint_id=self._endpoint_id,
            security=security,
            fd=fd,
            max_connections=max_connections,
        )
        self._keeper = threading.Thread(target=self._keep, name="kvstore-tcp-keeper", daemon=True)

        # Guarded by this lock.
        self._wake = threading.Condition(threading.Lock())
        self._links: list[TcpLink] = []
        self._wakes_s = math.inf  # when the keeper looks next
        self._closing = False

    def open(self) -> Self:
        """Endpoint.open."""
        self._context = self._security.context(owner=False)
        self._owner.open(self._host, self._port)
        self._keeper.start()
        return self

    def describe(self) -> bytes:
        """Endpoint.describe."""
        return frames.encode_descriptor(
            frames.Descriptor(
                host=self._advertise,
                port=self._owner.port,
                endpoint_id=self._endpoint_id,
                arena_nbytes=self._memory.nbytes,
                tls=self._security.tls,
            )
        )

    def connect(self, peer: str, descriptor: bytes) -> TcpLink:
        """Endpoint.connect."""
        if len(descriptor) > MAX_DESCRIPTOR_BYTES:
            raise RemoteProtocolError(
                f"descriptor: {len(descriptor)} bytes are too many; at most {MAX_DESCRIPTOR_BYTES} are allowed",
                field="descriptor",
                value=len(descriptor),
            )
        target = frames.decode_descriptor(descriptor)
        if target.tls != self._security.tls:
            raise RemoteProtocolError(
                f"descriptor of {peer}: tls is {target.tls}, here it is {self._security.tls}; set both alike",
                field="descriptor tls",
                value=target.tls,
            )
        link = TcpLink(
            peer,
            partial(connect, target, self._security, self._context),
            arena=self._memory.data,
            poke=self._poke,
            max_streams=self._max_streams,
        )
        with self._wake:
            assert not self._closing, "the endpoint is closed"
            self._links.append(link)
        return link

    def close(self, deadline_s: float) -> bool:
        """Endpoint.close."""
        ends_s = time.monotonic() + deadline_s
        with self._wake:
            self._closing = True
            links = list(self._links)
            self._wake.notify()
        gone = [link.close(max(0.0, ends_s - time.monotonic())) for link in links]
        gone.append(self._owner.close(max(0.0, ends_s - time.monotonic())))
        if self._keeper.ident is not None:
            self._keeper.join(max(0.0, ends_s - time.monotonic()))
        return all(gone) and not self._keeper.is_alive()

    def _poke(self, by_s: float) -> None:
        """The keeper should look at its links at that time at the latest."""
        with self._wake:
            if by_s < self._wakes_s:
                self._wakes_s = by_s
                self._wake.notify()

    def _keep(self) -> None:
        while True:
            with self._wake:
                while not self._closing and (wait_s := self._wakes_s - time.monotonic()) > 0:
                    self._wake.wait(min(wait_s, _IDLE_WAIT_S))
                if self._closing:
                    return
                self._wakes_s = math.inf
                self._links = [link for link in self._links if not link.gone]
                links = list(self._links)
            for link in links:
                try:
                    self._poke(link.tend())
                except Exception:  # noqa: BLE001 - outermost frame; one link's trouble must not leave the others unwatched
                    _log.exception("link to %s: tending it crashed", link.peer)


__all__ = ["TcpEndpoint", "TcpSecurity"]
