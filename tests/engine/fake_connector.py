"""A connector over a dict, unkind within the contract: loads take steps, fail, arrive cut short; pages in flight hold NaN.

It also watches the engine's side of the contract and asserts it:
- pages of a load hold what the load left there until the load is reported;
- pages of a save do not change from start_save until the save is reported, or handle_preemptions has returned;
- each job is reported once: by the worker if it got it, else by the engine, and then as failed;
- request_finished comes once for each request; blocks under one hash have nearly equal content, whoever computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.keys import KVSpec
from kvstore.engine_connector.protocol import (
    BlockMove,
    Connector,
    ConnectorMetadata,
    LoadJob,
    Pages,
    Request,
    SaveJob,
    ScheduledRequest,
    WorkerOutput,
)

NAN_BYTE = 0xFF  # float16 0xFFFF is a NaN
NOT_AT_WORK = 1 << 60  # due of a job that the worker has not got yet, or has reported


class FakeStore:
    """Blocks by hash, shared by the connectors of several engines."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, np.ndarray] = {}
        self.compares = True

    def put(self, block_hash: bytes, content: np.ndarray) -> None:
        held = self.blocks.setdefault(block_hash, content)
        difference = np.abs(held.view(np.float16).astype(float) - content.view(np.float16).astype(float)).max()
        assert difference < 0.05 or not self.compares, "two contents under one hash"


@dataclass(frozen=True)
class Temper:
    """How unkind to be. Delays are in calls of get_output; chances are per load or per block."""

    max_load_delay: int = 0
    max_save_delay: int = 0
    block_fails: float = 0.0
    load_loses_tail: float = 0.0
    flip_a_bit: bool = False  # what no store may do; shows that tests notice
    seed: int = 0


@dataclass
class _Load:
    job: LoadJob
    hashes: list[bytes]
    due: int = NOT_AT_WORK


@dataclass
class _Save:
    job: SaveJob
    hashes: list[bytes]
    snapshots: list[np.ndarray] = field(default_factory=list)
    due: int = NOT_AT_WORK


