"""Match with a wish, Report and Explain, through the dispatcher and without a socket."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from small_spill import SmallSpill
from small_store import PAGE

from kvstore.core.blocks import Holder
from kvstore.core.clock import ManualClock
from kvstore.core.errors import RemoteProtocolError, UnknownLease
from kvstore.core.limits import LOAD_SETTLE_S, MAX_PREFILL_SAMPLES, MAX_REQUEST_ID_BYTES
from kvstore.core.moves import Move, Urgency
from kvstore.dispatcher import Dispatcher
from kvstore.metrics import StatsCollector
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Peer, Session, Sessions
from kvstore.transport.frames import Verb

INSTANCE = b"engine one......"


class ArenaOfSmall:
    nbytes = segment_bytes = faulted_nbytes = 16 * PAGE


class House:
    """A store of pages with a drive, its dispatcher, and an engine's session. Blocks `names` lie on the drive."""

    def __init__(self, names: list[str], loop: asyncio.AbstractEventLoop) -> None:
        self.small = SmallSpill(restored=names, drives=(4,))
        self.clock = ManualClock()
        self.sessions = Sessions(self.small.store, loop=loop, clock=self.clock)
        self.dispatcher = Dispatcher(
            store=self.small.store,
            sessions=self.sessions,
            arena=ArenaOfSmall(),
            boot_id=bytes(16),
            clock=self.clock,
        )
        self.keys = b"".join(self.small.keys(names))
        self.engine = self.session(INSTANCE, pb.BOTH)

    def session(self, instance: bytes, role: int, *, trusted: bool = True) -> Session:
        return Session(
            session_id=1,
            holder=Holder(instance, 1),
            tenant="",
            role=role,
            rank=0,
            namespaces=frozenset() if role == pb.TOOL else frozenset({self.small.namespace}),
            has_arena=True,
            has_slab=False,
            cuda_registered=False,
            peer=Peer(0, None, local=True, trusted=trusted, close=lambda _: None),
        )

    def call(self, verb: Verb, request: Any, session: Session | None = None) -> Any:
        reply = self.dispatcher.call(session or self.engine, verb, request)
        self.small.store.check()
        self.dispatcher.usage.check()
        return reply

    def match(self, **wish: Any) -> pb.MatchReply:
        wish = {"request_id": "r", "num_tokens": 16 * 41, "chunk_tokens": 64} | wish
        request = pb.MatchRequest(namespace=self.small.namespace, keys=self.keys, wish=pb.PlanWish(**wish))
        reply: pb.MatchReply = self.call(Verb.MATCH, request)
        return reply

    def report(self, steps: list[tuple[float, float, float]], **fields: Any) -> None:
        packed = np.array(steps, "<f8").tobytes()
        self.call(Verb.REPORT, pb.ReportRequest(namespace=self.small.namespace, prefill=packed, **fields))

    def compute_at(self, token_s: float) -> None:
        self.report([(64.0, 64.0 * n, 64.0 * token_s) for n in range(1, 30)])

    def explain(self, **fields: Any) -> list[pb.PlanRecord]:
        return list(self.call(Verb.EXPLAIN, pb.ExplainRequest(**fields)).plans)

    def acquire(self, plan_id: int, num_blocks: int, *, order: int = pb.FRONT) -> pb.AcquireReply:
        keys = self.keys[: 16 * num_blocks]
        request = pb.AcquireRequest(
            request_id=f"a{plan_id}",
            namespace=self.small.namespace,
            keys=keys,
            plan_id=plan_id,
            order=order,  # type: ignore[arg-type]
        )
        reply: pb.AcquireReply = self.call(Verb.ACQUIRE, request)
        return reply

    def arrive(self, seconds: float) -> list[Move]:
        moves = self.small.orders(self.clock.now_s())
        self.clock.advance(seconds)
        self.small.finish(moves, now_s=self.clock.now_s())
        return moves


@pytest.fixture
def house() -> Iterator[House]:
    loop = asyncio.new_event_loop()
    yield House([f"n{i}" for i in range(40)], loop)
    loop.close()


