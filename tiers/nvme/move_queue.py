"""Moves that wait for a drive: which are next, and which go together."""

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.core.limits import MAX_IO_BYTES, SLOT_ALIGN_BYTES
from kvstore.core.moves import Move, Urgency

_MAX_VIEWS = 1024
"""The kernel's IOV_MAX: ranges of the arena in one preadv or pwritev."""


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
        self._classes: tuple[OrderedDict[int, Move], ...] = tuple(OrderedDict() for _ in Urgency)

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._classes)

    def push(self, moves: Iterable[Move]) -> None:
        """Queue them in this order, each in its class."""
        for move in moves:
            waiting = self._classes[move.urgency]
            assert move.record.offset not in waiting, "two moves for one slot"
            waiting[move.record.offset] = move

    def ready(self, *, may_write: bool) -> bool:
        """Would `take` find something?"""
        reads, prefetches, writes = self._classes
        return bool(reads or prefetches or (writes and may_write))

    def take(self, *, may_write: bool) -> list[Move]:
        """The moves of the next I/O, neighbours in ascending order; none when there are none, or only writes that must wait."""
        reads, prefetches, writes = self._classes
        waiting = reads or prefetches or (writes if may_write else None)
        if not waiting:
            return []
        _, move = waiting.popitem(last=False)
        moves = [move]
        nbytes = slot = slot_nbytes(move)
        while len(moves) < _MAX_VIEWS:
            follower = waiting.get(move.record.offset + slot)
            if follower is None:
                break
            slot = slot_nbytes(follower)
            if nbytes + slot > self._max_io_bytes:
                break
            del waiting[follower.record.offset]
            moves.append(follower)
            nbytes += slot
            move = follower
        return moves

    def clear(self) -> list[Move]:
        """Take everything."""
        moves = [move for waiting in self._classes for move in waiting.values()]
        for waiting in self._classes:
            waiting.clear()
        return moves


def slot_nbytes(move: Move) -> int:
    """Length of the move's slots, in the arena and on the drive: whole pages."""
    return -(-move.record.nbytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
