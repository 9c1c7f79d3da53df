"""A drive's threads: they carry out moves between the arena and its data file, and learn from what fails."""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import DRIVE_THREADS, MAX_DRIVE_ERRORS, MAX_IO_BYTES
from kvstore.core.moves import BAD_SLOT, BlockRecord, Move, MoveDone, MoveProblem, Urgency
from kvstore.tiers.nvme.file import BlockFile
from kvstore.tiers.nvme.gate import WHOLE_DRIVE, Gate
from kvstore.tiers.nvme.move_queue import MoveQueue, move_nbytes
from kvstore.tiers.nvme.read_window import ReadWindow
from kvstore.tiers.nvme.slot_io import SlotIO

_log = logging.getLogger(__name__)

_CHECKSUM_THREADS = 2
"""Threads beyond the I/Os in flight, so that the drive works while checksums are computed: 10 GB/s each, or more."""
_HAND_OVER_BYTES = 256 << 10
"""A check of less is done sooner than another thread wakes."""
_IDLE_WAIT_S = 60.0
"""An idle thread looks up so often, though every submit wakes one."""
_HANG_S = 10.0
"""An I/O in flight for so long is told: no drive that is well takes a tenth of it."""
_REPORT_DEADLINE_S = 1.0
"""Callbacks are short: one that runs when the drive is given up is waited for so long."""


class IOHealth(NamedTuple):
    """How reading and writing the data file goes. `problems` counts failed blocks by MoveProblem (STOPPED and CANCELLED are
    none), and "deleted" once."""

    state: str  # "ready" or "degraded"
    reason: str  # "" when ready
    problems: dict[str, int]


