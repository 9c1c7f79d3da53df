"""One tier of the service under replay: its index, inventory and policy, without leases, engines or bytes."""

import math
from collections.abc import Sequence

import numpy as np

from kvstore.core.keys import HashScheme, KVSpec
from kvstore.core.ports import SlotSpace
from kvstore.eviction import MakePolicy
from kvstore.index import NO_PARENT, BlockIndex, Namespace, Rows
from kvstore.inventory import Inventory
from kvstore.placements import NONE
from kvstore.replay.run import Found
from kvstore.replay.trace import BLOCK_TOKENS, ReplayRequest, ReplayStore, ReplayUse, Space
from kvstore.replay.unit_slots import UnitSlots

_ANY = "opaque:replay:any"  # pages of any size


class ReplayCache:
    """Holds what `slots` have room for. A request first finds its leading blocks that are there, then all of it is used: what is
    absent is stored, as far as blocks of others can go for it. `by_time`: uses close to each other are one, as in a sidecar
    (BlockIndex.use); without it each request's are."""

    def __init__(self, slots: SlotSpace | int, make_policy: MakePolicy, *, by_time: bool = False) -> None:
        """`slots`: a number stands for so many blocks of any size."""
        self.index = BlockIndex()
        room = UnitSlots(slots) if isinstance(slots, int) else slots
        self.blocks = Inventory("pinned", self.index, room, make_policy, None)
        self.policy = self.blocks.policy
        self._by_time = by_time
        self._namespaces: dict[Space, Namespace] = {}
        self.num_evicted = 0
        self.num_written = 0

    def replay(self, request: ReplayRequest) -> Found:
        """See run.Replayed."""
        entry = self._namespace(request.space)
        return Found(self._request(entry, request.blocks, request.num_stored, request.at_s))

    def follow(self, step: ReplayStore | ReplayUse) -> None:
        """See run.Replayed. Behind a block that is not there nothing is stored."""
        entry, table = self._namespace(step.space), self.blocks.table
        if isinstance(step, ReplayUse):
            rows, num_present = self._look(entry, [block_key(block) for block in step.blocks])
            self._use(rows[:num_present], step.at_s)
            return
        parent = NO_PARENT
        if step.behind >= 0:
            parent = entry.rows.get(block_key(step.behind), NO_PARENT)
            if parent == NO_PARENT or table.state_at[parent] == NONE:
                return
        keys = [block_key(block) for block in step.blocks]
        rows, num_present = self._look(entry, keys)
        rows = self._store(entry, keys, num_present, rows, parent)
        self._use(rows if parent == NO_PARENT else np.append(parent, rows), step.at_s)

    def request(self, blocks: Sequence[int], tenant: str = "") -> int:
        """How many leading blocks were there; all others are stored."""
        return self._request(self._namespace(Space(0, tenant, BLOCK_TOKENS)), blocks, len(blocks), 0.0)

    def check(self) -> None:
        """Everything agrees, and no block is there without all before it."""
        self.index.check()
        self.blocks.check()
        placed = np.flatnonzero(self.blocks.table.state)
        parents = self.index.parent[placed]
        assert (self.blocks.table.state[parents[parents != NO_PARENT]] != NONE).all()

    def _request(self, entry: Namespace, blocks: Sequence[int], num_stored: int, at_s: float) -> int:
        keys = [block_key(block) for block in blocks]
        rows, num_hits = self._look(entry, keys)
        self._use(self._store(entry, keys[: max(num_stored, num_hits)], num_hits, rows, NO_PARENT), at_s)
        return num_hits

    def _look(self, entry: Namespace, keys: list[bytes]) -> tuple[Rows, int]:
        """Rows of all keys, and how many of the leading ones are there."""
        rows = self.index.find_all(entry, keys)
        absent = np.flatnonzero((rows == NO_PARENT) | (self.blocks.table.state[rows] == NONE))
        return rows, int(absent[0]) if len(absent) else len(rows)

    def _use(self, rows: Rows, at_s: float) -> None:
        self.policy.used(self.index.use(rows, at_s if self._by_time else math.inf))

    def _store(self, entry: Namespace, keys: list[bytes], num_hits: int, rows: Rows, parent: int) -> Rows:
        """Blocks behind a miss are absent too: no tail without its head. Rows of all that has a place then."""
        index, inventory = self.index, self.blocks
        if num_hits == len(keys):
            return rows[:num_hits]
        own = rows[:num_hits] if parent == NO_PARENT else np.append(parent, rows[:num_hits])
        evicted = inventory.make_room(entry, len(keys) - num_hits, own)
        self.num_evicted += evicted.num_blocks
        end = min(len(keys), num_hits + inventory.slots.num_free(entry.slot_nbytes))
        fresh = index.new_rows(end - num_hits)
        inventory.table.grow()
        rows = np.concatenate((rows[:num_hits], fresh))
        index.add(entry, keys[num_hits:end], np.append(parent, rows[:-1])[num_hits:], fresh)
        inventory.place(entry, fresh)
        inventory.publish(fresh)
        return rows

    def _namespace(self, space: Space) -> Namespace:
        entry = self._namespaces.get(space)
        if entry is None:
            spec = replay_spec(space)
            slot_nbytes = self.blocks.slots.slot_nbytes(spec.block_nbytes)
            entry = self.index.open_namespace(spec.namespace(space.tenant), spec, space.tenant, slot_nbytes)
            self.blocks.table.grow()
            self._namespaces[space] = entry
        return entry


def block_key(block: int) -> bytes:
    """A block's number, spread like a hash."""
    return (block * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "little")


def replay_spec(space: Space) -> KVSpec:
    """What the blocks of a space are, whatever model it was of."""
    return KVSpec(
        weights=f"trace {space.number}",
        block_tokens=space.block_tokens,
        hash=HashScheme(block_tokens=space.block_tokens),
        num_layers=1,
        num_kv_heads=1,
        head_dim=64,
        dtype="int8",
        page_format=_ANY,
        stored_format=_ANY,
        opaque_block_nbytes=space.block_nbytes or 1,
    )
