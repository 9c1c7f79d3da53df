"""The worker side: copies between the engine's pages and the shared arena, in the background, one copy each way.

Two threads, one for loads and one for saves, so that a load never queues behind a save. numpy's copy releases the GIL, so
the engine computes meanwhile. A thread takes jobs and reports through one queue; nothing else is shared but the record of
saves in flight, by which handle_preemptions waits for a job or calls it off.

A load is believed only if the arena is still the one in which the lease was granted and the slot's generation is the same
before and after the copy. Whatever goes wrong, the blocks from there on are reported as failed and the engine recomputes.

A load may name blocks that are still being read from a drive; the generation table says when they are there. The load
thread works on all open loads in turn, the oldest first, and copies of each what has arrived, in prefix order: so the
first block is in its page while the next is being read, and a load that waits holds up none that need not.

      load 1  [copied][copied][ there ][ on its way ][ there ]      copies one block, then waits
      load 2  [ on its way ][ on its way ]                          waits
      load 3  [ there ][ there ]                                    copies both, is reported

A load by layers, all of whose blocks are there when its turn comes, is copied a few layers at a time, of all blocks, while the
engine attends to the first ones. All generations are looked at before the first copy and again after the last one, and only
then are the last layers said to be there. If a block is not there at first, the load goes on as any other.

      block     0   1   2   3
      layer 0  [1] [2] [3] [4]      the order of copies; wait_for_layer(0) returns after the fourth
      layer 1  [5] [6] [7] [8]      and wait_for_layer(1) when the load has been reported

A save that has begun during the forward is copied likewise, each layer as soon as it has been computed.

A block that lies in the slab too is read from there, unless the load goes by layers; what is to be copied there is copied from
the arena when all else of the load is done.

A load from the back is copied one block at a time, the last one first, for as long as the engine has not claimed the next
(FillCursors). It ends where the two meet, at a block that does not come, or at its deadline, and is reported at once.

      block     0   1   2   3   4   5   6   7
                [ claimed  ]            [3] [2] [1]     the order of copies; next is block 4, unless the engine claims it
"""

import logging
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.client import ClientArena
from kvstore.client_arena import Arrival
from kvstore.client_slab import HOST, ClientSlab
from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError
from kvstore.core.limits import ARRIVAL_POLL_S
from kvstore.engine_connector.block_copies import (
    arrival_in,
    copy_in,
    copy_out,
    is_current,
    layer_steps,
    num_current,
    slot_of,
    takes_many,
)
from kvstore.engine_connector.layers import ALL_LAYERS, LayerProgress
from kvstore.engine_connector.open_load import OpenLoad, cursors_of
from kvstore.engine_connector.protocol import (
    BlockMove,
    ConnectorMetadata,
    DeviceBlockPages,
    FilledFrom,
    LayeredPages,
    LoadJob,
    LoadTime,
    Pages,
    SaveJob,
    SlabFilled,
    WorkerOutput,
)
from kvstore.engine_connector.saves_in_flight import SavesInFlight
from kvstore.engine_connector.session import StoreSession

logger = logging.getLogger(__name__)

PREEMPTION_DEADLINE_S = 1.0
"""Wait for the saves of preempted requests. Past it they are called off: what they copied is reported as not written."""

LAYERS_DEADLINE_S = 0.5
"""A step waits at most so long for all layers of one load. Past it the step does without the request, whose load goes on: it was
held up behind other loads, and others' tokens in the step must not be."""

_NEXT_LAYER_DEADLINE_S = 30.0
"""A save that has begun waits at most so long for the forward to compute its next layers; then it is reported as not written."""

_STOP_DEADLINE_S = 5.0


class _Loaded(NamedTuple):
    request_id: str
    whole: bool
    block_ids: tuple[int, ...]
    failed_block_ids: tuple[int, ...]
    nbytes: int
    copying_s: float
    seconds: float  # in all
    filled_from: int | None  # of a load from the back
    slab_filled: tuple[int, ...]


class _Saved(NamedTuple):
    job_id: int
    written: tuple[bool, ...]
    nbytes: int
    seconds: float  # from the job's turn on: by layers, the forward's time is in it


class _Save(NamedTuple):
    """`computed`: layers of the pages that do not change any more."""

    job: SaveJob
    computed: LayerProgress


