"""Samples in, figures out."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.bench.sample import REFUSED, SKIPPED, Sample

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of at least one value."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


Slo = dict[str, float]
"""Bounds in seconds for any of ttft, tpot, itl, e2e. A request is good when it succeeded and no value it has exceeds its bound;
for itl that is its longest gap."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks: position (n - 1) * percent / 100 in the sorted values (Hyndman and
    Fan's type 7, numpy's default)."""
    assert values
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Spread(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def latencies(samples: Sequence[Sample]) -> dict[str, Spread | None]:
    """TTFT, TPOT, ITL, E2E of those that succeeded."""
    done = [sample for sample in samples if sample.ok]
    return {
        "ttft_s": spread(value for sample in done if (value := sample.ttft_s) is not None),
        "tpot_s": spread(value for sample in done if (value := sample.tpot_s) is not None),
        "itl_s": spread(gap for sample in done for gap in sample.itl_s),
        "e2e_s": spread(sample.e2e_s for sample in done),
    }


def is_good(sample: Sample, slo: Slo) -> bool:
    """See Slo."""
    found = {
        "ttft": sample.ttft_s,
        "tpot": sample.tpot_s,
        "itl": max(sample.itl_s, default=None),
        "e2e": sample.e2e_s,
    }
    return sample.ok and all(value is None or value <= slo[name] for name, value in found.items() if name in slo)


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates are over `duration_s`, from the run's start to the end of its last request."""

    requests: int
    succeeded: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    retry_after_s: Spread | None
    duration_s: float
    latencies: dict[str, Spread | None]
    lag_s: Spread | None
    prompt_tokens: int
    asked_prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    without_usage: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good: int | None
    goodput_per_s: float | None
    output_hash: str

    @property
    def refused(self) -> int:
        """Answers of 429."""
        return self.failures.get(REFUSED, 0)


def summarise(samples: Sequence[Sample], duration_s: float, slo: Slo) -> Summary:
    """Token counts are of the requests that succeeded; cached_tokens is None when no answer told them."""
    done = [sample for sample in samples if sample.ok]
    failed = [(sample.exchange.failure.kind, sample.exchange.failure) for sample in samples if sample.exchange.failure]
    cached = [count for sample in done if (count := sample.cached_tokens) is not None]
    prompt_tokens = sum(sample.prompt_tokens for sample in done)
    output_tokens = sum(sample.output_tokens for sample in done)
    good = sum(is_good(sample, slo) for sample in samples) if slo else None
    return Summary(
        requests=len(samples),
        succeeded=len(done),
        failures=dict(sorted(Counter(kind for kind, _ in failed).items())),
        failure_examples={kind: failure.message for kind, failure in reversed(failed)},
        retry_after_s=spread(failure.retry_after_s for _, failure in failed if failure.retry_after_s is not None),
        duration_s=duration_s,
        latencies=latencies(samples),
        lag_s=spread(lag for sample in samples if (lag := sample.lag_s) is not None),
        prompt_tokens=prompt_tokens,
        asked_prompt_tokens=sum(sample.asked_prompt_tokens for sample in done),
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        without_usage=sum(sample.exchange.usage is None for sample in done),
        requests_per_s=_rate(len(done), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        good=good,
        goodput_per_s=None if good is None else _rate(good, duration_s),
        output_hash=output_hash(samples),
    )


def output_hash(samples: Sequence[Sample]) -> str:
    """Over every answer in the workload's order, whatever order they came in. Equal: the same outputs, and the same failures."""
    ordered = sorted(samples, key=lambda sample: (sample.conversation, sample.turn))
    lines = [f"{sample.name} {sample.output_digest()}\n" for sample in ordered]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def around(samples: Sequence[Sample], at_s: float) -> dict[str, list[Sample]]:
    """Those that had ended when something happened, those under way, and those sent afterwards; skipped ones are in none."""
    sent = [s for s in samples if s.exchange.failure is None or s.exchange.failure.kind != SKIPPED]
    return {
        "before": [s for s in sent if s.exchange.done_s <= at_s],
        "during": [s for s in sent if s.exchange.sent_s < at_s < s.exchange.done_s],
        "after": [s for s in sent if s.exchange.sent_s >= at_s and s.exchange.done_s > at_s],
    }


def _rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
