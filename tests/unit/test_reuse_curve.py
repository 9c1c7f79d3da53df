"""The curve of hit rates over capacity: exact against a replay, sampled against exact."""

import os
import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from forests import random_requests

from kvstore.eviction import make_policy
from kvstore.replay.cache import ReplayCache, block_key
from kvstore.replay.curve import trace_curve
from kvstore.replay.trace import read_trace
from kvstore.reuse_curve import MAX_FOLLOWED, Hashes, ReuseCurve

DATA = Path(__file__).parent.parent / "data"
SIZES = (30, 100, 300, 1000, 3000)


def hashes(numbers: Iterable[int]) -> Hashes:
    return np.array([int.from_bytes(block_key(number)[8:], "little") for number in numbers], np.uint64)


@pytest.mark.parametrize("seed", range(4))
def test_the_exact_curve_is_a_replay_of_lru_at_every_size(seed: int) -> None:
    requests = random_requests(seed, num_requests=150)
    curve = ReuseCurve(max_followed=0)
    for blocks in requests:
        curve.request(hashes(blocks))

    for capacity in (12, 20, 35, 60, 100):  # no request is longer than the smallest
        cache = ReplayCache(capacity, make_policy("lru"))
        hits = sum(cache.request(blocks) for blocks in requests)
        assert curve.hit_rate(capacity) * curve.total == pytest.approx(hits)


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
    assert curve.best_hit_rate() * curve.total == pytest.approx(repeats)


def test_a_full_sample_stays_below_a_megabyte() -> None:
    """As Python counts, and as the curve says itself."""
    requests = [hashes(range(start, start + 100)) for start in range(0, 200_000, 100)]
    tracemalloc.start()
    curve = ReuseCurve()
    for wanted in requests:
        curve.request(wanted)
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert MAX_FOLLOWED * 7 // 8 < curve.num_followed <= MAX_FOLLOWED
    assert nbytes < 1 << 20
    assert curve.nbytes < 1 << 20


def test_the_knee_is_where_a_working_set_fits() -> None:
    curve = ReuseCurve(max_followed=0)
    for turn in range(2000):
        session = turn % 20 * 50
        curve.request(hashes(range(session, session + 50)))

    knee = curve.knee()

    assert knee is None or 900 < knee.capacity <= 1000
    assert curve.hit_rate(1000) > 0.98
    assert curve.hit_rate(940) < 0.02


@pytest.mark.parametrize("name", ["conversation_trace", "agentic_trace"])
def test_within_two_points_on_a_whole_public_trace(name: str) -> None:
    """They are not in the repository: TRACES_DIR names their folder."""
    if "TRACES_DIR" not in os.environ:
        pytest.skip("TRACES_DIR is not set")
    trace = read_trace(Path(os.environ["TRACES_DIR"]) / f"{name}.jsonl.gz")
    exact, sampled = trace_curve(trace, exact=True), trace_curve(trace)

    assert sampled.nbytes < 1 << 20
    for size in (1000, 3000, 10_000, 30_000, 100_000):
        assert abs(sampled.hit_rate(size) - exact.hit_rate(size)) < 0.02
    assert abs(sampled.best_hit_rate() - exact.best_hit_rate()) < 0.02


@pytest.mark.parametrize("max_followed", [0, 8192])
def test_blocks_of_two_sizes_share_one_memory(max_followed: int) -> None:
    """Two documents in turn: found again where there is room for both, by bytes."""
    curve = ReuseCurve(max_followed=max_followed)
    small, large = hashes(range(400)), hashes(range(1000, 1100))
    for _ in range(400):
        curve.request(small, size=1, value=16.0)
        curve.request(large, size=7, value=32.0)

    assert curve.total == 400 * (400 * 16 + 100 * 32)
    assert curve.hit_rate(400) < 0.01  # a head has the other document behind it
    assert 0.4 < curve.hit_rate(900) < 0.9
    assert curve.hit_rate(400 + 700) == pytest.approx(399 / 400, abs=0.02)


def test_what_nobody_stores_is_no_hit_and_what_is_stored_besides_is() -> None:
    """A chat: what was generated is stored, and found by the next turn; a request that is not stored is not found again."""
    curve = ReuseCurve(max_followed=0)
    prompt, answer, secret = hashes(range(10)), hashes(range(10, 14)), hashes(range(100, 110))
    curve.wanted(secret, size=1, value=1.0)
    curve.wanted(secret, size=1, value=1.0)
    curve.wanted(prompt, size=1, value=1.0)
    curve.stored(prompt, size=1)
    curve.stored(answer, size=1)
    curve.wanted(np.concatenate((prompt, answer)), size=1, value=1.0)

    assert curve.best_hit_rate() * curve.total == 14
    assert curve.hit_rate(13) * curve.total == pytest.approx(13)  # ten behind four: all but the last of the prompt


def test_what_the_engine_has_itself_is_a_hit_with_any_capacity_and_a_tail_with_none() -> None:
    curve = ReuseCurve(max_followed=0)
    blocks = hashes(range(10))
    curve.stored(blocks, size=1)
    curve.wanted(blocks, size=1, value=16.0, num_had=4, extra=5.0)

    assert curve.total == 165
    assert curve.hit_rate(0) * 165 == pytest.approx(4 * 16)
    assert curve.best_hit_rate() * 165 == pytest.approx(160)


def test_what_is_long_ago_counts_less_and_is_forgotten() -> None:
    curve = ReuseCurve()
    blocks = hashes(range(100))
    for _ in range(10):
        curve.request(blocks)
    curve.age(0.5, 1, max_epochs=2)
    assert curve.total == 500
    assert curve.best_hit_rate() == pytest.approx(0.9)
    curve.age(0.5, 1, max_epochs=2)
    assert curve.num_followed == 100
    curve.age(0.5, 1, max_epochs=2)

    assert curve.num_followed == 0
    curve.request(blocks)
    assert curve.best_hit_rate() == pytest.approx(112.5 / 225)


def test_a_key_twice_in_a_call_is_one_block() -> None:
    curve, exact = ReuseCurve(), ReuseCurve(max_followed=0)
    for each in (curve, exact):
        for _ in range(300):
            each.request(hashes([1, 2, 2, 3, 1]))

    assert curve.num_followed == exact.num_followed == 3
    assert curve.hit_rate(3) > 0.9


def test_a_sample_of_random_use_is_near_the_exact_curve() -> None:
    """Popularity by Zipf's law over 60,000 documents, with blocks of three sizes: at five sizes, and without end."""
    draw, exact, sampled = random.Random(7), ReuseCurve(max_followed=0), ReuseCurve(max_followed=2048)
    weights = [1 / (rank + 1) ** 0.8 for rank in range(60_000)]
    for document in draw.choices(range(60_000), weights, k=6_000):
        wanted, size = hashes(range(document * 100, document * 100 + 4 + document % 20)), (1, 3, 4)[document % 3]
        for curve in (exact, sampled):
            curve.request(wanted, size=size)

    assert sampled.rate < 0.05
    for capacity in (1000, 5000, 20_000, 80_000, 320_000):
        assert abs(sampled.hit_rate(capacity) - exact.hit_rate(capacity)) < 0.02
    assert abs(sampled.best_hit_rate() - exact.best_hit_rate()) < 0.02


def test_an_empty_curve_answers() -> None:
    curve = ReuseCurve()
    curve.request(hashes([]))

    assert (curve.hit_rate(1000), curve.best_hit_rate(), curve.knee(), curve.points()) == (0.0, 0.0, None, [])
