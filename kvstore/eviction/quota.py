"""A share of the tier for each tenant."""

from collections import Counter
from collections.abc import Callable, Iterable

from kvstore.eviction.lru import by_last_use
from kvstore.eviction.order import Cooled, LeafOrder
from kvstore.eviction.policy import EvictionPolicy, TierRows
from kvstore.index import BlockIndex, Rows

_NAMESPACES_PER_VICTIM = 16  # so many may be counted for each eviction


class TenantQuota:
    """Another policy, but for tenants beyond their share: of the one that is furthest over, the least recently used goes first,
    whoever needs the room. Who needs room beyond its own share gets none of those that stay within theirs. A tenant may use
    what nobody needs.

    `fraction` is of the tier. How much each tenant holds is counted anew when it has changed by little.
    """

    def __init__(
        self,
        index: BlockIndex,
        tier: TierRows,
        make_policy: Callable[[BlockIndex, TierRows], EvictionPolicy],
        fraction: float,
    ) -> None:
        self._index = index
        self._tier = tier
        self.policy = make_policy(index, tier)
        self._fraction = fraction
        self._orders: dict[str, LeafOrder] = {}
        self._cooled = Cooled(index, tier)
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._capacity_bytes = 0
        self._victims_left = 0  # before it is counted again
        self._needing: tuple[str, int] = ("", 0)

    def offer(self, row: int) -> None:
        """See EvictionPolicy."""
        self.policy.offer(row)
        self._order(self._index.namespace_of(row).tenant).offer(row)

    def stored(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self.policy.stored(rows)

    def used(self, rows: Rows) -> None:
        """See EvictionPolicy."""
        self.policy.used(rows)

    def needs(self, tenant: str, nbytes: int, capacity_bytes: int) -> None:
        """See EvictionPolicy."""
        self._capacity_bytes = capacity_bytes
        self._needing = tenant, nbytes
        self._victims_left = 0
        self.policy.needs(tenant, nbytes, capacity_bytes)

    def cool(self, rows: Iterable[int]) -> None:
        """See EvictionPolicy."""
        self._cooled.add(rows)

    def next_victim(self) -> int | None:
        """See EvictionPolicy."""
        row = self._cooled.pop()
        if row is None:
            row = self._of_the_greediest()
        if row is None and not self._is_greedy():
            row = self.policy.next_victim()
        if row is not None:
            entry = self._index.namespace_of(row)
            self._held[entry.tenant] -= entry.slot_nbytes
        return row

    def check(self) -> None:
        """See EvictionPolicy."""
        self.policy.check()
        for order in self._orders.values():
            order.check()
        for row in range(self._index.num_rows):
            if self._tier.is_evictable(row):
                assert self._order(self._index.namespace_of(row).tenant).holds(row)

    def _of_the_greediest(self) -> int | None:
        if self._victims_left == 0:
            self._held = Counter(self._tier.bytes_by_tenant())
            self._capacity_bytes = max(self._capacity_bytes, self._held.total())
            self._victims_left = 1 + len(self._index.namespaces) // _NAMESPACES_PER_VICTIM
        self._victims_left -= 1
        allowed = self._fraction * self._capacity_bytes
        needing, needed = self._needing
        wanted = {tenant: nbytes + needed * (tenant == needing) for tenant, nbytes in self._held.items()}
        over = [tenant for tenant, nbytes in wanted.items() if nbytes > allowed]
        for tenant in sorted(over, key=lambda name: (-wanted[name], name)):
            row = self._order(tenant).pop()
            if row is not None:
                return row
        return None

    def _is_greedy(self) -> bool:
        """Whether who needs room would be beyond its share with it, and others are there to suffer."""
        tenant, nbytes = self._needing
        return (
            self._held[tenant] + nbytes > self._fraction * self._capacity_bytes
            and self._held[tenant] < self._held.total()
        )

    def _order(self, tenant: str) -> LeafOrder:
        order = self._orders.get(tenant)
        if order is None:
            order = LeafOrder(self._index, self._tier, by_last_use(self._index))
            self._orders[tenant] = order
        return order
