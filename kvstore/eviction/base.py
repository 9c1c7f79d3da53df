"""What all policies have in common."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from kvstore.eviction.class_order import ClassOrder
from kvstore.eviction.order import Cooled, LeafOrder
from kvstore.eviction.policy import Candidates
from kvstore.index import BlockIndex, Rows


class LeafPolicy(ABC):
    """An EvictionPolicy over orders of leaves. What is cooled goes first; its entries in the orders are found gone later."""

    orders: Sequence[LeafOrder | ClassOrder] = ()

    def __init__(self, index: BlockIndex, candidates: Candidates) -> None:
        self.index = index
        self.candidates = candidates
        self._cooled = Cooled(index, candidates)

    @abstractmethod
    def offer(self, row: int) -> None:
        """See EvictionPolicy."""

    @abstractmethod
    def choose(self) -> int | None:
        """As `next_victim`, when nothing is cooled."""

    def stored(self, rows: Rows) -> None:  # noqa: B027 - LRU needs none
        """See EvictionPolicy."""

    def used(self, rows: Rows) -> None:  # noqa: B027 - likewise
        """See EvictionPolicy."""

    def needs(self, tenant: str, nbytes: int, capacity_bytes: int) -> None:  # noqa: B027 - to most all tenants are alike
        """See EvictionPolicy."""

    def cool(self, rows: Iterable[int]) -> None:
        """See EvictionPolicy."""
        self._cooled.add(rows)

    def next_victim(self) -> int | None:
        """See EvictionPolicy."""
        if self._cooled.rows and (row := self._cooled.pop()) is not None:
            return row
        return self.choose()

    def check(self) -> None:
        """See EvictionPolicy. Every order keeps its own rules; every evictable row is in one of them."""
        for row in range(self.index.num_rows):
            if self.candidates.is_evictable(row):
                assert any(order.holds(row) for order in self.orders)
        for order in self.orders:
            order.check()
