"""The sockets, bounded: aiohttp speaks HTTP on them and knows none of these limits.

A connection is ended when there are too many, when its first request has not come in time (aiohttp sees to those after
it), and when what was sent to it is not being read. A slow body and a slow reader of events are ended where they are
read and written.
"""

import asyncio
import contextlib
import logging
import socket
from dataclasses import dataclass
from typing import cast

from aiohttp import web
from aiohttp.http import HttpProcessingError

from kvstore.core.errors import ConfigError

logger = logging.getLogger(__name__)
http_logger = logging.getLogger(f"{__name__}.http")
"""aiohttp's log: bugs of ours with their traceback, and what clients send that is not HTTP in a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """`max_unsent_bytes` is kept here and once more by the kernel."""

    max_connections: int = 1024
    head_deadline_s: float = 10.0
    unread_deadline_s: float = 60.0
    max_unsent_bytes: int = 256 << 10


class Connections:
    """Listens, and has `server` speak on what is accepted."""

    def __init__(self, server: web.Server, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._server = server
        self._open: dict[object, _Connection] = {}  # by aiohttp's handler
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    async def listen(self, host: str, port: int) -> int:
        """Accept from now on; the port that was bound. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: _Connection(self._server(), self), host, port, backlog=1024
            )
        except (OSError, OverflowError, UnicodeError) as err:
            reason = (err.strerror if isinstance(err, OSError) else None) or str(err)
            raise ConfigError(
                f"host, port: cannot listen on {host!r}, {port}: {reason}", field="port", value=port
            ) from err
        self._sweeper = loop.create_task(self._sweep())
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def close(self) -> None:
        """Accept nobody any more. Open connections stay."""
        if self._listener is not None:
            self._listener.close()

    async def abort(self) -> None:
        """End what is still open."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for connection in list(self._open.values()):
            connection.abort()

    def begin(self, handler: object) -> None:
        """The first request of a connection has come."""
        if connection := self._open.get(handler):
            connection.begin()

    def add(self, connection: "_Connection") -> bool:
        """Whether there is room for one more."""
        if len(self._open) >= self.limits.max_connections:
            return False
        self._open[connection.handler] = connection
        return True

    def remove(self, connection: "_Connection") -> None:
        """It has ended."""
        self._open.pop(connection.handler, None)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.limits.unread_deadline_s / 4)
            now_s = asyncio.get_running_loop().time()
            for connection in list(self._open.values()):
                connection.end_if_unread(now_s)


class _Connection(asyncio.Protocol):
    """Between a socket and aiohttp's handler of it."""

    def __init__(self, handler: web.RequestHandler, owner: Connections) -> None:
        self.handler = handler
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        self._unread_since_s = 0.0
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        limits = self._owner.limits
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        if not self._owner.add(self):
            self._refused = True
            self._transport.abort()
            return
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.max_unsent_bytes)
        self.handler.connection_made(self._transport)
        # A stream is cut off before a write would wait; other answers wait, at most the deadline for unread ones.
        self._transport.set_write_buffer_limits(high=2 * limits.max_unsent_bytes)
        self._head_timer = asyncio.get_running_loop().call_later(limits.head_deadline_s, self.abort)

    def data_received(self, data: bytes) -> None:
        """From the client."""
        if not self._refused:
            self.handler.data_received(data)

    def eof_received(self) -> None:
        """The client sends no more; whoever closes one half is taken to have hung up."""

    def pause_writing(self) -> None:
        """Much is unread: writers wait."""
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        """They go on."""
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end, by whichever side."""
        if self._refused:
            return
        self.begin()
        self._owner.remove(self)
        self.handler.connection_lost(exc)

    def begin(self) -> None:
        """A request has come."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def end_if_unread(self, now_s: float) -> None:
        """Called now and then."""
        assert self._transport is not None
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent == 0 or self._num_unsent == 0 or num_unsent < self._num_unsent:
            self._unread_since_s = now_s
        elif now_s - self._unread_since_s > self._owner.limits.unread_deadline_s:
            self.abort()
        self._num_unsent = num_unsent


def _is_our_fault(record: logging.LogRecord) -> bool:
    err = record.exc_info[1] if record.exc_info else None
    if not isinstance(err, HttpProcessingError):
        return True
    logger.info("not HTTP reason=%s", ascii(" ".join(err.message.split())[:80]))
    return False


http_logger.addFilter(_is_our_fault)
