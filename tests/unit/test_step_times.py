"""What steps took, as a scheduler side sees it: from its metadata to its report, also of an engine that runs ahead."""

from dataclasses import dataclass

import pytest

from kvstore.core.clock import ManualClock
from kvstore.engine_connector.protocol import ScheduledRequest, WorkerOutput
from kvstore.engine_connector.step_times import MAX_SAMPLES, REPORT_INTERVAL_S, StepSample, StepTimes


@dataclass
class Named:
    request_id: str


def share(num_tokens: int, num_computed: int = 0, request_id: str = "r") -> ScheduledRequest:
    return ScheduledRequest(Named(request_id), (), num_computed, num_tokens)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def times(clock: ManualClock) -> StepTimes:
    return StepTimes(clock)


def samples(times: StepTimes, clock: ManualClock) -> tuple[StepSample, ...]:
    clock.advance(REPORT_INTERVAL_S)
    report = times.take_due()
    return () if report is None else report.prefill


def test_a_step_is_measured_from_its_metadata_to_its_report(times: StepTimes, clock: ManualClock) -> None:
    step = times.begin([share(100, 400), share(50, 0, "s")])
    clock.advance(0.25)
    times.end(WorkerOutput(step=step))

    assert samples(times, clock) == (StepSample(150, 100 * 400 + 5000 + 1250, 0.25),)


def test_of_an_engine_that_runs_ahead_each_step_begins_when_the_one_before_ended(
    times: StepTimes, clock: ManualClock
) -> None:
    first = times.begin([share(10)])
    clock.advance(0.1)
    second = times.begin([share(20)])
    clock.advance(0.9)
    times.end(WorkerOutput(step=first))
    third = times.begin([share(30)])
    clock.advance(2.0)
    times.end(WorkerOutput(step=second))
    clock.advance(3.0)
    times.end(WorkerOutput(step=third))

    assert [(each.num_tokens, each.seconds) for each in samples(times, clock)] == [(10, 1.0), (20, 2.0), (30, 3.0)]


def test_a_step_that_broke_off_is_no_sample(times: StepTimes, clock: ManualClock) -> None:
    times.begin([share(10)])
    clock.advance(5.0)
    times.end(WorkerOutput())
    step = times.begin([share(20)])
    clock.advance(1.0)
    times.end(WorkerOutput(step=step))

    assert samples(times, clock) == (StepSample(20, 200, 1.0),)


def test_steps_of_decodes_say_nothing_of_prefill(times: StepTimes, clock: ManualClock) -> None:
    decodes = [share(1, 50, f"d{i}") for i in range(3)]
    for scheduled in ([], decodes, [*decodes, share(8)], [*decodes, share(24)]):
        step = times.begin(scheduled)
        clock.advance(1.0)
        times.end(WorkerOutput(step=step))

    assert [each.num_tokens for each in samples(times, clock)] == [27]


def test_nothing_new_is_no_report_and_reports_are_seldom(times: StepTimes, clock: ManualClock) -> None:
    clock.advance(10.0)
    assert times.take_due() is None
    times.end(WorkerOutput(load_bytes=1000, load_seconds=0.5))
    times.end(WorkerOutput(load_bytes=24, load_seconds=0.25))

    report = times.take_due()

    assert report is not None
    assert (report.copy_nbytes, report.copy_s, report.prefill) == (1024, 0.75, ())
    times.end(WorkerOutput(load_bytes=1, load_seconds=0.1))
    assert times.take_due() is None
    clock.advance(REPORT_INTERVAL_S)
    assert times.take_due().copy_nbytes == 1


def test_what_nobody_fetches_is_bounded(times: StepTimes, clock: ManualClock) -> None:
    for _ in range(20):
        times.begin([share(10)])
    for _ in range(2 * MAX_SAMPLES):
        times.end(WorkerOutput(step=times.begin([share(10)])))
    assert len(times._begun) == 0
    assert len(samples(times, clock)) == MAX_SAMPLES


def test_others_are_those_of_the_last_step(times: StepTimes) -> None:
    times.begin([share(1, 5, "a"), share(1, 5, "b"), share(10)])

    assert times.num_others("r") == 2
    assert times.num_others("waiting") == 3
    times.begin([])
    assert times.num_others("r") == 0
