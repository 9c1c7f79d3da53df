"""Blocks that somebody asked to keep for a while, and blocks that have a time to live."""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.index import KEPT, MORTAL, BlockIndex, Rows

_HEAP_SLACK = 1024


class _Due(NamedTuple):
    """Sorted by time. The row may be another block's by then; the key tells."""

    time_s: float
    row: int
    key: bytes


class Pins:
    """Rows that are KEPT until a time, and MORTAL rows that must be gone by a time (marks of the index).

    A kept block stays in whatever tiers it is; whoever pins it again moves the time, also to an earlier one. A time to live
    is for good: nothing that is done with the block afterwards changes it.
    """

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._until_s: dict[int, float] = {}  # of kept rows, and of rows that were kept and are gone
        self._kept: list[_Due] = []
        self._mortal: list[_Due] = []

    def next_due_s(self) -> float | None:
        """When `take_due_pins` or `take_due_blocks` will next have something."""
        return min((heap[0].time_s for heap in (self._kept, self._mortal) if heap), default=None)

    def kept_bytes(self) -> int:
        """Bytes, by slot, that pins keep. O(pins)."""
        index = self._index
        gone = [row for row in self._until_s if not index.marks_at[row] & KEPT]
        for row in gone:
            del self._until_s[row]
        return sum(index.namespace_of(row).slot_nbytes for row in self._until_s)

    def keep(self, rows: Rows, until_s: float) -> None:
        """Keep blocks until then."""
        if len(self._kept) > 2 * len(self._until_s) + _HEAP_SLACK:
            self._rebuild_kept()
        self._index.marks[rows] |= KEPT
        for row in rows.tolist():
            self._until_s[row] = until_s
            heapq.heappush(self._kept, _Due(until_s, row, self._index.keys[row]))

    def let_go(self, rows: Rows) -> None:
        """Keep blocks no longer; the caller offers them to their tiers."""
        self._index.marks[rows] &= 0xFF ^ KEPT
        for row in rows.tolist():
            self._until_s.pop(row, None)

    def set_expiry(self, rows: Rows, expiry_s: float) -> None:
        """New blocks live until then and no longer."""
        self._index.marks[rows] |= MORTAL
        for row in rows.tolist():
            heapq.heappush(self._mortal, _Due(expiry_s, row, self._index.keys[row]))

    def take_due_pins(self, now_s: float) -> list[int]:
        """Rows whose pin is over: they are kept no longer, and to be offered to their tiers."""
        over: list[int] = []
        for row, time_s in self._pop(self._kept, now_s):
            if self._until_s.get(row) == time_s:
                del self._until_s[row]
                self._index.marks_at[row] &= 0xFF ^ KEPT
                over.append(row)
        return over

    def take_due_blocks(self, now_s: float) -> list[int]:
        """Rows whose time to live is over; to be dropped."""
        over: list[int] = []
        for row, _ in self._pop(self._mortal, now_s):
            if self._index.marks_at[row] & MORTAL:
                self._index.marks_at[row] &= 0xFF ^ MORTAL
                over.append(row)
        return over

    def check(self) -> None:
        """Whatever is marked has a time at which the mark ends."""
        index = self._index
        timed = {(due.row, due.key) for due in self._mortal}
        for row in range(index.num_rows):
            if index.marks_at[row] & KEPT:
                assert _Due(self._until_s[row], row, index.keys[row]) in self._kept
            if index.marks_at[row] & MORTAL:
                assert (row, index.keys[row]) in timed

    def _rebuild_kept(self) -> None:
        """Without the times of pins that were moved or ended: who pins a session at each of its turns leaves one each time."""
        index = self._index
        self._kept = [
            _Due(until_s, row, index.keys[row]) for row, until_s in self._until_s.items() if index.marks_at[row] & KEPT
        ]
        heapq.heapify(self._kept)

    def _pop(self, heap: list[_Due], now_s: float) -> Iterator[tuple[int, float]]:
        """Rows that are still the same blocks, and the times that are over."""
        while heap and heap[0].time_s <= now_s:
            time_s, row, key = heapq.heappop(heap)
            if self._index.keys[row] == key:
                yield row, time_s
