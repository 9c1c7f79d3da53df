"""Does a drive hold what its index says? Reads every block, compares, counts; repairs when told to."""

import errno
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from kvstore.core.blocks import slot_nbytes
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.limits import DRIVE_THREADS, MAX_IO_BYTES
from kvstore.core.moves import Forget, MoveProblem
from kvstore.tiers.nvme.directory import DATA_FILE, INDEX_FOLDER, LOCK_FILE, DirectoryLock, read_header, write_header
from kvstore.tiers.nvme.file import BlockFile, DirectFile, page_aligned, problem_of
from kvstore.tiers.nvme.lmdb_pages import is_another_version, require_sound
from kvstore.tiers.nvme.records import (
    FORMAT_VERSION,
    HEADER_NBYTES,
    Header,
    Meta,
    Quarantined,
    Rows,
    encode_quarantined,
    require_known_version,
)
from kvstore.tiers.nvme.recovery import erasures, take_slots, usable_rows
from kvstore.tiers.nvme.tables import Erase, IndexTables, Op

MAX_FINDINGS = 100
"""Findings told one by one; all are counted."""

_PATTERNS = (0x5A, 0xA5)
_COMMIT_OPS = 32768
_READS_QUEUED = 4096  # a future each


class Finding(NamedTuple):
    """One thing that is wrong."""

    kind: str  # index, header, data_file, entry, namespace, slot, quarantine, or a MoveProblem of a block that was read
    detail: str


class NamespaceCount(NamedTuple):
    """What a namespace has on this drive, blocks found whole only."""

    namespace: str  # hex
    tenant: str
    block_nbytes: int
    num_blocks: int


class CheckReport(NamedTuple):
    """What was found, and what was done about it. `used + quarantined + free = capacity`, in bytes of slots."""

    path: Path
    capacity_bytes: int
    used_bytes: int
    quarantined_bytes: int
    free_bytes: int
    num_blocks: int  # entries that point to the bytes they should
    num_quarantined: int  # slots, after repair
    namespaces: tuple[NamespaceCount, ...]
    problems: dict[str, int]  # kind of finding -> how many
    findings: tuple[Finding, ...]  # the first MAX_FINDINGS
    repaired: dict[str, int]  # what was done -> how often

    @property
    def is_clean(self) -> bool:
        """Nothing was wrong before any repair."""
        return not self.problems


class _Block(NamedTuple):
    table_key: Erase
    namespace: bytes
    key: bytes
    offset: int
    nbytes: int
    generation: int
    checksum: int


def check_drive(
    path: Path,
    *,
    repair: bool,
    progress: Callable[[int, int], None],
    threads: int = DRIVE_THREADS,
    open_file: Callable[[Path], BlockFile] = DirectFile.open,
) -> CheckReport:
    """Look at the drive in `path`, which nobody may be using; `progress(done_bytes, all_bytes)` as blocks are read.

    Raises ConfigError or TierIOError when it cannot be looked at. Without `repair` nothing is changed.
    """
    if not (path / DATA_FILE).exists() and not (path / INDEX_FOLDER).exists():
        raise ConfigError(
            f"{path}: holds neither {DATA_FILE} nor {INDEX_FOLDER}/; name a drive's directory", field="DIR"
        )
    lock = DirectoryLock(path / LOCK_FILE)
    check = _Check(path, repair=repair, progress=progress, threads=threads, open_file=open_file)
    try:
        lock.acquire()
        return check.run()
    except OSError as err:
        raise TierIOError(f"{path}: {err}", tier="nvme", errno=err.errno or 0) from err
    finally:
        check.close()
        lock.release()


