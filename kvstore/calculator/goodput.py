"""Goodput: of all requests, those that met the objectives; and a rate, that of good ones (Zhong et al., DistServe).

A request is good when it succeeded and none of the latencies it has exceeds its bound: the rule of `kvstore bench serve
--slo`. The objective that is met least is the one to work on; and the bound that the wanted share of requests would have met
says how far away it is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.bench.measures import percentile
from kvstore.calculator.latency_file import Request, Requests


class Objective(NamedTuple):
    """How one bound was met. Shares are of all requests, failed ones included: those met none."""

    latency: str
    bound_s: float
    share: float
    p50_s: float | None  # of requests that succeeded and have this latency; None: there is none
    p90_s: float | None
    p99_s: float | None
    wanted_bound_s: float | None  # the least bound that the wanted share of all requests meets; None: too many failed


class Goodput(NamedTuple):
    """Of one set of requests."""

    requests: int
    succeeded: int
    good: int
    share: float
    requests_per_s: float | None  # None: the duration is not known
    good_per_s: float | None
    objectives: Sequence[Objective]


def goodput(
    found: Requests, slo_s: Mapping[str, float], wanted_share: float, duration_s: float | None = None
) -> Goodput:
    """`slo_s`: latency -> bound. `duration_s` goes before the file's own."""
    requests = found.requests
    seconds = duration_s if duration_s is not None else found.duration_s
    good = sum(_is_good(request, slo_s) for request in requests)
    return Goodput(
        requests=len(requests),
        succeeded=sum(request.ok for request in requests),
        good=good,
        share=good / len(requests),
        requests_per_s=len(requests) / seconds if seconds else None,
        good_per_s=good / seconds if seconds else None,
        objectives=[_objective(requests, latency, bound_s, wanted_share) for latency, bound_s in slo_s.items()],
    )


def _is_good(request: Request, slo_s: Mapping[str, float]) -> bool:
    return request.ok and all(value <= slo_s[name] for name, value in request.latencies_s.items() if name in slo_s)


def _objective(requests: Sequence[Request], latency: str, bound_s: float, wanted_share: float) -> Objective:
    met = sum(_is_good(request, {latency: bound_s}) for request in requests)
    values = [r.latencies_s[latency] for r in requests if r.ok and latency in r.latencies_s]
    p50, p90, p99 = (percentile(values, percent) if values else None for percent in (50, 90, 99))
    return Objective(
        latency, bound_s, met / len(requests), p50, p90, p99, _least_bound(requests, latency, wanted_share)
    )


def _least_bound(requests: Sequence[Request], latency: str, wanted_share: float) -> float | None:
    """A request that succeeded without this latency meets any bound; a failed one none."""
    needed = -int(-wanted_share * len(requests) // 1)
    least = sorted(request.latencies_s.get(latency, 0.0) for request in requests if request.ok)
    return least[needed - 1] if 0 < needed <= len(least) else None
