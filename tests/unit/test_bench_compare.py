"""Two runs side by side."""

import pytest
from bench_samples import sample

from kvstore.bench.compare import Comparison, Difference, compare
from kvstore.bench.measures import summarise
from kvstore.bench.sample import Failure, Sample

BROKEN = Failure("broken", "gone")


def compared(first: list[Sample], second: list[Sample], *, seconds: tuple[float, float] = (1.0, 1.0)) -> Comparison:
    summaries = (summarise(first, seconds[0], {}), summarise(second, seconds[1], {}))
    return compare(first, second, summaries)


def test_equal_answers_are_the_same_in_whatever_order_they_came() -> None:
    samples = [sample(0), sample(1), sample(2)]
    result = compared(samples, samples[::-1])

    assert result.same_outputs
    assert (result.compared, result.unmatched, result.first_difference) == (3, 0, None)


def test_the_first_difference_is_named_with_its_place() -> None:
    first = [sample(0), sample(1, text="the cat sat"), sample(2, text="a")]
    second = [sample(2, text="b"), sample(1, text="the dog"), sample(0)]
    result = compared(first, second)

    assert (result.different, result.compared) == (2, 3)
    assert result.first_difference == Difference("1.0", 4, "cat sat", "dog")


@pytest.mark.parametrize(("other", "position", "rest"), [("the", 3, ""), ("", 0, ""), ("the cat sat on", 11, " on")])
def test_a_longer_or_shorter_answer_differs_at_the_shorter_ones_end(other: str, position: int, rest: str) -> None:
    difference = compared([sample(text="the cat sat")], [sample(text=other)]).first_difference

    assert difference == Difference("0.0", position, "the cat sat"[position:], rest)


def test_another_reason_to_end_is_a_difference() -> None:
    difference = compared([sample(finish_reason="stop")], [sample(finish_reason="length")]).first_difference

    assert difference is not None
    assert (difference.first, difference.second) == ("finish_reason stop", "finish_reason length")


def test_turns_after_a_difference_or_a_failure_do_not_count() -> None:
    """Their prompts carry another history."""
    first = [sample(0, 0), sample(0, 1), sample(1, 0, text="x"), sample(1, 1, text="x"), sample(2, 0), sample(2, 1)]
    second = [sample(0, 0), sample(0, 1), sample(1, 0, text="y"), sample(1, 1, text="y"), sample(2, 0, failure=BROKEN)]
    result = compared(first, second)

    assert (result.compared, result.different, result.unmatched) == (3, 1, 3)


def test_ratios_are_second_over_first_where_both_have_a_figure() -> None:
    slow = [sample(times_s=(2.0, 3.0, 4.0), done_s=4.0)]
    ratios = compared([sample()], slow, seconds=(1.0, 4.0)).ratios

    assert ratios["ttft_s p50"] == ratios["itl_s p99"] == ratios["tpot_s mean"] == ratios["e2e_s p90"] == 2.0
    assert ratios["requests_per_s"] == ratios["output_tokens_per_s"] == 0.25
    assert "goodput_per_s" not in ratios
    assert "ttft_s p50" not in compared([sample()], [sample(failure=BROKEN)]).ratios