class _Check:
    def __init__(
        self,
        path: Path,
        *,
        repair: bool,
        progress: Callable[[int, int], None],
        threads: int,
        open_file: Callable[[Path], BlockFile],
    ) -> None:
        self.path = path
        self.repair = repair
        self.progress = progress
        self.threads = threads
        self.open_file = open_file
        self.tables = IndexTables(path / INDEX_FOLDER)
        self.file: BlockFile | None = None
        self.problems: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.repaired: Counter[str] = Counter()

    def close(self) -> None:
        self.tables.close()
        if self.file is not None:
            self.file.close()

    def run(self) -> CheckReport:
        if (self.path / DATA_FILE).exists():
            self.file = self.open_file(self.path / DATA_FILE)
        header = self._header()
        meta = self._meta(header)
        if meta is None:
            return self._report(0, 0, 0, (), ())
        header = self._require_one_drive(header, meta)
        present = self.file.nbytes - HEADER_NBYTES if self.file is not None and header is not None else 0
        nbytes = max(min(present, meta.nbytes), 0) // meta.segment_bytes * meta.segment_bytes
        if nbytes < meta.nbytes:
            self._found("data_file", f"{nbytes} bytes of slots are there, {meta.nbytes} belong to it")
        return self._check_blocks(nbytes, meta)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _header(self) -> Header | None:
        if self.file is None:
            self._found("data_file", f"{DATA_FILE} is missing")
            return None
        try:
            header = read_header(self.file, self.path)
        except TierIOError as err:
            self._found("header", err.message)
            return None
        if header is None:
            self._found("data_file", f"{DATA_FILE} is empty")
        else:
            require_known_version(header.version, str(self.path / DATA_FILE))
        return header

    def _meta(self, header: Header | None) -> Meta | None:
        """What the index says of the drive; None when there is no index to check."""
        try:
            meta = self._open_tables()
        except TierIOError as err:
            if err.fields["errno"] not in {0, errno.EIO} or is_another_version(self.tables.path):
                raise  # nothing that an empty index would cure
            self._found("index", err.message)
            meta = None
        if meta is not None:
            require_known_version(meta.version, str(self.tables.path))
        elif not self.problems["index"]:
            self._found("index", f"{INDEX_FOLDER}/ has no record of the drive")
        if meta is None and self.repair:
            meta = self._rebuild_index(header)
        return meta

    def _open_tables(self) -> Meta | None:
        if not (self.tables.path / "data.mdb").exists():
            return None
        require_sound(self.tables.path)
        self.tables.open()
        return self.tables.meta()

    def _rebuild_index(self, header: Header | None) -> Meta:
        if header is None or self.file is None:
            raise ConfigError(
                f"{self.path}: index and data file are both lost; remove the directory's contents", field="DIR"
            )
        self.tables.close()
        shutil.rmtree(self.tables.path, ignore_errors=True)
        self.tables.open()
        nbytes = max(self.file.nbytes - HEADER_NBYTES, 0) // header.segment_bytes * header.segment_bytes
        meta = Meta(FORMAT_VERSION, header.drive_id, header.segment_bytes, nbytes)
        self.tables.set_meta(meta)
        self.repaired["index made anew, empty"] += 1
        return meta

    def _require_one_drive(self, header: Header | None, meta: Meta) -> Header | None:
        own = Header(FORMAT_VERSION, meta.drive_id, meta.segment_bytes)
        if header is None and self.problems["header"]:
            if self.repair and self.file is not None:
                write_header(self.file, own)
                self.repaired["header written"] += 1
            return own  # the blocks check themselves
        if header is not None and header[1:] != own[1:]:
            raise ConfigError(
                f"{self.path}: {DATA_FILE} belongs to drive {header.drive_id.hex()} with segments of {header.segment_bytes}, "
                f"{INDEX_FOLDER}/ to {meta.drive_id.hex()} with {meta.segment_bytes}; put the right file back",
                field="DIR",
            )
        return header

    def _check_blocks(self, nbytes: int, meta: Meta) -> CheckReport:
        scan = self.tables.scan()
        erase: list[Erase] = list(scan.damaged)
        for damaged in scan.damaged:
            self._found("entry", f"an entry of table {damaged.table} is damaged")
        unnamed: list[Erase] = []
        usable = usable_rows(scan, unnamed)
        for _ in unnamed:
            self._found("namespace", "a block whose namespace is not known, or has blocks of another size")
        misplaced: list[Erase] = []
        kept = take_slots(usable, scan, nbytes, meta.segment_bytes, misplaced)
        for entry in misplaced:
            kind = "quarantine" if entry.table == "quarantine" else "slot"
            self._found(kind, f"an entry of table {entry.table} has a place that it cannot have")
        erase += [*unnamed, *misplaced]
        blocks = sorted((block for rows in usable.values() for block in _blocks(rows)), key=lambda block: block.offset)
        bad = self._read_blocks(blocks)
        if self.repair:
            kept = self._repair(erase, bad, kept)
            if nbytes < meta.nbytes:
                nbytes = self._restore_size(meta)
        gone = set(bad)
        whole = [block for block in blocks if block not in gone]
        used = whole if self.repair else blocks
        counts = Counter(block.namespace for block in whole)
        namespaces = tuple(
            NamespaceCount(name.hex(), named.tenant, named.nbytes, counts[name])
            for name, named in scan.namespaces.items()
            if counts[name]
        )
        used_bytes = sum(slot_nbytes(block.nbytes) for block in used)
        return self._report(nbytes, used_bytes, len(whole), tuple(kept), namespaces)

    def _report(
        self,
        nbytes: int,
        used_bytes: int,
        num_blocks: int,
        quarantined: tuple[Quarantined, ...],
        namespaces: tuple[NamespaceCount, ...],
    ) -> CheckReport:
        quarantined_bytes = sum(slot_nbytes(slot.nbytes) for slot in quarantined)
        assert used_bytes + quarantined_bytes <= nbytes, "slots overlap"  # take_slots has seen to it
        return CheckReport(
            path=self.path,
            capacity_bytes=nbytes,
            used_bytes=used_bytes,
            quarantined_bytes=quarantined_bytes,
            free_bytes=nbytes - used_bytes - quarantined_bytes,
            num_blocks=num_blocks,
            num_quarantined=len(quarantined),
            namespaces=namespaces,
            problems={kind: count for kind, count in self.problems.items() if count},
            findings=tuple(self.findings),
            repaired=dict(self.repaired),
        )

    def _found(self, kind: str, detail: str) -> None:
        self.problems[kind] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(kind, detail))

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_blocks(self, blocks: list[_Block]) -> dict[_Block, MoveProblem]:
        """Those that are not as they should be. Several reads are in flight, in the order of the drive."""
        if self.file is None:
            assert not blocks, "no place is inside a file that is missing"
            return {}
        total = sum(block.nbytes for block in blocks)
        done = 0
        bad: dict[_Block, MoveProblem] = {}
        with ThreadPoolExecutor(self.threads, "kvstore-check") as pool:
            self.progress(0, total)
            for first in range(0, len(blocks), _READS_QUEUED):
                some = blocks[first : first + _READS_QUEUED]
                for block, problem in zip(some, pool.map(partial(_read_block, self.file), some), strict=True):
                    done += block.nbytes
                    self.progress(done, total)
                    if problem is not None:
                        bad[block] = problem
                        self._found(problem.value, f"block {block.key.hex()} at {block.offset}, {block.nbytes} bytes")
        return bad

    # --- repair -------------------------------------------------------------------------------------------------------

    def _repair(
        self, erase: list[Erase], bad: dict[_Block, MoveProblem], quarantined: list[Quarantined]
    ) -> list[Quarantined]:
        """Entries go first, durably; then their slots and those in quarantine are tried. Answers which stay in quarantine."""
        self._commit([*erase, *(block.table_key for block in bad)], "entries removed")
        suspects = {slot.offset: slot for slot in quarantined}
        suspects |= {
            block.offset: Quarantined(block.offset, block.nbytes, problem.value) for block, problem in bad.items()
        }
        if self.file is None or not suspects:
            return quarantined
        stay = [slot for slot in suspects.values() if not _holds_patterns(self.file, slot)]
        old = {slot.offset for slot in quarantined}
        staying = {slot.offset for slot in stay}
        released = [slot for slot in quarantined if slot.offset not in staying]
        self._commit([Erase("quarantine", encode_quarantined(slot)[0]) for slot in released], "slots released")
        self._commit([_quarantine(slot) for slot in stay if slot.offset not in old], "slots quarantined")
        return stay

    def _restore_size(self, meta: Meta) -> int:
        """After the removal of all entries beyond its end. Raises OSError when there is no room."""
        if self.file is None:
            self.file = self.open_file(self.path / DATA_FILE)
        self.file.resize(HEADER_NBYTES + meta.nbytes)
        write_header(self.file, Header(FORMAT_VERSION, meta.drive_id, meta.segment_bytes))
        self.repaired["data file made whole, what was missing is empty"] += 1
        return meta.nbytes

    def _commit(self, ops: list[Op], what: str) -> None:
        for first in range(0, len(ops), _COMMIT_OPS):
            self.tables.commit(ops[first : first + _COMMIT_OPS], {}, 0)
        if ops:
            self.repaired[what] += len(ops)


