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

    So a sequence that was written in order is read in few I/Os, in its order, whatever was asked for in between; one that is
    asked for from its back too, since those in front of the move taken join when none behind it waits. Joining ends at
    `max_io_bytes`, or at what the caller says; a block that is larger goes alone. No two moves that wait have the same slot:
    it belongs to one. Each verb takes O(1) for a move. Not thread-safe: its drive has a lock.
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

    def take_reads(self, max_bytes: int | None = None) -> list[Move]:
        """The next I/O of the most urgent reads: neighbours in ascending order. Empty: none wait."""
        most = self._max_io_bytes if max_bytes is None else min(max_bytes, self._max_io_bytes)
        return _take(self._reads or self._prefetches, most)

    def take_writes(self) -> list[Move]:
        """The next I/O of writes, likewise."""
        return _take(self._writes, self._max_io_bytes)

    def cancel_reads(self, slots: Iterable[int]) -> list[Move]:
        """Take the reads and prefetches of these slots, in the order given, wherever they wait. Slots of which none waits are
        passed over."""
        moves: list[Move] = []
        for slot in slots:
            move = self._reads.pop(slot, None) or self._prefetches.pop(slot, None)
            if move is not None:
                moves.append(move)
        return moves

    def hasten(self, slots: Iterable[int]) -> None:
        """Prefetches of these slots become reads, behind those that wait already, in the order given. Others stay as they are."""
        for slot in slots:
            if (move := self._prefetches.pop(slot, None)) is not None:
                self._reads[slot] = move._replace(urgency=Urgency.READ)

    def clear(self) -> list[Move]:
        """Take everything."""
        moves = [move for waiting in self._classes for move in waiting.values()]
        for waiting in self._classes:
            waiting.clear()
        return moves


def _take(waiting: _Class, max_bytes: int) -> list[Move]:
    if not waiting:
        return []
    _, first = waiting.popitem(last=False)
    left = max_bytes - move_nbytes(first)
    behind = _take_behind(waiting, first, _MAX_MOVES - 1, left)
    in_front = [] if behind else _take_in_front(waiting, first, _MAX_MOVES - 1, left)
    return [*in_front[::-1], first, *behind]


def _take_behind(waiting: _Class, move: Move, most: int, max_bytes: int) -> list[Move]:
    """Those whose slots follow."""
    taken: list[Move] = []
    while len(taken) < most:
        slot = move.record.offset + move_nbytes(move)
        follower = waiting.get(slot)
        if follower is None or move_nbytes(follower) > max_bytes:
            break
        move = waiting.pop(slot)
        max_bytes -= move_nbytes(move)
        taken.append(move)
    return taken


def _take_in_front(waiting: _Class, move: Move, most: int, max_bytes: int) -> list[Move]:
    """Those whose slots lead up to its, the nearest first: slots of its size, as all are in its segment."""
    taken: list[Move] = []
    nbytes = move_nbytes(move)
    while len(taken) < most and nbytes <= max_bytes:
        slot = move.record.offset - nbytes
        neighbour = waiting.get(slot)
        if neighbour is None or move_nbytes(neighbour) != nbytes:
            break
        move = waiting.pop(slot)
        max_bytes -= nbytes
        taken.append(move)
    return taken


def move_nbytes(move: Move) -> int:
    """Length of the move's slots, in the arena and on the drive."""
    return slot_nbytes(move.record.nbytes)
