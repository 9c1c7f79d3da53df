"""What is learned of an engine's steps and copies, and how predictions are judged."""

import random

import pytest
from small_tier import log_normal

from kvstore.calibration import CopySpeed, PredictionLog, PrefillEstimator, Smoothed
from kvstore.costs import LoadCost, PrefillCost

TRUE = PrefillCost(0.008, 22e-6, 9.4e-10)


def step_of(shares: list[tuple[int, int]], cost: PrefillCost = TRUE) -> tuple[float, float, float]:
    """(tokens, pairs, seconds) of a step whose shares are (tokens, context)."""
    tokens = sum(num for num, _ in shares)
    pairs = sum(num * context + num * num / 2 for num, context in shares)
    work_s = sum(cost.work_s(context + num) - cost.work_s(context) for num, context in shares)
    return tokens, pairs, cost.t0_s + work_s


def mixed_steps(rng: random.Random, num_steps: int, cost: PrefillCost = TRUE) -> list[tuple[float, float, float]]:
    """Chunks of prompts of all lengths, sometimes two in a step, with decodes beside them."""
    steps = []
    for _ in range(num_steps):
        shares = [
            (rng.choice([32, 200, 512, 1024, 2048]), rng.choice([0, 512, 4096, 30_000]))
            for _ in range(rng.randint(1, 2))
        ]
        shares += [(1, rng.randrange(20_000)) for _ in range(rng.randrange(9))]
        steps.append(step_of(shares, cost))
    return steps


def fed(steps: list[tuple[float, float, float]]) -> PrefillEstimator:
    estimator = PrefillEstimator()
    for step in steps:
        estimator.observe(*step)
    return estimator


def worst_error(estimator: PrefillEstimator, cost: PrefillCost, cases: list[tuple[int, int]]) -> float:
    found = estimator.cost
    assert found is not None
    return max(abs(found.prefill_s(num, context) / cost.prefill_s(num, context) - 1) for num, context in cases)


CASES = [(256, 0), (2048, 0), (8192, 0), (512, 30_000), (32_768, 0)]


def test_the_constants_are_found_from_mixed_steps():
    estimator = fed(mixed_steps(random.Random(1), 60))
    found = estimator.cost
    assert found is not None
    assert found.t0_s == pytest.approx(TRUE.t0_s, rel=0.01)
    assert found.a_s == pytest.approx(TRUE.a_s, rel=0.01)
    assert found.b_s == pytest.approx(TRUE.b_s, rel=0.01)
    assert estimator.confidence > 0.9


@pytest.mark.parametrize("seed", range(4))
def test_heavy_tailed_steps_are_predicted_within_a_third(seed: int):
    """Log-normal with sigma 0.5, and one step in twenty takes ten times as long."""
    rng = random.Random(seed)
    jitter = log_normal(rng, 0.5)
    steps = [
        (tokens, pairs, seconds * jitter() * (10 if rng.random() < 0.05 else 1))
        for tokens, pairs, seconds in mixed_steps(rng, 96)
    ]
    estimator = fed(steps)
    assert worst_error(estimator, TRUE, CASES) < 0.35
    assert 0.3 < estimator.confidence < 0.9


def test_nothing_is_said_before_there_are_a_few_steps():
    estimator = fed([step_of([(512, 0)])] * 2)
    assert estimator.cost is None
    assert estimator.confidence == 0.0


def test_few_steps_give_the_cost_of_a_token_alone():
    found = fed([step_of([(512, 0)]), step_of([(512, 512)]), step_of([(300, 1024)])]).cost
    assert found is not None
    assert (found.t0_s, found.b_s) == (0.0, 0.0)
    assert found.prefill_s(512) == pytest.approx(TRUE.prefill_s(512), rel=0.15)


