"""The engine as a library: load a model, generate, stream, or drive it step by step.

llm = LLM("model.gguf")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(output.text)
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.layout import BlockLayout
from kvstore.engine_connector.engine.block_manager import BlockManager
from kvstore.engine_connector.engine.loader import LoadedModel, load_model
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.no_store import no_store
from kvstore.engine_connector.engine.runner import Runner
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.scheduler import Scheduler, SchedulerConfig
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.engine.sequence import Sequence as EngineSequence
from kvstore.engine_connector.engine.tokenizer import StreamDecoder
from kvstore.engine_connector.fingerprint import weights_fingerprint
from kvstore.engine_connector.protocol import Connector
from kvstore.kernels.paged import TORCH_DTYPES, allocate_pages

Prompt = str | Sequence[int]
"""Text (control tokens in it are recognised), or token ids, as from `tokenizer.encode_chat`."""

IDLE_WAIT_S = 0.05
"""A step without work waits so long for loads and saves; news end the wait at once."""

DRAIN_DEADLINE_S = 10.0
"""generate and close wait at most so long for saves of finished requests to end."""

MAX_REQUEST_ID_BYTES = 200
"""The wire takes 256 (core/limits.py); a connector may append to an id which blocks it speaks of."""

_HIGHEST = {"num_pages": 1 << 31, "block_tokens": 4096, "max_batch": 4096, "chunk_tokens": 1 << 20, "num_threads": 1024}
"""Far beyond what runs well: these catch a wrong unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request. Without preemption num_prompt_tokens = prefilled + local_cached + fetched."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    ttft_s: float | None  # request in to first token out; None when it ended before
    num_prompt_tokens: int
    num_prefilled_tokens: int  # computed here, also again after a preemption
    num_local_cached_tokens: int  # found in the engine's own pages
    num_fetched_tokens: int  # loaded from the store; what failed to load is not counted
    num_preemptions: int
    logit_gaps: tuple[float, ...]  # per generated token: best minus second-best logit


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token. `text` holds the characters that it completes; `output` is there on the last one."""

    request_id: str
    token_id: int
    text: str
    output: RequestOutput | None


@dataclass(slots=True)
class _Live:
    """An unfinished request with its text so far; `inbox` collects its deltas for generate and stream."""

    sequence: EngineSequence
    decoder: StreamDecoder
    text: str = ""
    inbox: list[TokenDelta] | None = None


class LLM:
    """One model, its pages, at most one connector. One thread uses it; close it, or use it in a `with`.

    `connector_factory` gets the KVSpec and returns both sides of a connector; None runs without a store. Greedy output
    does not depend on the store, on the batch, nor on preemption, except where the two best logits lie within
    tie_epsilon (ARCHITECTURE.md, "the same tokens"). Raises ConfigError for a model file or setting that cannot work.
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
        max_model_len: int | None = None,
        num_threads: int | None = None,
        kv_dtype: str = "float16",
        prefix_caching: bool = True,
        hash_seed: str = "",
        clock: Clock | None = None,
    ) -> None:
        _check_numbers(
            num_pages=num_pages,
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            num_threads=1 if num_threads is None else num_threads,
        )
        _check_chunks(chunk_tokens, block_tokens)
        _check_dtype(kv_dtype)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        loaded = load_model(model_path)
        self._limit = _length_limit(loaded, num_pages, block_tokens, max_model_len)
        self.tokenizer = loaded.tokenizer
        hashing = HashScheme(seed=hash_seed, block_tokens=block_tokens)
        self.spec = _kv_spec(model_path, loaded, kv_dtype, hashing)
        self._clock = clock or MonotonicClock()
        pages = allocate_pages(num_pages, BlockLayout.from_spec(self.spec), kv_dtype)
        self._blocks = BlockManager(num_pages)
        self._connector = connector_factory(self.spec) if connector_factory else no_store()
        config = SchedulerConfig(
            block_tokens=block_tokens,
            max_batch=max_batch,
            chunk_tokens=chunk_tokens,
            max_model_len=self._limit.tokens,
            prefix_caching=prefix_caching,
        )
        self._scheduler = Scheduler(config, self._blocks, self._connector.scheduler, self.tokenizer.stop_ids)
        self._runner = Runner(Transformer(loaded.config, loaded.weights), pages, self._connector.worker)
        self._live: dict[str, _Live] = {}
        self._deltas: list[TokenDelta] = []  # of requests of add_request, for the next step()
        self._arrivals = itertools.count()
        self._closed = False

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer all prompts, batched; outputs come in order of the prompts. `params`: one for all, or one each.

        Refuses (ConfigError) before it starts any when one prompt is empty, too long, or has unknown tokens. Returns once
        the connector has taken what was to be saved, or after DRAIN_DEADLINE_S.
        """
        each = _params_for(prompts, params)
        checked = [self._check_prompt(prompt) for prompt in prompts]
        lives = [self._add(ids, p, None, inbox=[]) for ids, p in zip(checked, each, strict=True)]
        try:
            while any(live.sequence.finish_reason is None for live in lives):
                self._step()
        finally:
            self._abort_unfinished(lives)
        self.drain(DRAIN_DEADLINE_S)
        return [self._output(live) for live in lives]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenDelta]:
        """Answer one prompt token by token, from the first `next` on. A consumer that stops early aborts the request."""
        return self._stream(self._check_prompt(prompt), params or SamplingParams())

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> str:
        """Queue a request for `step` and return its id. Raises ConfigError as generate does, or for an id that is in use,
        or not 1 to MAX_REQUEST_ID_BYTES of UTF-8."""
        live = self._add(self._check_prompt(prompt), params or SamplingParams(), request_id, inbox=None)
        return live.sequence.request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and return what it has; None when it has ended already."""
        live = self._live.pop(request_id, None)
        if live is None:
            return None
        self._scheduler.abort(live.sequence)
        self._deltas = [delta for delta in self._deltas if delta.request_id != request_id]
        return self._output(live)

    def step(self) -> list[TokenDelta]:
        """Run one step: at most one token for each request of add_request. Waits up to IDLE_WAIT_S when none can run.

        Tokens that came while generate or stream ran are handed out first, all at once and without a step.
        Call it while `has_unfinished`, and on while `is_draining` so that the connector can finish its saves.
        """
        if not self._deltas:
            self._step()
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def has_unfinished(self) -> bool:
        """Whether a request has not ended, or `step` has yet to hand out its tokens."""
        return self._scheduler.has_unfinished or bool(self._deltas)

    @property
    def is_draining(self) -> bool:
        """Whether the connector still saves or loads pages of requests that have ended."""
        return self._scheduler.is_draining

    def drain(self, deadline_s: float) -> bool:
        """Step until the connector is done with the pages of finished requests; False when the deadline came first."""
        end_s = time.monotonic() + deadline_s
        while self.is_draining and not self._scheduler.has_unfinished and time.monotonic() < end_s:
            self._step()
        return not self.is_draining

    def reset_prefix_cache(self) -> None:
        """Forget what the engine's own pages hold; the store keeps what it has."""
        self._blocks.forget_all()

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
        step = self._scheduler.schedule()
        waits = self._scheduler.has_unfinished or self.is_draining
        try:
            result = self._runner.execute(step, idle_wait_s=IDLE_WAIT_S if waits else 0.0)
        except BaseException:  # Ctrl-C, or no memory: the worker will never speak of jobs that it has not got
            self._scheduler.take_output(self._runner.report_not_taken(step.meta))
            raise
        for sequence in self._scheduler.update(step, result.sampled, result.output):
            live = self._live[sequence.request_id]
            (self._deltas if live.inbox is None else live.inbox).append(self._delta(live))

    def _delta(self, live: _Live) -> TokenDelta:
        sequence = live.sequence
        if sequence.first_token_s is None:
            sequence.first_token_s = self._clock.now_s()
        text = live.decoder.push(sequence.token_ids[-1])
        if sequence.finish_reason is not None:
            text += live.decoder.finish()
            del self._live[sequence.request_id]
        live.text += text
        output = self._output(live) if sequence.finish_reason is not None else None
        return TokenDelta(sequence.request_id, sequence.token_ids[-1], text, output)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[TokenDelta]:
        inbox: list[TokenDelta] = []
        live = self._add(token_ids, params, None, inbox=inbox)
        try:
            while live.sequence.finish_reason is None or inbox:
                if inbox:
                    yield inbox.pop(0)
                else:
                    self._step()
        finally:
            self._abort_unfinished([live])
        self.drain(DRAIN_DEADLINE_S)

    def _add(
        self, token_ids: list[int], params: SamplingParams, request_id: str | None, *, inbox: list[TokenDelta] | None
    ) -> _Live:
        if self._closed:
            raise ConfigError("llm: closed; make another", field="llm", value="closed")
        arrival = next(self._arrivals)
        request_id = f"request-{arrival}" if request_id is None else request_id
        _check_request_id(request_id)
        if self._scheduler.in_use(request_id):
            raise ConfigError(
                f"request_id: {request_id!r} is in use; choose another", field="request_id", value=request_id
            )
        sequence = EngineSequence(
            request_id, token_ids, params, arrival, self._clock.now_s(), hash_scheme=self.spec.hash
        )
        self._scheduler.add(sequence)
        live = _Live(sequence, self.tokenizer.stream_decoder(), inbox=inbox)
        self._live[request_id] = live
        return live

    def _check_prompt(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise ConfigError("prompt: empty; give at least one token", field="prompt", value=0)
        if len(ids) > self._limit.tokens:
            raise ConfigError(
                f"prompt: {len(ids)} tokens are more than {self._limit.reason}", field="prompt", value=len(ids)
            )
        vocab = self.tokenizer.vocab_size
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise ConfigError(
                f"prompt: token id {bad[0]} is out of range; use 0 to {vocab - 1}", field="prompt", value=bad[0]
            )
        return ids

    def _abort_unfinished(self, lives: Sequence[_Live]) -> None:
        for live in lives:
            if live.sequence.finish_reason is None:
                self.abort(live.sequence.request_id)

    def _output(self, live: _Live) -> RequestOutput:
        sequence, counts = live.sequence, live.sequence.counts
        assert sequence.finish_reason is not None
        first_s = sequence.first_token_s
        return RequestOutput(
            request_id=sequence.request_id,
            text=live.text,
            token_ids=tuple(sequence.output_ids),
            finish_reason=sequence.finish_reason,
            ttft_s=None if first_s is None else first_s - sequence.arrival_s,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_prefilled_tokens=counts.prefilled,
            num_local_cached_tokens=counts.local_cached,
            num_fetched_tokens=counts.fetched,
            num_preemptions=counts.preemptions,
            logit_gaps=tuple(sequence.logit_gaps),
        )


@dataclass(frozen=True, slots=True)
class _LengthLimit:
    """The most tokens that a request may have before it gets its last one, and what sets that."""

    tokens: int
    reason: str


def _length_limit(loaded: LoadedModel, num_pages: int, block_tokens: int, wanted: int | None) -> _LengthLimit:
    context = loaded.config.context_length
    if wanted is not None and not 1 <= wanted <= context:
        raise ConfigError(
            f"max_model_len: {wanted} is out of range; use 1 to the model's context of {context}",
            field="max_model_len",
            value=wanted,
        )
    limits = [
        _LengthLimit(context, f"the model's context of {context}"),
        _LengthLimit(num_pages * block_tokens, f"the {num_pages * block_tokens} that all {num_pages} pages hold"),
    ]
    if wanted is not None:
        limits.append(_LengthLimit(wanted, f"max_model_len {wanted}"))
    return min(limits, key=lambda limit: limit.tokens)


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


def _check_numbers(**settings: int) -> None:
    for name, value in settings.items():
        if not 1 <= value <= _HIGHEST[name]:
            raise ConfigError(f"{name}: {value} is out of range; use 1 to {_HIGHEST[name]}", field=name, value=value)


def _check_request_id(request_id: str) -> None:
    try:
        nbytes = len(request_id.encode())
    except UnicodeEncodeError:
        wrong = "is no UTF-8"
    else:
        if 1 <= nbytes <= MAX_REQUEST_ID_BYTES:
            return
        wrong = f"has {nbytes} bytes"
    shown = ascii(request_id[:40])
    raise ConfigError(
        f"request_id: {shown} {wrong}; use 1 to {MAX_REQUEST_ID_BYTES} bytes of UTF-8", field="request_id", value=shown
    )


def _check_chunks(chunk_tokens: int, block_tokens: int) -> None:
    if chunk_tokens % block_tokens:
        raise ConfigError(
            f"chunk_tokens: {chunk_tokens} is not a multiple of block_tokens {block_tokens}",
            field="chunk_tokens",
            value=chunk_tokens,
        )


def _check_dtype(kv_dtype: str) -> None:
    if kv_dtype not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise ConfigError(f"kv_dtype: {kv_dtype!r} is not known; use one of {known}", field="kv_dtype", value=kv_dtype)


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if isinstance(prompts, str):
        raise ConfigError("prompts: a single text; give a list of prompts", field="prompts", value=prompts[:40])
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    if len(params) != len(prompts):
        raise ConfigError(
            f"params: {len(params)} for {len(prompts)} prompts; give one for all or one each",
            field="params",
            value=len(params),
        )
    return list(params)
