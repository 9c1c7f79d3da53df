"""What is learned of a tier, from reads that overlap as they like: latency, bandwidth, queue, stalls, probes."""

import random

import pytest
from small_tier import SmallTier, log_normal

from kvstore.costs import LoadCost
from kvstore.tier_speed import MAX_TRIES, PROBE_INTERVAL_S, STALL_S, TierSpeed

MB = 1_000_000
PRIOR = LoadCost(0.001, 1e9)


def learned(speed: TierSpeed) -> LoadCost:
    assert speed.cost is not None
    return speed.cost


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("prior", [None, LoadCost(0.001, 1e9), LoadCost(0.0001, 20e9), LoadCost(0.02, 1e8)])
@pytest.mark.parametrize("true", [LoadCost(0.0001, 6.5e9), LoadCost(0.05, 2e8), LoadCost(0.002, 5e6)])
def test_the_bandwidth_comes_out_right_however_reads_share_the_tier(true: LoadCost, prior: LoadCost | None, depth: int):
    """Bursts of 64 reads, one after the other or eight at once. What latency each of several reads has behind another one
    is part of the tier's bandwidth, as it is of every load's time."""
    tier = SmallTier(TierSpeed(prior), bytes_per_s=true.bytes_per_s, latency_s=true.latency_s, depth=depth)
    for _ in range(12):
        tier.order(64, MB)
        tier.run()
        tier.rest(0.1)

    started_s = tier.now_s
    tier.order(64, MB)
    tier.run()

    assert learned(tier.speed).load_s(64 * MB) == pytest.approx(tier.now_s - started_s, rel=0.12)


def test_reads_that_are_timed_alone_would_look_eight_times_too_slow():
    """Eight at once on a tier of 1 GB/s: each takes 8 ms for its megabyte, and still it is 1 GB/s."""
    tier = SmallTier(TierSpeed(), bytes_per_s=1e9, depth=8)
    for _ in range(5):
        tier.order(80, MB)
        tier.run()
    assert learned(tier.speed).bytes_per_s == pytest.approx(1e9, rel=0.02)


def test_a_tier_that_is_never_idle_is_measured_too():
    tier = SmallTier(TierSpeed(PRIOR), bytes_per_s=4e9, latency_s=0.0005)
    tier.order(100, 2 * MB)
    for _ in range(40):
        tier.run(most=20)
        tier.order(20, 2 * MB)
    assert learned(tier.speed).bytes_per_s == pytest.approx(4e9, rel=0.1)
    assert tier.speed.num_samples > 5


def test_latency_is_learned_from_small_reads():
    tier = SmallTier(TierSpeed(PRIOR), bytes_per_s=1e9, latency_s=0.02)
    for _ in range(20):
        tier.order(1, 16_384)
        tier.run()
        tier.rest(0.01)
    cost = learned(tier.speed)
    assert cost.latency_s == pytest.approx(0.02, rel=0.1)
    assert cost.bytes_per_s == pytest.approx(1e9), "so few bytes say nothing about bandwidth"


def test_heavy_tailed_jitter_leaves_the_estimate_near_the_truth():
    """Log-normal with sigma 1: one read in a hundred takes more than 6 times the mean."""
    tier = SmallTier(
        TierSpeed(PRIOR), bytes_per_s=2e9, latency_s=0.001, depth=4, jitter=log_normal(random.Random(1), 1.0)
    )
    estimates = []
    for _ in range(60):
        tier.order(50, MB)
        tier.run()
        tier.rest(0.05)
        estimates.append(learned(tier.speed).bytes_per_s)
    assert sorted(estimates)[30] == pytest.approx(2e9, rel=0.15)
    assert all(0.5 < estimate / 2e9 < 2 for estimate in estimates[3:])


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_four_windows_after_a_sudden_tenfold_change_the_estimate_is_within_a_third(factor: float):
    tier = SmallTier(TierSpeed(PRIOR), bytes_per_s=1e9, latency_s=0.00001)
    for _ in range(10):
        tier.order(60, MB)
        tier.run()
    tier.bytes_per_s *= factor
    before = tier.speed.num_samples
    while tier.speed.num_samples < before + 4:
        tier.order(10, MB)
        tier.run()
    assert 2 / 3 < learned(tier.speed).bytes_per_s / (1e9 * factor) < 1.5


