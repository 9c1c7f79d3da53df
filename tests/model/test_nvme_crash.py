"""Random lives of a tier with crashes in them: after reopening exactly the durable blocks are there, and none is wrong.

The tier runs with its own threads over files that lose, tear and flip; the index is a real lmdb, whose crash is a copy of
its directory as it was at that moment. Group commits happen only when the test says so, so that what is durable is known.
"""

import itertools
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
from faulty_file import FaultyFile
from small_drive import PAGE, SEGMENT, Ends, block_bytes, spec

from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Forget, Move, MoveProblem, Touch, Urgency
from kvstore.tiers.nvme import index as index_module
from kvstore.tiers.nvme.records import HEADER_NBYTES
from kvstore.tiers.nvme.tier import NvmeTier

NUM_DRIVES = 2
SPECS = (spec(weights="a"), spec(weights="b", pages=2, digest_nbytes=32))  # the i-th has segment i of each drive
DEADLINE_S = 20.0
Name = tuple[bytes, bytes]  # namespace, key


@dataclass(frozen=True)
class Block:
    """A block as the model knows it; its bytes follow from `content`."""

    record: BlockRecord
    content: int


@dataclass
class Disk:
    """What a crash would leave: entries and quarantined slots."""

    blocks: dict[Name, Block] = field(default_factory=dict)
    quarantined: set[int] = field(default_factory=set)

    def copy(self) -> "Disk":
        return Disk(dict(self.blocks), set(self.quarantined))

    def rooted(self) -> dict[Name, Block]:
        """Those whose chain of parents is complete."""

        def is_rooted(name: Name) -> bool:
            while name in self.blocks:
                if not self.blocks[name].record.parent:
                    return True
                name = name[0], self.blocks[name].record.parent
            return False

        return {name: block for name, block in self.blocks.items() if is_rooted(name)}


