"""Which block to give up next."""

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from kvstore.index import BlockIndex

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class Candidates(Protocol):
    """Which rows may go; PlacementTable is one."""

    def is_evictable(self, row: int) -> bool:
        """Whether the row may go now."""
        ...


class EvictionPolicy(Protocol):
    """The order in which rows that are evictable (see Candidates) are given up."""

    def offer(self, row: int) -> None:
        """`row` may have become evictable. Offering one that has not, or that is known already, does nothing."""
        ...

    def cool(self, rows: Iterable[int]) -> None:
        """Give these up before anything else, in this order (tail to head), unless they are used again before."""
        ...

    def next_victim(self) -> int | None:
        """The row to evict now, out of the order from here on; None when nothing is evictable. The caller evicts it."""
        ...

    def check(self) -> None:
        """Assert that every evictable row would be returned by enough calls of `next_victim`."""
        ...


class LeafLru:
    """Least recently used first, among leaves: the tail of a prefix goes before its head.

    A min-heap of `last_use << 32 | row`, at most one entry a row. An entry is put right when it comes to the top: a row
    used since then goes back under its new time, a row that is not evictable now is taken out and will be offered again.
    An entry can only be too early, never too late (time goes forward), so the first right one is the coldest of all. Each
    offer and each use costs at most one O(log n) step, and the heap needs no rebuilding, since it cannot hold more
    entries than there are rows.
    """

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        self._index = index
        self._candidates = candidates
        self._heap: list[int] = []
        self._queued = bytearray()
        self._cooled: OrderedDict[int, int] = OrderedDict()  # by row: its last use when it was cooled

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        if not self._candidates.is_evictable(row):
            return
        if row >= len(self._queued):
            self._queued.extend(bytes(self._index.capacity - len(self._queued)))
        if not self._queued[row]:
            self._queued[row] = 1
            heapq.heappush(self._heap, self._index.last_use_at[row] << _ROW_BITS | row)

    def cool(self, rows: Iterable[int]) -> None:
        """See EvictionPolicy. What is in the heap stays there: it is found not evictable when it comes to the top."""
        for row in rows:
            self._cooled[row] = self._index.last_use_at[row]
            self._cooled.move_to_end(row)

    def next_victim(self) -> int | None:
        """See EvictionPolicy."""
        while self._cooled:
            row, last_use = self._cooled.popitem(last=False)
            if self._index.last_use_at[row] == last_use and self._candidates.is_evictable(row):
                return row
        heap = self._heap
        while heap:
            entry = heap[0]
            row = entry & _ROW_MASK
            current = self._index.last_use_at[row] << _ROW_BITS | row
            if not self._candidates.is_evictable(row):
                heapq.heappop(heap)
                self._queued[row] = 0
            elif entry != current:
                heapq.heapreplace(heap, current)
            else:
                heapq.heappop(heap)
                self._queued[row] = 0
                return row
        return None

    def check(self) -> None:
        """Every evictable row has one entry, which is not later than its last use."""
        entries = {entry & _ROW_MASK: entry >> _ROW_BITS for entry in self._heap}
        assert len(entries) == len(self._heap)
        assert entries.keys() == {row for row, queued in enumerate(self._queued) if queued}
        for row in range(self._index.num_rows):
            if self._candidates.is_evictable(row):
                assert entries[row] <= self._index.last_use_at[row]
