"""The scheduler side follows plans: what it asks with, how much it offers, how long a load may take, which end it begins at, and
what it says of it afterwards."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from engine_side import BLOCK, SPEC, Request, Side, pages
from in_process_sidecar import InProcessSidecar

from kvstore.core.limits import LOAD_DEADLINE_S, MAX_REQUEST_ID_BYTES
from kvstore.core.plans import FetchPlan, MatchWish
from kvstore.engine_connector.protocol import (
    BothEndsScheduler,
    FetchPolicy,
    FilledFrom,
    HandOver,
    LoadTime,
    ScheduledRequest,
    WorkerOutput,
)
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.step_times import REPORT_INTERVAL_S
from kvstore.field_checks import check_request_id
from kvstore.proto.kvstore_pb2 import FAILED, LOADED

PLAN = FetchPlan(
    num_blocks=4,
    both_ends=False,
    front_blocks=0,
    fetch_s=1.0,
    recompute_s=3.0,
    total_s=1.0,
    deadline_s=2.0,
    reason="for a test",
)
BOTH_ENDS = PLAN._replace(both_ends=True, front_blocks=1, fetch_s=2.0)


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar()


@pytest.fixture
def a(sidecar: InProcessSidecar) -> Iterator[Side]:
    """It has stored four blocks of family 0."""
    side = Side(sidecar, b"a")
    side.store(Request("stored", 4))
    yield side
    side.side.close()


@pytest.fixture
def b(a: Side, sidecar: InProcessSidecar) -> Iterator[Side]:
    side = Side(sidecar, b"b")
    yield side
    side.side.close()


def with_policy(side: Side, fetch: FetchPolicy, **settings: object) -> Side:
    side.side = StoreSchedulerSide(side.session, block_tokens=BLOCK, clock=side.sidecar.clock, fetch=fetch, **settings)
    return side


def begin(side: Side, request: Request, num_blocks: int) -> None:
    side.side.update_state_after_alloc(request, pages(request), num_blocks * BLOCK)


def take_prefill(side: Side, *request_ids: str) -> None:
    """A step that computes these."""
    shares = [
        ScheduledRequest(Request(request_id, 0, 4, family=7), pages(Request("r", 1)), 0, 4)
        for request_id in request_ids
    ]
    meta = side.step(*shares)
    side.report(step=meta.step)


# --- asking -----------------------------------------------------------------------------------------------------------------


def test_the_wish_tells_what_a_plan_needs(b: Side) -> None:
    b.side.use_both_ends(512)

    b.match(Request("r", 6, extra=3), num_computed=1)

    assert b.client.match_wishes == [
        MatchWish("r", 6 * BLOCK + 3, first_needed=1, chunk_tokens=512, both_ends=True, deadline_s=LOAD_DEADLINE_S)
    ]


def test_a_request_id_of_any_length_is_cut_to_what_the_wire_takes_and_two_stay_two(b: Side) -> None:
    ids = ["x" * MAX_REQUEST_ID_BYTES, "x" * 100_000, "x" * 100_000 + "y", "é" * MAX_REQUEST_ID_BYTES, "\ud800"]

    for request_id in ids:
        b.match(Request(request_id, 4))

    sent = [wish.request_id for wish in b.client.match_wishes if wish]
    assert b.client.match_names == sent
    assert sent[0] == ids[0]
    assert len(set(sent)) == len(ids)
    for each in sent:
        check_request_id(each)


def test_an_engine_that_fills_from_one_end_says_so(b: Side) -> None:
    with_policy(b, FetchPolicy.PLANNED, chunk_tokens=2048).match(Request("r", 4))

    (wish,) = b.client.match_wishes
    assert (wish.chunk_tokens, wish.both_ends) == (2048, False)


@pytest.mark.parametrize(("num_others", "price"), [(0, 0.0), (1, 0.25), (4, 1.0), (40, 3.0)])
def test_computing_costs_more_the_more_others_there_are(b: Side, num_others: int, price: float) -> None:
    take_prefill(b, "r", *(f"other {i}" for i in range(num_others)))

    b.match(Request("r", 4))

    assert b.client.match_wishes[-1].compute_price == price


def test_always_asks_for_no_plan_and_offers_all(b: Side) -> None:
    b.client.plan = PLAN._replace(num_blocks=0)

    assert with_policy(b, FetchPolicy.ALWAYS).match(Request("r", 4)) == 4
    assert b.client.match_wishes == [None]


def test_never_asks_nothing_and_still_saves_for_others(b: Side, a: Side) -> None:
    with_policy(b, FetchPolicy.NEVER)
    other = Request("other", 3, family=1)

    assert b.match(Request("r", 4)) == 0
    assert b.client.match_wishes == []
    b.report_saved(*b.fill(other, 0, 3))
    assert a.match(other) == 3


# --- offering ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", range(5))
def test_as_much_is_offered_as_was_planned(b: Side, num_blocks: int) -> None:
    b.client.plan = PLAN._replace(num_blocks=num_blocks)

    assert b.match(Request("r", 6)) == num_blocks


def test_a_plan_begins_behind_what_the_engine_has(b: Side) -> None:
    request = Request("r", 6)
    b.client.plan = PLAN._replace(num_blocks=2)

    assert b.match(request, num_computed=1) == 2
    begin(b, request, 2)

    (job,) = b.step().loads
    assert [move.block_id for move in job.moves] == [101, 102]
    assert b.client.acquired == [(False, 1)]


def test_a_store_that_does_not_plan_is_followed_as_ever(b: Side) -> None:
    request = Request("r", 4)

    assert b.match(request) == 4
    begin(b, request, 4)

    (job,) = b.step().loads
    assert job.deadline_s == LOAD_DEADLINE_S
    assert b.client.acquired == [(False, 0)]


def test_only_what_is_planned_is_brought_nearer(b: Side) -> None:
    request = Request("r", 4)
    b.client.on_drive = set(request.block_hashes)
    b.client.plan = PLAN._replace(num_blocks=2)
    for _ in range(3):
        b.match(request)
    assert [wish.keys for wish in b.client.wishes] == [request.block_hashes[:2]]

    other = replace(request, request_id="other")
    b.client.plan = PLAN._replace(num_blocks=0)
    for _ in range(3):
        assert b.match(other) == 0
    assert len(b.client.wishes) == 1


def test_a_prompt_that_is_handed_over_is_not_planned(sidecar: InProcessSidecar) -> None:
    """The planner counts full blocks only; and a load with a tail is never from the back."""
    producer, consumer = (Side(sidecar, name, hand_over=HandOver.BOTH) for name in (b"p", b"c"))
    request = Request("r", 4, extra=5)
    producer.report_saved(*producer.step(ScheduledRequest(request, pages(request), 0, 4 * BLOCK + 5)).saves)
    consumer.side.use_both_ends(64)
    handed = Request("handed", 4, extra=5, num_generated=1)

    assert consumer.side.get_num_new_matched_tokens(handed, 0) == 4 * BLOCK + 5
    assert consumer.client.match_wishes == [None]
    producer.side.close(), consumer.side.close()


# --- loading ----------------------------------------------------------------------------------------------------------------


def test_a_load_takes_no_longer_than_planned(b: Side) -> None:
    """Late blocks are computed, and the request is not offered them again; others are."""
    request, other = Request("r", 4), Request("other", 4)
    b.client.plan = PLAN
    b.match(request)

    job = b.load(request, 4)

    assert job.deadline_s == PLAN.deadline_s
    b.report_loaded(job, failed=3)
    assert b.match(request) == 0
    assert b.match(other) == 4
    assert b.client.released[-1][:2] == (FAILED, 1)


def test_a_release_says_what_was_loaded_in_what_time(b: Side) -> None:
    request = Request("r", 4)
    b.match(request)
    job = b.load(request, 4)

    b.report(finished_loading=frozenset({"r"}), load_times=(LoadTime("q", 9.0), LoadTime("r", 0.75)))

    assert job.moves
    assert b.client.released == [(LOADED, 4, 0.75)]


def test_without_the_workers_word_the_time_is_until_the_report(b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 4)
    b.match(request)
    job = b.load(request, 4)
    sidecar.clock.advance(1.5)

    b.report_loaded(job)

    assert b.client.released == [(LOADED, 4, 1.5)]


# --- both ends --------------------------------------------------------------------------------------------------------------


def test_it_offers_the_verbs(b: Side) -> None:
    assert isinstance(b.side, BothEndsScheduler)


def test_a_plan_for_both_ends_is_read_and_copied_from_the_back(b: Side) -> None:
    request = Request("r", 4)
    b.side.use_both_ends(32)
    b.client.plan = BOTH_ENDS
    assert b.match(request) == 4
    begin(b, request, 4)

    assert b.side.fill_from_back(request)

    (job,) = b.step().loads
    assert b.client.acquired == [(True, 1)]
    assert job.from_back
    assert (job.front_blocks, job.meet_block, job.expected_s) == (4, 1, 1.5), "nobody else wants the engine"
    assert job.deadline_s == LOAD_DEADLINE_S, "a load that is late costs nothing"


def test_where_others_wait_the_front_is_bound_to_the_plan(b: Side) -> None:
    request = Request("r", 4)
    take_prefill(b, "other")
    b.client.plan = BOTH_ENDS
    b.match(request)
    begin(b, request, 4)
    b.side.fill_from_back(request)

    (job,) = b.step().loads
    assert (job.front_blocks, job.meet_block) == (1, 1)


def test_a_plan_for_more_than_was_found_is_cut_to_that(b: Side) -> None:
    b.client.plan = PLAN._replace(num_blocks=1000)
    assert b.match(Request("r", 4)) == 4


@pytest.mark.parametrize("plan", [None, PLAN, BOTH_ENDS], ids=["none", "one end", "too short"])
def test_any_other_load_is_not_filled_from_the_back(b: Side, plan: FetchPlan | None) -> None:
    request = Request("r", 1 if plan is BOTH_ENDS else 4)
    b.client.plan = plan
    num_blocks = b.match(request)
    begin(b, request, num_blocks)

    assert not b.side.fill_from_back(request)
    assert not b.step().loads[0].from_back


def test_blocks_that_went_since_the_match_are_not_filled_from_the_back(b: Side, sidecar: InProcessSidecar) -> None:
    request = Request("r", 4)
    b.client.plan = BOTH_ENDS
    b.match(request)
    sidecar.store.drop(SPEC.namespace(), [request.block_hashes[3]])
    begin(b, request, 4)

    assert not b.side.fill_from_back(request)


def test_nothing_is_saved_of_what_the_front_computes_until_the_load_is_over(b: Side, sidecar: InProcessSidecar) -> None:
    """Then all of it is offered, and what the store has is found held."""
    request = Request("r", 6)
    b.client.plan = BOTH_ENDS
    b.match(request)
    begin(b, request, 4)
    b.side.fill_from_back(request)
    b.step()
    assert b.fill(request, 0, 2) == ()
    b.client.calls.clear()

    b.report(finished_loading=frozenset({"r"}), filled_from=(FilledFrom("r", 2),), load_times=(LoadTime("r", 1.0),))

    assert b.client.released == [(LOADED, 2, 1.0)]
    (save,) = b.fill(request, 4, 6)
    assert [move.block_id for move in save.moves] == [104, 105]
    b.report_saved(save)
    b.side.request_finished(request)
    sidecar.check_no_lease()


def test_a_hole_is_a_failure_and_is_not_offered_again(b: Side) -> None:
    request = Request("r", 4)
    b.client.plan = BOTH_ENDS
    b.match(request)
    begin(b, request, 4)
    b.side.fill_from_back(request)
    b.step()

    b.report(
        finished_loading=frozenset({"r"}),
        filled_from=(FilledFrom("r", 3),),
        failed_block_ids=frozenset({101, 102}),
        load_times=(LoadTime("r", 2.5),),
    )

    assert b.client.released == [(FAILED, 1, 2.5)]
    assert b.match(request) == 0


# --- reporting --------------------------------------------------------------------------------------------------------------


def test_speeds_are_reported_once_a_second(b: Side, sidecar: InProcessSidecar) -> None:
    b.client.plan = PLAN
    b.match(Request("plans", 4))
    b.client.calls.clear()
    for _ in range(5):
        meta = b.step(ScheduledRequest(Request("r", 1, family=3), pages(Request("r", 1)), 8, 6))
        sidecar.clock.advance(REPORT_INTERVAL_S / 2)
        b.report(step=meta.step, load_bytes=100, load_seconds=0.25)

    assert b.client.reports == [(((6.0, 6 * 8 + 18, 0.5),) * 2, 200, 0.5)] * 2
    assert b.client.calls == ["report"] * 2


def test_a_sidecar_that_does_not_plan_is_told_no_speeds(b: Side, sidecar: InProcessSidecar) -> None:
    b.match(Request("r", 4))
    sidecar.clock.advance(REPORT_INTERVAL_S)
    b.report(load_bytes=100, load_seconds=0.25)

    b.step()

    assert b.client.reports == []


def test_a_report_that_gets_lost_is_not_repeated(b: Side, sidecar: InProcessSidecar) -> None:
    b.client.plan = PLAN
    b.match(Request("r", 4))
    sidecar.clock.advance(REPORT_INTERVAL_S)
    b.side.update_connector_output(WorkerOutput(load_bytes=100, load_seconds=0.25))
    sidecar.away = True
    b.step()
    sidecar.away = False
    b.reconnect()
    b.match(Request("s", 4))
    sidecar.clock.advance(REPORT_INTERVAL_S)

    b.step()

    assert b.client.reports == []