class NvmeLives(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="nvme-crash-"))
        self.rng = random.Random(seed)
        self.paths = [self.root / f"drive{number}" for number in range(NUM_DRIVES)]
        self.files = {path / "blocks.kv": FaultyFile() for path in self.paths}
        self.arena = np.zeros(8 * SEGMENT, np.uint8)
        self.durable = Disk()
        self.ordered = Disk()  # once everything queued is durable
        self.damaged: set[tuple[int, int]] = set()  # (offset, content) of blocks with a flipped byte
        self.numbers = itertools.count()
        self.names = itertools.count()
        self.unfreed: dict[int, Forget] = {}  # offset -> removal not yet reported
        self.generation = 1
        self.free: list[list[int]] = []
        self.open()

    def open(self) -> None:
        """What every life begins with: everything that should be there is there, and nothing else."""
        self.ends = Ends()
        self.tier = NvmeTier(
            self.paths,
            len(SPECS) * SEGMENT,
            segment_bytes=SEGMENT,
            arena=self.arena,
            on_moved=self.ends.moved,
            on_forgotten=self.ends.forgot,
            threads=2,
            open_file=self.files.__getitem__,
        )
        self.tier.open()
        recovered = self.tier.recover()
        expected = self.durable.rooted()
        found: dict[Name, BlockRecord] = {}
        for blocks in recovered.namespaces:
            namespace = next(item.namespace() for item in SPECS if item.canonical() == blocks.canonical)
            columns = (blocks.offsets, blocks.generations, blocks.checksums, blocks.last_use, blocks.hits)
            for name, parent, *values in zip(
                blocks.keys, blocks.parents, *(column.tolist() for column in columns), strict=True
            ):
                assert not parent or (namespace, parent) in found, "a child before its parent"
                offset, generation, checksum, last_use, hits = values
                found[namespace, name] = BlockRecord(
                    namespace, name, parent, offset, blocks.nbytes, generation, checksum, last_use, hits
                )
        assert found == {name: block.record for name, block in expected.items()}
        assert {offset for offset, _ in recovered.quarantined} == self.durable.quarantined
        assert recovered.next_generation > max((record.generation for record in found.values()), default=0)
        event("reopened with blocks" if found else "reopened with nothing")

        self.generation = max(self.generation, recovered.next_generation)
        self.durable.blocks = dict(expected)
        self.ordered = self.durable.copy()
        self.unfreed = {}
        used = {record.offset for record in found.values()} | self.durable.quarantined
        self.free = [[offset for offset in slots_of(place) if offset not in used] for place in range(len(SPECS))]
        for item in SPECS:
            self.tier.add_namespace(item.namespace(), "", item.canonical())
        self.read_all()

    def read_all(self) -> None:
        """Every block is served as it was written, or not at all."""
        blocks = list(self.ordered.blocks.values())
        places = range(0, len(self.arena), 2 * PAGE)
        for group in batched(blocks, len(places)):
            self.arena[:] = 0
            moves = [
                Move(next(self.numbers), Urgency.READ, place, block.record)
                for place, block in zip(places, group, strict=False)
            ]
            self.tier.submit(moves)
            ends = self.ends.wait(*(move.move_id for move in moves))
            for block, move, end in zip(group, moves, ends, strict=True):
                if (block.record.offset, block.content) in self.damaged:
                    assert end.problem is MoveProblem.CHECKSUM
                    event("damaged block refused")
                else:
                    assert end.problem is None
                    got = self.arena[move.arena_offset : move.arena_offset + block.record.nbytes]
                    assert (got == block_bytes(block.content, block.record.nbytes)).all()

    # --- what the brains may order ------------------------------------------------------------------------------------

    @rule(data=st.data(), place=st.integers(0, len(SPECS) - 1), count=st.integers(1, 6))
    def write(self, data: st.DataObject, place: int, count: int) -> None:
        """New blocks, each behind any that is known or at the start of a sequence."""
        item = SPECS[place]
        blocks = []
        for _ in range(min(count, len(self.free[place]))):
            parents = [b"", *(key for namespace, key in self.ordered.blocks if namespace == item.namespace())]
            key = random.Random(next(self.names)).randbytes(item.hash.digest_nbytes)
            blocks.append(self.new_block(place, key, data.draw(st.sampled_from(parents))))
        self.write_blocks(blocks)

    @precondition(lambda self: self.ordered.blocks)
    @rule(data=st.data())
    def rewrite(self, data: st.DataObject) -> None:
        """The same key again elsewhere, after the old copy is given up: both in one group, or in two."""
        name = data.draw(st.sampled_from(sorted(self.ordered.blocks)))
        old = self.ordered.blocks[name].record
        place = next(number for number, item in enumerate(SPECS) if item.namespace() == name[0])
        if self.free[place]:
            self.forget_blocks([old], None)
            self.write_blocks([self.new_block(place, old.key, old.parent)])

    @precondition(lambda self: self.ordered.blocks)
    @rule(data=st.data(), problem=st.sampled_from([None, None, None, MoveProblem.EIO, MoveProblem.CHECKSUM]))
    def forget(self, data: st.DataObject, problem: MoveProblem | None) -> None:
        """Leaves or not: what loses its parent is lost with the next restart."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.ordered.blocks)), unique=True, min_size=1, max_size=4))
        self.forget_blocks([self.ordered.blocks[name].record for name in names], problem)

    @precondition(lambda self: self.ordered.blocks)
    @rule(data=st.data(), last_use=st.integers(0, 2**40), hits=st.integers(0, 2**31))
    def touch(self, data: st.DataObject, last_use: int, hits: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.ordered.blocks)))
        block = self.ordered.blocks[name]
        record = block.record._replace(last_use=last_use, hits=hits)
        self.tier.touch([Touch(*name, record.offset, last_use, hits)])
        self.ordered.blocks[name] = replace(block, record=record)

    @rule()
    def commit(self) -> None:
        """Now it is durable, and the slots of what was removed come back."""
        assert self.tier.flush(DEADLINE_S)
        self.durable = self.ordered.copy()
        self.ends.wait_forgotten(0)
        for forget in self.ends.forgotten:
            assert self.unfreed.pop(forget.offset) == forget
            if forget.problem is None:
                place = (forget.offset & ((1 << DRIVE_SHIFT) - 1)) // SEGMENT
                self.free[place].append(forget.offset)
        self.ends.forgotten.clear()
        assert not self.unfreed

    # --- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ordered.blocks)
    @rule(data=st.data())
    def flip(self, data: st.DataObject) -> None:
        """One byte of a block goes bad on the drive."""
        block = self.ordered.blocks[data.draw(st.sampled_from(sorted(self.ordered.blocks)))]
        drive, offset = divmod(block.record.offset, 1 << DRIVE_SHIFT)
        if (block.record.offset, block.content) not in self.damaged:
            place = HEADER_NBYTES + offset + data.draw(st.integers(0, block.record.nbytes - 1))
            self.files[self.paths[drive] / "blocks.kv"].flip(place, data.draw(st.integers(0, 7)))
            self.damaged.add((block.record.offset, block.content))

    @rule()
    def reads(self) -> None:
        self.read_all()

    @rule(survive=st.sampled_from([0.0, 0.3, 0.7]))
    def power_cut(self, survive: float) -> None:
        """Nothing that was queued is in the index; of unsynced pages some survive, so that blocks are torn."""
        self.end_life(self.copy_indexes(), survive=survive)
        event("power cut")

    @rule(survive=st.sampled_from([0.0, 0.5]))
    def power_cut_between_sync_and_commit(self, survive: float) -> None:
        """The bytes are durable, their entries are not: the index is the one before, the data file the one after."""
        indexes = self.copy_indexes()
        assert self.tier.flush(DEADLINE_S)
        self.end_life(indexes, survive=survive)
        event("power cut between sync and commit")

    @rule(survive=st.sampled_from([0.0, 0.5]))
    def power_cut_on_one_drive_between(self, survive: float) -> None:
        """The first drive has committed its group, the others have not."""
        indexes = self.copy_indexes()
        assert self.tier.flush(DEADLINE_S)
        indexes[0] = self.copy_indexes()[0]
        durable = {
            name: block
            for state, on_first in ((self.ordered, True), (self.durable, False))
            for name, block in state.blocks.items()
            if (block.record.offset >> DRIVE_SHIFT == 0) == on_first
        }
        for name, block in self.ordered.blocks.items():  # both copies of one that moved: the newer counts
            older = self.durable.blocks.get(name)
            if block.record.offset >> DRIVE_SHIFT == 0 and older is not None:
                durable[name] = block
        self.durable.blocks = durable
        self.durable.quarantined = {
            offset
            for state, on_first in ((self.ordered, True), (self.durable, False))
            for offset in state.quarantined
            if (offset >> DRIVE_SHIFT == 0) == on_first
        }
        self.end_life(indexes, survive=survive)
        event("power cut on one drive")

    @rule()
    def kill(self) -> None:
        """kill -9: what was written is in the file, what was queued is lost."""
        self.end_life(self.copy_indexes(), survive=None)
        event("kill")

    @rule()
    def stop(self) -> None:
        """An orderly end makes everything durable."""
        assert self.tier.close(DEADLINE_S)
        self.durable = self.ordered.copy()
        self.open()

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        if hasattr(self, "free"):
            used = [block.record.offset for block in self.ordered.blocks.values()]
            free = [offset for offsets in self.free for offset in offsets]
            assert len({*used, *free}) == len(used) + len(free)

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close(DEADLINE_S)
            shutil.rmtree(self.root)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def new_block(self, place: int, key: bytes, parent: bytes) -> Block:
        offset = self.free[place].pop(self.rng.randrange(len(self.free[place])))
        self.generation += 1
        item = SPECS[place]
        record = BlockRecord(
            item.namespace(), key, parent, offset, item.block_nbytes, self.generation, 0, self.generation, 0
        )
        return Block(record, next(self.numbers))

    def write_blocks(self, blocks: list[Block]) -> None:
        moves = []
        for number, block in enumerate(blocks):
            place = number * 2 * PAGE
            self.arena[place : place + block.record.nbytes] = block_bytes(block.content, block.record.nbytes)
            moves.append(Move(next(self.numbers), Urgency.WRITE, place, block.record))
        self.tier.submit(moves)
        for block, end in zip(blocks, self.ends.wait(*(move.move_id for move in moves)), strict=True):
            assert end.problem is None
            record = block.record._replace(checksum=end.checksum)
            self.ordered.blocks[record.namespace, record.key] = replace(block, record=record)

    def forget_blocks(self, records: list[BlockRecord], problem: MoveProblem | None) -> None:
        forgets = [
            Forget(record.namespace, record.key, record.offset, record.nbytes, record.generation, problem)
            for record in records
        ]
        for forget in forgets:
            del self.ordered.blocks[forget.namespace, forget.key]
            self.unfreed[forget.offset] = forget
            if problem is not None:
                self.ordered.quarantined.add(forget.offset)
        self.tier.forget(forgets)

    def copy_indexes(self) -> list[Path]:
        """As a crash at this moment leaves them: nothing is committed unless the test says so."""
        copies = []
        for path in self.paths:
            copy = self.root / f"copy{next(self.numbers)}"
            shutil.copytree(path / "index", copy)
            copies.append(copy)
        return copies

    def end_life(self, indexes: list[Path], *, survive: float | None) -> None:
        """The files stop at once (None: killed); the threads end; the indexes are what they were."""
        self.files = {
            path: file.kill() if survive is None else file.crash(survive=survive, rng=self.rng)
            for path, file in self.files.items()
        }
        self.tier.close(DEADLINE_S)
        for path, copy in zip(self.paths, indexes, strict=True):
            shutil.rmtree(path / "index")
            copy.rename(path / "index")
        self.open()


def slots_of(place: int) -> Iterator[int]:
    width = -(-SPECS[place].block_nbytes // PAGE) * PAGE
    for drive in range(NUM_DRIVES):
        for offset in range(place * SEGMENT, (place + 1) * SEGMENT, width):
            yield drive << DRIVE_SHIFT | offset


def batched(blocks: list[Block], count: int) -> Iterator[list[Block]]:
    """itertools.batched, which Python 3.11 has not."""
    for first in range(0, len(blocks), count):
        yield blocks[first : first + count]


@pytest.mark.timeout(600)
def test_exactly_what_was_durable_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "INDEX_COMMIT_INTERVAL_S", 3600.0)
    monkeypatch.setattr(index_module, "INDEX_COMMIT_ENTRIES", 10**9)
    monkeypatch.setattr(index_module, "INDEX_RETRY_S", 0.01)
    run_state_machine_as_test(
        NvmeLives,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