@pytest.mark.parametrize("verb", ["Match", "Match with a wish", "Acquire", "Reserve", "Explain"])
def test_a_request_id_that_is_too_long_is_refused_by_every_verb_that_has_one(house: House, verb: str) -> None:
    fits, longer = "é" * (MAX_REQUEST_ID_BYTES // 2), "é" * (MAX_REQUEST_ID_BYTES // 2) + "e"

    def call(request_id: str) -> None:
        some = {"namespace": house.small.namespace, "keys": house.keys, "request_id": request_id}
        calls: dict[str, Callable[[], object]] = {
            "Match": lambda: house.call(Verb.MATCH, pb.MatchRequest(**some)),
            "Match with a wish": lambda: house.match(request_id=request_id),
            "Acquire": lambda: house.call(Verb.ACQUIRE, pb.AcquireRequest(**some)),
            "Reserve": lambda: house.call(Verb.RESERVE, pb.ReserveRequest(**some)),
            "Explain": lambda: house.explain(request_id=request_id),
        }
        calls[verb]()

    call(fits)
    with pytest.raises(RemoteProtocolError, match="request_id: 257 bytes"):
        call(longer)


def test_further_groups_of_a_request_are_neither_planned_nor_counted(house: House) -> None:
    some = {"namespace": house.small.namespace, "keys": house.keys, "further_group": True}

    run = house.call(Verb.MATCH, pb.MatchRequest(**some))
    each = house.call(Verb.MATCH, pb.MatchRequest(**some, each=True))
    lease = house.call(Verb.ACQUIRE, pb.AcquireRequest(request_id="a", **some))
    house.call(Verb.RELEASE, pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.LOADED, num_loaded=40))

    assert (run.num_blocks, each.num_blocks, lease.num_blocks) == (40, 40, 40)
    assert each.tiers == bytes([1]) * 40
    assert house.dispatcher.usage.total.num_requests == house.dispatcher.usage.num_open == 0
    assert house.explain() == []


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"each": True}, "each"),
        ({"further_group": True, "wish": pb.PlanWish(request_id="r", num_tokens=16 * 41)}, "wish"),
    ],
)
def test_what_only_one_group_of_a_request_may_ask_is_refused(house: House, fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        house.call(Verb.MATCH, pb.MatchRequest(namespace=house.small.namespace, keys=house.keys, **fields))
    assert caught.value.fields["field"] == wrong


def test_a_match_without_a_wish_plans_nothing(house: House) -> None:
    reply = house.call(Verb.MATCH, pb.MatchRequest(namespace=house.small.namespace, keys=house.keys))
    assert (reply.num_blocks, reply.HasField("plan")) == (40, False)
    assert house.explain() == []


def test_everything_is_fetched_while_nobody_knows_what_computing_costs(house: House) -> None:
    plan = house.match().plan
    assert (plan.num_blocks, plan.both_ends) == (40, False)


def test_a_slow_engine_fetches_and_a_fast_one_computes(house: House) -> None:
    house.small.store.set_tier_speed(0.001, 1e6)  # a page takes 4 ms
    house.compute_at(0.01)
    assert house.match().plan.num_blocks == 40
    house.compute_at(0.00001)
    house.compute_at(0.00001)
    house.compute_at(0.00001)
    house.compute_at(0.00001)
    plan = house.match().plan
    assert plan.num_blocks == 0
    assert plan.total_s == plan.recompute_s


def test_both_ends_are_used_where_the_engine_can_and_it_is_worth_it(house: House) -> None:
    house.small.store.set_tier_speed(0.001, 1e6)
    house.compute_at(0.0003)
    plan = house.match(both_ends=True).plan
    assert (plan.num_blocks, plan.both_ends) == (40, True)
    assert 0 < plan.front_blocks <= 40
    assert plan.total_s < min(plan.fetch_s, plan.recompute_s)


def test_what_became_of_a_plan_is_told_in_words_and_counted(house: House) -> None:
    house.small.store.set_tier_speed(0.001, 1e6)
    house.compute_at(0.01)
    plan = house.match(first_needed=0).plan
    lease = house.acquire(plan.plan_id, plan.num_blocks)
    assert house.explain()[0].outcome == "fetching"
    house.arrive(0.2)
    release = pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.LOADED, num_loaded=40, seconds=0.2)
    house.call(Verb.RELEASE, release)

    (record,) = house.explain(request_id="r")
    assert (record.outcome, record.num_loaded, record.actual_s) == ("loaded", 40, 0.2)
    assert [(share.tier, share.num_blocks, share.usable) for share in record.tiers] == [("nvme", 40, True)]
    for part in ("40 blocks", "nvme", "Fetch 40", "Loaded: 40 blocks in 0.200 s"):
        assert part in record.words
    seconds = house.dispatcher.stats().seconds
    assert seconds["actual_fetch"] == 0.2
    assert seconds["predicted_fetch"] == pytest.approx(plan.fetch_s)
    assert seconds["saved_prefill"] == pytest.approx(640 * 0.01, rel=0.1)
    shown = {family.name for family in StatsCollector(house.dispatcher.stats).collect()}
    assert {"kvstore_saved_prefill_seconds", "kvstore_predicted_fetch_seconds"} <= shown


