"""Choosing tokens: exact at the edges, right on average, the same every time."""

import numpy as np
import pytest
import torch

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.sampler import SampleSpec, SamplingParams, sample

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.2, 0.25, 0.05]))


def draws(params: SamplingParams, count: int = 2000) -> list[int]:
    rows = LOGITS.expand(count, -1)
    return [token.token_id for token in sample(rows, [SampleSpec(params, position) for position in range(count)])]


def test_greedy_takes_the_best_and_reports_the_gap():
    (token,) = sample(torch.tensor([[1.0, 5.0, 4.5, -2.0]]), [SampleSpec(SamplingParams(), 0)])

    assert token[:2] == (1, 0.5)


def test_frequencies_follow_the_probabilities():
    counts = np.bincount(draws(SamplingParams(temperature=1.0, seed=7)), minlength=5) / 2000

    assert np.abs(counts - LOGITS.exp().numpy()).max() < 0.04


def test_temperature_sharpens():
    cold = np.bincount(draws(SamplingParams(temperature=0.5, seed=7)), minlength=5) / 2000
    expected = LOGITS.exp() ** 2 / (LOGITS.exp() ** 2).sum()

    assert np.abs(cold - expected.numpy()).max() < 0.04


@pytest.mark.parametrize("temperature", [1e-6, 1e-307, 5e-324])
def test_the_least_temperatures_are_greedy(temperature):
    assert set(draws(SamplingParams(temperature=temperature, seed=7), 20)) == {1}


@pytest.mark.parametrize(
    ("k", "kept"), [(1, {1}), (2, {1, 3}), (3, {1, 3, 2}), (0, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})]
)
def test_top_k_keeps_the_k_best(k, kept):
    assert set(draws(SamplingParams(temperature=1.0, top_k=k, seed=1))) == kept


@pytest.mark.parametrize(
    ("p", "kept"), [(0.01, {1}), (0.39, {1}), (0.6, {1, 3}), (0.66, {1, 2, 3}), (1.0, {0, 1, 2, 3, 4})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p, kept):
    assert set(draws(SamplingParams(temperature=1.0, top_p=p, seed=1))) == kept


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch():
    params = SamplingParams(temperature=1.0, seed=3)
    together = draws(params, 50)

    alone = [sample(LOGITS[None], [SampleSpec(params, position)])[0].token_id for position in range(50)]

    assert alone == together
    assert draws(SamplingParams(temperature=1.0, seed=4), 50) != together


def test_params_without_a_seed_get_one_that_repeats_them():
    first, second = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0)

    assert first.seed != second.seed
    assert draws(SamplingParams(temperature=1.0, seed=first.seed), 20) == draws(first, 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 1 << 64),
        ("max_tokens", 0),
    ],
)
def test_a_parameter_out_of_range_is_a_config_error_that_names_it(field, value):
    with pytest.raises(ConfigError, match=f"{field}: {value} is out of range") as caught:
        SamplingParams(**{field: value})

    assert caught.value.fields["field"] == field
