"""Blocks on drives, in lockstep with what is written there: a random walk with a fake drive that carries moves out late, in any
order, and not always; that loses what was not durable; and that hands out damaged bytes.

The memory of the arena and of the drives is a token a page, so that whoever is shown a block can be asked whether it is the
right one. Every step is followed by the store's own checks and by the laws below.
"""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest

from kvstore.core.blocks import Holder, KeyStatus
from kvstore.core.errors import LeaseExpired, UnknownLease
from kvstore.core.keys import KVSpec
from kvstore.core.moves import BAD_SLOT, DRIVE_SHIFT, Forget, Move, MoveDone, MoveProblem, Urgency
from kvstore.core.plans import ReadGrant
from kvstore.spill import SpillPolicy
from kvstore.store import Store
from kvstore.tiers.slots import CountedGenerations, SegmentedSlots, SharedGenerations
from kvstore.tiers.striped import StripedSlots

PAGE = 4096
PAGES_PER_SEGMENT = 6
PINNED_SEGMENTS, DRIVE_SEGMENTS, NUM_DRIVES = 3, 3, 2
SPECS = {
    label: KVSpec(weights=label, num_layers=pages, num_kv_heads=2, head_dim=64, dtype="int8")
    for label, pages in {"small": 1, "large": 3}.items()
}
HOLDERS = [Holder(name * 4, 1) for name in (b"anna", b"bert", b"cleo")]
Token = tuple[bytes, bytes]  # namespace, key


class Entry(NamedTuple):
    """What a drive's index has of a block."""

    parent: bytes
    nbytes: int
    generation: int
    checksum: int
    last_use: int
    hits: int


class Column(NamedTuple):
    """RestoredBlocks."""

    keys: list[bytes]
    parents: list[bytes]
    offsets: np.ndarray
    generations: np.ndarray
    checksums: np.ndarray
    last_use: np.ndarray
    hits: np.ndarray


@dataclass
class Drives:
    """Both drives: bytes, the index as it is on disk, and what waits for its group commit."""

    data: dict[int, Token] = field(default_factory=dict)  # by page
    durable: dict[tuple[Token, int], Entry] = field(default_factory=dict)  # by block and offset
    pending: list[Move | Forget] = field(default_factory=list)
    quarantined: set[tuple[int, int]] = field(default_factory=set)
    namespaces: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)


