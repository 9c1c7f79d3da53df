"""Which engines hold which blocks in their own pools (HBM), as they report it.

Pools are the engines': nothing here is placed, leased or evicted. What is known serves routers (KV events, Locate) and one
decision of ours: a copy in RAM of what every engine has itself is given up first (eviction/redundant.py).

    instance   namespace | key -> key before it
    anna...    9a41...   | a -> "", b -> a, c -> b        told by one of its connections, forgotten when that ends
    bert...    9a41...   | a -> "", b -> a

A tier like any other to whoever hears events: a block is stored in `hbm` when the first pool of the node has it, and removed
when the last one has it no more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.blocks import Holder
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.limits import MAX_POOL_BLOCKS, MAX_POOL_BLOCKS_PER_INSTANCE
from kvstore.core.plans import TIERS

HBM = TIERS[3]


class HeldRun(NamedTuple):
    """Blocks that follow each other."""

    parent: bytes  # key of the block before keys[0]; b"": that is the first of its sequence
    keys: Sequence[bytes]


class PoolReport(NamedTuple):
    """What changed in one engine's pool, in this order: all is gone, these are gone, these are there."""

    cleared: bool
    removed: Sequence[bytes]
    stored: Sequence[HeldRun]
    num_blocks: int  # that the pool can hold; 0: not told


class PoolHolding(NamedTuple):
    """How much of a prefix an engine has itself."""

    instance: bytes
    num_blocks: int  # from the first key


class PoolSize(NamedTuple):
    """One engine's blocks of one namespace."""

    namespace: bytes
    num_held: int
    num_blocks: int  # that fit, at least num_held
    block_nbytes: int


@dataclass(slots=True, eq=False)
class _Pool:
    """Blocks of one namespace in one instance's pool."""

    session_id: int  # of the connection that told it last
    block_nbytes: int
    num_blocks: int = 0
    parents: dict[bytes, bytes] = field(default_factory=dict)  # by key


