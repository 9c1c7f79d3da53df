"""What a byte is worth: the least prefill that it may be expected to save goes first."""

import math

import numpy as np

from kvstore.costs import PrefillCost, block_value
from kvstore.eviction.base import LeafPolicy
from kvstore.eviction.columns import Column
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import TierRows
from kvstore.index import NO_PARENT, BlockIndex, Rows

TYPICAL_PREFILL = PrefillCost(t0_s=0.0, a_s=22.2e-6, b_s=0.94e-9)
"""Llama-3.1-8B on an H100. How blocks compare depends on b/a alone, and on the bytes of a token."""

_KEY_SCALE = 1 << 24
_UNKNOWN_VALUE = -40.0
_KEY_OFFSET = 1 << 40  # scores are logarithms, and may be below 0


class ValuePerByte(LeafPolicy):
    """Seconds of prefill that a block saves, by its position, per byte, times how often it was used, each use counting half as
    much when as many blocks have been used since as the tier holds.

    Scores are kept as logarithms of what they would be at the beginning of time, so decay changes none of them: with time in
    half-lives, a use at time t adds 2^t. They only grow while a row holds a block. (Uses with decay: Lee et al., LRFU, 2001.)
    """

    def __init__(self, index: BlockIndex, tier: TierRows, *, prefill: PrefillCost = TYPICAL_PREFILL) -> None:
        super().__init__(index, tier)
        self._tier = tier
        self._prefill = prefill
        self._uses = Column(index, np.float64)  # log2 of the decayed count
        self._value = Column(index, np.float64)  # log2 of seconds a byte
        self._depth = Column(index, np.int32)
        self._order = LeafOrder(index, tier, self._key)
        self.orders = (self._order,)
        self._half_lives = 0.0
        self._num_uses = 0

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        self._order.offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        for column in (self._uses, self._value, self._depth):
            column.grow()
        index = self.index
        for row in rows.tolist():
            parent = index.parent_at[row]
            depth = 0 if parent == NO_PARENT else self._depth.at[parent] + 1
            entry = index.namespace_of(row)
            tokens = entry.spec.block_tokens
            self._depth.at[row] = depth
            self._value.values[row] = math.log2(block_value(self._prefill, depth * tokens, tokens, entry.slot_nbytes))
            self._uses.values[row] = -math.inf

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        num_uses = self.index.num_uses
        self._half_lives += (num_uses - self._num_uses) / max(1, self._tier.num_placed())
        self._num_uses = num_uses
        self._uses.grow()
        self._uses.values[rows] = np.logaddexp2(self._uses.values[rows], self._half_lives)

    def choose(self) -> int | None:
        """See LeafPolicy."""
        return self._order.pop()

    def _key(self, row: int) -> int:
        if row >= len(self._uses.values):
            return 0
        score = self._uses.at[row] + (self._value.at[row] or _UNKNOWN_VALUE)
        return max(0, _KEY_OFFSET + int(score * _KEY_SCALE)) if score > -math.inf else 0
