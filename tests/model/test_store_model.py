"""The store in lockstep with a model: every answer is predicted, every invariant checked after every step.

Two models with blocks of 1 and 3 pages share an arena of 3 segments of 6 pages, so that it is nearly always full. Three
engines of two sessions each put, get, crash, come back late and scribble over what was theirs.

The same rules are driven twice: by hypothesis, which finds short failures and shrinks them, and by a weighted random walk,
which gets deep: an arena that has been full for hundreds of steps.
"""

import inspect
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_model import JUNK, PAGE, Block, ModelBlock, ModelLease, StoreModel

from kvstore.core.blocks import Extent, Holder, KeyStatus
from kvstore.core.errors import LeaseExpired, LeaseRefused, ProtocolError, UnknownLease
from kvstore.core.events import BlockRemoved, BlockStored, Event, RemovalReason
from kvstore.core.keys import KVSpec
from kvstore.core.plans import WriteGrant
from kvstore.presence import HeldRun, PoolReport
from kvstore.store import Store
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

NUM_SEGMENTS, PAGES_PER_SEGMENT = 3, 6
CAPACITY = NUM_SEGMENTS * PAGES_PER_SEGMENT * PAGE
LIMBO_FRACTION = 0.3
PAGES = {"small": 1, "large": 3}

paths = st.text("ab", min_size=1, max_size=7)
labels = st.sampled_from(sorted(PAGES))
holders = st.builds(Holder, st.sampled_from([b"anna" * 4, b"bert" * 4, b"cleo" * 4]), st.integers(1, 2))
picks = st.integers(0, 1000)
ttls = st.sampled_from([5.0, 15.0, 60.0])


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.generations = np.zeros(CAPACITY // PAGE, np.uint64)
        self.slots = SegmentedSlots(
            CAPACITY,
            generations=SharedGenerations(self.generations, PAGE),
            segment_bytes=PAGES_PER_SEGMENT * PAGE,
            align=PAGE,
        )
        self.slots.add_segments(NUM_SEGMENTS)
        self.events: list[Event] = []
        self.store = Store(pinned=self.slots, on_event=self.events.append, limbo_fraction=LIMBO_FRACTION)
        self.namespaces = {
            label: self.store.open_namespace(
                KVSpec(weights=label, num_layers=pages, num_kv_heads=2, head_dim=64, dtype="int8"), ""
            ).namespace
            for label, pages in PAGES.items()
        }
        self.labels = {namespace: label for label, namespace in self.namespaces.items()}
        self.model = StoreModel(PAGES)
        self.now_s = 0.0
        self.num_requests = 0

    # --- engines at work ----------------------------------------------------------------------------------------------

    @rule(holder=holders, label=labels, path=paths, skip=st.integers(0, 3), ttl_s=ttls)
    def reserve(self, holder: Holder, label: str, path: str, skip: int, ttl_s: float) -> None:
        skip = min(skip, len(path) - 1)
        blocks, parent = prefixes(label, path)[skip:], (label, path[:skip])
        self.events.clear()
        free_before = self.slots.num_free(PAGES[label] * PAGE)
        end, reason = self.expected_run(blocks, parent)
        wanted = [block for block in blocks[:end] if block not in self.model.blocks]
        arguments = (label, path, skip)
        if wanted and self.refused(holder):
            with pytest.raises(LeaseRefused):
                self.call_reserve(holder, "", arguments, ttl_s)
            return

        request_id = self.new_request_id()
        grant = self.call_reserve(holder, request_id, arguments, ttl_s)

        spared = {block for block in [*blocks[:end], parent] if block in self.model.blocks}
        num_evicted = self.follow_evictions(spared)
        assert not num_evicted or free_before < len(wanted), "evicted although there was room"
        if len(grant.extents) < len(wanted):
            assert self.model.coldest_leaf(spared) is None, "declined although eviction would have made room"
            assert self.slots.num_free(PAGES[label] * PAGE) == 0
            end, reason = blocks.index(wanted[len(grant.extents)]), "no_space"
            wanted = wanted[: len(grant.extents)]
        assert grant.statuses == tuple(
            KeyStatus.DECLINED if i >= end else KeyStatus.GRANTED if block in wanted else KeyStatus.HELD
            for i, block in enumerate(blocks)
        )
        assert grant.declined_reason == reason
        for block, extent in zip(wanted, grant.extents, strict=True):
            self.model.blocks[block] = ModelBlock("writing", extent)
            self.model.write(block, extent, JUNK)
        self.model.touch([parent, *blocks[:end]])
        self.remember(
            holder, "write", request_id, arguments, grant.lease_id, ttl_s, dict(zip(wanted, grant.extents, strict=True))
        )

    @rule(holder=holders, label=labels, path=paths)
    def put(self, holder: Holder, label: str, path: str) -> None:
        """A writer that does everything right."""
        before = set(self.model.leases)
        self.reserve(holder, label, path, 0, 60.0)
        for lease_id in set(self.model.leases) - before:
            self.commit(sorted(self.model.leases).index(lease_id), 0)

    @rule(holder=holders, label=labels, path=paths, first_needed=st.integers(0, 4), ttl_s=ttls)
    def acquire(self, holder: Holder, label: str, path: str, first_needed: int, ttl_s: float) -> None:
        blocks = prefixes(label, path)
        num_blocks = self.model.ready_prefix(blocks)
        arguments = (label, path, first_needed)
        if num_blocks > first_needed and self.refused(holder):
            with pytest.raises(LeaseRefused):
                self.call_acquire(holder, "", arguments, ttl_s)
            return

        request_id = self.new_request_id()
        grant = self.call_acquire(holder, request_id, arguments, ttl_s)

        assert grant.num_blocks == num_blocks
        leased = blocks[first_needed:num_blocks]
        assert list(grant.extents) == [self.model.blocks[block].extent for block in leased]
        assert bool(grant.lease_id) == bool(leased)
        self.model.touch(blocks[:num_blocks])
        self.remember(
            holder, "read", request_id, arguments, grant.lease_id, ttl_s, dict(zip(leased, grant.extents, strict=True))
        )

    @rule(label=labels, path=paths)
    def match(self, label: str, path: str) -> None:
        blocks = prefixes(label, path)
        found = self.store.match(self.namespaces[label], keys(blocks), self.now_s)
        assert found.num_blocks == len(found.tiers) == self.model.ready_prefix(blocks)
        self.model.touch(blocks[: found.num_blocks])

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, part=st.integers(0, 3))
    def commit(self, pick: int, part: int) -> None:
        """All of a lease, or every block but those of one remainder, so that holes and late parents come up too."""
        lease_id, lease = self.pick_lease(pick)
        if lease.expired:
            with pytest.raises(LeaseExpired):
                self.store.commit(lease.holder, lease_id, None, self.now_s)
            return
        if lease.kind == "read":
            with pytest.raises(ProtocolError):
                self.store.commit(lease.holder, lease_id, None, self.now_s)
            return
        chosen = [block for i, block in enumerate(lease.extents) if part == 0 or i % 4 != part]
        self.events.clear()
        for block in chosen:
            self.model.write(block, lease.extents[block], block)

        num_committed = self.store.commit(lease.holder, lease_id, keys(chosen) if part else None, self.now_s)

        stored = [block for block in chosen if self.model.blocks[block].state == "writing"]
        assert num_committed == len(stored)
        assert self.told(BlockStored) == set(stored)
        for block in chosen:
            del lease.extents[block]
            if block in stored:
                self.model.blocks[block].state = "ready"
            else:
                del self.model.blocks[block]
        if not lease.extents:
            del self.model.leases[lease_id]

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, verb=st.sampled_from(["abort", "release"]))
    def end_lease(self, pick: int, verb: str) -> None:
        lease_id, lease = self.pick_lease(pick)
        if lease.expired:
            with pytest.raises(LeaseExpired):
                getattr(self.store, verb)(lease.holder, lease_id, self.now_s)
        else:
            getattr(self.store, verb)(lease.holder, lease_id, self.now_s)
        self.model.end(lease_id)
        with pytest.raises(UnknownLease):
            getattr(self.store, verb)(lease.holder, lease_id, self.now_s)

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, ttl_s=ttls)
    def renew(self, pick: int, ttl_s: float) -> None:
        lease_id, lease = self.pick_lease(pick)
        ended = self.store.renew(lease.holder, [lease_id, 10**9], ttl_s, self.now_s)
        assert ended == ([lease_id] if lease.expired else []) + [10**9]
        if not lease.expired:
            lease.expires_s = max(lease.expires_s, self.now_s + ttl_s)

    @precondition(lambda self: any(not lease.expired for lease in self.model.leases.values()))
    @rule(pick=picks, ttl_s=ttls)
    def ask_again(self, pick: int, ttl_s: float) -> None:
        """The same request is answered by the same lease; another one under its id is refused."""
        live = [(i, lease) for i, lease in self.model.leases.items() if not lease.expired]
        lease_id, lease = live[pick % len(live)]
        call = self.call_reserve if lease.kind == "write" else self.call_acquire
        label, path, number = lease.arguments
        with pytest.raises(ProtocolError):
            call(lease.holder, lease.request_id, (label, str(path) + "a", number), ttl_s)

        grant = call(lease.holder, lease.request_id, lease.arguments, ttl_s)

        lease.expires_s = max(lease.expires_s, self.now_s + ttl_s)
        assert (grant.lease_id, grant.expires_s) == (lease_id, lease.expires_s)
        assert set(lease.extents.values()) <= set(grant.extents)

    # --- engines that go wrong ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks)
    def a_stranger_uses_the_lease(self, pick: int) -> None:
        lease_id, _ = self.pick_lease(pick)
        stranger = Holder(b"eve!" * 4, 1)
        for verb in (self.store.abort, self.store.release):
            with pytest.raises(UnknownLease):
                verb(stranger, lease_id, self.now_s)
        with pytest.raises(UnknownLease):
            self.store.commit(stranger, lease_id, None, self.now_s)
        assert self.store.renew(stranger, [lease_id], 5.0, self.now_s) == [lease_id]

    @precondition(lambda self: any(lease.kind == "write" for lease in self.model.leases.values()))
    @rule(pick=picks)
    def a_writer_scribbles(self, pick: int) -> None:
        """Anywhere in what it was granted and has not committed, in time or long after its lease expired."""
        writers = [lease for lease in self.model.leases.values() if lease.kind == "write"]
        for block, extent in writers[pick % len(writers)].extents.items():
            self.model.write(block, extent, JUNK)

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0]))
    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        times = [lease.expires_s for lease in self.model.leases.values() if not lease.expired]
        assert self.store.next_expiry_s() == min(times, default=None)
        assert self.store.expire(self.now_s) == self.model.expire_due(self.now_s)

    @rule(holder=holders)
    def connection_ends(self, holder: Holder) -> None:
        self.store.end_session(holder, self.now_s)
        self.model.forget_pools(holder)
        for lease in self.model.leases.values():
            if lease.holder == holder and not lease.expired:
                self.model.expire(lease)

    @rule(holder=holders)
    def processes_end(self, holder: Holder) -> None:
        self.store.end_instance(holder.instance, self.now_s)
        for lease_id in [i for i, lease in self.model.leases.items() if lease.holder.instance == holder.instance]:
            self.model.end(lease_id)
        assert not self.store.instance_in_limbo(holder.instance)

    @rule(holder=holders, label=labels, path=paths, cleared=st.booleans(), removed=paths)
    def report_pool(self, holder: Holder, label: str, path: str, cleared: bool, removed: str) -> None:
        """What an engine says of its own pool changes nothing in the store, and others hear what is new to all of them."""
        self.events.clear()
        before = {(label, name) for _, label, name in self.model.pools}
        there, gone = prefixes(label, path), prefixes(label, removed)

        run = HeldRun(b"", keys(there))
        self.store.report_pool(holder, self.namespaces[label], PoolReport(cleared, keys(gone), [run], 0))

        self.model.report_pool(holder, label, [name for _, name in there], [name for _, name in gone], cleared=cleared)
        after = {(label, name) for _, label, name in self.model.pools}
        heard = before
        for event in self.events:
            assert event.tier == "hbm"
            blocks = {(self.labels[event.namespace], key.rstrip(b".").decode()) for key in event.hashes}
            heard = heard - blocks if isinstance(event, BlockRemoved) else heard | blocks
        assert heard == after

    @rule(label=labels, path=paths)
    def drop(self, label: str, path: str) -> None:
        self.events.clear()
        found = {block for block, entry in self.model.blocks.items() if entry.state == "ready"}
        roots = [(label, path)]

        assert self.store.drop(self.namespaces[label], keys(roots)) == self.model.drop(roots)

        still = {block for block, entry in self.model.blocks.items() if entry.state == "ready"}
        assert self.told(BlockRemoved) == found - still

    @precondition(lambda self: len(self.model.blocks) > 12)
    @rule(label=labels)
    def drop_everything(self, label: str) -> None:
        assert self.store.drop(self.namespaces[label], None) == self.model.drop([(label, "")])

    # --- laws ---------------------------------------------------------------------------------------------------------

    @invariant()
    def the_store_is_sound(self) -> None:
        self.store.check()

    @invariant()
    def the_store_knows_what_the_model_knows(self) -> None:
        stats = self.store.stats()
        tier = stats.tiers[0]
        states = (tier.writing_bytes, tier.ready_bytes, tier.leaving_bytes)
        assert states == tuple(self.model.nbytes(state) for state in ("writing", "ready", "leaving"))
        assert tier.limbo_bytes == self.model.slots_in_limbo_bytes()
        assert sum(states) + tier.limbo_bytes + tier.free_bytes == tier.capacity_bytes == CAPACITY
        expired = sum(lease.expired for lease in self.model.leases.values())
        assert (stats.num_leases, stats.num_expired_leases) == (len(self.model.leases) - expired, expired)
        assert stats.counters["stored_blocks_total"] >= stats.num_blocks

    @invariant()
    def the_store_knows_what_engines_have_themselves(self) -> None:
        for label, namespace in self.namespaces.items():
            for name in {name for _, known, name in self.model.pools if known == label}:
                holders = {instance for instance, known, other in self.model.pools if (known, other) == (label, name)}
                assert set(self.store.presence.instances_with(namespace, keys([(label, name)])[0])) == holders
        num_held = sum(tier.ready_blocks for tier in self.store.stats().tiers if tier.name == "hbm")
        assert num_held == len(self.model.pools)

    @invariant()
    def what_is_ready_is_whole_whoever_scribbles(self) -> None:
        for block, entry in self.model.blocks.items():
            if entry.state == "ready":
                assert self.model.holds(block, entry.extent), f"{block} is READY and not what was stored"
                assert self.generations[entry.extent.offset // PAGE] == entry.extent.generation

    @invariant()
    def what_a_reader_holds_stays_whole_even_after_its_lease_expired(self) -> None:
        for lease in self.model.leases.values():
            if lease.kind == "read":
                for block, extent in lease.extents.items():
                    assert self.model.holds(block, extent)
                    assert self.generations[extent.offset // PAGE] == extent.generation

    @invariant()
    def no_page_is_in_two_hands(self) -> None:
        owners = [(block, entry.extent) for block, entry in self.model.blocks.items()]
        owners += [
            (block, extent)
            for lease in self.model.leases.values()
            if lease.expired and lease.kind == "write"
            for block, extent in lease.extents.items()
        ]
        pages = [page for block, extent in owners for page in self.model.pages_of(block, extent)]
        assert len(pages) == len(set(pages))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def expected_run(self, blocks: list[Block], parent: Block) -> tuple[int, str]:
        leaving = [i for i, block in enumerate(blocks) if block in self.model.blocks and not self.model.is_held(block)]
        if blocks[0] not in self.model.blocks and parent[1] and not self.model.is_held(parent):
            return 0, "orphan"
        return (leaving[0], "leaving") if leaving else (len(blocks), "")

    def follow_evictions(self, spared: set[Block]) -> int:
        """As many victims as the store took, chosen by the model: they must be the same blocks."""
        evicted = self.told(BlockRemoved)
        assert all(event.reason is RemovalReason.EVICTED for event in self.events if isinstance(event, BlockRemoved))
        chosen = set()
        for _ in evicted:
            victim = self.model.coldest_leaf(spared)
            assert victim is not None
            chosen.add(victim)
            del self.model.blocks[victim]
        assert evicted == chosen
        return len(evicted)

    def told(self, kind: type[BlockStored] | type[BlockRemoved]) -> set[Block]:
        blocks = [
            (self.labels[event.namespace], key.rstrip(b".").decode())
            for event in self.events
            if isinstance(event, kind)
            for key in event.hashes
        ]
        assert len(set(blocks)) == len(blocks)
        return set(blocks)

    def refused(self, holder: Holder) -> bool:
        return self.model.limbo_bytes(holder.instance) > int(LIMBO_FRACTION * CAPACITY)

    def call_reserve(self, holder: Holder, request_id: str, arguments: tuple, ttl_s: float) -> WriteGrant:
        label, path, skip = arguments
        parent = keys([(label, path[:skip])])[0] if skip else b""
        wanted = keys(prefixes(label, path)[skip:])
        return self.store.reserve(holder, request_id, self.namespaces[label], parent, wanted, ttl_s, self.now_s)

    def call_acquire(self, holder: Holder, request_id: str, arguments: tuple, ttl_s: float):
        label, path, first_needed = arguments
        wanted = keys(prefixes(label, path))
        return self.store.acquire(holder, request_id, self.namespaces[label], wanted, first_needed, ttl_s, self.now_s)

    def new_request_id(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def remember(
        self,
        holder: Holder,
        kind: str,
        request_id: str,
        arguments: tuple,
        lease_id: int,
        ttl_s: float,
        extents: dict[Block, Extent],
    ) -> None:
        assert bool(lease_id) == bool(extents)
        assert lease_id not in self.model.leases
        if lease_id:
            self.model.leases[lease_id] = ModelLease(holder, kind, request_id, arguments, self.now_s + ttl_s, extents)

    def pick_lease(self, pick: int) -> tuple[int, ModelLease]:
        return sorted(self.model.leases.items())[pick % len(self.model.leases)]


def prefixes(label: str, path: str) -> list[Block]:
    return [(label, path[:length]) for length in range(1, len(path) + 1)]


def keys(blocks: list[Block]) -> list[bytes]:
    return [name.encode().ljust(16, b".") for _, name in blocks]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,  # the same examples each run; hypothesis prints the steps of a failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

WEIGHTS = {
    "put": 30,
    "reserve": 8,
    "acquire": 12,
    "match": 8,
    "commit": 6,
    "end_lease": 10,
    "renew": 2,
    "ask_again": 2,
    "a_stranger_uses_the_lease": 1,
    "a_writer_scribbles": 4,
    "advance": 3,
    "connection_ends": 1,
    "processes_end": 1,
    "drop": 3,
    "report_pool": 3,
    "drop_everything": 0.2,
}
LAWS = (
    StoreMachine.the_store_knows_what_engines_have_themselves,
    StoreMachine.the_store_is_sound,
    StoreMachine.the_store_knows_what_the_model_knows,
    StoreMachine.what_is_ready_is_whole_whoever_scribbles,
    StoreMachine.what_a_reader_holds_stays_whole_even_after_its_lease_expired,
    StoreMachine.no_page_is_in_two_hands,
)
LEASE_RULES = {"commit", "end_lease", "renew", "a_stranger_uses_the_lease"}


@pytest.mark.parametrize("seed", range(12))
def test_a_long_random_walk_keeps_every_law(seed: int):
    draw = random.Random(seed)
    machine = StoreMachine()
    machine.start()
    for _ in range(500):
        name = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        take_step(machine, name, draw)
        for law in LAWS:
            law(machine)
    counters = machine.store.stats().counters
    assert min(counters["evicted_blocks_total"], counters["stored_blocks_total"]) > 100, (
        "the walk stayed in the shallows"
    )


def take_step(machine: StoreMachine, name: str, draw: random.Random) -> None:
    leases = machine.model.leases.values()
    if name in LEASE_RULES and not leases:
        return
    if name == "ask_again" and all(lease.expired for lease in leases):
        return
    if name == "a_writer_scribbles" and all(lease.kind == "read" for lease in leases):
        return
    values = {
        "holder": Holder(draw.choice([b"anna" * 4, b"bert" * 4, b"cleo" * 4]), draw.randint(1, 2)),
        "label": draw.choices(["small", "large"], [3, 2])[0],
        "path": "".join(draw.choices("ab", [3, 1], k=draw.randint(1, 7))),
        "skip": draw.choice([0, 0, 1, 3]),
        "ttl_s": draw.choice([5.0, 15.0, 60.0]),
        "first_needed": draw.choice([0, 0, 1, 3]),
        "pick": draw.randint(0, 1000),
        "part": draw.choice([0, 0, 1, 2, 3]),
        "verb": draw.choice(["abort", "release"]),
        "seconds": draw.choice([1.0, 5.0, 30.0]),
        "cleared": draw.random() < 0.2,
        "removed": "".join(draw.choices("ab", [3, 1], k=draw.randint(1, 7))),
    }
    step = getattr(machine, name)
    step(**{parameter: values[parameter] for parameter in inspect.signature(step).parameters})
