"""The engine on a thread of its own: commands in through one queue, each request's tokens out to whoever waits for them.

    event loop                                              engine's thread
    call(f) ------------- commands ----------------------->  f(llm), in order, between two steps
    result of f  <------- call_soon_threadsafe ------------
    generation.next() <-- call_soon_threadsafe, one a step  llm.step() while there is work

Only the event loop touches generations; only the engine's thread touches the LLM.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvstore.core.errors import ConfigError, KVStoreError, PeerUnavailable
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.outputs import EngineStats, RequestOutput, TokenDelta
from kvstore.engine_connector.engine.sampler import SamplingParams

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 60.0
"""A command that the engine has not come to by then fails; a step is one chunk of prefill, on a slow machine seconds."""

_IDLE_S = 1.0
"""An engine without work looks at its figures so often."""

T = TypeVar("T")
_Command = Callable[[LLM], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What LLM.add_request takes."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    first_token_ids: tuple[int, ...] = ()


class Generation:
    """The tokens of one HTTP request, which may be several of the engine's (one for each prompt)."""

    def __init__(self, requests: Sequence[EngineRequest]) -> None:
        self.outputs: dict[tuple[str, int], RequestOutput] = {}  # by request id and sample
        self._num_samples = sum(request.params.n for request in requests)
        self._deltas: list[TokenDelta] = []  # bounded by what the requests may generate
        self._news = asyncio.Event()
        self._error: KVStoreError | None = None

    @property
    def finished(self) -> bool:
        """Whether the last token of every sample has been taken."""
        return len(self.outputs) == self._num_samples

    async def next(self) -> list[TokenDelta]:
        """Tokens since the last call, waiting for the first; none once every sample has ended. Raises the KVStoreError that
        ended the engine, after the tokens that came before it."""
        if self.finished:
            return []
        await self._news.wait()
        deltas, self._deltas = self._deltas, []
        if not deltas:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        self.outputs |= {(d.request_id, d.index): d.output for d in deltas if d.output is not None}
        return deltas

    def put(self, delta: TokenDelta) -> None:
        """One more token."""
        self._deltas.append(delta)
        self._news.set()

    def fail(self, err: KVStoreError) -> None:
        """Nothing more will come."""
        self._error = err
        self._news.set()


