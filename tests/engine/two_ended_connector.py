"""The unkind connector with loads from the back: blocks arrive at any pace, stop arriving, or fail, wherever the front is.

It asserts the engine's side of the contract: pages are written by the front only once it has claimed them, and from the back
not at all; claims never shrink; nothing is computed of a load that was not claimed; what is filled stays as it came.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fake_connector import NAN_BYTE, NOT_AT_WORK, FakeConnector, FakeStore, Temper, _Load, _Worker

from kvstore.core.keys import KVSpec
from kvstore.engine_connector.protocol import (
    Connector,
    ConnectorMetadata,
    FilledFrom,
    LoadJob,
    Request,
    SaveJob,
    ScheduledRequest,
    WorkerOutput,
)

AT_WORK = NOT_AT_WORK - 1  # due of a load from the back that the worker has


@dataclass(frozen=True)
class Pace:
    """Of one load from the back. `ends_at`: the first block from the back that does not come: it fails (`late` is 0), or is
    late by so many looks, if the front has not got it by then. `bound`: the front gets no more until the back is there."""

    blocks_a_look: Callable[[], int] = lambda: 1
    ends_at: int | None = None
    late: int = 0
    bound: int | None = None


class _Fill:
    def __init__(self, pace: Pace, num_blocks: int) -> None:
        self.pace, self.front, self.back = pace, 0, num_blocks
        self.looks_left = pace.late
        self.over = False


class TwoEndedConnector(FakeConnector):
    """`pace` says how the load of a job goes; None: from the front, as any other."""

    def __init__(
        self,
        store: FakeStore,
        temper: Temper | None = None,
        *,
        pace: Callable[[LoadJob], Pace | None] = lambda _job: Pace(),
    ) -> None:
        super().__init__(store, temper)
        self.pace = pace
        self.fills: dict[str, _Fill] = {}  # of loads that are not reported
        self.chunk_tokens = 0
        self.num_fills = 0
        self.num_claims = 0
        self.num_holes = 0

    def factory(self, spec: KVSpec) -> Connector:
        self.spec = spec
        return Connector(self, TwoEndedWorker(self))

    def use_both_ends(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def fill_from_back(self, request: Request) -> bool:
        assert self.chunk_tokens, "use_both_ends comes first"
        load = self._new_loads[-1]
        assert load.job.request_id == request.request_id, "asked of another load than the one just started"
        pace = None if load.job.lost_block_ids else self.pace(load.job)
        if pace is not None:
            load.job = replace(load.job, from_back=True)
            self.fills[request.request_id] = _Fill(pace, len(load.job.moves))
            self.num_fills += 1
        return pace is not None

    def build_connector_meta(
        self, scheduled: Sequence[ScheduledRequest], preempted_request_ids: frozenset[str]
    ) -> ConnectorMetadata:
        assert not self.fills.keys() & preempted_request_ids
        for share in scheduled:
            if (fill := self.fills.get(share.request.request_id)) is not None:
                step = self.spec.block_tokens
                first = self._matched_from[share.request.request_id]
                start = share.num_computed_tokens
                assert start >= first * step
                assert start + share.num_scheduled_tokens <= (first + fill.front) * step, "computed, not claimed"
                assert share.num_scheduled_tokens % step == 0
        return super().build_connector_meta(scheduled, preempted_request_ids)

    def _plan_save(self, share: ScheduledRequest) -> list[SaveJob]:
        return [] if share.request.request_id in self.fills else super()._plan_save(share)

    def update_connector_output(self, output: WorkerOutput) -> None:
        for request_id in output.finished_loading:
            self.fills.pop(request_id, None)
        super().update_connector_output(output)


class TwoEndedWorker(_Worker):
    _shared: TwoEndedConnector

    def claim_front(self, request_id: str, num_blocks: int) -> int:
        fill, load = self._shared.fills[request_id], self._shared._loads[request_id]
        assert load.due < NOT_AT_WORK or fill.over, "claimed before start_load"
        assert 0 < num_blocks <= len(load.job.moves)
        self._look(load, fill)
        limit = fill.back if fill.pace.bound is None or fill.over else min(fill.back, max(fill.pace.bound, fill.front))
        if num_blocks > fill.front:
            self._shared.num_claims += 1
        fill.front = max(fill.front, min(num_blocks, limit))
        return min(num_blocks, fill.front)

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:
        shared = self._shared
        over: list[str] = []
        going_on: list[_Load] = []
        for request_id, fill in shared.fills.items():
            load = shared._loads[request_id]
            if load.due == NOT_AT_WORK:
                continue
            self._look(load, fill)
            while wait_s and not fill.over and fill.front < fill.back:  # an engine that waits gets the news
                self._look(load, fill)
                if fill.pace.bound is not None and fill.front >= fill.pace.bound and not self._comes(fill):
                    fill.pace = replace(fill.pace, bound=None)
                    break
            ended = fill.over or fill.front == fill.back
            load.due = 0 if ended else NOT_AT_WORK  # not by the clock of other loads
            if ended:
                over.append(request_id)
            else:
                going_on.append(load)
        output = super().get_output(wait_s=wait_s)
        for load in going_on:
            load.due = AT_WORK
        assert output.finished_loading & shared.fills.keys() == set(over)
        return replace(
            output, filled_from=tuple(FilledFrom(request_id, shared.fills[request_id].back) for request_id in over)
        )

    def _comes(self, fill: _Fill) -> bool:
        return fill.back - 1 != fill.pace.ends_at

    def _look(self, load: _Load, fill: _Fill) -> None:
        """Copy what has arrived since the last look."""
        self._expect_untouched(load, fill)
        for _ in range(fill.pace.blocks_a_look()):
            if fill.over or fill.back <= fill.front:
                return
            if not self._comes(fill):
                fill.looks_left -= 1
                fill.over = fill.looks_left < 0
                return
            fill.back -= 1
            self._pages.copy_in(load.job.moves[fill.back].block_id, self._shared.store.blocks[load.hashes[fill.back]])

    def _finish_load(self, load: _Load) -> list[int]:
        shared, fill = self._shared, self._shared.fills.get(load.job.request_id)
        if fill is None:
            return super()._finish_load(load)
        self._expect_untouched(load, fill)
        fill.over = True
        num_good = len(load.job.moves) - fill.back
        shared.num_loaded_blocks += num_good
        load.due = NOT_AT_WORK
        failed = [move.block_id for move in load.job.moves[fill.front : fill.back]]
        shared.num_holes += bool(failed)
        shared.num_failed_blocks += len(failed)
        return failed

    def _expect_untouched(self, load: _Load, fill: _Fill) -> None:
        for i, (move, block_hash) in enumerate(zip(load.job.moves, load.hashes, strict=True)):
            if i >= fill.back:
                assert np.array_equal(self._page(move), self._shared.store.blocks[block_hash]), "filled, and changed"
            elif i >= fill.front:
                assert (self._page(move) == NAN_BYTE).all(), "somebody wrote a page that nobody claimed"
