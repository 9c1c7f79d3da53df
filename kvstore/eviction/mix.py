"""The default: two experts that take turns by weights, which regret moves."""

import math

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.ghosts import Ghost, Ghosts
from kvstore.eviction.lru import by_last_use, by_prior_use
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import TierRows
from kvstore.index import BlockIndex, Rows

_LEARNING_RATE = 0.45
_DISCOUNT = 0.005
"""Both as published: what a regret weighs falls to this after as many uses as the tier has blocks."""

_LEAST_WEIGHT = 0.01  # so that neither expert is lost for ever
_LRU, _LRU2 = 0, 1


class AdaptiveMix(LeafPolicy):
    """Evicts what LRU would or what LRU-2 would, each its share of times; who evicted a block that is wanted again loses weight.

    A request judges once, by its first block that is remembered: a prefix that comes back is one mistake, however long it is.
    (Vietri et al., Driving cache replacement with ML-based LeCaR, HotStorage 2018. Their second expert is LFU, which keeps for
    ever what was used often once, and loses everything where sessions end. Theirs are drawn by chance; with turns in
    proportion to the weights the same calls give the same victims, and hits of small tiers do not depend on a seed.)
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self.orders = (
            LeafOrder(index, tier, by_last_use(index)),
            LeafOrder(index, tier, by_prior_use(index)),
        )
        self.ghosts = Ghosts(index, tier)
        self.lru2_weight = 0.5
        self._owed = 0.0  # turns of LRU-2

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        if self.candidates.is_evictable(row):
            self.orders[_LRU].push(row)
            self.orders[_LRU2].push(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        ghost = self.ghosts.take_first(rows)
        if ghost is not None:
            self._regret(ghost)

    def choose(self) -> int | None:
        """See LeafPolicy."""
        self._owed += self.lru2_weight
        expert = _LRU2 if self._owed >= 1 else _LRU
        self._owed -= expert
        row = self.orders[expert].pop()
        if row is not None:
            self.ghosts.add(row, expert)
        return row

    def check(self) -> None:
        """See EvictionPolicy."""
        super().check()
        assert 0 <= self._owed < 1
        for row in range(self.index.num_rows):
            if self.candidates.is_evictable(row):
                assert all(order.holds(row) for order in self.orders)

    def _regret(self, ghost: Ghost) -> None:
        weights = [1 - self.lru2_weight, self.lru2_weight]
        weights[ghost.mark] *= math.exp(-_LEARNING_RATE * _DISCOUNT**ghost.age)
        weight = weights[_LRU2] / sum(weights)
        self.lru2_weight = min(max(weight, _LEAST_WEIGHT), 1 - _LEAST_WEIGHT)