class FakeConnector:
    """Both sides in one object; `connector` is what the engine gets."""

    def __init__(self, store: FakeStore, temper: Temper | None = None) -> None:
        self.store = store
        self.temper = temper or Temper()
        self.num_loaded_blocks = 0
        self.num_failed_blocks = 0
        self.num_saved_blocks = 0
        self.preempted: list[str] = []
        self.closed: list[str] = []
        self._rng = np.random.default_rng(self.temper.seed)
        self._new_loads: list[_Load] = []
        self._loads: dict[str, _Load] = {}
        self._saves: dict[int, _Save] = {}
        self._matched_from: dict[str, int] = {}
        self._load_failed: set[str] = set()
        self._num_jobs = 0
        self._tick = 0
        self._finished: list[Request] = []

    def factory(self, spec: KVSpec) -> Connector:
        self.spec = spec
        return Connector(self, _Worker(self))

    @property
    def pending_jobs(self) -> list[str | int]:
        """Loads by request id and saves by job id of which no report has come."""
        return [*self._loads, *self._saves]

    # --- scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        step = self.spec.block_tokens
        assert num_computed_tokens % step == 0
        assert request.request_id not in self._loads
        self._matched_from[request.request_id] = num_computed_tokens // step
        if request.request_id in self._load_failed:
            return 0
        count = 0
        for block_hash in request.block_hashes[num_computed_tokens // step : (request.num_tokens - 1) // step]:
            if block_hash not in self.store.blocks:
                break
            count += step
        return count

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        step = self.spec.block_tokens
        assert len(block_ids) * step >= request.num_tokens
        if not num_external_tokens:
            return
        first = self._matched_from[request.request_id]
        last = first + num_external_tokens // step
        granted = last - first
        if self._rng.random() < self.temper.load_loses_tail:  # the store lost some of it since the match
            granted = int(self._rng.integers(0, granted))
        pages = tuple(block_ids[first:last])
        moves = tuple(BlockMove(page, 0, 0) for page in pages[:granted])
        job = LoadJob(request.request_id, 1 if moves else 0, b"boot", moves, 10.0, pages[granted:])
        self._new_loads.append(_Load(job, list(request.block_hashes[first : first + granted])))
        self._loads[request.request_id] = self._new_loads[-1]

    def build_connector_meta(
        self, scheduled: Sequence[ScheduledRequest], preempted_request_ids: frozenset[str]
    ) -> ConnectorMetadata:
        loads, self._new_loads = self._new_loads, []
        saves = [save for share in scheduled for save in self._plan_save(share)]
        self.preempted += preempted_request_ids
        return ConnectorMetadata(tuple(load.job for load in loads), tuple(saves), preempted_request_ids)

    def _plan_save(self, share: ScheduledRequest) -> list[SaveJob]:
        assert self._may_compute(share.request), "computed while its pages are being loaded"
        step = self.spec.block_tokens
        first = share.num_computed_tokens // step
        last = (share.num_computed_tokens + share.num_scheduled_tokens) // step
        if first == last:
            return []
        self._num_jobs += 1
        hashes = list(share.request.block_hashes[first:last])
        assert len(hashes) == last - first
        moves = tuple(BlockMove(page, 0, 0) for page in share.block_ids[first:last])
        job = SaveJob(self._num_jobs, share.request.request_id, b"boot", moves)
        self._saves[job.job_id] = _Save(job, hashes)
        return [job]

    def _may_compute(self, request: Request) -> bool:
        return request.request_id not in self._loads

    def update_connector_output(self, output: WorkerOutput) -> None:
        for request_id in output.finished_loading:
            load = self._loads.pop(request_id)
            assert load.due == NOT_AT_WORK, "given up while the worker had it"
            pages = {*(move.block_id for move in load.job.moves), *load.job.lost_block_ids}
            if not pages.isdisjoint(output.failed_block_ids):
                self._load_failed.add(request_id)
        for job_id, written in output.finished_saving:
            save = self._saves.pop(job_id)
            assert save.due == NOT_AT_WORK, "given up while the worker had it"
            assert len(written) == len(save.job.moves)
            for i, block_hash in enumerate(save.hashes):
                if written[i]:
                    self.store.put(block_hash, save.snapshots[i])
                    self.num_saved_blocks += 1

    def request_finished(self, request: Request) -> bool:
        assert request not in self._finished
        self._finished.append(request)
        return self.has_pending(request.request_id)

    def has_pending(self, request_id: str) -> bool:
        saving = any(save.job.request_id == request_id for save in self._saves.values())
        return request_id in self._loads or saving

    def close(self) -> None:
        self.closed.append("scheduler")


class _Worker:
    def __init__(self, shared: FakeConnector) -> None:
        self._shared = shared
        self._reported: list[tuple[int, tuple[bool, ...]]] = []

    def register_pages(self, pages: Pages) -> None:
        assert pages.page_nbytes == self._shared.spec.block_nbytes
        self._pages = pages

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        for job_id, save in self._shared._saves.items():
            if save.job.request_id in meta.preempted_request_ids and save.due < NOT_AT_WORK:
                self._report(job_id, save)

    def start_load(self, meta: ConnectorMetadata) -> None:
        for job in meta.loads:
            load = self._shared._loads[job.request_id]
            load.due = self._due(self._shared.temper.max_load_delay)
            for move in job.moves:
                self._pages.copy_in(move.block_id, np.full(self._pages.page_nbytes, NAN_BYTE, np.uint8))

    def start_save(self, meta: ConnectorMetadata) -> None:
        for job in meta.saves:
            snapshots = [self._page(move) for move in job.moves]
            assert not any(np.isnan(page.view(np.float16)).any() for page in snapshots)
            due = self._due(self._shared.temper.max_save_delay)
            save = self._shared._saves[job.job_id]
            save.snapshots, save.due = snapshots, due

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:
        shared = self._shared
        shared._tick += 1
        if wait_s:  # an engine that waits gets the next news at once
            dues = [work.due for work in (*shared._loads.values(), *shared._saves.values()) if work.due < NOT_AT_WORK]
            shared._tick = max(shared._tick, min(dues, default=0))
        ended = [load for load in shared._loads.values() if load.due <= shared._tick]
        failed = {page for load in ended for page in self._finish_load(load)}
        for job_id, save in shared._saves.items():
            if save.due <= shared._tick:
                self._report(job_id, save)
        reported, self._reported = tuple(self._reported), []
        return WorkerOutput(frozenset(load.job.request_id for load in ended), frozenset(failed), reported)

    def close(self) -> None:
        self._shared.closed.append("worker")

    def _finish_load(self, load: _Load) -> list[int]:
        """Copy what arrives; a page whose block fails is left half copied, half NaN. Returns the pages without content."""
        shared, failed = self._shared, list(load.job.lost_block_ids)
        for move, block_hash in zip(load.job.moves, load.hashes, strict=True):
            page = self._page(move)
            assert (page == NAN_BYTE).all(), "somebody wrote a page that is being loaded"
            arrived = len(page)
            if shared._rng.random() < shared.temper.block_fails:
                arrived //= 2
                failed.append(move.block_id)
                shared.num_failed_blocks += 1
            else:
                shared.num_loaded_blocks += 1
            page[:arrived] = shared.store.blocks[block_hash][:arrived]
            if shared.temper.flip_a_bit:
                page[1] ^= 0x80  # the sign of one number of layer 0
            self._pages.copy_in(move.block_id, page)
        load.due = NOT_AT_WORK
        return failed

    def _report(self, job_id: int, save: _Save) -> None:
        for move, snapshot in zip(save.job.moves, save.snapshots, strict=True):
            assert np.array_equal(self._page(move), snapshot), "a page changed while it was being saved"
        save.due = NOT_AT_WORK  # reported; waits for update_connector_output
        self._reported.append((job_id, (True,) * len(save.job.moves)))

    def _due(self, max_delay: int) -> int:
        return self._shared._tick + 1 + int(self._shared._rng.integers(0, max_delay + 1))

    def _page(self, move: BlockMove) -> np.ndarray:
        content = np.empty(self._pages.page_nbytes, np.uint8)
        self._pages.copy_out(move.block_id, content)
        return content
