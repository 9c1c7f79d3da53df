"""The routes of a router, and its life. A client gets an engine's answer, or an error in OpenAI's form."""

import asyncio
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.api_server.bodies import Bodies
from kvstore.engine_connector.engine.api_server.connections import ConnectionLimits, Connections, http_logger
from kvstore.engine_connector.engine.api_server.refusals import Handler, Refusal, answer, json_response
from kvstore.route import figures
from kvstore.route.engines import Engine, HealthChecks, carrying, read_urls
from kvstore.route.forward import Asked, Forward, NoAnswer
from kvstore.route.policies import Choice, make_policy
from kvstore.route.prompts import CHUNK_BYTES, Keys, read_keys

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 75.0
_UPSTREAM_KEEPALIVE_S = 2.0  # below what servers grant (5 s is usual)
_LINGER_S = 2.0
_RETRY_AFTER_S = 1.0
_CLIENT_GONE = 499
_PROMPT_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_MAX_LINE_BYTES = 64 << 10  # of an engine's header


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What can be set. `port` 0: any that is free. `prefix_bytes` is the text that an engine is taken to have cached."""

    engines: tuple[str, ...]
    policy: str = "prefix"
    host: str = "127.0.0.1"
    port: int = 8080
    max_lead: int = 8
    prefix_bytes: int = 16 << 20
    prefix_expiry_s: float = 600.0
    health_path: str = "/v1/models"
    health_interval_s: float = 1.0
    health_deadline_s: float = 2.0
    connect_deadline_s: float = 2.0
    silence_s: float = 300.0
    max_body_bytes: int = 8 << 20
    stop_deadline_s: float = 15.0
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class Router:
    """Serves from `run` until `stop`. Event loop only. Raises ConfigError for engines or a policy that cannot be."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._engines = read_urls(config.engines)
        if not config.health_path.startswith("/"):
            raise ConfigError(
                f"health-path: {config.health_path!r} is not right; use one such as /health",
                field="health-path",
                value=config.health_path,
            )
        self._policy = make_policy(
            config.policy,
            max_lead=config.max_lead,
            max_chunks=max(1, config.prefix_bytes // CHUNK_BYTES),
            expiry_s=config.prefix_expiry_s,
        )
        self._bodies = Bodies(config.max_body_bytes)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Have `run` end."""
        self._stopping.set()

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Listen, tell the port, serve until `stop`; then requests under way have `stop_deadline_s`. Raises ConfigError."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_UPSTREAM_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
        ) as session:
            config = self._config
            self._forward = Forward(session, connect_deadline_s=config.connect_deadline_s, silence_s=config.silence_s)
            self._health = HealthChecks(
                self._engines,
                session,
                path=config.health_path,
                interval_s=config.health_interval_s,
                deadline_s=config.health_deadline_s,
                on_down=lambda engine: self._policy.forget(engine.url),
            )
            try:
                await self._health.start()
                await self._serve(on_ready)
            finally:
                await self._health.stop()

    async def _serve(self, on_ready: Callable[[int], None]) -> None:
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            logger=http_logger,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=self._config.stop_deadline_s,
        )
        await runner.setup()
        assert runner.server is not None
        self._connections = Connections(runner.server, self._config.connections)
        self._figures = figures.Figures(self._engines, self._policy.num_chunks, lambda: len(self._connections))
        try:
            port = await self._connections.listen(self._config.host, self._config.port)
            on_ready(port)
            await self._stopping.wait()
            self._connections.close()
        finally:
            await runner.cleanup()
            await self._connections.abort()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors])
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/v1/{rest:.+}", self._route),
                web.post("/v1/{rest:.+}", self._route),
                web.delete("/v1/{rest:.+}", self._route),
            ]
        )
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors become OpenAI's; every answer is counted."""
        self._connections.begin(request.protocol)
        try:
            response = await answer(request, handler)
        except asyncio.CancelledError:
            self._figures.hangups.inc()
            raise
        except ConnectionError as err:
            self._figures.hangups.inc()
            logger.info("client gone reason=%s", err)
            return web.Response(status=_CLIENT_GONE)
        self._figures.responses.labels(str(response.status)).inc()
        return response

    # --- about the router ----------------------------------------------------------------------------------------------

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        """200 while there is an engine to send requests to."""
        told = {
            engine.url: {"up": engine.is_up, "reason": engine.why_down, "in_flight": engine.num_in_flight}
            for engine in self._engines
        }
        ready = any(engine.is_up for engine in self._engines)
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return json_response({"ready": ready, "engines": told}, status=status)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._figures.render(), headers={"Content-Type": figures.CONTENT_TYPE})

    # --- requests ------------------------------------------------------------------------------------------------------

    async def _route(self, request: web.Request) -> web.StreamResponse:
        """One engine after the other, until one answers."""
        arrived_s = time.monotonic()
        if any(step in {".", ".."} for step in re.split(r"[/\\]", unquote(request.path))):
            raise Refusal(
                HTTPStatus.BAD_REQUEST, f"path: {request.path[:200]!r} leads elsewhere; use one without . and .."
            )
        body = await self._bodies.read(request) if request.can_read_body else b""
        has_prompt = request.method == "POST" and request.path in _PROMPT_PATHS
        keys = read_keys(body, request.headers) if has_prompt else ()
        asked = Asked(request, body, may_repeat=has_prompt or request.method == "GET")
        left = list(self._engines)
        refusal: web.Response | None = None
        while able := [engine for engine in left if engine.is_up]:
            engine, choice = self._choose(able, keys)
            left.remove(engine)
            try:
                return await self._try(asked, engine, choice, keys, arrived_s)
            except NoAnswer as err:
                self._figures.retries.labels(engine.url, err.reason).inc()
                self._after_failure(engine, err)
                refusal = err.refusal
        if refusal is not None:
            return refusal
        why = "; ".join(f"{engine.url}: {engine.why_down}" for engine in self._engines)
        raise Refusal(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"no engine is up ({why[:2000]})",
            code="no_engine",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _choose(self, able: list[Engine], keys: Keys) -> tuple[Engine, Choice]:
        now_s = time.monotonic()
        choice = self._policy.choose([engine.load() for engine in able], keys, now_s)
        self._policy.sent(choice.name, keys, now_s)
        self._figures.requests.labels(choice.name, choice.reason).inc()
        return next(engine for engine in able if engine.url == choice.name), choice

    async def _try(
        self, asked: Asked, engine: Engine, choice: Choice, keys: Keys, arrived_s: float
    ) -> web.StreamResponse:
        num_new = len(keys) - choice.num_cached
        with carrying(engine, max(1, num_new)) as carried:
            response, why_broken = await self._forward.answer(
                asked, carried, lambda: self._figures.head_s.observe(time.monotonic() - arrived_s)
            )
        self._figures.prompt_bytes.labels("yes").inc(choice.num_cached * CHUNK_BYTES)
        self._figures.prompt_bytes.labels("no").inc(num_new * CHUNK_BYTES)
        if why_broken:
            logger.warning("answer broken url=%s reason=%s", engine.url, why_broken)
            self._figures.broken.labels(engine.url).inc()
            engine.check_now.set()
        return response

    def _after_failure(self, engine: Engine, err: NoAnswer) -> None:
        if err.reason == "connect":
            self._health.unreachable(engine, str(err.__cause__))
        elif err.reason == "closed":
            engine.check_now.set()
