"""Copies that nobody is going to read soon go first."""

from collections.abc import Callable, Iterable

from kvstore.eviction.lru import by_last_use
from kvstore.eviction.order import LeafOrder
from kvstore.eviction.policy import EvictionPolicy, TierRows
from kvstore.index import BlockIndex, Rows


class RedundantFirst:
    """Another policy, but for redundant copies, which go before what it would choose, the least recently used first. Whose they
    are does not matter, nor how often they were used: it was not this copy that served.

    `is_redundant(row)` may change at any time; a row that becomes so is to be offered again.
    """

    def __init__(
        self,
        index: BlockIndex,
        tier: TierRows,
        make_policy: Callable[[BlockIndex, TierRows], EvictionPolicy],
        is_redundant: Callable[[int], bool],
    ) -> None:
        self.policy = make_policy(index, tier)
        self._tier = tier
        self._is_redundant = is_redundant
        self._order = LeafOrder(index, self, by_last_use(index))

    def is_evictable(self, row: int) -> bool:
        """Of the order: whether the row is redundant and may go."""
        return self._is_redundant(row) and self._tier.is_evictable(row)

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        self._order.offer(row)
        self.policy.offer(row)

    def cool(self, rows: Iterable[int]) -> None:
        """See EvictionPolicy."""
        self.policy.cool(rows)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self.policy.stored(rows)

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self.policy.used(rows)

    def needs(self, tenant: str, nbytes: int, capacity_bytes: int) -> None:
        """See EvictionPolicy."""
        self.policy.needs(tenant, nbytes, capacity_bytes)

    def next_victim(self) -> int | None:
        """See EvictionPolicy."""
        row = self._order.pop()
        return self.policy.next_victim() if row is None else row

    def check(self) -> None:
        """See EvictionPolicy."""
        self.policy.check()
        self._order.check()