class Presence:
    """Every engine's pools. Loop thread only. `on_event` hears of what came to the node's pools and went; what is beyond
    MAX_POOL_BLOCKS is not noted, and counted in `counters`. Some 120 B a block."""

    def __init__(
        self,
        on_event: Callable[[Event], None] | None,
        counters: dict[str, int],
        *,
        max_blocks: int = MAX_POOL_BLOCKS,
        max_blocks_per_instance: int = MAX_POOL_BLOCKS_PER_INSTANCE,
    ) -> None:
        self._on_event = on_event or (lambda _: None)
        self._counters = counters
        self._max_blocks = max_blocks
        self._max_of_instance = max_blocks_per_instance
        self._readers: dict[bytes, dict[bytes, set[int]]] = {}  # by namespace, by instance: sessions that opened it
        self._pools: dict[bytes, dict[bytes, _Pool]] = {}  # by namespace, by instance; none is empty but for a moment
        self._num_blocks = 0

    @property
    def is_empty(self) -> bool:
        """Whether no engine has told of a block."""
        return not self._num_blocks

    def join(self, holder: Holder, namespaces: Sequence[bytes]) -> None:
        """A connection of an engine opened these: it may read them."""
        for namespace in namespaces:
            self._readers.setdefault(namespace, {}).setdefault(holder.instance, set()).add(holder.session_id)

    def end_session(self, holder: Holder) -> None:
        """The connection ended: what was told over it is not known any more."""
        for namespace, readers in list(self._readers.items()):
            readers.get(holder.instance, set()).discard(holder.session_id)
            if not readers.get(holder.instance, True):
                del readers[holder.instance]
            if not readers:
                del self._readers[namespace]
        for namespace in list(self._pools):
            pool = self._pools[namespace].get(holder.instance)
            if pool is not None and pool.session_id == holder.session_id:
                self._remove(namespace, holder.instance, list(pool.parents), RemovalReason.DROPPED)

    def report(self, holder: Holder, namespace: bytes, report: PoolReport, block_nbytes: int) -> None:
        """Take what one connection of an engine tells of its pool; what another one told before is void, whether or not its end
        was heard. A few milliseconds for MAX_REPORTED_BLOCKS."""
        pool = self._pools.setdefault(namespace, {}).setdefault(holder.instance, _Pool(holder.session_id, block_nbytes))
        anew = report.cleared or pool.session_id != holder.session_id
        gone = list(pool.parents) if anew else [key for key in report.removed if key in pool.parents]
        pool.session_id, pool.num_blocks = holder.session_id, report.num_blocks or pool.num_blocks
        self._remove(namespace, holder.instance, list(dict.fromkeys(gone)), RemovalReason.EVICTED)
        added = self._add(holder.instance, pool, report.stored)
        if pool.parents:
            self._pools.setdefault(namespace, {})[holder.instance] = pool  # it may have been empty in between
        others = self._others(namespace, holder.instance)
        fresh = [key for key in added if not any(key in other for other in others)]
        self._tell_stored(namespace, pool, fresh)

    def is_everywhere(self, namespace: bytes, key: bytes) -> bool:
        """Whether every engine that may read the namespace has the block: none of them is going to ask for it soon."""
        pools, readers = self._pools.get(namespace, {}), self._readers.get(namespace)
        if not readers:
            return False
        return all(instance in pools and key in pools[instance].parents for instance in readers)

    def instances_with(self, namespace: bytes, key: bytes) -> list[bytes]:
        """Engines that have the block."""
        return [instance for instance, pool in self._pools.get(namespace, {}).items() if key in pool.parents]

    def holdings(self, namespace: bytes, keys: Sequence[bytes]) -> list[PoolHolding]:
        """How much of the prefix each engine has, the farthest first; those that have something."""
        found = [
            PoolHolding(instance, next((i for i, key in enumerate(keys) if key not in pool.parents), len(keys)))
            for instance, pool in self._pools.get(namespace, {}).items()
        ]
        return sorted((each for each in found if each.num_blocks), key=lambda each: (-each.num_blocks, each.instance))

    def sizes(self) -> list[PoolSize]:
        """Of every pool."""
        return [
            PoolSize(namespace, len(pool.parents), max(pool.num_blocks, len(pool.parents)), pool.block_nbytes)
            for namespace, pools in self._pools.items()
            for pool in pools.values()
        ]

    def snapshot(self) -> list[tuple[bytes, list[bytes]]]:
        """Keys that some pool has, by namespace; for `held_events`, a part at a time."""
        return [
            (namespace, list(dict.fromkeys(key for pool in pools.values() for key in pool.parents)))
            for namespace, pools in self._pools.items()
        ]

    def held_events(self, namespace: bytes, keys: Sequence[bytes]) -> list[BlockStored]:
        """What is still held of `keys`, as if it had just come."""
        pools = list(self._pools.get(namespace, {}).values())
        parents = {
            key: pool.parents[key] for key in keys if (pool := next((p for p in pools if key in p.parents), None))
        }
        return [
            BlockStored(namespace, HBM, run.parent, tuple(run.keys), len(run.keys) * pools[0].block_nbytes)
            for run in _runs(parents, list(parents))
        ]

    def check(self) -> None:
        """Bounds and counts. Who tells of a namespace has opened it, unless nobody said who did."""
        pools = [(instance, pool) for pools in self._pools.values() for instance, pool in pools.items()]
        assert all(pool.parents for _, pool in pools)
        assert all(self._pools.values())
        assert self._num_blocks == sum(len(pool.parents) for _, pool in pools) <= self._max_blocks
        for instance, _ in pools:
            assert self._num_of(instance) <= self._max_of_instance
        assert all(sessions for readers in self._readers.values() for sessions in readers.values())

    def _num_of(self, instance: bytes) -> int:
        return sum(len(pools[instance].parents) for pools in self._pools.values() if instance in pools)

    def _others(self, namespace: bytes, instance: bytes) -> list[dict[bytes, bytes]]:
        return [pool.parents for other, pool in self._pools.get(namespace, {}).items() if other != instance]

    def _add(self, instance: bytes, pool: _Pool, runs: Sequence[HeldRun]) -> list[bytes]:
        """Those of the runs that are new to the pool and noted."""
        room = min(self._max_blocks - self._num_blocks, self._max_of_instance - self._num_of(instance))
        added: list[bytes] = []
        num_new = 0
        for parent, keys in runs:
            before = parent
            for key in keys:
                if key not in pool.parents:
                    num_new += 1
                    if num_new <= room:
                        pool.parents[key] = before
                        added.append(key)
                before = key
        self._num_blocks += len(added)
        self._counters["hbm_stored_blocks_total"] += len(added)
        self._counters["hbm_unnoted_blocks_total"] += num_new - len(added)
        return added

    def _remove(self, namespace: bytes, instance: bytes, keys: Sequence[bytes], reason: RemovalReason) -> None:
        """Take these, which the pool has, out of it; a pool without any is forgotten."""
        pools = self._pools[namespace]
        pool = pools[instance]
        for key in keys:
            del pool.parents[key]
        self._num_blocks -= len(keys)
        self._counters["hbm_removed_blocks_total"] += len(keys)
        if not pool.parents:
            del pools[instance]
        if not pools:
            del self._pools[namespace]
        others = self._others(namespace, instance)
        last = tuple([key for key in keys if not any(key in other for other in others)])
        if last:
            self._on_event(BlockRemoved(namespace, HBM, last, len(last) * pool.block_nbytes, reason))

    def _tell_stored(self, namespace: bytes, pool: _Pool, keys: Sequence[bytes]) -> None:
        for run in _runs(pool.parents, keys):
            self._on_event(BlockStored(namespace, HBM, run.parent, tuple(run.keys), len(run.keys) * pool.block_nbytes))


def _runs(parents: dict[bytes, bytes], keys: Sequence[bytes]) -> Iterator[HeldRun]:
    """`keys`, each with the one before it among `parents`, as runs of blocks that follow each other."""
    run: list[bytes] = []
    for key in keys:
        if run and parents[key] != run[-1]:
            yield HeldRun(parents[run[0]], run)
            run = []
        run.append(key)
    if run:
        yield HeldRun(parents[run[0]], run)
