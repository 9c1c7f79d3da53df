"""`kvstore check`: it finds what was done to a drive, changes nothing unasked, and leaves a clean drive when told to repair."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from click.testing import CliRunner
from small_drive import NAMESPACE, PAGE, SEGMENT, SPEC, key
from test_nvme_tier import DEADLINE_S, NBYTES, House, block, forget

from kvstore.cli.check import check
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.moves import MoveProblem
from kvstore.tiers.nvme import records as r
from kvstore.tiers.nvme.check import CheckReport, check_drive
from kvstore.tiers.nvme.directory import write_header


class CheckedHouse(House):
    """One drive with ten blocks, closed; `check` looks at it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        tier = self.open()
        self.write(tier, *(block(number, parent=key(number - 1) if number else b"") for number in range(10)))
        assert tier.close(DEADLINE_S)
        (self.paths[0] / "blocks.kv").touch()  # the FaultyFile lies in RAM; the check looks for the name
        self.seen: list[tuple[int, int]] = []

    def check(self, *, repair: bool = False) -> CheckReport:
        self.seen.clear()
        report = check_drive(
            self.paths[0], repair=repair, progress=lambda *done: self.seen.append(done), open_file=self.open_file
        )
        assert report.used_bytes + report.quarantined_bytes + report.free_bytes == report.capacity_bytes
        return report

    def edit(self, table: str, name: bytes, value: bytes) -> None:
        with lmdb.open(str(self.paths[0] / "index"), max_dbs=8, lock=False) as env:
            handle = env.open_db(table.encode())
            with env.begin(write=True) as txn:
                txn.put(name, value, db=handle)

    def keys_after(self) -> set[bytes]:
        tier = self.open()
        keys = self.keys()
        assert tier.close(DEADLINE_S)
        return keys


@pytest.fixture
def house(tmp_path: Path) -> Iterator[CheckedHouse]:
    house = CheckedHouse(tmp_path)
    yield house
    for tier in house.tiers:
        tier.close(DEADLINE_S)


def entry(slot: int, number: int, **fields: int) -> tuple[bytes, bytes]:
    record = block(number, slot=slot)._replace(**fields)
    (item,) = r.row_items(r.encode_rows([record], 16, 2**48 - 1))
    return item


