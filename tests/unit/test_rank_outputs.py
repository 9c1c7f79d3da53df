"""Several workers are one to the scheduler side: a job is told once, when all ranks have reported it, and is good if all were."""

import random
from dataclasses import replace

import pytest

from kvstore.engine_connector.protocol import (
    BlockMove,
    ConnectorMetadata,
    FilledFrom,
    LoadJob,
    LoadTime,
    SaveJob,
    WorkerOutput,
)
from kvstore.engine_connector.rank_outputs import RankOutputs

BOOT = b"boot"


def moves(*block_ids: int) -> tuple[BlockMove, ...]:
    return tuple(BlockMove(block_id, block_id * 4096, 1) for block_id in block_ids)


def load(request_id: str, *block_ids: int, lost: tuple[int, ...] = ()) -> LoadJob:
    return LoadJob(request_id, 1, BOOT, moves(*block_ids), 10.0, lost)


def save(job_id: int, *block_ids: int) -> SaveJob:
    return SaveJob(job_id, "r", BOOT, moves(*block_ids))


def saved(job_id: int, *written: bool) -> WorkerOutput:
    return WorkerOutput(finished_saving=((job_id, written),))


def loaded(request_id: str, *failed: int, seconds: float = 0.0) -> WorkerOutput:
    return WorkerOutput(
        finished_loading=frozenset({request_id}),
        failed_block_ids=frozenset(failed),
        load_times=(LoadTime(request_id, seconds),),
    )


def test_one_rank_is_told_as_it_reports() -> None:
    ranks = RankOutputs(1)
    ranks.expect(ConnectorMetadata(loads=(load("r", 1, 2),), saves=(save(7, 3),)))
    output = WorkerOutput(
        finished_loading=frozenset({"r"}),
        failed_block_ids=frozenset({2}),
        finished_saving=((7, (True,)),),
        load_seconds=0.5,
        load_bytes=4096,
        save_seconds=0.25,
        save_bytes=8192,
        filled_from=(FilledFrom("r", 1),),
        load_times=(LoadTime("r", 0.75),),
        step=3,
    )

    told = ranks.add([(0, output)])

    assert told == output
    assert (told.load_times, told.step) == (output.load_times, output.step)  # not compared
    assert ranks.add([]) == WorkerOutput()


def test_a_save_is_told_when_the_last_rank_reports_and_is_good_where_all_were() -> None:
    ranks = RankOutputs(3)
    ranks.expect(ConnectorMetadata(saves=(save(1, 10, 11, 12), save(2, 13))))

    assert ranks.add([(2, saved(1, True, True, False))]) == WorkerOutput()
    assert ranks.add([(0, saved(2, True)), (1, saved(1, True, False, True))]) == WorkerOutput()

    assert ranks.add([(0, saved(1, True, True, True))]).finished_saving == ((1, (True, False, False)),)
    assert ranks.add([(1, saved(2, True)), (2, saved(2, True))]).finished_saving == ((2, (True,)),)


def test_a_load_is_told_when_the_last_rank_reports_with_the_pages_that_failed_anywhere() -> None:
    """Also those of a report that came before: each load's failed pages go with its own end."""
    ranks = RankOutputs(2)
    ranks.expect(ConnectorMetadata(loads=(load("a", 1, 2), load("b", 3))))
    both = WorkerOutput(finished_loading=frozenset({"a", "b"}), failed_block_ids=frozenset({2}))

    assert ranks.add([(0, both)]) == WorkerOutput()
    b = ranks.add([(1, loaded("b", seconds=0.25))])
    a = ranks.add([(1, loaded("a", 1, seconds=0.5))])

    assert (b.finished_loading, b.failed_block_ids, b.load_times) == ({"b"}, frozenset(), (LoadTime("b", 0.25),))
    assert (a.finished_loading, a.failed_block_ids, a.load_times) == ({"a"}, {1, 2}, (LoadTime("a", 0.5),))


