"""How soon blocks are used again, learnt from those that were."""

import numpy as np
from numpy.typing import NDArray

from kvstore.eviction.ghosts import HISTORY
from kvstore.eviction.policy import TierRows
from kvstore.index import BlockIndex, Rows

NUM_CLASSES = 4
CLASS_OF_USES = bytes(min(max(uses.bit_length(), 1), NUM_CLASSES) - 1 for uses in range(256))
"""Number of uses -> class: 1; 2 or 3; 4 to 7; 8 or more."""

_NUM_AGES = 48  # age a is in bucket a.bit_length(): [2^(k-1), 2^k)
_FROM = np.concatenate(([0.0], np.exp2(np.arange(_NUM_AGES - 1))))
_WIDTH = np.concatenate(([1.0], np.exp2(np.arange(_NUM_AGES - 1))))
_MIDDLE = _FROM + _WIDTH / 2
_BATCH_USES = 2048
_PRIOR_AGES = 3  # without evidence, a block that was not used for t comes back in 3 t

_Counts = NDArray[np.float64]  # [NUM_CLASSES, _NUM_AGES]
_CLASSES = np.frombuffer(CLASS_OF_USES, np.uint8)


class ReuseRates:
    """For each class of blocks, by how often they were used, and each age since the last use: hits to expect for the time that
    such a block is kept, if it is kept as long as is best. (The index of Gittins: of several to keep, the one with the largest
    first. LHD by Beckmann et al., NSDI 2018, ranks by hits for space and time too, up to the end of a life as it is.)

    Learns from every use, of blocks that were evicted meanwhile too as long as ghosts are remembered, so it sees what would have
    been and not only what the policy allowed. Time is `index.sequence`. A use opens an interval, the next one closes it. Open
    ones are counted in cohorts by when they began, the older the wider, so 30 of them cover everything.

        rate of (class, bucket) = intervals that closed in it / time that all intervals spent in it

    What is older than HISTORY fillings of the tier counts for half, then for a quarter.
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        self._index = index
        self._tier = tier
        self._waiting: list[tuple[NDArray[np.uint8], NDArray[np.int64], int]] = []
        self._num_waiting = 0
        shape = (NUM_CLASSES, _NUM_AGES)
        self._returned = np.zeros(shape)  # intervals closed by a use
        self._ended = np.zeros(shape)  # those, and open ones that nobody waits for any more
        self._partial = np.zeros(shape)  # what ended ones spent in their last bucket
        self._starts: list[int] = []  # of cohorts: `sequence` before their first use
        self._weights: list[float] = []  # what one of their intervals counts
        self._open = np.zeros((0, NUM_CLASSES))
        self._batch_start = self._learnt_sequence = index.sequence
        self._num_births = 0
        self._rates = self._expected()

    def used(self, rows: Rows) -> None:
        """A request has used these; the index knows it already."""
        if not self._waiting:
            self._batch_start = self._index.sequence - len(rows)  # after a restart it is far from the last one
        self._waiting.append((self._index.uses[rows], self._index.prior_use[rows], self._index.sequence))
        self._num_waiting += len(rows)
        if self._num_waiting >= _BATCH_USES:
            self._learn()

    def rate(self, block_class: int, age: int) -> float:
        """Hits to expect, for each unit of time, from keeping a block that was not used for `age`."""
        return self._rates[block_class][age.bit_length()]

    def _learn(self) -> None:
        uses = np.concatenate([waiting[0] for waiting in self._waiting])
        before = np.concatenate([waiting[1] for waiting in self._waiting])
        now = np.repeat([waiting[2] for waiting in self._waiting], [len(waiting[0]) for waiting in self._waiting])
        self._waiting.clear()
        self._num_waiting = 0
        self._num_births += len(uses)
        self._starts.append(self._batch_start)
        self._weights.append(1.0)
        self._open = np.vstack((self._open, np.bincount(_CLASSES[uses], minlength=NUM_CLASSES)))
        self._learnt_sequence = self._index.sequence
        again = (before > self._starts[0]) & (uses > 1)
        self._close(_CLASSES[uses[again] - 1], before[again], now[again])
        self._merge_cohorts()
        self._forget()
        self._rates = self._expected()

    def _close(self, classes: NDArray[np.uint8], began: NDArray[np.int64], now: NDArray[np.int64]) -> None:
        cohorts = np.searchsorted(self._starts, began) - 1
        weights = np.array(self._weights)[cohorts]
        np.subtract.at(self._open, (cohorts, classes), weights)
        ages = (now - began).astype(np.float64)
        np.add.at(self._returned, (classes, np.frexp(ages)[1]), weights)
        self._end(classes, ages, weights)

    def _end(self, classes: NDArray[np.uint8], ages: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        buckets = np.frexp(ages)[1]
        np.add.at(self._ended, (classes, buckets), weights)
        np.add.at(self._partial, (classes, buckets), weights * (ages - _FROM[buckets]))

    def _merge_cohorts(self) -> None:
        """Neighbours that together span less than half of the time since."""
        at = 0
        ends = [*self._starts, self._learnt_sequence][1:]
        while at + 1 < len(self._starts):
            if 2 * (ends[at + 1] - self._starts[at]) <= self._learnt_sequence - ends[at + 1]:
                self._open[at] += self._open[at + 1]
                self._open = np.delete(self._open, at + 1, axis=0)
                self._weights[at] = (self._weights[at] + self._weights.pop(at + 1)) / 2
                del self._starts[at + 1], ends[at]
            else:
                at += 1

    def _forget(self) -> None:
        history = HISTORY * max(1, self._tier.num_placed())
        while len(self._starts) > 1 and self._learnt_sequence - self._starts[1] > history:
            age = float(self._learnt_sequence - (self._starts[0] + self._starts[1]) / 2)
            self._end(np.arange(NUM_CLASSES, dtype=np.uint8), np.full(NUM_CLASSES, age), self._open[0])
            self._open = self._open[1:]
            del self._starts[0], self._weights[0]
        if self._num_births > history:
            self._num_births //= 2
            for counts in (self._returned, self._ended, self._partial, self._open):
                np.divide(counts, 2, out=counts)
            self._weights = [weight / 2 for weight in self._weights]

    def _expected(self) -> list[list[float]]:
        spent = self._spent()
        prior_spent = _PRIOR_AGES * _MIDDLE  # one return more, at the rate of all classes together
        pooled = (self._returned.sum(0) + 1) / (spent.sum(0) + prior_spent)
        rates = (self._returned + prior_spent * pooled) / (spent + prior_spent)
        return [list(map(float, of_class)) for of_class in _best_until_any_end(rates)]

    def _spent(self) -> _Counts:
        """Time in each bucket: ended intervals went through all before their last one, open ones up to their age."""
        beyond = self._ended[:, ::-1].cumsum(1)[:, ::-1] - self._ended
        spent = beyond * _WIDTH + self._partial
        ends = [*self._starts, self._learnt_sequence][1:]
        for start, end, counts in zip(self._starts, ends, self._open, strict=True):
            age = self._learnt_sequence - (start + end) / 2
            spent += np.maximum(counts, 0)[:, None] * np.clip(age - _FROM, 0, _WIDTH)
        return spent


def _best_until_any_end(rates: _Counts) -> _Counts:
    """From rates in each bucket: for a block at its beginning, the largest of (chance of a hit up to the end of a later bucket) /
    (time until then or until the hit)."""
    passed = np.concatenate((np.zeros((len(rates), 1)), (rates * _WIDTH).cumsum(1)), axis=1)
    later = np.tri(_NUM_AGES, dtype=np.bool_).T  # [from, to]
    left = np.exp(-np.where(later, passed[:, None, :-1] - passed[:, :-1, None], np.inf))  # no hit yet when `to` begins
    time = (left * (-np.expm1(-rates * _WIDTH) / rates)[:, None, :]).cumsum(2)
    hit = -np.expm1(-np.where(later, passed[:, None, 1:] - passed[:, :-1, None], 0))
    best: _Counts = np.divide(hit, time, out=np.zeros_like(hit), where=later).max(2)
    return best
