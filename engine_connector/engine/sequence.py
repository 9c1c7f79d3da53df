"""One request inside the engine: its tokens, its pages, how far it is. The connector reads it as protocol.Request."""

import enum
from dataclasses import dataclass, field

from kvstore.core.keys import HashScheme
from kvstore.engine_connector.engine.sampler import SampledToken, SamplingParams
from kvstore.engine_connector.protocol import CacheOptions


class Status(enum.Enum):
    """Where a sequence is. Only RUNNING ones are computed; only WAITING ones own no pages."""

    WAITING = enum.auto()  # new, or preempted
    WAITING_FOR_KV = enum.auto()  # pages allocated, a load writes them
    RUNNING = enum.auto()
    FINISHED = enum.auto()  # pages are kept while the connector still reads or writes them


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"


@dataclass(slots=True)
class Counts:
    """Where a request's prompt KV came from. Without preemption they add up to the prompt; with it, to more."""

    prefilled: int = 0  # computed here
    local_cached: int = 0  # found in the engine's own pages
    fetched: int = 0  # loaded from the store; what failed to load is not in it
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; changed by the scheduler only."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    arrival: int  # order of arrival: the older one keeps its pages when they run out
    arrival_s: float
    hash_scheme: HashScheme
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)  # page of each block
    num_computed_tokens: int = 0  # tokens whose KV is in the pages and confirmed
    num_loading_tokens: int = 0  # beyond num_computed_tokens, being loaded
    num_asks_ahead: int = 0  # how often the connector was asked about it before it had pages
    block_hashes: list[bytes] = field(default_factory=list)
    logit_gaps: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    finish_reason: FinishReason | None = None
    counts: Counts = field(default_factory=Counts)
    cache: CacheOptions = field(default_factory=CacheOptions)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.block_hashes = self.hash_scheme.hash_blocks(self.token_ids)

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

    def append(self, sampled: SampledToken) -> None:
        """Add a generated token; hash the block that it completes."""
        self.token_ids.append(sampled.token_id)
        self.logit_gaps.append(sampled.logit_gap)
        step = self.hash_scheme.block_tokens
        if self.num_tokens % step == 0:
            parent = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes += self.hash_scheme.hash_blocks(self.token_ids[-step:], parent=parent)
