"""Does the policy keep up with one that knows everything, when the tier is not what it was believed to be?

A simulation, with the service's own planner, calibration and cursors: only the clock, the tier and the GPU are simulated.
Llama-3.1-8B on one H100 (131,072 bytes of KV a token; 22.2 us a token and 0.94 ns more for each token of context; 1.5 ms a
step) restores the cached prefixes of a conversation trace, or of lengths drawn to resemble it, one request after the
other. A tier delivers blocks one after the other; each takes its share of the bandwidth times a log-normal factor of mean
1, and where jitter is heavy, all of a request's blocks take a log-normal factor of median 1 longer. All policies meet the
same tier: a request's blocks take the same time in each column. Milliseconds are until the prefix is restored.

    load       fetch everything, always
    compute    fetch nothing
    static     the planner's cut with what was believed, for ever
    ewma       the planner's cut with what was measured, deadlines and probes included
    stealing   the planner's plan from both ends, with what was measured
    oracle     the best meeting point of both ends, in hindsight
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Goal, Report, Row, at_most, machine_card, show
from kvstore.core.limits import DRIVE_THREADS
from kvstore.core.plans import TIERS, FetchPlan
from kvstore.costs import LoadCost, PrefillCost, TierQuote
from kvstore.engine_connector.fill_cursors import FillCursors
from kvstore.planner import PlanWish, plan
from kvstore.tier_speed import TierSpeed

QUESTION = "Fetch or recompute, simulated: mean time to restore a prefix"
SEED = 20261
KV_BYTES = 131072  # a token
BLOCK_TOKENS = 16
CHUNK_TOKENS = 512
PREFILL = PrefillCost.from_flops(
    6.979e9, 524_288, 989e12, linear_efficiency=0.637, attention_efficiency=0.566, t0_s=0.0015
)
THINKING_S = 1.0  # between two requests
PROBE_BLOCKS = 8
NVME = TIERS.index("nvme")
TRACE_BLOCK_TOKENS = 512

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """A tier as it is believed to be, and as it is."""

    name: str
    believed: LoadCost
    bytes_per_s: Sequence[float]  # in as many equal parts of the run
    block_sigma: float = 0.2
    request_sigma: float = 0.0
    prefill_error: float = 1.0  # computing is believed to take so many times what it takes

    @property
    def is_stationary(self) -> bool:
        return len(self.bytes_per_s) == 1 and self.request_sigma == 0.0

    @property
    def prefill(self) -> PrefillCost:
        """As it is believed to be."""
        error = self.prefill_error
        return PrefillCost(PREFILL.t0_s * error, PREFILL.a_s * error, PREFILL.b_s * error)

    def arrivals_s(self, num_blocks: int, progress: float, rng: np.random.Generator) -> Seconds:
        """When each block of a load is there, in the order in which they are read."""
        bytes_per_s = self.bytes_per_s[int(progress * len(self.bytes_per_s))]
        factors = rng.lognormal(-(self.block_sigma**2) / 2, self.block_sigma, num_blocks)
        slower = rng.lognormal(0.0, self.request_sigma)
        return self.believed.latency_s + np.cumsum(factors) * (slower * BLOCK_TOKENS * KV_BYTES / bytes_per_s)


NVME_GEN4 = LoadCost(0.002, 6.5e9)
REGIMES = (
    Regime(name="NVMe 6.5 GB/s", believed=NVME_GEN4, bytes_per_s=(6.5e9,)),
    Regime(
        name="NVMe 6.5 GB/s, heavy jitter", believed=NVME_GEN4, bytes_per_s=(6.5e9,), block_sigma=1.0, request_sigma=1.0
    ),
    Regime(name="believed 6.5 GB/s, truly 2", believed=NVME_GEN4, bytes_per_s=(2e9,)),
    Regime(name="believed 6.5 GB/s, truly 20", believed=NVME_GEN4, bytes_per_s=(20e9,)),
    Regime(name="100G RDMA, 11.5 GB/s", believed=LoadCost(0.001, 11.5e9), bytes_per_s=(11.5e9,)),
    Regime(name="pinned RAM, 44.3 GB/s", believed=LoadCost(0.0102, 44.3e9), bytes_per_s=(44.3e9,)),
    Regime(
        name="NVMe 6.5 GB/s, computing believed half as dear",
        believed=NVME_GEN4,
        bytes_per_s=(6.5e9,),
        prefill_error=0.5,
    ),
    Regime(
        name="NVMe 6.5 GB/s, computing believed twice as dear",
        believed=NVME_GEN4,
        bytes_per_s=(6.5e9,),
        prefill_error=2.0,
    ),
    Regime(name="6.5, 0.65, then 6.5 GB/s", believed=NVME_GEN4, bytes_per_s=(6.5e9, 0.65e9, 6.5e9)),
)


class Request(NamedTuple):
    """A prefix to restore, and what happens if it is loaded."""

    num_blocks: int
    arrivals_s: Seconds

    @property
    def wish(self) -> PlanWish:
        """One token behind the prefix, whose logits are wanted."""
        return PlanWish(
            self.num_blocks * BLOCK_TOKENS + 1, 0, BLOCK_TOKENS, BLOCK_TOKENS * KV_BYTES, chunk_tokens=CHUNK_TOKENS
        )


def run(*, trace: Path | None = None, num_requests: int = 600) -> Report:
    lengths = trace_lengths(trace) if trace else synthetic_lengths(num_requests)
    rows: list[Row] = []
    goals: list[Goal] = []
    for regime in REGIMES:
        times = simulate(regime, lengths)
        means = {name: float(taken.mean()) for name, taken in times.items()}
        of_oracle = means["stealing"] / means["oracle"]
        of_better = means["stealing"] / min(means["load"], means["compute"])
        worst = worst_of_better(times)
        rows.append(
            {
                "regime": regime.name,
                **{f"{name}_ms": round(mean * 1e3, 1) for name, mean in means.items()},
                "of_oracle": round(of_oracle, 3),
                "of_better": round(of_better, 3),
                "worst_of_better": round(worst, 2),
            }
        )
        goals.append(at_most(f"{regime.name}: stealing, of the oracle", of_oracle, 1.15))
        if regime.is_stationary:
            goals.append(at_most(f"{regime.name}: stealing, of the better of load and compute", of_better, 1.1))
            goals.append(at_most(f"{regime.name}: the same, the worst request", worst, 1.1))
    source = (
        "conversation trace, infinite cache, two or more cached blocks" if trace else f"log-normal lengths, seed {SEED}"
    )
    return Report(
        question=QUESTION,
        command="python -m benchmarks.policy_simulation" + (" --trace conversation_trace.jsonl.gz" if trace else ""),
        rows=rows,
        goals=goals,
        remarks=[
            f"{len(lengths)} requests, {source}; mean prefix {np.mean(lengths):.0f} tokens",
            f"blocks of {BLOCK_TOKENS} tokens, chunks of {CHUNK_TOKENS}",
            "jitter: log-normal, sigma 0.2 a block; heavy: 1 a block and 1 a request",
            f"of_better: of the better of load and compute; worst: of single requests after the first {WARM_UP}",
        ],
    )


WARM_UP = 10


def worst_of_better(times: dict[str, Seconds]) -> float:
    """The worst request under the policy, beside what was better for it, when the tier is known."""
    ratios = times["stealing"] / np.minimum(times["load"], times["compute"])
    return float(ratios[min(WARM_UP, len(ratios) // 2) :].max())


def simulate(regime: Regime, lengths: Sequence[int], *, seed: int = SEED) -> dict[str, Seconds]:
    """Seconds of each request by each policy."""
    rng = np.random.default_rng(seed)
    static = TierQuote(regime.believed)
    policies: dict[str, Callable[[Request], float]] = {
        "load": lambda request: float(request.arrivals_s[-1]),
        "compute": lambda request: prefill_s(0, request.num_blocks),
        "static": lambda request: cut_s(request, planned(request.wish, static, regime.prefill), patient=True),
        "ewma": Measured(regime, both_ends=False).restore_s,
        "stealing": Measured(regime, both_ends=True).restore_s,
        "oracle": oracle_s,
    }
    times: dict[str, list[float]] = {name: [] for name in policies}
    for number, tokens in enumerate(lengths):
        num_blocks = tokens // BLOCK_TOKENS
        arrivals_s = regime.arrivals_s(num_blocks, number / len(lengths), rng)
        request = Request(num_blocks, arrivals_s)
        for name, restore_s in policies.items():
            times[name].append(restore_s(request))
    return {name: np.array(taken) for name, taken in times.items()}


class Measured:
    """The planner with what TierSpeed has seen."""

    def __init__(self, regime: Regime, *, both_ends: bool) -> None:
        self._speed = TierSpeed(regime.believed)
        self._prefill = regime.prefill
        self._both_ends = both_ends
        self._now_s = 0.0

    def restore_s(self, request: Request) -> float:
        # The clock never goes back: reads that were under way when the prefix was there end before the next request.
        started_s = self._now_s + THINKING_S
        self._now_s = started_s
        wish = request.wish._replace(both_ends=self._both_ends)
        chosen = planned(wish, self._speed.quote(started_s), self._prefill)
        if chosen.both_ends:
            taken_s, num_read = stealing_s(request, chosen)
        else:
            taken_s = cut_s(request, chosen)
            num_read = min(chosen.num_blocks, num_arrived(request, taken_s))
        self._see(request, started_s, chosen.num_blocks, num_read)
        self._now_s = max(self._now_s, started_s + taken_s)
        if not chosen.num_blocks and self._speed.wants_probe(started_s):
            self._speed.probing(started_s)
            self._see(request, started_s, min(PROBE_BLOCKS, request.num_blocks), PROBE_BLOCKS)
        return taken_s

    def _see(self, request: Request, started_s: float, num_ordered: int, num_read: int) -> None:
        """Reads are ordered at once; when the rest is called off, those that the drive works on end too."""
        nbytes = BLOCK_TOKENS * KV_BYTES
        for _ in range(num_ordered):
            self._speed.ordered(nbytes, started_s)
        num_begun = min(num_ordered, num_read + DRIVE_THREADS)
        ends_s = (started_s + request.arrivals_s[:num_begun]).tolist()
        for end_s in ends_s[:num_read]:
            self._speed.ended(nbytes, end_s, ok=True)
        for _ in range(num_ordered - num_begun):
            self._speed.cancelled(nbytes, ends_s[num_read - 1] if num_read else started_s)
        for end_s in ends_s[num_read:]:
            self._speed.ended(nbytes, end_s, ok=True)
        self._speed.check()
        self._now_s = max([started_s, *ends_s[-1:]])


def planned(wish: PlanWish, quote: TierQuote | None, prefill: PrefillCost) -> FetchPlan:
    return plan(wish, bytes([NVME]) * (wish.num_tokens // BLOCK_TOKENS), {NVME: quote}, None, prefill)


def prefill_s(first: int, last: int) -> float:
    """Seconds of computing blocks [first, last), in chunks."""
    return PREFILL.prefill_s((last - first) * BLOCK_TOKENS, first * BLOCK_TOKENS, chunk_tokens=CHUNK_TOKENS)


def num_arrived(request: Request, seconds: float) -> int:
    return int(np.searchsorted(request.arrivals_s, seconds, side="right"))


def cut_s(request: Request, chosen: FetchPlan, *, patient: bool = False) -> float:
    """Fetch a prefix and compute what is behind it; past the deadline what is missing is computed too."""
    if not chosen.num_blocks:
        return prefill_s(0, request.num_blocks)
    fetched_s = float(request.arrivals_s[chosen.num_blocks - 1])
    if patient or fetched_s <= chosen.deadline_s:
        return fetched_s + prefill_s(chosen.num_blocks, request.num_blocks)
    return chosen.deadline_s + prefill_s(num_arrived(request, chosen.deadline_s), request.num_blocks)


def stealing_s(request: Request, chosen: FetchPlan) -> tuple[float, int]:
    """Both ends until they meet: seconds, and how many blocks were read."""
    num_blocks = request.num_blocks
    meet = chosen.front_blocks
    expected_s = chosen.fetch_s * (num_blocks - meet) / num_blocks
    cursors = FillCursors(num_blocks, front_blocks=None if meet else 0, meet_block=meet, expected_s=expected_s)
    arrivals = request.arrivals_s.tolist()
    now_s, front, copied_s = 0.0, 0, 0.0
    while True:
        for arrived_s in _since(arrivals, cursors.num_copied, now_s):
            if not cursors.claim_back():
                break
            cursors.copied(good=True)
            copied_s = arrived_s
        if cursors.met:
            return max(now_s, copied_s), cursors.num_copied
        claimed = cursors.claim_front(min(front + CHUNK_TOKENS // BLOCK_TOKENS, num_blocks), now_s)
        now_s = now_s + prefill_s(front, claimed) if claimed > front else arrivals[cursors.num_copied]
        front = claimed


def _since(arrivals: list[float], first: int, now_s: float) -> Iterator[float]:
    for number in range(first, len(arrivals)):
        if arrivals[number] > now_s:
            return
        yield arrivals[number]


def oracle_s(request: Request) -> float:
    """The best of all meeting points, whole chunks or not, with every block's time known beforehand."""
    tokens = np.arange(request.num_blocks + 1) * float(BLOCK_TOKENS)
    steps = np.ceil(tokens / CHUNK_TOKENS)
    front_s = PREFILL.t0_s * steps + PREFILL.a_s * tokens + PREFILL.b_s * tokens**2 / 2
    back_s = np.concatenate((request.arrivals_s[::-1], [0.0]))
    return float(np.maximum(front_s, back_s).min())