def test_what_is_queued_is_quoted_and_cancelled():
    tier = SmallTier(TierSpeed(PRIOR), bytes_per_s=1e9)
    tier.order(20, MB)
    quote = tier.speed.quote(tier.now_s)
    assert quote is not None
    assert quote.queued_bytes == 20 * MB
    tier.run(most=8)
    tier.cancel_queued()
    quote = tier.speed.quote(tier.now_s)
    assert quote is not None
    assert quote.queued_bytes == len(tier.begun) * MB
    tier.run()
    assert tier.speed.queued_bytes == 0


def test_what_was_cancelled_before_it_began_says_nothing_about_speed():
    speed = TierSpeed(PRIOR)
    for second in range(10):
        speed.ordered(50 * MB, second)
        speed.cancelled(50 * MB, second + 0.9)
    assert speed.cost == pytest.approx(PRIOR)
    speed.check()


def test_a_stalled_tier_is_not_quoted_until_something_comes():
    tier = SmallTier(TierSpeed(PRIOR), bytes_per_s=1e9)
    tier.order(20, MB)
    tier.run(most=3)
    tier.run(until_s=tier.now_s + 1e-5)
    assert tier.begun
    tier.bytes_per_s = 0.0
    assert tier.speed.quote(tier.now_s + 0.9 * STALL_S) is not None
    tier.rest(1.1 * STALL_S)
    assert tier.speed.quote(tier.now_s) is None
    tier.cancel_queued()
    assert tier.speed.quote(tier.now_s) is None, "those that were begun are still out"
    tier.bytes_per_s = 1e9
    tier.run()
    assert tier.speed.quote(tier.now_s) is not None


def test_a_slow_tier_is_not_stalled():
    """A megabyte takes 2 s and eight come at once: a read is there every 16 s."""
    tier = SmallTier(TierSpeed(LoadCost(0.001, 5e5)), bytes_per_s=5e5)
    tier.order(8, MB)
    assert tier.speed.quote(tier.now_s + 15.9) is not None


def test_errors_are_answers_but_no_bytes():
    speed = TierSpeed(PRIOR)
    speed.ordered(MB, 0.0)
    speed.ordered(MB, 0.0)
    speed.ended(MB, 0.19, ok=False)
    assert speed.quote(0.3) is not None
    speed.ended(MB, 0.35, ok=False)
    assert speed.cost == pytest.approx(PRIOR)


def test_a_tier_that_is_never_used_is_probed_now_and_then():
    speed = TierSpeed()
    assert speed.quote(0.0) is None, "nothing is known"
    probed_at_s = []
    for tenth in range(100):
        now_s = tenth / 10
        if speed.wants_probe(now_s):
            speed.probing(now_s)
            probed_at_s.append(now_s)
    assert 4 <= len(probed_at_s) <= 10 / PROBE_INTERVAL_S + 1
    tier = SmallTier(speed, bytes_per_s=1e9)
    tier.now_s = 20.0
    tier.order(1, MB)
    tier.run()
    assert speed.quote(20.1) is not None
    assert not speed.wants_probe(20.1)
    assert speed.wants_probe(22.2)


def test_a_tier_in_use_is_not_probed():
    speed = TierSpeed(PRIOR)
    speed.ordered(MB, 100.0)
    assert not speed.wants_probe(100.0 + STALL_S / 2)


def test_a_tier_that_became_faster_while_it_was_out_of_use_is_found_by_its_probes():
    """Believed to be at 20 MB/s after a bad hour, truly at 2 GB/s: a dozen probes of 8 MB and it is within half."""
    tier = SmallTier(TierSpeed(LoadCost(0.001, 2e7)), bytes_per_s=2e9)
    for _ in range(8):
        tier.rest(PROBE_INTERVAL_S * 1.1)
        assert tier.speed.wants_probe(tier.now_s)
        tier.speed.probing(tier.now_s)
        tier.order(8, MB)
        tier.run()
    assert learned(tier.speed).bytes_per_s > 1e9


def test_a_prior_counts_only_until_there_are_samples():
    speed = TierSpeed(PRIOR)
    speed.set_prior(LoadCost(0.002, 2e9))
    assert learned(speed).bytes_per_s == pytest.approx(2e9)
    tier = SmallTier(speed, bytes_per_s=2e9)
    tier.order(10, MB)
    tier.run()
    known = speed.cost
    speed.set_prior(PRIOR)
    assert speed.cost == known


