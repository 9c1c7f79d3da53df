"""What a policy must do, and what it may ask."""

from collections.abc import Iterable
from typing import Protocol

from kvstore.index import Rows


class Candidates(Protocol):
    """Which rows may go; PlacementTable is one."""

    def is_evictable(self, row: int) -> bool:
        """Whether the row may go now."""
        ...


class TierRows(Candidates, Protocol):
    """What a tier holds; PlacementTable is one."""

    def num_placed(self) -> int:
        """How many rows the tier holds."""
        ...

    def bytes_by_tenant(self) -> dict[str, int]:
        """What each tenant's rows take. O(namespaces)."""
        ...


class EvictionPolicy(Protocol):
    """The order in which rows that are evictable (see Candidates) are given up.

    Only leaves are evictable, so whatever the order, the tail of a prefix goes before its head. Of uses a policy learns from
    the index (`last_use`, `prior_use`, `num_uses`), from `stored` and from `used`.
    """

    def offer(self, row: int) -> None:
        """`row` may have become evictable. Offering one that has not, or that is known already, does nothing."""
        ...

    def cool(self, rows: Iterable[int]) -> None:
        """Give these up before anything else, in this order (tail to head), unless they are used again before."""
        ...

    def stored(self, rows: Rows) -> None:
        """A request's new blocks have their places, in the order of the prefix. Before they are used."""
        ...

    def used(self, rows: Rows) -> None:
        """A request has used these, in the order of the prefix, new ones among them: what `index.use` returned."""
        ...

    def needs(self, tenant: str, nbytes: int, capacity_bytes: int) -> None:
        """Victims from now on make room for so much of this tenant's, in a tier of that size."""
        ...

    def next_victim(self) -> int | None:
        """The row to evict now, out of the order from here on; None when nothing is evictable. The caller evicts it."""
        ...

    def check(self) -> None:
        """Assert that every evictable row would be returned by enough calls of `next_victim`."""
        ...
