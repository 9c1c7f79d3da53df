"""Moves that wait for a drive: which are next, and which go together."""

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.core.blocks import slot_nbytes
from kvstore.core.limits import MAX_IO_BYTES
from kvstore.core.moves import Move, Urgency

_MAX_MOVES = 256
"""In one I/O: the loop waits for the GIL while a thread deals with them, 5 us each. preadv would take 1,024."""

_Class = OrderedDict[int, Move]  # by slot


class MoveQueue:
    """The classes of Urgency, each first in, first out; a move taken brings along those whose slots follow on the drive.

        waiting   | 40 | 41 | 7 | 42 | 3 |      numbers: slots on the drive, all of one class
        taken     | 40 | 41 | 42 |              one I/O; next is 7

    So a sequence that was written in order is read in few I/Os, in its order, whatever was asked for in between. Joining
    ends at `max_io_bytes`; a block that is larger goes alone. No two moves that wait have the same slot: it belongs to one.
    Not thread-safe: its drive has a lock.
    """

    def __init__(self, *, max_io_bytes: int = MAX_IO_BYTES) -> None:
        self._max_io_bytes = max_io_bytes
        self._reads, self._prefetches, self._writes = self._classes = tuple(_Class() for _ in Urgency)

    @property
    def has_reads(self) -> bool:
        """Would `take_reads` find something?"""
        return bool(self._reads or self._prefetches)

    @property
    def has_writes(self) -> bool:
        """Would `take_writes` find something?"""
        return bool(self._writes)

    def push(self, moves: Iterable[Move]) -> None:
        """Queue them in this order, each in its class."""
        for move in moves:
            waiting = self._classes[move.urgency]
            assert move.record.offset not in waiting, "two moves for one slot"
            waiting[move.record.offset] = move

    def take_reads(self) -> list[Move]:
        """The next I/O of the most urgent reads: neighbours in ascending order. Empty: none wait."""
        return self._take(self._reads or self._prefetches)

    def take_writes(self) -> list[Move]:
        """The next I/O of writes, likewise."""
        return self._take(self._writes)

    def clear(self) -> list[Move]:
        """Take everything."""
        moves = [move for waiting in self._classes for move in waiting.values()]
        for waiting in self._classes:
            waiting.clear()
        return moves

    def _take(self, waiting: _Class) -> list[Move]:
        if not waiting:
            return []
        _, move = waiting.popitem(last=False)
        moves = [move]
        nbytes = slot = move_nbytes(move)
        while len(moves) < _MAX_MOVES:
            follower = waiting.get(move.record.offset + slot)
            if follower is None or nbytes + move_nbytes(follower) > self._max_io_bytes:
                break
            move = waiting.pop(follower.record.offset)
            slot = move_nbytes(move)
            nbytes += slot
            moves.append(move)
        return moves


def move_nbytes(move: Move) -> int:
    """Length of the move's slots, in the arena and on the drive."""
    return slot_nbytes(move.record.nbytes)
