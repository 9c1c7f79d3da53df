"""Evictable rows by class and by last use, from both ends."""

import heapq
from collections.abc import Iterable

import numpy as np

from kvstore.eviction.columns import Column
from kvstore.eviction.order import ENTRY_NBYTES, ROW_BITS, ROW_MASK, SLACK
from kvstore.eviction.policy import Candidates
from kvstore.eviction.reuse_rate import CLASS_OF_USES, NUM_CLASSES
from kvstore.index import BlockIndex


class ClassOrder:
    """Rows that were offered: for each class of reuse_rate.py a min-heap of `last_use << 32 | row`, as LeafOrder has it, with a
    stack before it of entries that were the oldest of their class when they came, and a stack of those that were the newest.
    A parent is offered when its child has gone, and is the oldest then: most victims never see the heap.

    An entry counts while `_queued` (a row's last use plus one, 0: none) says the same; others are dropped at the top. So a row
    that was used since, and may have another class, is found and queued anew. A leaf that
    becomes the newest by the end of all newer ones is missing in the stack until it is offered again. 8 bytes a row, and some
    64 for each that is queued.
    """

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        self._index = index
        self._candidates = candidates
        self._oldest: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        self._first: list[list[int]] = [[] for _ in range(NUM_CLASSES)]  # before `_oldest`, from newer to older
        self._newest: list[list[int]] = [[] for _ in range(NUM_CLASSES)]
        self._queued = Column(index, np.int64)

    def push(self, row: int) -> None:
        """`row` is evictable."""
        queued, index = self._queued, self._index
        if row >= queued.size:
            queued.grow()
        key = index.last_use_at[row]
        before = queued.at[row]
        if before == key + 1:
            return
        queued.at[row] = key + 1
        number = CLASS_OF_USES[index.uses_at[row]]
        heap, first, stack = self._oldest[number], self._first[number], self._newest[number]
        entry = key << ROW_BITS | row
        if before:
            for entries in (heap, first, stack):
                if entries and entries[-1] & ROW_MASK == row:
                    entries.pop()  # offered twice in a row; without its last one a heap is still a heap
        if entry < first[-1] if first else heap and entry < heap[0]:
            first.append(entry)
        else:
            heapq.heappush(heap, entry)
        if not stack or entry > stack[-1]:
            stack.append(entry)
            if len(heap) > 2 * queued.size + SLACK:
                heap[:] = self._counting(heap)
                heapq.heapify(heap)
            if len(stack) > 2 * (len(heap) + len(first)) + SLACK:
                stack[:] = sorted(self._counting(stack))

    def oldest(self, number: int) -> int | None:
        """The evictable row of that class that was not used for longest."""
        heap, first, queued_at = self._oldest[number], self._first[number], self._queued.at
        while heap or first:
            if heap and not (first and first[-1] < heap[0]):
                first.append(heapq.heappop(heap))
            entry = first[-1]
            row = entry & ROW_MASK
            key = entry >> ROW_BITS
            if queued_at[row] == key + 1:
                evictable = self._candidates.is_evictable(row)
                if evictable and self._index.last_use_at[row] == key:
                    return row
                queued_at[row] = 0
                first.pop()
                if evictable:
                    self.push(row)
            else:
                first.pop()
        return None

    def newest(self, number: int) -> int | None:
        """The evictable row of that class that was used last, as far as is known."""
        stack, queued_at = self._newest[number], self._queued.at
        while stack:
            entry = stack[-1]
            row = entry & ROW_MASK
            key = entry >> ROW_BITS
            if queued_at[row] == key + 1 and self._index.last_use_at[row] == key and self._candidates.is_evictable(row):
                return row
            stack.pop()
        return None

    def pop_oldest(self, number: int) -> int | None:
        """`oldest`, out of the order."""
        row = self.oldest(number)
        if row is not None:
            self._first[number].pop()
            self._queued.at[row] = 0
        return row

    def pop_newest(self, number: int) -> int | None:
        """`newest`, out of the order."""
        row = self.newest(number)
        if row is not None:
            self._newest[number].pop()
            self._queued.at[row] = 0
        return row

    def check(self) -> None:
        """A queued row has an entry that counts, which is not later than its last use while it is evictable."""
        keys = {
            entry & ROW_MASK: entry >> ROW_BITS
            for part in (*self._oldest, *self._first)
            for entry in part
            if self._counts(entry)
        }
        assert keys.keys() == set(np.flatnonzero(self._queued.values).tolist())
        for row, key in keys.items():
            if self._candidates.is_evictable(row):
                assert key <= self._index.last_use_at[row]
        assert all(first == sorted(first, reverse=True) for first in self._first)
        assert all(stack == sorted(stack) for stack in self._newest)

    def holds(self, row: int) -> bool:
        """Whether the row is queued."""
        return row < self._queued.size and self._queued.at[row] > 0

    @property
    def nbytes(self) -> int:
        """Memory that it takes, about."""
        entries = sum(map(len, (*self._oldest, *self._first))) * ENTRY_NBYTES + sum(map(len, self._newest)) * 8
        return self._queued.values.nbytes + entries

    def _counting(self, entries: Iterable[int]) -> set[int]:
        return set(filter(self._counts, entries))

    def _counts(self, entry: int) -> bool:
        return self._queued.at[entry & ROW_MASK] == (entry >> ROW_BITS) + 1
