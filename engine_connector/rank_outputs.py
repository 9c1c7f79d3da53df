"""The workers of one engine, as its scheduler side sees them: one worker.

A block is whole when every rank has written its heads or layers of it, and loaded when every rank has read its own. Ranks get the
same metadata and report in their own time; a job is told once, when the last of them has reported it.

    rank 0   saved 7               loaded r
    rank 1             saved 7               loaded r, page 3 failed
    told               saved 7               loaded r, page 3 failed

So there is one commit for a block, none for a block that one rank did not write, and a page is the engine's again only when
no rank copies into it. The store knows nothing of ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstore.engine_connector.protocol import ConnectorMetadata, FilledFrom, LoadTime, WorkerOutput


@dataclass(slots=True)
class _Load:
    """A load that not all ranks have reported."""

    block_ids: list[int]  # of all layer groups
    waits_for: set[int]  # ranks
    failed_block_ids: set[int]
    filled_from: int | None = None  # of a load from the back: the block from which on all ranks have it
    seconds: float = 0.0  # of the slowest rank


@dataclass(slots=True)
class _Save:
    """Likewise."""

    written: list[bool]
    waits_for: set[int]


class RankOutputs:
    """One thread: that of the scheduler side. `num_ranks`: workers of the engine, the ranks of all its pipeline stages."""

    def __init__(self, num_ranks: int) -> None:
        assert num_ranks > 0
        self._num_ranks = num_ranks
        self._live = set(range(num_ranks))
        self._loads: dict[str, _Load] = {}
        self._saves: dict[int, _Save] = {}

    def expect(self, meta: ConnectorMetadata) -> None:
        """These jobs go to every rank that lives. Before any of them can report."""
        all_live = len(self._live) == self._num_ranks
        for job in meta.loads:
            load = self._loads.setdefault(job.request_id, _Load([], set(self._live), set()))
            load.block_ids += [*(move.block_id for move in job.moves), *job.lost_block_ids]
            if not all_live:
                load.failed_block_ids.update(load.block_ids)
        for save in meta.saves:
            self._saves[save.job_id] = _Save([all_live] * len(save.moves), set(self._live))

    def add(self, reports: Iterable[tuple[int, WorkerOutput]]) -> WorkerOutput:
        """What has been reported by all since the last call. `reports`: (rank, output), any number of each rank; those of a
        rank that is lost do not count. Bytes and seconds of copying are those of rank 0, since ranks copy side by side."""
        step, copied, reports = 0, WorkerOutput(), list(reports)
        for rank, output in reports:
            if rank not in self._live:
                continue
            self._add_loads(rank, output)
            for job_id, written in output.finished_saving:
                save = self._saves[job_id]
                save.waits_for.remove(rank)
                save.written = [mine and all_others for mine, all_others in zip(written, save.written, strict=True)]
            step = max(step, output.step)
            if rank == 0:
                copied = replace(
                    copied,
                    load_seconds=copied.load_seconds + output.load_seconds,
                    load_bytes=copied.load_bytes + output.load_bytes,
                    save_seconds=copied.save_seconds + output.save_seconds,
                    save_bytes=copied.save_bytes + output.save_bytes,
                )
        ended = self._take_ended(replace(copied, step=step))
        if self._num_ranks > 1:
            return ended
        return replace(ended, slab_filled=tuple(each for _, output in reports for each in output.slab_filled))

    def lose(self, rank: int) -> WorkerOutput:
        """The rank's process is dead, so it copies nothing any more. What it has not reported has failed, and ends once the
        others have reported it; returns what ends now."""
        self._live.discard(rank)
        for load in self._loads.values():
            if rank in load.waits_for:
                load.waits_for.remove(rank)
                load.failed_block_ids.update(load.block_ids)
        for save in self._saves.values():
            if rank in save.waits_for:
                save.waits_for.remove(rank)
                save.written = [False] * len(save.written)
        return self._take_ended(WorkerOutput())

    def _add_loads(self, rank: int, output: WorkerOutput) -> None:
        filled_from, seconds = dict(output.filled_from), dict(output.load_times)
        for request_id in output.finished_loading:
            load = self._loads[request_id]
            load.waits_for.remove(rank)
            load.failed_block_ids.update(output.failed_block_ids.intersection(load.block_ids))
            load.seconds = max(load.seconds, seconds.get(request_id, 0.0))
            if request_id in filled_from:
                load.filled_from = max(load.filled_from or 0, filled_from[request_id])

    def _take_ended(self, copied: WorkerOutput) -> WorkerOutput:
        """`copied`, with all that ended."""
        loads = {request_id: load for request_id, load in self._loads.items() if not load.waits_for}
        saves = {job_id: save for job_id, save in self._saves.items() if not save.waits_for}
        for request_id in loads:
            del self._loads[request_id]
        for job_id in saves:
            del self._saves[job_id]
        return replace(
            copied,
            finished_loading=frozenset(loads),
            failed_block_ids=frozenset(block_id for load in loads.values() for block_id in load.failed_block_ids),
            finished_saving=tuple((job_id, tuple(save.written)) for job_id, save in saves.items()),
            filled_from=tuple(
                FilledFrom(r, load.filled_from) for r, load in loads.items() if load.filled_from is not None
            ),
            load_times=tuple(LoadTime(request_id, load.seconds) for request_id, load in loads.items()),
        )
