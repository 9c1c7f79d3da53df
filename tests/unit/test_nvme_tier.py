"""The NVMe tier over real directories and files that can be damaged: restart, changed settings, damage, drives that are off."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty_file import FaultyFile
from small_drive import NAMESPACE, PAGE, SEGMENT, SPEC, Ends, block_bytes, key, spec

from kvstore.core.errors import ConfigError
from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Forget, Move, MoveDone, MoveProblem, Touch, Urgency
from kvstore.tiers.nvme import index as index_module
from kvstore.tiers.nvme import records as r
from kvstore.tiers.nvme.directory import write_header
from kvstore.tiers.nvme.file import DirectFile, page_aligned
from kvstore.tiers.nvme.recovery import DriveScan, Recovered, fitting, merge
from kvstore.tiers.nvme.tables import BLOCK_TABLES, OFFSET_MASK, IndexTables, Scan
from kvstore.tiers.nvme.tier import DriveHealth, NvmeTier

NBYTES = 4 * SEGMENT
DEADLINE_S = 20.0


class House:
    """Drives' directories that outlive the tiers opened over them, an arena, and what the tiers reported."""

    def __init__(self, root: Path, *, num_drives: int = 1, real_files: bool = False) -> None:
        self.paths = [root / f"drive{number}" for number in range(num_drives)]
        self.files: dict[Path, FaultyFile] = {}
        self.arena = page_aligned(2 * SEGMENT)
        self.ends = Ends()
        self.real_files = real_files
        self.num_moves = 0
        self.tiers: list[NvmeTier] = []

    def open_file(self, path: Path) -> FaultyFile:
        if path not in self.files:
            self.files[path] = FaultyFile(DirectFile.open(path) if self.real_files else None)
        return self.files[path]

    def file(self, drive: int = 0) -> FaultyFile:
        return self.files[self.paths[drive] / "blocks.kv"]

    def close_files(self) -> None:
        """A FaultyFile leaves that to the test."""
        for file in self.files.values():
            file._inner.close()
        self.files.clear()

    def make(self, nbytes: int = NBYTES, *, segment_bytes: int = SEGMENT) -> NvmeTier:
        tier = NvmeTier(
            self.paths,
            nbytes,
            segment_bytes=segment_bytes,
            arena=self.arena,
            on_moved=self.ends.moved,
            on_forgotten=self.ends.forgot,
            threads=2,
            open_file=self.open_file,
            wall_s=lambda: 3600.0 * 1000,
        )
        self.tiers.append(tier)
        return tier

    def open(self, nbytes: int = NBYTES, **options: int) -> NvmeTier:
        """Opened and recovered; blocks of NAMESPACE may be written."""
        tier = self.make(nbytes, **options)
        tier.open()
        self.recovered = tier.recover()
        tier.add_namespace(NAMESPACE, "tenant", SPEC.canonical())
        return tier

    def write(self, tier: NvmeTier, *records: BlockRecord) -> list[MoveDone]:
        """Blocks whose bytes follow from their keys."""
        moves = []
        for place, record in enumerate(records):
            self.arena[place * PAGE : place * PAGE + record.nbytes] = content_of(record)
            moves.append(Move(self.num_moves, Urgency.WRITE, place * PAGE, record._replace(checksum=0)))
            self.num_moves += 1
        tier.submit(moves)
        return self.ends.wait(*(move.move_id for move in moves))

    def read(self, tier: NvmeTier, record: BlockRecord) -> MoveDone:
        """Into the arena's second half, and compared with what was written unless a problem is reported."""
        self.arena[SEGMENT : SEGMENT + PAGE] = 0
        move = Move(self.num_moves, Urgency.READ, SEGMENT, record)
        self.num_moves += 1
        tier.submit([move])
        (end,) = self.ends.wait(move.move_id)
        if end.problem is None:
            np.testing.assert_array_equal(self.arena[SEGMENT : SEGMENT + record.nbytes], content_of(record))
        return end

    def keys(self) -> set[bytes]:
        return {name for blocks in self.recovered.namespaces for name in blocks.keys}


def content_of(record: BlockRecord) -> np.ndarray:
    return block_bytes(int.from_bytes(record.key[:7], "little"), record.nbytes)


def block(
    number: int, *, drive: int = 0, slot: int | None = None, parent: bytes = b"", generation: int = 0
) -> BlockRecord:
    slot = number if slot is None else slot
    return BlockRecord(
        NAMESPACE,
        key(number),
        parent,
        drive << DRIVE_SHIFT | slot * PAGE,
        SPEC.block_nbytes,
        generation or number + 1,
        0,
        number,
        0,
    )


def forget(record: BlockRecord, problem: MoveProblem | None = None) -> Forget:
    return Forget(record.namespace, record.key, record.offset, record.nbytes, record.generation, problem)


def records_of(recovered: Recovered) -> list[BlockRecord]:
    found = []
    for blocks in recovered.namespaces:
        columns = (blocks.offsets, blocks.generations, blocks.checksums, blocks.last_use, blocks.hits)
        rows = zip(blocks.keys, blocks.parents, *(column.tolist() for column in columns), strict=True)
        for name, parent, offset, generation, checksum, last_use, hits in rows:
            found.append(
                BlockRecord(NAMESPACE, name, parent, offset, blocks.nbytes, generation, checksum, last_use, hits)
            )
    return found


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    for tier in house.tiers:
        tier.close(DEADLINE_S)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, num_drives=2)
    yield house
    for tier in house.tiers:
        tier.close(DEADLINE_S)


def health(tier: NvmeTier, drive: int = 0) -> DriveHealth:
    return tier.drives()[drive]


class TestSecondThoughts:
    def test_reads_are_cancelled_and_hastened_on_the_drive_that_their_slots_name(self, two: House) -> None:
        tier = two.open()
        records = [block(number, drive=number % 2, slot=2 * number) for number in range(6)]
        ends = two.write(tier, *records)
        records = [record._replace(checksum=end.checksum) for record, end in zip(records, ends, strict=True)]
        held = HeldReads(two.file(0)), HeldReads(two.file(1))
        moves = [Move(100 + i, Urgency.PREFETCH, SEGMENT + i * PAGE, record) for i, record in enumerate(records)]
        blockers = [
            Move(200 + i, Urgency.READ, SEGMENT + (10 + i) * PAGE, block(50 + i, drive=i % 2, slot=40 + 2 * (i // 2)))
            for i in range(4)  # two on each drive, as many as have threads
        ]
        tier.submit(blockers)
        for each in held:
            each.wait_for(2)
        tier.submit(moves)

        tier.hasten([records[4].offset, records[5].offset])
        tier.cancel([records[0].offset, records[1].offset, records[0].offset ^ PAGE, blockers[0].record.offset])

        assert [end.problem for end in two.ends.wait(100, 101)] == [MoveProblem.CANCELLED] * 2
        for drive, each in enumerate(held):
            each.let_go(1)
            each.wait_for(3)
            assert each.slots[2] == records[4 + drive].offset % (1 << DRIVE_SHIFT) // PAGE
            each.let_go(99)
        assert [end.problem for end in two.ends.wait(*range(102, 106))] == [None] * 4
        assert [len(each.slots) for each in held] == [4, 4]
        assert [health(tier, drive).state for drive in range(2)] == ["ready"] * 2
        assert all("cancelled" not in health(tier, drive).problems for drive in range(2))

    def test_drives_that_are_not_open_have_nothing_to_cancel(self, two: House) -> None:
        tier = two.make()

        tier.cancel([1 << DRIVE_SHIFT])
        tier.hasten([1 << DRIVE_SHIFT])

        assert not two.ends.done


class HeldReads:
    """Reads of a drive's file wait until they are let go, so many at a time; which slots they asked for, in order."""

    def __init__(self, file: FaultyFile) -> None:
        self.slots: list[int] = []
        self._changed = threading.Condition()
        self._num_free = 0
        self._read = file.read_into
        file.read_into = self._read_into  # type: ignore[method-assign]

    def _read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._changed:
            self.slots.append((offset - r.HEADER_NBYTES) // PAGE)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._num_free > 0, DEADLINE_S)
            self._num_free -= 1
        return self._read(offset, views)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.slots) == count, DEADLINE_S)

    def let_go(self, count: int) -> None:
        with self._changed:
            self._num_free += count
            self._changed.notify_all()


class TestRestart:
    def test_blocks_come_back_with_everything_that_was_known_of_them(self, two: House) -> None:
        tier = two.open()
        chain = [block(0)]
        for number in range(1, 20):
            chain.append(block(number, drive=number % 2, parent=chain[-1].key))
        ends = two.write(tier, *chain)
        tier.touch([Touch(NAMESPACE, chain[3].key, chain[3].offset, 1234, 5)])
        assert tier.close(DEADLINE_S)

        tier = two.open()

        (blocks,) = two.recovered.namespaces
        assert (blocks.tenant, blocks.canonical, blocks.nbytes) == ("tenant", SPEC.canonical(), SPEC.block_nbytes)
        expected = [record._replace(checksum=end.checksum) for record, end in zip(chain, ends, strict=True)]
        expected[3] = expected[3]._replace(last_use=1234, hits=5)
        assert records_of(two.recovered) == expected  # a chain has one order only
        assert two.recovered.next_generation == 21
        assert two.recovered.written == {1000: 20 * PAGE}
        for record in records_of(two.recovered):
            assert two.read(tier, record).problem is None

    def test_each_drive_knows_the_namespaces_of_its_blocks(self, two: House) -> None:
        """Also a drive that was added after the namespace became known; without the other one its blocks are there."""
        both = two.paths
        two.paths = both[:1]
        tier = two.open()
        two.write(tier, block(1))
        assert tier.close(DEADLINE_S)
        two.paths = both
        tier = two.make()
        tier.open()
        two.recovered = tier.recover()
        two.write(tier, block(2, drive=1))  # the namespace is known from recovery
        assert tier.close(DEADLINE_S)
        two.paths = both[1:]

        two.open()

        assert two.keys() == {key(2)}

    def test_drives_may_change_places(self, two: House) -> None:
        tier = two.open()
        two.write(tier, block(1, drive=0), block(2, drive=1))
        assert tier.close(DEADLINE_S)
        two.paths.reverse()

        tier = two.open()

        assert {record.key: record.offset >> DRIVE_SHIFT for record in records_of(two.recovered)} == {
            key(1): 1,
            key(2): 0,
        }
        assert all(two.read(tier, record).problem is None for record in records_of(two.recovered))

    def test_the_newer_of_two_copies_stays(self, two: House) -> None:
        """A drive that was away for a while comes back with an old copy."""
        tier = two.open()
        two.write(tier, block(1, drive=0, generation=1), block(1, drive=1, generation=2))
        assert tier.close(DEADLINE_S)

        tier = two.open()

        assert [record.offset >> DRIVE_SHIFT for record in records_of(two.recovered)] == [1]
        assert two.recovered.next_generation == 3
        assert tier.close(DEADLINE_S)
        two.paths.pop()
        two.open()
        assert two.keys() == set()  # the older entry was removed, durably

    def test_blocks_without_their_parents_are_forgotten(self, house: House) -> None:
        tier = house.open()
        child, grandchild = block(2, parent=key(1)), block(3, parent=key(2))
        house.write(tier, block(1), child, grandchild, block(4))
        tier.forget([forget(block(1))])
        assert tier.flush(DEADLINE_S)
        assert house.ends.forgotten == [forget(block(1))]
        assert tier.close(DEADLINE_S)

        tier = house.open()

        assert house.keys() == {key(4)}
        assert tier.close(DEADLINE_S)
        tables = IndexTables(house.paths[0] / "index")
        tables.open()
        assert tables.num_entries() == 1
        tables.close()

    def test_quarantined_slots_stay_so(self, house: House) -> None:
        tier = house.open()
        house.write(tier, block(1), block(2))
        tier.forget([forget(block(1), MoveProblem.CHECKSUM)])
        assert tier.close(DEADLINE_S)

        house.open()

        assert house.recovered.quarantined == ((PAGE, SPEC.block_nbytes),)
        assert house.keys() == {key(2)}

    def test_records_of_namespaces_without_blocks_go(self, house: House) -> None:
        tier = house.open()
        house.write(tier, block(1))
        tier.forget([forget(block(1))])
        assert tier.close(DEADLINE_S)
        house.open().close(DEADLINE_S)

        tables = IndexTables(house.paths[0] / "index")
        tables.open()
        assert tables.scan().namespaces == {}
        tables.close()

    def test_real_files_too(self, tmp_path: Path) -> None:
        house = House(tmp_path, real_files=True)
        tier = house.open()
        house.write(tier, block(1), block(2, parent=key(1)))
        assert tier.close(DEADLINE_S)
        house.close_files()
        assert (house.paths[0] / "blocks.kv").stat().st_size == r.HEADER_NBYTES + NBYTES

        tier = house.open()

        assert [record.key for record in records_of(house.recovered)] == [key(1), key(2)]
        assert all(house.read(tier, record).problem is None for record in records_of(house.recovered))
        assert tier.close(DEADLINE_S)
        house.close_files()


class TestSettings:
    def test_a_directory_in_use_names_who_uses_it(self, house: House) -> None:
        house.open()

        with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
            house.make().open()

    def test_another_process_is_named_and_its_death_frees_the_directory(self, house: House) -> None:
        house.paths[0].mkdir()
        script = (
            "import sys, pathlib; from kvstore.tiers.nvme.directory import DirectoryLock; "
            "DirectoryLock(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", script, str(house.paths[0] / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(ConfigError, match=rf"in use by process {holder.pid};"):
                house.make().open()
            holder.kill()
            holder.wait(DEADLINE_S)

        house.open()

    def test_one_refused_directory_frees_the_others(self, two: House) -> None:
        two.paths[1].write_text("a file")

        with pytest.raises(ConfigError, match="drive1: is not a directory"):
            two.make().open()

        two.paths[1].unlink()
        two.open()

    def test_a_parent_that_is_missing_is_not_made_up(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="its parent does not exist"):
            House(tmp_path / "not mounted").make().open()

    def test_another_segment_size_is_refused(self, house: House) -> None:
        house.open().close(DEADLINE_S)

        with pytest.raises(ConfigError, match=f"segment_bytes: {2 * SEGMENT} given.*made with {SEGMENT}"):
            house.make(segment_bytes=2 * SEGMENT).open()

    def test_less_than_a_segment_is_refused(self, house: House) -> None:
        with pytest.raises(ConfigError, match=f"use {SEGMENT} or more"):
            house.make(SEGMENT - 1).open()

    def test_sizes_are_whole_segments_and_kept_when_not_given(self, house: House) -> None:
        tier = house.open(NBYTES + 5)
        assert tier.drive_nbytes == (NBYTES,)
        tier.close(DEADLINE_S)

        assert house.open(0).drive_nbytes == (NBYTES,)

    def test_at_first_half_of_what_is_free_is_taken(self, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
        free = shutil.disk_usage("/")._replace(free=7 * SEGMENT)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)

        assert house.open(0).drive_nbytes == (3 * SEGMENT,)

    def test_a_grown_drive_keeps_its_blocks(self, house: House) -> None:
        tier = house.open(NBYTES)
        house.write(tier, block(1))
        tier.close(DEADLINE_S)

        tier = house.open(2 * NBYTES)

        assert tier.drive_nbytes == (2 * NBYTES,)
        assert house.keys() == {key(1)}
        house.write(tier, block(2, slot=NBYTES // PAGE + 1))
        tier.close(DEADLINE_S)
        tier = house.open(2 * NBYTES)
        assert house.keys() == {key(1), key(2)}

    def test_a_shrunk_drive_forgets_what_lies_beyond(self, house: House) -> None:
        tier = house.open(NBYTES)
        beyond = block(2, slot=(NBYTES - SEGMENT) // PAGE)
        house.write(tier, block(1), beyond, block(3, parent=key(2)))
        tier.forget([forget(block(9, slot=NBYTES // PAGE - 1), MoveProblem.EIO)])
        tier.close(DEADLINE_S)

        tier = house.open(NBYTES - SEGMENT)

        assert house.keys() == {key(1)}
        assert house.recovered.quarantined == ()
        assert house.file().nbytes == r.HEADER_NBYTES + NBYTES - SEGMENT
        tier.close(DEADLINE_S)
        house.open(NBYTES)
        assert house.keys() == {key(1)}  # what was cut off does not come back as zeros

    def test_no_room_at_creation_names_setting_and_space(self, tmp_path: Path) -> None:
        with small_file_system(tmp_path / "small", 1 << 20):
            house = House(tmp_path / "small", real_files=True)

            with pytest.raises(ConfigError, match="nvme_bytes"):
                house.make(64 * SEGMENT).open()

    def test_newer_formats_are_refused(self, house: House) -> None:
        house.open().close(DEADLINE_S)
        path = house.paths[0] / "blocks.kv"
        write_header(house.open_file(path), r.Header(r.FORMAT_VERSION + 1, b"i" * 16, SEGMENT))
        with pytest.raises(ConfigError, match=r"blocks\.kv has format version 2"):
            house.make().open()

        tables = IndexTables(house.paths[0] / "index")
        tables.open()
        tables.set_meta(r.Meta(r.FORMAT_VERSION + 1, b"i" * 16, SEGMENT, NBYTES))
        tables.close()
        with pytest.raises(ConfigError, match="index has format version 2"):
            house.make().open()

    def test_a_data_file_of_another_drive_is_refused(self, two: House) -> None:
        two.open().close(DEADLINE_S)
        first, second = (path / "blocks.kv" for path in two.paths)
        two.files[first], two.files[second] = two.files[second], two.files[first]

        with pytest.raises(ConfigError, match=r"blocks\.kv belongs to drive .*, index/ to "):
            two.make().open()


class TestDamage:
    @pytest.mark.parametrize("how", ["deleted", "emptied", "zeroed"])
    def test_a_lost_data_file_is_made_anew(self, house: House, how: str) -> None:
        tier = house.open()
        house.write(tier, block(1))
        tier.forget([forget(block(2), MoveProblem.EIO)])
        tier.close(DEADLINE_S)
        if how == "deleted":
            house.files.clear()
        else:
            house.file().resize(0)
            house.file().resize(0 if how == "emptied" else r.HEADER_NBYTES + NBYTES)

        tier = house.open()

        assert house.keys() == set()
        assert house.recovered.quarantined == ()  # those were bad places of another file
        house.write(tier, block(3))
        tier.close(DEADLINE_S)
        tier = house.open()
        assert house.keys() == {key(3)}

    def test_a_data_file_cut_short_loses_what_was_cut(self, house: House) -> None:
        tier = house.open()
        house.write(tier, block(1), block(2, slot=3 * SEGMENT // PAGE))
        tier.close(DEADLINE_S)
        house.file().resize(r.HEADER_NBYTES + 2 * SEGMENT + 5 * PAGE)

        tier = house.open()

        assert tier.drive_nbytes == (NBYTES,)
        assert house.keys() == {key(1)}
        house.write(tier, block(3, slot=3 * SEGMENT // PAGE))
        tier.close(DEADLINE_S)
        house.open()
        assert house.keys() == {key(1), key(3)}

    def test_a_lost_index_frees_all_slots(self, house: House) -> None:
        tier = house.open()
        house.write(tier, block(1))
        tier.close(DEADLINE_S)
        shutil.rmtree(house.paths[0] / "index")

        tier = house.open()

        assert house.keys() == set()
        house.write(tier, block(2))
        tier.close(DEADLINE_S)
        house.open()
        assert house.keys() == {key(2)}

    def test_a_damaged_header_turns_only_its_drive_off(self, two: House) -> None:
        tier = two.open()
        two.write(tier, block(1, drive=0), block(2, drive=1))
        tier.close(DEADLINE_S)
        two.file(0).flip(20)

        tier = two.open()

        assert [drive.state for drive in tier.drives()] == ["off", "ready"]
        assert "header is damaged; run kvstore check --repair" in health(tier).reason
        assert tier.drive_nbytes == (0, NBYTES)
        assert two.keys() == {key(2)}
        (record,) = records_of(two.recovered)
        assert two.read(tier, record).problem is None

    def test_a_damaged_index_turns_its_drive_off_and_is_not_wiped(self, two: House) -> None:
        tier = two.open()
        two.write(tier, block(1, drive=0), block(2, drive=1))
        tier.close(DEADLINE_S)
        data = two.paths[0] / "index" / "data.mdb"
        os.truncate(data, data.stat().st_size // 2)
        left = data.read_bytes()

        tier = two.open()

        assert health(tier).state == "off"
        assert "kvstore check --repair" in health(tier).reason
        assert data.read_bytes() == left
        assert two.keys() == {key(2)}

    def test_blocks_behind_those_of_a_drive_that_is_off_wait_for_it(self, two: House) -> None:
        chain = [block(number, drive=number % 2, parent=key(number - 1) if number else b"") for number in range(6)]
        tier = two.open()
        two.write(tier, *chain, block(7, drive=1))
        tier.close(DEADLINE_S)
        two.file(0).flip(20)
        tier = two.open()
        assert [drive.state for drive in tier.drives()] == ["off", "ready"]
        assert two.keys() == {key(7)}
        assert two.recovered.waiting == tuple((record.offset, record.nbytes) for record in chain[1::2])
        assert two.recovered.next_generation > max(record.generation for record in chain)
        tier.close(DEADLINE_S)
        two.file(0).flip(20)

        tier = two.open()

        assert two.keys() == {key(number) for number in (0, 1, 2, 3, 4, 5, 7)}
        assert two.recovered.waiting == ()
        assert all(two.read(tier, record).problem is None for record in records_of(two.recovered))

    def test_without_a_drive_in_the_settings_what_is_behind_its_blocks_goes(self, two: House) -> None:
        tier = two.open()
        two.write(tier, block(1, drive=0), block(2, drive=1, parent=key(1)))
        tier.close(DEADLINE_S)
        two.paths = two.paths[1:]

        two.open()

        assert (two.keys(), two.recovered.waiting) == (set(), ())
        assert health(two.tiers[-1]).state == "ready"

    def test_what_is_asked_of_a_drive_that_is_off_ends_at_once(self, two: House) -> None:
        two.open().close(DEADLINE_S)
        two.file(0).flip(20)
        tier = two.open()

        (end,) = two.write(tier, block(1, drive=0))
        tier.forget([forget(block(1, drive=0))])
        tier.touch([Touch(NAMESPACE, key(1), 0, 1, 1)])

        assert end.problem is MoveProblem.GONE
        assert two.ends.forgotten == [forget(block(1, drive=0))]

    def test_a_read_only_drive_is_off_and_the_others_work(self, tmp_path: Path) -> None:
        house = House(tmp_path, num_drives=2, real_files=True)
        house.paths[0].mkdir()
        with small_file_system(house.paths[0], 16 << 20):
            house.open().close(DEADLINE_S)
            house.close_files()
            subprocess.run(["mount", "-o", "remount,ro", str(house.paths[0])], check=True, timeout=20)

            tier = house.open()

            assert [drive.state for drive in tier.drives()] == ["off", "ready"]
            assert os.strerror(errno.EROFS) in health(tier).reason
            assert house.write(tier, block(1, drive=1))[0].problem is None
            assert tier.close(DEADLINE_S)
            house.close_files()

    def test_a_flipped_bit_is_never_served(self, house: House) -> None:
        tier = house.open()
        ends = house.write(tier, block(1), block(2))
        house.file().flip(r.HEADER_NBYTES + 1 * PAGE + 777)

        bad, good = (
            house.read(tier, block(number)._replace(checksum=end.checksum))
            for number, end in zip((1, 2), ends, strict=True)
        )

        assert bad.problem is MoveProblem.CHECKSUM
        assert good.problem is None
        assert health(tier).problems == {"checksum": 1}

    def test_damaged_entries_are_removed_and_counted(self, house: House) -> None:
        import lmdb

        tier = house.open()
        house.write(tier, block(1), block(2))
        tier.close(DEADLINE_S)
        with lmdb.open(str(house.paths[0] / "index"), max_dbs=8, lock=False) as env:
            table = env.open_db(b"blocks16")
            with env.begin(write=True, db=table) as txn:
                value = bytearray(txn.get(NAMESPACE + key(1)))
                value[0] ^= 1
                txn.put(NAMESPACE + key(1), bytes(value))

        tier = house.open()

        assert house.keys() == {key(2)}
        assert health(tier).problems == {"index": 1}


class TestFullDrive:
    def test_a_full_file_system_stops_writes_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The index's file system has no room: a real one, of 3 MiB."""
        monkeypatch.setattr(index_module, "INDEX_RETRY_S", 0.05)
        house = House(tmp_path)
        house.paths[0].mkdir()
        with small_file_system(house.paths[0], 3 << 20):
            tier = house.open()
            ends = house.write(tier, block(1))
            assert tier.flush(DEADLINE_S)
            filler = house.paths[0] / "filler"
            fill(filler)

            written = 2
            while health(tier).state != "degraded" and written < 200:
                assert house.write(tier, block(written))[0].problem in {None, MoveProblem.NO_SPACE}
                tier.flush(0.2)
                written += 1

            assert health(tier).state == "degraded"
            assert "index" in health(tier).reason
            assert os.strerror(errno.ENOSPC) in health(tier).reason
            assert house.write(tier, block(250))[0].problem is MoveProblem.NO_SPACE
            assert house.read(tier, block(1)._replace(checksum=ends[0].checksum)).problem is None
            filler.unlink()
            assert tier.flush(DEADLINE_S)
            assert health(tier).state == "ready"
            assert health(tier).problems["index"] >= 1
            assert house.write(tier, block(251))[0].problem is None
            assert tier.close(DEADLINE_S)

            tier = house.open()
            assert house.keys() == {key(number) for number in (*range(1, written), 251)}
            assert tier.close(DEADLINE_S)

    def test_a_restart_needs_no_room(self, tmp_path: Path) -> None:
        """On a file system without a free byte the blocks that are there are served."""
        house = House(tmp_path)
        house.paths[0].mkdir()
        with small_file_system(house.paths[0], 3 << 20):
            tier = house.open()
            house.write(tier, block(1))
            assert tier.close(DEADLINE_S)
            fill(house.paths[0] / "filler")

            tier = house.open()

            assert health(tier).state == "ready"
            (record,) = records_of(house.recovered)
            assert house.read(tier, record).problem is None
            assert tier.close(DEADLINE_S)

    def test_a_full_file_system_at_recovery_keeps_left_overs_out_of_the_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Entries that recovery drops cannot be removed; their slots are used all the same, and the newer entry wins."""
        monkeypatch.setattr(index_module, "INDEX_RETRY_S", 0.05)
        house = House(tmp_path)
        tier = house.open()
        house.write(tier, block(1), block(2, parent=key(1)), block(3))
        tier.forget([forget(block(1))])
        tier.close(DEADLINE_S)

        def refuse(*_: object) -> None:
            raise index_module.TierIOError("full", tier="nvme", errno=errno.ENOSPC)

        with monkeypatch.context() as patch:
            patch.setattr(IndexTables, "commit", refuse)
            tier = house.open()
            assert house.keys() == {key(3)}
            waited = threading.Event()
            while health(tier).state != "degraded":
                assert not waited.wait(0.01)
            assert house.write(tier, block(4, slot=2))[0].problem is MoveProblem.NO_SPACE
        assert tier.flush(DEADLINE_S)
        assert house.write(tier, block(4, slot=2))[0].problem is None
        assert tier.close(DEADLINE_S)

        house.open()

        assert house.keys() == {key(3), key(4)}


class TestClose:
    def test_a_drive_that_hangs_does_not_hold_us(self, two: House) -> None:
        tier = two.open()
        hangs, hang = threading.Event(), threading.Event()
        file = two.file(0)
        write_from = file.write_from

        def hanging(offset: int, views: Sequence[memoryview]) -> int:
            hangs.set()
            hang.wait(60.0)
            return write_from(offset, views)

        file.write_from = hanging  # type: ignore[method-assign]
        two.num_moves += 1
        tier.submit([Move(10_000, Urgency.WRITE, 0, block(1, drive=0))])
        two.write(tier, block(2, drive=1))
        assert hangs.wait(DEADLINE_S)

        assert not tier.close(1.0)

        hang.set()
        assert 10_000 not in two.ends.done  # no callback after close
        tables = IndexTables(two.paths[1] / "index")
        tables.open()
        assert tables.num_entries() == 1  # the other drive's block is durable
        tables.close()

    def test_twice_and_before_open(self, house: House) -> None:
        assert house.make().close(1.0)
        tier = house.open()
        assert tier.close(DEADLINE_S)
        assert tier.close(DEADLINE_S)


class TestRecovering:
    def test_states_before_and_after(self, house: House) -> None:
        tier = house.make()
        assert health(tier).state == "off"
        tier.open()
        assert health(tier).state == "recovering"
        tier.recover()
        assert health(tier) == DriveHealth(house.paths[0], "ready", "", NBYTES, {})


class TestMerge:
    """Against a plain rendering of the same rules, on random entries of which many make no sense."""

    @pytest.mark.parametrize("seed", range(30))
    def test_merge_agrees_with_the_plain_rules(self, seed: int) -> None:
        rng = random.Random(seed)
        specs = [spec(weights="a"), spec(weights="b", pages=3), spec(weights="c", digest_nbytes=32)]
        named = {
            item.namespace(): r.Namespace("", item.canonical(), item.block_nbytes, item.hash.digest_nbytes)
            for item in specs
        }
        known = dict(list(named.items())[: rng.choice((2, 3, 3))])
        clustered = rng.random() < 0.3  # keys whose first 8 bytes are alike, as an engine may have them
        drives = [
            random_drive(rng, drive, named, known, clustered=clustered) for drive in range(rng.choice((1, 1, 2, 3)))
        ]

        recovered, erase = merge([scan for scan, _ in drives], segment_bytes=SEGMENT)

        expected, dropped = plain_merge([(scan, rows) for scan, rows in drives])
        found = {}
        for blocks in recovered.namespaces:
            namespace = next(name for name, item in named.items() if item.canonical == blocks.canonical)
            seen: set[bytes] = set()
            for name, parent, offset, generation in zip(
                blocks.keys, blocks.parents, blocks.offsets.tolist(), blocks.generations.tolist(), strict=True
            ):
                assert parent == b"" or parent in seen, "a child before its parent"
                seen.add(name)
                found[namespace, name] = (parent, offset, generation)
        assert found == expected
        for drive, entries in erase.items():
            tables = [(entry.table, entry.key) for entry in entries if entry.table.startswith("blocks")]
            assert len(set(tables)) == len(tables)
            assert set(tables) == dropped[drive]
        generations = [row.generation for _, rows in drives for row in rows]
        assert recovered.next_generation == max(generations, default=0) + 1

    def test_nothing_comes_of_nothing(self) -> None:
        empty = Scan({16: no_rows(16), 32: no_rows(32)}, {}, [], {}, [])

        recovered, erase = merge([DriveScan(0, empty, NBYTES)], segment_bytes=SEGMENT)

        assert recovered == Recovered((), (), 1, {})
        assert erase == {0: []}

    def test_a_circle_of_parents_ends(self) -> None:
        rows = [block(1, parent=key(2)), block(2, parent=key(1)), block(3, parent=key(1)), block(4)]
        scan = scan_of(rows, {NAMESPACE: r.Namespace("", b"", SPEC.block_nbytes, 16)})

        recovered, erase = merge([DriveScan(0, scan, NBYTES)], segment_bytes=SEGMENT)

        assert [blocks.keys for blocks in recovered.namespaces] == [[key(4)]]
        assert len(erase[0]) == 3

    def test_a_long_chain_comes_in_order(self) -> None:
        count = 70_000  # deeper than 16 bits
        chain = [
            BlockRecord(NAMESPACE, key(i), key(i - 1) if i else b"", i * PAGE, SPEC.block_nbytes, 1, 0, 0, 0)
            for i in range(count)
        ]
        random.Random(1).shuffle(chain)
        scan = scan_of(chain, {NAMESPACE: r.Namespace("", b"", SPEC.block_nbytes, 16)})

        recovered, _ = merge([DriveScan(0, scan, -(-count * PAGE // SEGMENT) * SEGMENT)], segment_bytes=SEGMENT)

        assert recovered.namespaces[0].keys == [key(i) for i in range(count)]

    def test_quarantined_slots_that_fit_no_longer_are_released(self) -> None:
        slots = [
            r.Quarantined(0, PAGE, "eio"),
            r.Quarantined(NBYTES - PAGE, 2 * PAGE, "eio"),  # beyond the end
            r.Quarantined(PAGE, 2 * PAGE, "eio"),  # its segment has slots of one page
            r.Quarantined(SEGMENT + PAGE, PAGE, "eio"),
        ]
        scan = scan_of([block(5)], {NAMESPACE: r.Namespace("", b"", SPEC.block_nbytes, 16)})._replace(quarantined=slots)

        recovered, erase = merge([DriveScan(1, scan, NBYTES)], segment_bytes=SEGMENT)

        assert recovered.quarantined == ((1 << DRIVE_SHIFT, PAGE), (1 << DRIVE_SHIFT | SEGMENT + PAGE, PAGE))
        assert [entry.key for entry in erase[1]] == [r.encode_quarantined(slot)[0] for slot in slots[1:3]]

    def test_of_two_in_one_place_the_later_stays(self) -> None:
        offsets = np.array([0, 0, PAGE, 2 * PAGE, SEGMENT - PAGE, -PAGE, 100, SEGMENT, SEGMENT, NBYTES], np.int64)
        widths = np.array([PAGE, PAGE, PAGE, 2 * PAGE, PAGE, PAGE, PAGE, PAGE, 3 * PAGE, PAGE], np.int64)
        generations = np.array([5, 9, 1, 2, 3, 1, 1, 8, 7, 1], np.uint64)

        fits = fitting(offsets, widths, generations, nbytes=NBYTES, segment_bytes=SEGMENT)

        assert fits.tolist() == [False, True, True, False, True, False, False, True, False, False]


def no_rows(digest_nbytes: int) -> r.Rows:
    return r.encode_rows([], digest_nbytes, OFFSET_MASK)


def scan_of(records: Sequence[BlockRecord], known: dict[bytes, r.Namespace]) -> Scan:
    rows = {}
    for digest_nbytes in r.DIGEST_NBYTES:
        mine = [record for record in records if len(record.key) == digest_nbytes]
        mine.sort(key=lambda record: record.namespace + record.key)
        rows[digest_nbytes] = r.encode_rows(mine, digest_nbytes, OFFSET_MASK)
    return Scan(rows, known, [], {}, [])


def random_drive(
    rng: random.Random, drive: int, named: dict[bytes, r.Namespace], known: dict[bytes, r.Namespace], *, clustered: bool
) -> tuple[DriveScan, list[BlockRecord]]:
    found: dict[tuple[bytes, bytes], BlockRecord] = {}
    for _ in range(rng.choice((0, 5, 60))):
        namespace, item = rng.choice(list(named.items()))
        numbers = [rng.randrange(25) for _ in range(2)]
        pair = [key(number, item.digest_nbytes) for number in numbers]
        if clustered:
            pair = [b"\0" * 8 + name[8:] for name in pair]
        width = -(-item.nbytes // PAGE)
        segment = rng.randrange(5)
        slot = rng.randrange(SEGMENT // PAGE // width + rng.choice((0, 0, 0, 1)))
        found[namespace, pair[0]] = BlockRecord(
            namespace,
            pair[0],
            pair[1] if numbers[1] < numbers[0] and rng.random() < 0.6 else b"",
            segment * SEGMENT + slot * width * PAGE,
            item.nbytes - rng.choice((0, 0, 0, 0, 0, 0, 1)),
            rng.randrange(1, 2**40) * 8 + drive,
            0,
            0,
            0,
        )
    records = list(found.values())
    return DriveScan(drive, scan_of(records, known), 4 * SEGMENT), records


def plain_merge(
    drives: list[tuple[DriveScan, list[BlockRecord]]],
) -> tuple[dict[tuple[bytes, bytes], tuple[bytes, int, int]], dict[int, set[tuple[str, bytes]]]]:
    """The rules of recovery.py, one entry after the other."""
    kept: dict[tuple[bytes, bytes], tuple[bytes, int, int]] = {}
    entries = set()
    for scan, records in drives:
        entries |= {(scan.drive, BLOCK_TABLES[len(row.key)], row.namespace + row.key) for row in records}
        usable = [
            row
            for row in records
            if (item := scan.scan.namespaces.get(row.namespace)) is not None and item.nbytes == row.nbytes
        ]
        width = {id(row): -(-row.nbytes // PAGE) * PAGE for row in usable}
        inside = [
            row
            for row in usable
            if row.offset + width[id(row)] <= scan.nbytes
            and row.offset % SEGMENT % width[id(row)] == 0
            and row.offset % SEGMENT + width[id(row)] <= SEGMENT
        ]
        by_age = sorted(inside, key=lambda row: row.generation)
        width_of = {row.offset // SEGMENT: width[id(row)] for row in by_age}
        by_slot = {row.offset: row for row in by_age if width_of[row.offset // SEGMENT] == width[id(row)]}
        for row in by_slot.values():
            copy = row.parent, scan.drive << DRIVE_SHIFT | row.offset, row.generation
            old = kept.get((row.namespace, row.key))
            if old is None or old[2] < row.generation:
                kept[row.namespace, row.key] = copy
    while orphans := [name for name, (parent, _, _) in kept.items() if parent and (name[0], parent) not in kept]:
        for name in orphans:
            del kept[name]
    dropped: dict[int, set[tuple[str, bytes]]] = {scan.drive: set() for scan, _ in drives}
    for drive, table, raw in entries:
        copy = kept.get((raw[:16], raw[16:]))
        if copy is None or copy[1] >> DRIVE_SHIFT != drive:
            dropped[drive].add((table, raw))
    return kept, dropped


@contextlib.contextmanager
def small_file_system(path: Path, nbytes: int) -> Iterator[None]:
    """A tmpfs of `nbytes` at `path`; skips where we may not mount."""
    path.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(path)],
        capture_output=True,
        timeout=20,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=20)


def fill(path: Path) -> None:
    """Take all the space there is."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(PAGE))
