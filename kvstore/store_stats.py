"""What a store says of itself: sizes of tiers, what left them and why."""

from collections.abc import Iterable
from typing import NamedTuple

from kvstore.eviction import EvictionPolicy
from kvstore.eviction.redundant import RedundantFirst
from kvstore.inventory import Inventory
from kvstore.placements import ARRIVING, LEAVING, READY, WRITING
from kvstore.presence import HBM, PoolSize


class TierStats(NamedTuple):
    """Bytes of a tier, by slot; ready + writing + leaving + limbo + quarantined + free = capacity (I3). What arrives from a
    slower tier counts as being written."""

    name: str
    capacity_bytes: int
    ready_bytes: int
    writing_bytes: int
    leaving_bytes: int
    limbo_bytes: int
    free_bytes: int
    ready_blocks: int
    quarantined_bytes: int = 0
    writing_blocks: int = 0
    leaving_blocks: int = 0


class Removals(NamedTuple):
    """Blocks that left a tier since start. Named as in kvstore.proto."""

    tier: str
    policy: str  # that chose them; "" where none did
    reason: str
    num_blocks: int
    nbytes: int


class StoreStats(NamedTuple):
    """A snapshot. `counters` are those of kvstore/counters.py."""

    tiers: tuple[TierStats, ...]
    num_blocks: int
    num_namespaces: int
    num_leases: int
    num_expired_leases: int
    counters: dict[str, int]


def tier_stats(tier: Inventory, quarantined_bytes: int) -> TierStats:
    """Of a tier whose slots are ours."""
    table, slots = tier.table, tier.slots
    return TierStats(
        table.tier,
        slots.capacity_bytes,
        table.num_bytes(READY),
        table.num_bytes(WRITING) + table.num_bytes(ARRIVING),
        table.num_bytes(LEAVING),
        slots.limbo_bytes - quarantined_bytes,
        slots.capacity_bytes - slots.reserved_bytes - slots.limbo_bytes,
        table.num_blocks(READY),
        quarantined_bytes,
        table.num_blocks(WRITING) + table.num_blocks(ARRIVING),
        table.num_blocks(LEAVING),
    )


def pool_stats(sizes: Iterable[PoolSize]) -> TierStats:
    """Of all engines' own pools together: a block counts for each that has it."""
    num_blocks = ready_bytes = capacity_bytes = 0
    for size in sizes:
        num_blocks += size.num_held
        ready_bytes += size.num_held * size.block_nbytes
        capacity_bytes += size.num_blocks * size.block_nbytes
    return TierStats(HBM, capacity_bytes, ready_bytes, 0, 0, 0, capacity_bytes - ready_bytes, num_blocks)


def policy_name(policy: EvictionPolicy) -> str:
    """LeafLru: leaf_lru."""
    policy = policy.policy if isinstance(policy, RedundantFirst) else policy
    name = type(policy).__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
