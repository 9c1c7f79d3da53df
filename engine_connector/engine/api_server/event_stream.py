"""Server-sent events to one reader, who keeps up or is cut off."""

from http import HTTPStatus

import msgspec
from aiohttp import web

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class SlowReader(ConnectionError):
    """A client left more unread than it may: its connection is gone, and its request with it."""


class EventStream:
    """The events of one response. Sending never waits: what the client does not read is kept, up to `max_unsent_bytes`."""

    def __init__(self, request: web.Request, max_unsent_bytes: int) -> None:
        self._request = request
        self._response = web.StreamResponse(status=HTTPStatus.OK, headers=_HEADERS)
        self._max_unsent_bytes = max_unsent_bytes

    async def start(self) -> None:
        """Send the head."""
        await self._response.prepare(self._request)

    async def send(self, value: object) -> None:
        """One event. Raises SlowReader; ConnectionError when the client is gone."""
        await self._write(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def finish(self, *, done: bool = True) -> web.StreamResponse:
        """The end, after OpenAI's mark for a whole answer if this is one."""
        if done:
            await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        await self._response.write(data)
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() > self._max_unsent_bytes:
            transport.abort()
            raise SlowReader(f"more than {self._max_unsent_bytes} bytes of events unread")