def _quarantine(slot: Quarantined) -> Forget:
    """Of no block: only its slot is meant."""
    return Forget(b"\0" * 16, b"\0" * 16, slot.offset, slot.nbytes, 0, MoveProblem(slot.reason))


def _blocks(rows: Rows) -> Iterator[_Block]:
    columns = [rows[name].tolist() for name in ("namespace", "key", "offset", "nbytes", "generation", "checksum")]
    for entry, *values in zip(erasures(rows), *columns, strict=True):
        yield _Block(entry, *values)


_buffers = threading.local()


@contextmanager
def _buffer(nbytes: int) -> Iterator[memoryview]:
    """This thread's own, page-aligned."""
    held = getattr(_buffers, "held", None)
    if held is None or len(held) < nbytes:
        held = _buffers.held = page_aligned(nbytes)
    yield held.data[:nbytes]


def _read_block(file: BlockFile, block: _Block) -> MoveProblem | None:
    digest = xxhash.xxh3_64()
    try:
        for piece, nbytes in _pieces(block.offset, slot_nbytes(block.nbytes)):
            with _buffer(nbytes) as view:
                if file.read_into(HEADER_NBYTES + piece, [view]) != nbytes:
                    return MoveProblem.SHORT
                digest.update(view[: block.offset + block.nbytes - piece])
    except OSError as err:
        return problem_of(err)
    return None if digest.intdigest() == block.checksum else MoveProblem.CHECKSUM


def _holds_patterns(file: BlockFile, slot: Quarantined) -> bool:
    """Write, sync, read back, twice with all bits turned: does the slot keep what it is given?"""
    try:
        return all(_keeps(file, slot, pattern) for pattern in _PATTERNS)
    except OSError:
        return False


def _keeps(file: BlockFile, slot: Quarantined, pattern: int) -> bool:
    for piece, nbytes in _pieces(slot.offset, slot_nbytes(slot.nbytes)):
        with _buffer(nbytes) as view:
            np.asarray(view)[:] = pattern
            if file.write_from(HEADER_NBYTES + piece, [view]) != nbytes:
                return False
    file.sync()
    for piece, nbytes in _pieces(slot.offset, slot_nbytes(slot.nbytes)):
        with _buffer(nbytes) as view:
            np.asarray(view)[:] = 0
            if file.read_into(HEADER_NBYTES + piece, [view]) != nbytes or not (np.asarray(view) == pattern).all():
                return False
    return True


def _pieces(offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(offset, offset + nbytes, MAX_IO_BYTES):
        yield start, min(MAX_IO_BYTES, offset + nbytes - start)
