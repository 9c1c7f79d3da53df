"""Bytes between slots of the arena and slots of a data file: in one call for neighbours, block by block when that fails."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.core.limits import MAX_DRIVE_ERRORS, SLOT_ALIGN_BYTES
from kvstore.core.moves import DRIVE_SHIFT, Move, MoveProblem
from kvstore.tiers.nvme.file import BlockFile, problem_of
from kvstore.tiers.nvme.gate import WHOLE_DRIVE
from kvstore.tiers.nvme.move_queue import move_nbytes

_OFFSET_MASK = (1 << DRIVE_SHIFT) - 1

_Verb = Callable[[int, Sequence[memoryview]], int]


class SlotIO:
    """Reads and writes the moves of one I/O: neighbours in the file, anywhere in the arena. No copy is made in between.

    `record.offset` counts from `first_slot` in the file; its drive number is ignored. Any thread may call. The GIL is
    released while the drive works, and for checksums of more than 64 KiB.
    """

    def __init__(self, file: BlockFile, *, arena: NDArray[np.uint8], first_slot: int) -> None:
        assert first_slot % SLOT_ALIGN_BYTES == 0
        self._file = file
        self._arena = arena.data
        self._first_slot = first_slot
        self._stopping = False

    def assert_sound(self, move: Move) -> None:
        """Whoever orders a move that touches others' bytes finds out first."""
        assert move.record.nbytes > 0
        assert move.arena_offset % SLOT_ALIGN_BYTES == 0
        assert 0 <= move.arena_offset <= self._arena.nbytes - move_nbytes(move)
        assert self.file_offset(move) % SLOT_ALIGN_BYTES == 0

    def file_offset(self, move: Move) -> int:
        """Where its slot begins in the file."""
        return self._first_slot + (move.record.offset & _OFFSET_MASK)

    def checksum(self, move: Move) -> int:
        """xxh3_64 of the block in the arena, without the rest of its last page."""
        return xxh3_64_intdigest(self._arena[move.arena_offset : move.arena_offset + move.record.nbytes])

    def read(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        """File to arena; how each went."""
        return self._transfer(self._file.read_into, moves)

    def write(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        """Arena to file; how each went."""
        return self._transfer(self._file.write_from, moves)

    def stop_retrying(self) -> None:
        """From now on blocks that have not been tried alone end with STOPPED."""
        self._stopping = True

    def _transfer(self, verb: _Verb, moves: Sequence[Move]) -> list[MoveProblem | None]:
        views = self._views(moves)
        try:
            done = verb(self.file_offset(moves[0]), views)
        except OSError as err:
            if len(moves) == 1:
                return [problem_of(err)]
        else:
            if done == sum(view.nbytes for view in views):
                return [None] * len(moves)
        return self._one_by_one(verb, moves)

    def _one_by_one(self, verb: _Verb, moves: Sequence[Move]) -> list[MoveProblem | None]:
        """Stops trying when the drive, not a block, is what fails."""
        problems: list[MoveProblem | None] = []
        failures = 0
        for move in moves:
            if self._stopping:
                problem: MoveProblem | None = MoveProblem.STOPPED
            elif problems and problems[-1] in WHOLE_DRIVE:
                problem = problems[-1]
            elif failures >= MAX_DRIVE_ERRORS:
                problem = MoveProblem.GONE
            else:
                [view] = self._views([move])
                problem = _transfer_alone(verb, self.file_offset(move), view)
                failures = 0 if problem is None else failures + 1
            problems.append(problem)
        return problems

    def _views(self, moves: Sequence[Move]) -> list[memoryview]:
        """Their slots in the arena, as few ranges as there are."""
        views = []
        start = end = moves[0].arena_offset
        for move in moves:
            if move.arena_offset != end:
                views.append(self._arena[start:end])
                start = move.arena_offset
            end = move.arena_offset + move_nbytes(move)
        views.append(self._arena[start:end])
        return views


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