@dataclass
class EngineThread:
    """Owns the LLM that `make` opens. `on_death` is called in the event loop when the engine breaks, which nothing that a
    client sends should be able to do."""

    make: Callable[[], LLM]
    on_death: Callable[[], None]
    _commands: "queue.SimpleQueue[_Command | None]" = field(default_factory=queue.SimpleQueue)
    _generations: dict[str, Generation] = field(default_factory=dict)
    _pending: set["asyncio.Future[Any]"] = field(default_factory=set)
    _end: KVStoreError | None = None
    _broken: BaseException | None = None
    stats: EngineStats | None = None

    async def start(self) -> LLM:
        """Open the LLM and begin to serve. Raises what opening it raised. Of the result only what never changes (tokenizer,
        spec, limits) may be used. Call `close` in any case, also when this was cancelled."""
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[LLM] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="engine", daemon=True).start()
        return await self._opened

    async def call(self, function: Callable[[LLM], T], *, deadline_s: float = CALL_DEADLINE_S) -> T:
        """Run `function` on the engine's thread. Raises what it raises, and PeerUnavailable for an engine that is gone or
        does not come to it in time; then it may run later."""
        if self._end is not None:
            raise self._end
        future: asyncio.Future[T] = self._loop.create_future()
        self._pending.add(future)
        self._commands.put(lambda llm: self._answer(llm, function, future))
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise PeerUnavailable(
                f"engine: no answer within {deadline_s:g} s", peer="engine", deadline_s=deadline_s
            ) from None
        finally:
            self._pending.discard(future)

    @contextlib.asynccontextmanager
    async def generate(self, requests: Sequence[EngineRequest]) -> AsyncIterator[Generation]:
        """Queue the requests, all or none; whatever has not finished when the block is left is aborted. Raises what
        LLM.add_request raises."""
        generation = Generation(requests)
        self._generations |= {request.request_id: generation for request in requests}
        try:
            await self.call(lambda llm: _add_all(llm, requests))
            yield generation
        finally:
            for request in requests:
                del self._generations[request.request_id]
            if not generation.finished:  # also when the answer of the call was not waited for: commands run in order
                self._commands.put(lambda llm: _abort_all(llm, requests))

    async def wait_saved(self, requests: Sequence[EngineRequest], *, deadline_s: float) -> bool:
        """Whether what these requests, which have ended, left behind is where others find it. Asked once a step."""
        until_s = self._loop.time() + deadline_s
        while await self.call(lambda llm: any(llm.in_use(request.request_id) for request in requests)):
            if self._loop.time() >= until_s:
                return False
        return True

    def refuse(self, err: KVStoreError) -> None:
        """From now on every request, those under way among them, ends in `err`."""
        self._end = err
        for generation in set(self._generations.values()):
            generation.fail(err)
        for future in self._pending:
            if not future.done():
                future.set_exception(err)

    async def close(self, deadline_s: float) -> None:
        """End what runs, close the LLM, check that it lost no page. Raises what broke it, and PeerUnavailable when it is not
        done by the deadline."""
        self.refuse(PeerUnavailable("engine: the server is stopping", peer="engine"))
        self._commands.put(None)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._ended)
        except TimeoutError:
            raise PeerUnavailable(
                f"engine: not closed within {deadline_s:g} s", peer="engine", deadline_s=deadline_s
            ) from None
        if self._broken is not None:
            raise self._broken

    # --- on the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            llm = self.make()
        except BaseException as err:  # noqa: BLE001 - handed to start(), whole
            self._post(_set_exception, self._opened, err)
            self._post(self._ended.set_result, None)
            return
        self.stats = llm.stats()
        self._post(_set_result, self._opened, llm)
        try:
            with llm:
                self._serve(llm)
            llm.check()
        except BaseException as err:  # outermost frame of the thread: told to all, raised by close()
            logger.exception("engine broke")
            self._post(self._die, err)
        self._post(self._ended.set_result, None)

    def _serve(self, llm: LLM) -> None:
        """Until it is time to end. Commands first: an abort saves a step."""
        while self._run_commands(llm, wait_s=0.0 if llm.has_unfinished or llm.is_draining else _IDLE_S):
            deltas = llm.step() if llm.has_unfinished or llm.is_draining else []
            self.stats = llm.stats()
            if deltas:
                self._post(self._deliver, deltas)

    def _run_commands(self, llm: LLM, *, wait_s: float) -> bool:
        """All that are there; the first may take `wait_s` to come. False: it is time to end."""
        while True:
            try:
                command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command(llm)
            wait_s = 0.0

    def _answer(self, llm: LLM, function: Callable[[LLM], T], future: "asyncio.Future[T]") -> None:
        try:
            result = function(llm)
        except KVStoreError as err:
            self._post(_set_exception, future, err)
        else:
            self._post(_set_result, future, result)

    def _post(self, function: Callable[..., object], *args: object) -> None:
        """Run in the event loop; nobody is left to hear of it when that has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *args)

    # --- in the event loop ---------------------------------------------------------------------------------------------

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if generation := self._generations.get(delta.request_id):
                generation.put(delta)

    def _die(self, err: BaseException) -> None:
        self._broken = err
        self.refuse(PeerUnavailable(f"engine: broke ({type(err).__name__})", peer="engine"))
        self.on_death()


def _add_all(llm: LLM, requests: Sequence[EngineRequest]) -> None:
    if len(requests) > llm.max_queued_at_once:  # QueueFull would say that there will be room
        raise ConfigError(
            f"prompt: {len(requests)} prompts at once; use at most {llm.max_queued_at_once} (max_batch and max_waiting)",
            field="prompt",
            value=len(requests),
        )
    for number, request in enumerate(requests):
        try:
            llm.add_request(
                request.token_ids,
                request.params,
                options=request.options,
                request_id=request.request_id,
                first_token_ids=request.first_token_ids,
            )
        except KVStoreError:
            _abort_all(llm, requests[:number])
            raise


def _abort_all(llm: LLM, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        llm.abort(request.request_id)


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[T]", err: BaseException) -> None:
    if not future.done():
        future.set_exception(err)
