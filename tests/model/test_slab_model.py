"""The slab under random engines: whatever they read, fill, leave half filled, or scribble over long after their leases expired, a
block that can be read there is whole, and what a reader was granted stays as it is until its lease has ended."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.core.blocks import Holder
from kvstore.core.errors import LeaseExpired
from kvstore.core.keys import KVSpec
from kvstore.core.plans import SlabUse
from kvstore.placements import READY
from kvstore.store import Store
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

PAGE = 4096
ARENA_PAGES, SLAB_PAGES = 20, 8  # both nearly always full
JUNK = "junk"
PATHS = [a + b + c + d for a in "ab" for b in "ab" for c in "ab" for d in ("", "a", "b")]


@dataclass
class HeldLease:
    holder: Holder
    read: dict[int, str]  # page of the slab -> block that must lie there
    fill: dict[int, str]  # page of the slab -> block to copy there, in the order of the grant
    generations: dict[int, int]
    expires_s: float
    expired: bool = False


class Engines:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.table = np.zeros(SLAB_PAGES, np.uint64)
        arena = SegmentedSlots(
            ARENA_PAGES * PAGE,
            generations=SharedGenerations(np.zeros(ARENA_PAGES, np.uint64), PAGE),
            segment_bytes=ARENA_PAGES * PAGE,
            align=PAGE,
        )
        slab = SegmentedSlots(
            SLAB_PAGES * PAGE,
            generations=SharedGenerations(self.table, PAGE),
            segment_bytes=SLAB_PAGES * PAGE,
            align=PAGE,
        )
        for slots in (arena, slab):
            slots.add_segments(1)
        self.store = Store(pinned=arena, slab=slab, limbo_fraction=100.0)
        spec = KVSpec(weights="w", num_layers=1, num_kv_heads=2, head_dim=64, dtype="int8")
        self.namespace = self.store.open_namespace(spec, "").namespace
        self.memory: dict[int, str] = {}  # of the slab, by page
        self.leases: dict[int, HeldLease] = {}
        self.now_s = 0.0
        self.seen = dict.fromkeys(("read", "filled", "expired filling", "scribbled late", "evicted"), 0)

    # --- what engines do ----------------------------------------------------------------------------------------------

    def put(self) -> None:
        blocks = prefixes(self.draw.choice(PATHS))
        grant = self.store.reserve(self.holder(), "", self.namespace, b"", keys(blocks), 60.0, self.now_s)
        if grant.lease_id:
            holder = self.store._leases.find_any(grant.lease_id).holder  # type: ignore[union-attr]
            self.store.commit(holder, grant.lease_id, None, self.now_s)

    def read(self) -> None:
        blocks, holder, ttl_s = prefixes(self.draw.choice(PATHS)), self.holder(), self.draw.choice([2.0, 30.0])
        grant = self.store.acquire(holder, "", self.namespace, keys(blocks), 0, ttl_s, self.now_s, slab=True)
        if not grant.lease_id:
            return
        assert grant.slab is not None
        used = [(block, use) for block, use in zip(blocks, grant.slab.uses, strict=False) if use]
        lease = HeldLease(holder, {}, {}, {}, grant.expires_s)
        for (block, use), offset, generation in zip(used, *map(np.ndarray.tolist, grant.slab.slots), strict=True):
            page = offset // PAGE
            lease.generations[page] = generation
            if use == SlabUse.READ:
                lease.read[page] = block
            else:
                lease.fill[page] = block
                self.memory[page] = JUNK  # half a copy
        self.leases[grant.lease_id] = lease
        self.seen["read"] += len(lease.read)

    def release(self) -> None:
        lease_id, lease = self.some_lease()
        if lease is None:
            return
        done = [page for page in lease.fill if self.draw.random() < 0.8]
        for page in done:
            self.memory[page] = lease.fill[page]
        which = bytes(page in done for page in lease.fill)
        if lease.expired:
            with pytest.raises(LeaseExpired):
                self.store.release(lease.holder, lease_id, self.now_s, filled=which)
        else:
            self.store.release(lease.holder, lease_id, self.now_s, filled=which)
            self.seen["filled"] += len(done)
        del self.leases[lease_id]

    def cancel(self) -> None:
        lease_id, lease = self.some_lease()
        if lease is not None and not lease.expired:
            self.store.release(lease.holder, lease_id, self.now_s)
            del self.leases[lease_id]

    def scribble(self) -> None:
        """Into what it was granted to fill and has not said that it is done with, in time or not."""
        writers = [lease for lease in self.leases.values() if lease.fill]
        late = [lease for lease in writers if lease.expired]
        for lease in self.draw.sample(late or writers, k=min(1, len(writers))):
            for page in lease.fill:
                self.memory[page] = JUNK
            self.seen["scribbled late"] += lease.expired

    def wait(self) -> None:
        self.now_s += self.draw.choice([0.5, 2.0])
        self.store.expire(self.now_s)
        for lease in self.leases.values():
            if not lease.expired and lease.expires_s <= self.now_s:
                lease.expired = True
                self.seen["expired filling"] += len(lease.fill)

    def die(self) -> None:
        """Its connection ends; sometimes its processes do."""
        holder = self.holder()
        self.store.end_session(holder, self.now_s)
        for lease in self.leases.values():
            lease.expired |= lease.holder == holder
        if self.draw.random() < 0.5:
            self.store.end_instance(holder.instance, self.now_s)
            self.leases = {i: each for i, each in self.leases.items() if each.holder.instance != holder.instance}

    def drop(self) -> None:
        self.store.drop(self.namespace, keys([self.draw.choice(PATHS)]))

    # --- laws ---------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.store.check()
        slab = self.store._slab
        assert slab is not None
        table, index = slab.blocks.table, self.store._index
        for row in np.flatnonzero(table.state == READY).tolist():
            page = table.offset_at[row] // PAGE
            assert self.memory[page] == name(index.keys[row]), "READY in the slab and not what was saved"
            assert self.table[page] == table.generation_at[row]
        for lease in self.leases.values():
            for page, block in lease.read.items():
                assert self.memory[page] == block, "I4: a reader's block changed under it"
                assert self.table[page] == lease.generations[page], "I7"
            for page in lease.fill:
                assert self.table[page] == lease.generations[page], "a slot that somebody may still write was reused"
        self.seen["evicted"] = self.store.stats().counters["slab_evicted_blocks_total"]

    def holder(self) -> Holder:
        return Holder(self.draw.choice([b"anna" * 4, b"bert" * 4, b"cleo" * 4]), self.draw.randint(1, 2))

    def some_lease(self) -> tuple[int, HeldLease | None]:
        return self.draw.choice(sorted(self.leases.items(), key=lambda item: item[0])) if self.leases else (0, None)


def prefixes(path: str) -> list[str]:
    return [path[:length] for length in range(1, len(path) + 1)]


def keys(blocks: list[str]) -> list[bytes]:
    return [block.encode().ljust(16, b".") for block in blocks]


def name(key: bytes) -> str:
    return key.rstrip(b".").decode()


WEIGHTS = {"put": 20, "read": 30, "release": 30, "cancel": 2, "scribble": 8, "wait": 6, "die": 1, "drop": 4}


@pytest.mark.parametrize("seed", range(5))
def test_whatever_engines_do_what_lies_in_the_slab_is_whole(seed: int) -> None:
    engines = Engines(seed)
    for _ in range(500):
        getattr(engines, engines.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])()
        engines.check()

    assert min(engines.seen.values()) > 0, f"the walk stayed in the shallows: {engines.seen}"
