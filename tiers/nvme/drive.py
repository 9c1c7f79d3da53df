"""A drive's I/O: threads that carry out moves between the arena and its data file, check the bytes, and say how the drive is."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.core.limits import DRIVE_THREADS, MAX_DRIVE_ERRORS, MAX_IO_BYTES, SLOT_ALIGN_BYTES
from kvstore.core.moves import BAD_SLOT, DRIVE_SHIFT, BlockRecord, Move, MoveDone, MoveProblem, Urgency
from kvstore.tiers.nvme.file import BlockFile, problem_of
from kvstore.tiers.nvme.gate import WHOLE_DRIVE, Gate
from kvstore.tiers.nvme.move_queue import MoveQueue, slot_nbytes

_log = logging.getLogger(__name__)

_OFFSET_MASK = (1 << DRIVE_SHIFT) - 1
_IDLE_WAIT_S = 60.0
"""An idle thread looks up so often, though every submit wakes one."""
_REPORT_DEADLINE_S = 1.0
"""Callbacks are short: one that runs when the drive is given up is waited for so long."""


class IOHealth(NamedTuple):
    """How reading and writing the data file goes. `problems` counts failed blocks by MoveProblem (STOPPED is none), and
    "deleted" once."""

    state: str  # "ready" or "degraded"
    reason: str  # "" when ready
    problems: dict[str, int]


class Drive:
    """`threads` threads, a queue (MoveQueue) and two gates, one for reads and one for writes.

        submit -> queue -> I/O of neighbouring moves -> gate -> [xxh3 ->] pwritev, or preadv [-> xxh3] -> on_written -> on_done

    At most half of the threads write, so that a read waits for part of a write at most. The arena's bytes go to the file
    as they lie and come back so: no copy is made. A joined I/O that fails or comes short is tried again block by block, so
    that only the bad block fails. `record.offset` counts from `first_slot` in the file; its drive number is ignored.

    Callbacks: `on_written` gets the records, with checksums, of blocks written well, before `on_done` gets the ends of all
    moves of that I/O. They run on an I/O thread, several at once; they must be short and must not raise. The file belongs
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
        assert first_slot % SLOT_ALIGN_BYTES == 0
        self._file = file
        self._name = name
        self._arena = arena.data
        self._on_done = on_done
        self._on_written = on_written
        self._first_slot = first_slot
        self._max_writing = max(1, threads // 2)
        self._monotonic = monotonic
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-nvme-{name}-{number}", daemon=True)
            for number in range(threads)
        ]

        # All below is guarded by this lock, which nobody holds over I/O or a callback.
        self._changed = threading.Condition(threading.Lock())
        self._queue = MoveQueue(max_io_bytes=max_io_bytes)
        self._read_gate = Gate(max_failures=MAX_DRIVE_ERRORS)
        self._write_gate = Gate(max_failures=1)
        self._problems: Counter[str] = Counter()
        self._num_idle = 0
        self._num_under_way = 0  # I/Os taken and not reported
        self._num_writing = 0
        self._num_reporting = 0
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
            self._assert_sound(move)
        with self._changed:
            refused = self._closing
            if not refused:
                self._queue.push(moves)
                self._changed.notify()  # one; it wakes the next (_begin)
        if refused:
            self._on_done([MoveDone(move.move_id, problem=MoveProblem.STOPPED) for move in moves])

    def busy(self) -> bool:
        """Is any move queued or under way? Its end may just have been reported."""
        with self._changed:
            return bool(self._queue) or self._num_under_way > 0

    def health(self) -> IOHealth:
        """Any thread, never blocks."""
        self._look_for_file()
        with self._changed:
            reasons = []
            if self._problems["deleted"]:
                reasons.append("the data file was deleted")
            elif self._write_gate.problem is not None:
                reasons.append(f"writes fail: {self._write_gate.problem}")
            if self._read_gate.problem is not None:
                reasons.append(f"reads fail: {self._read_gate.problem}")
            problems = {name: count for name, count in self._problems.items() if count}
        return IOHealth("degraded" if reasons else "ready", "; ".join(reasons), problems)

    def close(self, deadline_s: float) -> bool:
        """End queued moves with STOPPED, here, and wait for those under way. False: some I/O hangs beyond the deadline. Its
        end will not be reported, and the file must stay open until the process ends. Idempotent."""
        ends_s = time.monotonic() + deadline_s
        with self._changed:
            self._closing = True
            dropped = self._queue.clear()
            self._changed.notify_all()
        if dropped:
            self._on_done([MoveDone(move.move_id, problem=MoveProblem.STOPPED) for move in dropped])
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, ends_s - time.monotonic()))
        with self._changed:
            self._given_up = True
            self._changed.wait_for(lambda: not self._num_reporting, _REPORT_DEADLINE_S)
        return not any(thread.is_alive() for thread in self._threads)

    # --- the threads --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (io := self._next()) is not None:
            if io.ticket is None:
                ends = [_End(move, problem=io.refused_by) for move in io.moves]
            elif io.writes:
                ends = self._write(io.moves)
            else:
                ends = self._read(io.moves)
            self._finish(io, ends)

    def _next(self) -> "_IO | None":
        """Wait for the next I/O, or for the drive to close."""
        with self._changed:
            while not self._closing:
                moves = self._queue.take(may_write=self._num_writing < self._max_writing)
                if moves:
                    return self._begin(moves)
                self._num_idle += 1
                self._changed.wait(_IDLE_WAIT_S)
                self._num_idle -= 1
        return None

    def _begin(self, moves: list[Move]) -> "_IO":
        writes = moves[0].urgency is Urgency.WRITE
        gate = self._write_gate if writes else self._read_gate
        self._num_under_way += 1
        self._num_writing += writes
        if self._num_idle and self._queue.ready(may_write=self._num_writing < self._max_writing):
            self._changed.notify()  # so as many wake as there are I/Os: how many can be joined is not known before
        return _IO(moves, writes, gate, gate.enter(self._monotonic()))

    def _write(self, moves: list[Move]) -> "list[_End]":
        if not self._look_for_file():
            return [_End(move, problem=MoveProblem.GONE) for move in moves]
        checksums = [self._checksum(move) for move in moves]
        problems = self._transfer(self._file.write_from, moves)
        return [_End(*each) for each in zip(moves, checksums, problems, strict=True)]

    def _read(self, moves: list[Move]) -> "list[_End]":
        problems = self._transfer(self._file.read_into, moves)
        return [
            _End(move, problem=self._mismatch(move) if problem is None else problem)
            for move, problem in zip(moves, problems, strict=True)
        ]

    def _transfer(self, verb: "_Verb", moves: list[Move]) -> list[MoveProblem | None]:
        """One preadv or pwritev for all; block by block when that does not go well."""
        views = self._views(moves)
        try:
            done = verb(self._file_offset(moves[0]), views)
        except OSError as err:
            if len(moves) == 1:
                return [problem_of(err)]
        else:
            if done == sum(view.nbytes for view in views):
                return [None] * len(moves)
        return self._one_by_one(verb, moves)

    def _one_by_one(self, verb: "_Verb", moves: list[Move]) -> list[MoveProblem | None]:
        """Stops trying when the drive, not a block, is what fails."""
        problems: list[MoveProblem | None] = []
        failures = 0
        for move in moves:
            if self._closing:
                problem: MoveProblem | None = MoveProblem.STOPPED
            elif problems and problems[-1] in WHOLE_DRIVE:
                problem = problems[-1]
            elif failures >= MAX_DRIVE_ERRORS:
                problem = MoveProblem.GONE
            else:
                [view] = self._views([move])
                problem = _transfer_alone(verb, self._file_offset(move), view)
                failures = 0 if problem is None else failures + 1
            problems.append(problem)
        return problems

    def _finish(self, io: "_IO", ends: "list[_End]") -> None:
        """Learn from the ends, then report them."""
        with self._changed:
            gate_turned = False
            if io.ticket is not None:
                ends, gate_turned = self._learn(io, io.ticket, ends)
            first_ones = self._count(ends)
            muted = self._given_up
            self._num_reporting += 1
        if gate_turned:
            how = f"fail ({io.gate.problem}); now and then one is tried" if io.gate.problem else "go well again"
            _log.warning("drive %s: %s %s", self._name, "writes" if io.writes else "reads", how)
        for end in first_ones:
            _log.warning(
                "drive %s: %s at %d, the first of its kind", self._name, end.problem, self._file_offset(end.move)
            )
        if not muted:
            self._report(io, ends)
        with self._changed:
            self._num_reporting -= 1
            self._num_under_way -= 1
            self._num_writing -= io.writes
            if self._closing:
                self._changed.notify_all()

    def _report(self, io: "_IO", ends: "list[_End]") -> None:
        if io.writes:
            written = [end.move.record._replace(checksum=end.checksum) for end in ends if end.problem is None]
            if written:
                self._on_written(written)
        self._on_done([MoveDone(end.move.move_id, end.checksum, end.problem) for end in ends])

    def _learn(self, io: "_IO", ticket: int, ends: "list[_End]") -> "tuple[list[_End], bool]":
        """Tell the gate; did it open or close? When a drive that was given up fails a probe, its slots are not to blame."""
        was_closed = io.gate.problem is not None
        problem = _telling(ends)
        if problem is None:
            return ends, io.gate.succeeded(ticket)
        num_failed = sum(end.problem is not None for end in ends)
        turned = io.gate.failed(ticket, problem, self._monotonic(), count=num_failed)
        if was_closed:
            ends = [end._replace(problem=MoveProblem.GONE) if end.problem in BAD_SLOT else end for end in ends]
        return ends, turned

    def _count(self, ends: "list[_End]") -> "list[_End]":
        """Count the problems; those that never happened before."""
        first_ones = []
        for end in ends:
            if end.problem is not None and end.problem is not MoveProblem.STOPPED:
                if not self._problems[end.problem]:
                    first_ones.append(end)
                self._problems[end.problem] += 1
        return first_ones

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _views(self, moves: Sequence[Move]) -> list[memoryview]:
        """Their slots in the arena, as few ranges as there are."""
        views = []
        start = end = moves[0].arena_offset
        for move in moves:
            if move.arena_offset != end:
                views.append(self._arena[start:end])
                start = move.arena_offset
            end = move.arena_offset + slot_nbytes(move)
        views.append(self._arena[start:end])
        return views

    def _checksum(self, move: Move) -> int:
        """Of the block alone, without the rest of its slot's last page."""
        return xxh3_64_intdigest(self._arena[move.arena_offset : move.arena_offset + move.record.nbytes])

    def _mismatch(self, move: Move) -> MoveProblem | None:
        return None if self._checksum(move) == move.record.checksum else MoveProblem.CHECKSUM

    def _file_offset(self, move: Move) -> int:
        return self._first_slot + (move.record.offset & _OFFSET_MASK)

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

    def _assert_sound(self, move: Move) -> None:
        assert move.record.nbytes > 0
        assert move.arena_offset % SLOT_ALIGN_BYTES == 0
        assert 0 <= move.arena_offset <= self._arena.nbytes - slot_nbytes(move)
        assert (move.record.offset & _OFFSET_MASK) % SLOT_ALIGN_BYTES == 0


