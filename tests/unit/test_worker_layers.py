"""The worker side's loads by layers: a layer is said to be there when it is, in all pages; the last one only when the load has
turned out good, and has been reported; and whatever goes wrong fails the load as it fails any other."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from in_process_sidecar import InProcessClient, InProcessSidecar

from kvstore.core.keys import KVSpec
from kvstore.core.layout import BlockLayout
from kvstore.engine_connector import worker_side
from kvstore.engine_connector.protocol import BlockMove, ConnectorMetadata, LayerwiseWorker, LoadJob, WorkerOutput
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

    def output(self) -> WorkerOutput:
        return self.side.get_output(wait_s=WAIT_S)


@pytest.fixture(autouse=True)
def _a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_side, "_LAYERS_COPY_BYTES", 1)
    monkeypatch.setattr(worker_side, "LAYERS_DEADLINE_S", WAIT_S)


@pytest.fixture
def pages() -> Pages:
    return Pages()


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
    monkeypatch.setattr(worker_side, "_LAYERS_COPY_BYTES", NBYTES // LAYERS * 3 - 1)
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
