"""The worker side: bytes go between pages and arena as the jobs say, every job is reported once, a page or slot that is not,
or no longer, ours is left alone, and a block that is still being read is waited for, at nobody else's cost."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from in_process_sidecar import SEGMENT_BYTES, InProcessClient, InProcessSidecar

from kvstore.core.clock import ManualClock
from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec
from kvstore.engine_connector import worker_side
from kvstore.engine_connector.local import open_connector
from kvstore.engine_connector.protocol import BlockMove, ConnectorMetadata, LoadJob, SaveJob, WorkerOutput
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide

SPEC = KVSpec(weights="w", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
NBYTES = SPEC.block_nbytes
NUM_PAGES = 8
WAIT_S = 10.0
DEADLINE_S = 1000.0  # of a job, on the manual clock


@dataclass
class Pages:
    """As the engine's. Copying a page of `gated` waits until the gate is opened; `broken` raises."""

    memory: np.ndarray = field(default_factory=lambda: np.zeros((NUM_PAGES, NBYTES), np.uint8))
    gated: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    gate: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)
    copied_in: list[int] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)  # a copy takes a second of it

    num_pages: int = NUM_PAGES
    page_nbytes: int = NBYTES

    def copy_in(self, block_id: int, block: np.ndarray) -> None:
        self._before(block_id)
        np.copyto(self.memory[block_id], block)
        self.copied_in.append(block_id)

    def copy_out(self, block_id: int, block: np.ndarray) -> None:
        self._before(block_id)
        np.copyto(block, self.memory[block_id])

    def _before(self, block_id: int) -> None:
        if block_id in self.broken:
            raise ValueError("a page that cannot be copied")
        if block_id in self.gated:
            self.reached.set()
            assert self.gate.wait(WAIT_S)
        self.clock.advance(1.0)


class Client(InProcessClient):
    """Its sidecar dies, and lets itself be connected to, when a test says so."""

    alive = True

    def __init__(self, sidecar: InProcessSidecar) -> None:
        super().__init__(sidecar, SPEC)
        self.gate, self.gate_after_mapping = threading.Event(), threading.Event()
        self.gate.set(), self.gate_after_mapping.set()

    def connect(self) -> None:
        """As the real one, it has the new arena a moment before it says so."""
        assert self.gate.wait(WAIT_S)
        boot_id = self.boot_id
        super().connect()
        boot_id, self.boot_id = self.boot_id, boot_id
        assert self.gate_after_mapping.wait(WAIT_S)
        self.boot_id = boot_id


class Worker:
    """A worker side over `pages` and the arena of an in-process sidecar, of which every third slot is `ours`."""

    def __init__(self, pages: Pages, *others: Pages) -> None:
        self.sidecar = InProcessSidecar(num_segments=1)
        self.client = Client(self.sidecar)
        self.session = StoreSession(self.client)
        self.session.start()
        self.pages = pages
        self.side = StoreWorkerSide(self.session, clock=pages.clock)
        self.side.register_pages(pages, *others)

    @property
    def boot_id(self) -> bytes:
        return self.sidecar.arena.boot_id

    def slot(self, number: int) -> np.ndarray:
        return self.sidecar.arena.array[number * NBYTES : (number + 1) * NBYTES]

    def moves(self, **slots: int) -> tuple[BlockMove, ...]:
        """`p3=7`: page 3, slot 7."""
        return tuple(BlockMove(int(page[1:]), slot * NBYTES, self.generation(slot)) for page, slot in slots.items())

    def generation(self, slot: int) -> int:
        return int(self.sidecar.arena.generations[slot * NBYTES // 4096])

    def reuse(self, slot: int) -> None:
        self.sidecar.arena.generations[slot * NBYTES // 4096] += 1

    def arrive(self, slot: int) -> None:
        """The block that a load waits for is there, as the sidecar says it."""
        self.reuse(slot)

    def load(
        self,
        *,
        request_id: str = "r",
        lost: tuple[int, ...] = (),
        coming: tuple[int, ...] = (),
        deadline_s: float = DEADLINE_S,
        boot_id: bytes = b"",
        **slots: int,
    ) -> None:
        """The blocks in the slots `coming` are still on their way."""
        moves = tuple(
            move._replace(generation=move.generation + (slot in coming))
            for move, slot in zip(self.moves(**slots), slots.values(), strict=True)
        )
        job = LoadJob(request_id, 1, boot_id or self.boot_id, moves, deadline_s, lost)
        self.side.start_load(ConnectorMetadata(loads=(job,)))

    def save(self, *, job_id: int = 1, request_id: str = "r", **slots: int) -> None:
        job = SaveJob(job_id, request_id, self.boot_id, self.moves(**slots))
        self.side.start_save(ConnectorMetadata(saves=(job,)))

    def preempt(self, *request_ids: str) -> None:
        self.side.handle_preemptions(
            ConnectorMetadata(preempted_request_ids=frozenset(request_ids), boot_id=self.session.boot_id)
        )

    def output(self) -> WorkerOutput:
        return self.side.get_output(wait_s=WAIT_S)


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def worker(pages: Pages) -> Iterator[Worker]:
    worker = Worker(pages)
    yield worker
    pages.gate.set()
    worker.side.close()
    worker.session.close()


@dataclass
class WindowPages(Pages):
    """Of another layer group: half the bytes."""

    memory: np.ndarray = field(default_factory=lambda: np.zeros((NUM_PAGES, NBYTES // 2), np.uint8))
    page_nbytes: int = NBYTES // 2


@pytest.fixture
def window() -> WindowPages:
    return WindowPages()


@pytest.fixture
def grouped(pages: Pages, window: WindowPages) -> Iterator[Worker]:
    worker = Worker(pages, window)
    yield worker
    window.gate.set()
    worker.side.close()
    worker.session.close()


def load_both(worker: Worker, first: tuple[BlockMove, ...], second: tuple[BlockMove, ...]) -> None:
    """The loads of one request, in each layer group."""
    jobs = [
        LoadJob("r", i + 1, worker.boot_id, moves, DEADLINE_S, group=i, whole=True)
        for i, moves in enumerate((first, second))
    ]
    worker.side.start_load(ConnectorMetadata(loads=tuple(jobs)))


def test_a_load_of_two_groups_is_reported_once_both_are_over(
    grouped: Worker, pages: Pages, window: WindowPages
) -> None:
    window.gated = frozenset({5})
    grouped.slot(0)[:], grouped.slot(1)[:] = 7, 9

    load_both(grouped, grouped.moves(p3=0), grouped.moves(p5=1))
    assert window.reached.wait(WAIT_S)
    assert grouped.side.get_output() == WorkerOutput()
    window.gate.set()
    output = grouped.output()

    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, frozenset())
    assert output.load_bytes == NBYTES + NBYTES // 2
    assert (pages.memory[3] == 7).all()
    assert (window.memory[5] == 9).all()


@pytest.mark.parametrize("lost_slot", [0, 1])
def test_a_load_that_fails_in_one_group_has_failed_in_all(grouped: Worker, lost_slot: int) -> None:
    moves = grouped.moves(p3=0), grouped.moves(p5=1)
    grouped.reuse(lost_slot)

    load_both(grouped, *moves)

    output = grouped.output()
    while not output.finished_loading:
        output = grouped.output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, {3, 5})


def test_a_load_that_is_whole_or_nothing_keeps_nothing_of_a_part(worker: Worker) -> None:
    """As of the only group of a model all of whose layers have windows."""
    moves = worker.moves(p3=0, p4=1)
    worker.reuse(1)

    worker.side.start_load(ConnectorMetadata(loads=(LoadJob("r", 1, worker.boot_id, moves, DEADLINE_S, whole=True),)))

    assert worker.output().failed_block_ids == {3, 4}


def test_a_save_reads_the_pages_of_its_group(grouped: Worker, pages: Pages, window: WindowPages) -> None:
    pages.memory[2], window.memory[2] = 1, 2

    job = SaveJob(1, "r", grouped.boot_id, grouped.moves(p2=0), group=1)
    grouped.side.start_save(ConnectorMetadata(saves=(job,)))

    assert grouped.output().finished_saving == ((1, (True,)),)
    assert (grouped.slot(0)[: NBYTES // 2] == 2).all()
    assert (grouped.slot(0)[NBYTES // 2 :] == 0).all()


def test_a_load_copies_slots_into_pages_and_nothing_else(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = 9
    for number in range(SEGMENT_BYTES // NBYTES):
        worker.slot(number)[:] = 100 + number

    worker.load(p2=5, p0=3)

    output = worker.output()
    assert output.finished_loading == {"r"}
    assert output.failed_block_ids == frozenset()
    assert output.load_bytes == 2 * NBYTES
    assert output.load_seconds == 2.0
    assert [set(page.tolist()) for page in pages.memory[:4]] == [{103}, {9}, {105}, {9}]


def test_a_save_copies_pages_into_slots_and_nothing_else(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = np.arange(NUM_PAGES, dtype=np.uint8)[:, None] + 50

    worker.save(p2=5, p0=3)

    assert worker.output().finished_saving == ((1, (True, True)),)
    found = [set(worker.slot(number).tolist()) for number in range(7)]
    assert found == [{0}, {0}, {0}, {50}, {0}, {52}, {0}]


def test_what_is_saved_loads_back_bit_for_bit(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = np.random.default_rng(0).integers(0, 256, pages.memory.shape, np.uint8)
    before = pages.memory[:4].copy()
    worker.save(p0=4, p1=5, p2=6, p3=7)
    worker.output()

    worker.load(p4=4, p5=5, p6=6, p7=7)
    worker.output()

    assert np.array_equal(pages.memory[4:], before)


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_a_load_stops_at_the_first_slot_that_was_reused(worker: Worker, pages: Pages, stale: int) -> None:
    moves = worker.moves(p0=0, p1=1, p2=2)
    worker.reuse(stale)

    worker.side.start_load(ConnectorMetadata(loads=(LoadJob("r", 1, worker.boot_id, moves, DEADLINE_S),)))

    output = worker.output()
    assert output.finished_loading == {"r"}
    assert output.failed_block_ids == set(range(stale, 3))
    assert output.load_bytes == stale * NBYTES


def test_a_slot_reused_during_its_copy_fails_the_load(worker: Worker, pages: Pages) -> None:
    pages.gated = frozenset({1})
    worker.load(p0=0, p1=1)
    assert pages.reached.wait(WAIT_S)
    worker.reuse(1)
    pages.gate.set()

    assert worker.output().failed_block_ids == {1}


def test_a_save_never_touches_a_slot_that_was_reused(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = 7
    moves = worker.moves(p0=0, p1=1)
    worker.reuse(1)

    worker.side.start_save(ConnectorMetadata(saves=(SaveJob(1, "r", worker.boot_id, moves),)))

    assert worker.output().finished_saving == ((1, (True, False)),)
    assert not worker.slot(1).any()


def test_lost_blocks_are_reported_as_failed_with_the_load(worker: Worker) -> None:
    worker.load(p0=0, lost=(1, 2))

    output = worker.output()
    assert output.finished_loading == {"r"}
    assert output.failed_block_ids == {1, 2}


def test_a_load_past_its_deadline_gives_up(worker: Worker) -> None:
    worker.load(deadline_s=-1.0, p0=0, p1=1)

    assert worker.output().failed_block_ids == {0, 1}


def test_jobs_of_another_boot_touch_nothing(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = 7
    load = LoadJob("r", 1, worker.boot_id, worker.moves(p0=0), DEADLINE_S)
    save = SaveJob(1, "s", worker.boot_id, worker.moves(p1=1))
    worker.sidecar.restart()
    worker.client.connect()

    worker.side.start_load(ConnectorMetadata(loads=(load,)))
    assert worker.output().failed_block_ids == {0}
    worker.side.start_save(ConnectorMetadata(saves=(save,)))
    assert worker.output().finished_saving == ((1, (False,)),)

    assert (pages.memory == 7).all()
    assert not worker.sidecar.arena.array.any()


def test_a_copy_under_way_outlives_its_sidecar(worker: Worker, pages: Pages) -> None:
    """The mapping stays while the copy holds it; nobody else can write a dead sidecar's arena, so the bytes are good."""
    worker.slot(0)[:] = 42
    pages.gated = frozenset({0})
    worker.load(p0=0)
    assert pages.reached.wait(WAIT_S)
    worker.sidecar.restart()
    worker.client.connect()
    pages.gate.set()

    assert worker.output().failed_block_ids == frozenset()
    assert (pages.memory[0] == 42).all()


@pytest.mark.parametrize("verb", ["load", "save"])
def test_an_unexpected_error_fails_the_job_and_not_the_thread(
    worker: Worker, pages: Pages, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    pages.broken = frozenset({1})
    getattr(worker, verb)(p0=0, p1=1)

    output = worker.output()
    if verb == "load":
        assert output.failed_block_ids == {0, 1}
    else:
        assert output.finished_saving == ((1, (False, False)),)
    assert "failed request_id=r" in caplog.text
    worker.save(job_id=2, p2=2)
    assert worker.output().finished_saving == ((2, (True,)),)


def test_a_load_does_not_wait_for_a_save(worker: Worker, pages: Pages) -> None:
    pages.gated = frozenset({0})
    worker.save(p0=0)
    assert pages.reached.wait(WAIT_S)

    worker.load(p1=1)

    assert worker.output().finished_loading == {"r"}


def test_output_without_news_is_empty_and_does_not_wait(worker: Worker) -> None:
    assert worker.side.get_output() == WorkerOutput()


def test_each_job_is_reported_once(worker: Worker) -> None:
    for job_id in range(5):
        worker.save(job_id=job_id, p0=0)

    reported: list[int] = []
    while len(reported) < 5:
        reported += [job_id for job_id, _ in worker.output().finished_saving]
    assert reported == [0, 1, 2, 3, 4]
    assert worker.side.get_output() == WorkerOutput()


# --- blocks on their way ---------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_a_block_is_copied_as_soon_as_it_is_there_and_not_before(worker: Worker, pages: Pages) -> None:
    """While the third is still read from the drive, the first two are in their pages."""
    pages.memory[:] = 9
    worker.load(p0=0, p1=1, p2=2, coming=(1, 2))
    wait_until(lambda: pages.copied_in == [0])

    worker.slot(1)[:] = 101
    worker.arrive(1)
    wait_until(lambda: pages.copied_in == [0, 1])
    assert worker.side.get_output() == WorkerOutput()
    worker.slot(2)[:] = 102
    worker.arrive(2)

    output = worker.output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, frozenset())
    assert output.load_bytes == 3 * NBYTES
    assert [set(page.tolist()) for page in pages.memory[:4]] == [{0}, {101}, {102}, {9}]


def test_blocks_that_arrive_out_of_order_are_copied_in_prefix_order(worker: Worker, pages: Pages) -> None:
    worker.load(p0=0, p1=1, p2=2, coming=(0, 1, 2))

    for slot in (2, 1, 0):
        worker.arrive(slot)

    assert worker.output().failed_block_ids == frozenset()
    assert pages.copied_in == [0, 1, 2]


def test_a_load_that_waits_holds_up_no_other(worker: Worker, pages: Pages) -> None:
    worker.load(request_id="waits", p0=0, p1=1, coming=(1,))
    worker.load(request_id="waits too", p2=2, coming=(2,))
    worker.load(request_id="ready", p3=3, p4=4)

    assert worker.output().finished_loading == {"ready"}
    worker.arrive(2)
    assert worker.output().finished_loading == {"waits too"}
    worker.arrive(1)
    assert worker.output().finished_loading == {"waits"}


def test_the_time_a_load_waits_is_not_counted_as_copying(worker: Worker, pages: Pages) -> None:
    worker.load(p0=0, p1=1, coming=(1,))
    wait_until(lambda: pages.copied_in == [0])
    pages.clock.advance(DEADLINE_S / 2)
    worker.arrive(1)

    assert worker.output().load_seconds == 2.0


@pytest.mark.parametrize("entry", [-2, 1, 7])
def test_a_block_that_will_not_come_fails_the_load_from_there_on(worker: Worker, pages: Pages, entry: int) -> None:
    """A bad sector, a dropped namespace: the entry is neither the grant's nor the one before."""
    worker.reuse(1)
    worker.load(p0=0, p1=1, p2=2, coming=(1,))
    wait_until(lambda: pages.copied_in == [0])

    worker.sidecar.arena.generations[NBYTES // 4096] = worker.generation(1) + 1 + entry

    output = worker.output()
    assert output.failed_block_ids == {1, 2}
    assert output.load_bytes == NBYTES


def test_a_load_gives_up_at_its_deadline_what_has_not_arrived(worker: Worker, pages: Pages) -> None:
    worker.load(p0=0, p1=1, deadline_s=10.0, coming=(1,))
    worker.load(request_id="patient", p2=2, coming=(2,))
    wait_until(lambda: pages.copied_in == [0])

    pages.clock.advance(10.0)

    output = worker.output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, {1})
    worker.arrive(2)
    assert worker.output().failed_block_ids == frozenset()


def test_the_end_of_the_sidecar_ends_the_wait_and_spares_what_is_there(worker: Worker, pages: Pages) -> None:
    """A dead sidecar leaves the entries as they are; the deadline is not waited for."""
    worker.load(request_id="waits", p0=0, p1=1, coming=(1,))
    wait_until(lambda: pages.copied_in == [0])

    worker.client.alive = False

    assert worker.output().failed_block_ids == {1}
    worker.load(request_id="is there", p2=2, p3=3)
    assert worker.output() == WorkerOutput(
        finished_loading=frozenset({"is there"}), load_seconds=2.0, load_bytes=2 * NBYTES
    )


def test_a_sidecar_that_came_back_brings_nothing_the_one_before_had_promised(worker: Worker, pages: Pages) -> None:
    worker.load(p0=0, p1=1, coming=(1,))
    wait_until(lambda: pages.copied_in == [0])

    worker.sidecar.restart()
    worker.client.connect()

    assert worker.output().failed_block_ids == {1}


def test_a_load_waits_until_its_new_sidecars_arena_is_mapped(worker: Worker) -> None:
    """The first step after a restart tells a worker with a session of its own of the sidecar, and of a load from it."""
    worker.sidecar.restart()
    worker.client.gate.clear()
    worker.side.handle_preemptions(ConnectorMetadata(boot_id=worker.boot_id))
    worker.load(p0=0)
    worker.load(request_id="another boot's", p1=1, boot_id=b"nobody")
    assert worker.output().finished_loading == {"another boot's"}

    worker.client.gate.set()

    assert worker.output() == WorkerOutput(finished_loading=frozenset({"r"}), load_seconds=1.0, load_bytes=NBYTES)


def test_a_sidecar_that_is_connected_to_in_the_middle_of_a_turn_is_alive(worker: Worker, pages: Pages) -> None:
    """At the start of the turn it was not, and its arena is found in the same turn."""
    worker.sidecar.restart()
    worker.client.gate.clear()
    worker.side.handle_preemptions(ConnectorMetadata(boot_id=worker.boot_id))
    awaits = worker.session.awaits

    def connect_meanwhile(boot_id: bytes) -> bool:
        found = awaits(boot_id)
        worker.client.gate.set()
        wait_until(lambda: worker.session.arena(boot_id) is not None)
        return found

    worker.session.awaits = connect_meanwhile
    worker.load(p0=0, p1=1, coming=(1,))
    wait_until(lambda: pages.copied_in == [0])
    worker.arrive(1)

    assert worker.output().failed_block_ids == frozenset()


def test_a_sidecar_whose_arena_is_mapped_before_the_connection_is_complete_is_alive(
    worker: Worker, pages: Pages
) -> None:
    worker.sidecar.restart()
    worker.client.gate_after_mapping.clear()
    worker.side.handle_preemptions(ConnectorMetadata(boot_id=worker.boot_id))
    worker.load(p0=0, p1=1, coming=(1,))
    worker.load(request_id="another", p2=2)
    assert worker.output().finished_loading == {"another"}, "the turn after the first load was looked at"
    assert pages.copied_in == [0, 2]

    worker.client.gate_after_mapping.set()
    worker.arrive(1)

    assert worker.output().failed_block_ids == frozenset()


def test_a_load_does_not_wait_for_a_sidecar_that_cannot_be_reached(worker: Worker) -> None:
    worker.sidecar.restart()
    worker.sidecar.away = True
    worker.side.handle_preemptions(ConnectorMetadata(boot_id=worker.boot_id))

    worker.load(p0=0)

    assert worker.output().failed_block_ids == {0}


def test_an_error_in_one_load_does_not_end_another_that_waits(
    worker: Worker, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    pages.broken = frozenset({1})
    worker.load(request_id="waits", p0=0, coming=(0,))
    worker.load(request_id="breaks", p1=1)
    assert worker.output().failed_block_ids == {1}
    assert "load failed request_id=breaks" in caplog.text

    worker.arrive(0)

    assert worker.output() == WorkerOutput(finished_loading=frozenset({"waits"}), load_seconds=1.0, load_bytes=NBYTES)


def test_a_save_needs_its_slot_to_be_there(worker: Worker, pages: Pages) -> None:
    """One generation before its own the slot is another's."""
    pages.memory[:] = 7
    (move,) = worker.moves(p0=0)

    job = SaveJob(1, "r", worker.boot_id, (move._replace(generation=move.generation + 1),))
    worker.side.start_save(ConnectorMetadata(saves=(job,)))

    assert worker.output().finished_saving == ((1, (False,)),)
    assert not worker.slot(0).any()


def test_close_copies_what_is_there_and_gives_up_what_is_not(worker: Worker, pages: Pages) -> None:
    worker.load(request_id="waits", p0=0, p1=1, coming=(1,))
    worker.load(request_id="is there", p2=2)
    started_s = time.monotonic()

    worker.side.close()

    assert time.monotonic() - started_s < worker_side._STOP_DEADLINE_S
    assert sorted(pages.copied_in) == [0, 2]
    output = worker.side.get_output()
    assert (output.finished_loading, output.failed_block_ids) == ({"waits", "is there"}, {1})


# --- preemption, close -------------------------------------------------------------------------------------------------------


def test_preemption_waits_for_the_saves_of_its_requests(worker: Worker, pages: Pages) -> None:
    pages.gated = frozenset({0})
    worker.save(request_id="r", p0=0)
    assert pages.reached.wait(WAIT_S)
    threading.Timer(0.05, pages.gate.set).start()

    worker.preempt("r")

    assert pages.gate.is_set()
    assert worker.output().finished_saving == ((1, (True,)),)


def test_preemption_of_another_request_does_not_wait(worker: Worker, pages: Pages) -> None:
    pages.gated = frozenset({0})
    worker.save(request_id="r", p0=0)
    assert pages.reached.wait(WAIT_S)

    worker.preempt("other")

    assert not pages.gate.is_set()


def test_a_save_that_outlasts_a_preemption_is_called_off(
    worker: Worker, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages may have new content by the time it copies them: what it copied is not published."""
    monkeypatch.setattr(worker_side, "PREEMPTION_DEADLINE_S", 0.01)
    pages.gated = frozenset({0})
    worker.save(request_id="r", p0=0, p1=1)
    worker.save(job_id=2, request_id="other", p2=2)
    assert pages.reached.wait(WAIT_S)

    worker.preempt("r")
    pages.gate.set()

    written: dict[int, tuple[bool, ...]] = {}
    while len(written) < 2:
        written |= dict(worker.output().finished_saving)
    assert written == {1: (False, False), 2: (True,)}
    assert not worker.slot(1).any(), "and the rest is not copied at all"


def test_close_finishes_what_is_queued_and_may_be_repeated(worker: Worker, pages: Pages) -> None:
    pages.memory[:] = 7
    worker.save(p0=0)

    worker.side.close()
    worker.side.close()

    assert (worker.slot(0) == 7).all()


def test_a_side_that_never_got_pages_closes() -> None:
    session = StoreSession(InProcessClient(InProcessSidecar(), SPEC))
    StoreWorkerSide(session).close()


@pytest.mark.parametrize("sizes", [(NBYTES + 4096,), (NBYTES // 2,), (NBYTES, NBYTES)])
def test_pages_of_another_size_than_the_specs_blocks_are_refused(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A larger one would be copied over the next slot's block, somebody else's."""
    connector = open_connector(SPEC, socket_path=str(tmp_path / "absent"))

    with pytest.raises(ConfigError, match="page_nbytes: pages have"):
        connector.worker.register_pages(*(Pages(page_nbytes=nbytes) for nbytes in sizes))

    connector.worker.close()
    connector.scheduler.close()
