"""The mover between a store and a tier that only note what they are told: who is told what, when, on which thread."""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from small_store import SEGMENT, SmallStore, spec

from kvstore.core.clock import ManualClock
from kvstore.core.errors import ConfigError, Overloaded
from kvstore.core.keys import KVSpec
from kvstore.core.limits import MAX_REPORTS_PER_TURN, RECENCY_FLUSH_S, RESTORE_SLICE_BLOCKS
from kvstore.core.moves import BlockRecord, Forget, Move, MoveDone, MoveProblem, Touch, Urgency
from kvstore.mover import Mailbox, Mover, NoMover
from kvstore.store import Store
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots
from kvstore.tiers.striped import StripedSlots

DEADLINE_S = 10.0
SPEC = spec()
NAMESPACE = SPEC.namespace("tenant")
FORGET = Forget(NAMESPACE, b"k" * 16, 0, 4096, 7)
TOUCH = Touch(NAMESPACE, b"k" * 16, 0, 5, 2)


def move(move_id: int) -> Move:
    record = BlockRecord(NAMESPACE, move_id.to_bytes(16, "big"), b"", move_id * 4096, 4096, 1, 0, 0, 0)
    return Move(move_id, Urgency.READ, move_id * 4096, record)


class Health(NamedTuple):
    path: str
    state: str
    reason: str
    capacity_bytes: int
    problems: dict[str, int]


class Blocks(NamedTuple):
    tenant: str
    canonical: bytes
    nbytes: int
    keys: list[bytes]
    parents: list[bytes]
    offsets: NDArray[np.int64]
    generations: NDArray[np.uint64]
    checksums: NDArray[np.uint64]
    last_use: NDArray[np.int64]
    hits: NDArray[np.uint32]


class Recovered(NamedTuple):
    namespaces: tuple[Blocks, ...] = ()
    quarantined: tuple[tuple[int, int], ...] = ()
    next_generation: int = 1
    written: dict[int, int] = {}  # noqa: RUF012 - nobody changes it
    waiting: tuple[tuple[int, int], ...] = ()


NOTHING = Recovered()


class Orders(NamedTuple):
    namespaces: tuple[tuple[bytes, str, bytes], ...] = ()
    forgets: tuple[Forget, ...] = ()
    moves: tuple[Move, ...] = ()
    hastens: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()


class Speed(NamedTuple):
    latency_s: float
    bytes_per_s: float


def blocks(count: int) -> Blocks:
    """One sequence of `count` blocks."""
    keys = [number.to_bytes(16, "big") for number in range(count)]
    numbers = np.arange(count)
    return Blocks(
        "tenant",
        SPEC.canonical(),
        SPEC.block_nbytes,
        keys,
        [b"", *keys][:count],
        numbers * 4096,
        numbers.astype(np.uint64),
        numbers.astype(np.uint64),
        numbers,
        numbers.astype(np.uint32),
    )


@dataclass
class NotingStore:
    """Gives out `orders` one after the other."""

    orders: list[Orders] = field(default_factory=list)
    touches: list[list[Touch]] = field(default_factory=list)
    told: list[tuple[object, ...]] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)

    def note(self, *what: object) -> None:
        assert threading.get_ident() == self.thread, "not the loop's thread"
        self.told.append(what)

    def take_orders(self, now_s: float) -> Orders:
        return self.orders.pop(0) if self.orders else Orders()

    def finish_moves(self, done: Sequence[MoveDone], now_s: float) -> None:
        self.note("moves", [each.move_id for each in done])

    def finish_forgets(self, forgets: Sequence[Forget]) -> None:
        self.note("forgets", list(forgets))

    def tick(self, now_s: float) -> None:
        self.note("tick")

    def take_touches(self) -> list[Touch]:
        self.note("touches")
        return self.touches.pop(0) if self.touches else [TOUCH]

    def restore(self, spec: KVSpec, tenant: str, part: Blocks) -> None:
        assert (spec, tenant) == (SPEC, "tenant")
        self.note("restore", part)

    def restore_quarantined(self, offset: int, nbytes: int) -> None:
        self.note("quarantine", offset, nbytes)

    def start_spilling(self, written: dict[int, int], wall_offset_s: float) -> None:
        self.note("start", written, wall_offset_s)

    def set_tier_speed(self, latency_s: float, bytes_per_s: float) -> None:
        self.note("probed", latency_s, bytes_per_s)

    def kinds(self) -> list[object]:
        return [kind for kind, *_ in self.told if kind != "tick"]


