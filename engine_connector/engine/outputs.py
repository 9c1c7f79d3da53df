"""What the engine gives back: tokens as they come, finished samples, figures."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.engine_connector.engine.sampler import TokenLogprob
from kvstore.engine_connector.engine.sequence import Counts, FinishReason, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished sample of a request. Without preemption num_prompt_tokens = prefilled + local_cached + fetched; for the
    samples after the first, whose prompt is the first one's, all of it is local_cached."""

    request_id: str
    index: int = 0  # which of the request's n samples
    text: str  # without the stop string
    token_ids: tuple[int, ...]  # with those that make up the stop string
    finish_reason: FinishReason
    error: str | None = None  # what went wrong, when finish_reason is ERROR
    ttft_s: float | None  # request in to first token out; None when it ended before
    num_prompt_tokens: int
    num_prefilled_tokens: int  # computed here, also again after a preemption
    num_local_cached_tokens: int  # found in the engine's own pages
    num_fetched_tokens: int  # loaded from the store; what failed to load is not counted
    num_resumed_tokens: int = 0  # of those fetched: loaded after a preemption, generated tokens among them
    num_preemptions: int
    logit_gaps: tuple[float, ...]  # per token: best minus second-best logit; nan for those that came with the request
    logprobs: tuple[TokenLogprob, ...] | None = None  # per token generated here, when they were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """One generated token. `text` holds the characters that may be shown since the last one; `output` is there on the last
    one of its sample. A sample that ends in an error has no token for it: token_id is None."""

    request_id: str
    index: int = 0
    token_id: int | None
    text: str
    logprob: TokenLogprob | None = None
    output: RequestOutput | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine now, and since it started (`total`, `num_finished`, `num_refused` only grow)."""

    num_waiting: int  # requests without pages: new ones, and preempted samples
    num_loading: int  # samples whose KV is on its way
    num_running: int  # samples that are computed
    num_draining: int  # ended, but their pages are still being saved
    max_waiting: int
    num_pages: int
    num_free_pages: int  # those that can be found again by their hash among them
    num_refused: int  # requests turned away with QueueFull
    num_finished: Mapping[FinishReason, int]  # samples
    total: Counts  # over all samples
    boot_id: bytes  # of the sidecar that answered in the last step; b"" when none did


def output_of(sequence: Sequence, index: int) -> RequestOutput:
    """Of a sample that has ended; `index` may be that of one which it stands for."""
    counts, first_s = sequence.counts, sequence.first_token_s
    logprobs = tuple(entry for entry in sequence.logprobs if entry is not None)
    assert sequence.finish_reason is not None
    return RequestOutput(
        request_id=sequence.group_id,
        index=index,
        text=sequence.text.text,
        token_ids=tuple(sequence.output_ids),
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        ttft_s=None if first_s is None else first_s - sequence.arrival_s,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_prefilled_tokens=counts.prefilled,
        num_local_cached_tokens=counts.local_cached,
        num_fetched_tokens=counts.fetched,
        num_resumed_tokens=counts.resumed,
        num_preemptions=counts.preemptions,
        logit_gaps=tuple(sequence.logit_gaps),
        logprobs=None if sequence.params.logprobs is None else logprobs,
    )
