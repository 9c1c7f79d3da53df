"""Percentiles, rates, goodput, the output hash."""

import numpy as np
import pytest
from bench_samples import sample
from hypothesis import given
from hypothesis import strategies as st

from kvstore.bench.measures import around, is_good, output_hash, percentile, spread, summarise
from kvstore.bench.sample import Failure, Usage

REFUSED = Failure("refused", "429: full", retry_after_s=2.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 50, 90, 99, 100]))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_percentiles_by_hand() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0, 5.0])

    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.p99, found.max) == pytest.approx(
        (5, 3, 3, 4.6, 4.96, 5)
    )
    assert spread([]) is None


def test_the_times_of_one_request() -> None:
    one = sample(sent_s=0.5, times_s=(1.0, 1.5, 3.0), done_s=3.25, usage=Usage(10, 6, 4), due_s=0.25)

    assert (one.ttft_s, one.itl_s, one.e2e_s, one.lag_s) == (0.5, [0.5, 1.5], 2.75, 0.25)
    assert one.tpot_s == 2.0 / 5  # six tokens came in three chunks


@pytest.mark.parametrize(
    ("times_s", "tokens"),
    [((), 0), ((1.0,), 1), ((1.0,), 4), ((1.0, 2.0), 1)],
    ids=["none", "one", "one chunk", "empty"],
)
def test_an_answer_too_short_for_a_tpot_has_none(times_s: tuple[float, ...], tokens: int) -> None:
    assert sample(times_s=times_s, usage=Usage(10, tokens)).tpot_s is None


def test_without_usage_chunks_count_and_the_asked_length_stands_in() -> None:
    one = sample(usage=None)

    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens) == (12, 3, None)
    assert summarise([one], 1.0, {}).without_usage == 1


def test_a_summary_counts_the_succeeded_for_tokens_and_all_for_failures() -> None:
    samples = [
        sample(0),
        sample(1, usage=Usage(20, 5, None)),
        sample(2, failure=REFUSED),
        sample(3, failure=Failure("broken", "first")),
        sample(4, failure=Failure("broken", "second")),
    ]
    summary = summarise(samples, 4.0, {"ttft": 2.0})

    assert (summary.requests, summary.succeeded, summary.refused) == (5, 2, 1)
    assert summary.failures == {"broken": 2, "refused": 1}
    assert summary.failure_examples == {"broken": "first", "refused": "429: full"}
    assert summary.retry_after_s is not None
    assert summary.retry_after_s.mean == 2.0
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (30, 8, 4)
    assert (summary.requests_per_s, summary.output_tokens_per_s, summary.total_tokens_per_s) == (0.5, 2.0, 9.5)
    assert (summary.good, summary.goodput_per_s) == (2, 0.5)


def test_nothing_is_divided_by_a_run_of_no_length() -> None:
    assert summarise([], 0.0, {}).requests_per_s == 0.0


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 1.0, "tpot": 0.5, "itl": 0.5, "e2e": 2.0}, True),
        ({"ttft": 0.99}, False),
        ({"tpot": 0.49}, False),
        ({"itl": 0.49}, False),
        ({"e2e": 1.99}, False),
    ],
)
def test_a_good_request_meets_every_bound(slo: dict[str, float], good: bool) -> None:
    assert is_good(sample(), slo) is good
    assert not is_good(sample(failure=REFUSED), slo)


def test_a_bound_on_what_a_request_does_not_have_is_met() -> None:
    assert is_good(sample(times_s=(1.0,), usage=Usage(1, 1)), {"tpot": 0.001, "itl": 0.001})


def test_the_hash_is_of_the_outputs_in_the_workloads_order() -> None:
    one, other = sample(0, text="x"), sample(1, text="y")

    assert output_hash([one, other]) == output_hash([other, sample(0, text="x", sent_s=9.0, usage=None)])
    for changed in (
        [one, sample(1, text="z")],
        [one, sample(1, text="y", finish_reason="length")],
        [one, sample(1, text="y", failure=REFUSED)],
        [one],
        [sample(0, text="y"), sample(1, text="x")],
        [sample(0, text="xy"), sample(1, text="")],
    ):
        assert output_hash(changed) != output_hash([one, other])


def test_requests_around_an_event_are_in_one_group_each() -> None:
    spans = {"a": (0.0, 1.0), "b": (0.5, 2.0), "c": (1.0, 3.0), "d": (1.5, 3.0), "e": (2.0, 2.5)}
    samples = [sample(i, sent_s=sent, done_s=done) for i, (sent, done) in enumerate(spans.values())]
    skipped = sample(9, sent_s=2.0, done_s=2.0, failure=Failure("skipped", ""))
    groups = around([*samples, skipped], 2.0)

    assert {name: [s.conversation for s in group] for name, group in groups.items()} == {
        "before": [0, 1],
        "during": [2, 3],
        "after": [4],
    }
