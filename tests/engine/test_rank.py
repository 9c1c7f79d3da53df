"""Who goes first: priority, then age; the first in rank always finishes, and nobody starves."""

import pytest
from test_engine_scheduler import Driver, shares

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sequence import AGEING_S


def urgent(priority: int) -> RequestOptions:
    return RequestOptions(priority=priority)


def order_of_first_chunks(driver: Driver) -> list[str]:
    started: list[str] = []
    while driver.scheduler.has_unfinished:
        started += [share.sequence.request_id for share in driver.step().chunks]
    return started


def test_lower_priorities_go_first_then_older_requests():
    driver = Driver(max_batch=1)
    for priority in (1, 0, 2, 0, -1):
        driver.add(5, urgent(priority), max_tokens=2)

    assert order_of_first_chunks(driver) == ["r4", "r1", "r3", "r0", "r2"]


def test_a_request_is_passed_only_by_better_ones_that_come_within_the_ageing_time():
    """A stream of better requests that never ends: the other one's turn comes all the same."""
    driver = Driver(max_batch=1)
    driver.add(5, urgent(2), max_tokens=2)
    order: list[str] = []
    while "r0" not in order:
        assert len(order) < 1000, "starved"
        driver.add(5, urgent(0), max_tokens=2)  # one a second, and one a second is what the engine can do
        driver.now_s += 1.0
        order += [share.sequence.request_id for _ in range(2) for share in driver.step().chunks]

    assert len(order) - 1 == 2 * AGEING_S


def test_the_last_in_rank_is_preempted_though_it_is_older():
    driver = Driver(num_pages=4)
    driver.add(7, urgent(1)), driver.add(7, urgent(0))
    driver.step()
    driver.step()

    step = driver.step()  # token 9 of the better one needs a page

    assert step.meta.preempted_request_ids == {"r0"}
    assert shares(step) == [("r1", 8, 9)]


def test_the_first_in_rank_is_never_preempted_and_finishes():
    driver = Driver(num_pages=8, max_batch=6)
    sequences = [driver.add(7, urgent(i % 3), max_tokens=20) for i in range(6)]
    while driver.scheduler.has_unfinished:
        first = min((s for s in sequences if s.finish_reason is None), key=lambda s: s.rank)
        num_before = first.counts.preemptions
        driver.step()
        assert first.counts.preemptions == num_before

    assert sum(sequence.counts.preemptions for sequence in sequences) > 3
    assert all(len(sequence.output_ids) == 20 for sequence in sequences)


@pytest.mark.parametrize("priority", [-1001, 1001])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(ConfigError, match=f"priority: {priority} is out of range; use -1000 to 1000"):
        urgent(priority)


def test_an_unknown_load_failure_policy_is_refused():
    with pytest.raises(ConfigError, match="load_failure: 'retry' is not known; use recompute or fail"):
        RequestOptions(load_failure="retry")


def test_every_decode_is_in_every_step_and_a_step_has_at_most_one_chunk_of_prefill():
    driver = Driver(num_pages=400, max_batch=8)
    driver.add(3, max_tokens=60), driver.add(9, max_tokens=60)
    driver.step()
    for i in range(20):
        driver.add(40 + 7 * i, urgent(i % 3), max_tokens=3)

    while driver.scheduler.has_unfinished:
        ready = {s.request_id for s in driver.scheduler._running if s.num_computed_tokens == s.num_tokens - 1}
        step = driver.step()
        assert ready <= {share.sequence.request_id for share in step.decodes}
        assert sum(share.num_tokens for share in step.chunks) <= 16