def synthetic_lengths(num_requests: int, *, seed: int = SEED) -> list[int]:
    """Cached tokens of requests, in blocks of 512: log-normal, with mean and spread as in the conversation trace. Evenly spaced
    quantiles in random order, so that a few long ones do not decide the mean."""
    normal = NormalDist(8.67, 1.12)
    blocks = [math.exp(normal.inv_cdf((i + 0.5) / num_requests)) / TRACE_BLOCK_TOKENS for i in range(num_requests)]
    lengths = [min(max(round(each), 2), 240) * TRACE_BLOCK_TOKENS for each in blocks]
    return [lengths[i] for i in np.random.default_rng(seed).permutation(num_requests)]


def trace_lengths(path: Path) -> list[int]:
    """Cached tokens of the trace's requests, if nothing is ever evicted, of those with two cached blocks or more."""
    if not path.is_file():
        raise click.BadParameter(f"{path} is no file; it should be a trace of JSON lines with hash_ids, gzipped or not")
    seen: set[int] = set()
    lengths = []
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            ids = json.loads(line)["hash_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise click.BadParameter(f"{path}, line {number}: no JSON object with hash_ids") from error
        hits = next((i for i, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
        if hits >= 2:
            lengths.append(hits * TRACE_BLOCK_TOKENS)
    if not lengths:
        raise click.BadParameter(f"{path}: no request has two cached blocks")
    return lengths


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), help="JSON lines with hash_ids; else lengths are drawn.")
@click.option("--requests", default=600, show_default=True, type=click.IntRange(1), help="How many are drawn.")
@click.option("--json", "as_json", is_flag=True)
def main(*, trace: Path | None, requests: int, as_json: bool) -> None:
    card = machine_card()
    show(run(trace=trace, num_requests=requests), card, as_json=as_json)


if __name__ == "__main__":
    main()
