"""ARC over leaves."""

import numpy as np

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.columns import Column
from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.lru import by_last_use
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import TierRows
from kvstore.index import BlockIndex, Rows

_NONE, _ONCE, _AGAIN, _NEW, _BACK = range(5)
_USED = np.array([_NONE, _AGAIN, _AGAIN, _ONCE, _AGAIN], np.uint8)
"""List of a row -> its list when it is used. New rows are used as they are stored."""


class Arc(LeafPolicy):
    """Two lists, of blocks used once and of blocks used again, both by last use; evicted blocks that come back say which of them
    should be longer. (Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache, FAST 2003.) Here the lengths count
    all blocks and a victim is the oldest leaf of its list; what was evicted is remembered for one filling of the tier."""

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self._tier = tier
        self._list = Column(index, np.uint8)
        self._once = LeafOrder(index, tier, by_last_use(index))
        self._again = LeafOrder(index, tier, by_last_use(index))
        self.orders = (self._once, self._again)
        self._num_once = 0
        self._target = 0.0  # of _num_once
        self._ghosts = Ghosts(index, tier, history=2)
        self._num_ghosts = {_ONCE: 0, _AGAIN: 0}

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        (self._once if self._is_once(row) else self._again).offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self._list.grow()
        capacity = max(1, self._tier.num_placed())
        for row in rows.tolist():
            self._num_once -= self._is_once(row) and self._list.at[row] != _NONE  # another block's, that was dropped
            known = self._ghosts.take(row)
            self._list.at[row] = _NEW if known is None else _BACK
            self._num_once += known is None
            if known is not None:
                mine, others = known.mark, _ONCE + _AGAIN - known.mark
                step = max(1.0, self._num_ghosts[others] / max(1, self._num_ghosts[mine]))
                step = min(step, capacity)
                self._target = min(max(self._target + (step if mine == _ONCE else -step), 0.0), capacity)
                self._num_ghosts[mine] = max(0, self._num_ghosts[mine] - 1)

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy. A leaf that changes its list is queued in the other one too; where it was, it is passed over."""
        self._list.grow()
        before = self._list.values[rows]
        after = _USED[before]
        self._list.values[rows] = after
        self._num_once -= int(np.count_nonzero((before == _ONCE) & (after == _AGAIN)))
        for row in rows[(before == _ONCE) | (before == _BACK)].tolist():
            self._again.offer(row)

    def choose(self) -> int | None:
        """See LeafPolicy."""
        for is_once in (True, False) if self._num_once > self._target else (False, True):
            order = self._once if is_once else self._again
            while (row := order.pop()) is not None:
                if self._is_once(row) == is_once:
                    self._leave(row)
                    return row
                self.offer(row)
        return None

    def _leave(self, row: int) -> None:
        mark = _ONCE if self._is_once(row) else _AGAIN
        self._num_once -= mark == _ONCE and self._list.at[row] != _NONE
        self._list.at[row] = _NONE
        self._ghosts.add(row, mark)
        self._num_ghosts[mark] = min(self._num_ghosts[mark] + 1, self._ghosts.capacity)

    def _is_once(self, row: int) -> bool:
        return row >= len(self._list.values) or self._list.at[row] in {_NONE, _ONCE, _NEW}
