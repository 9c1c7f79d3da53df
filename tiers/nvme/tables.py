"""The tables of a drive's index: an lmdb environment, read in bulk and changed one transaction at a time."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb
import numpy as np

from kvstore.core.blocks import slot_nbytes
from kvstore.core.errors import TierIOError
from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Forget, Touch
from kvstore.tiers.nvme.lmdb_pages import DATA_MDB
from kvstore.tiers.nvme.records import (
    DIGEST_NBYTES,
    ROW_DTYPES,
    Meta,
    Namespace,
    Quarantined,
    Rows,
    check_words,
    decode_meta,
    decode_namespace,
    decode_quarantined,
    decode_rows,
    decode_written,
    encode_meta,
    encode_quarantined,
    encode_rows,
    encode_written,
    intact,
    row_items,
    value_nbytes,
)

T = TypeVar("T")
K = TypeVar("K", BlockRecord, Forget, Touch)
OFFSET_MASK = (1 << DRIVE_SHIFT) - 1
BLOCK_TABLES = {digest_nbytes: f"blocks{digest_nbytes}" for digest_nbytes in DIGEST_NBYTES}
_TABLES = ("meta", "namespaces", *BLOCK_TABLES.values(), "quarantine", "written")
_META_KEY = b"drive"
_FIRST_MAP_BYTES = 1 << 30  # address space, no memory and no disk; doubled when it is full
_SCAN_ENTRIES = 16384  # parsed at once: some 2 MiB
KEPT_HOURS = 25
"""A day and the hour that has begun: what a daily write budget looks at."""


class Erase(NamedTuple):
    """Remove an entry of a table by its key, whatever it says: recovery and repair do."""

    table: str
    key: bytes


Op = BlockRecord | Forget | Touch | Erase
"""One change of the index; a BlockRecord puts itself."""


class Scan(NamedTuple):
    """Everything the index holds. What was not whole is in `damaged` only."""

    rows: dict[int, Rows]  # by digest_nbytes; sorted by namespace and key
    namespaces: dict[bytes, Namespace]
    quarantined: list[Quarantined]
    written: dict[int, int]  # UTC hour -> bytes
    damaged: list[Erase]


class IndexTables:
    """The lmdb environment in `path`. Its user has the directory's lock, so lmdb's own is off and it must be used by one
    thread at a time. Every failure of lmdb or the file system is a TierIOError; a transaction that failed changed nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._env: Any = None  # lmdb has no types
        self._tables: dict[str, Any] = {}
        self._named: set[bytes] = set()  # namespaces that have their record
        self._inode = 0, 0
        self._file_nbytes = 0

    def open(self) -> None:
        """Open, or create when there is none. Blocks."""
        assert self._env is None
        try:
            with _translated(self.path):
                self._open()
        except TierIOError:
            self.close()
            raise

    def _open(self) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)  # lmdb would make it with the mode of the file
        self._env = lmdb.open(str(self.path), map_size=_FIRST_MAP_BYTES, max_dbs=len(_TABLES), mode=0o600, lock=False)
        self._tables = {name: self._env.open_db(name.encode()) for name in _TABLES}
        with self._env.begin(db=self._tables["namespaces"]) as txn:
            self._named = set(txn.cursor().iternext(values=False))
        stat = (self.path / DATA_MDB).stat()
        self._inode, self._file_nbytes = (stat.st_dev, stat.st_ino), stat.st_size

    def close(self) -> None:
        """Idempotent."""
        if self._env is not None:
            self._env.close()
        self._env = None

    def reopen(self) -> None:
        """After a failure lmdb may refuse everything until it is opened again."""
        self._require_same_file()
        self.close()
        self.open()

    def num_entries(self) -> int:
        """Blocks in the index."""
        with self._reading() as txn:
            return sum(int(txn.stat(self._tables[name])["entries"]) for name in BLOCK_TABLES.values())

    def meta(self) -> Meta | None:
        """None: the index is new. Raises TierIOError when the record is not whole."""
        with self._reading() as txn:
            packed = txn.get(_META_KEY, db=self._tables["meta"])
        if packed is None:
            return None
        meta = decode_meta(packed)
        if meta is None:
            raise TierIOError(f"nvme: {self.path}: the record of the drive is damaged", tier="nvme", errno=0)
        return meta

    def set_meta(self, meta: Meta) -> None:
        """Durable on return."""
        self._write(lambda txn: txn.put(_META_KEY, encode_meta(meta), db=self._tables["meta"]))

    def clear(self) -> None:
        """Forget all blocks and all quarantined slots; durable on return. For a data file that is gone."""
        names = *BLOCK_TABLES.values(), "quarantine"
        self._write(lambda txn: [txn.drop(self._tables[name], delete=False) for name in names])

    def scan(self) -> Scan:
        """Read everything. A million entries take about a second."""
        damaged: list[Erase] = []
        with self._reading() as txn:
            rows = {digest: self._scan_blocks(txn, digest, damaged) for digest in DIGEST_NBYTES}
            namespaces = {}
            for key, packed in txn.cursor(db=self._tables["namespaces"]):
                if (namespace := decode_namespace(key, packed)) is not None:
                    namespaces[key] = namespace
                else:
                    damaged.append(Erase("namespaces", key))
            quarantined = []
            for key, packed in txn.cursor(db=self._tables["quarantine"]):
                if (slot := decode_quarantined(key, packed)) is not None:
                    quarantined.append(slot)
                else:
                    damaged.append(Erase("quarantine", key))
            hours = [decode_written(*item) for item in txn.cursor(db=self._tables["written"])]
        return Scan(rows, namespaces, quarantined, dict(hour for hour in hours if hour is not None), damaged)

    def commit(self, ops: Sequence[Op], namespaces: Mapping[bytes, bytes], hour: int) -> None:
        """All `ops` in their order in one transaction; durable on return.

        With a first block of a namespace goes the namespace's record, taken from `namespaces`. `hour`: of the clock, for
        what is put. Grows the map when it is full. Not to a file that was deleted or cut short, which only another start
        can mend.
        """
        self._require_same_file()
        self._named = self._write(lambda txn: self._apply(txn, ops, namespaces, hour))

    def _require_same_file(self) -> None:
        """lmdb would not notice that its file has no name any more, and a page that was cut off ends the process (SIGBUS)."""
        try:
            stat = (self.path / DATA_MDB).stat()
            found = (stat.st_dev, stat.st_ino), stat.st_size
        except FileNotFoundError:
            found = (0, 0), 0
        inode, nbytes = found
        if inode != self._inode or nbytes < self._file_nbytes:
            what = "deleted" if inode != self._inode else "cut short"
            raise TierIOError(f"nvme: index {self.path}: its file was {what}; restart", tier="nvme", errno=errno.ENOENT)
        self._file_nbytes = nbytes

    # --- reading ------------------------------------------------------------------------------------------------------

    def _scan_blocks(self, txn: Any, digest_nbytes: int, damaged: list[Erase]) -> Rows:
        table = BLOCK_TABLES[digest_nbytes]
        cursor = iter(txn.cursor(db=self._tables[table]))
        packed = bytearray()
        while items := list(itertools.islice(cursor, _SCAN_ENTRIES)):
            joined = b"".join(itertools.chain.from_iterable(items))
            if not _all_intact(joined, len(items), digest_nbytes):
                whole = [_all_intact(key + value, 1, digest_nbytes) for key, value in items]
                damaged += [Erase(table, key) for (key, _), good in zip(items, whole, strict=True) if not good]
                joined = b"".join(itertools.chain.from_iterable(itertools.compress(items, whole)))
            packed += joined
        return decode_rows(packed, digest_nbytes)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _apply(self, txn: Any, ops: Sequence[Op], namespaces: Mapping[bytes, bytes], hour: int) -> set[bytes]:
        """Answers which namespaces have their record then."""
        put_nbytes = 0
        named = set(self._named)
        for kind, run in _runs(ops):
            if kind is BlockRecord:
                put_nbytes += sum(slot_nbytes(record.nbytes) for record in run)
                for namespace in {record.namespace for record in run} - named:
                    txn.put(namespace, namespaces[namespace], db=self._tables["namespaces"])
                    named.add(namespace)
                self._put(txn, run)
            elif kind is Forget:
                self._forget(txn, run)
            elif kind is Touch:
                self._touch(txn, run)
            else:
                for op in run:
                    txn.delete(op.key, db=self._tables[op.table])
                    if op.table == "namespaces":
                        named.discard(op.key)
        if put_nbytes:
            self._count_written(txn, put_nbytes, hour)
        return named

    def _put(self, txn: Any, records: Sequence[BlockRecord]) -> None:
        for digest_nbytes, group in _by_digest(records):
            cursor = txn.cursor(db=self._tables[BLOCK_TABLES[digest_nbytes]])
            cursor.putmulti(row_items(encode_rows(group, digest_nbytes, OFFSET_MASK)))

    def _forget(self, txn: Any, forgets: Sequence[Forget]) -> None:
        """An entry that says another slot or generation is of a newer copy and stays; one that is not whole goes."""
        for digest_nbytes, group in _by_digest(forgets):
            table = self._tables[BLOCK_TABLES[digest_nbytes]]
            keys = [forget.namespace + forget.key for forget in group]
            rows = _get_rows(txn, table, keys, digest_nbytes)
            copies = zip(rows["offset"].tolist(), rows["generation"].tolist(), strict=True)
            found = dict(zip(_keys_of(rows), copies, strict=True))
            for key, forget in zip(keys, group, strict=True):
                meant = forget.offset & OFFSET_MASK, forget.generation
                if found.get(key, meant) == meant:
                    txn.delete(key, db=table)
        for forget in forgets:
            if forget.problem is not None:
                slot = Quarantined(forget.offset & OFFSET_MASK, forget.nbytes, forget.problem.value)
                txn.put(*encode_quarantined(slot), db=self._tables["quarantine"])

    def _touch(self, txn: Any, touches: Sequence[Touch]) -> None:
        for digest_nbytes, group in _by_digest(touches):
            table = self._tables[BLOCK_TABLES[digest_nbytes]]
            newest = {touch.namespace + touch.key: touch for touch in group}
            rows = _get_rows(txn, table, list(newest), digest_nbytes)
            meant = [newest[key] for key in _keys_of(rows)]
            rows["last_use"] = [touch.last_use for touch in meant]
            rows["hits"] = [min(touch.hits, 0xFFFFFFFF) for touch in meant]
            rows["check"] = check_words(rows)
            same_slot = rows["offset"] == np.array([touch.offset & OFFSET_MASK for touch in meant], np.uint64)
            txn.cursor(db=table).putmulti(row_items(rows[same_slot]))

    def _count_written(self, txn: Any, nbytes: int, hour: int) -> None:
        table = self._tables["written"]
        key, _ = encode_written(hour, 0)
        before = decode_written(key, txn.get(key, b"", db=table))
        txn.put(*encode_written(hour, nbytes + (before[1] if before else 0)), db=table)
        oldest, _ = encode_written(max(hour - KEPT_HOURS + 1, 0), 0)
        newest, _ = encode_written(hour + KEPT_HOURS, 0)  # beyond it the clock was wrong then, or is now
        for other in list(txn.cursor(db=table).iternext(values=False)):
            if not oldest <= other <= newest:
                txn.delete(other, db=table)

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        with _translated(self.path), self._env.begin() as txn:
            yield txn

    def _write(self, change: Callable[[Any], T]) -> T:
        """`change` in a transaction, again with a larger map when it is full."""
        with _translated(self.path):
            while True:
                try:
                    with self._env.begin(write=True) as txn:
                        return change(txn)
                except lmdb.MapFullError:
                    self._env.set_mapsize(2 * int(self._env.info()["map_size"]))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (lmdb.Error, OSError) as err:
        raise TierIOError(f"nvme: index {path}: {err}", tier="nvme", errno=_errno_of(err)) from err


