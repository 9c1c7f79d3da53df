"""The next token out of a row of logits: greedy or sampled, the same on every run and in every batch.

A sampled token uses one uniform number that depends only on the request's seed and the token's position in the output:
no generator state to keep, so a preempted request continues exactly where it was.
"""

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvstore.core.errors import ConfigError


def _fresh_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. temperature 0 is greedy; top_p 1 and top_k 0 leave all tokens in.

    Without `seed` each SamplingParams draws one, so that `params.seed` repeats the output.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = field(default_factory=_fresh_seed)
    max_tokens: int = 128
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1")
        _require("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (all) or more")
        _require("seed", self.seed, 0 <= self.seed < 1 << 64, "0 to 2**64 - 1")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")


class SampledToken(NamedTuple):
    """A token and how far the two best logits were apart (before temperature): near 0 the greedy choice is a toss-up."""

    token_id: int
    logit_gap: float


class SampleSpec(NamedTuple):
    """What the sampler needs of one row: parameters, and the number of tokens already generated."""

    params: SamplingParams
    position: int


def sample(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    """One token for each row of `logits [len(specs), vocab] float32`."""
    assert logits.shape[0] == len(specs)
    best, ids = logits.topk(2, dim=-1)
    gaps, greedy = (best[:, 0] - best[:, 1]).tolist(), ids[:, 0].tolist()
    return [
        SampledToken(greedy[row] if spec.params.temperature == 0 else _draw(logits[row], spec), gaps[row])
        for row, spec in enumerate(specs)
    ]


def _draw(logits: torch.Tensor, spec: SampleSpec) -> int:
    """Inverse of the cumulative distribution over tokens in order of probability; ties go by token id."""
    params = spec.params
    scaled, ids = (logits.double() / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        scaled = scaled[: params.top_k]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    kept = int(torch.searchsorted(cumulative, params.top_p)) + 1  # the token that reaches top_p is the last one in
    cumulative = cumulative[:kept]
    threshold = _uniform(params.seed, spec.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(ids[min(index, len(cumulative) - 1)])


def _uniform(seed: int, position: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _require(name: str, value: float, ok: bool, right: str) -> None:  # noqa: FBT001 (a condition, not an option)
    if not ok:
        raise ConfigError(f"{name}: {value} is out of range; use {right}", field=name, value=value)