def test_a_load_of_several_layer_groups_is_one() -> None:
    ranks = RankOutputs(2)
    ranks.expect(ConnectorMetadata(loads=(load("r", 1, 2), replace(load("r", 30), group=1))))

    assert ranks.add([(0, loaded("r", 1, 2, 30))]) == WorkerOutput()
    assert ranks.add([(1, loaded("r"))]).failed_block_ids == {1, 2, 30}


def test_a_load_from_the_back_is_filled_from_where_all_ranks_have_it() -> None:
    ranks = RankOutputs(2)
    ranks.expect(ConnectorMetadata(loads=(load("r", 1, 2, 3, 4),)))
    reports = [
        WorkerOutput(finished_loading=frozenset({"r"}), filled_from=(FilledFrom("r", first),)) for first in (3, 1)
    ]

    assert ranks.add(list(enumerate(reports))).filled_from == (FilledFrom("r", 3),)


def test_bytes_and_seconds_of_copying_are_counted_once() -> None:
    ranks = RankOutputs(2)
    report = WorkerOutput(load_seconds=0.5, load_bytes=100, save_seconds=0.25, save_bytes=60)

    told = [ranks.add([(rank, report)]) for rank in (0, 1)]

    assert told == [report, WorkerOutput()]


def test_what_a_dead_rank_has_not_reported_has_failed_once_the_others_are_done() -> None:
    ranks = RankOutputs(2)
    ranks.expect(ConnectorMetadata(loads=(load("r", 1, 2, lost=(3,)),), saves=(save(1, 4), save(2, 5), save(3, 6))))
    ranks.add([(0, saved(1, True)), (1, saved(2, True))])

    told = ranks.lose(1)

    assert told.finished_saving == ((1, (False,)),)
    assert told.finished_loading == frozenset(), "rank 0 still copies into these pages"
    rest = ranks.add([(0, saved(2, True)), (0, saved(3, True)), (0, loaded("r", 3))])
    assert rest.finished_saving == ((2, (True,)), (3, (False,)))
    assert rest.failed_block_ids == {1, 2, 3}


def test_after_a_rank_died_nothing_is_whole_any_more_and_its_late_reports_do_not_count() -> None:
    ranks = RankOutputs(2)
    ranks.expect(ConnectorMetadata(saves=(save(1, 4),)))
    ranks.lose(1)
    ranks.expect(ConnectorMetadata(loads=(load("r", 1, 2),), saves=(save(2, 5),)))

    told = ranks.add([(1, saved(1, True)), (0, saved(1, True)), (0, saved(2, True)), (0, loaded("r"))])

    assert told.finished_saving == ((1, (False,)), (2, (False,)))
    assert told.failed_block_ids == {1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_each_job_is_told_once_and_never_early(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 4)
    ranks = RankOutputs(num_ranks)
    jobs = [save(i, *range(rng.randint(1, 4))) for i in range(10)]
    ranks.expect(ConnectorMetadata(saves=tuple(jobs)))
    todo = [(rank, job, tuple(rng.random() < 0.8 for _ in job.moves)) for rank in range(num_ranks) for job in jobs]
    rng.shuffle(todo)
    expected = {
        job.job_id: tuple(map(all, zip(*(written for _, other, written in todo if other is job), strict=True)))
        for job in jobs
    }
    done: dict[int, set[int]] = {job.job_id: set() for job in jobs}
    told: dict[int, tuple[bool, ...]] = {}
    while todo:
        some = [todo.pop() for _ in range(min(len(todo), rng.randint(1, 3)))]
        for rank, job, _ in some:
            done[job.job_id].add(rank)
        output = ranks.add([(rank, saved(job.job_id, *written)) for rank, job, written in some])
        for job_id, written in output.finished_saving:
            assert job_id not in told
            told[job_id] = written
        assert told.keys() == {job_id for job_id, by in done.items() if len(by) == num_ranks}
    assert told == expected
