"""What an engine tells of its own pool: what changed, once, in bounded batches, and all of it over each new connection."""

from collections.abc import Iterator

import pytest
from in_process_sidecar import InProcessClient, InProcessSidecar

from kvstore.core.clock import ManualClock
from kvstore.core.keys import KVSpec
from kvstore.core.limits import MAX_REPORTED_BLOCKS, MAX_REPORTED_RUNS, POOL_REPORT_INTERVAL_S
from kvstore.engine_connector.pool_reports import PoolReports
from kvstore.engine_connector.session import StoreSession

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")


def keys(letters: str) -> list[bytes]:
    return [letter.encode() * 16 for letter in letters]


def many(count: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(1, count + 1)]


class Engine:
    """Reports on a connection to a sidecar in this process."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sidecar = InProcessSidecar(clock=self.clock)
        self.client = InProcessClient(self.sidecar, SPEC)
        self.session = StoreSession(self.client, backoff_s=(0.001, 0.01))  # type: ignore[arg-type]
        self.session.start()
        self.reports = PoolReports(self.clock)

    def step(self) -> None:
        self.clock.advance(POOL_REPORT_INTERVAL_S)
        self.reports.send_due(self.session)

    def known(self) -> set[bytes]:
        return {key for _, known in self.sidecar.store.presence.snapshot() for key in known}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.session.close()


def test_what_came_and_went_between_two_reports_is_not_told(engine: Engine) -> None:
    engine.reports.stored(b"", keys("abc"))
    engine.reports.removed(keys("b"))
    engine.step()
    engine.reports.removed(keys("ac"))
    engine.reports.stored(b"", keys("a"))
    engine.step()
    engine.step()

    first, second = engine.client.pool_reports
    assert [list(run.keys) for run in first.stored] == [keys("a"), keys("c")]
    assert (second.cleared, list(second.removed), list(second.stored)) == (False, keys("c"), [])
    assert engine.known() == set(keys("a"))


def test_runs_say_what_they_follow(engine: Engine) -> None:
    engine.reports.num_blocks = 50
    engine.reports.stored(b"", keys("ab"))
    engine.reports.stored(keys("b")[0], keys("c"))
    engine.reports.stored(keys("a")[0], keys("xy"))
    engine.step()

    (report,) = engine.client.pool_reports
    assert [tuple(run) for run in report.stored] == [(b"", keys("abc")), (keys("a")[0], keys("xy"))]
    assert report.num_blocks == 50


def test_reports_are_rare_unless_one_is_wanted_at_once(engine: Engine) -> None:
    engine.reports.stored(b"", keys("a"))
    engine.reports.send_due(engine.session)
    engine.reports.stored(b"", keys("b"))
    engine.reports.send_due(engine.session)
    assert engine.known() == set(keys("a"))

    engine.reports.send_due(engine.session, at_once=True)

    assert engine.known() == set(keys("ab"))


def test_a_large_pool_is_told_in_parts(engine: Engine) -> None:
    engine.reports.stored(b"", many(MAX_REPORTED_BLOCKS + 3))
    for key in keys("abc"):
        engine.reports.stored(b"", [key])
    engine.step()
    engine.step()

    sizes = [[len(run.keys) for run in report.stored] for report in engine.client.pool_reports]
    assert sizes == [[MAX_REPORTED_BLOCKS], [3, 1, 1, 1]]
    assert len(engine.known()) == MAX_REPORTED_BLOCKS + 6


def test_many_short_runs_are_told_in_parts(engine: Engine) -> None:
    for key in many(MAX_REPORTED_RUNS + 1):
        engine.reports.stored(b"", [key])
    engine.step()
    engine.step()

    assert [len(report.stored) for report in engine.client.pool_reports] == [MAX_REPORTED_RUNS, 1]


def test_a_pool_that_was_cleared_is_told_as_that(engine: Engine) -> None:
    engine.reports.stored(b"", keys("abc"))
    engine.step()
    engine.reports.cleared()
    engine.reports.stored(b"", keys("x"))
    engine.step()

    assert [report.cleared for report in engine.client.pool_reports] == [False, True]
    assert engine.known() == set(keys("x"))


def test_all_is_told_anew_to_a_sidecar_that_was_restarted(engine: Engine) -> None:
    engine.reports.stored(b"", keys("abc"))
    engine.step()
    engine.sidecar.restart()
    engine.reports.removed(keys("b"))
    engine.step()  # finds nobody
    _wait_for_another(engine)
    engine.step()

    assert engine.known() == set(keys("ac"))


def test_a_sidecar_that_wants_no_reports_is_not_asked_again(engine: Engine) -> None:
    engine.client.refuses_pools = True
    engine.reports.stored(b"", keys("a"))
    engine.step()
    engine.client.refuses_pools = False
    engine.reports.stored(b"", keys("b"))
    engine.step()

    assert engine.client.pool_reports == []
    assert engine.session.link is not None


def _wait_for_another(engine: Engine) -> None:
    import time

    end_s = time.monotonic() + 5.0
    while engine.session.link is None and time.monotonic() < end_s:
        time.sleep(0.001)
    assert engine.session.link is not None
