"""A tier's generations in shared memory: whoever maps the tier can read them and only we can write them."""

import fcntl
import mmap
import os
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import SLOT_ALIGN_BYTES

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h, Linux 5.1; not among the names in Python's fcntl
_GENERATION_BYTES = 8


class GenerationTable:
    """A memfd with one u64 for each SLOT_ALIGN_BYTES of a tier of `tier_nbytes`, zeroed. `open()` makes it and this process's
    writable view; OSError is the caller's. `close()` closes the descriptor; a view taken from `table` keeps the memory."""

    def __init__(self, tier_nbytes: int) -> None:
        self.nbytes = tier_nbytes // SLOT_ALIGN_BYTES * _GENERATION_BYTES
        self._fd = -1
        self._table: NDArray[np.uint64] | None = None

    @property
    def fd(self) -> int:
        """Descriptor that cannot be written through."""
        assert self._fd >= 0, "the table is not open"
        return self._fd

    @property
    def table(self) -> NDArray[np.uint64]:
        """This process's writable view, `[tier_nbytes // SLOT_ALIGN_BYTES] uint64`."""
        assert self._table is not None, "the table is not open"
        return self._table

    def open(self) -> Self:
        """The mapping made before the seal stays writable; no later one can be, whoever reopens the file."""
        writable = sized_memfd("kvstore-generations", self.nbytes)
        try:
            mapping = mmap.mmap(writable, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self._fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)
        self._table = np.frombuffer(mapping, np.uint64)
        return self

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._table = -1, None


def sized_memfd(name: str, nbytes: int) -> int:
    """A memfd of that size, sealed against shrinking and growing. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd
