"""Evictable rows by a key that only grows, and rows to give up before all others."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from kvstore.eviction.columns import Column
from kvstore.eviction.policy import Candidates
from kvstore.index import BlockIndex

ROW_BITS = 32
ROW_MASK = (1 << ROW_BITS) - 1
ENTRY_NBYTES = 8 + 36  # a pointer, and an int beyond 2^60
SLACK = 1024  # entries that are worth no rebuilding


class LeafOrder:
    """Rows that were offered, smallest key first: a min-heap of `key << 32 | row` that is put right when it is looked at.

    While a row holds the same block, its key may grow and never shrinks, so an entry can be too early and never too late: at the
    top it goes back under its new key, and the first right one is the smallest of all. A row that is not evictable at the
    top is taken out; it will be offered again. When a row has become another block's, its key may be smaller than the one
    it is queued under: then it is queued twice, and `_queued` (a row's key plus one, 0: none) says which entry counts. Each
    offer and each use costs at most one O(log n) step. 8 bytes a row, and some 60 for each that is queued.
    """

    def __init__(self, index: BlockIndex, candidates: Candidates, key: Callable[[int], int]) -> None:
        """`key` of a row is 0 or more."""
        self._index = index
        self._candidates = candidates
        self._key = key
        self._heap: list[int] = []
        self._queued = Column(index, np.int64)

    def offer(self, row: int) -> None:
        """`row` may have become evictable."""
        if self._candidates.is_evictable(row):
            self.push(row)

    def push(self, row: int) -> None:
        """`row` is evictable."""
        queued = self._queued
        if row >= queued.size:
            queued.grow()
        key = self._key(row)
        at = queued.at[row]
        if not at or at > key + 1:
            queued.at[row] = key + 1
            if len(self._heap) > 2 * queued.size + SLACK:
                self._rebuild()
            heapq.heappush(self._heap, key << ROW_BITS | row)

    def pop(self) -> int | None:
        """The evictable row with the smallest key, out of the order."""
        heap, queued_at = self._heap, self._queued.at
        while heap:
            entry = heap[0]
            row = entry & ROW_MASK
            key = entry >> ROW_BITS
            if queued_at[row] != key + 1:
                heapq.heappop(heap)
            elif not self._candidates.is_evictable(row):
                heapq.heappop(heap)
                queued_at[row] = 0
            elif (current := self._key(row)) > key:
                queued_at[row] = current + 1
                heapq.heapreplace(heap, current << ROW_BITS | row)
            else:
                heapq.heappop(heap)
                queued_at[row] = 0
                return row
        return None

    def check(self) -> None:
        """A queued row has one entry that counts, which is not later than its key while it is evictable."""
        entries = {entry & ROW_MASK: entry >> ROW_BITS for entry in self._heap if self._counts(entry)}
        assert len(entries) == sum(map(self._counts, self._heap))
        assert entries.keys() == set(np.flatnonzero(self._queued.values).tolist())
        for row, key in entries.items():
            if self._candidates.is_evictable(row):
                assert key <= self._key(row)

    def holds(self, row: int) -> bool:
        """Whether the row is queued."""
        return row < self._queued.size and self._queued.at[row] > 0

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        return self._queued.values.nbytes + len(self._heap) * ENTRY_NBYTES

    def _counts(self, entry: int) -> bool:
        return self._queued.at[entry & ROW_MASK] == (entry >> ROW_BITS) + 1

    def _rebuild(self) -> None:
        self._heap = list(set(filter(self._counts, self._heap)))
        heapq.heapify(self._heap)


class Cooled:
    """Rows to give up before anything else, unless they are used before."""

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        self._index = index
        self._candidates = candidates
        self.rows: OrderedDict[int, int] = OrderedDict()  # by row: its last use when it was cooled

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, rows: Iterable[int]) -> None:
        """In this order, behind those that are there."""
        for row in rows:
            self.rows[row] = self._index.last_use_at[row]
            self.rows.move_to_end(row)

    def pop(self) -> int | None:
        """The next one that may go."""
        while self.rows:
            row, last_use = self.rows.popitem(last=False)
            if self._index.last_use_at[row] == last_use and self._candidates.is_evictable(row):
                return row
        return None
