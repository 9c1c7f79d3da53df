"""Replays a trace and counts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from kvstore.replay.costs import ReplayCosts
from kvstore.replay.trace import ReplayRequest, ReplayStore, ReplayUse, Trace

_PROGRESS_STEPS = 256


class Found(NamedTuple):
    """Leading blocks of a request that were there: `ram`, and behind those, `nvme`."""

    ram: int
    nvme: int = 0


class Replayed(Protocol):
    """Tiers under replay."""

    @property
    def num_evicted(self) -> int: ...  # noqa: D102 - of RAM
    @property
    def num_written(self) -> int: ...  # noqa: D102 - to NVMe
    def replay(self, request: ReplayRequest) -> Found: ...  # noqa: D102 - look, use what is there, store what is to be stored
    def follow(self, step: ReplayStore | ReplayUse) -> None: ...  # noqa: D102 - an engine stores these, or reads them besides


@dataclass(kw_only=True)
class Result:
    """Counts of one run. A hit is a leading block that was there before the request changed anything. Capacities are blocks, or
    bytes where the blocks' sizes are known."""

    policy: str
    capacity: int
    in_bytes: bool = False
    nvme_capacity: int = 0
    requests: int = 0
    blocks: int = 0
    tokens: int = 0
    ram_hits: int = 0
    nvme_hits: int = 0
    ram_hit_tokens: int = 0
    nvme_hit_tokens: int = 0
    evicted: int = 0
    nvme_written: int = 0
    saved_gpu_s: float = 0.0
    all_gpu_s: float = 0.0
    ttfts_s: list[float] = field(default_factory=list)

    @property
    def hits(self) -> int:
        """In all tiers."""
        return self.ram_hits + self.nvme_hits

    @property
    def hit_tokens(self) -> int:
        """In all tiers."""
        return self.ram_hit_tokens + self.nvme_hit_tokens

    @property
    def block_hit(self) -> float:
        """Part of the blocks."""
        return self.hits / self.blocks if self.blocks else 0.0

    @property
    def token_hit(self) -> float:
        """Part of the tokens."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def saved_part(self) -> float:
        """Part of the GPUs' prefill seconds: hits weighted by what they save."""
        return self.saved_gpu_s / self.all_gpu_s if self.all_gpu_s else 0.0

    def ttft_s(self, percent: float) -> float:
        """A percentile."""
        return float(np.percentile(self.ttfts_s, percent)) if self.ttfts_s else 0.0


def replay(
    trace: Trace,
    cache: Replayed,
    result: Result,
    costs: ReplayCosts,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Every step of the trace in its order. `on_progress` is told of so many more."""
    for number, request in enumerate(trace.steps, start=1):
        if number % _PROGRESS_STEPS == 0:
            on_progress(_PROGRESS_STEPS)
        if not isinstance(request, ReplayRequest):
            cache.follow(request)
            continue
        found = cache.replay(request)
        block_tokens = request.space.block_tokens
        ram_tokens = min(found.ram * block_tokens, request.num_tokens)
        hit_tokens = min((found.ram + found.nvme) * block_tokens, request.num_tokens)
        result.requests += 1
        result.blocks += len(request.blocks)
        result.tokens += request.num_tokens
        result.ram_hits += found.ram
        result.nvme_hits += found.nvme
        result.ram_hit_tokens += ram_tokens
        result.nvme_hit_tokens += hit_tokens - ram_tokens
        result.saved_gpu_s += costs.saved_s(request.num_tokens, hit_tokens)
        result.all_gpu_s += costs.prefill.work_s(request.num_tokens)
        result.ttfts_s.append(costs.ttft_s(request.num_tokens, ram_tokens, hit_tokens - ram_tokens))
    result.evicted, result.nvme_written = cache.num_evicted, cache.num_written
    return result