@dataclass
class NotingTier:
    """Does nothing. `recovered` may be an error; what it waits for may hang."""

    recovered: Recovered | Exception = NOTHING
    opens: Exception | None = None
    told: list[tuple[object, ...]] = field(default_factory=list)
    may_open: threading.Event = field(default_factory=threading.Event)
    may_recover: threading.Event = field(default_factory=threading.Event)
    may_close: threading.Event = field(default_factory=threading.Event)
    may_probe: threading.Event = field(default_factory=threading.Event)
    speed: Speed | Exception | None = None
    states: tuple[str, ...] = ("ready", "degraded")
    recovers_on: int = 0
    closes_in_time: bool = True

    def open(self) -> None:
        assert self.may_open.wait(DEADLINE_S)
        if self.opens is not None:
            raise self.opens

    def recover(self) -> Recovered:
        self.recovers_on = threading.get_ident()
        assert self.may_recover.wait(DEADLINE_S)
        if isinstance(self.recovered, Exception):
            raise self.recovered
        return self.recovered

    def submit(self, moves: Sequence[Move]) -> None:
        self.told.append(("submit", [each.move_id for each in moves]))

    def hasten(self, offsets: Sequence[int]) -> None:
        self.told.append(("hasten", list(offsets)))

    def cancel(self, offsets: Sequence[int]) -> None:
        self.told.append(("cancel", list(offsets)))

    def probe(self) -> Speed | None:
        assert self.may_probe.wait(DEADLINE_S)
        if isinstance(self.speed, Exception):
            raise self.speed
        return self.speed

    def forget(self, forgets: Sequence[Forget]) -> None:
        self.told.append(("forget", list(forgets)))

    def touch(self, touches: Sequence[Touch]) -> None:
        self.told.append(("touch", list(touches)))

    def add_namespace(self, namespace: bytes, tenant: str, canonical: bytes) -> None:
        self.told.append(("namespace", namespace, tenant, canonical))

    def drives(self) -> tuple[Health, ...]:
        problems = {"eio": 2, "deleted": 1}
        return tuple(Health(f"/mnt/{i}", state, "", 100, problems) for i, state in enumerate(self.states))

    def close(self, deadline_s: float) -> bool:
        self.told.append(("close",))
        return self.may_close.wait(deadline_s if self.closes_in_time else DEADLINE_S)


