"""A drive's data file, as the bytes it is: read, written and synced at offsets, past the page cache."""

import errno
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.core.moves import MoveProblem

_log = logging.getLogger(__name__)

_PROBLEMS = {
    # What a block device says of a bad sector, a failed protection check, a failing unit (the kernel's blk_errors table).
    **dict.fromkeys((errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG), MoveProblem.EIO),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), MoveProblem.NO_SPACE),
    **dict.fromkeys((errno.EROFS, errno.EPERM, errno.EACCES), MoveProblem.READ_ONLY),
}


class BlockFile(Protocol):
    """Bytes that outlive the process. Every verb may be called by any thread, also at the same time; each raises OSError.

    Offsets, lengths and addresses of views are multiples of SLOT_ALIGN_BYTES. At most 1,024 views a call.
    """

    @property
    def nbytes(self) -> int:
        """Size now. 0: it is new, or somebody emptied it."""
        ...

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """Fill `views` one after the other with the bytes from `offset` on. Answers how many bytes came: fewer at the end
        of the file, and sometimes before an error that the next call would raise. Blocks as long as the drive does."""
        ...

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        """Write `views` one after the other from `offset` on. Answers how many bytes went; otherwise like `read_into`.
        After a crash any part of what was not synced may be there, page by page."""
        ...

    def sync(self) -> None:
        """Everything written by calls that ended before this one began outlives a power cut. When it raises, nothing
        written since the last success does for certain, even if the next call succeeds: the kernel may have dropped it."""
        ...

    def resize(self, nbytes: int) -> None:
        """Grow, with the space taken now and not when it is written (raises OSError, and keeps the size, when there is none),
        or cut. New bytes read as zero."""
        ...

    def is_linked(self) -> bool:
        """Can the file still be found by its name, or any other? What is written to one that cannot is lost at its close."""
        ...

    def close(self) -> None:
        """Idempotent. No other call may run or follow."""
        ...


class DirectFile:
    """A BlockFile on a file system, with O_DIRECT where there is such a thing: the arena is the only cache wanted."""

    def __init__(self, fd: int, path: Path, *, direct: bool) -> None:
        self._fd = fd
        self._path = path
        self.direct = direct

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open for reading and writing; an empty file is made when there is none. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            file = cls(os.open(path, flags | os.O_DIRECT, 0o600), path, direct=True)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            _log.warning("%s: the file system has no direct I/O; its page cache keeps a second copy of blocks", path)
            file = cls(os.open(path, flags, 0o600), path, direct=False)
        if not file.nbytes:
            sync_folder(path.parent)
        return file

    @property
    def nbytes(self) -> int:
        """Size now."""
        return os.fstat(self._fd).st_size

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """One preadv; the GIL is released."""
        return os.preadv(self._fd, views, offset)

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        """One pwritev; the GIL is released."""
        return os.pwritev(self._fd, views, offset)

    def sync(self) -> None:
        """One fdatasync: 0.3 ms where the space was taken before."""
        os.fdatasync(self._fd)

    def resize(self, nbytes: int) -> None:
        """posix_fallocate of what is missing, or ftruncate."""
        before = self.nbytes
        if nbytes < before:
            os.ftruncate(self._fd, nbytes)
        elif nbytes > before:
            try:
                os.posix_fallocate(self._fd, before, nbytes - before)
            except OSError:
                os.ftruncate(self._fd, before)  # what was taken before there was no more
                raise

    def is_linked(self) -> bool:
        """Whether a name is left."""
        return os.fstat(self._fd).st_nlink > 0

    def close(self) -> None:
        """Closes the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def page_aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeroed private memory that a BlockFile can be read into: `nbytes`, whole pages, at a page's address."""
    assert nbytes % SLOT_ALIGN_BYTES == 0
    assert mmap.PAGESIZE % SLOT_ALIGN_BYTES == 0
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def problem_of(err: OSError) -> MoveProblem:
    """The reason that a failed move is counted by. A slot is blamed only for what a block device says of its sectors;
    whatever else went wrong (device unplugged, out of memory, stale mount) is the drive's: GONE."""
    return _PROBLEMS.get(err.errno or 0, MoveProblem.GONE)


def no_room(path: Path, nbytes: int, err: OSError) -> ConfigError:
    """What to tell the operator when `resize(nbytes)` of the file at `path` raised a NO_SPACE error."""
    stat = os.statvfs(path.parent)
    free = stat.f_bavail * stat.f_frsize
    return ConfigError(
        f"nvme_bytes: {nbytes} bytes for {path} cannot be had ({err.strerror}); {free} bytes are free there,"
        f" use fewer or free some",
        field="nvme_bytes",
        value=nbytes,
        free=free,
    )


def sync_folder(folder: Path) -> None:
    """A new file's name outlives a power cut only when its folder is synced too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
