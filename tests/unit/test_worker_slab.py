"""The connector with a slab: hot blocks are copied there once, read from there afterwards, and from the arena whenever the slab's
slot is not what was granted."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from engine_side import SPEC as ENGINE_SPEC
from engine_side import Request, pages
from in_process_sidecar import SEGMENT_BYTES, InProcessClient, InProcessSidecar
from test_worker_side import NBYTES, WAIT_S, Pages, Worker

from kvstore.client_slab import ClientSlab, map_slab
from kvstore.core.clock import ManualClock
from kvstore.engine_connector.protocol import ConnectorMetadata, LoadJob, SlabFilled, SlabMove, WorkerOutput
from kvstore.engine_connector.scheduler_side import StoreSchedulerSide
from kvstore.engine_connector.session import StoreSession
from kvstore.tiers.generation_table import GenerationTable
from kvstore.tiers.hbm.host import HostMemory

SLAB_NBYTES = 16 * NBYTES


class SlabWorker(Worker):
    """Slot n of its slab holds a block; `granted` are the generations."""

    def __init__(self, own: Pages) -> None:
        super().__init__(own)
        memory, self.table = HostMemory(SLAB_NBYTES), GenerationTable(SLAB_NBYTES)
        memory.open()
        self.table.open()
        self.slab = map_slab(self.boot_id, "host", SLAB_NBYTES, os.dup(memory.fd), os.dup(self.table.fd))
        assert isinstance(self.slab, ClientSlab)
        self.client.slab = self.slab
        self.memory = memory

    def near(self, number: int) -> np.ndarray:
        assert self.slab is not None
        return self.slab.slot(number * NBYTES, NBYTES)

    def run(self, slab: tuple[SlabMove, ...], *, deadline_s: float = 1000.0, **slots: int) -> WorkerOutput:
        job = LoadJob("r", 1, self.boot_id, self.moves(**slots), deadline_s, slab=slab)
        self.side.start_load(ConnectorMetadata(loads=(job,)))
        return self.output()

    def read(self, position: int, number: int, generation: int = 0) -> SlabMove:
        return SlabMove(position, number * NBYTES, generation, fills=False)

    def fill(self, position: int, number: int, generation: int = 0) -> SlabMove:
        return SlabMove(position, number * NBYTES, generation, fills=True)


@pytest.fixture
def own() -> Pages:
    return Pages()


@pytest.fixture
def worker(own: Pages) -> Iterator[SlabWorker]:
    made = SlabWorker(own)
    yield made
    own.gate.set()
    made.side.close()
    made.session.close()
    made.memory.close()
    made.table.close()


def test_what_lies_in_the_slab_is_read_there_and_the_rest_from_the_arena(worker: SlabWorker, own: Pages) -> None:
    worker.slot(0)[:], worker.slot(1)[:], worker.near(5)[:] = 1, 2, 3

    output = worker.run((worker.read(1, 5),), p2=0, p3=1)

    assert (output.finished_loading, output.failed_block_ids) == ({"r"}, frozenset())
    assert (own.memory[2] == 1).all()
    assert (own.memory[3] == 3).all()
    assert output.slab_filled == ()


def test_a_slot_of_another_generation_is_not_believed_and_the_arena_serves(worker: SlabWorker, own: Pages) -> None:
    worker.slot(0)[:], worker.near(5)[:] = 1, 3
    worker.table.table[5 * NBYTES // 4096] = 7

    output = worker.run((worker.read(0, 5, 6),), p2=0)

    assert output.failed_block_ids == frozenset()
    assert (own.memory[2] == 1).all()


def test_a_slot_that_is_reused_under_the_copy_is_read_again_from_the_arena(worker: SlabWorker, own: Pages) -> None:
    worker.slot(0)[:], worker.near(5)[:] = 1, 3
    own.gated = frozenset({2})
    job = LoadJob("r", 1, worker.boot_id, worker.moves(p2=0), 1000.0, slab=(worker.read(0, 5),))
    worker.side.start_load(ConnectorMetadata(loads=(job,)))
    assert own.reached.wait(WAIT_S)
    worker.table.table[5 * NBYTES // 4096] = 2
    own.gate.set()

    output = worker.output()

    assert output.failed_block_ids == frozenset()
    assert own.copied_in == [2, 2]
    assert (own.memory[2] == 1).all()


def test_what_is_to_be_filled_is_copied_from_the_arena_and_told(worker: SlabWorker) -> None:
    worker.slot(0)[:], worker.slot(1)[:] = 1, 2

    output = worker.run((worker.fill(0, 4), worker.fill(1, 5)), p2=0, p3=1)

    assert output.slab_filled == (SlabFilled("r", (0, 1)),)
    assert (worker.near(4) == 1).all()
    assert (worker.near(5) == 2).all()


def test_a_slot_that_is_not_ours_any_more_is_left_alone(worker: SlabWorker) -> None:
    worker.slot(0)[:], worker.slot(1)[:], worker.near(4)[:] = 1, 2, 9
    worker.table.table[4 * NBYTES // 4096] = 2

    output = worker.run((worker.fill(0, 4, 1), worker.fill(1, 5)), p2=0, p3=1)

    assert output.slab_filled == (SlabFilled("r", (1,)),)
    assert (worker.near(4) == 9).all()


def test_a_load_that_was_late_fills_nothing(worker: SlabWorker) -> None:
    output = worker.run((worker.fill(0, 4), worker.fill(1, 5)), deadline_s=1.5, p2=0, p3=1)

    assert output.slab_filled == ()


def test_a_block_of_another_boot_is_neither_read_nor_filled_in_the_slab(worker: SlabWorker, own: Pages) -> None:
    worker.slot(0)[:], worker.near(5)[:] = 1, 3
    assert worker.slab is not None
    worker.client.slab = worker.slab._replace(boot_id=b"another")

    output = worker.run((worker.read(0, 5), worker.fill(0, 6)), p2=0)

    assert (own.memory[2] == 1).all()
    assert output.slab_filled == ()


def test_a_slab_on_a_gpu_is_not_for_pages_that_cannot_read_it(worker: SlabWorker, own: Pages) -> None:
    worker.slot(0)[:], worker.near(5)[:] = 1, 3
    assert worker.slab is not None
    worker.client.slab = worker.slab._replace(device="cuda:0")

    worker.run((worker.read(0, 5),), p2=0)

    assert (own.memory[2] == 1).all()


# --- the scheduler side --------------------------------------------------------------------------------------------------


@pytest.fixture
def sidecar() -> InProcessSidecar:
    return InProcessSidecar(slab_segments=1)


def open_side(sidecar: InProcessSidecar, *, uses_slab: bool) -> tuple[StoreSchedulerSide, InProcessClient]:
    client = InProcessClient(sidecar, ENGINE_SPEC, instance=b"s" * 16)
    session = StoreSession(client)  # type: ignore[arg-type]
    session.start()
    return (
        StoreSchedulerSide(session, block_tokens=ENGINE_SPEC.block_tokens, clock=ManualClock(), uses_slab=uses_slab),
        client,
    )


def load(side: StoreSchedulerSide, request: Request, filled: tuple[int, ...] | None) -> LoadJob:
    """As an engine does; `filled` of what was to be, None: all."""
    num_tokens = side.get_num_new_matched_tokens(request, 0)
    side.update_state_after_alloc(request, pages(request), num_tokens)
    (job,) = side.build_connector_meta([], frozenset()).loads
    positions = tuple(move.position for move in job.slab if move.fills) if filled is None else filled
    side.update_connector_output(
        WorkerOutput(
            finished_loading=frozenset({request.request_id}),
            slab_filled=(SlabFilled(request.request_id, positions),) if positions else (),
        )
    )
    side.request_finished(request)
    return job


def store(sidecar: InProcessSidecar, request: Request) -> None:
    client = InProcessClient(sidecar, ENGINE_SPEC, instance=b"w" * 16)
    client.connect()
    grant = client.reserve("w", ENGINE_SPEC.namespace(), request.block_hashes)
    client.commit(grant.lease_id)
    client.close()


def test_the_third_read_finds_in_the_slab_what_the_second_filled(sidecar: InProcessSidecar) -> None:
    store(sidecar, Request("w", 4))
    side, client = open_side(sidecar, uses_slab=True)

    jobs = [load(side, Request(str(i), 4), filled) for i, filled in enumerate((None, (0, 2), None))]

    assert [[(move.position, move.fills) for move in job.slab] for job in jobs] == [
        [],
        [(0, True), (1, True), (2, True), (3, True)],
        [(0, False), (1, True), (2, False), (3, True)],
    ]
    assert client.filled == [b"", b"\1\0\1\0", b"\1\1"]
    (tier,) = [tier for tier in sidecar.store.stats().tiers if tier.name == "slab"]
    assert tier.ready_blocks == 4
    assert tier.capacity_bytes == SEGMENT_BYTES
    sidecar.check_no_lease()
    side.close()


def test_a_side_that_uses_no_slab_is_given_nothing_of_it(sidecar: InProcessSidecar) -> None:
    store(sidecar, Request("w", 4))
    side, client = open_side(sidecar, uses_slab=False)

    jobs = [load(side, Request(str(i), 4), None) for i in range(3)]

    assert [job.slab for job in jobs] == [()] * 3
    assert client.filled == [b""] * 3
    side.close()
