"""Loads from the back: the last block is copied first, none that the engine has claimed, and the load ends at once where the two
meet, at a block that does not come, or at its deadline."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from test_worker_side import DEADLINE_S, NBYTES, Pages, Worker

from kvstore.engine_connector.protocol import BlockMove, BothEndsWorker, ConnectorMetadata, FilledFrom, LoadJob

WAIT_S = 10.0


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


def load(worker: Worker, num_blocks: int = 6, *, coming: tuple[int, ...] = (), **settings: object) -> LoadJob:
    """Of slot i into page i, from the back; those of `coming` are still on their way."""
    moves = tuple(BlockMove(i, i * NBYTES, worker.generation(i) + (i in coming)) for i in range(num_blocks))
    job = LoadJob("r", 1, worker.boot_id, moves, DEADLINE_S, from_back=True)
    job = replace(job, **settings)
    for i in range(num_blocks):
        worker.slot(i)[:] = 100 + i
    worker.side.start_load(ConnectorMetadata(loads=(job,), step=7))
    return job


def wait_until_copied(worker: Worker, num_blocks: int) -> None:
    """With one block claimed by the front."""
    cursors = worker.side._from_back["r"].cursors
    end_s = time.monotonic() + WAIT_S
    while cursors.num_copied < num_blocks:
        assert worker.side.claim_front("r", 1) == 1
        assert time.monotonic() < end_s


def test_it_offers_the_verb(worker: Worker) -> None:
    assert isinstance(worker.side, BothEndsWorker)


def test_blocks_are_copied_from_the_last_one_on(worker: Worker, pages: Pages) -> None:
    load(worker)

    output = worker.output()

    assert pages.copied_in == [5, 4, 3, 2, 1, 0]
    assert output.filled_from == (FilledFrom("r", 0),)
    assert (output.finished_loading, output.failed_block_ids, output.step) == ({"r"}, frozenset(), 7)
    assert output.load_bytes == 6 * NBYTES
    assert [(each.request_id, each.seconds) for each in output.load_times] == [("r", 6.0)]


def test_what_the_front_has_claimed_is_not_copied(worker: Worker, pages: Pages) -> None:
    """It meets the back at a block that is being copied, and is told at once when that is there."""
    pages.gated = frozenset({3})
    load(worker)
    assert pages.reached.wait(WAIT_S)

    assert worker.side.claim_front("r", 2) == 2
    assert worker.side.claim_front("r", 6) == 3, "block 3 is being copied"
    threading.Timer(0.05, pages.gate.set).start()
    output = worker.output()

    assert pages.copied_in == [5, 4, 3]
    assert output.filled_from == (FilledFrom("r", 3),)
    assert output.failed_block_ids == frozenset(), "the front has them"


def test_a_block_that_is_on_its_way_is_the_fronts_if_it_comes_first(worker: Worker, pages: Pages) -> None:
    load(worker, coming=(0, 1, 2, 3))
    wait_until_copied(worker, 2)

    assert worker.side.claim_front("r", 4) == 3, "its share, by what both have done"
    assert worker.side.claim_front("r", 4) == 4

    assert worker.output().filled_from == (FilledFrom("r", 4),)
    assert pages.copied_in == [5, 4]


def test_a_block_that_arrives_is_copied_however_late(worker: Worker, pages: Pages) -> None:
    load(worker, coming=(3,))
    assert worker.side.claim_front("r", 2) == 2
    worker.arrive(3)

    assert worker.output().filled_from == (FilledFrom("r", 2),)
    assert pages.copied_in == [5, 4, 3, 2]


@pytest.mark.parametrize("bad", range(6))
def test_a_block_that_does_not_come_ends_the_load_there(worker: Worker, pages: Pages, bad: int) -> None:
    moves = tuple(BlockMove(i, i * NBYTES, worker.generation(i) - (i == bad)) for i in range(6))
    worker.reuse(bad)
    load(worker, moves=moves)

    output = worker.output()

    assert output.filled_from == (FilledFrom("r", bad + 1),)
    assert output.failed_block_ids == set(range(bad + 1))
    assert pages.copied_in == list(range(5, bad, -1))


def test_a_page_that_cannot_be_copied_fails_and_keeps_what_came(worker: Worker, pages: Pages) -> None:
    pages.broken = frozenset({2})
    load(worker)

    output = worker.output()

    assert output.filled_from == (FilledFrom("r", 3),)
    assert output.failed_block_ids == {0, 1, 2}


def test_at_its_deadline_it_ends_with_what_it_has(worker: Worker, pages: Pages) -> None:
    load(worker, coming=(3,), deadline_s=5.0)
    wait_until_copied(worker, 2)
    pages.clock.advance(5.0)

    output = worker.output()

    assert output.filled_from == (FilledFrom("r", 4),)
    assert output.failed_block_ids == {1, 2, 3}


def test_the_end_of_the_sidecar_leaves_the_rest_to_the_front(worker: Worker, pages: Pages) -> None:
    load(worker, coming=(3,))
    wait_until_copied(worker, 2)
    worker.client.alive = False

    output = worker.output()

    assert output.filled_from == (FilledFrom("r", 4),)
    assert output.failed_block_ids == {1, 2, 3}


def test_others_are_copied_while_it_waits(worker: Worker, pages: Pages) -> None:
    load(worker, num_blocks=4, coming=(3,))
    worker.load(request_id="other", p6=6)

    assert worker.output().finished_loading == {"other"}
    assert worker.side.claim_front("r", 4) == 4
    assert worker.output().filled_from == (FilledFrom("r", 4),)


def test_the_front_is_bound_by_the_job_while_the_load_is_in_time(worker: Worker, pages: Pages) -> None:
    load(worker, coming=(5,), front_blocks=2, meet_block=2, expected_s=10.0)

    assert worker.side.claim_front("r", 6) == 2
    pages.clock.advance(9.0)

    assert worker.side.claim_front("r", 6) == 6, "most of it should have come by now"
    assert worker.output().filled_from == (FilledFrom("r", 6),)


def test_close_ends_a_load_from_the_back(worker: Worker) -> None:
    load(worker, coming=(5,))
    worker.side.close()

    output = worker.side.get_output()

    assert output.filled_from == (FilledFrom("r", 6),)
    assert output.failed_block_ids == set(range(6))