def pages(offset: int, nbytes: int) -> range:
    return range(offset // PAGE, (offset + nbytes) // PAGE)


def checksum(token: Token) -> int:
    return hash(token) & 0xFFFF_FFFF_FFFF_FFFF


class Walk:
    """One sidecar's life after another on the same drives."""

    def __init__(self, seed: int, policy: SpillPolicy) -> None:
        self.draw = random.Random(seed)
        self.policy = policy
        self.drives = Drives()
        self.now_s = 0.0
        self.num_requests = 0
        self.damage = True
        self.seen: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """A new boot: an empty arena, and whatever the drives have kept."""
        self.generations = np.zeros(PINNED_SEGMENTS * PAGES_PER_SEGMENT, np.uint64)
        self.memory: dict[int, Token] = {}
        self.pinned = SegmentedSlots(
            PINNED_SEGMENTS * PAGES_PER_SEGMENT * PAGE,
            generations=SharedGenerations(self.generations, PAGE),
            segment_bytes=PAGES_PER_SEGMENT * PAGE,
        )
        self.pinned.add_segments(PINNED_SEGMENTS)
        counted = CountedGenerations()
        self.segments = [
            SegmentedSlots(
                DRIVE_SEGMENTS * PAGES_PER_SEGMENT * PAGE, generations=counted, segment_bytes=PAGES_PER_SEGMENT * PAGE
            )
            for _ in range(NUM_DRIVES)
        ]
        self.slots = StripedSlots(self.segments)
        self.store = Store(pinned=self.pinned, nvme=self.slots, spill=self.policy, limbo_fraction=1.0)
        self.namespaces = {label: self.store.open_namespace(spec, "").namespace for label, spec in SPECS.items()}
        self.moves: list[Move] = []
        self.reads: list[tuple[ReadGrant, list[Token], Holder]] = []
        self.writes: list[tuple[int, list[Token], list[int], Holder]] = []
        self.pending: list[Move | Forget] = []
        self.restore()

    def restore(self) -> None:
        entries = self.usable_entries()
        for label, spec in SPECS.items():
            mine = [
                (key, offset, entry) for ((space, key), offset), entry in entries if space == self.namespaces[label]
            ]
            if mine:
                keys, offsets, rows = (list(column) for column in zip(*mine, strict=True))
                self.store.restore(spec, "", column(keys, offsets, rows))
        for offset, nbytes in self.drives.quarantined:
            self.store.restore_quarantined(offset, nbytes)
        for drive in self.segments:
            drive.add_segments(DRIVE_SEGMENTS)
        self.store.start_spilling({}, 0.0)
        self.take_orders()

    def usable_entries(self) -> list[tuple[tuple[Token, int], Entry]]:
        """Parents before children, the newest of two entries of a block, and none without its ancestors."""
        newest: dict[Token, int] = {}
        for (token, offset), entry in self.drives.durable.items():
            if token not in newest or entry.generation > self.drives.durable[token, newest[token]].generation:
                newest[token] = offset
        found = sorted(((token, offset), self.drives.durable[token, offset]) for token, offset in newest.items())
        found.sort(key=lambda item: len(item[0][0][1].rstrip(b".")))
        whole: set[Token] = set()
        usable = []
        for (token, offset), entry in found:
            if not entry.parent or (token[0], entry.parent) in whole:
                whole.add(token)
                usable.append(((token, offset), entry))
        kept = {key for key, _ in usable}
        self.drives.durable = {key: entry for key, entry in self.drives.durable.items() if key in kept}
        return usable

    # --- steps ----------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        label, path = self.some_path()
        tokens, holder = self.prefix(label, path), self.draw.choice(HOLDERS)
        skip = self.draw.choice([0, 0, 0, 1, 3]) % len(tokens)
        parent = tokens[skip - 1][1] if skip else b""
        keys = [key for _, key in tokens[skip:]]
        keep_s = self.draw.choice([0.0, 0.0, 0.0, 4.0])
        grant = self.store.reserve(holder, self.request(), tokens[0][0], parent, keys, 60.0, self.now_s, keep_s=keep_s)
        if grant.lease_id:
            wanted = [
                token
                for token, status in zip(tokens[skip:], grant.statuses, strict=True)
                if status == KeyStatus.GRANTED
            ]
            self.writes.append((grant.lease_id, wanted, [extent.offset for extent in grant.extents], holder))
        if self.draw.random() < 0.8:
            self.finish_put()

    def finish_put(self) -> None:
        if not self.writes:
            return
        lease_id, tokens, offsets, holder = self.writes.pop(self.draw.randrange(len(self.writes)))
        if lease_id in self.store.renew(holder, [lease_id], 60.0, self.now_s):
            with pytest.raises(LeaseExpired):
                self.store.abort(holder, lease_id, self.now_s)
            return
        if self.draw.random() < 0.1:
            self.store.abort(holder, lease_id, self.now_s)
            return
        for token, offset in zip(tokens, offsets, strict=True):
            self.fill(token, offset)
        self.store.commit(holder, lease_id, None, self.now_s)

    def get(self) -> None:
        label, path = self.some_path()
        tokens, holder = self.prefix(label, path), self.draw.choice(HOLDERS)
        first = self.draw.choice([0, 0, 0, 1, 2])
        keys = [key for _, key in tokens]
        match = self.store.match(tokens[0][0], keys, self.now_s)
        grant = self.store.acquire(holder, self.request(), tokens[0][0], keys, first, 60.0, self.now_s)
        assert grant.num_blocks <= max(match.num_blocks, min(first, match.num_blocks))
        assert len(grant.ready) == len(grant.extents)
        if grant.lease_id:
            assert list(grant.ready) == [
                self.is_announced(extent.offset, extent.generation) for extent in grant.extents
            ]
            self.count("arriving" if 0 in grant.ready else "ready")
            self.reads.append((grant, tokens[first : grant.num_blocks], holder))

    def release(self) -> None:
        if self.reads:
            grant, _, holder = self.reads.pop(self.draw.randrange(len(self.reads)))
            with suppress(LeaseExpired, UnknownLease):  # its time was over; all its blocks were given up
                self.store.release(holder, grant.lease_id, self.now_s)

    def prefetch(self) -> None:
        label, path = self.some_path()
        tokens = self.prefix(label, path)
        found = self.store.prefetch(tokens[0][0], [key for _, key in tokens], 0, self.now_s)
        assert found.num_started <= found.num_blocks <= len(tokens)

    def pin(self) -> None:
        label, path = self.some_path()
        tokens = self.prefix(label, path)
        keys = [key for _, key in tokens]
        held = self.store.match(tokens[0][0], keys, self.now_s).num_blocks
        assert self.store.pin(tokens[0][0], keys, self.draw.choice([0.0, 3.0, 30.0]), self.now_s) <= held

    def cool(self) -> None:
        label, path = self.some_path()
        tokens = self.prefix(label, path)
        self.store.cool(tokens[0][0], [key for _, key in tokens], self.now_s)

    def drop(self) -> None:
        label, path = self.some_path()
        token = self.prefix(label, path)[-1]
        self.store.drop(token[0], [token[1]])
        assert self.store.match(token[0], [key for _, key in self.prefix(label, path)], self.now_s).num_blocks < len(
            path
        )

    def finish_moves(self) -> None:
        """Some of the moves end, in any order."""
        self.draw.shuffle(self.moves)
        count = self.draw.randint(0, len(self.moves))
        done = [self.carry_out(self.moves.pop()) for _ in range(count)]
        self.store.finish_moves(done, self.now_s)

    def commit_index(self) -> None:
        """A group commit; its removals are reported."""
        forgets = []
        for item in self.pending:
            self.apply(item)
            if isinstance(item, Forget):
                forgets.append(item)
        self.pending.clear()
        self.store.finish_forgets(forgets)

    def crash(self) -> None:
        """kill -9: what waited for the group commit is gone, or a part of it is not."""
        for item in self.pending[: self.draw.randint(0, len(self.pending))]:
            self.apply(item)
        self.count("crashes")
        self.start()

    def advance(self) -> None:
        self.now_s += self.draw.choice([0.5, 2.0, 20.0])
        self.store.expire(self.now_s)
        self.store.tick(self.now_s)

    # --- the drives -----------------------------------------------------------------------------------------------------

    def take_orders(self) -> None:
        orders = self.store.take_orders(self.now_s)
        for namespace, tenant, canonical in orders.namespaces:
            self.drives.namespaces[namespace] = (tenant, canonical)
        self.pending.extend(orders.forgets)
        self.moves.extend(orders.moves)

    def carry_out(self, move: Move) -> MoveDone:
        record = move.record
        token = (record.namespace, record.key)
        problem = self.some_problem(move)
        if move.urgency is Urgency.WRITE:
            if problem is not None:
                for page in pages(record.offset, record.nbytes):
                    self.drives.data[page] = (b"torn", b"")
                return MoveDone(move.move_id, 0, problem)
            found = {self.memory.get(page) for page in pages(move.arena_offset, record.nbytes)}
            assert found == {token}, "a block was written from a slot that holds something else"
            for page in pages(record.offset, record.nbytes):
                self.drives.data[page] = token
            written = move._replace(record=record._replace(checksum=checksum(token)))
            self.pending.append(written)
            return MoveDone(move.move_id, checksum(token))
        if problem is not None:
            return MoveDone(move.move_id, 0, problem)
        found = {self.drives.data.get(page) for page in pages(record.offset, record.nbytes)}
        assert found == {token}, "a block was looked for where it is not"
        assert record.checksum == checksum(token)
        for page in pages(move.arena_offset, record.nbytes):
            self.memory[page] = token
        return MoveDone(move.move_id)

    def some_problem(self, move: Move) -> MoveProblem | None:
        if not self.damage or self.draw.random() > 0.05:
            return None
        choice = [MoveProblem.EIO, MoveProblem.SHORT, MoveProblem.GONE, MoveProblem.STOPPED]
        extra = (
            [MoveProblem.NO_SPACE, MoveProblem.READ_ONLY] if move.urgency is Urgency.WRITE else [MoveProblem.CHECKSUM]
        )
        problem = self.draw.choice(choice + extra)
        self.count(problem)
        return problem

    def apply(self, item: Move | Forget) -> None:
        if isinstance(item, Forget):
            self.drives.durable.pop(((item.namespace, item.key), item.offset), None)
            if item.problem is not None:
                self.drives.quarantined.add((item.offset, item.nbytes))
            return
        record = item.record
        assert record.namespace in self.drives.namespaces, "a block was written before its namespace was made known"
        self.drives.durable[(record.namespace, record.key), record.offset] = Entry(
            record.parent, record.nbytes, record.generation, record.checksum, record.last_use, record.hits
        )

    # --- laws -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.store.check()
        for grant, tokens, _ in self.reads:
            for token, extent in zip(tokens, grant.extents, strict=True):
                if self.is_announced(extent.offset, extent.generation):
                    assert {self.memory.get(page) for page in pages(extent.offset, extent.nbytes)} == {token}
        for (token, offset), entry in self.drives.durable.items():
            held = {self.drives.data.get(page) for page in pages(offset, entry.nbytes)}
            assert held == {token}, "an entry that is durable names a slot with other bytes"
        for tier in self.store.stats().tiers:
            used = tier.ready_bytes + tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes
            assert used + tier.free_bytes + tier.quarantined_bytes == tier.capacity_bytes

    def check_nothing_hangs(self) -> None:
        """Without damage, everything ordered ends, and every reader's block comes or is given up."""
        self.damage = False
        for _ in range(200):
            self.take_orders()
            if not self.moves and not self.pending:
                break
            self.store.finish_moves([self.carry_out(move) for move in self.moves], self.now_s)
            self.moves.clear()
            self.commit_index()
        assert not self.moves
        assert not self.pending
        for grant, _, holder in self.reads:
            if grant.lease_id in self.store.renew(holder, [grant.lease_id], 1.0, self.now_s):
                continue  # expired, or all of it was given up
            assert all(
                int(self.generations[extent.offset // PAGE]) != extent.generation - 1 for extent in grant.extents
            )

    # --- helpers --------------------------------------------------------------------------------------------------------

    def is_announced(self, offset: int, generation: int) -> bool:
        return int(self.generations[offset // PAGE]) == generation

    def fill(self, token: Token, offset: int) -> None:
        label = next(label for label, namespace in self.namespaces.items() if namespace == token[0])
        for page in pages(offset, SPECS[label].block_nbytes):
            self.memory[page] = token

    def some_path(self) -> tuple[str, str]:
        label = self.draw.choices(["small", "large"], [3, 2])[0]
        return label, "".join(self.draw.choices("ab", [3, 1], k=self.draw.randint(1, 7)))

    def prefix(self, label: str, path: str) -> list[Token]:
        return [(self.namespaces[label], path[:n].encode().ljust(16, b".")) for n in range(1, len(path) + 1)]

    def request(self) -> str:
        self.num_requests += 1
        return f"request-{self.num_requests}"

    def count(self, name: str) -> None:
        self.seen[name] += 1

    def remember_counters(self) -> None:
        self.seen.update(self.store.stats().counters)


def column(keys: list[bytes], offsets: list[int], entries: list[Entry]) -> Column:
    return Column(
        keys,
        [entry.parent for entry in entries],
        np.array(offsets, np.int64),
        np.array([entry.generation for entry in entries], np.uint64),
        np.array([entry.checksum for entry in entries], np.uint64),
        np.array([entry.last_use for entry in entries], np.int64),
        np.array([entry.hits for entry in entries], np.uint32),
    )


STEPS = {
    "put": 20,
    "finish_put": 6,
    "get": 14,
    "release": 14,
    "prefetch": 4,
    "drop": 1.5,
    "pin": 2,
    "cool": 1,
    "finish_moves": 20,
    "commit_index": 8,
    "advance": 5,
    "crash": 0.5,
}


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_long_walks_keep_every_law(policy: str):
    seen: Counter[str] = Counter()
    for seed in range(5):
        walk = Walk(seed, SpillPolicy(write_policy=policy))
        for _ in range(400):
            name = walk.draw.choices(list(STEPS), list(STEPS.values()))[0]
            if name == "crash":
                walk.remember_counters()
            getattr(walk, name)()
            walk.check()
            walk.take_orders()
            walk.check()
        walk.check_nothing_hangs()
        walk.check()
        walk.remember_counters()
        seen += walk.seen
    least = {"promoted_blocks_total": 20, "demoted_blocks_total": 30, "arriving": 10, "crashes": 3}
    assert {name: seen[name] for name, count in least.items() if seen[name] < count} == {}, (
        "they stayed in the shallows"
    )


def test_slots_of_drives_have_their_drive_in_their_name():
    walk = Walk(0, SpillPolicy())
    offsets = walk.slots.reserve_many(PAGE, 4).offsets
    assert (offsets >> DRIVE_SHIFT).tolist() == [0, 1, 0, 1]
    assert set(MoveProblem) > BAD_SLOT
