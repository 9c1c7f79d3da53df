"""The routes, and the life of a server: open the engine, listen, end in order."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from aiohttp import web

from kvstore.core.errors import KVStoreError, PeerUnavailable
from kvstore.core.traces import Tracer
from kvstore.engine_connector.engine.api_server import figures
from kvstore.engine_connector.engine.api_server.answers import (
    AnswerForm,
    ChatForm,
    CompletionForm,
    choice_numbers,
    usage_of,
)
from kvstore.engine_connector.engine.api_server.bodies import Bodies
from kvstore.engine_connector.engine.api_server.connections import ConnectionLimits, Connections, http_logger
from kvstore.engine_connector.engine.api_server.engine_thread import EngineRequest, EngineThread, Generation
from kvstore.engine_connector.engine.api_server.event_stream import EventStream
from kvstore.engine_connector.engine.api_server.hand_over import SAVE_DEADLINE_S, HandOvers
from kvstore.engine_connector.engine.api_server.prompts import Prompts
from kvstore.engine_connector.engine.api_server.refusals import Handler, Refusal, answer, json_response, refusal_of
from kvstore.engine_connector.engine.api_server.wire import (
    ChatRequest,
    CompletionRequest,
    options_of,
    params_of,
    parse_chat,
    parse_completion,
)
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.outputs import TokenDelta
from kvstore.engine_connector.protocol import CacheOptions, HandOver

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 75.0
"""A connection without a request for so long is closed."""

_LINGER_S = 2.0
"""After an error: how long the rest of a body is read, so that the client sees the answer."""

_CLIENT_GONE = 499
"""Told to nobody; aiohttp wants an answer to throw away."""

_CLOSE_RESPONSES_S = 1.0
"""When the server ends: for answers that are being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What can be set. `port` 0: any that is free. `hand_over` and `tenant` are those of the LLM's connector."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 << 20
    request_deadline_s: float = 600.0
    stop_deadline_s: float = 15.0
    hand_over: HandOver | None = None
    tenant: str = ""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class ApiServer:
    """Serves the LLM that `open_llm` opens, from `run` until `stop` is called. Event loop only."""

    def __init__(self, config: ServerConfig, open_llm: Callable[[], LLM], tracer: Tracer | None = None) -> None:
        """`tracer` is that of the LLM, for metrics."""
        self._tracer = tracer
        self._config = config
        self._engine = EngineThread(open_llm, on_death=self.stop)
        self._bodies = Bodies(config.max_body_bytes)
        self._stopping = asyncio.Event()
        self._started_s = int(time.time())

    def stop(self) -> None:
        """Have `run` end."""
        self._stopping.set()

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Open, listen, tell the port, serve until `stop`. Raises ConfigError for what cannot be opened or bound, what broke
        the engine, and PeerUnavailable when it does not close in time."""
        opening = asyncio.ensure_future(self._engine.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                self._llm = opening.result()
                await self._serve(on_ready)
        finally:
            opening.cancel()
            stopping.cancel()
            await self._engine.close(self._config.stop_deadline_s)

    async def _serve(self, on_ready: Callable[[int], None]) -> None:
        namespace = self._llm.spec.namespace(self._config.tenant).hex()
        self._hand_overs = HandOvers(self._config.hand_over, namespace)
        self._prompts = Prompts(self._llm.tokenizer, self._llm.check_text_length)
        runner = web.AppRunner(
            self._application(),
            access_log=None,
            logger=http_logger,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=_KEEPALIVE_S,
            lingering_time=_LINGER_S,
            shutdown_timeout=_CLOSE_RESPONSES_S,
        )
        await runner.setup()
        assert runner.server is not None
        self._connections = Connections(runner.server, self._config.connections)
        self._figures = figures.Figures(lambda: self._engine.stats, lambda: len(self._connections), self._tracer)
        try:
            port = await self._connections.listen(self._config.host, self._config.port)
            on_ready(port)
            await self._stopping.wait()
            self._connections.close()
            self._engine.refuse(PeerUnavailable("the server is stopping", peer="engine"))
        finally:
            self._prompts.close()
            await runner.cleanup()
            await self._connections.abort()

    def _application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors])
        app.add_routes(
            [
                web.get("/v1/models", self._list_models),
                web.get("/v1/models/{model:.+}", self._show_model),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._chat),
                web.post("/kvstore/sessions/{session}/prefetch", self._prefetch_session),
                web.delete("/kvstore/sessions/{session}", self._end_session),
                web.get("/healthz", self._health),
                web.get("/metrics", self._metrics),
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
        resource = request.match_info.route.resource
        self._figures.responses.labels(resource.canonical if resource else "", str(response.status)).inc()
        return response

    # --- what the server is --------------------------------------------------------------------------------------------

    async def _list_models(self, _: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "kvstore",
            "max_model_len": self._llm.max_model_len,
            "sidecar": self._sidecar(),
        }

    def _sidecar(self) -> str | None:
        """Tells servers apart that share one from those that do not (kvstore bench serve); not known before the first request."""
        stats = self._engine.stats
        return stats.boot_id.hex() if stats and stats.boot_id else None

    def _check_model(self, name: str) -> None:
        if name != self._config.model_name:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"model: {name[:100]!r} is not served here; use {self._config.model_name!r}",
                param="model",
                code="model_not_found",
            )

    async def _health(self, _: web.Request) -> web.Response:
        """200 while the engine's thread answers."""
        await self._engine.call(lambda _: None)
        return web.Response(text="ok\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._figures.render(), headers={"Content-Type": figures.CONTENT_TYPE})

    # --- sessions ------------------------------------------------------------------------------------------------------

    async def _prefetch_session(self, request: web.Request) -> web.Response:
        """The session's next request comes soon: what its last one left in the store is brought nearer."""
        return await self._hint(request, LLM.expect_session)

    async def _end_session(self, request: web.Request) -> web.Response:
        """Its last request has been: its blocks may go before others."""
        return await self._hint(request, LLM.end_session)

    async def _hint(self, request: web.Request, hint: Callable[..., int]) -> web.Response:
        """The session is that of requests with the same x-kvstore-salt. Raises ConfigError for one that no request could have
        had."""
        names = CacheOptions(session_id=request.match_info["session"], salt=request.headers.get("x-kvstore-salt", ""))
        num_blocks = await self._engine.call(lambda llm: hint(llm, names.session_id, salt=names.salt))
        return json_response({"session_id": names.session_id, "blocks": num_blocks})

    # --- generation ----------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion(await self._bodies.read(request))
        return await self._generate(request, asked, CompletionForm)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = parse_chat(await self._bodies.read(request))
        return await self._generate(request, asked, ChatForm)

    async def _generate(
        self,
        request: web.Request,
        asked: CompletionRequest | ChatRequest,
        make_form: type[CompletionForm] | type[ChatForm],
    ) -> web.StreamResponse:
        arrived_s = time.monotonic()
        self._check_model(asked.model)
        params, options = params_of(asked), options_of(asked, request.headers)
        if asked.stream_options is not None and not asked.stream:
            raise Refusal(HTTPStatus.BAD_REQUEST, "stream_options: needs stream: true", param="stream_options")
        with_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        prompts = await self._prompts.encode(asked)
        part = self._hand_overs.part_in(asked, params, prompts, self._llm.max_model_len)
        form = make_form(
            self._config.model_name, f"fp_{self._llm.spec.weights[:16]}", self._llm.tokenizer, with_usage=with_usage
        )
        name = uuid.uuid4().hex
        requests = [
            EngineRequest(
                request_id=f"{name}-{i}",
                token_ids=token_ids,
                params=part.params,
                options=options,
                first_token_ids=part.first_token_ids,
            )
            for i, token_ids in enumerate(prompts)
        ]
        numbers = choice_numbers([each.request_id for each in requests], params.n)
        async with self._engine.generate(requests) as generation:
            tokens = _Tokens(generation, numbers, self._figures, arrived_s, self._config.request_deadline_s)
            if asked.stream:
                return await self._stream(request, form, tokens, with_usage=with_usage)
            choices: list[list[TokenDelta]] = [[] for _ in numbers]
            while batch := await tokens.next():
                for number, delta in batch:
                    choices[number].append(delta)
            answer = form.whole(choices, usage_of(generation.outputs))
            if part.prefills:
                await self._engine.wait_saved(requests, deadline_s=SAVE_DEADLINE_S)
                answer["kv_transfer_params"] = self._hand_overs.to_consumer(list(generation.outputs.values()))
            return json_response(answer)

    async def _stream(
        self, request: web.Request, form: AnswerForm, tokens: "_Tokens", *, with_usage: bool
    ) -> web.StreamResponse:
        """From here on an error is an event of the stream, and the stream ends without OpenAI's mark for a whole answer."""
        stream = EventStream(request, self._config.connections.max_unsent_bytes)
        await stream.start()
        try:
            for number in range(tokens.num_choices):
                if opening := form.opening(number):
                    await stream.send(opening)
            while batch := await tokens.next():
                for number, delta in batch:
                    if delta.text or delta.logprob is not None or delta.output is not None:
                        await stream.send(form.chunk(number, [delta]))
        except Refusal as err:
            await stream.send(err.to_json())
            return await stream.finish(done=False)
        if with_usage:
            await stream.send(form.usage_chunk(usage_of(tokens.generation.outputs)))
        return await stream.finish()


class _Tokens:
    """A request's tokens with the number of their choice, timed and counted as they pass."""

    def __init__(
        self,
        generation: Generation,
        numbers: dict[tuple[str, int], int],
        counts: figures.Figures,
        arrived_s: float,
        deadline_s: float,
    ) -> None:
        self.generation = generation
        self.num_choices = len(numbers)
        self._numbers = numbers
        self._figures = counts
        self._arrived_s = arrived_s
        self._deadline_s = deadline_s
        self._last_s: dict[int, float] = {}

    async def next(self) -> list[tuple[int, TokenDelta]]:
        """Those since the last call; none after the last. Raises Refusal."""
        deltas = await self._wait()
        now_s = time.monotonic()
        if not deltas:
            self._figures.count(self.generation.outputs)
            self._figures.e2e_s.observe(now_s - self._arrived_s)
            return []
        for delta in deltas:
            if delta.output is not None and delta.output.error is not None:
                raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, delta.output.error, code="load_failed")
        tokens = [(self._numbers[delta.request_id, delta.index], delta) for delta in deltas]
        for number, _ in tokens:
            self._time(number, now_s)
        return tokens

    async def _wait(self) -> list[TokenDelta]:
        left_s = self._arrived_s + self._deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(max(left_s, 0.0)):
                return await self.generation.next()
        except TimeoutError:
            raise Refusal(
                HTTPStatus.GATEWAY_TIMEOUT, f"not answered within {self._deadline_s:g} s", code="deadline"
            ) from None
        except KVStoreError as err:
            raise refusal_of(err) from err

    def _time(self, number: int, now_s: float) -> None:
        if number in self._last_s:
            self._figures.itl_s.observe(now_s - self._last_s[number])
        else:
            self._figures.ttft_s.observe(now_s - self._arrived_s)
        self._last_s[number] = now_s
