"""The index of a drive: its bytes, its order of commits, what it does when the drive does not take them."""

import errno
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash
from small_drive import NAMESPACE, PAGE, SPEC, forget, key, record, spec

from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Forget, MoveProblem, Touch
from kvstore.tiers.nvme import index as index_module
from kvstore.tiers.nvme import records as r
from kvstore.tiers.nvme.file import problem_of
from kvstore.tiers.nvme.index import DriveIndex
from kvstore.tiers.nvme.lmdb_pages import require_sound
from kvstore.tiers.nvme.tables import KEPT_HOURS, OFFSET_MASK, Erase, IndexTables, Op

ENCODED_NAMESPACE = r.encode_namespace("tenant", SPEC.canonical())
NAMESPACES = {NAMESPACE: ENCODED_NAMESPACE}


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[IndexTables]:
    opened = IndexTables(tmp_path / "index")
    opened.open()
    yield opened
    opened.close()


def scanned(tables: IndexTables) -> dict[bytes, np.void]:
    """key -> row"""
    return {row["key"].tobytes(): row for rows in tables.scan().rows.values() for row in rows}


class TestRecords:
    @pytest.mark.parametrize("digest_nbytes", r.DIGEST_NBYTES)
    def test_rows_come_back_as_they_were(self, digest_nbytes: int) -> None:
        first = record(1)._replace(key=key(1, digest_nbytes), offset=3 << DRIVE_SHIFT | 8 * PAGE, hits=2**40)
        child = record(2)._replace(key=key(2, digest_nbytes), parent=first.key)

        rows = r.encode_rows([first, child], digest_nbytes, OFFSET_MASK)
        again = r.decode_rows(b"".join(itertools.chain.from_iterable(r.row_items(rows))), digest_nbytes)

        assert r.intact(again).all()
        assert again["offset"].tolist() == [8 * PAGE, child.offset]  # the drive is not stored
        assert again["hits"].tolist() == [2**32 - 1, child.hits]
        assert again["parent"].tolist() == [first.key, first.key]  # a first block is its own parent
        for name in ("namespace", "key", "generation", "checksum", "last_use", "nbytes"):
            assert again[name].tolist() == [getattr(first, name), getattr(child, name)]

    @pytest.mark.parametrize("digest_nbytes", r.DIGEST_NBYTES)
    def test_every_flipped_bit_of_a_row_is_noticed(self, digest_nbytes: int) -> None:
        good = r.encode_rows([record(1)._replace(key=key(1, digest_nbytes))], digest_nbytes, OFFSET_MASK).tobytes()
        bits = 8 * len(good)

        flipped = np.tile(np.frombuffer(good, np.uint8), (bits, 1))
        flipped[np.arange(bits), np.arange(bits) // 8] ^= (1 << np.arange(bits) % 8).astype(np.uint8)

        assert not r.intact(r.decode_rows(flipped.tobytes(), digest_nbytes)).any()

    def test_zeros_are_no_row(self) -> None:
        for digest_nbytes in r.DIGEST_NBYTES:
            assert not r.intact(r.decode_rows(bytes(r.ROW_DTYPES[digest_nbytes].itemsize), digest_nbytes)).any()

    def test_rows_are_as_long_as_the_format_says(self) -> None:
        assert [r.value_nbytes(digest) for digest in (16, 32)] == [64, 80]

    def test_header_and_meta_come_back_and_every_flip_and_truncation_is_noticed(self) -> None:
        header = r.Header(r.FORMAT_VERSION, b"d" * 16, 1 << 20)
        meta = r.Meta(r.FORMAT_VERSION, b"d" * 16, 1 << 20, 1 << 30)
        page, packed = r.encode_header(header), r.encode_meta(meta)

        assert len(page) == SLOT_ALIGN_BYTES
        assert r.decode_header(page) == header
        assert r.decode_meta(packed) == meta
        used = len(page.rstrip(b"\0"))
        for data, decode, known in ((page[:used], _padded_header, header), (packed, r.decode_meta, meta)):
            for bit in range(8 * len(data)):
                wrong = bytearray(data)
                wrong[bit // 8] ^= 1 << bit % 8
                found = decode(bytes(wrong))
                assert found is None or found.version > r.FORMAT_VERSION  # which is refused by its number
                assert found != known
        for length in range(len(packed)):
            assert r.decode_meta(packed[:length]) is None
        for length in range(used):
            assert _padded_header(page[:length]) is None
        assert r.decode_header(page[:-1]) is None

    def test_a_newer_version_is_named(self) -> None:
        page = r.encode_header(r.Header(r.FORMAT_VERSION + 1, b"d" * 16, 5))

        header = r.decode_header(page[:16] + os.urandom(48) + page[64:])  # whatever its other fields may be

        assert header is not None
        with pytest.raises(ConfigError, match=f"version {r.FORMAT_VERSION + 1}.*up to {r.FORMAT_VERSION}"):
            r.require_known_version(header.version, "blocks.kv")

    def test_a_namespace_checks_itself(self) -> None:
        decoded = r.decode_namespace(NAMESPACE, ENCODED_NAMESPACE)

        assert decoded == r.Namespace("tenant", SPEC.canonical(), SPEC.block_nbytes, 16)
        for length in range(len(ENCODED_NAMESPACE)):
            assert r.decode_namespace(NAMESPACE, ENCODED_NAMESPACE[:length]) is None
        for position in range(len(ENCODED_NAMESPACE)):
            wrong = bytearray(ENCODED_NAMESPACE)
            wrong[position] ^= 4
            assert r.decode_namespace(NAMESPACE, bytes(wrong)) is None
        assert r.decode_namespace(spec(weights="v").namespace("tenant"), ENCODED_NAMESPACE) is None

    def test_a_quarantined_slot_checks_itself(self) -> None:
        slot = r.Quarantined(3 * PAGE, 2 * PAGE, "eio")
        name, value = r.encode_quarantined(slot)

        assert r.decode_quarantined(name, value) == slot
        for length in range(len(value)):
            assert r.decode_quarantined(name, value[:length]) is None
        for position in range(len(name) + len(value)):
            wrong = bytearray(name + value)
            wrong[position] ^= 1
            assert r.decode_quarantined(bytes(wrong[:8]), bytes(wrong[8:])) is None

    def test_bytes_of_an_hour_come_back(self) -> None:
        assert r.decode_written(*r.encode_written(490_000, 77)) == (490_000, 77)
        assert r.decode_written(b"short", b"12345678") is None
        assert r.decode_written(*r.encode_written(490_000, 77)[:1], b"1234567") is None


class TestWorkedExample:
    def test_the_document_has_the_bytes_that_we_make(self) -> None:
        example = KVSpec(weights="example", num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16")
        namespace = example.namespace("acme")
        first, second = example.hash.hash_blocks(list(range(32)))
        checksums = [xxhash.xxh3_64_intdigest(bytes([fill]) * example.block_nbytes) for fill in (0, 1)]
        blocks = [
            BlockRecord(namespace, first, b"", 0, 1024, 7, checksums[0], 41, 2),
            BlockRecord(namespace, second, first, 4096, 1024, 8, checksums[1], 40, 0),
        ]
        drive_id = bytes(range(16))
        pairs = [
            *r.row_items(r.encode_rows(blocks, 16, OFFSET_MASK)),
            (b"", r.encode_header(r.Header(1, drive_id, 64 << 20))[:48]),
            (b"", r.encode_meta(r.Meta(1, drive_id, 64 << 20, 1 << 30))),
            r.encode_quarantined(r.Quarantined(8192, 1024, "checksum")),
            r.encode_written(495528, 8192),
        ]
        document = (Path(r.__file__).parent / "FORMAT.md").read_text().partition("## 5.")[2]
        words = "".join(re.findall(r"\b(?:[0-9a-f]{8}){1,8}\b", document))

        for part in (namespace, first, second, *(part for pair in pairs for part in pair)):
            assert part.hex() in words


def _put_in_hundreds(tables: IndexTables, first: int, end: int) -> None:
    for number in range(first, end, 100):
        tables.commit([record(number + i) for i in range(100)], NAMESPACES, 1)


def _padded_header(data: bytes) -> r.Header | None:
    return r.decode_header(data.ljust(SLOT_ALIGN_BYTES, b"\0"))


class TestTables:
    def test_changes_apply_in_their_order(self, tables: IndexTables) -> None:
        old, new = record(1, slot=1, generation=1), record(1, slot=2, generation=2)

        tables.commit([old, forget(old), new, Touch(NAMESPACE, new.key, new.offset, 99, 7)], NAMESPACES, 1)

        (row,) = scanned(tables).values()
        assert (row["offset"], row["generation"], row["last_use"], row["hits"]) == (2 * PAGE, 2, 99, 7)

    def test_a_forget_of_an_older_copy_leaves_the_newer(self, tables: IndexTables) -> None:
        old, new = record(1, slot=1, generation=1), record(1, slot=2, generation=2)

        tables.commit([new, forget(old)], NAMESPACES, 1)

        assert list(scanned(tables)) == [new.key]

    def test_a_touch_of_another_slot_or_of_nothing_changes_nothing(self, tables: IndexTables) -> None:
        held = record(1)
        tables.commit([held], NAMESPACES, 1)

        tables.commit([Touch(NAMESPACE, held.key, 5 * PAGE, 99, 7), Touch(NAMESPACE, key(2), 0, 99, 7)], NAMESPACES, 1)

        assert [int(row["last_use"]) for row in scanned(tables).values()] == [held.last_use]

    def test_a_problem_quarantines_the_slot_with_the_removal(self, tables: IndexTables) -> None:
        bad = record(4)._replace(offset=2 << DRIVE_SHIFT | 4 * PAGE)
        tables.commit([bad], NAMESPACES, 1)

        tables.commit([forget(bad, MoveProblem.CHECKSUM)], NAMESPACES, 1)

        scan = tables.scan()
        assert not len(scan.rows[16])
        assert scan.quarantined == [r.Quarantined(4 * PAGE, SPEC.block_nbytes, "checksum")]

    def test_a_namespace_is_written_with_its_first_block_and_again_after_its_removal(self, tables: IndexTables) -> None:
        tables.commit([Touch(NAMESPACE, key(1), 0, 1, 1)], NAMESPACES, 1)
        assert tables.scan().namespaces == {}

        for _ in range(2):
            tables.commit([record(1)], NAMESPACES, 1)
            assert list(tables.scan().namespaces) == [NAMESPACE]
            tables.commit([Erase("namespaces", NAMESPACE)], {}, 1)
            assert tables.scan().namespaces == {}

    def test_bytes_are_counted_by_hour_and_the_last_25_kept(self, tables: IndexTables) -> None:
        for hour in range(100, 130):
            tables.commit([record(hour)], NAMESPACES, hour)
        tables.commit([record(1), record(2)], NAMESPACES, 129)

        written = tables.scan().written

        assert sorted(written) == list(range(130 - KEPT_HOURS, 130))
        assert written[128] == PAGE  # the slot, not the block's bytes
        assert written[129] == 3 * PAGE

    def test_hours_far_ahead_of_the_clock_are_forgotten(self, tables: IndexTables) -> None:
        """The clock was wrong when they were written down; a budget must not count them for years."""
        for hour in (100, 1_000_000, 101):
            tables.commit([record(hour)], NAMESPACES, hour)
        assert tables.scan().written == {101: PAGE}

    def test_damaged_entries_are_named_and_the_others_read(self, tables: IndexTables, tmp_path: Path) -> None:
        tables.commit([record(number) for number in range(20)], NAMESPACES, 1)
        tables.close()
        with lmdb.open(str(tmp_path / "index"), max_dbs=8, lock=False) as env:
            blocks, quarantine = env.open_db(b"blocks16"), env.open_db(b"quarantine")
            with env.begin(write=True) as txn:
                value = bytearray(txn.get(NAMESPACE + key(3), db=blocks))
                value[2] ^= 1
                txn.put(NAMESPACE + key(3), bytes(value), db=blocks)
                txn.put(NAMESPACE + key(4), b"longer than it may be".ljust(68), db=blocks)
                txn.put(NAMESPACE + key(5), b"short".ljust(60), db=blocks)
                txn.put(b"odd", b"", db=blocks)
                txn.put(b"odd", b"", db=quarantine)
        tables.open()

        scan = tables.scan()

        wrong = {NAMESPACE + key(number) for number in (3, 4, 5)} | {b"odd"}
        assert {(erase.table, erase.key) for erase in scan.damaged} == {("blocks16", name) for name in wrong} | {
            ("quarantine", b"odd")
        }
        assert {row["key"].tobytes() for row in scan.rows[16]} == {key(number) for number in range(20)} - {
            key(number) for number in (3, 4, 5)
        }
        tables.commit(scan.damaged, {}, 1)
        assert tables.scan().damaged == []

    def test_the_map_grows_when_it_is_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvstore.tiers.nvme.tables._FIRST_MAP_BYTES", 64 << 10)
        tables = IndexTables(tmp_path / "index")
        tables.open()

        tables.commit([record(number) for number in range(5000)], NAMESPACES, 1)

        assert tables.num_entries() == 5000
        tables.close()

    def test_a_limit_of_file_size_is_an_error_that_passes(self, tables: IndexTables) -> None:
        """As a full file system, for machines on which nothing may be mounted."""
        tables.commit([record(number) for number in range(100)], NAMESPACES, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tables.path / "data.mdb").stat().st_size, hard))
        try:
            with pytest.raises(TierIOError) as caught:
                _put_in_hundreds(tables, 100, 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert problem_of(OSError(caught.value.fields["errno"], "")) is MoveProblem.NO_SPACE
        held = set(scanned(tables))

        tables.reopen()
        assert set(scanned(tables)) == held
        assert held >= {key(number) for number in range(100)}
        tables.commit([record(number) for number in range(5000)], NAMESPACES, 1)

        assert len(scanned(tables)) == 5000

    def test_both_lengths_of_keys_live_side_by_side(self, tables: IndexTables) -> None:
        wide = spec(digest_nbytes=32)
        named = {**NAMESPACES, wide.namespace(): r.encode_namespace("", wide.canonical())}
        long = record(2)._replace(namespace=wide.namespace(), key=key(2, 32))

        tables.commit([record(1), long], named, 1)

        assert set(scanned(tables)) == {key(1), key(2, 32)}
        tables.commit([forget(long)], named, 1)
        assert set(scanned(tables)) == {key(1)}


class TestLmdbPages:
    """A damaged index must end as an error of one drive, not as the end of the process."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tables = IndexTables(tmp_path / "index")
        tables.open()
        for first in range(0, 3000, 500):
            tables.commit([record(number) for number in range(first, first + 500)], NAMESPACES, 1)
        tables.commit([forget(record(number)) for number in range(0, 3000, 3)], NAMESPACES, 1)
        tables.close()
        return tmp_path / "index"

    def test_a_sound_file_is_sound(self, folder: Path, tmp_path: Path) -> None:
        require_sound(folder)
        require_sound(tmp_path / "nothing there")

    @pytest.mark.parametrize("kept", [0.0001, 0.05, 0.5, 0.95])
    def test_a_file_cut_short_is_refused(self, folder: Path, kept: float) -> None:
        data = folder / "data.mdb"
        os.truncate(data, int(data.stat().st_size * kept))

        with pytest.raises(TierIOError, match=r"data\.mdb is damaged"):
            require_sound(folder)

    def test_rubbish_is_refused(self, folder: Path) -> None:
        (folder / "data.mdb").write_bytes(os.urandom(1 << 16))

        with pytest.raises(TierIOError, match="not an lmdb file"):
            require_sound(folder)

    def test_whatever_is_damaged_nobody_dies(self, folder: Path, tmp_path: Path) -> None:
        """Many damaged copies, each opened and read and written by another process: it may refuse, it must not crash, and
        what it reads with a good check word must be what was written."""
        script = Path(__file__).parent / "read_damaged_index.py"
        ended = subprocess.run(
            [sys.executable, str(script), str(folder), str(tmp_path / "copy"), "100"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        refused, read = map(int, ended.stdout.split()[-2:])
        print(f"{refused} copies refused, {read} read")
        assert refused > 5
        assert read > 5


class Recorder:
    """What the index does, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sync_errors: list[OSError] = []
        self.forgotten: list[Forget] = []

    def sync(self) -> None:
        self.events.append("sync")
        if self.sync_errors:
            raise self.sync_errors.pop()

    def forgot(self, forgets: Sequence[Forget]) -> None:
        self.events.append("forgotten")
        self.forgotten += forgets


class RecordingTables(IndexTables):
    def __init__(self, path: Path, recorder: Recorder) -> None:
        super().__init__(path)
        self.recorder = recorder
        self.errors: list[Exception] = []

    def commit(self, ops: Sequence[Op], namespaces: Mapping[bytes, bytes], hour: int) -> None:
        self.recorder.events.append(f"commit {len(ops)}")
        if self.errors:
            raise self.errors.pop()
        super().commit(ops, namespaces, hour)


Make = Callable[[], tuple[DriveIndex, RecordingTables]]


class TestDriveIndex:
    @pytest.fixture
    def recorder(self) -> Recorder:
        return Recorder()

    @pytest.fixture
    def make(self, tmp_path: Path, recorder: Recorder) -> Iterator[Make]:
        made: list[DriveIndex] = []

        def make() -> tuple[DriveIndex, RecordingTables]:
            tables = RecordingTables(tmp_path / "index", recorder)
            tables.open()
            index = DriveIndex(
                tables, name="0", sync_data=recorder.sync, on_forgotten=recorder.forgot, wall_s=lambda: 7200.0
            )
            index.namespace(NAMESPACE, "tenant", SPEC.canonical())
            made.append(index)
            return index, tables

        yield make
        for index in made:
            index.close(5.0)

    def test_bytes_then_entries_then_slots(self, make: Make, recorder: Recorder) -> None:
        index, tables = make()
        index.put([record(1), record(2)])
        index.forget([forget(record(1))])
        index.start()

        assert index.flush(10.0)

        assert recorder.events == ["sync", "commit 3", "forgotten"]
        assert recorder.forgotten == [forget(record(1))]
        assert list(scanned(tables)) == [key(2)]
        assert tables.scan().written == {2: 2 * PAGE}

    def test_without_puts_the_data_file_is_left_alone(self, make: Make, recorder: Recorder) -> None:
        index, _ = make()
        index.forget([forget(record(1))])
        index.touch([Touch(NAMESPACE, key(2), 0, 1, 1)])
        index.start()

        assert index.flush(10.0)

        assert recorder.events == ["commit 2", "forgotten"]

    def test_company_is_waited_for_and_then_no_longer(self, make: Make, recorder: Recorder) -> None:
        """One commit takes what comes within the interval; a thousand do not wait."""
        index, _ = make()
        index.start()

        for number in range(1000):
            index.put([record(number)])
        assert index.flush(10.0)

        commits = [event for event in recorder.events if event.startswith("commit")]
        assert len(commits) < 50

    def test_flush_waits_for_what_was_queued_and_not_for_what_comes(self, make: Make, recorder: Recorder) -> None:
        index, tables = make()
        numbers = itertools.count()

        def one_more() -> None:  # with each group
            index.put([record(next(numbers))])

        index._sync_data = one_more
        one_more()
        index.start()

        assert index.flush(10.0)

        index._sync_data = recorder.sync
        assert index.close(10.0)
        tables.open()
        assert key(0) in scanned(tables)
        tables.close()

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    def test_a_failed_commit_is_kept_and_tried_again(
        self, make: Make, recorder: Recorder, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index_module, "INDEX_RETRY_S", 0.05)
        index, tables = make()
        tables.errors = [TierIOError("full", tier="nvme", errno=number) for _ in range(2)]
        index.put([record(1)])
        index.forget([forget(record(9))])
        index.start()
        assert _eventually(lambda: index.num_failures >= 1)
        assert recorder.forgotten == []
        if index.problem is not None:
            index.touch([Touch(NAMESPACE, key(1), record(1).offset, 500, 1)])  # dropped, the queue stays bounded

        assert index.flush(10.0)

        assert index.problem is None
        assert index.num_failures == 2
        assert recorder.events.count("forgotten") == 1
        assert list(scanned(tables)) == [key(1)]

    def test_a_failed_sync_commits_nothing(
        self, make: Make, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index_module, "INDEX_RETRY_S", 30.0)
        recorder.sync_errors = [OSError(errno.EIO, "sync")]
        index, tables = make()
        index.put([record(1)])
        index.start()

        assert _eventually(lambda: index.problem is not None)

        assert index.problem is not None
        assert index.problem[0] is MoveProblem.EIO
        assert recorder.events == ["sync"]
        assert not index.flush(0.05)
        assert index.close(10.0)  # the last try goes well
        assert recorder.events == ["sync", "sync", "commit 1"]
        tables.open()
        assert list(scanned(tables)) == [key(1)]
        tables.close()

    def test_close_gives_up_on_a_drive_that_hangs_and_is_silent_afterwards(
        self, make: Make, recorder: Recorder
    ) -> None:
        index, _ = make()
        hang = threading.Event()
        recorder.sync = lambda: hang.wait(20.0)
        index._sync_data = recorder.sync
        index.put([record(1)])
        index.forget([forget(record(1))])
        index.start()

        assert not index.close(0.2)
        hang.set()
        index._thread.join(20.0)

        assert recorder.forgotten == []
        assert not index.is_alive()

    def test_close_says_when_not_all_is_durable(self, make: Make) -> None:
        index, tables = make()
        tables.errors = [TierIOError("full", tier="nvme", errno=errno.ENOSPC) for _ in range(9)]
        index.put([record(1)])
        index.start()

        assert not index.close(10.0)
        assert not index.is_alive()

    def test_close_before_start_and_twice(self, make: Make) -> None:
        index, _ = make()

        assert index.close(1.0)
        assert index.close(1.0)

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_bug_of_ours_stops_writes_and_does_not_hang_flush(self, make: Make) -> None:
        index, tables = make()
        tables.errors = [ZeroDivisionError("bug")]
        index.put([record(1)])
        index.start()

        assert not index.flush(10.0)

        assert index.problem is not None
        assert "bug" in index.problem[1]

    def test_an_unannounced_namespace_is_our_bug(self, make: Make) -> None:
        index, _ = make()

        with pytest.raises(AssertionError, match="was not announced"):
            index.put([record(1)._replace(namespace=b"x" * 16)])


def _eventually(reached: Callable[[], bool]) -> bool:
    wait = threading.Event()
    return any(reached() or wait.wait(0.01) for _ in range(1000)) or reached()
