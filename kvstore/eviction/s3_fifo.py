"""S3-FIFO over leaves."""

import numpy as np

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.columns import Column
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import TierRows
from kvstore.index import BlockIndex, Rows

_SMALL_FRACTION = 0.1
_PROMOTED_USES = 2
_MOST_USES = 3
_NONE, _SMALL, _MAIN = 0, 1, 2


class S3Fifo(LeafPolicy):
    """A small queue that most blocks leave for good, and a main one in which those stay that are used.

    A block enters the small queue, or the main one if it was evicted from the small one lately; a block used twice in the small
    queue moves to the main one; in the main one each use is another round. (Yang et al., FIFO queues are all you need for
    cache eviction, SOSP 2023.) Here a block's place in a queue comes up when it is a leaf, and room is made for a whole request
    before its blocks are looked up among the evicted ones. The published form, in which any block may go, hits 0.3 points more on
    the conversation trace at 10,000 blocks. Evicted blocks are remembered a little longer than there: without that the same
    cell loses 0.3 points more, and the agentic trace at 1,000 gains.
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self._tier = tier
        self._queue = Column(index, np.uint8)
        self._place = Column(index, np.int64)
        self._uses = Column(index, np.int8)
        self._num_places = 0
        self._small = LeafOrder(index, tier, self._place_of)
        self._main = LeafOrder(index, tier, self._place_of)
        self.orders = (self._small, self._main)
        self._num_small = 0
        self._ghosts = Ghosts(index, tier, history=1)

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        (self._main if self._queue_of(row) == _MAIN else self._small).offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy. Tail to head, so that a tail comes up first."""
        for column in (self._queue, self._place, self._uses):
            column.grow()
        for row in rows[::-1].tolist():
            self._num_small += self._queue.at[row] != _SMALL
            known = self._ghosts.take(row)
            self._queue.at[row] = _SMALL
            self._uses.at[row] = -1  # its first use is what stores it
            self._next_place(row)
            if known is not None:
                self._to_main(row)

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self._uses.grow()
        self._uses.values[rows] = np.minimum(self._uses.values[rows] + 1, _MOST_USES)

    def choose(self) -> int | None:
        """See LeafPolicy. Each turn that evicts nothing takes uses from a row, or moves it."""
        while True:
            from_small = self._num_small > _SMALL_FRACTION * self._tier.num_placed()
            order = self._small if from_small else self._main
            row = order.pop()
            if row is None:
                order = self._main if from_small else self._small
                row = order.pop()
            if row is None:
                return None
            if order is self._small and self._uses.at[row] >= _PROMOTED_USES:
                self._to_main(row)
                self._main.offer(row)
            elif order is self._main and self._uses.at[row] > 0:
                self._uses.at[row] -= 1
                self._next_place(row)
                self._main.offer(row)
            else:
                self._leave(row)
                return row

    def _leave(self, row: int) -> None:
        if self._queue_of(row) == _SMALL:
            self._ghosts.add(row, _SMALL)
            self._num_small -= 1
        self._queue.at[row] = _NONE

    def _to_main(self, row: int) -> None:
        self._num_small -= self._queue.at[row] == _SMALL
        self._queue.at[row] = _MAIN
        self._uses.at[row] = min(self._uses.at[row], 0)
        self._next_place(row)

    def _next_place(self, row: int) -> None:
        self._num_places += 1
        self._place.at[row] = self._num_places

    def _place_of(self, row: int) -> int:
        return self._place.at[row] if row < len(self._place.values) else 0

    def _queue_of(self, row: int) -> int:
        return self._queue.at[row] if row < len(self._queue.values) else _NONE