def test_chunks_of_one_length_are_predicted_at_that_length():
    """Nothing tells t0 from a: whatever they are said to be, neither may be negative, and sums of chunks must be right."""
    found = fed([step_of([(512, 512 * (number % 16))]) for number in range(64)]).cost
    assert found is not None
    assert min(found) >= 0
    predicted_s = found.prefill_s(8192, chunk_tokens=512)
    assert predicted_s == pytest.approx(TRUE.prefill_s(8192, chunk_tokens=512), rel=0.02)


def test_no_constant_is_negative_whatever_is_fed():
    rng = random.Random(3)
    for _ in range(100):
        estimator = PrefillEstimator()
        for _ in range(rng.randint(3, 40)):
            estimator.observe(rng.randint(1, 4000), rng.uniform(0, 1e8), 10 ** rng.uniform(-3, 1))
        if estimator.cost is not None:
            assert min(estimator.cost) >= 0
            assert 0 <= estimator.confidence <= 1


def test_decodes_alone_say_nothing_about_prefill():
    estimator = fed(mixed_steps(random.Random(2), 40))
    before = estimator.cost
    for _ in range(1000):
        estimator.observe(8, 8 * 3000.0, 0.2)
    assert estimator.cost == before


@pytest.mark.parametrize("factor", [10.0, 3.0, 0.3, 0.1])
def test_a_sudden_change_of_speed_is_known_twelve_steps_later(factor: float):
    rng = random.Random(4)
    other = PrefillCost(TRUE.t0_s * factor, TRUE.a_s * factor, TRUE.b_s * factor)
    estimator = fed(mixed_steps(rng, 90))
    for step in mixed_steps(rng, 12, other):
        estimator.observe(*step)
    assert worst_error(estimator, other, CASES[:4]) < 0.35


def test_one_odd_step_changes_next_to_nothing():
    estimator = fed(mixed_steps(random.Random(5), 40))
    tokens, pairs, seconds = step_of([(2048, 0)])
    estimator.observe(tokens, pairs, seconds * 50)
    assert worst_error(estimator, TRUE, CASES) < 0.05


def test_a_long_prompt_after_short_ones_is_no_change_of_speed():
    """Its chunks are all dearer than a model without b says; with b one model explains both."""
    estimator = fed([step_of([(256, 0)]), step_of([(512, 0)])] * 20)
    for chunk in range(40):
        estimator.observe(*step_of([(512, 512 * chunk + 20_000)]))
    assert worst_error(estimator, TRUE, [(256, 0), (512, 0), (512, 30_000)]) < 0.1


def test_a_smoothed_value_moves_little_at_once_and_all_the_way_in_four():
    smoothed = Smoothed(1.0)
    for _ in range(20):
        smoothed.observe(1.0)
    smoothed.observe(1000.0)
    assert smoothed.value == pytest.approx(1.6)
    for _ in range(20):
        smoothed.observe(1.0)
    for sample, low, high in ((10.0, 7.5, 10.0), (0.1, 0.1, 0.15)):
        other = Smoothed(1.0)
        for _ in range(20):
            other.observe(1.0)
        for _ in range(4):
            other.observe(sample)
        assert other.value is not None
        assert low <= other.value <= high


def test_copies_are_bytes_over_seconds():
    speed = CopySpeed()
    assert speed.cost is None
    speed.observe(1000, 1.0)
    speed.observe(1 << 30, 0.0)
    assert speed.cost is None, "too small, or of no length"
    for _ in range(5):
        speed.observe(100_000_000, 0.01)
    assert speed.cost == pytest.approx(LoadCost(0.0, 1e10))


def test_predictions_are_judged_by_ratio_and_by_sum():
    log = PredictionLog()
    assert log.ratio == 1.0
    for _ in range(30):
        log.observe(1.0, 2.0)
    log.observe(0.0, 5.0)
    log.observe(1.0, 1.1)
    assert (log.num, log.num_close) == (31, 1)
    assert log.actual_s / log.predicted_s == pytest.approx(61.1 / 31)
    assert 1.5 < log.ratio < 2.0
