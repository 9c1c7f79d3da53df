"""The scheduler side's loads by layers: which load may go so, what its job says, and what becomes of the saves of its step.
R1 and R9 are those of engine_connector/requests.py."""

from collections.abc import Iterator

import pytest
from engine_side import BLOCK, Request, Side, pages
from in_process_sidecar import InProcessSidecar

from kvstore.client import Acquired
from kvstore.engine_connector.protocol import LayerwiseScheduler, ScheduledRequest
from kvstore.engine_connector.scheduler_side import MIN_BLOCKS_BY_LAYERS

ENOUGH = MIN_BLOCKS_BY_LAYERS


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def a(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"a")
    yield side
    side.side.close()


@pytest.fixture
def b(sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"b")
    yield side
    side.side.close()


def allocate(side: Side, request: Request, num_blocks: int) -> None:
    assert side.match(request) >= num_blocks
    side.side.update_state_after_alloc(request, pages(request), num_blocks * BLOCK)


def share(request: Request, first: int, last: int) -> ScheduledRequest:
    return ScheduledRequest(request, pages(request), first * BLOCK, (last - first) * BLOCK)


def test_it_can_what_an_engine_asks_for(a: Side) -> None:
    assert isinstance(a.side, LayerwiseScheduler)


def test_a_load_from_ram_goes_by_layers_if_the_engine_asks(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH)
    allocate(b, request, ENOUGH)

    assert b.side.load_by_layers(request)

    (job,) = b.step().loads
    assert job.by_layers
    assert len(job.moves) == ENOUGH
    b.report_loaded(job)
    assert not b.side.request_finished(request)
    sidecar.check_no_lease()


def test_an_engine_that_does_not_ask_gets_a_load_like_any_other(a: Side, b: Side) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH)
    b.match(request)

    assert not b.load(request, ENOUGH).by_layers


def test_few_blocks_are_not_worth_it(a: Side, b: Side) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH)
    allocate(b, request, ENOUGH - 1)

    assert not b.side.load_by_layers(request)

    assert not b.step().loads[0].by_layers


def test_blocks_that_are_on_their_way_do_not_come_by_layers(a: Side, b: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    a.store(Request("r", ENOUGH))
    request, acquire = Request("r", ENOUGH), b.client.acquire

    def acquire_one_from_a_drive(*args: object, **named: object) -> Acquired:
        grant = acquire(*args, **named)
        return grant._replace(ready=grant.ready[:-1] + b"\0")

    monkeypatch.setattr(b.client, "acquire", acquire_one_from_a_drive)
    allocate(b, request, ENOUGH)

    assert not b.side.load_by_layers(request)


def test_a_load_that_lost_a_block_does_not_go_by_layers(a: Side, b: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    a.store(Request("r", 2 * ENOUGH))
    request, acquire = Request("r", 2 * ENOUGH), b.client.acquire
    monkeypatch.setattr(b.client, "acquire", lambda *args, **named: acquire(*args[:2], args[2][:-1], **named))
    allocate(b, request, 2 * ENOUGH)

    assert not b.side.load_by_layers(request)

    (job,) = b.step().loads
    assert (len(job.moves), len(job.lost_block_ids), job.by_layers) == (2 * ENOUGH - 1, 1, False)


def test_a_store_that_does_not_answer_gives_nothing_by_layers(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH)
    assert b.match(request) == ENOUGH
    sidecar.away = True
    b.side.update_state_after_alloc(request, pages(request), ENOUGH * BLOCK)

    assert not b.side.load_by_layers(request)


def test_blocks_that_the_step_fills_are_saved_with_it(a: Side, b: Side) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH + 2)
    allocate(b, request, ENOUGH)
    assert b.side.load_by_layers(request)

    meta = b.step(share(request, ENOUGH, ENOUGH + 2))

    (save,) = meta.saves
    assert [move.block_id for move in save.moves] == [100 + ENOUGH, 101 + ENOUGH]
    b.report(finished_loading=frozenset({"r"}), finished_saving=((save.job_id, (True, True)),))
    assert a.match(Request("again", ENOUGH + 2)) == ENOUGH + 2


@pytest.mark.parametrize("late", [False, True])
def test_saves_of_a_void_share_are_given_back_and_offered_again(
    a: Side, b: Side, sidecar: InProcessSidecar, late: bool
) -> None:
    """The load failed in that step, or is reported in a later one."""
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH + 2)
    allocate(b, request, ENOUGH)
    assert b.side.load_by_layers(request)
    meta = b.step(share(request, ENOUGH, ENOUGH + 2))
    (job,), (save,) = meta.loads, meta.saves
    if not late:
        b.report_loaded(job, failed=1)
    b.report_saved(save, written=False)
    if late:
        assert b.step().saves == ()
        b.report_loaded(job)

    (again,) = b.step(share(request, ENOUGH, ENOUGH + 2)).saves

    assert [move.block_id for move in again.moves] == [100 + ENOUGH, 101 + ENOUGH]
    b.report_saved(again)
    assert not b.side.request_finished(request)
    sidecar.check_no_lease()
    assert a.match(Request("again", ENOUGH + 2)) == ENOUGH + 2


def test_an_aborted_load_by_layers_is_pending_until_it_is_reported(a: Side, b: Side, sidecar: InProcessSidecar) -> None:
    a.store(Request("r", ENOUGH))
    request = Request("r", ENOUGH)
    allocate(b, request, ENOUGH)
    assert b.side.load_by_layers(request)
    (job,) = b.step().loads

    assert b.side.request_finished(request)

    b.report_loaded(job)
    assert not b.side.has_pending("r")
    sidecar.check_no_lease()
