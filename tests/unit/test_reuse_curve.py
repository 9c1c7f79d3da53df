"""The curve of hit rates over capacity: exact against a replay, sampled against exact."""

import sys
from pathlib import Path

import pytest
from forests import random_requests

from kvstore.eviction import make_policy
from kvstore.replay.cache import ReplayCache, block_key
from kvstore.replay.curve import trace_curve
from kvstore.replay.trace import read_trace
from kvstore.reuse_curve import ReuseCurve

DATA = Path(__file__).parent.parent / "data"
SIZES = (30, 100, 300, 1000, 3000)


def place(number: int) -> int:
    return int.from_bytes(block_key(number)[8:], "little")


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_curve_is_a_replay_of_lru_at_every_size(seed: int) -> None:
    requests = random_requests(seed, num_requests=150)
    curve = ReuseCurve(max_followed=0)
    for blocks in requests:
        curve.request([place(block) for block in blocks])

    for capacity in (12, 20, 35, 60, 100):  # no request is longer than the smallest
        cache = ReplayCache(capacity, make_policy("lru"))
        hits = sum(cache.request(blocks) for blocks in requests)
        assert curve.hit_rate(capacity) * curve.num_uses == pytest.approx(hits)


@pytest.mark.parametrize("name", ["conversation_trace_1000", "agentic_trace_400"])
def test_the_sampled_curve_is_within_two_points_of_the_exact_one(name: str) -> None:
    trace = read_trace(DATA / f"{name}.jsonl.gz")
    exact, sampled = trace_curve(trace, exact=True), trace_curve(trace, max_followed=2048)

    assert sampled.num_followed <= 2048
    for size in SIZES:
        assert abs(sampled.hit_rate(size) - exact.hit_rate(size)) < 0.02
    assert abs(sampled.best_hit_rate() - exact.best_hit_rate()) < 0.02


def test_the_curve_rises_and_ends_at_the_hit_rate_of_a_tier_without_end() -> None:
    trace = read_trace(DATA / "conversation_trace_1000.jsonl.gz")
    curve = trace_curve(trace, exact=True)
    rates = [point.hit_rate for point in curve.points()]

    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(curve.best_hit_rate())
    seen: set[int] = set()
    repeats = sum(block in seen or seen.add(block) is not None for r in trace.requests for block in r.blocks)
    assert curve.best_hit_rate() * curve.num_uses == pytest.approx(repeats)


def test_a_full_sample_stays_below_a_megabyte() -> None:
    curve = ReuseCurve()
    for start in range(0, 200_000, 100):
        curve.request([place(block) for block in range(start, start + 100)])
    table = sys.getsizeof(curve._last) + curve._order._sums.nbytes + curve._weights.nbytes
    entries = len(curve._last) * (36 + 32) + len(curve._largest) * 36 + sys.getsizeof(curve._largest)  # ints

    assert curve.num_followed <= 4096
    assert table + entries < 1 << 20


def test_the_knee_is_where_a_working_set_fits() -> None:
    curve = ReuseCurve(max_followed=0)
    for turn in range(2000):
        session = turn % 20 * 50
        curve.request([place(block) for block in range(session, session + 50)])

    knee = curve.knee()

    assert knee is None or 900 < knee.num_blocks <= 1000
    assert curve.hit_rate(1000) > 0.98
    assert curve.hit_rate(940) < 0.02


def test_an_empty_curve_answers() -> None:
    curve = ReuseCurve()
    curve.request([])

    assert (curve.hit_rate(1000), curve.best_hit_rate(), curve.knee(), curve.points()) == (0.0, 0.0, None, [])
