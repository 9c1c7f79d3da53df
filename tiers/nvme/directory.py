"""A drive's directory, held by this process: its lock, its index, its data file, and that these three belong together."""

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.moves import MoveProblem
from kvstore.tiers.nvme.file import BlockFile, DirectFile, no_room, page_aligned, problem_of, sync_folder
from kvstore.tiers.nvme.lmdb_pages import require_sound
from kvstore.tiers.nvme.records import (
    DRIVE_ID_NBYTES,
    FORMAT_VERSION,
    HEADER_NBYTES,
    Header,
    Meta,
    decode_header,
    encode_header,
    require_known_version,
)
from kvstore.tiers.nvme.tables import IndexTables

logger = logging.getLogger(__name__)

DATA_FILE = "blocks.kv"
INDEX_FOLDER = "index"
LOCK_FILE = "lock"
_PID_NBYTES = 20


class DirectoryLock:
    """One process at a time: a flock, which the kernel drops when the process ends, and the pid of who has it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Raises ConfigError naming the process that has it, OSError when there can be no lock file."""
        assert self._fd < 0
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, str(os.getpid()).encode().ljust(_PID_NBYTES), 0)  # in place: also when the drive is full
        except BlockingIOError as err:
            owner = os.pread(fd, _PID_NBYTES, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise _wrong(self._path.parent, f"in use by process {owner or 'unknown'}; stop it first") from err
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def release(self) -> None:
        """Idempotent. The file stays: removing it would let two processes lock two files."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class DriveDirectory:
    """`path` with its three parts. `open` judges them before it changes any of them.

    Raises ConfigError for what the operator must decide; TierIOError or OSError when the drive cannot be used as it is,
    which concerns this drive only. Either way everything is closed again.

        nbytes        of the slots, whole segments
        valid_nbytes  entries beyond it mean nothing: the file was shorter for a time. `settle` says that they are gone
    """

    def __init__(
        self,
        path: Path,
        *,
        segment_bytes: int,
        open_file: Callable[[Path], BlockFile] = DirectFile.open,
    ) -> None:
        self.path = path
        self.tables = IndexTables(path / INDEX_FOLDER)
        self.nbytes = 0
        self.valid_nbytes = 0
        self._segment_bytes = segment_bytes
        self._open_file = open_file
        self._lock = DirectoryLock(path / LOCK_FILE)
        self._file: BlockFile | None = None
        self._drive_id = b""

    @property
    def file(self) -> BlockFile:
        """The data file; open."""
        assert self._file is not None, "the directory is not open"
        return self._file

    def open(self, nbytes: int) -> None:
        """`nbytes` for slots; 0: as many as there are, at first half of what is free. Blocks."""
        try:
            _require_directory(self.path)
            self._lock.acquire()
            require_sound(self.tables.path)
            self.tables.open()
            self._open(nbytes)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """The entries beyond `valid_nbytes` are removed, durably; from now on all of the file counts."""
        if self.valid_nbytes != self.nbytes:
            self._set_meta(self.nbytes)
            self.valid_nbytes = self.nbytes

    def close(self) -> None:
        """Idempotent."""
        self.tables.close()
        if self._file is not None:
            self._file.close()
        self._file = None
        self._lock.release()

    def _open(self, nbytes: int) -> None:
        meta = self.tables.meta()
        if meta is not None:
            require_known_version(meta.version, str(self.tables.path))
            self._require_segment_bytes(meta.segment_bytes)
        self._file = self._open_file(self.path / DATA_FILE)
        header = read_header(self._file, self.path)
        if header is not None:
            self._require_header(header, meta)
        old_nbytes = max(self._file.nbytes - HEADER_NBYTES, 0) // self._segment_bytes * self._segment_bytes
        self.nbytes = self._wanted_nbytes(nbytes, max(old_nbytes, meta.nbytes if meta else 0))
        self.valid_nbytes = min(old_nbytes, meta.nbytes if meta else old_nbytes, self.nbytes)
        if meta is not None and header is None and (lost := self.tables.num_entries()):
            logger.error("nvme %s: the data file is gone or empty; %d blocks are lost", self.path, lost)
            self.tables.clear()
        if meta is None and header is not None:
            logger.error("nvme %s: the index is gone; the blocks in the data file are lost", self.path)
        self._drive_id = meta.drive_id if meta else header.drive_id if header else os.urandom(DRIVE_ID_NBYTES)
        if meta is None or meta.nbytes != self.valid_nbytes:
            self._set_meta(self.valid_nbytes)
        if meta is None:
            sync_folder(self.tables.path)
        self._resize()
        if header is None:
            write_header(self._file, Header(FORMAT_VERSION, self._drive_id, self._segment_bytes))

    def _resize(self) -> None:
        try:
            self.file.resize(HEADER_NBYTES + self.nbytes)
        except OSError as err:
            if problem_of(err) is MoveProblem.NO_SPACE:
                raise no_room(self.path, HEADER_NBYTES + self.nbytes, err) from err
            raise

    def _wanted_nbytes(self, nbytes: int, old_nbytes: int) -> int:
        wanted = nbytes or old_nbytes or shutil.disk_usage(self.path).free // 2
        if wanted < self._segment_bytes:
            raise ConfigError(
                f"nvme_bytes: {wanted} bytes in {self.path} are less than one segment; use {self._segment_bytes} or more",
                field="nvme_bytes",
                value=wanted,
            )
        return wanted // self._segment_bytes * self._segment_bytes

    def _require_segment_bytes(self, found: int) -> None:
        if found != self._segment_bytes:
            raise ConfigError(
                f"segment_bytes: {self._segment_bytes} given, {self.path} was made with {found}; "
                f"use {found}, or another directory",
                field="segment_bytes",
                value=self._segment_bytes,
                found=found,
            )

    def _require_header(self, header: Header, meta: Meta | None) -> None:
        require_known_version(header.version, str(self.path / DATA_FILE))
        if meta is not None and header.drive_id != meta.drive_id:
            raise _wrong(
                self.path,
                f"{DATA_FILE} belongs to drive {header.drive_id.hex()}, {INDEX_FOLDER}/ to {meta.drive_id.hex()}; "
                "put the file back that belongs here, or remove one of the two",
            )
        self._require_segment_bytes(header.segment_bytes)

    def _set_meta(self, nbytes: int) -> None:
        self.tables.set_meta(Meta(FORMAT_VERSION, self._drive_id, self._segment_bytes, nbytes))


def read_header(file: BlockFile, path: Path) -> Header | None:
    """None: the file is new, or was emptied. Raises TierIOError when there is something else in its place."""
    if file.nbytes < HEADER_NBYTES:
        return None
    page = page_aligned(HEADER_NBYTES)
    if file.read_into(0, [page.data]) != HEADER_NBYTES:
        raise OSError(errno.EIO, "short read of the header", str(path / DATA_FILE))
    if not page.any():
        return None
    header = decode_header(page.tobytes())
    if header is None:
        raise TierIOError(
            f"nvme: {path / DATA_FILE}: its header is damaged; run kvstore check --repair", tier="nvme", errno=0
        )
    return header


def write_header(file: BlockFile, header: Header) -> None:
    """Durable on return. Raises OSError."""
    page = page_aligned(HEADER_NBYTES)
    page[:] = bytearray(encode_header(header))
    if file.write_from(0, [page.data]) != HEADER_NBYTES:
        raise OSError(errno.EIO, "short write of the header")
    file.sync()


def _require_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as err:
        raise _wrong(path, "is not a directory; name one on the drive that is to hold blocks") from err
    except FileNotFoundError as err:
        raise _wrong(path, "its parent does not exist; create it, or mount the drive") from err


def _wrong(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"nvme: {path}: {problem}", field="nvme", value=str(path))
