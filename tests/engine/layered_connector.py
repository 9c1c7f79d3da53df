"""The unkind connector with loads by layers: of a load come all layers, or those up to one that fails, or is later than the step.

It asserts that the engine asks for layers in order, in the step of the load only, and that nobody writes the pages meanwhile;
that saves begin only of what cannot turn out void, and that a layer does not change once it was said to be computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from fake_connector import NAN_BYTE, NOT_AT_WORK, FakeConnector, FakeStore, Temper, _Load, _Worker

from kvstore.core.keys import KVSpec
from kvstore.engine_connector.protocol import (
    Connector,
    ConnectorMetadata,
    LayeredPages,
    LoadJob,
    Request,
    SaveJob,
    ScheduledRequest,
)


@dataclass(frozen=True)
class Course:
    """Of one load by layers. With `missing_from`, that layer is not there when the engine asks for it: the load has failed from
    block `num_good` on; or (None) it goes on, and is reported in time as any other, and good."""

    missing_from: int | None = None
    num_good: int | None = None


class LayeredConnector(FakeConnector):
    """`course` says how the load of a job goes; None: not by layers."""

    def __init__(
        self,
        store: FakeStore,
        temper: Temper | None = None,
        *,
        course: Callable[[LoadJob], Course | None] = lambda _job: Course(),
    ) -> None:
        super().__init__(store, temper)
        self.course = course
        self.courses: dict[str, Course] = {}  # of loads that are not reported
        self.num_good = 0
        self.num_missed = 0
        self.num_begun_saves = 0
        self.num_dropped_saves = 0

    @property
    def num_by_layers(self) -> int:
        return self.num_good + self.num_missed

    def factory(self, spec: KVSpec) -> Connector:
        self.spec = spec
        return Connector(self, LayeredWorker(self))

    def load_by_layers(self, request: Request) -> bool:
        load = self._new_loads[-1]
        assert load.job.request_id == request.request_id, "asked of another load than the one just started"
        course = None if load.job.lost_block_ids else self.course(load.job)
        if course is not None:
            load.job = replace(load.job, by_layers=True)
            self.courses[request.request_id] = course
        return course is not None

    def build_connector_meta(
        self, scheduled: Sequence[ScheduledRequest], preempted_request_ids: frozenset[str]
    ) -> ConnectorMetadata:
        self._of_this_step = {load.job.request_id for load in self._new_loads if load.job.by_layers}
        assert self._of_this_step <= {share.request.request_id for share in scheduled}, "by layers, yet not computed"
        return super().build_connector_meta(scheduled, preempted_request_ids)

    def _may_compute(self, request: Request) -> bool:
        return super()._may_compute(request) or request.request_id in self._of_this_step


class LayeredWorker(_Worker):
    _pages: LayeredPages
    _shared: LayeredConnector

    def __init__(self, shared: LayeredConnector) -> None:
        super().__init__(shared)
        self._num_layers: dict[str, int] = {}  # that are in the pages of loads by layers
        self._of_this_step: set[str] = set()
        self._begun: dict[int, SaveJob] = {}
        self._computed: dict[int, list[np.ndarray]] = {}  # of begun saves: all blocks' bytes of each layer

    def begin_saves(self, saves: Sequence[SaveJob]) -> None:
        assert not self._begun
        assert self._of_this_step.isdisjoint(job.request_id for job in saves), "what is loading may turn out void"
        self._begun = {job.job_id: job for job in saves}
        self._computed = {job.job_id: [] for job in saves}

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        for job in self._begun.values():
            if job.request_id in request_ids:
                assert len(self._computed[job.job_id]) == layer, "each layer once, in order"
                self._computed[job.job_id].append(self._layers(job, layer, layer + 1))

    def start_save(self, meta: ConnectorMetadata) -> None:
        assert self._begun.keys() <= {job.job_id for job in meta.saves}
        self._shared.num_begun_saves += len(self._begun)
        for job in self._begun.values():
            computed = np.concatenate(self._computed[job.job_id], axis=1)
            whole = self._layers(job, 0, self._pages.num_layers)
            assert np.array_equal(computed, whole), "a layer changed after it was computed"
        self._begun = {}
        super().start_save(meta)

    def drop_saves(self) -> None:
        for job in self._begun.values():
            self._reported.append((job.job_id, (False,) * len(job.moves)))
        self._shared.num_dropped_saves += len(self._begun)
        self._begun = {}

    def _layers(self, job: SaveJob, first: int, last: int) -> np.ndarray:
        nbytes = self._pages.page_nbytes // self._pages.num_layers
        return np.array([self._page(move)[first * nbytes : last * nbytes] for move in job.moves])

    def start_load(self, meta: ConnectorMetadata) -> None:
        super().start_load(meta)
        self._of_this_step = {job.request_id for job in meta.loads if job.by_layers}
        self._num_layers |= dict.fromkeys(self._of_this_step, 0)

    def wait_for_layer(self, request_id: str, layer: int) -> bool:
        assert request_id in self._of_this_step
        assert layer == self._num_layers[request_id], "layers are asked for in order"
        shared, load = self._shared, self._shared._loads[request_id]
        course = shared.courses[request_id]
        is_last = layer + 1 == self._pages.num_layers
        self._expect_untouched(load)
        if layer == course.missing_from:
            shared.num_missed += 1
            if course.num_good is not None:
                load.due = shared._tick  # for the next get_output
            return False
        for move, block_hash in zip(load.job.moves, load.hashes, strict=True):
            self._pages.copy_in_layers(move.block_id, shared.store.blocks[block_hash], range(layer, layer + 1))
        self._num_layers[request_id] += 1
        if is_last:
            shared.num_good += 1
            load.due = shared._tick
        return True

    def _finish_load(self, load: _Load) -> list[int]:
        if not load.job.by_layers:
            return super()._finish_load(load)
        self._expect_untouched(load)
        shared, moves = self._shared, load.job.moves
        course = shared.courses.pop(load.job.request_id)
        del self._num_layers[load.job.request_id]
        num_good = len(moves) if course.num_good is None else course.num_good
        for move, block_hash in list(zip(moves, load.hashes, strict=True))[:num_good]:
            self._pages.copy_in(move.block_id, shared.store.blocks[block_hash])
        shared.num_loaded_blocks += num_good
        shared.num_failed_blocks += len(moves) - num_good
        load.due = NOT_AT_WORK
        return [move.block_id for move in moves[num_good:]]

    def _expect_untouched(self, load: _Load) -> None:
        """Pages of a load hold the layers that are there, and NaN."""
        end = self._pages.page_nbytes // self._pages.num_layers * self._num_layers[load.job.request_id]
        for move, block_hash in zip(load.job.moves, load.hashes, strict=True):
            page = self._page(move)
            assert np.array_equal(page[:end], self._shared.store.blocks[block_hash][:end]), "a layer changed"
            assert (page[end:] == NAN_BYTE).all(), "somebody wrote a page that is being loaded"