_Verb = Callable[[int, Sequence[memoryview]], int]


class _IO(NamedTuple):
    """Moves of neighbouring slots, and whether they may be tried."""

    moves: list[Move]
    writes: bool
    gate: Gate
    ticket: int | None  # None: the gate is closed

    @property
    def refused_by(self) -> MoveProblem:
        """Why they are not tried. Never a reason to blame slots."""
        problem = self.gate.problem
        return problem if problem in {MoveProblem.NO_SPACE, MoveProblem.READ_ONLY} else MoveProblem.GONE


class _End(NamedTuple):
    """How a move ended."""

    move: Move
    checksum: int = 0
    problem: MoveProblem | None = None


def _transfer_alone(verb: _Verb, offset: int, view: memoryview) -> MoveProblem | None:
    """A short call says less than the error that the call for the rest of it raises."""
    while view.nbytes:
        try:
            done = verb(offset, [view])
        except OSError as err:
            return problem_of(err)
        done -= done % SLOT_ALIGN_BYTES
        if not done:
            return MoveProblem.SHORT
        offset += done
        view = view[done:]
    return None


def _telling(ends: Sequence[_End]) -> MoveProblem | None:
    """What these ends say of the drive. Nothing, when only some of the blocks failed, or what came was read well but wrong."""
    problems = [end.problem for end in ends]
    bad = [problem for problem in problems if problem not in {None, MoveProblem.CHECKSUM, MoveProblem.STOPPED}]
    if len(bad) == len(problems) or not WHOLE_DRIVE.isdisjoint(bad):
        return bad[0]
    return None
