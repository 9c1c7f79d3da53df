"""ARC over leaves."""

from collections import OrderedDict

import numpy as np

from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.columns import Column
from kvstore.eviction.lru import by_last_use
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import TierRows
from kvstore.index import BlockIndex, Rows

_NONE, _ONCE, _AGAIN, _NEW, _BACK = range(5)
_USED = np.array([_NONE, _AGAIN, _AGAIN, _ONCE, _AGAIN], np.uint8)
"""List of a row -> its list when it is used. New rows are used as they are stored."""


class Arc(LeafPolicy):
    """Two lists, of blocks used once and of blocks used again, both by last use; evicted blocks that come back say which of them
    should be longer. (Megiddo, Modha: ARC: a self-tuning, low overhead replacement cache, FAST 2003.) The lengths count all
    blocks, a victim is the oldest leaf of its list, and as many evicted blocks are remembered as there, in some
    150 bytes each.

    Room is made for a whole request before its blocks are looked up among the evicted ones, and never from its own prefix:
    where requests are a large part of the tier, that hits less than the published form, which learns from block to block.
    """

    def __init__(self, index: BlockIndex, tier: TierRows) -> None:
        super().__init__(index, tier)
        self._tier = tier
        self._list = Column(index, np.uint8)
        self._once = LeafOrder(index, tier, by_last_use(index))
        self._again = LeafOrder(index, tier, by_last_use(index))
        self.orders = (self._once, self._again)
        self._num_once = 0
        self._target = 0.0  # of _num_once
        self._evicted_once: OrderedDict[bytes, None] = OrderedDict()  # keys, the first evicted first
        self._evicted_again: OrderedDict[bytes, None] = OrderedDict()

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        (self._once if self._is_once(row) else self._again).offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self._list.grow()
        capacity = max(1, self._tier.num_placed())
        once, again = self._evicted_once, self._evicted_again
        for row in rows.tolist():
            self._num_once -= self._is_once(row) and self._list.at[row] != _NONE  # another block's, that was dropped
            key = self.index.keys[row]
            if key in once:
                self._target = min(self._target + max(1.0, len(again) / len(once)), capacity)
                del once[key]
                self._list.at[row] = _BACK
            elif key in again:
                self._target = max(self._target - max(1.0, len(once) / len(again)), 0.0)
                del again[key]
                self._list.at[row] = _BACK
            else:
                self._num_once += 1
                self._list.at[row] = _NEW
        while once and self._num_once + len(once) > capacity:
            once.popitem(last=False)
        while again and len(once) + len(again) > capacity:
            again.popitem(last=False)

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
        is_once = self._is_once(row)
        self._num_once -= is_once and self._list.at[row] != _NONE
        self._list.at[row] = _NONE
        (self._evicted_once if is_once else self._evicted_again)[self.index.keys[row]] = None

    def _is_once(self, row: int) -> bool:
        return row >= len(self._list.values) or self._list.at[row] in {_NONE, _ONCE, _NEW}