def test_a_clock_that_does_not_move_measures_nothing():
    speed = TierSpeed()
    speed.ordered(MB, 5.0)
    speed.ended(MB, 5.0, ok=True)
    assert speed.cost is None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_a_cost_stays_one(seed: int):
    """Reads of all sizes, ordered, ended well or badly, cancelled, at any times: constants are finite and positive."""
    rng = random.Random(seed)
    speed, outstanding, now_s = TierSpeed(rng.choice([None, PRIOR])), [], 0.0
    for _ in range(3000):
        now_s += rng.choice([0.0, 0.0, 1e-9, 10 ** rng.uniform(-6, 1)])
        if not outstanding or rng.random() < 0.5:
            outstanding.append(rng.choice([1, 4096, MB, 1 << 30]))
            speed.ordered(outstanding[-1], now_s)
        elif rng.random() < 0.2:
            speed.cancelled(outstanding.pop(), now_s)
        else:
            speed.ended(outstanding.pop(rng.randrange(len(outstanding))), now_s, ok=rng.random() < 0.9)
        speed.check()
        assert speed.queued_bytes == sum(outstanding)
        if speed.cost is not None:
            assert 0 <= speed.cost.latency_s < 1e4
            assert 0 < speed.cost.bytes_per_s < 1e15


def load(speed: TierSpeed, now_s: float, *, num: int = 32, bytes_per_s: float = 3e9) -> float:
    """Blocks of 2 MiB, one after the other; when the last is there."""
    for _ in range(num):
        speed.ordered(2 << 20, now_s)
    for _ in range(num):
        now_s += (2 << 20) / bytes_per_s
        speed.ended(2 << 20, now_s, ok=True)
        speed.check()
    return now_s


def test_one_read_that_hangs_does_not_take_the_tier_with_it() -> None:
    """Nor does the time in which only that one was outstanding count as slowness."""
    speed = TierSpeed(LoadCost(0.001, 3e9))
    now_s = load(speed, 0.0)
    speed.ordered(2 << 20, now_s)  # never ends
    now_s += 5.0
    assert speed.quote(now_s) is None
    assert speed.wants_probe(now_s)
    speed.probing(now_s)
    now_s = load(speed, now_s, num=1)
    for _ in range(20):
        now_s += 1.0
        assert speed.quote(now_s) is not None
        now_s = load(speed, now_s)
    assert speed.cost is not None
    assert speed.cost.bytes_per_s == pytest.approx(3e9, rel=0.1)
    speed.ended(2 << 20, now_s, ok=True)  # and then it does
    speed.check()
    assert speed.cost.bytes_per_s == pytest.approx(3e9, rel=0.1)


def test_a_tier_that_stays_silent_is_tried_a_few_times_and_never_quoted() -> None:
    speed = TierSpeed(LoadCost(0.001, 3e9))
    now_s = load(speed, 0.0)
    speed.ordered(2 << 20, now_s)
    now_s += 5.0
    tries = 0
    for _ in range(600):
        now_s += 0.1
        assert speed.quote(now_s) is None
        if speed.wants_probe(now_s):
            tries += 1
            speed.probing(now_s)
            speed.ordered(2 << 20, now_s)
            assert speed.quote(now_s) is None
    assert tries == MAX_TRIES
    for _ in range(tries + 1):  # it comes to itself
        speed.ended(2 << 20, now_s, ok=True)
        speed.check()
    assert speed.quote(now_s) is not None


@pytest.mark.parametrize("ok", [None, False])
def test_a_silence_ends_when_nothing_is_outstanding(ok: bool | None) -> None:
    """Reads that were cancelled, or failed, say nothing about those to come."""
    speed = TierSpeed(LoadCost(0.001, 3e9))
    for now_s in (0.0, 5.0):
        for _ in range(4):
            speed.ordered(2 << 20, now_s)
    for _ in range(8):
        assert speed.quote(10.0) is None
        speed.cancelled(2 << 20, 10.0) if ok is None else speed.ended(2 << 20, 10.0, ok=ok)
        speed.check()
    assert speed.quote(10.0) is not None