def _errno_of(err: Exception) -> int:
    """lmdb's exceptions have the system's text and not its number."""
    if isinstance(err, OSError):
        return err.errno or 0
    text = str(err)
    return next(
        (number for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS) if os.strerror(number) in text),
        errno.EIO,
    )


def _all_intact(joined: bytes, count: int, digest_nbytes: int) -> bool:
    if len(joined) != count * ROW_DTYPES[digest_nbytes].itemsize:
        return False
    return bool(intact(decode_rows(joined, digest_nbytes)).all())


def _get_rows(txn: Any, table: Any, keys: Sequence[bytes], digest_nbytes: int) -> Rows:
    """The entries of `keys` that are there and whole; writable."""
    found = txn.cursor(db=table).getmulti(keys)
    whole = [key + value for key, value in found if len(value) == value_nbytes(digest_nbytes)]
    rows = decode_rows(bytearray().join(whole), digest_nbytes)
    return rows[intact(rows)]


def _keys_of(rows: Rows) -> list[bytes]:
    return [key for key, _ in row_items(rows)]


def _runs(ops: Sequence[Op]) -> Iterator[tuple[type, list[Any]]]:
    """Neighbours of one kind together, in order."""
    for kind, run in itertools.groupby(ops, type):
        yield kind, list(run)


def _by_digest(run: Sequence[K]) -> Iterator[tuple[int, list[K]]]:
    for digest_nbytes in DIGEST_NBYTES:
        if group := [op for op in run if len(op.key) == digest_nbytes]:
            yield digest_nbytes, group
