"""Least recently used first, by the last use or by the last but one, among leaves."""

from collections.abc import Callable

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import Candidates, TierRows
from kvstore.index import BlockIndex, Rows

_USED_TWICE = 1 << 46  # beyond any logical time, and with it far below the 63 bits of a queued key


def by_last_use(index: BlockIndex) -> Callable[[int], int]:
    """A key for LeafOrder."""

    def key(row: int) -> int:
        return index.last_use_at[row]

    return key


def by_prior_use(index: BlockIndex) -> Callable[[int], int]:
    """A key for LeafOrder: rows used once before all others. Times are distinct, so it needs no tie-break."""

    def key(row: int) -> int:
        prior = index.prior_use_at[row]
        return _USED_TWICE + prior if prior else index.last_use_at[row]

    return key


class LeafLru(LeafPolicy):
    """Least recently used first."""

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        super().__init__(index, candidates)
        self._order = LeafOrder(index, candidates, by_last_use(index))
        self.orders = (self._order,)

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        self._order.offer(row)

    def choose(self) -> int | None:
        """See LeafPolicy."""
        return self._order.pop()


class LeafLru2(LeafPolicy):
    """The one whose last but one use is longest ago; before all of those the ones that were used once, by that use.

    What was evicted is remembered with its last use (ghosts), so that a block which comes back counts as used twice: blocks are
    rarely used twice while a small tier has them. (O'Neil et al., The LRU-K page replacement algorithm, SIGMOD 1993: that is
    its retained information; its correlated references are left out by `BlockIndex.use`.)
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self._order = LeafOrder(index, tier, by_prior_use(index))
        self.orders = (self._order,)
        self.ghosts = Ghosts(index, tier)

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        self._order.offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self.ghosts.take_first(rows)

    def choose(self) -> int | None:
        """See LeafPolicy."""
        row = self._order.pop()
        if row is not None:
            self.ghosts.add(row, 0)
        return row
