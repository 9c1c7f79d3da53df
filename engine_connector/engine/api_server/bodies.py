"""Reads request bodies: JSON, uncompressed (a compressed one could unfold to any size), within limits and a deadline."""

import asyncio
from http import HTTPStatus

from aiohttp import web

from kvstore.core.errors import Overloaded
from kvstore.engine_connector.engine.api_server.refusals import Refusal

BODY_DEADLINE_S = 30.0
"""A body that is not there by then: 408."""

MAX_BODIES = 32
"""Bodies of the largest size that may be under way at once; shorter ones count by their length. More: 429."""


class Bodies:
    """Those of one server."""

    def __init__(self, max_body_bytes: int, deadline_s: float = BODY_DEADLINE_S) -> None:
        self._max_bytes = max_body_bytes
        self._deadline_s = deadline_s
        self._num_bytes = 0  # announced, and not yet read to their end

    async def read(self, request: web.Request) -> bytes:
        """The whole body. Raises Refusal, Overloaded."""
        if request.content_type != "application/json":
            raise _not_taken("Content-Type", request.content_type, "use application/json")
        if encoding := request.headers.get("Content-Encoding"):
            raise _not_taken("Content-Encoding", encoding, "leave it out")
        announced = request.content_length
        if announced is not None and announced > self._max_bytes:
            raise self._too_large()
        num_bytes = self._max_bytes if announced is None else announced
        limit = MAX_BODIES * self._max_bytes
        if self._num_bytes + num_bytes > limit:
            raise Overloaded(f"bodies: more than {limit} bytes under way", limit="MAX_BODIES", value=MAX_BODIES)
        self._num_bytes += num_bytes
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._read(request)
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, f"body: not there within {self._deadline_s:g} s") from None
        except web.RequestPayloadError as err:
            raise Refusal(HTTPStatus.BAD_REQUEST, "body: broken off, or badly chunked", param="body") from err
        finally:
            self._num_bytes -= num_bytes

    async def _read(self, request: web.Request) -> bytes:
        """Without aiohttp's `read`, which keeps a copy as long as the request lasts."""
        body = bytearray()
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > self._max_bytes:
                raise self._too_large()
        return bytes(body)

    def _too_large(self) -> Refusal:
        message = f"body: more than {self._max_bytes} bytes"
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, param="body", code="body_too_large")


def _not_taken(name: str, value: str, right: str) -> Refusal:
    return Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"{name}: {value[:100]!r} is not taken; {right}", param=name)
