"""What the store should do, in plain dicts and sets, by O(n) search; and the memory that leases are about.

A key is named by its path ("abba" is the child of "abb"), so the tree needs no bookkeeping here. Bytes are one token a
page: (namespace, name) is the right content, anything else is not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.core.blocks import Extent, Holder

PAGE = 4096
JUNK = ("", "half written")
Block = tuple[str, str]  # namespace label, name


@dataclass
class ModelLease:
    holder: Holder
    kind: str
    request_id: str
    arguments: tuple[object, ...]
    expires_s: float
    extents: dict[Block, Extent]  # still held: being read, or not committed
    expired: bool = False


@dataclass
class ModelBlock:
    state: str  # "writing", "ready", "leaving"
    extent: Extent
    last_use: int = 0


@dataclass
class StoreModel:
    pages: dict[str, int]  # namespace label -> pages of a block
    memory: dict[int, Block] = field(default_factory=dict)  # page -> token
    blocks: dict[Block, ModelBlock] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    sequence: int = 0
    pools: set[tuple[bytes, str, str]] = field(
        default_factory=set
    )  # instance, label, name: what engines have themselves
    pool_sessions: dict[tuple[bytes, str], int] = field(default_factory=dict)  # by instance and label: who told it last

    # --- memory -------------------------------------------------------------------------------------------------------

    def write(self, block: Block, extent: Extent, token: Block) -> None:
        for page in self.pages_of(block, extent):
            self.memory[page] = token

    def holds(self, block: Block, extent: Extent) -> bool:
        return all(self.memory.get(page) == block for page in self.pages_of(block, extent))

    def pages_of(self, block: Block, extent: Extent) -> range:
        return range(extent.offset // PAGE, extent.offset // PAGE + self.pages[block[0]])

    # --- questions ----------------------------------------------------------------------------------------------------

    def ready_prefix(self, blocks: list[Block]) -> int:
        for i, block in enumerate(blocks):
            if block not in self.blocks or self.blocks[block].state != "ready":
                return i
        return len(blocks)

    def is_held(self, block: Block) -> bool:
        return block in self.blocks and self.blocks[block].state in {"ready", "writing"}

    def in_use(self, block: Block) -> bool:
        return any(lease.kind == "read" and block in lease.extents for lease in self.leases.values())

    def has_descendant(self, block: Block) -> bool:
        return any(
            other[0] == block[0] and other[1] != block[1] and other[1].startswith(block[1]) for other in self.blocks
        )

    def coldest_leaf(self, spared: set[Block]) -> Block | None:
        evictable = [
            block
            for block, entry in self.blocks.items()
            if entry.state == "ready"
            and block not in spared
            and not self.in_use(block)
            and not self.has_descendant(block)
        ]
        return min(evictable, key=lambda block: self.blocks[block].last_use, default=None)

    def nbytes(self, state: str) -> int:
        return sum(self.pages[block[0]] * PAGE for block, entry in self.blocks.items() if entry.state == state)

    def limbo_bytes(self, instance: bytes) -> int:
        """What counts against an instance: everything its expired leases hold."""
        return sum(
            self.pages[block[0]] * PAGE
            for lease in self.leases.values()
            if lease.expired and lease.holder.instance == instance
            for block in lease.extents
        )

    def slots_in_limbo_bytes(self) -> int:
        return sum(
            self.pages[block[0]] * PAGE
            for lease in self.leases.values()
            if lease.expired and lease.kind == "write"
            for block in lease.extents
        )

    # --- changes ------------------------------------------------------------------------------------------------------

    def touch(self, blocks: Iterable[Block]) -> None:
        """Tail to head."""
        for block in reversed(list(blocks)):
            self.sequence += 1
            if block in self.blocks:
                self.blocks[block].last_use = self.sequence

    def drop(self, roots: list[Block]) -> int:
        """Each root and all below it."""
        dropped = [
            block
            for block, entry in self.blocks.items()
            if entry.state in {"ready", "writing"}
            and any(block[0] == root[0] and block[1].startswith(root[1]) for root in roots)
        ]
        for block in dropped:
            if self.blocks[block].state == "ready" and not self.in_use(block):
                del self.blocks[block]
            else:
                self.blocks[block].state = "leaving"
        return len(dropped)

    def report_pool(self, holder: Holder, label: str, there: list[str], gone: list[str], *, cleared: bool) -> None:
        instance = holder.instance
        before = self.pool_sessions.get((instance, label), holder.session_id)
        cleared = cleared or before != holder.session_id  # what another connection told is void
        self.pool_sessions[instance, label] = holder.session_id
        self.pools = {
            (other, known, name)
            for other, known, name in self.pools
            if (other, known) != (instance, label) or not (cleared or name in gone)
        }
        self.pools |= {(instance, label, name) for name in there}

    def forget_pools(self, holder: Holder) -> None:
        self.pools = {
            (instance, label, name)
            for instance, label, name in self.pools
            if Holder(instance, self.pool_sessions[instance, label]) != holder
        }

    def expire(self, lease: ModelLease) -> None:
        lease.expired = True
        if lease.kind == "write":
            for block in lease.extents:
                del self.blocks[block]

    def expire_due(self, now_s: float) -> int:
        due = [lease for lease in self.leases.values() if not lease.expired and lease.expires_s <= now_s]
        for lease in due:
            self.expire(lease)
        return len(due)

    def end(self, lease_id: int) -> None:
        lease = self.leases.pop(lease_id)
        for block in lease.extents:
            if (lease.kind == "write" and not lease.expired) or (
                lease.kind == "read" and self.blocks[block].state == "leaving" and not self.in_use(block)
            ):
                del self.blocks[block]
