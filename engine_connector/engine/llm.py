"""The engine as a library: load a model, generate, stream, or drive it step by step.

llm = LLM("model.gguf")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(output.text)
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import torch

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.layout import BlockLayout
from kvstore.core.traces import Tracer
from kvstore.engine_connector.engine import checks
from kvstore.engine_connector.engine.admission import Admission
from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.device import allocate
from kvstore.engine_connector.engine.loader import LoadedModel, load_model
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.no_store import no_store
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.outputs import EngineStats, RequestOutput, TokenDelta, output_of
from kvstore.engine_connector.engine.request_spans import RequestSpans
from kvstore.engine_connector.engine.runner import Runner
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.scheduler import Scheduler, SchedulerConfig
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.engine.sequence import Sequence as EngineSequence
from kvstore.engine_connector.fingerprint import weights_fingerprint
from kvstore.engine_connector.protocol import (
    BothEnds,
    BothEndsScheduler,
    BothEndsWorker,
    Connector,
    LayerwiseScheduler,
    LayerwiseWorker,
    PoolListener,
    SessionHints,
)

Prompt = str | Sequence[int]
"""Text (control tokens in it are recognised), or token ids, as from `tokenizer.encode_chat`."""

IDLE_WAIT_S = 0.05
"""A step without work waits so long for loads and saves; news end the wait at once."""

DRAIN_DEADLINE_S = 10.0
"""generate and close wait at most so long for saves of finished requests to end."""


@dataclass(slots=True)
class _Live:
    """A request of which not all samples have ended. `inbox` collects its deltas for generate and stream."""

    request_id: str
    num_samples: int
    samples: dict[int, EngineSequence]  # by index; only the first one until the prompt is computed
    inbox: list[TokenDelta] | None
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return len(self.outputs) == self.num_samples


class LLM:
    """One model, its pages, at most one connector. One thread uses it; close it, or use it in a `with`.

    `connector_factory` gets the KVSpec and returns both sides of a connector; None runs without a store. Greedy output
    does not depend on the store, on the batch, nor on preemption, except where the two best logits lie within
    tie_epsilon (ARCHITECTURE.md, "the same tokens"). At most `max_waiting` requests of add_request and stream wait,
    besides those for which the batch has room; more are refused. `layerwise`: attend to loads while they arrive, and save
    while computing, layer by layer, if the connector can; on a CPU that is no faster (benchmarks/layerwise.py). `both_ends`:
    compute a prompt's first blocks while the connector loads its last ones, where it says that this pays. `device`:
    where weights and pages are, "cpu" or "cuda"; how far tokens of a GPU depend on the batch is not measured yet.
    `stored_format`: "same" numbers as the pages', or in half the bytes "fp8_e4m3" or "int8": then what comes from the store is
    no longer what was computed, and output depends on it (benchmarks/kv_quality.py says how much). Raises ConfigError for a
    model file or setting that cannot work.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        connector_factory: Callable[[KVSpec], Connector] | None = None,
        num_pages: int = 1024,
        block_tokens: int = 16,
        max_batch: int = 16,
        chunk_tokens: int = 512,
        max_waiting: int = 1024,
        max_model_len: int | None = None,
        num_threads: int | None = None,
        kv_dtype: str = "float16",
        stored_format: str = "same",
        prefix_caching: bool = True,
        hash_seed: str = "",
        layerwise: bool = False,
        both_ends: bool = True,
        device: str = "cpu",
        clock: Clock | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        checks.check_numbers(
            num_pages=num_pages,
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            max_waiting=max_waiting,
            num_threads=1 if num_threads is None else num_threads,
        )
        checks.check_chunks(chunk_tokens, block_tokens)
        checks.check_dtype(kv_dtype)
        checks.check_device(device, kv_dtype)
        checks.check_stored_format(stored_format)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded = load_model(model_path)
        checks.check_head_dim(device, loaded.config.head_dim)
        self._limit = checks.length_limit(loaded.config.context_length, num_pages, block_tokens, max_model_len)
        self.tokenizer = loaded.tokenizer
        hashing = HashScheme(seed=hash_seed, block_tokens=block_tokens)
        page_spec = _kv_spec(model_path, loaded, kv_dtype, hashing)
        self.spec = page_spec if stored_format == "same" else _quantised(page_spec, stored_format)
        self._clock = clock or MonotonicClock()
        pages = allocate(num_pages, BlockLayout.from_spec(page_spec), kv_dtype, torch.device(device))
        self._connector = connector_factory(self.spec) if connector_factory else no_store()
        side = self._connector.scheduler
        self._blocks = BlockManager(num_pages, side if prefix_caching and isinstance(side, PoolListener) else None)
        config = SchedulerConfig(
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            max_model_len=self._limit.tokens,
            prefix_caching=prefix_caching,
        )
        scheduler_by_layers, worker_by_layers = _layerwise(self._connector) if layerwise else (None, None)
        model = Transformer(loaded.config, loaded.weights.to(pages.device))
        self._runner = Runner(
            model, pages, self._connector.worker, layerwise=worker_by_layers, quantisation=self.spec.quantisation
        )
        self._scheduler = Scheduler(
            config,
            self._blocks,
            self._connector.scheduler,
            self.tokenizer.stop_ids,
            self._runner.copy_page,
            layerwise=scheduler_by_layers,
            both_ends=_both_ends(self._connector, chunk_tokens) if both_ends else None,
        )
        self._max_batch = max_batch
        self._admission = Admission(max_waiting)
        self._spans = None if tracer is None else RequestSpans(tracer)
        self._live: dict[str, _Live] = {}
        self._deltas: list[TokenDelta] = []  # of requests of add_request, for the next step()
        self._arrivals = itertools.count()
        self._boot_id = b""
        self._closed = False

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs come in order of the prompts, `n` for each. `params`: one for all, or one
        each. max_waiting does not count here: the caller holds the whole list anyway.

        Refuses (ConfigError) before it starts any when one prompt is empty, too long, or has unknown tokens. Returns once
        the connector has taken what was to be saved, or after DRAIN_DEADLINE_S.
        """
        each = checks.params_for(prompts, params)
        checked = [self._check(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        lives = [self._add(ids, p, options, None, inbox=[]) for ids, p in zip(checked, each, strict=True)]
        try:
            while not all(live.ended for live in lives):
                self._step()
        finally:
            self._abort_unfinished(lives)
        self.drain(DRAIN_DEADLINE_S)
        return [live.outputs[index] for live in lives for index in range(live.num_samples)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, options: RequestOptions | None = None
    ) -> Iterator[TokenDelta]:
        """Answer one prompt token by token, from the first `next` on, which raises QueueFull as add_request does. A consumer
        that stops early aborts the request."""
        params = params or SamplingParams()
        return self._stream(self._check(prompt, params), params, options)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        request_id: str | None = None,
        first_token_ids: Sequence[int] = (),
    ) -> str:
        """Queue a request for `step` and return its id. Raises ConfigError as generate does, or for an id that is in use,
        or not 1 to MAX_REQUEST_ID_BYTES of UTF-8; QueueFull when max_waiting requests wait already.

        `first_token_ids` begin the answer: another instance generated them and hands over the prompt (protocol.HandOver). They
        count as generated, and their text comes with the first token that is generated here.
        """
        params = params or SamplingParams()
        token_ids, first = self._check(prompt, params), checks.token_list("first_token_ids", first_token_ids)
        self._check_first(len(token_ids), first, params)
        self._admission.check(self._scheduler.num_queued, self._clock.now_s())
        return self._add(token_ids, params, options, request_id, inbox=None, first_token_ids=first).request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, all samples of it, and return what it has: the output of the first sample that had not ended.
        None when all have. Its tokens that `step` has not handed out yet are dropped."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        for sequence in live.samples.values():
            if sequence.finish_reason is None:
                indices = [sequence.index] if sequence.num_samples == 1 else range(live.num_samples)
                self._scheduler.abort(sequence)
                live.outputs |= {index: output_of(sequence, index) for index in indices}
                self._end_spans(live, sequence)
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        return next(output for _, output in sorted(live.outputs.items()) if output.finish_reason is FinishReason.ABORT)

    def step(self) -> list[TokenDelta]:
        """Run one step: at most one token for each sample of add_request's requests. Waits up to IDLE_WAIT_S when none can run.

        Tokens that came while generate or stream ran are handed out first, all at once and without a step.
        Call it while `has_unfinished`, and on while `is_draining` so that the connector can finish its saves.
        """
        if not self._deltas:
            self._step()
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def max_model_len(self) -> int:
        """The most tokens that a prompt may have; the context, the pages and the setting of this name are what bounds it."""
        return self._limit.tokens

    @property
    def max_queued_at_once(self) -> int:
        """The most requests of add_request that it takes without a step in between: as many as run, and as many as wait."""
        return self._max_batch + self._admission.max_waiting

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or `step` has yet to hand out its tokens."""
        return self._scheduler.has_unfinished or bool(self._deltas)

    @property
    def is_draining(self) -> bool:
        """Whether the connector still saves or loads pages of requests that have ended."""
        return self._scheduler.is_draining

    def in_use(self, request_id: str) -> bool:
        """Whether the request has not ended, or pages of it are still being saved: others may not find them all yet."""
        return request_id in self._live or self._scheduler.in_use([request_id])

    def drain(self, deadline_s: float) -> bool:
        """Step until the connector is done with the pages of finished requests; False when the deadline came first."""
        end_s = time.monotonic() + deadline_s
        while self.is_draining and not self._scheduler.has_unfinished and time.monotonic() < end_s:
            self._step()
        return not self.is_draining

    def check_text_length(self, num_tokens: int) -> None:
        """Refuse (ConfigError) a text that has at least so many tokens, if that is too long a prompt. Any thread."""
        checks.check_least_tokens(num_tokens, self._limit)

    def reset_prefix_cache(self) -> None:
        """Forget what the engine's own pages hold; the store keeps what it has."""
        self._blocks.forget_all()

    def expect_session(self, session_id: str, *, salt: str = "") -> int:
        """A request of this session comes soon (protocol.SessionHints): blocks of it that the store has; 0 without a store."""
        hints = self._connector.scheduler
        return hints.expect_session(session_id, salt=salt) if isinstance(hints, SessionHints) else 0

    def end_session(self, session_id: str, *, salt: str = "") -> int:
        """No request of this session comes any more; likewise."""
        hints = self._connector.scheduler
        return hints.end_session(session_id, salt=salt) if isinstance(hints, SessionHints) else 0

    def stats(self) -> EngineStats:
        """Figures for metrics and admission; cheap enough for each scrape."""
        scheduler = self._scheduler
        return EngineStats(
            num_waiting=scheduler.num_waiting,
            num_loading=scheduler.num_loading,
            num_running=scheduler.num_running,
            num_draining=scheduler.num_draining,
            max_waiting=self._admission.max_waiting,
            num_pages=self._blocks.num_pages,
            num_free_pages=self._blocks.num_free,
            num_refused=self._admission.num_refused,
            num_finished={reason: scheduler.num_finished[reason] for reason in FinishReason},
            total=scheduler.total,
            boot_id=self._boot_id,
        )

    def check(self) -> None:
        """Assert that no page is lost or held twice without a count (tests call it after each step)."""
        self._scheduler.check()

    def close(self) -> None:
        """Abort what runs, wait for saves at most DRAIN_DEADLINE_S, close the connector. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._abort_unfinished(list(self._live.values()))
        self.drain(DRAIN_DEADLINE_S)
        self._connector.worker.close()
        self._connector.scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self) -> None:
        """One step; deltas of generate and stream go to their inboxes, the others wait for `step`."""
        num_admitted = self._scheduler.num_admitted
        step = self._scheduler.schedule()
        self._boot_id = step.meta.boot_id
        if self._spans is not None:
            self._spans.scheduled(step, self._clock.now_s())
        waits = (self._scheduler.has_unfinished or self.is_draining) and not self._scheduler.fills_next
        try:
            result = self._runner.execute(step, idle_wait_s=IDLE_WAIT_S if waits else 0.0)
        except BaseException:  # Ctrl-C, or no memory: the worker will never speak of jobs that it has not got
            self._scheduler.take_output(self._runner.report_not_taken(step.meta))
            self._hand_out_failed()
            raise
        for sequence in self._scheduler.update(step, result.sampled, result.output, result.void):
            self._hand_out(sequence)
        self._hand_out_failed()
        num_departed = self._scheduler.num_admitted - num_admitted
        self._admission.observe(self._scheduler.num_queued, num_departed, self._clock.now_s())

    def _hand_out(self, sequence: EngineSequence) -> None:
        """The token that a sequence has got."""
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock.now_s()
            if self._spans is not None:
                self._spans.first_token(sequence, sequence.first_token_s)
        self._put(
            TokenDelta(
                request_id=sequence.group_id,
                index=sequence.index,
                token_id=sequence.token_ids[-1],
                text=sequence.text.take(),
                logprob=sequence.logprobs[-1],
                output=output_of(sequence, sequence.index) if sequence.finish_reason is not None else None,
            ),
            sequence,
        )

    def _hand_out_failed(self) -> None:
        for sequence in self._scheduler.take_failed():
            text = sequence.text.take()
            for index in range(sequence.index, sequence.index + sequence.num_samples):
                output = output_of(sequence, index)
                delta = TokenDelta(request_id=sequence.group_id, index=index, token_id=None, text=text, output=output)
                self._put(delta, sequence)

    def _put(self, delta: TokenDelta, sequence: EngineSequence) -> None:
        live = self._live[delta.request_id]
        live.samples[sequence.index] = sequence
        (self._deltas if live.inbox is None else live.inbox).append(delta)
        if delta.output is not None:
            live.outputs[delta.index] = delta.output
            self._end_spans(live, sequence)
            if live.ended:
                del self._live[live.request_id]

    def _end_spans(self, live: _Live, sequence: EngineSequence) -> None:
        """One of its sequences has ended."""
        if self._spans is not None:
            now_s = self._clock.now_s()
            self._spans.sample_ended(sequence, now_s)
            if live.ended:
                self._spans.ended(live.request_id, live.samples.values(), now_s)

    def _stream(
        self, token_ids: list[int], params: SamplingParams, options: RequestOptions | None
    ) -> Iterator[TokenDelta]:
        inbox: list[TokenDelta] = []
        self._admission.check(self._scheduler.num_queued, self._clock.now_s())
        live = self._add(token_ids, params, options, None, inbox=inbox)
        try:
            while not live.ended or inbox:
                if inbox:
                    yield inbox.pop(0)
                else:
                    self._step()
        finally:
            self._abort_unfinished([live])
        self.drain(DRAIN_DEADLINE_S)

    def _add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions | None,
        request_id: str | None,
        *,
        inbox: list[TokenDelta] | None,
        first_token_ids: Sequence[int] = (),
    ) -> _Live:
        if self._closed:
            raise ConfigError("llm: closed; make another", field="llm", value="closed")
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        checks.check_request_id(request_id)
        sequence = EngineSequence(
            request_id=request_id,
            token_ids=[*token_ids, *first_token_ids],
            num_prompt_tokens=len(token_ids),
            params=params,
            arrival=arrival,
            arrival_s=self._clock.now_s(),
            hash_scheme=self.spec.hash,
            new_text=lambda: OutputText(self.tokenizer.stream_decoder(), params.stop),
            options=options or RequestOptions(),
        )
        checks.check_not_stopped(sequence.text, len(first_token_ids))
        if self._scheduler.in_use(sequence.sample_ids):
            raise ConfigError(
                f"request_id: {request_id!r} is in use; choose another", field="request_id", value=request_id
            )
        if self._spans is not None:
            self._spans.begin(sequence, sequence.options.traceparent)
        self._scheduler.add(sequence)
        self._live[request_id] = _Live(request_id, params.n, {0: sequence}, inbox)
        return self._live[request_id]

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, check_length=self.check_text_length)
        else:
            token_ids = checks.token_list("prompt", prompt)
        checks.check_prompt(token_ids, self._limit, self.tokenizer.vocab_size)
        checks.check_samples(params.n, self._max_batch)
        return token_ids

    def _check_first(self, num_prompt_tokens: int, first_token_ids: Sequence[int], params: SamplingParams) -> None:
        if first_token_ids:
            ends = frozenset() if params.ignore_eos else self.tokenizer.stop_ids
            checks.check_first_tokens(first_token_ids, self.tokenizer.vocab_size, ends, params.n, params.max_tokens)
            checks.check_prompt_length(num_prompt_tokens + len(first_token_ids), self._limit)

    def _abort_unfinished(self, lives: Sequence[_Live]) -> None:
        for live in lives:
            if not live.ended:
                self.abort(live.request_id)


def _layerwise(connector: Connector) -> tuple[LayerwiseScheduler, LayerwiseWorker] | tuple[None, None]:
    """What both sides must have, or neither is asked."""
    scheduler, worker = connector
    if isinstance(scheduler, LayerwiseScheduler) and isinstance(worker, LayerwiseWorker):
        return scheduler, worker
    return None, None


def _both_ends(connector: Connector, chunk_tokens: int) -> BothEnds | None:
    """Likewise."""
    scheduler, worker = connector
    if isinstance(scheduler, BothEndsScheduler) and isinstance(worker, BothEndsWorker):
        scheduler.use_both_ends(chunk_tokens)
        return BothEnds(scheduler, worker)
    return None


def _kv_spec(model_path: str | os.PathLike[str], loaded: LoadedModel, kv_dtype: str, hashing: HashScheme) -> KVSpec:
    config = loaded.config
    return KVSpec(
        weights=weights_fingerprint(model_path),
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
        rope=config.describe_positions(),
        block_tokens=hashing.block_tokens,
        hash=hashing,
    )


def _quantised(page_spec: KVSpec, quantisation: str) -> KVSpec:
    return replace(page_spec, stored_format=f"{page_spec.page_format}:{quantisation}")