class Drive:
    """A queue of moves, up to `threads` I/Os in flight, at most half of them writes, and a gate each for reads and writes.

        READ, PREFETCH   queue -> preadv -> check against the record's checksum -> on_done
        WRITE            queue -> checksum -> pwritev -> on_written -> on_done

    Each arrow is a place where another thread may go on. A free thread does what keeps the drive busy first: it begins a
    read, else a write whose checksum is there, else checks what was read, else computes a checksum for a later write.
    So a read waits for part of a write at most, and a joined I/O for no checksum but its own. On a slow drive fewer reads are
    in flight, and smaller ones (ReadWindow), so that most can be cancelled or overtaken.

    Callbacks: `on_written` gets the records, with checksums, of blocks written well, before `on_done` gets the ends of all
    moves of that I/O. They run on these threads, several at once; they must be short and must not raise. The file belongs
    to the caller, who may sync it at any time, and must not close it before `close` has answered True.
    """

    def __init__(
        self,
        file: BlockFile,
        *,
        name: str,
        arena: NDArray[np.uint8],
        on_done: Callable[[list[MoveDone]], None],
        on_written: Callable[[list[BlockRecord]], None],
        first_slot: int = 0,
        threads: int = DRIVE_THREADS,
        max_io_bytes: int = MAX_IO_BYTES,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        assert threads > 0
        self._file = file
        self._name = name
        self._slots = SlotIO(file, arena=arena, first_slot=first_slot)
        self._on_done = on_done
        self._on_written = on_written
        self._max_in_flight = threads
        self._max_writing = max(1, threads // 2)
        self._monotonic = monotonic
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-nvme-{name}-{number}", daemon=True)
            for number in range(threads + _CHECKSUM_THREADS)
        ]

        # All below is guarded by this lock, which nobody holds over I/O, a checksum or a callback.
        self._changed = threading.Condition(threading.Lock())
        self._queue = MoveQueue(max_io_bytes=max_io_bytes)
        self._unchecked: deque[_IO] = deque()  # read
        self._summed: deque[_IO] = deque()  # to be written
        self._num_ahead = 0  # summed or being so
        self._begun_s: dict[int, float] = {}  # of each I/O in flight, by its id()
        self._num_writing = 0  # part of those in flight
        self._reading_bytes = 0
        self._window = ReadWindow(max_bytes=threads * max_io_bytes)
        self._num_open = 0  # I/Os taken and not reported
        self._num_idle = 0
        self._num_reporting = 0
        self._gates = {
            False: Gate(max_failures=MAX_DRIVE_ERRORS),
            True: Gate(max_failures=1),
        }  # by whether it is a write
        self._problems: Counter[str] = Counter()
        self._closing = False
        self._given_up = False

    def start(self) -> None:
        """Start the threads. Moves submitted before have waited."""
        for thread in self._threads:
            thread.start()

    def submit(self, moves: Iterable[Move]) -> None:
        """Queue moves; any thread, never blocks. After `close` they end with STOPPED before this returns."""
        moves = list(moves)
        for move in moves:
            self._slots.assert_sound(move)
        with self._changed:
            refused = self._closing
            if not refused:
                self._queue.push(moves)
                self._changed.notify()  # one; it wakes the next
        if refused:
            self._on_done(_ended(moves, MoveProblem.STOPPED))

    def cancel(self, slots: Iterable[int]) -> None:
        """End the reads and prefetches of these slots that were not begun with CANCELLED, before this returns; any thread, never
        blocks. Those begun go on, and what has ended is passed over."""
        with self._changed:
            cancelled = self._queue.cancel_reads(slots)
            self._num_reporting += bool(cancelled)
        if cancelled:
            try:
                self._on_done(_ended(cancelled, MoveProblem.CANCELLED))
            finally:
                with self._changed:
                    self._end_report()

    def hasten(self, slots: Iterable[int]) -> None:
        """Prefetches of these slots become reads, behind those that wait already; any thread, never blocks."""
        with self._changed:
            self._queue.hasten(slots)

    def busy(self) -> bool:
        """Is any move queued or under way? Its end may just have been reported."""
        with self._changed:
            return self._queue.has_reads or self._queue.has_writes or self._num_open > 0

    def health(self) -> IOHealth:
        """Any thread, never blocks."""
        self._look_for_file()
        with self._changed:
            reasons = [
                f"{verb} fail: {self._gates[writes].problem}"
                for verb, writes in (("writes", True), ("reads", False))
                if self._gates[writes].problem is not None and not (writes and self._problems["deleted"])
            ]
            if self._problems["deleted"]:
                reasons.insert(0, "the data file was deleted")
            waited_s = self._monotonic() - min(self._begun_s.values(), default=math.inf)
            if waited_s >= _HANG_S:
                reasons.append(f"hangs: an I/O has not come back for {waited_s:.0f} s")
            problems = {name: count for name, count in self._problems.items() if count}
        return IOHealth("degraded" if reasons else "ready", "; ".join(reasons), problems)

    def close(self, deadline_s: float) -> bool:
        """End moves that were not begun with STOPPED, here, and wait for those in flight. False: some I/O hangs beyond the
        deadline. Its end will not be reported, and the file must stay open until the process ends. Idempotent."""
        ends_s = time.monotonic() + deadline_s
        self._slots.stop_retrying()
        with self._changed:
            self._closing = True
            dropped = self._queue.clear() + [move for io in self._summed for move in io.moves]
            self._num_open -= len(self._summed)
            self._summed.clear()
            self._changed.notify_all()
        if dropped:
            self._on_done(_ended(dropped, MoveProblem.STOPPED))
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, ends_s - time.monotonic()))
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: not self._num_reporting, _REPORT_DEADLINE_S)
        return not any(thread.is_alive() for thread in self._threads)

    # --- what a thread does next --------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (step := self._next()) is not None:
            try:
                step.run(step.io)
            except Exception:  # noqa: BLE001 - outermost frame of a step: logged, counted as GONE; the thread goes on
                _log.exception("drive %s: a step crashed", self._name)
                self._end_crashed(step.io)

    def _end_crashed(self, io: "_IO") -> None:
        """Its moves end as if the drive were gone: nothing is known of their bytes, and no slot is to blame."""
        with self._changed:
            if io.ended:
                return
            if self._begun_s.pop(id(io), None) is not None:
                self._num_writing -= io.writes
                self._reading_bytes -= 0 if io.writes else io.nbytes
            elif io.writes:
                self._num_ahead -= 1
        io.problems = [MoveProblem.GONE] * len(io.moves)
        self._finish(io)

    def _next(self) -> "_Step | None":
        """Wait for something to do. None: the drive closes."""
        with self._changed:
            while (step := self._pick()) is None and not self._closing:
                self._num_idle += 1
                self._changed.wait(_IDLE_WAIT_S)
                self._num_idle -= 1
            if self._num_idle and self._has_step():
                self._changed.notify()  # so as many wake as have something to do
            return step

    def _pick(self) -> "_Step | None":
        if self._may_read():
            most = self._window.nbytes // min(2, self._max_in_flight)  # so that the next is on its way when one ends
            return self._begin(self._queue.take_reads(most), self._read)
        if self._may_write():
            self._num_ahead -= 1
            self._num_writing += 1
            io = self._summed.popleft()
            self._begun_s[id(io)] = self._monotonic()
            return _Step(self._write, io)
        if self._unchecked:
            return _Step(self._check, self._unchecked.popleft())
        if self._may_sum():
            return self._begin(self._queue.take_writes(), self._sum)
        return None

    def _has_step(self) -> bool:
        return self._may_read() or self._may_write() or bool(self._unchecked) or self._may_sum()

    def _may_read(self) -> bool:
        return (
            self._queue.has_reads
            and len(self._begun_s) < self._max_in_flight
            and self._reading_bytes < self._window.nbytes
        )

    def _may_write(self) -> bool:
        return bool(self._summed) and len(self._begun_s) < self._max_in_flight and self._num_writing < self._max_writing

    def _may_sum(self) -> bool:
        return self._queue.has_writes and self._num_ahead < _CHECKSUM_THREADS

    def _begin(self, moves: list[Move], run: "Callable[[_IO], None]") -> "_Step":
        writes = moves[0].urgency is Urgency.WRITE
        gate = self._gates[writes]
        ticket = gate.enter(self._monotonic())
        io = _IO(moves, writes=writes, ticket=ticket)
        self._num_open += 1
        if ticket is None:
            whole = gate.problem in WHOLE_DRIVE
            io.problems = [gate.problem if whole else MoveProblem.GONE] * len(
                moves
            )  # no slot is blamed that is not tried
            return _Step(self._finish, io)
        if writes:
            self._num_ahead += 1
        else:
            self._begun_s[id(io)] = self._monotonic()
            self._reading_bytes += io.nbytes
            io.in_flight_bytes = self._reading_bytes
        return _Step(run, io)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _read(self, io: "_IO") -> None:
        io.problems = self._slots.read(io.moves)
        with self._changed:
            begun_s = self._begun_s.pop(id(io))
            self._reading_bytes -= io.nbytes
            if not any(io.problems):
                now_s, in_flight_bytes = self._monotonic(), io.in_flight_bytes
                self._window.ended(io.nbytes, in_flight_bytes=in_flight_bytes, begun_s=begun_s, now_s=now_s)
            if self._num_idle and self._may_read() and io.nbytes >= _HAND_OVER_BYTES:
                self._unchecked.append(io)  # for the thread that this one wakes when it begins the next read
                return
        self._check(io)

    def _check(self, io: "_IO") -> None:
        for j, move in enumerate(io.moves):
            if io.problems[j] is None and self._slots.checksum(move) != move.record.checksum:
                io.problems[j] = MoveProblem.CHECKSUM
        self._finish(io)

    def _sum(self, io: "_IO") -> None:
        io.checksums = [self._slots.checksum(move) for move in io.moves]
        with self._changed:
            if not self._closing:
                self._summed.append(io)
                return
        io.problems = [MoveProblem.STOPPED] * len(io.moves)
        self._finish(io)

    def _write(self, io: "_IO") -> None:
        linked = self._look_for_file()
        io.problems = self._slots.write(io.moves) if linked else [MoveProblem.GONE] * len(io.moves)
        with self._changed:
            del self._begun_s[id(io)]
            self._num_writing -= 1
        self._finish(io)

    def _finish(self, io: "_IO") -> None:
        """Learn from how it went, then report it."""
        with self._changed:
            io.ended = True
            turned = self._learn(io)
            first_ones = self._count(io)
            muted = self._given_up
            self._num_reporting += 1
        if turned:
            _log.warning("drive %s: %s", self._name, turned)
        for problem, move in first_ones:
            _log.warning("drive %s: %s at %d, the first", self._name, problem, self._slots.file_offset(move))
        try:
            if not muted:
                self._report(io)
        finally:
            with self._changed:
                self._num_open -= 1
                self._end_report()

    def _end_report(self) -> None:
        """A callback has returned; `close` may wait for it. The lock is held."""
        self._num_reporting -= 1
        if self._closing:
            self._changed.notify_all()

    def _report(self, io: "_IO") -> None:
        checksums = io.checksums or [0] * len(io.moves)
        ends = list(zip(io.moves, checksums, io.problems, strict=True))
        if io.writes:
            written = [move.record._replace(checksum=checksum) for move, checksum, problem in ends if problem is None]
            if written:
                self._on_written(written)
        self._on_done([MoveDone(move.move_id, checksum, problem) for move, checksum, problem in ends])

    # --- health -------------------------------------------------------------------------------------------------------

    def _learn(self, io: "_IO") -> str:
        """Tell the gate; says so when that opens or closes it. When a drive that was given up fails a probe, its slots are
        not to blame."""
        if io.ticket is None:
            return ""
        gate = self._gates[io.writes]
        was_closed = gate.problem is not None
        verb = "writes" if io.writes else "reads"
        problem = _telling(io.problems)
        if problem is None:
            return f"{verb} go well again" if gate.succeeded(io.ticket) else ""
        num_failed = sum(each is not None for each in io.problems)
        closed = gate.failed(io.ticket, problem, self._monotonic(), count=num_failed)
        if was_closed:
            io.problems = [MoveProblem.GONE if each in BAD_SLOT else each for each in io.problems]
        return f"{verb} fail ({problem}); they are tried now and then" if closed else ""

    def _count(self, io: "_IO") -> list[tuple[MoveProblem, Move]]:
        """Count the problems; those that never happened before."""
        first_ones: list[tuple[MoveProblem, Move]] = []
        for move, problem in zip(io.moves, io.problems, strict=True):
            if problem is not None and problem is not MoveProblem.STOPPED:
                if not self._problems[problem]:
                    first_ones.append((problem, move))
                self._problems[problem] += 1
        return first_ones

    def _look_for_file(self) -> bool:
        """Is the data file still there? What is written to one that has no name is lost with this process."""
        try:
            if self._file.is_linked():
                return True
        except OSError:
            return True  # whatever it is, reading and writing will meet it
        with self._changed:
            newly = not self._problems["deleted"]
            self._problems["deleted"] = 1
        if newly:
            _log.error("drive %s: the data file was deleted; it is read on, but not written any more", self._name)
        return False