class StoreWorkerSide:
    """Implements protocol.WorkerSide. Reads the arena of `session`, which the scheduler side (or whoever made it) closes.
    `block_nbytes`: of the spec of each layer group; () where whoever registers pages has compared them."""

    def __init__(self, session: StoreSession, *, block_nbytes: Sequence[int] = (), clock: Clock | None = None) -> None:
        self._session = session
        self._block_nbytes = tuple(block_nbytes)
        self._clock = clock or MonotonicClock()
        self._pages: tuple[Pages, ...] = ()  # of each layer group; none before register_pages and after close
        self._reports: queue.SimpleQueue[_Loaded | _Saved] = queue.SimpleQueue()
        self._in_flight = SavesInFlight()
        self._by_layers: dict[str, OpenLoad] = {}  # by request, until they are reported; only the engine's thread's
        self._from_back: dict[str, OpenLoad] = {}  # likewise
        self._num_jobs: dict[str, int] = {}  # likewise: loads of a request, one in each of its layer groups
        self._parts: dict[str, list[_Loaded]] = {}  # likewise: those that have ended
        self._step = 0  # that the engine is in
        self._new_loads: queue.SimpleQueue[OpenLoad | None] = queue.SimpleQueue()  # the engine bounds it: one a request
        self._load_thread = threading.Thread(target=self._run_loads, name="kvstore-load", daemon=True)
        self._begun: dict[int, _Save] = {}  # by job, from begin_saves to start_save; the engine's thread's too
        self._new_saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()  # likewise: a few a request
        self._save_thread = threading.Thread(target=self._run_saves, name="kvstore-save", daemon=True)

    def register_pages(self, pages: Pages, *others: Pages) -> None:
        """See protocol.WorkerSide. Raises ConfigError for pages of other sizes than the specs' blocks: a copy would reach into
        the slot behind its own."""
        found = tuple(each.page_nbytes for each in (pages, *others))
        if self._block_nbytes and found != self._block_nbytes:
            raise ConfigError(
                f"page_nbytes: pages have {found} bytes, the specs' blocks {self._block_nbytes}; one for each spec, and the same",
                field="page_nbytes",
                value=str(found),
            )
        self._pages = (pages, *others)
        self._load_thread.start()
        self._save_thread.start()

    def handle_preemptions(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide. The first verb of a step: a worker that has a session of its own and asks nothing learns
        here of another sidecar, and maps its arena while the engine computes."""
        self._session.follow(meta.boot_id)
        if meta.preempted_request_ids:
            self._in_flight.settle(meta.preempted_request_ids, PREEMPTION_DEADLINE_S)

    def start_load(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide."""
        self._step = meta.step
        for job in meta.loads:
            load = OpenLoad(job, started_s=self._clock.now_s())
            self._num_jobs[job.request_id] = self._num_jobs.get(job.request_id, 0) + 1
            if job.slab and (slab := self._slab_of(job)) is not None:
                load.slab, load.slab_reads = slab, {move.position: move for move in job.slab if not move.fills}
            if job.by_layers:
                self._by_layers[job.request_id] = load
            if job.from_back:
                load.cursors = cursors_of(job)
                self._from_back[job.request_id] = load
            self._new_loads.put(load)

    def claim_front(self, request_id: str, num_blocks: int) -> int:
        """See protocol.BothEndsWorker."""
        load = self._from_back[request_id]
        assert load.cursors is not None
        return load.cursors.claim_front(num_blocks, self._clock.now_s() - load.started_s)

    def wait_for_layer(self, request_id: str, layer: int) -> bool:
        """See protocol.LayerwiseWorker."""
        load = self._by_layers[request_id]
        until_s = min(load.until_s, load.started_s + LAYERS_DEADLINE_S)
        return load.progress.wait(layer + 1, until_s - self._clock.now_s())

    def start_save(self, meta: ConnectorMetadata) -> None:
        """See protocol.WorkerSide."""
        for job in meta.saves:
            begun = self._begun.pop(job.job_id, None)
            save = begun or _Save(job, LayerProgress())
            save.computed.end(ALL_LAYERS)
            if begun is None:
                self._put_save(save)
        assert not self._begun, "begun saves are in start_save, or dropped"

    def begin_saves(self, saves: Sequence[SaveJob]) -> None:
        """See protocol.LayerwiseWorker."""
        for job in saves:
            self._begun[job.job_id] = _Save(job, LayerProgress())
            self._put_save(self._begun[job.job_id])

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """See protocol.LayerwiseWorker."""
        for save in self._begun.values():
            if save.job.request_id in request_ids:
                save.computed.advance(layer + 1)

    def drop_saves(self) -> None:
        """See protocol.LayerwiseWorker."""
        self._in_flight.call_off(self._begun)
        for save in self._begun.values():
            save.computed.end(0)
        self._begun.clear()

    def _put_save(self, save: _Save) -> None:
        self._in_flight.add(save.job)
        self._new_saves.put(save)

    def get_output(self, *, wait_s: float = 0.0) -> WorkerOutput:
        """See protocol.WorkerSide."""
        reports = list(_drain(self._reports, wait_s))
        loaded = [
            whole for report in reports if isinstance(report, _Loaded) and (whole := self._whole(report)) is not None
        ]
        saved = [report for report in reports if isinstance(report, _Saved)]
        for report in loaded:
            self._by_layers.pop(report.request_id, None)
            self._from_back.pop(report.request_id, None)
        return WorkerOutput(
            finished_loading=frozenset(report.request_id for report in loaded),
            failed_block_ids=frozenset(block_id for report in loaded for block_id in report.failed_block_ids),
            finished_saving=tuple((report.job_id, report.written) for report in saved),
            load_seconds=sum(report.copying_s for report in loaded),
            load_bytes=sum(report.nbytes for report in loaded),
            save_seconds=sum(report.seconds for report in saved),
            save_bytes=sum(report.nbytes for report in saved),
            filled_from=tuple(FilledFrom(r.request_id, r.filled_from) for r in loaded if r.filled_from is not None),
            load_times=tuple(LoadTime(report.request_id, report.seconds) for report in loaded),
            step=self._step,
            slab_filled=tuple(SlabFilled(r.request_id, r.slab_filled) for r in loaded if r.slab_filled),
        )

    def _whole(self, report: _Loaded) -> _Loaded | None:
        """The report of a request's load, once that of its last layer group has come."""
        parts = self._parts.setdefault(report.request_id, [])
        parts.append(report)
        if len(parts) < self._num_jobs[report.request_id]:
            return None
        del self._parts[report.request_id], self._num_jobs[report.request_id]
        if not report.whole:
            return report
        block_ids = tuple(block_id for part in parts for block_id in part.block_ids)
        return _Loaded(
            request_id=report.request_id,
            whole=True,
            block_ids=block_ids,
            failed_block_ids=block_ids if any(part.failed_block_ids for part in parts) else (),
            nbytes=sum(part.nbytes for part in parts),
            copying_s=sum(part.copying_s for part in parts),
            seconds=max(part.seconds for part in parts),
            filled_from=None,
            slab_filled=(),
        )

    def close(self) -> None:
        """See protocol.WorkerSide. What is queued is finished, except for blocks that have not arrived."""
        self.drop_saves()
        for jobs, thread in ((self._new_loads, self._load_thread), (self._new_saves, self._save_thread)):
            jobs.put(None)
            if thread.is_alive():
                thread.join(_STOP_DEADLINE_S)
        self._pages = ()

    # --- on the load thread ----------------------------------------------------------------------------------------------

    def _run_loads(self) -> None:
        loads: list[OpenLoad] = []
        pause_s, closing = 0.0, False
        while not closing:
            closing = self._take_loads(loads, pause_s)
            num_copied = self._copy_arrived(loads, closing=closing) if loads else 0
            pause_s = 0.0 if num_copied else min(max(2 * pause_s, ARRIVAL_POLL_S[0]), ARRIVAL_POLL_S[1])

    def _take_loads(self, loads: list[OpenLoad], pause_s: float) -> bool:
        """Add what start_load has put: waits for it while there is nothing else to do, else at most `pause_s`. Whether
        close() was called."""
        try:
            load = self._new_loads.get(timeout=pause_s if loads else None)
            while load is not None:
                loads.append(load)
                load = self._new_loads.get_nowait()
        except queue.Empty:
            return False
        return True

    def _copy_arrived(self, loads: list[OpenLoad], *, closing: bool) -> int:
        """Copy of each load what is there, and report those that are over; how many blocks were copied."""
        live_boot_id = self._session.live_boot_id  # before the table: what a sidecar that dies now said last is seen
        num_copied = 0
        for load in list(loads):
            num_before = load.num_copied
            waits = self._copy_load(load, live_boot_id) is Arrival.ON_ITS_WAY
            num_copied += max(0, load.num_copied - num_before)
            if closing or not waits or self._clock.now_s() >= load.until_s:
                loads.remove(load)
                self._report_load(load)
        return num_copied

    def _copy_load(self, load: OpenLoad, live_boot_id: bytes) -> Arrival:
        started_s = self._clock.now_s()
        copy = self._copy_in if load.cursors is None else self._copy_from_back
        try:
            arrival = copy(load, live_boot_id)
        except Exception:  # outermost frame of the job: whatever it was, the load must be reported
            logger.exception("load failed request_id=%s", load.job.request_id)
            load.num_loaded = 0
            return Arrival.LOST
        load.copying_s += self._clock.now_s() - started_s
        return arrival

    def _copy_in(self, load: OpenLoad, live_boot_id: bytes) -> Arrival:
        """Copy blocks in prefix order as long as they are there; what is to be said of the one after them."""
        pages, moves = self._pages_of(load.job), load.job.moves
        if load.job.by_layers and not load.num_loaded and isinstance(pages, LayeredPages):
            if load.arena is None:
                load.arena = self._session.arena(load.job.boot_id)
            if load.arena is not None and self._copy_layers(load, load.arena, pages):
                return Arrival.THERE if load.num_loaded == len(moves) else Arrival.LOST
        while load.num_loaded < len(moves):
            arrival = self._look(load, moves[load.num_loaded], live_boot_id)
            if arrival is not Arrival.THERE:
                return arrival
            if pages is None or self._clock.now_s() >= load.until_s:
                return Arrival.LOST
            if not load.copy_next(pages):
                return Arrival.LOST
        return Arrival.THERE

    def _copy_from_back(self, load: OpenLoad, live_boot_id: bytes) -> Arrival:
        """Copy blocks, the last one first, as long as they are there and not the front's. THERE: the two have met."""
        cursors, pages = load.cursors, self._pages_of(load.job)
        assert cursors is not None
        while not cursors.met:
            index = cursors.back - 1
            move = load.job.moves[index]
            arrival = self._look(load, move, live_boot_id)
            if arrival is not Arrival.THERE:
                return arrival
            if pages is None or self._clock.now_s() >= load.until_s:
                return Arrival.LOST
            if not cursors.claim_back():
                continue  # the front has just claimed it: they have met
            good = False
            try:
                good = load.copy_block(index, pages)
            finally:
                cursors.copied(good=good)
            if not good:
                return Arrival.LOST
        return Arrival.THERE

    def _copy_layers(self, load: OpenLoad, arena: ClientArena, pages: LayeredPages) -> bool:
        """Copy a load whose blocks are all there, and note of how many of them all layers are good. False: not all are there, or
        the deadline came, and nothing is good."""
        moves = load.job.moves
        if num_current(arena, moves) < len(moves):
            return False
        slots = [slot_of(arena, move.offset, pages.page_nbytes) for move in moves]
        for layers in layer_steps(pages, len(moves)):
            load.progress.advance(layers.start)
            if self._clock.now_s() >= load.until_s:
                return False
            copy_in(pages, moves, slots, layers)
        load.num_loaded = num_current(arena, moves)
        return True

    def _look(self, load: OpenLoad, move: BlockMove, live_boot_id: bytes) -> Arrival:
        """Whether the next block is there; and if not, whether somebody is alive who brings it, or is being connected to."""
        job, session = load.job, self._session
        connecting = session.awaits(job.boot_id)
        if load.arena is None:
            load.arena = session.arena(job.boot_id)
        arrival = Arrival.ON_ITS_WAY if load.arena is None else arrival_in(load.arena, move)
        if arrival is not Arrival.ON_ITS_WAY or connecting:
            return arrival
        brought = load.arena is not None and job.boot_id in (live_boot_id, session.live_boot_id)
        return arrival if brought else Arrival.LOST

    def _report_load(self, load: OpenLoad) -> None:
        job, cursors = load.job, load.cursors
        if cursors is None:
            failed = tuple(move.block_id for move in job.moves[load.num_loaded :]) + job.lost_block_ids
        else:
            cursors.end()
            failed = tuple(move.block_id for move in job.moves[cursors.front : cursors.back])
        if failed:
            logger.warning(
                "load incomplete request_id=%s loaded=%d failed=%d", job.request_id, load.num_copied, len(failed)
            )
        filled = self._fill_slab(load)
        self._reports.put(
            _Loaded(
                job.request_id,
                job.whole,
                (*(move.block_id for move in job.moves), *job.lost_block_ids),
                failed,
                load.num_copied * self._page_nbytes(job),
                load.copying_s,
                self._clock.now_s() - load.started_s,
                None if cursors is None else cursors.back,
                filled,
            )
        )
        load.progress.end(0 if failed else ALL_LAYERS)

    def _fill_slab(self, load: OpenLoad) -> tuple[int, ...]:
        """Copy into the slab what is to be copied there, as far as there is time; which blocks. From the arena, whose bytes are
        those that were saved, whatever the pages make of them. Its slot and the slab's are looked at before and after."""
        slab, arena, filled = load.slab, load.arena, []
        if slab is None or arena is None:
            return ()
        try:
            for move in load.job.slab:
                source = load.job.moves[move.position]
                if self._clock.now_s() >= load.until_s:
                    break
                if not (move.fills and is_current(arena, source) and slab.is_current(move.offset, move.generation)):
                    continue
                slab.write(move.offset, slot_of(arena, source.offset, self._page_nbytes(load.job)))
                if is_current(arena, source) and slab.is_current(move.offset, move.generation):
                    filled.append(move.position)
        except Exception:  # as for the load, which is none the worse for it
            logger.exception("slab not filled request_id=%s", load.job.request_id)
        return tuple(filled)

    def _slab_of(self, job: LoadJob) -> ClientSlab | None:
        """If our pages can read from it."""
        slab = self._session.slab(job.boot_id)
        if slab is None or slab.device == HOST or isinstance(self._pages_of(job), DeviceBlockPages):
            return slab
        return None

    # --- on the save thread ----------------------------------------------------------------------------------------------

    def _run_saves(self) -> None:
        while (save := self._new_saves.get()) is not None:
            self._save(save)

    def _save(self, save: _Save) -> None:
        job, written, started_s = save.job, [False] * len(save.job.moves), self._clock.now_s()
        try:
            self._copy_out(save, written)
        except Exception:  # outermost frame of the job: whatever it was, the save must be reported
            logger.exception("save failed request_id=%s", job.request_id)
            written = [False] * len(job.moves)
        self._in_flight.remove(job)
        nbytes = sum(written) * self._page_nbytes(job)
        self._reports.put(_Saved(job.job_id, tuple(written), nbytes, self._clock.now_s() - started_s))

    def _copy_out(self, save: _Save, written: list[bool]) -> None:
        job, pages = save.job, self._pages_of(save.job)
        in_batches = takes_many(pages)
        if isinstance(pages, LayeredPages) and (in_batches or not save.computed.wait(ALL_LAYERS, 0.0)):
            self._copy_out_layers(save, pages, written)
        elif pages is not None and save.computed.wait(ALL_LAYERS, _NEXT_LAYER_DEADLINE_S):
            self._copy_out_whole(job, pages, written)

    def _copy_out_layers(self, save: _Save, pages: LayeredPages, written: list[bool]) -> None:
        """A few layers of all blocks, as they are computed. Nothing is written until all is."""
        job, arena = save.job, self._session.arena(save.job.boot_id)
        if arena is None:
            return
        good = [True] * len(job.moves)
        batch = max(1, len(job.moves)) if takes_many(pages) else 1
        for layers in layer_steps(pages, len(job.moves)):
            if not save.computed.wait(layers.stop, _NEXT_LAYER_DEADLINE_S):
                return
            for first in range(0, len(job.moves), batch):
                if not self._in_flight.wanted(job):
                    return
                numbers = range(first, first + batch)
                for i in numbers:
                    good[i] = good[i] and is_current(arena, job.moves[i])
                copy_out(pages, arena, [job.moves[i] for i in numbers if good[i]], layers)
                for i in numbers:
                    good[i] = good[i] and is_current(arena, job.moves[i])
        # All computed is not enough: the step may yet break off, and then its pages are written anew.
        if save.computed.wait(ALL_LAYERS, _NEXT_LAYER_DEADLINE_S) and self._in_flight.wanted(job):
            written[:] = good

    def _copy_out_whole(self, job: SaveJob, pages: Pages, written: list[bool]) -> None:
        arena = self._session.arena(job.boot_id)
        if arena is None:
            return
        for i, move in enumerate(job.moves):
            if not self._in_flight.wanted(job) or not is_current(arena, move):
                return
            pages.copy_out(move.block_id, slot_of(arena, move.offset, pages.page_nbytes))
            written[i] = self._in_flight.wanted(job)  # called off meanwhile: the page may have changed under the copy

    def _pages_of(self, job: LoadJob | SaveJob) -> Pages | None:
        return self._pages[job.group] if self._pages else None

    def _page_nbytes(self, job: LoadJob | SaveJob) -> int:
        return self._pages[job.group].page_nbytes if self._pages else 0


def _drain(reports: "queue.SimpleQueue[_Loaded | _Saved]", wait_s: float) -> Iterable[_Loaded | _Saved]:
    try:
        if wait_s > 0:
            yield reports.get(timeout=wait_s)
        while True:
            yield reports.get_nowait()
    except queue.Empty:
        return
