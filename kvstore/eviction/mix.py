"""The default: three experts that take turns by weights, which regret moves."""

import math
from collections.abc import Callable
from functools import partial

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.class_order import ClassOrder
from kvstore.eviction.ghosts import Ghost, Ghosts
from kvstore.eviction.lru import by_prior_use
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import Candidates, TierRows
from kvstore.eviction.reuse_rate import CLASS_OF_USES, NUM_CLASSES, ReuseRates
from kvstore.index import BlockIndex, Rows

_LEARNING_RATE = 0.45
_DISCOUNT = 0.005
"""Both as published: what a regret weighs falls to this after as many uses as the tier has blocks."""

_LEAST_WEIGHT = 0.01  # so that no expert is lost for ever
_VICTIMS_PER_TURN = 16  # at most; a turn ends with the request too
_LRU, _LRU2, _RATE = range(3)
_USED_ONCE = CLASS_OF_USES[1]


class _UsedAgain:
    """Candidates that were used more than once: of the others LRU-2 takes the oldest, as LRU does."""

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        self._index = index
        self._candidates = candidates

    def is_evictable(self, row: int) -> bool:
        """See Candidates."""
        return self._index.uses_at[row] > 1 and self._candidates.is_evictable(row)


class AdaptiveMix(LeafPolicy):
    """Evicts what LRU would, or LRU-2, or what is least likely to be used again soon (reuse_rate.py): each its share of times;
    who evicted a block that is wanted again loses weight.

    A request judges once, by its first block that is remembered: a prefix that comes back is one mistake, however long it is.
    (Vietri et al., Driving cache replacement with ML-based LeCaR, HotStorage 2018. Their second expert is LFU, which keeps for
    ever what was used often once, and loses everything where sessions end. Theirs are drawn by chance; with turns in
    proportion to the weights the same calls give the same victims, and hits of small tiers do not depend on a seed.)

    The third expert looks at the oldest and the newest leaf of each class: where rates fall with age the oldest is the worst of
    its class, and where all come back in turn, as in a loop, the newest is.
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self._by_class = ClassOrder(index, tier)
        self._by_prior_use = LeafOrder(index, _UsedAgain(index, tier), by_prior_use(index))
        self.orders = (self._by_class, self._by_prior_use)
        self.ghosts = Ghosts(index, tier)
        self._rates = ReuseRates(index, tier)
        self.weights = [1 / 3] * 3
        order = self._by_class
        self._oldest = [partial(order.pop_oldest, number) for number in range(NUM_CLASSES)]
        self._newest = [partial(order.pop_newest, number) for number in range(NUM_CLASSES)]
        self._owed = [0.0] * 3  # victims of each
        self._expert = _LRU  # whose turn it is
        self._take: Callable[[], int | None] = self._oldest[0]  # where it takes victims from
        self._num_taken = self._num_left = 0

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        if self.candidates.is_evictable(row):
            self._by_class.push(row)
            if self.index.uses_at[row] > 1:
                self._by_prior_use.push(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        ghost = self.ghosts.take_first(rows)
        if ghost is not None:
            self._regret(ghost)

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy. A leaf among them has another class now; others are leaves by chance only, and found later."""
        self._rates.used(rows)
        if len(rows):
            self.offer(int(rows[-1]))

    def needs(self, tenant: str, nbytes: int, capacity_bytes: int) -> None:
        """See EvictionPolicy. What was the newest is another one now."""
        del tenant, nbytes, capacity_bytes
        self._num_left = 0

    def choose(self) -> int | None:
        """See LeafPolicy."""
        row = self._take() if self._num_left else None
        if row is None:
            self._next_turn()
            row = self._take()
        if row is not None:
            self._num_left -= 1
            self._num_taken += 1
            self.ghosts.add(row, self._expert)
        return row

    def _next_turn(self) -> None:
        """Of the expert that is furthest behind its share of the victims."""
        owed, weights, num_taken = self._owed, self.weights, self._num_taken
        if num_taken:
            for expert, weight in enumerate(weights):
                owed[expert] += weight * num_taken
            owed[self._expert] -= num_taken
        behind = [owed[_LRU] + weights[_LRU], owed[_LRU2] + weights[_LRU2], owed[_RATE] + weights[_RATE]]
        self._expert = behind.index(max(behind))
        self._num_taken, self._num_left = 0, _VICTIMS_PER_TURN
        if self._expert == _LRU:
            self._take = self._coldest()
        elif self._expert == _RATE:
            self._take = self._least_likely()
        else:
            is_one = self._by_class.oldest(_USED_ONCE) is not None
            self._take = self._oldest[_USED_ONCE] if is_one else self._by_prior_use.pop

    def _coldest(self) -> Callable[[], int | None]:
        coldest, chosen, last_use_at = math.inf, self._oldest[0], self.index.last_use_at
        for number, take in enumerate(self._oldest):
            row = self._by_class.oldest(number)
            if row is not None and last_use_at[row] < coldest:
                coldest, chosen = last_use_at[row], take
        return chosen

    def _least_likely(self) -> Callable[[], int | None]:
        least, now, last_use_at = math.inf, self.index.sequence, self.index.last_use_at
        chosen = self._oldest[0]
        for look, takes in ((self._by_class.oldest, self._oldest), (self._by_class.newest, self._newest)):
            for number, take in enumerate(takes):
                row = look(number)
                if row is not None:
                    rate = self._rates.rate(number, now - last_use_at[row])
                    if rate < least:
                        least, chosen = rate, take
        return chosen

    def check(self) -> None:
        """See EvictionPolicy."""
        super().check()
        assert math.isclose(sum(self.weights), 1)
        for row in range(self.index.num_rows):
            if self.candidates.is_evictable(row):
                assert self._by_class.holds(row)
                assert self.index.uses_at[row] < 2 or self._by_prior_use.holds(row)

    def _regret(self, ghost: Ghost) -> None:
        weights = self.weights.copy()
        weights[ghost.mark] *= math.exp(-_LEARNING_RATE * _DISCOUNT**ghost.age)
        kept = [max(weight / sum(weights), _LEAST_WEIGHT) for weight in weights]
        self.weights = [weight / sum(kept) for weight in kept]
