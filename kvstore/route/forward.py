"""One try: the request to an engine, and its answer to the client as it comes.

Until the answer's head has come, the client has seen nothing and another engine may be asked: `NoAnswer`. From then on
the answer is passed on byte for byte, and ends as it ends: a stream of events that breaks between two events gets an error
event, so that its reader knows why; anything else is cut off.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from kvstore.engine_connector.engine.api_server.refusals import Refusal
from kvstore.route.engines import Carried, Engine

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "content-length",  # set anew
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_MAX_REFUSAL_BYTES = 64 << 10
_REPEATED_STATUSES = frozenset({429, 503})
"""Another engine may have room."""
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Not to be found in an answer's head."""

ENGINE_HEADER = "x-kvstore-engine"
"""In every answer: whose it is."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request, read. `may_repeat`: to ask it twice does no harm."""

    request: web.Request
    body: bytes
    may_repeat: bool


class NoAnswer(Exception):
    """Another engine may be tried. `refusal` is what to tell the client when there is none."""

    def __init__(self, reason: str, refusal: web.Response) -> None:
        super().__init__(reason)
        self.reason = reason
        self.refusal = refusal


class Forward:
    """Through one session. `silence_s`: an engine that sends nothing for so long has failed."""

    def __init__(self, session: aiohttp.ClientSession, *, connect_deadline_s: float, silence_s: float) -> None:
        self._session = session
        self._silence_s = silence_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_deadline_s, sock_read=silence_s)

    async def answer(
        self, asked: Asked, carried: Carried, on_head: Callable[[], None]
    ) -> tuple[web.StreamResponse, str]:
        """The engine's answer, passed on, and why it broke off ("" if it did not). Raises NoAnswer, Refusal, and
        ConnectionError when the client is gone."""
        engine = carried.engine
        upstream = await self._head(asked, engine)
        try:
            _require_head(upstream, engine)
            if upstream.status in _REPEATED_STATUSES:
                raise NoAnswer("refused", await self._whole(upstream, engine))
            on_head()
            return await self._pass_on(asked.request, upstream, carried)
        finally:
            if upstream.content.at_eof():
                upstream.release()
            else:
                upstream.close()

    async def _head(self, asked: Asked, engine: Engine) -> aiohttp.ClientResponse:
        request = asked.request
        target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs
        url = URL(engine.url + target, encoded=True)  # not of the host that a target for a proxy names
        headers = _passed_on(request.headers)
        try:
            return await self._session.request(
                request.method,
                url,
                data=asked.body or None,
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout,
                skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as err:
            raise NoAnswer("connect", _told(engine, 503, f"no connection: {_reason(err)}")) from err
        except aiohttp.SocketTimeoutError as err:
            raise _refusal(engine, 504, f"silent for {self._silence_s:g} s") from err
        except aiohttp.ClientResponseError as err:
            raise _refusal(engine, 502, f"not HTTP: {err.message}") from err
        except (aiohttp.ClientError, ConnectionError) as err:
            if not asked.may_repeat:
                raise _refusal(engine, 502, f"closed the connection: {_reason(err)}") from err
            raise NoAnswer("closed", _told(engine, 502, f"closed the connection: {_reason(err)}")) from err

    async def _whole(self, upstream: aiohttp.ClientResponse, engine: Engine) -> web.Response:
        """A short answer, kept until it is known whether it is needed; ours in its place when it is not short, or not whole."""
        body = b""
        try:
            async with asyncio.timeout(self._silence_s):
                while len(body) <= _MAX_REFUSAL_BYTES and (chunk := await upstream.content.readany()):
                    body += chunk
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as err:
            return _told(engine, upstream.status, f"broke off: {_reason(err)}")
        if len(body) > _MAX_REFUSAL_BYTES:
            return _told(
                engine, upstream.status, f"answered {upstream.status} and more than {_MAX_REFUSAL_BYTES} bytes"
            )
        headers = _passed_on(upstream.headers)
        headers[ENGINE_HEADER] = engine.url
        return web.Response(status=upstream.status, body=body, headers=headers)

    async def _pass_on(
        self, request: web.Request, upstream: aiohttp.ClientResponse, carried: Carried
    ) -> tuple[web.StreamResponse, str]:
        engine = carried.engine
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        response.headers.extend(_passed_on(upstream.headers))
        response.headers[ENGINE_HEADER] = engine.url
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        await response.prepare(request)
        end = b"\n\n"
        while True:
            try:
                chunk = await upstream.content.readany()
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as err:
                why = f"broke off: {_reason(err)}"
                await self._break_off(request, response, engine, why, is_between_events=end == b"\n\n")
                return response, why
            if not chunk:
                break
            carried.begin_answer()
            end = (end + chunk)[-2:]
            await response.write(chunk)
        await response.write_eof()
        return response, ""

    @staticmethod
    async def _break_off(
        request: web.Request, response: web.StreamResponse, engine: Engine, why: str, *, is_between_events: bool
    ) -> None:
        if response.content_type == "text/event-stream" and is_between_events and response.content_length is None:
            refusal = _refusal(engine, 502, why)
            await response.write(b"data: " + msgspec.json.encode(refusal.to_json()) + b"\n\n")
            await response.write_eof()
        elif request.transport is not None:
            request.transport.abort()


def _require_head(upstream: aiohttp.ClientResponse, engine: Engine) -> None:
    """Raises Refusal for one that cannot be passed on."""
    if upstream.status < HTTPStatus.OK:
        raise _refusal(engine, 502, f"not HTTP: {upstream.status}, which nobody asked for")
    if any(map(_CONTROL.search, (upstream.reason or "", *upstream.headers.values()))):
        raise _refusal(engine, 502, "not HTTP: a control character in the head of its answer")


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Without those that are between two neighbours only."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in _HOP_BY_HOP and name.lower() not in named
    )


def _refusal(engine: Engine, status: int, why: str) -> Refusal:
    return Refusal(status, f"engine {engine.url}: {why}", code="engine_failed")


def _told(engine: Engine, status: int, why: str) -> web.Response:
    response = _refusal(engine, status, why).to_response()
    response.headers["Retry-After"] = "1"
    return response


def _reason(err: Exception) -> str:
    if isinstance(err, aiohttp.ClientConnectorError):
        return err.os_error.strerror or str(err.os_error)
    return str(err) or type(err).__name__
