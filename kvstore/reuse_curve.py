"""The hit rate that any capacity would have had, from how far apart uses lie.

Leaf-first LRU is LRU whose uses go from tail to head, and LRU is a stack: a block is found in a tier of C blocks if, when it is
wanted, fewer than C others have been used since. So one pass counts, for each use, its rank among the blocks by last use.

    exact      every block is followed: a Fenwick tree over the order of use, O(log n) a block
    sampled    only blocks whose hash is below a threshold, a part R of all, are followed, and a rank among them counts for 1/R
               ranks; when there are too many, the threshold falls (Waldspurger et al., Efficient MRC construction with SHARDS,
               FAST 2015; what the sample has too few or too many of is put to the shortest distance, as their SHARDS_adj).
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.index import grown

_HASH_BITS = 32
_FULL = 1 << _HASH_BITS
_BUCKETS_PER_DOUBLING = 32  # of distances: steps of 2 %
_FIRST_BUCKETS = 1024
_FIRST_SLOTS = 1024

MAX_FOLLOWED = 4096
"""Blocks that a sampled curve follows, some 160 bytes each."""


class CurvePoint(NamedTuple):
    """A capacity and its hit rate."""

    num_blocks: float
    hit_rate: float


class ReuseCurve:
    """Told of each request's blocks; answers for every capacity. `max_followed` 0: exact, and as large as the trace."""

    def __init__(self, *, max_followed: int = MAX_FOLLOWED) -> None:
        self._max_followed = max_followed
        self._threshold = _FULL
        self._last: dict[int, int] = {}  # by hash: slot in the order of use
        self._largest: list[int] = []  # heap of the negated hashes of what is followed, when sampled
        self._order = _OrderOfUse(_FIRST_SLOTS)
        self._weights = np.zeros(_FIRST_BUCKETS, np.float64)  # of uses by distance
        self._cold = 0.0  # likewise, of first uses
        self.num_uses = 0

    @property
    def rate(self) -> float:
        """Part of the blocks that is followed now."""
        return self._threshold / _FULL

    @property
    def num_followed(self) -> int:
        """Blocks."""
        return len(self._last)

    def request(self, hashes: Sequence[int]) -> None:
        """A request uses these, in the order of its prefix. Hashes are spread over 64 bits."""
        self.num_uses += len(hashes)
        followed = [one for one in hashes if one >> _HASH_BITS < self._threshold] if self._max_followed else hashes
        if not followed:
            return
        if self._order.num_left < len(followed):
            self._compact(len(followed))
        last = self._last
        slots = [last.get(one, -1) for one in followed]
        known = np.array([slot for slot in slots if slot >= 0], np.int64)
        weight = 1 / self.rate
        self._cold += weight * (len(followed) - len(known))
        if len(known):
            buckets = self._buckets(self._order.ranks(known) * weight)
            if len(self._weights) <= buckets.max():
                self._weights = grown(self._weights, 2 * int(buckets.max()))
            np.add.at(self._weights, buckets, weight)
            self._order.remove(known)
        for one, slot in zip(reversed(followed), self._order.append(len(followed)), strict=True):
            last[one] = slot
        if self._max_followed:
            for one, slot in zip(followed, slots, strict=True):
                if slot < 0:
                    heapq.heappush(self._largest, -one)
            self._shrink()

    def hit_rate(self, num_blocks: float) -> float:
        """Of a tier of so many blocks."""
        if not self.num_uses or num_blocks < 1:
            return 0.0
        at = num_blocks if not self._max_followed else math.log2(num_blocks) * _BUCKETS_PER_DOUBLING
        end = math.floor(at)
        missing = self.num_uses - float(self._weights.sum()) - self._cold  # what the sample has too few of
        hits = float(self._weights[: end + 1].sum()) + missing
        if end + 1 < len(self._weights) and self._max_followed:
            hits += (at - end) * float(self._weights[end + 1])
        return min(max(hits / self.num_uses, 0.0), 1.0)

    def best_hit_rate(self) -> float:
        """Of a tier without end."""
        return min(max((self.num_uses - self._cold) / self.num_uses, 0.0), 1.0) if self.num_uses else 0.0

    def points(self) -> list[CurvePoint]:
        """The curve where it rises, from one block on."""
        used = np.flatnonzero(self._weights)
        sizes = [int(at) if not self._max_followed else 2 ** (int(at) / _BUCKETS_PER_DOUBLING) for at in used]
        sums = np.cumsum(self._weights)[used] + self.num_uses - float(self._weights.sum()) - self._cold
        rates = np.clip(sums / max(1, self.num_uses), 0.0, 1.0).tolist()
        return [CurvePoint(size, rate) for size, rate in zip(sizes, rates, strict=True)]

    def knee(self) -> CurvePoint | None:
        """Where more capacity begins to bring less: the point furthest above the line between the ends, over the logarithm of
        capacity. (Satopaa et al., Finding a Kneedle in a haystack, 2011.)"""
        points = self.points()
        if len(points) < 3:
            return None
        x = np.log2([point.num_blocks for point in points])
        y = np.array([point.hit_rate for point in points])
        if x[-1] == x[0] or y[-1] == y[0]:
            return None
        above = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
        return points[int(above.argmax())]

    def _buckets(self, ranks: NDArray[Any]) -> NDArray[np.int64]:
        """Where ranks are counted: exactly, or in steps of 2 %."""
        if not self._max_followed:
            exactly: NDArray[np.int64] = np.round(ranks).astype(np.int64)
            return exactly
        steps: NDArray[np.int64] = np.ceil(np.log2(np.maximum(ranks, 1.0)) * _BUCKETS_PER_DOUBLING).astype(np.int64)
        return steps

    def _shrink(self) -> None:
        """Follow fewer: those with the largest hashes go, and none as large comes in any more."""
        gone: list[int] = []
        while len(self._last) > self._max_followed:
            self._threshold = -self._largest[0] >> _HASH_BITS
            while self._largest and -self._largest[0] >> _HASH_BITS >= self._threshold:
                gone.append(self._last.pop(-heapq.heappop(self._largest)))
        if gone:
            self._order.remove(np.array(gone, np.int64))

    def _compact(self, wanted: int) -> None:
        """Number the order anew, without the slots that were left."""
        hashes = sorted(self._last, key=self._last.__getitem__)
        self._order = _OrderOfUse(max(_FIRST_SLOTS, 2 * (len(hashes) + wanted)))
        self._last = dict(zip(hashes, self._order.append(len(hashes)), strict=True))


class _OrderOfUse:
    """Slots in the order of use; counts how many are taken from one on. A Fenwick tree, asked for many slots at once."""

    def __init__(self, num_slots: int) -> None:
        self._size = num_slots
        self._sums = np.zeros(num_slots + 1, np.int64)
        self._next = 0
        self._num_taken = 0

    @property
    def num_left(self) -> int:
        return self._size - self._next

    def append(self, count: int) -> range:
        """The next `count` slots."""
        taken = range(self._next, self._next + count)
        self._add(np.arange(self._next + 1, self._next + count + 1), 1)
        self._next += count
        self._num_taken += count
        return taken

    def remove(self, slots: NDArray[np.int64]) -> None:
        """They are taken no longer."""
        self._add(slots + 1, -1)
        self._num_taken -= len(slots)

    def ranks(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many slots from each on are taken, itself among them."""
        at, before = slots.copy(), np.zeros(len(slots), np.int64)
        while at.any():
            before += self._sums[at]
            at &= at - 1
        return self._num_taken - before

    def _add(self, at: NDArray[np.int64], change: int) -> None:
        at = at[at <= self._size]
        while len(at):
            np.add.at(self._sums, at, change)
            at = at + (at & -at)
            at = at[at <= self._size]
