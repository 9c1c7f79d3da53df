"""The pinned tier's memory: one shared file in RAM that engines map, and the table of its slots' generations."""

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError, TierIOError
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES
from kvstore.tiers.generation_table import GenerationTable, sized_memfd
from kvstore.tiers.host_memory import available_memory_bytes


class Arena:
    """Two memfds: the arena itself, sealed against shrinking and growing, and one u64 generation for each 4 KiB of it.

        fd               | segment 0 | segment 1 | ... | segment n-1 |     engines map it read-write
        generations_fd   | u64 | u64 | ...  one per SLOT_ALIGN_BYTES  |    engines can only map it read-only

    `nbytes` is rounded down to whole segments. `open()` makes the memfds and this process's mappings, which takes no
    memory yet; `fault_segment` takes it, a segment at a time, so that pages are charged to this process and not to the
    engine that happens to write first. Only what is faulted should be given out. `close()` closes the descriptors; memory
    goes back when the last mapping of it, in any process, is gone. A view taken from `memory` or `generations` keeps it.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        assert segment_bytes % SLOT_ALIGN_BYTES == 0
        assert segment_bytes % mmap.PAGESIZE == 0
        self.nbytes = nbytes // segment_bytes * segment_bytes
        self.segment_bytes = segment_bytes
        self.faulted_nbytes = 0
        self._available_bytes = available_bytes
        self._fd = -1
        self._memory: NDArray[np.uint8] | None = None
        self._generations = GenerationTable(self.nbytes)
        if not self.nbytes:
            raise ConfigError(
                f"arena: {nbytes} bytes are less than one segment; use {segment_bytes} or more",
                field="arena",
                value=nbytes,
            )

    @property
    def fd(self) -> int:
        """Descriptor of the arena."""
        assert self._fd >= 0, "the arena is not open"
        return self._fd

    @property
    def generations_fd(self) -> int:
        """Descriptor of the generation table that cannot be written through."""
        return self._generations.fd

    @property
    def num_segments(self) -> int:
        """Segments in all."""
        return self.nbytes // self.segment_bytes

    @property
    def memory(self) -> NDArray[np.uint8]:
        """This process's view of the arena, `[nbytes] uint8`."""
        assert self._memory is not None, "the arena is not open"
        return self._memory

    @property
    def generations(self) -> NDArray[np.uint64]:
        """This process's writable view of the generation table, `[nbytes // SLOT_ALIGN_BYTES] uint64`."""
        return self._generations.table

    def open(self) -> Self:
        """Create and map. Raises ConfigError when the machine has not that much memory, TierIOError when it says no."""
        assert self._fd < 0
        available = self._available_bytes()
        if self.nbytes + self._generations.nbytes > available:
            raise ConfigError(
                f"arena: {self.nbytes} bytes asked for, {available} bytes of memory are available; use a smaller arena",
                field="arena",
                value=self.nbytes,
                available=available,
            )
        try:
            self._open_arena()
            self._generations.open()
        except OSError as err:
            self.close()
            raise TierIOError(f"arena: {err.strerror}", tier="pinned", errno=err.errno or 0) from err
        return self

    def fault_segment(self, segment: int) -> None:
        """Take memory for `segment`, which must be the next one. Blocks some 20 ms for 64 MiB; any one thread may call.

        Raises TierIOError when the kernel has no memory left; the segments before stay usable.
        """
        assert segment * self.segment_bytes == self.faulted_nbytes
        assert segment < self.num_segments
        try:
            os.posix_fallocate(self.fd, segment * self.segment_bytes, self.segment_bytes)
        except OSError as err:
            raise TierIOError(
                f"arena: no memory for segment {segment}: {err.strerror}", tier="pinned", errno=err.errno or 0
            ) from err
        self.faulted_nbytes += self.segment_bytes

    def close(self) -> None:
        """Close the descriptors and drop this process's views. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._memory = -1, None
        self._generations.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_arena(self) -> None:
        self._fd = fd = sized_memfd("kvstore-arena", self.nbytes)
        mapping = mmap.mmap(fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump of half a terabyte helps nobody
        self._memory = np.frombuffer(mapping, np.uint8)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
