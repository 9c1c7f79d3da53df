"""The engines: which are up, and how busy each is.

An engine is up when GET on its health path has a status below 500: one that wants a key is well. It is down as soon as no
connection to it can be made, whoever tried, or when `_FAILURES_TO_DOWN` checks in a row have failed: a busy engine may be
late once. A request that broke has the engine checked at once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp

from kvstore.core.errors import ConfigError
from kvstore.route.policies import Load

logger = logging.getLogger(__name__)

_FAILURES_TO_DOWN = 3


@dataclass(eq=False, slots=True)
class Engine:
    """One of them. `url` ends before /v1."""

    url: str
    is_up: bool = False
    why_down: str = "not checked yet"
    num_in_flight: int = 0
    num_pending: int = 0
    num_failures: int = 0  # of checks, in a row
    check_now: asyncio.Event = field(default_factory=asyncio.Event)

    def load(self) -> Load:
        """For a policy."""
        return Load(self.url, self.num_in_flight, self.num_pending)


@dataclass(slots=True)
class Carried:
    """A request on its way through an engine."""

    engine: Engine
    num_pending: int

    def begin_answer(self) -> None:
        """Its prompt has been computed. Idempotent."""
        self.engine.num_pending -= self.num_pending
        self.num_pending = 0


@contextlib.contextmanager
def carrying(engine: Engine, num_pending: int) -> Iterator[Carried]:
    """Counts a request with so many chunks to compute while the block runs."""
    carried = Carried(engine, num_pending)
    engine.num_in_flight += 1
    engine.num_pending += num_pending
    try:
        yield carried
    finally:
        carried.begin_answer()
        engine.num_in_flight -= 1


def read_urls(urls: Sequence[str]) -> list[Engine]:
    """Raises ConfigError."""
    engines = [Engine(_read_url(url)) for url in urls]
    if not engines:
        raise ConfigError("engine: none given; use --engine http://HOST:PORT for each", field="engine", value="")
    for number, engine in enumerate(engines):
        if any(engine.url == other.url for other in engines[:number]):
            raise ConfigError(f"engine: {engine.url} is given twice", field="engine", value=engine.url)
    return engines


def _read_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is open
        usable = False
    if not usable or parts.query or parts.fragment or parts.username or any(c.isspace() for c in url):
        raise ConfigError(
            f"engine: {url!r} is not right; use http://HOST:PORT, with or without /v1", field="engine", value=url
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class HealthChecks:
    """Of all engines, from `start` to `stop`. `on_down` is told each engine that goes down."""

    def __init__(
        self,
        engines: Sequence[Engine],
        session: aiohttp.ClientSession,
        *,
        path: str,
        interval_s: float,
        deadline_s: float,
        on_down: Callable[[Engine], None],
    ) -> None:
        self._engines = engines
        self._session = session
        self._path = path
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._on_down = on_down
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check each once, then now and then. Waits for the first checks, within their deadline."""
        await asyncio.gather(*(self._check(engine) for engine in self._engines))
        self._tasks = [asyncio.create_task(self._keep_checking(engine)) for engine in self._engines]

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def unreachable(self, engine: Engine, why: str) -> None:
        """No connection could be made."""
        if engine.is_up:
            logger.warning("engine down url=%s reason=%s", engine.url, why)
            engine.is_up = False
            self._on_down(engine)
        engine.why_down = why

    async def _keep_checking(self, engine: Engine) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await engine.check_now.wait()
            engine.check_now.clear()
            await self._check(engine)

    async def _check(self, engine: Engine) -> None:
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                self._session.get(engine.url + self._path, allow_redirects=False) as response,
            ):
                if response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    self._up(engine)
                else:
                    self._failed(engine, f"{self._path} answered {response.status}")
        except aiohttp.ClientConnectorError as err:
            self.unreachable(engine, str(err.os_error.strerror or err))
        except (TimeoutError, aiohttp.ClientError, ValueError) as err:  # ValueError: no URL after all
            self._failed(engine, str(err) or f"no answer within {self._deadline_s:g} s")

    def _up(self, engine: Engine) -> None:
        engine.num_failures = 0
        if not engine.is_up:
            logger.info("engine up url=%s", engine.url)
        engine.is_up, engine.why_down = True, ""

    def _failed(self, engine: Engine, why: str) -> None:
        engine.num_failures += 1
        if engine.num_failures >= _FAILURES_TO_DOWN or not engine.is_up:
            self.unreachable(engine, why)
