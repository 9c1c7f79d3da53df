"""One tier of the service under replay: its index, inventory and policy, without leases, engines or bytes."""

from collections.abc import Sequence

import numpy as np

from kvstore.core.keys import HashScheme, KVSpec
from kvstore.eviction import MakePolicy
from kvstore.index import NO_PARENT, BlockIndex, Namespace, Rows
from kvstore.inventory import Inventory
from kvstore.placements import NONE
from kvstore.replay.run import Found
from kvstore.replay.trace import BLOCK_TOKENS, ReplayRequest
from kvstore.replay.unit_slots import UnitSlots


class ReplayCache:
    """Holds `num_blocks` blocks. A request first finds its leading blocks that are there, then all of it is used: what is absent
    is stored, as far as blocks of others can go for it."""

    def __init__(self, num_blocks: int, make_policy: MakePolicy, *, block_tokens: int = BLOCK_TOKENS) -> None:
        self._block_tokens = block_tokens
        self.index = BlockIndex()
        self.blocks = Inventory("pinned", self.index, UnitSlots(num_blocks), make_policy, None)
        self.policy = self.blocks.policy
        self._namespaces: dict[str, Namespace] = {}
        self.num_evicted = 0
        self.num_written = 0

    def replay(self, request: ReplayRequest) -> Found:
        """See run.Replayed."""
        return Found(self.request(request.blocks, request.tenant))

    def request(self, blocks: Sequence[int], tenant: str = "") -> int:
        """How many leading blocks were there."""
        entry = self._namespaces.get(tenant) or self._open(tenant)
        index, table = self.index, self.blocks.table
        keys = [block_key(block) for block in blocks]
        rows = index.find_all(entry, keys)
        absent = np.flatnonzero((rows == NO_PARENT) | (table.state[rows] == NONE))
        num_hits = int(absent[0]) if len(absent) else len(rows)
        if len(absent):
            rows = self._store(entry, keys, num_hits, rows)
        self.policy.used(index.use(rows))
        return num_hits

    def check(self) -> None:
        """Everything agrees, and no block is there without all before it."""
        self.index.check()
        self.blocks.check()
        placed = np.flatnonzero(self.blocks.table.state)
        parents = self.index.parent[placed]
        assert (self.blocks.table.state[parents[parents != NO_PARENT]] != NONE).all()

    def _store(self, entry: Namespace, keys: list[bytes], num_hits: int, rows: Rows) -> Rows:
        """Blocks behind a miss are absent too: no tail without its head. Rows of all that has a place then."""
        index, inventory = self.index, self.blocks
        evicted = inventory.make_room(entry, len(keys) - num_hits, rows[:num_hits])
        self.num_evicted += evicted.num_blocks
        end = min(len(keys), num_hits + inventory.slots.num_free(1))
        fresh = index.new_rows(end - num_hits)
        inventory.table.grow()
        rows = np.concatenate((rows[:num_hits], fresh))
        index.add(entry, keys[num_hits:end], np.append(NO_PARENT, rows[:-1])[num_hits:], fresh)
        inventory.place(entry, fresh)
        inventory.publish(fresh)
        return rows

    def _open(self, tenant: str) -> Namespace:
        spec = replay_spec(self._block_tokens)
        entry = self.index.open_namespace(spec.namespace(tenant), spec, tenant, 1)
        self.blocks.table.grow()
        self._namespaces[tenant] = entry
        return entry


def block_key(block: int) -> bytes:
    """A block's number, spread like a hash."""
    return (block * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "little")


def replay_spec(block_tokens: int) -> KVSpec:
    """What the blocks of a trace are, whatever model it was of."""
    scheme = HashScheme(block_tokens=block_tokens)
    return KVSpec(
        weights="trace",
        block_tokens=block_tokens,
        hash=scheme,
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        dtype="int8",
    )