class House:
    """A mover on the running loop."""

    def __init__(self, *, recovered: Recovered | Exception = NOTHING, **timing: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.store, self.tier, self.clock = NotingStore(), NotingTier(recovered), ManualClock(1000.0)
        self.moved: Mailbox[MoveDone] = Mailbox(self.loop)
        self.forgotten: Mailbox[Forget] = Mailbox(self.loop)
        self.mover = Mover(
            self.store,  # type: ignore[arg-type]
            self.tier,
            moved=self.moved,
            forgotten=self.forgotten,
            loop=self.loop,
            clock=self.clock,
            on_recovered=lambda recovered: self.store.note("recovered", recovered.next_generation),
            wall_s=lambda: 5000.0,
            **timing,
        )

    async def open(self) -> None:
        self.tier.may_open.set()
        await self.mover.open(DEADLINE_S)

    async def recover(self) -> None:
        await self.open()
        self.tier.may_recover.set()
        await until(lambda: "start" in self.store.kinds(), "recovered")

    async def stop(self) -> None:
        self.tier.may_open.set()
        self.tier.may_recover.set()
        self.tier.may_close.set()
        self.tier.may_probe.set()
        await self.mover.stop(DEADLINE_S)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Let the loop go on until other threads have done their part."""
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, what
        await asyncio.sleep(0.001)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 3 * DEADLINE_S))  # type: ignore[arg-type]


def on_other_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(DEADLINE_S)


# --- mailbox ------------------------------------------------------------------------------------------------------------


def test_many_reports_wake_the_loop_once() -> None:
    async def scenario() -> None:
        taken: list[list[int]] = []
        mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
        mailbox.open(taken.append)
        await asyncio.sleep(0)

        on_other_thread(lambda: [mailbox.put([i, i]) for i in range(30)] and None)
        await until(lambda: bool(taken), "taken")

        assert taken == [[i for number in range(30) for i in (number, number)]]

    run(scenario)


def test_other_work_of_the_loop_goes_between_many_reports() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        seen: list[object] = []
        mailbox: Mailbox[int] = Mailbox(loop)
        mailbox.open(lambda taken: seen.append(len(taken)))

        def other_work() -> None:
            seen.append("other work")
            if 1 not in seen:
                loop.call_soon(other_work)

        other_work()
        on_other_thread(lambda: mailbox.put(range(2 * MAX_REPORTS_PER_TURN + 1)))
        await until(lambda: 1 in seen, "all taken")

        counts = [i for i, what in enumerate(seen) if what != "other work"]
        assert [seen[i] for i in counts] == [MAX_REPORTS_PER_TURN, MAX_REPORTS_PER_TURN, 1]
        assert all(later - earlier > 1 for earlier, later in itertools.pairwise(counts))

    run(scenario)


def test_no_report_is_lost_or_taken_twice_whichever_thread_brings_it() -> None:
    async def scenario() -> None:
        taken: list[int] = []
        mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
        mailbox.open(taken.extend)
        threads = [
            threading.Thread(target=lambda first=first: [mailbox.put([i]) for i in range(first, 40_000, 4)])
            for first in range(4)
        ]

        for thread in threads:
            thread.start()
        await until(lambda: len(taken) >= 40_000, "all taken")
        for thread in threads:
            thread.join(DEADLINE_S)
        await asyncio.sleep(0)

        assert sorted(taken) == list(range(40_000))
        assert all(own == sorted(own) for own in ([i for i in taken if i % 4 == k] for k in range(4)))

    run(scenario)


def test_what_came_before_the_opening_is_taken_and_what_comes_after_the_close_is_not() -> None:
    async def scenario() -> None:
        taken: list[int] = []
        mailbox: Mailbox[int] = Mailbox(asyncio.get_running_loop())
        mailbox.put([1])
        await asyncio.sleep(0)

        mailbox.open(taken.extend)
        await asyncio.sleep(0)
        mailbox.close()
        mailbox.put([2])
        await asyncio.sleep(0)

        assert taken == [1]

    run(scenario)


def test_a_report_after_the_end_of_the_loop_harms_nobody() -> None:
    loop = asyncio.new_event_loop()
    mailbox: Mailbox[int] = Mailbox(loop)
    loop.close()

    mailbox.put([1])


# --- orders and reports -------------------------------------------------------------------------------------------------


def test_namespaces_go_before_removals_before_moves_and_cancels_last() -> None:
    """What is hastened was ordered before the moves; what is cancelled may be among them."""

    async def scenario() -> None:
        house = House()
        namespaces = ((NAMESPACE, "tenant", b"spec"),)
        house.store.orders = [Orders(namespaces, (FORGET,), (move(1), move(2)), hastens=(7, 8), cancels=(2, 9))]

        house.mover.pump()
        house.mover.pump()

        assert house.tier.told == [
            ("namespace", NAMESPACE, "tenant", b"spec"),
            ("forget", [FORGET]),
            ("hasten", [7, 8]),
            ("submit", [1, 2]),
            ("cancel", [2, 9]),
        ]

    run(scenario)


def test_reports_reach_the_store_on_the_loop_in_one_piece_and_new_orders_follow() -> None:
    async def scenario() -> None:
        house = House()
        await house.recover()
        house.store.orders = [Orders(moves=(move(1), move(2), move(3)))]
        house.mover.pump()
        house.store.orders = [Orders(moves=(move(4),)), Orders(moves=(move(5),))]

        on_other_thread(lambda: [house.moved.put([MoveDone(i)]) for i in (2, 1, 3)] and None)
        on_other_thread(lambda: house.forgotten.put([FORGET]))
        await until(lambda: "forgets" in house.store.kinds(), "reported")

        assert [what for what in house.store.told if what[0] in {"moves", "forgets"}] == [
            ("moves", [2, 1, 3]),
            ("forgets", [FORGET]),
        ]
        assert [what for what in house.tier.told if what[0] == "submit"] == [
            ("submit", [1, 2, 3]),
            ("submit", [4]),
            ("submit", [5]),
        ]
        house.moved.put([MoveDone(4), MoveDone(5)])
        await house.stop()

    run(scenario)


def test_much_recency_is_taken_down_over_several_turns_and_all_of_it_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call of an engine waits for a turn."""
    monkeypatch.setattr("kvstore.mover.MAX_TOUCHES_PER_TURN", 2)

    async def scenario() -> None:
        house = House(tick_s=0.001)
        await house.recover()
        house.store.touches = [[TOUCH, TOUCH], [TOUCH, TOUCH], []]
        house.clock.advance(RECENCY_FLUSH_S)
        await until(lambda: not house.store.touches, "all of it without waiting for the next flush")
        kinds = [what[0] for what in house.store.told]
        first = kinds.index("touches")
        assert kinds[first : first + 5] == ["touches", "tick", "touches", "tick", "touches"]
        assert [what for what in house.tier.told if what[0] == "touch"] == [("touch", [TOUCH, TOUCH])] * 2

        house.store.touches = [[TOUCH, TOUCH], [TOUCH]]
        await house.stop()
        assert house.tier.told[-3:] == [("touch", [TOUCH, TOUCH]), ("touch", [TOUCH]), ("close",)]

    run(scenario)


def test_time_alone_brings_ticks_orders_and_recency() -> None:
    async def scenario() -> None:
        house = House(tick_s=0.001)
        await house.recover()

        house.store.orders = [Orders(forgets=(FORGET,))]
        await until(lambda: ("forget", [FORGET]) in house.tier.told, "ordered by a tick")
        assert "touches" not in house.store.kinds()
        house.clock.advance(RECENCY_FLUSH_S)
        await until(lambda: ("touch", [TOUCH]) in house.tier.told, "flushed")
        house.store.told.clear()
        await until(lambda: len(house.store.told) > 10, "ticks go on")

        assert set(house.store.told) == {("tick",)}
        await house.stop()

    run(scenario)


def test_a_tick_that_crashes_is_followed_by_another() -> None:
    async def scenario() -> None:
        house = House(tick_s=0.001)
        crashes: list[object] = []
        house.loop.set_exception_handler(lambda _, context: crashes.append(context["exception"]))
        await house.recover()

        def crash(now_s: float) -> None:
            raise ZeroDivisionError

        house.store.tick = crash  # type: ignore[method-assign]
        await until(lambda: len(crashes) > 1, "crashed twice")

        del house.store.tick
        await until(lambda: ("tick",) in house.store.told, "tick")
        await house.stop()

    run(scenario)


# --- recovery -----------------------------------------------------------------------------------------------------------


def test_blocks_come_back_in_slices_with_other_work_in_between_and_orders_begin_at_the_end() -> None:
    async def scenario() -> None:
        count = 2 * RESTORE_SLICE_BLOCKS + 1
        house = House(recovered=Recovered((blocks(count), blocks(3)), ((8192, 4096),), 77, {5: 6}, ((12288, 4096),)))

        def other_work() -> None:
            house.store.note("other work")
            if "start" not in house.store.kinds():
                house.loop.call_soon(other_work)

        await house.open()
        other_work()
        house.tier.may_recover.set()
        await until(lambda: "start" in house.store.kinds(), "recovered")

        restored = [what[1] for what in house.store.told if what[0] == "restore"]
        assert [len(part.keys) for part in restored] == [RESTORE_SLICE_BLOCKS, RESTORE_SLICE_BLOCKS, 1, 3]
        for column, whole in zip(Blocks._fields, blocks(count), strict=True):
            parts = [getattr(part, column) for part in restored[:3]]
            if isinstance(whole, list):
                assert list(itertools.chain(*parts)) == whole
            elif isinstance(whole, np.ndarray):
                assert (np.concatenate(parts) == whole).all()
            else:
                assert parts == [whole] * 3
        kinds = house.store.kinds()
        between = [kinds[i + 1] for i, kind in enumerate(kinds) if kind == "restore"]
        assert set(between) == {"other work"}
        assert [what for what in house.store.told if what[0] in {"quarantine", "recovered", "start"}] == [
            ("quarantine", 8192, 4096),
            ("quarantine", 12288, 4096),
            ("recovered", 77),
            ("start", {5: 6}, 4000.0),
        ]
        assert house.tier.recovers_on != threading.get_ident()
        await house.stop()

    run(scenario)


def test_no_drive_is_ready_before_the_store_has_its_blocks() -> None:
    async def scenario() -> None:
        house = House()
        new = [(drive.state, drive.reason) for drive in house.mover.drives()]
        await house.open()
        before = [drive.state for drive in house.mover.drives()]

        house.tier.may_recover.set()
        await until(lambda: "start" in house.store.kinds(), "recovered")

        assert new == [("recovering", "being opened")] * 2
        assert before == ["recovering", "degraded"]
        assert [drive.state for drive in house.mover.drives()] == ["ready", "degraded"]
        await house.stop()

    run(scenario)


def test_the_drives_speed_is_told_once_they_have_recovered_and_nobody_waits_for_it() -> None:
    async def scenario() -> None:
        house = House()
        house.tier.speed = Speed(0.001, 5e8)
        await house.recover()
        assert house.mover.drives()[0].state == "ready"
        assert "probed" not in house.store.kinds()

        house.tier.may_probe.set()
        await until(lambda: "probed" in house.store.kinds(), "told")

        assert [told for told in house.store.told if told[0] == "probed"] == [("probed", 0.001, 5e8)]
        await house.stop()

    run(scenario)


def test_a_probe_that_hangs_does_not_hold_up_the_end() -> None:
    async def scenario() -> None:
        house = House()
        await house.recover()
        house.tier.may_close.set()

        await asyncio.wait_for(house.mover.stop(DEADLINE_S), DEADLINE_S / 2)

        assert house.tier.told[-1] == ("close",)
        house.tier.may_probe.set()

    run(scenario)


@pytest.mark.parametrize("speed", [None, ValueError("no sense")])
def test_drives_that_do_not_tell_their_speed_are_served_all_the_same(
    speed: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        house = House()
        house.tier.speed = speed
        house.tier.may_probe.set()
        await house.recover()
        if speed is not None:
            await until(lambda: "probing crashed" in caplog.text, "said so")
        house.store.told.clear()
        await until(lambda: ("tick",) in house.store.told, "ticks go on")

        assert "probed" not in house.store.kinds()
        assert [drive.state for drive in house.mover.drives()] == ["ready", "degraded"]
        await house.stop()

    run(scenario)


def test_what_the_operator_must_decide_is_raised_and_nothing_is_recovered() -> None:
    async def scenario() -> None:
        house = House()
        house.tier.opens = ConfigError("nvme: in use", field="nvme", value="/mnt")

        with pytest.raises(ConfigError, match="in use"):
            await house.open()
        await house.stop()

        assert house.mover.drives()[0].reason == "nvme: in use"
        assert house.tier.recovers_on == 0

    run(scenario)


@pytest.mark.parametrize("late", [None, ConfigError("nvme: in use", field="nvme", value="/mnt")])
def test_drives_that_open_late_keep_nobody_waiting(late: Exception | None) -> None:
    async def scenario() -> None:
        house = House()
        house.tier.opens = late

        await house.mover.open(0.01)
        waiting = house.mover.drives()[0]
        await house.recover() if late is None else house.tier.may_open.set()
        await until(lambda: house.mover.drives()[0].state != "recovering", "opened")

        assert (waiting.state, waiting.reason) == ("recovering", "being opened")
        assert house.mover.drives()[0].state == ("ready" if late is None else "off")
        await house.stop()

    run(scenario)


def test_blocks_of_one_namespace_too_many_are_forgotten_and_the_others_come_back() -> None:
    async def scenario() -> None:
        house = House(recovered=Recovered((blocks(3), blocks(2))))
        restore = house.store.restore

        def refuse_the_first(spec: KVSpec, tenant: str, part: Blocks) -> None:
            if len(part.keys) == 3:
                raise Overloaded("too many namespaces", limit="MAX_NAMESPACES", value=1)
            restore(spec, tenant, part)

        house.store.restore = refuse_the_first  # type: ignore[method-assign]
        await house.recover()

        assert house.tier.told == [
            ("forget", [Forget(NAMESPACE, i.to_bytes(16, "big"), i * 4096, SPEC.block_nbytes, i) for i in range(3)])
        ]
        assert house.store.kinds() == ["restore", "recovered", "start"]
        await house.stop()

    run(scenario)


@pytest.mark.parametrize("where", ["tier", "store"])
def test_a_recovery_that_crashes_leaves_the_drives_off_and_the_service_going(where: str) -> None:
    async def scenario() -> None:
        house = House(recovered=ValueError("no sense") if where == "tier" else Recovered((blocks(3),)), tick_s=0.001)
        if where == "store":

            def crash(*_: object) -> None:
                raise ValueError("no sense")

            house.store.restore = crash  # type: ignore[method-assign]
        await house.open()
        house.tier.may_recover.set()
        await until(lambda: house.mover.drives()[0].state == "off", "off")

        assert [(drive.state, drive.reason) for drive in house.mover.drives()] == [
            ("off", "recovery failed: no sense")
        ] * 2
        house.clock.advance(RECENCY_FLUSH_S)
        house.store.told.clear()
        await until(lambda: len(house.store.told) > 3, "ticks go on")
        assert set(house.store.told) == {("tick",)}
        await house.stop()
        assert house.tier.told == [("close",)]

    run(scenario)


def test_problems_are_counted_over_all_drives_by_reason() -> None:
    async def scenario() -> None:
        counters = House().mover.counters()

        assert counters["nvme_problems_eio_total"] == 4
        assert counters["nvme_problems_deleted_total"] == 2
        assert {f"nvme_problems_{problem}_total" for problem in MoveProblem} < set(counters)

    run(scenario)


def test_recency_that_came_back_from_the_drives_is_not_written_to_them_again() -> None:
    """A million entries would take the first flush seconds."""
    small = SmallStore()
    drive = SegmentedSlots(SEGMENT, generations=CountedGenerations(), segment_bytes=SEGMENT)
    store = Store(pinned=small.slots, nvme=StripedSlots([drive]))
    store.restore(SPEC, "tenant", blocks(3))
    drive.add_segments(1)
    store.start_spilling({}, 0.0)

    before = store.take_touches()
    store.match(NAMESPACE, blocks(2).keys, 0.0)
    after = store.take_touches()

    assert before == []
    assert [touch.key for touch in sorted(after, key=lambda touch: touch.offset)] == blocks(2).keys
    assert min(touch.last_use for touch in after) > blocks(3).last_use.max()


# --- the end ------------------------------------------------------------------------------------------------------------


def test_at_the_end_moves_finish_then_recency_is_written_then_the_tier_commits() -> None:
    async def scenario() -> None:
        house = House()
        await house.recover()
        house.store.orders = [Orders(moves=(move(1),))]
        house.mover.pump()
        house.tier.may_close.set()

        stopping = asyncio.create_task(house.mover.stop(DEADLINE_S))
        await asyncio.sleep(0.01)
        assert ("close",) not in house.tier.told
        house.store.orders = [Orders(moves=(move(2),))]
        house.moved.put([MoveDone(1)])
        await until(lambda: ("submit", [2]) in house.tier.told, "the backlog is drained too")
        house.moved.put([MoveDone(2)])
        await stopping

        assert house.tier.told[-3:] == [("submit", [2]), ("touch", [TOUCH]), ("close",)]
        assert [what for what in house.store.told if what[0] == "moves"] == [("moves", [1]), ("moves", [2])]

    run(scenario)


@pytest.mark.parametrize("closes_in_time", [True, False])
def test_a_drive_that_hangs_holds_up_the_end_for_the_deadline_at_most(
    caplog: pytest.LogCaptureFixture, *, closes_in_time: bool
) -> None:
    """Also when the tier itself does not keep to it."""

    async def scenario() -> None:
        house = House()
        house.tier.closes_in_time = closes_in_time
        await house.recover()
        house.store.orders = [Orders(moves=(move(1),))]
        house.mover.pump()  # never done, and neither is close
        started_s = time.monotonic()

        await house.mover.stop(0.2)

        assert time.monotonic() - started_s < 2.0
        assert house.tier.told[-2:] == [("touch", [TOUCH]), ("close",)]
        assert "not closed" in caplog.text
        house.moved.put([MoveDone(1)])
        house.tier.may_close.set()
        await asyncio.sleep(0)
        assert "moves" not in house.store.kinds()

    run(scenario)


def test_a_recovery_that_hangs_holds_up_the_end_for_the_deadline_at_most(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        house = House()
        await house.open()
        started_s = time.monotonic()

        await house.mover.stop(0.2)

        assert time.monotonic() - started_s < 2.0
        assert house.tier.told == []
        assert "still recovering" in caplog.text
        house.tier.may_recover.set()

    run(scenario)


def test_without_drives_nothing_is_there_and_nothing_is_done() -> None:
    async def scenario() -> None:
        mover = NoMover()
        await mover.open(0.0)
        mover.pump()
        await mover.stop(0.0)

        assert mover.drives() == ()
        assert mover.counters() == {}

    run(scenario)
