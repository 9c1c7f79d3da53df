"""The hit rate that any capacity would have had, from how far apart uses lie.

Leaf-first LRU is LRU whose uses go from tail to head, and LRU is a stack: a block is found in a tier of C bytes if, when it is
wanted, what has been used since takes less than C. So one pass gives, for each use, the room that a tier would have needed.

    exact      every block is followed: a Fenwick tree over the order of use, O(log n) a block
    sampled    only blocks whose hash is below a limit, a part R of all, are followed, and what lies between uses counts for
               1/R times as much; when there are too many, the limit falls (Waldspurger et al., Efficient MRC construction
               with SHARDS, FAST 2015; what the sample has too few or too many of is put to the shortest distance, as their
               SHARDS_adj). Blocks of one size class or of many: each counts with its own size.

Sizes are in whatever unit the caller counts capacity in (1 a block, pages), values in whatever it counts hits in (1 a block,
tokens).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.index import grown

Hashes = NDArray[np.uint64]
"""Of blocks, in the order of their prefix: spread over 64 bits, each once."""

_Ints = NDArray[np.int64]

_FULL = 1 << 64
_BUCKETS_PER_DOUBLING = 32  # of distances: steps of 2 %
_FIRST_BUCKETS = 1024
_FIRST_SLOTS = 1024
_SLOTS_PER_BLOCK = 4  # to begin with: how often an order is numbered anew
_SHRINK_PART = 16

MAX_FOLLOWED = 4096
"""Blocks that a sampled curve follows, some 70 bytes each."""


class CurvePoint(NamedTuple):
    """A capacity and its hit rate."""

    capacity: float
    hit_rate: float


class ReuseCurve:
    """Told of uses; answers for every capacity. `max_followed` 0: exact, and as large as the traffic."""

    def __init__(self, *, max_followed: int = MAX_FOLLOWED) -> None:
        self._max_followed = max_followed
        self._limit = _FULL - 1  # larger hashes are not followed
        self._stack = _Stack(_Places(), _Sums()) if max_followed else _Stack(_ManyPlaces(), _FenwickSums())
        self._weights = np.zeros(_FIRST_BUCKETS, np.float64)  # of uses by distance
        self._cold = 0.0  # likewise, of first uses
        self.total = 0.0  # value of all uses

    @property
    def rate(self) -> float:
        """Part of the blocks that is followed now."""
        return (self._limit + 1) / _FULL

    @property
    def num_followed(self) -> int:
        """Blocks."""
        return self._stack.num_blocks

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._stack.nbytes + self._weights.nbytes

    def request(self, hashes: Hashes, *, size: int = 1, value: float = 1.0) -> None:
        """A request wants these, and stores what it misses."""
        self.total += value * len(hashes)
        followed, _ = self._followed(hashes)
        if len(followed):
            known, distances = self._stack.use(followed, size, insert=True)
            self._count(len(known), distances, value)
            self._shrink(self._stack.num_blocks, self._stack.hashes)

    def wanted(
        self, hashes: Hashes, *, size: int, value: float, num_had: int = 0, num_found: int = 0, extra: float = 0.0
    ) -> None:
        """A request wants these. The first `num_had` its engine has itself: hits with any capacity; `extra` is value that no tier
        can give. What is unknown stays so until it is stored, but for the first `num_found`, which were stored at some time."""
        self.total += value * len(hashes) + extra
        self._cold += extra
        self._weights[0] += value * min(num_had, len(hashes))
        followed, places = self._followed(hashes)
        if len(followed):
            known, distances = self._stack.use(followed, size, insert=False)
            behind = places >= num_had
            self._count(int(np.count_nonzero(behind)), distances[behind[known]], value)
            before = ~known & (places < num_found)
            if before.any():
                self._insert(followed[before], size)

    def used(self, hashes: Hashes, *, size: int) -> None:
        """These are used besides: no hit or miss is counted of them."""
        followed, _ = self._followed(hashes)
        if len(followed):
            self._stack.use(followed, size, insert=False)

    def stored(self, hashes: Hashes, *, size: int) -> None:
        """These are offered for storage: from now on a tier that is large enough has them."""
        followed, _ = self._followed(hashes)
        if len(followed):
            self._insert(followed, size)

    def age(self, part: float, num_epochs: int, max_epochs: int) -> None:
        """So many epochs have begun. What was counted so far counts for `part` of that from now on; blocks that were not used for
        `max_epochs` are forgotten."""
        self.total *= part
        self._cold *= part
        self._weights *= part
        self._stack.epoch += num_epochs
        self._stack.forget(self._stack.epoch - max_epochs)

    def hit_rate(self, capacity: float) -> float:
        """Of a tier of that capacity."""
        return self.hit_rates([capacity])[0]

    def hit_rates(self, capacities: Sequence[float]) -> list[float]:
        """Of tiers of those capacities."""
        if not self.total:
            return [0.0] * len(capacities)
        at = np.asarray(capacities, np.float64)
        if self._max_followed:
            at = np.log2(np.maximum(at, 1.0)) * _BUCKETS_PER_DOUBLING
        at = np.minimum(at, len(self._weights) - 2)
        end = np.floor(at).astype(np.int64)
        hits = np.cumsum(self._weights)[end] + self._missing
        if self._max_followed:
            hits += (at - end) * self._weights[end + 1]
        rates: list[float] = np.clip(hits / self.total, 0.0, 1.0).tolist()
        return rates

    def best_hit_rate(self) -> float:
        """Of a tier without end."""
        return min(max((self.total - self._cold) / self.total, 0.0), 1.0) if self.total else 0.0

    def points(self) -> list[CurvePoint]:
        """The curve where it rises."""
        used = np.flatnonzero(self._weights)
        sizes = [int(at) if not self._max_followed else 2 ** (int(at) / _BUCKETS_PER_DOUBLING) for at in used]
        sums = np.cumsum(self._weights)[used] + self._missing
        rates = np.clip(sums / max(1.0, self.total), 0.0, 1.0).tolist()
        return [CurvePoint(size, rate) for size, rate in zip(sizes, rates, strict=True)]

    def knee(self) -> CurvePoint | None:
        """Where more capacity begins to bring less: the point furthest above the line between the ends, over the logarithm of
        capacity. (Satopaa et al., Finding a Kneedle in a haystack, 2011.)"""
        points = [point for point in self.points() if point.capacity >= 1]
        if len(points) < 3:
            return None
        x = np.log2([point.capacity for point in points])
        y = np.array([point.hit_rate for point in points])
        if x[-1] == x[0] or y[-1] == y[0]:
            return None
        above = (y - y[0]) / (y[-1] - y[0]) - (x - x[0]) / (x[-1] - x[0])
        return points[int(above.argmax())]

    @property
    def _missing(self) -> float:
        """What the sample has too few of."""
        return self.total - float(self._weights.sum()) - self._cold

    def _followed(self, hashes: Hashes) -> tuple[Hashes, _Ints]:
        """Those that are followed, each once, and their places among `hashes`."""
        places = np.flatnonzero(hashes <= np.uint64(self._limit))
        followed = hashes[places]
        ascending = np.sort(followed)
        if (ascending[1:] == ascending[:-1]).any():
            places = places[np.sort(np.unique(followed, return_index=True)[1])]
            followed = hashes[places]
        return followed, places

    def _count(self, num_uses: int, distances: _Ints, value: float) -> None:
        """So many uses of blocks that are followed, some of them known before."""
        value /= self.rate
        self._cold += value * (num_uses - len(distances))
        if not len(distances):
            return
        buckets = distances
        if self._max_followed:
            room = np.log2(np.maximum(distances / self.rate, 1.0))
            buckets = np.ceil(room * _BUCKETS_PER_DOUBLING).astype(np.int64)
        if (most := int(buckets.max())) >= len(self._weights):
            self._weights = grown(self._weights, 2 * most)
        np.add.at(self._weights, buckets, value)

    def _insert(self, followed: Hashes, size: int) -> None:
        """Follow these from now on, as many as there may be: what is too much goes before it takes room."""
        self._shrink(len(followed), lambda: followed)
        self._stack.use(followed[followed <= np.uint64(self._limit)], size, insert=True)
        self._shrink(self._stack.num_blocks, self._stack.hashes)

    def _shrink(self, num_blocks: int, hashes: Callable[[], Hashes]) -> None:
        """These are to be followed. If they are too many, follow fewer, some more than need be so that it is rare: those with the
        largest hashes go, and none as large comes in any more."""
        if 0 < self._max_followed < num_blocks:
            kept = self._max_followed - self._max_followed // _SHRINK_PART
            self._limit = int(np.partition(hashes(), kept)[kept]) - 1
            self._stack.keep_below(self._limit)


class _Stack:
    """Blocks in the order of use: slots that are taken in turn, and given up when their block is used again.

    slot     |  0 |  1 |  2 |  3 |  4 |  5 |
    size     |  4 |  0 |  4 |  0 |  8 |  4 |  next use ->      since the use in slot 2: 4 + 8 + 4
    """

    def __init__(self, places: "_Places | _ManyPlaces", sums: "_Sums") -> None:
        self._places = places
        self._sums = sums
        self._next = 0
        self.epoch = 0
        self._reset(_FIRST_SLOTS)

    @property
    def num_blocks(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._places.nbytes + self._sums.nbytes + self._sizes.nbytes + self._epochs.nbytes

    def use(self, hashes: Hashes, size: int, *, insert: bool) -> tuple[NDArray[np.bool_], _Ints]:
        """Move blocks, each given once, to the top, tail first; unknown ones are added if `insert`, else passed over. Which were
        known, and for each of those what had been used since its last use, itself included, before any of this call moved."""
        slots = self._places.find(hashes)
        known = slots >= 0
        moved = hashes if insert else hashes[known]
        if len(self._sizes) - self._next < len(moved):
            self._compact(len(moved))
            slots = self._places.find(hashes)
        found = slots[known]
        distances = self._sums.since(self._sizes, found)
        taken = np.arange(self._next, self._next + len(moved))
        self._next += len(moved)
        self._change(found, 0)
        self._change(taken, size)
        self._epochs[taken] = self.epoch
        self._places.put(moved, taken[::-1])
        return known, distances

    def keep_below(self, limit: int) -> None:
        """Forget those with hashes above."""
        hashes, slots = self._places.all()
        self._keep(hashes, slots, hashes <= np.uint64(limit))

    def forget(self, epoch: int) -> None:
        """Forget those that were last used before."""
        hashes, slots = self._places.all()
        self._keep(hashes, slots, self._epochs[slots] >= epoch)

    def hashes(self) -> Hashes:
        """Of all."""
        return self._places.all()[0]

    def _keep(self, hashes: Hashes, slots: _Ints, kept: NDArray[np.bool_]) -> None:
        self._change(slots[~kept], 0)
        self._places.replace(hashes[kept], slots[kept])

    def _change(self, slots: _Ints, size: int) -> None:
        if len(slots):
            self._sums.add(slots, size - self._sizes[slots])
            self._sizes[slots] = size

    def _reset(self, num_slots: int) -> None:
        self._sizes = np.zeros(num_slots, np.int64)  # by slot; 0: given up
        self._epochs = np.zeros(num_slots, np.int32)
        self._sums.reset(num_slots)

    def _compact(self, wanted: int) -> None:
        """Number the order anew, without what was given up."""
        hashes, slots = self._places.all()
        order = np.argsort(slots)
        taken = slots[order]
        sizes, epochs = self._sizes[taken], self._epochs[taken]
        self._next = len(taken)
        self._reset(max(_FIRST_SLOTS, _SLOTS_PER_BLOCK * (self._next + wanted)))
        self._places.replace(hashes[order], np.arange(self._next))
        self._sizes[: self._next], self._epochs[: self._next] = sizes, epochs
        self._sums.add(np.arange(self._next), sizes)


class _Places:
    """Hash -> slot, as columns in the order of hashes: for a few thousand, 512 of them found in some 20 us."""

    def __init__(self) -> None:
        self._hashes: Hashes = np.zeros(0, np.uint64)
        self._slots: _Ints = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def nbytes(self) -> int:
        """Memory."""
        return self._hashes.nbytes + self._slots.nbytes

    def find(self, hashes: Hashes) -> _Ints:
        """Slots; -1: unknown."""
        if not len(self._hashes):
            return np.full(len(hashes), -1)
        at = np.searchsorted(self._hashes[:-1], hashes)
        return np.where(self._hashes[at] == hashes, self._slots[at], -1)

    def put(self, hashes: Hashes, slots: _Ints) -> None:
        """Have them there, each given once, whether or not they are known."""
        at = np.searchsorted(self._hashes, hashes)
        known = at < len(self._hashes)
        known[known] = self._hashes[at[known]] == hashes[known]
        self._slots[at[known]] = slots[known]
        if not known.all():
            at, hashes, slots = at[~known], hashes[~known], slots[~known]
            order = np.argsort(hashes)
            self._hashes = np.insert(self._hashes, at[order], hashes[order])
            self._slots = np.insert(self._slots, at[order], slots[order])

    def all(self) -> tuple[Hashes, _Ints]:
        """In any order."""
        return self._hashes, self._slots

    def replace(self, hashes: Hashes, slots: _Ints) -> None:
        """These, and no others."""
        order = np.argsort(hashes)
        self._hashes, self._slots = hashes[order], slots[order]


class _ManyPlaces:
    """The same as a dict: for millions."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """A dict of numbers takes 138 bytes an entry."""
        return 138 * len(self._slots)

    def find(self, hashes: Hashes) -> _Ints:
        """As above."""
        return np.array([self._slots.get(one, -1) for one in hashes.tolist()], np.int64)

    def put(self, hashes: Hashes, slots: _Ints) -> None:
        """As above."""
        self._slots.update(zip(hashes.tolist(), slots.tolist(), strict=True))

    def all(self) -> tuple[Hashes, _Ints]:
        """As above."""
        num = len(self._slots)
        return np.fromiter(self._slots, np.uint64, num), np.fromiter(self._slots.values(), np.int64, num)

    def replace(self, hashes: Hashes, slots: _Ints) -> None:
        """As above."""
        self._slots = dict(zip(hashes.tolist(), slots.tolist(), strict=True))


class _Sums:
    """Of sizes behind slots, added up when they are asked for: for a few thousand slots."""

    nbytes = 0

    def reset(self, num_slots: int) -> None:
        """All sizes are 0."""

    def add(self, slots: _Ints, sizes: _Ints) -> None:
        """They change by so much."""

    def since(self, sizes: _Ints, slots: _Ints) -> _Ints:
        """The sum of `sizes` from each slot on."""
        if not len(slots):
            return slots
        order = np.argsort(slots)
        between = np.add.reduceat(sizes, slots[order])  # a tenth of the time of a cumulative sum over all
        since = np.empty_like(slots)
        since[order] = between[::-1].cumsum()[::-1]
        return since


class _FenwickSums(_Sums):
    """Kept as a Fenwick tree: for millions."""

    def reset(self, num_slots: int) -> None:
        self._sums = np.zeros(num_slots + 1, np.int64)
        self._total = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # only read
        return self._sums.nbytes

    def add(self, slots: _Ints, sizes: _Ints) -> None:
        self._total += int(sizes.sum())
        at = slots + 1
        while len(at):
            np.add.at(self._sums, at, sizes)
            at = at + (at & -at)
            inside = at < len(self._sums)
            at, sizes = at[inside], sizes[inside]

    def since(self, sizes: _Ints, slots: _Ints) -> _Ints:  # noqa: ARG002 - they are in the tree
        at, before = slots.copy(), np.zeros(len(slots), np.int64)
        while at.any():
            before += self._sums[at]
            at &= at - 1
        since: _Ints = self._total - before
        return since