@dataclass(slots=True)
class _IO:
    """Moves of neighbouring slots on their way. One thread at a time has it."""

    moves: list[Move]
    writes: bool
    ticket: int | None  # of the gate; None: it is closed
    problems: list[MoveProblem | None] = field(default_factory=list)  # how each move went
    checksums: list[int] = field(default_factory=list)  # of writes
    in_flight_bytes: int = 0  # of reads, when it began, itself included
    ended: bool = False  # being reported, or reported

    @property
    def nbytes(self) -> int:
        """Of all slots."""
        return sum(map(move_nbytes, self.moves))


class _Step(NamedTuple):
    """What a thread does for an I/O before it asks for the next step."""

    run: Callable[[_IO], None]
    io: _IO


def _ended(moves: Sequence[Move], problem: MoveProblem) -> list[MoveDone]:
    return [MoveDone(move.move_id, problem=problem) for move in moves]


def _telling(problems: Sequence[MoveProblem | None]) -> MoveProblem | None:
    """What these say of the drive. Nothing, when only some of the blocks failed, or what came was read well but wrong."""
    bad = [problem for problem in problems if problem not in {None, MoveProblem.CHECKSUM, MoveProblem.STOPPED}]
    if len(bad) == len(problems) or not WHOLE_DRIVE.isdisjoint(bad):
        return bad[0]
    return None