class TestCheck:
    def test_a_whole_drive_is_clean(self, house: CheckedHouse) -> None:
        report = house.check()

        assert report.is_clean
        assert (report.num_blocks, report.used_bytes, report.capacity_bytes) == (10, 10 * PAGE, NBYTES)
        (namespace,) = report.namespaces
        assert namespace == (NAMESPACE.hex(), "tenant", SPEC.block_nbytes, 10)
        assert house.seen[0] == (0, 10 * SPEC.block_nbytes)
        assert house.seen[-1] == (10 * SPEC.block_nbytes, 10 * SPEC.block_nbytes)

    def test_several_reads_are_in_flight(self, house: CheckedHouse) -> None:
        import threading

        together = threading.Barrier(4, timeout=DEADLINE_S)  # breaks unless four reads meet in it
        file = house.file()
        read_into = file.read_into

        def meet(offset: int, views: list[memoryview]) -> int:
            if PAGE <= offset < PAGE * 9:
                together.wait()
            return read_into(offset, views)

        file.read_into = meet  # type: ignore[method-assign]

        assert house.check().is_clean

    def test_a_flipped_bit_is_found_and_its_block_removed(self, house: CheckedHouse) -> None:
        house.file().flip(r.HEADER_NBYTES + 4 * PAGE + 1234)

        report = house.check()

        assert report.problems == {"checksum": 1}
        assert report.findings[0].detail.startswith(f"block {key(4).hex()} at {4 * PAGE}")
        assert report.num_blocks == 9
        assert report.repaired == {}
        assert house.check().problems == {"checksum": 1}  # nothing was changed
        repaired = house.check(repair=True)
        assert repaired.repaired == {"entries removed": 1}  # and its slot is good, since it takes a pattern
        assert house.check().is_clean
        assert house.keys_after() == {key(number) for number in range(4)}  # what comes after it lacks its parent

    def test_bytes_behind_a_block_are_nobodys(self, house: CheckedHouse) -> None:
        house.file().flip(r.HEADER_NBYTES + 4 * PAGE + SPEC.block_nbytes)

        assert house.check().is_clean

    def test_a_sector_that_cannot_be_read_is_quarantined(self, house: CheckedHouse) -> None:
        for verb in ("read", "write"):
            house.file().fail(verb, errno.EIO, offset=r.HEADER_NBYTES + 9 * PAGE, nbytes=PAGE)

        report = house.check(repair=True)

        assert report.problems == {"eio": 1}
        assert report.repaired == {"entries removed": 1, "slots quarantined": 1}
        assert report.quarantined_bytes == PAGE
        again = house.check(repair=True)
        assert again.is_clean
        assert again.num_quarantined == 1
        house.file().heal()
        assert house.check(repair=True).repaired == {"slots released": 1}
        assert house.check().num_quarantined == 0

    def test_a_short_read_is_found(self, house: CheckedHouse) -> None:
        house.file().shorten("read", 512, offset=r.HEADER_NBYTES + 3 * PAGE, nbytes=PAGE)

        assert house.check().problems == {"short": 1}

    def test_a_slot_that_loses_what_it_is_given_stays_in_quarantine(self, house: CheckedHouse) -> None:
        tier = house.open()
        tier.forget([forget(block(9), MoveProblem.CHECKSUM), forget(block(8), MoveProblem.CHECKSUM)])
        assert tier.close(DEADLINE_S)
        file = house.file()
        write_from = file.write_from

        def forgetful(offset: int, views: list[memoryview]) -> int:
            done = write_from(offset, views)
            if offset == r.HEADER_NBYTES + 9 * PAGE:
                file.flip(offset + 100)
            return done

        file.write_from = forgetful  # type: ignore[method-assign]

        report = house.check(repair=True)

        assert report.is_clean
        assert report.num_quarantined == 1
        assert report.repaired == {"slots released": 1}

    def test_entries_that_make_no_sense_are_found_and_removed(self, house: CheckedHouse) -> None:
        name, value = entry(20, 20)
        house.edit("blocks16", name, value[:5] + bytes([value[5] ^ 1]) + value[6:])
        house.edit("blocks16", *entry(NBYTES // PAGE, 21))  # beyond the end
        house.edit("blocks16", *entry(3, 22, generation=1))  # in the place of a later block
        house.edit("blocks16", *entry(23, 23, nbytes=SPEC.block_nbytes - 1))
        name, value = entry(24, 24)
        house.edit("quarantine", *r.encode_quarantined(r.Quarantined(NBYTES, PAGE, "eio")))
        house.edit("quarantine", b"12345678", b"rubbish")

        report = house.check()

        assert report.problems == {"entry": 2, "slot": 2, "namespace": 1, "quarantine": 1}
        assert report.num_blocks == 10
        house.check(repair=True)
        assert house.check().is_clean
        assert house.keys_after() == {key(number) for number in range(10)}

    def test_a_damaged_namespace_record_costs_its_blocks(self, house: CheckedHouse) -> None:
        house.edit("namespaces", NAMESPACE, r.encode_namespace("tenanT", SPEC.canonical()))

        assert house.check().problems == {"entry": 1, "namespace": 10}
        house.check(repair=True)
        assert house.check().is_clean
        assert house.keys_after() == set()

    def test_a_damaged_header_is_written_again(self, house: CheckedHouse) -> None:
        house.file().flip(30)

        report = house.check()

        assert report.problems == {"header": 1}
        assert report.num_blocks == 10  # they check themselves
        assert house.check(repair=True).repaired == {"header written": 1}
        assert house.keys_after() == {key(number) for number in range(10)}

    @pytest.mark.parametrize("how", ["cut", "rubbish", "gone"])
    def test_an_unreadable_index_is_made_anew_empty(self, house: CheckedHouse, how: str) -> None:
        data = house.paths[0] / "index" / "data.mdb"
        if how == "cut":
            os.truncate(data, 5000)
        elif how == "rubbish":
            data.write_bytes(os.urandom(1 << 16))
        else:
            shutil.rmtree(data.parent)

        assert house.check().problems == {"index": 1}
        assert (data.parent.exists()) == (how != "gone")
        report = house.check(repair=True)
        assert report.repaired == {"index made anew, empty": 1}
        assert (report.capacity_bytes, report.num_blocks) == (NBYTES, 0)
        assert house.check().is_clean
        tier = house.open()
        assert tier.drives()[0].state == "ready"
        house.write(tier, block(3))
        tier.close(DEADLINE_S)
        assert house.keys_after() == {key(3)}

    def test_an_index_of_another_lmdb_is_left_alone(self, house: CheckedHouse) -> None:
        data = house.paths[0] / "index" / "data.mdb"
        content = bytearray(data.read_bytes())
        for page in (0, 1):
            content[page * PAGE + 20] = 77  # the format's version in a meta page
        data.write_bytes(content)

        with pytest.raises(TierIOError, match=r"v77 is not supported|VERSION_MISMATCH|MDB_INVALID"):
            house.check(repair=True)

        assert data.read_bytes() == content

    @pytest.mark.parametrize("how", ["missing", "empty", "short"])
    def test_a_data_file_that_lacks_something_is_made_whole(self, house: CheckedHouse, how: str) -> None:
        path = house.paths[0] / "blocks.kv"
        if how == "missing":
            path.unlink()
            house.files.clear()
        else:
            house.file().resize(0 if how == "empty" else r.HEADER_NBYTES + SEGMENT)

        report = house.check()

        assert report.problems["data_file"] >= 1
        assert report.num_blocks == (10 if how == "short" else 0)
        assert path.exists() == (how != "missing")
        house.check(repair=True)
        path.touch()
        again = house.check()
        assert again.is_clean
        assert again.capacity_bytes == NBYTES

    def test_a_drive_in_use_and_other_directories_are_not_looked_at(self, house: CheckedHouse, tmp_path: Path) -> None:
        tier = house.open()
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            house.check()
        tier.close(DEADLINE_S)
        with pytest.raises(ConfigError, match="holds neither"):
            check_drive(tmp_path, repair=True, progress=lambda *_: None)
        write_header(house.file(), r.Header(r.FORMAT_VERSION, b"x" * 16, SEGMENT))
        with pytest.raises(ConfigError, match="belongs to drive"):
            house.check(repair=True)
        write_header(house.file(), r.Header(r.FORMAT_VERSION + 1, b"x" * 16, SEGMENT))
        with pytest.raises(ConfigError, match="format version 2"):
            house.check(repair=True)

    def test_blocks_longer_than_one_read_are_checked_whole(
        self, house: CheckedHouse, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from small_drive import spec

        wide = spec(weights="wide", pages=5)
        tier = house.open()
        tier.add_namespace(wide.namespace(), "", wide.canonical())
        record = block(40)._replace(namespace=wide.namespace(), offset=SEGMENT, nbytes=wide.block_nbytes)
        house.write(tier, record)
        tier.close(DEADLINE_S)
        monkeypatch.setattr("kvstore.tiers.nvme.check.MAX_IO_BYTES", 2 * PAGE)
        assert house.check().is_clean

        house.file().flip(r.HEADER_NBYTES + SEGMENT + wide.block_nbytes - 1)

        assert house.check().problems == {"checksum": 1}


class TestCommand:
    @pytest.fixture
    def drive(self, tmp_path: Path) -> Path:
        house = House(tmp_path, real_files=True)
        tier = house.open()
        house.write(tier, *(block(number) for number in range(10)))
        assert tier.close(DEADLINE_S)
        house.close_files()
        return house.paths[0]

    def test_exit_codes_and_both_forms(self, drive: Path) -> None:
        clean = CliRunner().invoke(check, [str(drive)])
        assert clean.exit_code == 0, clean.output
        assert "10 blocks are whole" in clean.output
        with (drive / "blocks.kv").open("r+b") as file:
            file.seek(r.HEADER_NBYTES + 2 * PAGE)
            file.write(b"not what was there")

        damaged = CliRunner().invoke(check, [str(drive), "--json"])
        assert damaged.exit_code == 1
        fields = json.loads(damaged.stdout)
        assert fields["problems"] == {"checksum": 1}
        assert not fields["clean"]
        assert fields["num_blocks"] == 9
        told = CliRunner().invoke(check, [str(drive)])
        assert f"checksum: block {key(2).hex()}" in told.output
        assert "--repair" in told.output

        repaired = CliRunner().invoke(check, [str(drive), "--repair"])
        assert repaired.exit_code == 1
        assert "repaired: entries removed: 1" in repaired.output
        assert CliRunner().invoke(check, [str(drive), "--json"]).exit_code == 0

    def test_what_cannot_be_looked_at_is_two(self, drive: Path, tmp_path: Path) -> None:
        house = House(tmp_path, real_files=True)
        tier = house.open()
        for directory, text in ((drive, f"in use by process {os.getpid()}"), (tmp_path, "holds neither")):
            ended = subprocess.run(
                [sys.executable, "-m", "kvstore.cli.main", "check", str(directory)],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert ended.returncode == 2
            assert text in ended.stderr
            assert "Traceback" not in ended.stderr
        assert tier.close(DEADLINE_S)
        house.close_files()
