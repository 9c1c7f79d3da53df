"""The next token out of a row of logits: greedy or sampled, the same on every run and in every batch.

A sampled token uses one uniform number that depends only on the request's seed, the sample's index and the token's
position in the output: no generator state to keep, so a preempted request continues exactly where it was.
"""

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kvstore.core.errors import ConfigError

MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
"""A stream holds back up to MAX_STOP_CHARS - 1 characters that may begin a stop string."""


def _fresh_seed() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. temperature 0 is greedy; top_p 1 and top_k 0 leave all tokens in.

    `n` samples of the prompt are drawn; each has random numbers of its own, derived from `seed` and its index. Without
    `seed` each SamplingParams draws one, so that `params.seed` repeats the output. `stop`: texts that end the output and
    are not part of it. `logprobs`: for each token, how many of the best tokens to name beside the chosen one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = field(default_factory=_fresh_seed)
    max_tokens: int = 128
    ignore_eos: bool = False
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1")
        _require("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (all) or more")
        _require("seed", self.seed, 0 <= self.seed < 1 << 64, "0 to 2**64 - 1")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        _require("n", self.n, 1 <= self.n <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}")
        if self.logprobs is not None:
            _require("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        if not isinstance(self.stop, tuple):
            raise ConfigError(f"stop: {self.stop!r} is no tuple of texts", field="stop", value=str(self.stop))
        if len(self.stop) > MAX_STOPS:
            raise ConfigError(
                f"stop: {len(self.stop)} texts; use at most {MAX_STOPS}", field="stop", value=len(self.stop)
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                shown, wrong = ascii(text), "is no text"
                if isinstance(text, str):
                    shown, wrong = ascii(text[:40]), f"has {len(text)} characters"
                raise ConfigError(
                    f"stop: {shown} {wrong}; use texts of 1 to {MAX_STOP_CHARS} characters", field="stop", value=shown
                )


class TokenLogprob(NamedTuple):
    """Natural log probabilities before temperature, top_p and top_k."""

    logprob: float  # of the chosen token
    top: tuple[tuple[int, float], ...]  # (token_id, logprob) of the best tokens, best first; ties by token id


class SampledToken(NamedTuple):
    """A token and how far the two best logits were apart (before temperature): near 0 the greedy choice is a toss-up."""

    token_id: int
    logit_gap: float
    logprob: TokenLogprob | None = None  # when it was asked for


class SampleSpec(NamedTuple):
    """What the sampler needs of one row: parameters, the number of tokens already generated, and which of the request's
    samples it is."""

    params: SamplingParams
    position: int
    sample: int = 0


def sample(logits: torch.Tensor, specs: list[SampleSpec]) -> list[SampledToken]:
    """One token for each row of `logits [len(specs), vocab] float32`."""
    assert logits.shape[0] == len(specs)
    best, ids = logits.topk(2, dim=-1)
    gaps, greedy = (best[:, 0] - best[:, 1]).tolist(), ids[:, 0].tolist()
    sampled = []
    for row, spec in enumerate(specs):
        token_id = greedy[row] if spec.params.temperature == 0 else _draw(logits[row], spec)
        sampled.append(SampledToken(token_id, gaps[row], _logprob(logits[row], token_id, spec.params.logprobs)))
    return sampled


def _logprob(logits: torch.Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
    return TokenLogprob(float(logprobs[token_id]), tuple(top))


def _draw(logits: torch.Tensor, spec: SampleSpec) -> int:
    """Inverse of the cumulative distribution over tokens in order of probability; ties go by token id."""
    params = spec.params
    ordered, ids = logits.double().sort(descending=True, stable=True)
    scaled = (ordered - ordered[0]) / params.temperature  # the best is 0: the least temperature makes no inf - inf
    if params.top_k:
        scaled = scaled[: params.top_k]
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    kept = int(torch.searchsorted(cumulative, params.top_p)) + 1  # the token that reaches top_p is the last one in
    cumulative = cumulative[:kept]
    threshold = _uniform(params.seed, spec.sample, spec.position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(ids[min(index, len(cumulative) - 1)])


def _uniform(seed: int, sample: int, position: int) -> float:
    """Philox has a key of 128 bits: each sample of each seed is a stream of its own."""
    return float(np.random.Generator(np.random.Philox(key=seed | sample << 64, counter=position)).random())


def _require(name: str, value: float, ok: bool, right: str) -> None:  # noqa: FBT001 (a condition, not an option)
    if not ok:
        raise ConfigError(f"{name}: {value} is out of range; use {right}", field=name, value=value)
