"""The queue's limit, and when those that it turns away are told to come back."""

import math
from collections import Counter

import pytest

from kvstore.core.errors import Overloaded
from kvstore.engine_connector.engine.admission import (
    FIRST_SECONDS_EACH,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    Admission,
    QueueFull,
)


def refusal(admission: Admission, now_s: float) -> float:
    with pytest.raises(QueueFull) as caught:
        admission.check(admission.max_waiting, now_s)
    return caught.value.fields["retry_after_s"]


def test_a_full_queue_is_an_overload_that_names_its_limit():
    admission = Admission(2)
    admission.check(1, 0.0)

    with pytest.raises(Overloaded, match="max_waiting: 2 requests wait already; try again in 1 s") as caught:
        admission.check(2, 0.0)

    assert caught.value.fields == {"limit": "max_waiting", "value": 2, "retry_after_s": MIN_RETRY_AFTER_S}
    assert caught.value.retryable
    assert admission.num_refused == 1


def test_those_turned_away_are_told_times_as_far_apart_as_requests_leave_the_queue():
    admission = Admission(8)
    for second in range(0, 40, 4):
        admission.observe(8, 1, float(second))

    assert [refusal(admission, 36.0) for _ in range(3)] == pytest.approx([3.5, 7.0, 10.5], rel=0.2)


def test_the_estimate_grows_while_nothing_leaves_up_to_a_limit():
    admission = Admission(4)
    admission.observe(4, 1, 0.0)

    times = [refusal(admission, now_s) for now_s in (10.0, 30.0, 500.0)]

    assert times[0] < times[1] <= times[2] == MAX_RETRY_AFTER_S


def test_the_first_of_an_unknown_engine_is_told_the_least():
    assert refusal(Admission(1), 1e6) == MIN_RETRY_AFTER_S


def test_a_first_burst_is_told_to_come_back_over_a_while():
    admission = Admission(8)

    times = [refusal(admission, 5.0) for _ in range(100)]

    assert times == sorted(times)
    assert Counter(math.ceil(time_s) for time_s in times).most_common(1)[0][1] <= 11
    assert times[-1] == pytest.approx(MIN_RETRY_AFTER_S + 99 * FIRST_SECONDS_EACH)


def test_a_new_burst_is_told_what_the_last_one_taught():
    admission = Admission(8)
    for second in range(0, 40, 4):
        admission.observe(8, 1, float(second))
    admission.observe(0, 8, 40.0)

    assert [refusal(admission, 100.0) for _ in range(3)] == pytest.approx([4.0, 8.0, 12.0], rel=0.2)


def test_those_beyond_the_limit_are_not_all_told_the_same():
    """A queue that moves once in 59 s, and 200 that are turned away."""
    admission = Admission(4)
    admission.observe(4, 1, 0.0)

    times = [refusal(admission, 59.0) for _ in range(200)]

    assert MAX_RETRY_AFTER_S / 2 <= min(times) < max(times) <= MAX_RETRY_AFTER_S
    assert Counter(math.ceil(time_s) for time_s in times).most_common(1)[0][1] <= 8


def test_an_idle_hour_says_nothing_about_the_rate():
    admission = Admission(4)
    admission.observe(4, 2, 0.0)
    admission.observe(0, 2, 1.0)
    admission.observe(4, 0, 3600.0)
    admission.observe(4, 1, 3602.0)

    assert refusal(admission, 3602.0) == pytest.approx(2.0)
