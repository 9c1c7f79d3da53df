"""The worker side: copies between the engine's pages and the shared arena, in the background, one copy each way.

Two threads, one for loads and one for saves, so that a load never queues behind a save. numpy's copy releases the GIL, so
the engine computes meanwhile. A thread takes a job and reports through one queue; nothing else is shared but the record of
saves in flight, by which handle_preemptions waits for a job or calls it off.

A load is believed only if the arena is still the one in which the lease was granted and the slot's generation is the same
before and after the copy. Whatever goes wrong, the blocks from there on are reported as failed and the engine recomputes.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.client import ClientArena
from kvstore.engine_connector.protocol import BlockMove, ConnectorMetadata, LoadJob, Pages, SaveJob, WorkerOutput
from kvstore.engine_connector.session import StoreSession

logger = logging.getLogger(__name__)
J = TypeVar("J")

PREEMPTION_DEADLINE_S = 1.0
"""Wait for the saves of preempted requests. Past it they are called off: what they copied is reported as not written."""

_STOP_DEADLINE_S = 5.0


class _Loaded(NamedTuple):
    request_id: str
    failed_block_ids: tuple[int, ...]
    nbytes: int
    seconds: float


class _Saved(NamedTuple):
    job_id: int
    written: tuple[bool, ...]


class StoreWorkerSide:
    """Implements protocol.WorkerSide. Reads the arena of `session`, which the scheduler side (or whoever made it) closes."""

    def __init__(self, session: StoreSession) -> None:
        self._session = session
        self._pages: Pages | None = None
        self._reports: queue.SimpleQueue[_Loaded | _Saved] = queue.SimpleQueue()
        self._in_flight = _SavesInFlight()
        self._loads = _JobThread[tuple[LoadJob, float]]("kvstore-load", self._load)
        self._saves = _JobThread[SaveJob]("kvstore-save", self._save)

    def register_pages(self, pages: Pages) -> None:
        """See protocol.WorkerSide."""
        self._pages = pages
        self._loads.start()
        self._saves.start()

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide. The first verb of a step: a worker that has a session of its own and asks nothing learns
        here of another sidecar, and maps its arena while the engine computes."""
        self._session.follow(meta.boot_id)
        if meta.preempted_request_ids:
            self._in_flight.settle(meta.preempted_request_ids, PREEMPTION_DEADLINE_S)

    def start_load(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide."""
        for job in meta.loads:
            self._loads.put((job, time.monotonic() + job.deadline_s))

    def start_save(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide."""
        for job in meta.saves:
            self._in_flight.add(job)
            self._saves.put(job)

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:
        """See protocol.WorkerSide."""
        reports = list(_drain(self._reports, wait_s))
        loaded = [report for report in reports if isinstance(report, _Loaded)]
        return WorkerOutput(
            finished_loading=frozenset(report.request_id for report in loaded),
            failed_block_ids=frozenset(block_id for report in loaded for block_id in report.failed_block_ids),
            finished_saving=tuple((r.job_id, r.written) for r in reports if isinstance(r, _Saved)),
            load_seconds=sum(report.seconds for report in loaded),
            load_bytes=sum(report.nbytes for report in loaded),
        )

    def close(self) -> None:
        """See protocol.WorkerSide."""
        self._loads.close()
        self._saves.close()
        self._pages = None

    # --- on the load thread ----------------------------------------------------------------------------------------------

    def _load(self, item: tuple[LoadJob, float]) -> None:
        job, deadline_s = item
        started_s = time.monotonic()
        num_loaded = 0
        try:
            num_loaded = self._copy_in(job, deadline_s)
        except Exception:  # outermost frame of the job: whatever it was, the load must be reported
            logger.exception("load failed request_id=%s", job.request_id)
        failed = tuple(move.block_id for move in job.moves[num_loaded:]) + job.lost_block_ids
        if failed:
            logger.warning("load incomplete request_id=%s loaded=%d failed=%d", job.request_id, num_loaded, len(failed))
        nbytes = num_loaded * self._page_nbytes()
        self._reports.put(_Loaded(job.request_id, failed, nbytes, time.monotonic() - started_s))

    def _copy_in(self, job: LoadJob, deadline_s: float) -> int:
        """Copy blocks in prefix order; how many are good. Holds the arena, so that it stays mapped while it copies."""
        arena, pages = self._session.arena(job.boot_id), self._pages
        if arena is None or pages is None:
            return 0
        for num_loaded, move in enumerate(job.moves):
            if time.monotonic() > deadline_s or not _is_current(arena, move):
                return num_loaded
            pages.copy_in(move.block_id, _slot(arena, move.offset, pages.page_nbytes))
            if not _is_current(arena, move):
                return num_loaded
        return len(job.moves)

    # --- on the save thread ----------------------------------------------------------------------------------------------

    def _save(self, job: SaveJob) -> None:
        written = [False] * len(job.moves)
        try:
            self._copy_out(job, written)
        except Exception:  # outermost frame of the job: whatever it was, the save must be reported
            logger.exception("save failed request_id=%s", job.request_id)
            written = [False] * len(job.moves)
        self._in_flight.remove(job)
        self._reports.put(_Saved(job.job_id, tuple(written)))

    def _copy_out(self, job: SaveJob, written: list[bool]) -> None:
        arena, pages = self._session.arena(job.boot_id), self._pages
        if arena is None or pages is None:
            return
        for i, move in enumerate(job.moves):
            if not self._in_flight.wanted(job) or not _is_current(arena, move):
                return
            pages.copy_out(move.block_id, _slot(arena, move.offset, pages.page_nbytes))
            written[i] = self._in_flight.wanted(job)  # called off meanwhile: the page may have changed under the copy

    def _page_nbytes(self) -> int:
        return 0 if self._pages is None else self._pages.page_nbytes


def _slot(arena: ClientArena, offset: int, nbytes: int) -> NDArray[np.uint8]:
    return arena.array[offset : offset + nbytes]


def _is_current(arena: ClientArena, move: BlockMove) -> bool:
    """Whether the slot still is what was granted. Kept also for writes: a slot that is not ours must not be touched."""
    return int(arena.generations[move.offset >> 12]) == move.generation


def _drain(reports: "queue.SimpleQueue[_Loaded | _Saved]", wait_s: float) -> Iterable[_Loaded | _Saved]:
    try:
        if wait_s > 0:
            yield reports.get(timeout=wait_s)
        while True:
            yield reports.get_nowait()
    except queue.Empty:
        return


class _SavesInFlight:
    """Which save jobs still read pages. A job is wanted until settle() has waited for it in vain."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._request_ids: dict[int, str] = {}
        self._called_off: set[int] = set()

    def add(self, job: SaveJob) -> None:
        with self._changed:
            self._request_ids[job.job_id] = job.request_id

    def remove(self, job: SaveJob) -> None:
        with self._changed:
            del self._request_ids[job.job_id]
            self._called_off.discard(job.job_id)
            self._changed.notify_all()

    def wanted(self, job: SaveJob) -> bool:
        with self._changed:
            return job.job_id not in self._called_off

    def settle(self, request_ids: frozenset[str], deadline_s: float) -> None:
        """Return when no wanted save of these requests is under way."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: not self._jobs_of(request_ids), deadline_s)
            finally:  # also when a Ctrl-C ends the wait: the pages are about to be used again
                self._called_off |= self._jobs_of(request_ids)

    def _jobs_of(self, request_ids: frozenset[str]) -> set[int]:
        return {job_id for job_id, request_id in self._request_ids.items() if request_id in request_ids}


class _JobThread(Generic[J]):
    """One daemon thread that works off a queue. The queue is bounded by the engine: one load and a few saves a request."""

    def __init__(self, name: str, work: Callable[[J], None]) -> None:
        self._queue: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: J) -> None:
        self._queue.put(job)

    def close(self) -> None:
        """Finish the job at hand and those queued before, waiting at most a deadline. Safe to call twice."""
        self._queue.put(None)
        if self._thread.is_alive():
            self._thread.join(_STOP_DEADLINE_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._work(job)