def test_a_lease_given_back_early_cancels_what_was_ordered_and_says_so(house: House) -> None:
    plan = house.match().plan
    lease = house.acquire(plan.plan_id, 40, order=pb.BACK)
    moves = house.small.orders()
    house.small.finish(moves[:10])
    house.call(Verb.RELEASE, pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.FAILED, num_loaded=10, seconds=1))
    assert len(house.small.store.take_orders(0.0).cancels) == 30
    assert house.explain()[0].outcome == "partly"


def test_a_stalled_drive_is_not_chosen_and_explained(house: House) -> None:
    house.compute_at(0.01)
    plan = house.match().plan
    house.acquire(plan.plan_id, 40)
    house.small.orders(house.clock.now_s())
    house.clock.advance(5.0)
    assert house.match(request_id="later").plan.num_blocks == 0
    (record,) = house.explain(request_id="later")
    assert "nvme does not answer" in record.words
    assert [share.usable for share in record.tiers] == [False]
    assert record.outcome == "recompute"


def test_a_tier_that_was_declined_is_tried_now_and_then_on_a_few_blocks(house: House) -> None:
    house.small.store.set_tier_speed(0.001, 1e4)  # it is believed to be hopeless
    house.compute_at(0.0003)
    assert house.match().plan.num_blocks == 0
    assert {move.urgency for move in house.arrive(0.001)} == {Urgency.PREFETCH}
    assert house.match().plan.num_blocks == 40  # they are in RAM now


def test_a_new_engine_begins_with_what_another_of_its_kind_measured(house: House) -> None:
    house.small.store.set_tier_speed(0.001, 1e4)
    house.compute_at(0.00001)
    other = house.session(b"engine two......", pb.BOTH)
    wish = pb.PlanWish(request_id="o", num_tokens=641)
    request = pb.MatchRequest(namespace=house.small.namespace, keys=house.keys, wish=wish)
    assert house.call(Verb.MATCH, request, other).plan.num_blocks == 0


def test_a_block_is_worth_what_its_prefill_was_measured_to_cost(house: House) -> None:
    advisor = house.dispatcher.advisor
    assert advisor.block_value(house.small.namespace, 0, 16, PAGE) is None
    house.report([(64.0, 64.0 * n, 0.01 + 64.0 * 0.001 + 64.0 * n * 1e-6) for n in range(1, 3000, 100)])
    first, late = (advisor.block_value(house.small.namespace, position, 16, PAGE) for position in (0, 100_000))
    assert first == pytest.approx(16 * 0.001 / PAGE, rel=0.3)
    assert late == pytest.approx(16 * (0.001 + 0.1) / PAGE, rel=0.3)
    assert advisor.block_value(house.small.namespace, 0, 16, PAGE, 0.5) == first / 2


def test_plans_are_explained_to_their_namespace_and_to_trusted_tools_only(house: House) -> None:
    house.match()
    stranger = house.session(b"a stranger......", pb.BOTH)
    stranger.namespaces = frozenset()
    assert not house.call(Verb.EXPLAIN, pb.ExplainRequest(), stranger).plans
    assert not house.call(Verb.EXPLAIN, pb.ExplainRequest(), house.session(b"", pb.TOOL, trusted=False)).plans
    assert len(house.call(Verb.EXPLAIN, pb.ExplainRequest(), house.session(b"", pb.TOOL)).plans) == 1


def test_the_last_ones_come_first(house: House) -> None:
    for name in ("a", "b", "a", "c"):
        house.match(request_id=name)
    assert [record.request_id for record in house.explain(last=3)] == ["c", "a", "b"]
    assert len(house.explain(request_id="a")) == 2


@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"request_id": ""}, "wish.request_id"),
        ({"request_id": "x" * 300}, "wish.request_id"),
        ({"first_needed": 41}, "wish.first_needed"),
        ({"num_tokens": 0}, "wish.num_tokens"),
        ({"num_tokens": 1 << 40}, "wish.num_tokens"),
        ({"compute_wait_s": float("nan")}, "wish.compute_wait_s"),
        ({"compute_price": -1.0}, "wish.compute_price"),
        ({"deadline_s": float("inf")}, "wish.deadline_s"),
    ],
)
def test_a_wish_that_means_nothing_is_refused_by_its_field(house: House, wish: dict[str, Any], field: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        house.match(**wish)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    "steps",
    [
        [(1.0, 1.0, float("nan"))],
        [(1.0, 1.0, 0.0)],
        [(-1.0, 1.0, 1.0)],
        [(1.0, 1.0, 1.0)] * (MAX_PREFILL_SAMPLES + 1),
        [(1.0, 1.0)],
    ],
)
def test_a_report_that_means_nothing_is_refused(house: House, steps: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="prefill"):
        house.report(steps)


