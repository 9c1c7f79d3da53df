"""What may be written to the drives: a second's worth at once, a day's worth in any day."""

import pytest

from kvstore.budget import WriteBudget

HOUR_S = 3600.0


def spend_all(budget: WriteBudget, nbytes: int, now_s: float, *, at_most: int = 1000) -> int:
    """How many writes of `nbytes` may begin now."""
    count = 0
    while count < at_most and budget.allows(nbytes, now_s):
        budget.spend(nbytes, now_s)
        count += 1
    return count


def test_without_limits_everything_is_allowed():
    assert spend_all(WriteBudget(), 1 << 40, 0.0) == 1000


def test_the_rate_is_a_second_s_worth_at_once_and_then_what_time_brings():
    budget = WriteBudget(bytes_per_s=100)
    assert spend_all(budget, 10, 5.0) == 10
    assert spend_all(budget, 10, 5.0) == 0
    assert spend_all(budget, 10, 5.5) == 5


def test_idle_time_saves_no_more_than_a_second_s_worth():
    budget = WriteBudget(bytes_per_s=100)
    spend_all(budget, 10, 0.0)
    assert spend_all(budget, 10, 900.0) == 10


def test_a_block_larger_than_a_second_s_worth_passes_and_is_paid_for():
    budget = WriteBudget(bytes_per_s=100)
    assert spend_all(budget, 1000, 0.0) == 1
    assert spend_all(budget, 10, 9.0) == 0
    assert spend_all(budget, 10, 9.5) == 5


def test_asking_alone_costs_nothing():
    budget = WriteBudget(bytes_per_s=100, bytes_per_day=100)
    assert all(budget.allows(100, 0.0) for _ in range(5))


def test_the_day_s_worth_is_never_exceeded():
    budget = WriteBudget(bytes_per_day=100)
    assert spend_all(budget, 30, 0.0) == 3
    assert spend_all(budget, 10, 0.0) == 1
    assert spend_all(budget, 1, 23 * HOUR_S) == 0


@pytest.mark.parametrize("minute", [0, 59])
def test_no_24_hours_see_more_than_a_day_s_worth(minute: int):
    """Hours are counted whole, so it may take up to an hour longer, never less."""
    budget = WriteBudget(bytes_per_day=100)
    written_s = minute * 60.0
    assert spend_all(budget, 10, written_s) == 10

    allowed_s = next(s for s in range(0, 30 * 3600, 60) if s >= written_s and budget.allows(100, float(s)))

    assert 24 * HOUR_S <= allowed_s - written_s <= 25 * HOUR_S


def test_hours_leave_one_by_one():
    budget = WriteBudget(bytes_per_day=100)
    assert spend_all(budget, 60, 0.0) == 1
    assert spend_all(budget, 40, 5 * HOUR_S) == 1
    assert spend_all(budget, 20, 25 * HOUR_S) == 3
    assert spend_all(budget, 20, 29 * HOUR_S) == 0
    assert spend_all(budget, 20, 30 * HOUR_S) == 2


def test_a_restart_forgets_nothing_of_the_day():
    """`written` is by hour of the day's clock; the monotonic clock begins anew."""
    budget = WriteBudget(bytes_per_day=100)
    budget.start({1000: 50, 1010: 20, 900: 999}, wall_offset_s=1012 * HOUR_S)
    assert spend_all(budget, 10, 0.0) == 3
    assert spend_all(budget, 10, 12 * HOUR_S) == 0
    assert spend_all(budget, 10, 13 * HOUR_S) == 5


def test_what_was_given_stays_the_giver_s():
    written = {0: 10}
    budget = WriteBudget(bytes_per_day=100)
    budget.start(written, wall_offset_s=0.0)
    budget.spend(50, 0.0)
    assert written == {0: 10}


def test_hours_that_a_clock_far_ahead_wrote_down_count_for_a_day_and_no_longer():
    budget = WriteBudget(bytes_per_day=100)
    budget.start({1_000_000: 60, 1_000_001: 30}, 0.0)
    assert spend_all(budget, 10, 0.0) == 1, "they may have been written just now"
    assert spend_all(budget, 10, 25 * HOUR_S) == 10
