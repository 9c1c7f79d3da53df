"""The worker side by layers. Loads: a layer is said to be there when it is, in all pages; the last one only when the load has
turned out good, and has been reported; and whatever goes wrong fails the load as it fails any other. Saves: a layer is copied
once it is computed, not before, and nothing is written unless the step came to its end."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from in_process_sidecar import InProcessClient, InProcessSidecar

from kvstore.core.keys import KVSpec
from kvstore.core.layout import BlockLayout
from kvstore.engine_connector import block_copies, worker_side
from kvstore.engine_connector.protocol import (
    BlockMove,
    ConnectorMetadata,
    LayerwiseWorker,
    LoadJob,
    SaveJob,
    WorkerOutput,
)
from kvstore.engine_connector.session import StoreSession
from kvstore.engine_connector.worker_side import StoreWorkerSide
from kvstore.kernels.paged import PagedCache, allocate_pages

SPEC = KVSpec(weights="w", num_layers=4, num_kv_heads=1, head_dim=64, dtype="float16")
NBYTES, LAYERS = SPEC.block_nbytes, SPEC.num_layers
NUM_BLOCKS = 3
WAIT_S = 10.0


class Client(InProcessClient):
    alive = True


class Pages(PagedCache):
    """As the engine's; `before` is called with the page and the layers on the copying thread."""

    def __init__(self) -> None:
        self.tensor = allocate_pages(8, BlockLayout.from_spec(SPEC), "float16")
        super().__init__([self.tensor], num_layers=LAYERS)
        self.before: Callable[[int, range], None] = lambda _page, _layers: None
        self.copied: list[tuple[int, int]] = []  # page, layer

    def copy_in_layers(self, block_id: int, block: np.ndarray, layers: range) -> None:
        self.before(block_id, layers)
        super().copy_in_layers(block_id, block, layers)
        self.copied += [(block_id, layer) for layer in layers]

    def copy_out_layers(self, block_id: int, block: np.ndarray, layers: range) -> None:
        self.before(block_id, layers)
        super().copy_out_layers(block_id, block, layers)
        self.copied += [(block_id, layer) for layer in layers]

    def compute(self, layer: int, number: int) -> None:
        """What a forward does to one layer of all pages."""
        self.tensor[:, layer].view(torch.uint8)[:] = number


