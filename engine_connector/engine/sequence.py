"""One sample of a request inside the engine: its tokens, its pages, how far it is. The connector reads it as
protocol.Request.

A request for n samples is one sequence until its prompt is computed; then it forks into n, which share the prompt's pages.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from kvstore.core.keys import HashScheme
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.output_text import OutputText
from kvstore.engine_connector.engine.sampler import SampledToken, SamplingParams, TokenLogprob
from kvstore.engine_connector.protocol import CacheOptions

AGEING_S = 60.0
"""A step of priority is worth so much waiting: a request is passed only by better ones that come within AGEING_S for each
step between them, and by those of its own priority never. So none starves, however many better ones keep coming."""


class Status(enum.Enum):
    """Where a sequence is. Only RUNNING ones are computed; only WAITING ones own no pages."""

    WAITING = enum.auto()  # new, or preempted
    WAITING_FOR_KV = enum.auto()  # pages allocated, a load writes them; computed at the front of a load from the back
    RUNNING = enum.auto()
    FINISHED = enum.auto()  # pages are kept while the connector still reads or writes them


class FinishReason(enum.StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"
    ERROR = "error"  # a load failed, and the request wished to fail then


class Rank(NamedTuple):
    """Who goes first: the least. It never changes, so lists stay sorted."""

    virtual_arrival_s: float
    arrival: int
    sample: int


@dataclass(slots=True)
class Counts:
    """Where KV came from. Without preemption prefilled + local_cached + fetched add up to the prompt; with it, to more."""

    prefilled: int = 0  # computed here
    local_cached: int = 0  # found in the engine's own pages
    fetched: int = 0  # loaded from the store; what failed to load is not in it
    resumed: int = 0  # of those fetched: after a preemption
    filled_front: int = 0  # of those prefilled: at the front of a load from the back, until it was over
    filled_back: int = 0  # of those fetched: by loads from the back
    generated: int = 0
    preemptions: int = 0

    def __iadd__(self, other: "Counts") -> Self:
        self.prefilled += other.prefilled
        self.local_cached += other.local_cached
        self.fetched += other.fetched
        self.resumed += other.resumed
        self.filled_front += other.filled_front
        self.filled_back += other.filled_back
        self.generated += other.generated
        self.preemptions += other.preemptions
        return self


@dataclass(slots=True)
class Fill:
    """Blocks of a sequence that are filled from both ends: computed from `first` on, copied from `end` on backwards."""

    first: int  # both are indices in the table
    end: int
    filled_from: int | None = None  # once the load is over: what is before is computed, what is behind is in its pages


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable; changed by the scheduler only. `request_id` is the sample's own, `group_id` that of the request."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    arrival: int  # order of arrival
    arrival_s: float
    hash_scheme: HashScheme
    new_text: Callable[[], OutputText]  # for this sample and those that it forks into
    options: RequestOptions = field(default_factory=RequestOptions)
    group_id: str = ""
    index: int = 0
    num_prompt_tokens: int = 0  # 0: all tokens; those behind were generated elsewhere and came with the request
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)  # page of each block
    num_computed_tokens: int = 0  # tokens whose KV is in the pages and confirmed
    num_loading_tokens: int = 0  # beyond num_computed_tokens, being loaded
    fill: Fill | None = None  # from the start of a load from the back until front and back have met
    num_asks_ahead: int = 0  # how often the connector was asked about it before it had pages
    block_hashes: list[bytes] = field(default_factory=list)
    logit_gaps: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    started_s: float | None = None  # when a traced request was first computed
    first_token_s: float | None = None
    traceparent: str = ""  # of the request's span
    finish_reason: FinishReason | None = None
    error: str | None = None
    counts: Counts = field(default_factory=Counts)
    text: OutputText = field(init=False)

    def __post_init__(self) -> None:
        self.group_id = self.group_id or self.request_id
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)
        self.block_hashes = self.block_hashes or self.hash_scheme.hash_blocks(self.token_ids, parent=self._root)
        self.text = self.new_text()
        for token_id in self.output_ids:
            self.logit_gaps.append(math.nan)
            self.logprobs.append(None)
            self.text.push(token_id)

    @property
    def cache(self) -> CacheOptions:
        """See protocol.Request."""
        return self.options.cache

    @property
    def tail_hash(self) -> bytes:
        """See protocol.Request."""
        num_full = self.num_prompt_tokens // self.hash_scheme.block_tokens
        tail = self.token_ids[num_full * self.hash_scheme.block_tokens : self.num_prompt_tokens]
        parent = self.block_hashes[num_full - 1] if num_full else self._root
        return self.hash_scheme.tail_hash(tail, parent=parent) if tail else b""

    @property
    def num_tokens(self) -> int:
        """Prompt plus generated tokens so far."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def rank(self) -> Rank:
        """By priority and age (AGEING_S); samples of a request by index."""
        return Rank(self.arrival_s + self.options.priority * AGEING_S, self.arrival, self.index)

    @property
    def num_samples(self) -> int:
        """How many samples it stands for: the request's n until it forks."""
        return self.params.n if self.index == 0 and self.num_output_tokens == 0 else 1

    @property
    def sample_ids(self) -> list[str]:
        """Ids of the samples it stands for."""
        return [self.request_id, *(f"{self.group_id}#{index}" for index in range(1, self.num_samples))]

    def fork(self, index: int) -> "Sequence":
        """Sample `index` of the same prompt, with the same pages. To the caller: another holder for each of them."""
        return Sequence(
            request_id=self.sample_ids[index],
            token_ids=list(self.token_ids),
            params=self.params,
            arrival=self.arrival,
            arrival_s=self.arrival_s,
            hash_scheme=self.hash_scheme,
            new_text=self.new_text,
            options=self.options,
            group_id=self.group_id,
            index=index,
            traceparent=self.traceparent,
            status=self.status,
            block_ids=list(self.block_ids),
            num_computed_tokens=self.num_computed_tokens,
            block_hashes=list(self.block_hashes),
            counts=Counts(local_cached=self.num_computed_tokens),
        )

    def append(self, sampled: SampledToken) -> None:
        """Add a generated token and its text; hash the block that it completes."""
        self.token_ids.append(sampled.token_id)
        self.logit_gaps.append(sampled.logit_gap)
        self.logprobs.append(sampled.logprob)
        self.text.push(sampled.token_id)
        self.counts.generated += 1
        step = self.hash_scheme.block_tokens
        if self.num_tokens % step == 0:
            parent = self.block_hashes[-1] if self.block_hashes else self._root
            self.block_hashes += self.hash_scheme.hash_blocks(self.token_ids[-step:], parent=parent)

    def finish(self, reason: FinishReason) -> None:
        """No token comes any more. A stop string that the very end completes is the reason, if it was the length."""
        self.text.finish()
        self.status = Status.FINISHED
        self.finish_reason = FinishReason.STOP if self.text.stopped and reason is FinishReason.LENGTH else reason

    @property
    def _root(self) -> bytes:
        salt = self.options.cache.salt
        return self.hash_scheme.root([salt.encode()] if salt else [])
