"""The client's side of HTTP: one request in, one Exchange out, whatever the server does."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp.typedefs import LooseHeaders

from kvstore.bench.api import PATHS, AnswerReader, MalformedChunk, ServerFault, error_message
from kvstore.bench.sample import REFUSED, Exchange, Failure
from kvstore.bench.sse import EventReader, EventTooLong
from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError, PeerUnavailable

_DRAIN_S = 0.1
_KEEPALIVE_S = 2.0  # below what servers grant (5 s is usual): a connection closed as we write would be a failure
_OK, _NOT_FOUND, _TOO_MANY = 200, 404, 429


class HttpClient:
    """Asks the server at `url`, which ends in /v1. Opened by `async with`; one for each server."""

    def __init__(self, url: str, clock: Clock, *, api_key: str = "") -> None:
        self._url = url
        self._clock = clock
        self._headers: LooseHeaders = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No limit of connections: a client that queues measures itself. Deadlines are set around each request.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def models(self, deadline_s: float) -> list[dict[str, object]]:
        """What GET /models lists; nothing where there is no such page. Raises PeerUnavailable when nobody answers within
        `deadline_s`, ConfigError when the answer is not that of an OpenAI-compatible server."""
        assert self._session is not None
        try:
            async with asyncio.timeout(deadline_s), self._session.get(f"{self._url}/models") as response:
                status, body = response.status, await response.read()
        except TimeoutError as err:
            raise self._absent(f"no answer within {deadline_s:g} s", deadline_s) from err
        except aiohttp.ClientError as err:
            raise self._absent(str(err) or type(err).__name__, deadline_s) from err
        if status == _NOT_FOUND:
            return []
        try:
            listed = json.loads(body)["data"] if status == _OK else None
        except (ValueError, KeyError, TypeError):
            listed = None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
            raise ConfigError(
                f"url: {self._url}/models answered {status} and no list of models: {error_message(body)}; use the address of "
                "an OpenAI-compatible server (a key: --api-key-env)",
                field="url",
                value=self._url,
            )
        return listed

    def _absent(self, why: str, deadline_s: float) -> PeerUnavailable:
        return PeerUnavailable(
            f"url: no server answers at {self._url}: {why}; start it, or give its address",
            peer=self._url,
            deadline_s=deadline_s,
        )

    async def ask(self, api: str, body: bytes, deadline_s: float) -> Exchange:
        """Send `body` and read the stream to its end or to the deadline. Raises nothing that the server could cause."""
        answer = _Answer(AnswerReader(api))
        sent_s = self._clock.now_s()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(deadline_s):
                failure = await self._stream(PATHS[api], body, answer)
        except TimeoutError:
            failure = Failure("deadline", f"no end within {deadline_s:g} s; {answer.progress}")
        except aiohttp.ClientConnectorError as err:
            failure = Failure("connect", str(err))
        except aiohttp.ClientResponseError as err:
            failure = Failure("malformed", f"not HTTP: {err.message}")
        except (aiohttp.ClientError, ConnectionError) as err:
            failure = Failure("broken", f"{str(err) or type(err).__name__}; {answer.progress}")
        except ServerFault as err:
            failure = Failure("server", str(err))
        except (MalformedChunk, EventTooLong) as err:
            failure = Failure("malformed", str(err))
        return Exchange(
            sent_s=sent_s,
            done_s=self._clock.now_s() if answer.done_s is None else answer.done_s,
            token_times_s=tuple(answer.times_s),
            text=answer.reader.text,
            finish_reason=answer.reader.finish_reason,
            usage=answer.reader.usage,
            failure=failure,
        )

    async def _stream(self, path: str, body: bytes, answer: "_Answer") -> Failure | None:
        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url + path, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != _OK:
                return _refusal(response, await response.read())
            if response.content_type != "text/event-stream":
                return Failure("malformed", f"answered {response.content_type}, not a stream (text/event-stream)")
            await self._read_events(response, answer)
            if not answer.reader.done:
                return Failure("broken", f"the stream ended without data: [DONE]; {answer.progress}")
            await _drain(response)
        return None

    async def _read_events(self, response: aiohttp.ClientResponse, answer: "_Answer") -> None:
        events = EventReader()
        async for data in response.content.iter_any():
            now_s = self._clock.now_s()
            for event in events.feed(data):
                if answer.reader.take(event):
                    answer.times_s.append(now_s)
            if answer.reader.done:
                answer.done_s = now_s
                return


@dataclass(slots=True)
class _Answer:
    reader: AnswerReader
    times_s: list[float] = field(default_factory=list)
    done_s: float | None = None

    @property
    def progress(self) -> str:
        return f"{len(self.times_s)} chunks with text had come"


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the body's end, so that the connection can be used again; one that does not end soon is closed instead."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            await response.read()


def _refusal(response: aiohttp.ClientResponse, body: bytes) -> Failure:
    kind = REFUSED if response.status == _TOO_MANY else f"http_{response.status}"
    retry_after_s = _seconds(response.headers.get("Retry-After", ""))
    return Failure(kind, f"{response.status}: {error_message(body)}", retry_after_s)


def _seconds(retry_after: str) -> float | None:
    """Of a Retry-After in seconds; a date or anything else is None."""
    return float(retry_after) if retry_after.isdecimal() else None