def test_tools_have_no_wishes_and_report_nothing(house: House) -> None:
    tool = house.session(b"", pb.TOOL)
    wish = pb.MatchRequest(
        namespace=house.small.namespace, keys=house.keys, wish=pb.PlanWish(request_id="r", num_tokens=9)
    )
    with pytest.raises(RemoteProtocolError, match="instance"):
        house.call(Verb.MATCH, wish, tool)
    with pytest.raises(RemoteProtocolError, match="instance"):
        house.call(Verb.REPORT, pb.ReportRequest(namespace=house.small.namespace), tool)


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({"steps": [(1e308, 1e308, 1.0)]}, "prefill"),
        ({"steps": [(100.0, 1e308, 1.0)]}, "prefill"),
        ({"steps": [(100.0, 5e3, 5e-324)]}, "prefill"),
        ({"steps": [(100.0, 5e3, 1e308)]}, "prefill"),
        ({"steps": [], "copy_bytes": 1 << 63, "copy_s": 5e-324}, "copy_s"),
        ({"steps": [], "copy_bytes": 1 << 63, "copy_s": 1e308}, "copy_s"),
    ],
)
def test_a_report_of_what_no_clock_can_have_measured_spoils_no_plan(
    house: House, report: dict[str, Any], field: str
) -> None:
    house.compute_at(0.01)
    before = house.match().plan
    with pytest.raises(RemoteProtocolError) as caught:
        house.report(**report)
    assert caught.value.fields["field"] == field
    after = house.match().plan
    assert (after.num_blocks, after.total_s) == (before.num_blocks, before.total_s)


def test_the_most_and_the_least_that_may_be_reported_leave_plans_that_are_numbers(house: House) -> None:
    house.report([(float(1 << 24), float(1 << 48), 1e-9)] * 10, copy_bytes=(1 << 64) - 1, copy_s=1e-9)
    house.report([(1.0, 1e-300, 1e9), (1.0, float(1 << 24), 1e9), (1e6, 1.0, 1e9)] * 10, copy_bytes=1 << 20, copy_s=1e9)
    wish = {"compute_wait_s": 1e9, "compute_price": 1e9, "deadline_s": 1e9}
    plan = house.match(both_ends=True, **wish).plan
    assert np.isfinite([plan.fetch_s, plan.recompute_s, plan.total_s, plan.deadline_s]).all()


def test_a_plan_that_is_carried_out_twice_is_counted_once_and_keeps_no_leases(house: House) -> None:
    plan = house.match().plan
    leases = []
    for i in range(100):
        request = pb.AcquireRequest(
            request_id=f"x{i}", namespace=house.small.namespace, keys=house.keys[:160], plan_id=plan.plan_id
        )
        leases.append(house.call(Verb.ACQUIRE, request).lease_id)
        house.dispatcher.advisor.check()
    house.arrive(0.2)
    for lease_id in leases:
        house.call(Verb.RELEASE, pb.ReleaseRequest(lease_id=lease_id, outcome=pb.LOADED, num_loaded=10, seconds=0.2))
        house.dispatcher.advisor.check()
    assert house.explain()[0].outcome == "loaded"


def test_nobody_else_tells_how_a_load_ended(house: House) -> None:
    house.compute_at(0.01)
    plan = house.match().plan
    lease = house.acquire(plan.plan_id, 10)
    release = pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.LOADED, num_loaded=10, seconds=0.2)
    with pytest.raises(UnknownLease):
        house.call(Verb.RELEASE, release, house.session(b"engine two......", pb.BOTH))
    assert house.explain()[0].outcome == "fetching"
    assert house.dispatcher.advisor.seconds["saved_prefill"] == 0.0
    house.call(Verb.RELEASE, release)
    assert house.explain()[0].outcome == "loaded"


def test_no_more_is_loaded_than_was_planned(house: House) -> None:
    house.compute_at(0.01)
    plan = house.match().plan
    lease = house.acquire(plan.plan_id, plan.num_blocks)
    house.arrive(0.2)
    release = pb.ReleaseRequest(lease_id=lease.lease_id, outcome=pb.LOADED, num_loaded=1 << 31, seconds=0.2)
    house.call(Verb.RELEASE, release)
    (record,) = house.explain()
    assert record.num_loaded == plan.num_blocks
    assert "the engine: 0" in record.words
    assert house.dispatcher.advisor.seconds["saved_prefill"] == pytest.approx(plan.num_blocks * 16 * 0.01)


def test_a_load_whose_end_is_never_told_is_not_on_its_way_for_ever(house: House) -> None:
    house.acquire(house.match().plan.plan_id, 10)
    house.clock.advance(LOAD_SETTLE_S - 1)
    assert house.explain()[0].outcome == "fetching"
    house.clock.advance(1)
    assert house.explain()[0].outcome == "unknown"
    house.dispatcher.advisor.check()
