"""Host memory in a device's place: a memfd. Everything but the speed is as on a GPU, so all tests run on it."""

import fcntl
import mmap
import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.tiers.generation_table import sized_memfd
from kvstore.tiers.host_memory import available_memory_bytes


class HostMemory:
    """See memory.DeviceMemory. Its pages are taken at once, so that they are charged to the sidecar."""

    device = "host"

    def __init__(self, nbytes: int, *, available_bytes: Callable[[], int] = available_memory_bytes) -> None:
        """`available_bytes`: what may be taken when it is opened; without looking, the kernel would kill somebody for it."""
        self.nbytes = nbytes // mmap.PAGESIZE * mmap.PAGESIZE
        self._available_bytes = available_bytes
        self._fd = -1

    @property
    def fd(self) -> int:
        """See DeviceMemory."""
        assert self._fd >= 0, "the memory is not open"
        return self._fd

    def open(self) -> None:
        """See DeviceMemory."""
        assert self._fd < 0
        available = self._available_bytes()
        if self.nbytes > available:
            raise ConfigError(
                f"hbm_slab_bytes: {self.nbytes} bytes of host memory asked for, {available} are available; use fewer",
                field="hbm_slab_bytes",
                value=self.nbytes,
                available=available,
            )
        try:
            self._fd = sized_memfd("kvstore-slab", self.nbytes)
            os.posix_fallocate(self._fd, 0, self.nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except OSError as err:
            self.close()
            raise ConfigError(
                f"hbm_slab_bytes: {self.nbytes} bytes of host memory cannot be had: {err.strerror}; use fewer",
                field="hbm_slab_bytes",
                value=self.nbytes,
            ) from err

    def close(self) -> None:
        """See DeviceMemory."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class HostMapping:
    """See memory.DeviceMapping. A fork does not inherit it: the sidecar watches the process that connected."""

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            mapping.madvise(mmap.MADV_DONTFORK)
            mapping.madvise(mmap.MADV_DONTDUMP)
        except (OSError, ValueError) as err:  # ValueError: the file is smaller than that
            raise ConfigError(f"slab: cannot be mapped: {err}", field="slab", value=nbytes) from err
        finally:
            os.close(fd)
        self._array: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)

    def slot(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See DeviceMapping."""
        assert 0 <= offset <= offset + nbytes <= len(self._array), (offset, nbytes)
        return self._array[offset : offset + nbytes]

    def write(self, offset: int, block: NDArray[np.uint8]) -> None:
        """See DeviceMapping."""
        np.copyto(self.slot(offset, len(block)), block)