class PagesInBatches(Pages):
    """As a GPU's: many pages in one call."""

    calls = 0

    def copy_in_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray], layers: range) -> None:
        self.calls += 1
        for block_id, block in zip(block_ids, blocks, strict=True):
            self.copy_in_layers(block_id, block, layers)

    def copy_out_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray], layers: range) -> None:
        self.calls += 1
        for block_id, block in zip(block_ids, blocks, strict=True):
            self.copy_out_layers(block_id, block, layers)

    def layers_a_copy(self, num_blocks: int) -> int:
        return -(-block_copies.LAYERS_COPY_BYTES * LAYERS // NBYTES)


class WholePages:
    """Of an engine that knows of no layers."""

    def __init__(self, pages: Pages) -> None:
        self.num_pages, self.page_nbytes = pages.num_pages, pages.page_nbytes
        self.copy_in, self.copy_out = pages.copy_in, pages.copy_out


class Gate:
    """Holds up the copy of one layer of one page until it is opened."""

    def __init__(self, pages: Pages, page: int, layer: int) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._at = page, layer
        pages.before = self._before

    def _before(self, page: int, layers: range) -> None:
        if (page, layers.start) == self._at:
            self.reached.set()
            assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


class Worker:
    """A worker side over `pages` and an in-process sidecar whose slot i is full of i + 1."""

    def __init__(self, pages: Pages, *, whole: bool = False) -> None:
        self.sidecar = InProcessSidecar(num_segments=2)
        self.client = Client(self.sidecar, SPEC)
        self.session = StoreSession(self.client)
        self.session.start()
        self.side = StoreWorkerSide(self.session)
        self.side.register_pages(WholePages(pages) if whole else pages)
        for slot in range(8):
            self.sidecar.arena.array[slot * NBYTES : (slot + 1) * NBYTES] = slot + 1

    def generation(self, slot: int) -> int:
        return int(self.sidecar.arena.generations[slot * NBYTES // 4096])

    def reuse(self, slot: int) -> None:
        self.sidecar.arena.generations[slot * NBYTES // 4096] += 1

    def load(
        self,
        request_id: str = "r",
        *,
        first: int = 0,
        coming: frozenset[int] = frozenset(),
        deadline_s: float = WAIT_S,
        boot_id: bytes = b"",
    ) -> None:
        """Of NUM_BLOCKS slots from `first` on into the pages of the same numbers."""
        moves = tuple(
            BlockMove(slot, slot * NBYTES, self.generation(slot) + (slot in coming))
            for slot in range(first, first + NUM_BLOCKS)
        )
        job = LoadJob(request_id, 1, boot_id or self.sidecar.arena.boot_id, moves, deadline_s, by_layers=True)
        self.side.start_load(ConnectorMetadata(loads=(job,)))

    def save_job(self, request_id: str = "r", *, job_id: int = 1, first: int = 0) -> SaveJob:
        """Of NUM_BLOCKS pages from `first` on into the slots of the same numbers."""
        moves = tuple(
            BlockMove(slot, slot * NBYTES, self.generation(slot)) for slot in range(first, first + NUM_BLOCKS)
        )
        return SaveJob(job_id, request_id, self.sidecar.arena.boot_id, moves)

    def end_step(self, *jobs: SaveJob) -> None:
        self.side.start_save(ConnectorMetadata(saves=jobs))

    def slot_layers(self, slot: int) -> list[set[int]]:
        """For each layer of the slot the bytes in it."""
        content = self.sidecar.arena.array[slot * NBYTES : (slot + 1) * NBYTES].reshape(LAYERS, -1)
        return [set(layer.tolist()) for layer in content]

    def output(self) -> WorkerOutput:
        return self.side.get_output(wait_s=WAIT_S)


@pytest.fixture(autouse=True)
def _a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copies, "LAYERS_COPY_BYTES", 1)
    monkeypatch.setattr(worker_side, "LAYERS_DEADLINE_S", WAIT_S)


@pytest.fixture(params=[Pages, PagesInBatches])
def pages(request: pytest.FixtureRequest) -> Pages:
    return request.param()


@pytest.fixture
def worker(pages: Pages) -> Iterator[Worker]:
    worker = Worker(pages)
    yield worker
    worker.side.close()
    worker.session.close()


def expect_content(pages: Pages, *blocks: int) -> None:
    for block in blocks:
        assert (pages.tensor[block].view(torch.uint8) == block + 1).all(), block


def test_it_can_what_an_engine_asks_for(worker: Worker) -> None:
    assert isinstance(worker.side, LayerwiseWorker)


def test_layers_come_one_after_the_other_each_of_all_blocks(worker: Worker, pages: Pages) -> None:
    worker.load()

    assert all(worker.side.wait_for_layer("r", layer) for layer in range(LAYERS))

    assert pages.copied == [(page, layer) for layer in range(LAYERS) for page in range(NUM_BLOCKS)]
    expect_content(pages, *range(NUM_BLOCKS))
    output = worker.side.get_output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, frozenset())
    assert output.load_bytes == NUM_BLOCKS * NBYTES


def test_small_layers_are_copied_together(worker: Worker, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copies, "LAYERS_COPY_BYTES", NBYTES // LAYERS * 3 - 1)
    steps: list[range] = []
    pages.before = lambda _page, layers: steps.append(layers)
    worker.load()

    assert worker.side.wait_for_layer("r", LAYERS - 1)

    assert steps == [range(3)] * NUM_BLOCKS + [range(3, 4)] * NUM_BLOCKS


def test_a_layer_is_waited_for_while_those_before_it_are_there(worker: Worker, pages: Pages) -> None:
    gate = Gate(pages, page=NUM_BLOCKS - 1, layer=2)
    worker.load()
    assert worker.side.wait_for_layer("r", 1)
    assert gate.reached.wait(WAIT_S)
    assert worker.side.get_output() == WorkerOutput()
    threading.Timer(0.02, gate.open).start()

    assert worker.side.wait_for_layer("r", 2)

    assert pages.copied[-1][1] >= 2
    assert worker.side.wait_for_layer("r", 3)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_slot_that_changes_in_mid_load_is_noticed_before_the_last_layer(
    worker: Worker, pages: Pages, layer: int, block: int
) -> None:
    """Also when its bytes were copied long before."""

    def change(page: int, layers: range) -> None:
        if (page, layers.start) == (NUM_BLOCKS - 1, layer):
            worker.reuse(block)

    pages.before = change
    worker.load()

    assert not worker.side.wait_for_layer("r", LAYERS - 1)

    output = worker.side.get_output()
    assert output.finished_loading == {"r"}
    assert output.failed_block_ids == set(range(block, NUM_BLOCKS))
    assert output.load_bytes == block * NBYTES
    expect_content(pages, *range(block))


def test_a_slot_that_has_changed_before_fails_the_load_from_there_on(worker: Worker, pages: Pages) -> None:
    pages.before = lambda _page, _layers: worker.reuse(5) if worker.generation(5) == 0 else None
    worker.load("first")
    worker.load("r", first=3)
    assert worker.side.wait_for_layer("first", LAYERS - 1)

    assert not worker.side.wait_for_layer("r", 0)

    outputs = [worker.side.get_output()]
    while "r" not in outputs[-1].finished_loading:
        outputs.append(worker.output())
    assert outputs[-1].failed_block_ids == {5}
    expect_content(pages, 3, 4)


def test_a_block_that_is_not_there_yet_makes_it_a_load_like_any_other(worker: Worker, pages: Pages) -> None:
    worker.load(coming=frozenset({1}))
    threading.Timer(0.02, worker.reuse, [1]).start()

    assert worker.side.wait_for_layer("r", 0)

    assert worker.side.wait_for_layer("r", LAYERS - 1)
    assert worker.side.get_output().failed_block_ids == frozenset()
    expect_content(pages, *range(NUM_BLOCKS))


def test_past_its_deadline_nothing_of_a_load_is_good(worker: Worker, pages: Pages) -> None:
    gate = Gate(pages, page=0, layer=2)
    worker.load(deadline_s=0.05)
    assert gate.reached.wait(WAIT_S)

    assert not worker.side.wait_for_layer("r", 2)

    gate.open()
    output = worker.output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, {0, 1, 2})
    assert output.load_bytes == 0


def test_a_step_does_not_wait_as_long_as_a_load_may_take(
    worker: Worker, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on without the request; its load goes on too, and is good."""
    monkeypatch.setattr(worker_side, "LAYERS_DEADLINE_S", 0.05)
    gate = Gate(pages, page=0, layer=1)
    worker.load()

    assert worker.side.wait_for_layer("r", 0)
    assert not worker.side.wait_for_layer("r", 1)
    assert worker.side.get_output() == WorkerOutput()

    gate.open()
    output = worker.output()
    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, frozenset())
    expect_content(pages, *range(NUM_BLOCKS))


def test_an_error_fails_the_load_and_not_the_thread(
    worker: Worker, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(page: int, layers: range) -> None:
        if (page, layers.start) == (1, 2):
            raise ValueError("a page that cannot be copied")

    pages.before = fail
    worker.load()

    assert not worker.side.wait_for_layer("r", 2)

    assert worker.output().failed_block_ids == {0, 1, 2}
    assert "load failed request_id=r" in caplog.text
    worker.load("another", first=3)
    assert worker.side.wait_for_layer("another", LAYERS - 1)


def test_another_boots_load_fails_at_its_first_layer(worker: Worker) -> None:
    worker.load(boot_id=b"nobody")

    assert not worker.side.wait_for_layer("r", 0)

    assert worker.output().failed_block_ids == {0, 1, 2}


def test_pages_without_layers_are_there_when_the_load_is_done(pages: Pages) -> None:
    worker = Worker(pages, whole=True)
    worker.load()

    assert worker.side.wait_for_layer("r", 0)

    assert worker.side.get_output().finished_loading == {"r"}
    expect_content(pages, *range(NUM_BLOCKS))
    worker.side.close()
    worker.session.close()


def test_a_request_may_load_by_layers_again(worker: Worker) -> None:
    for first in (0, 3):
        worker.load(first=first)
        assert worker.side.wait_for_layer("r", LAYERS - 1)
        assert worker.side.get_output().finished_loading == {"r"}


def test_close_finishes_a_load_that_is_under_way(worker: Worker, pages: Pages) -> None:
    worker.load()
    worker.side.close()

    assert worker.side.get_output().finished_loading == {"r"}
    expect_content(pages, *range(NUM_BLOCKS))


# --- saves -----------------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def test_a_layer_goes_out_when_it_is_computed_and_not_before(worker: Worker, pages: Pages) -> None:
    job = worker.save_job()
    worker.side.begin_saves([job])
    for layer in range(LAYERS):
        assert worker.side.get_output() == WorkerOutput()
        assert len(pages.copied) == layer * NUM_BLOCKS
        pages.compute(layer, 100 + layer)

        worker.side.layer_computed(["another", "r"], layer)

        wait_until(lambda layer=layer: len(pages.copied) == (layer + 1) * NUM_BLOCKS)
    assert worker.side.get_output() == WorkerOutput(), "the step has not come to its end"

    worker.end_step(job)

    assert worker.output().finished_saving == ((1, (True,) * NUM_BLOCKS),)
    for slot in range(NUM_BLOCKS):
        assert worker.slot_layers(slot) == [{100}, {101}, {102}, {103}]
    assert worker.slot_layers(NUM_BLOCKS) == [{NUM_BLOCKS + 1}] * LAYERS


def test_another_requests_layers_say_nothing(worker: Worker, pages: Pages) -> None:
    first, second = worker.save_job(), worker.save_job("other", job_id=2, first=3)
    worker.side.begin_saves([first, second])

    worker.side.layer_computed(["r"], LAYERS - 1)

    wait_until(lambda: len(pages.copied) == NUM_BLOCKS * LAYERS)
    assert {page for page, _ in pages.copied} == set(range(NUM_BLOCKS))
    worker.end_step(first, second)
    written: dict[int, tuple[bool, ...]] = {}
    while len(written) < 2:
        written |= dict(worker.output().finished_saving)
    assert written == {1: (True,) * NUM_BLOCKS, 2: (True,) * NUM_BLOCKS}


def test_the_end_of_the_step_says_that_all_is_computed(worker: Worker, pages: Pages) -> None:
    job = worker.save_job()
    worker.side.begin_saves([job])
    for layer in range(LAYERS):
        pages.compute(layer, 7)

    worker.end_step(job)

    assert worker.output().finished_saving == ((1, (True,) * NUM_BLOCKS),)
    assert worker.slot_layers(0) == [{7}] * LAYERS


@pytest.mark.parametrize("num_computed", range(LAYERS + 1))
def test_a_step_that_broke_off_has_written_nothing(worker: Worker, pages: Pages, num_computed: int) -> None:
    worker.side.begin_saves([worker.save_job()])
    for layer in range(num_computed):
        worker.side.layer_computed(["r"], layer)
    wait_until(lambda: len(pages.copied) == num_computed * NUM_BLOCKS)

    worker.side.drop_saves()

    assert worker.output().finished_saving == ((1, (False,) * NUM_BLOCKS),)
    again = worker.save_job(job_id=2)
    worker.end_step(again)
    assert worker.output().finished_saving == ((2, (True,) * NUM_BLOCKS),)


def test_dropping_does_not_wait_for_a_copy_that_is_under_way(worker: Worker, pages: Pages) -> None:
    gate = Gate(pages, page=1, layer=0)
    worker.side.begin_saves([worker.save_job()])
    worker.side.layer_computed(["r"], LAYERS - 1)
    assert gate.reached.wait(WAIT_S)

    worker.side.drop_saves()

    assert worker.side.get_output() == WorkerOutput()
    gate.open()
    assert worker.output().finished_saving == ((1, (False,) * NUM_BLOCKS),)
    in_the_call = NUM_BLOCKS if isinstance(pages, PagesInBatches) else 2
    assert pages.copied == [(0, 0), (1, 0), (2, 0)][:in_the_call], "the rest is not copied at all"


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_slot_that_is_not_ours_any_more_is_not_touched(worker: Worker, pages: Pages, layer: int) -> None:
    def change(page: int, layers: range) -> None:
        if (page, layers.start) == (0, layer):
            worker.reuse(1)

    pages.before = change
    job = worker.save_job()
    worker.side.begin_saves([job])
    worker.side.layer_computed(["r"], LAYERS - 1)
    wait_until(lambda: (NUM_BLOCKS - 1, LAYERS - 1) in pages.copied)

    worker.end_step(job)

    assert worker.output().finished_saving == ((1, (True, False, True)),)
    untouched = layer + isinstance(pages, PagesInBatches)  # what one call has begun it finishes
    assert worker.slot_layers(1)[untouched:] == [{2}] * (LAYERS - untouched)


def test_a_forward_that_does_not_go_on_does_not_hold_up_saves_for_ever(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "_NEXT_LAYER_DEADLINE_S", 0.02)
    job = worker.save_job()
    worker.side.begin_saves([job])
    worker.side.layer_computed(["r"], 0)

    assert worker.output().finished_saving == ((1, (False,) * NUM_BLOCKS),)

    worker.end_step(job)
    assert worker.side.get_output() == WorkerOutput(), "reported once"


def test_the_next_steps_preemption_waits_for_what_had_begun(worker: Worker, pages: Pages) -> None:
    gate = Gate(pages, page=2, layer=3)
    job = worker.save_job()
    worker.side.begin_saves([job])
    worker.side.layer_computed(["r"], LAYERS - 1)
    assert gate.reached.wait(WAIT_S)
    worker.end_step(job)
    threading.Timer(0.05, gate.open).start()

    worker.side.handle_preemptions(ConnectorMetadata(preempted_request_ids=frozenset({"r"})))

    assert worker.side.get_output().finished_saving == ((1, (True,) * NUM_BLOCKS),)


def test_pages_without_layers_are_saved_at_the_end_of_the_step(pages: Pages) -> None:
    worker = Worker(pages, whole=True)
    pages.compute(0, 9)
    job = worker.save_job()
    worker.side.begin_saves([job])
    worker.side.layer_computed(["r"], LAYERS - 1)
    time.sleep(0.02)
    assert pages.copied == []

    worker.end_step(job)

    assert worker.output().finished_saving == ((1, (True,) * NUM_BLOCKS),)
    assert worker.slot_layers(0) == [{9}, {0}, {0}, {0}]
    worker.side.close()
    worker.session.close()


def test_close_drops_what_has_only_begun(worker: Worker) -> None:
    worker.side.begin_saves([worker.save_job()])

    worker.side.close()

    assert worker.side.get_output().finished_saving == ((1, (False,) * NUM_BLOCKS),)


def test_pages_that_take_many_blocks_get_them_in_one_call_whole_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that is not by layers, since one block is not there at first; and a save after its forward."""
    monkeypatch.setattr(block_copies, "LAYERS_COPY_BYTES", NBYTES)
    pages = PagesInBatches()
    worker = Worker(pages)
    worker.load(coming=frozenset({2}))
    deadline_s = time.monotonic() + WAIT_S
    while len(pages.copied) < 2 * LAYERS and time.monotonic() < deadline_s:
        time.sleep(0.001)
    calls_before = pages.calls
    worker.reuse(2)  # it has come

    assert worker.output().finished_loading == {"r"}
    assert (calls_before, pages.calls) == (1, 2)
    expect_content(pages, *range(NUM_BLOCKS))

    pages.compute(0, 99)
    worker.end_step(worker.save_job(first=4))

    assert worker.output().finished_saving == ((1, (True,) * NUM_BLOCKS),)
    assert pages.calls == 3
    assert worker.slot_layers(4)[0] == {99}
    worker.side.close()
    worker.session.close()
