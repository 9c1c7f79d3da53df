"""The sidecar's arena as a client process sees it."""

import ctypes
import enum
import logging
import mmap
import os
import threading

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # linux/mman.h, Linux 5.14
_POPULATE_STEP_BYTES = 8 << 20  # mmap_lock is held for one step; some 2 ms
_FAULTED_POLL_S = 0.1
_STOP_DEADLINE_S = 1.0


class Arrival(enum.Enum):
    """What a slot's entry in the generation table says of a leased block (transport/WIRE.md, section 5)."""

    THERE = enum.auto()  # copy it, and look once more afterwards
    ON_ITS_WAY = enum.auto()  # look again later, within a deadline, and while the sidecar lives
    LOST = enum.auto()  # it will not come, or the lease is over


def arrival_of(entry: int, generation: int) -> Arrival:
    """Of a block that was granted with `generation`."""
    if entry == generation:
        return Arrival.THERE
    return Arrival.ON_ITS_WAY if entry == generation - 1 else Arrival.LOST


class ClientArena:
    """A mapping of one boot's arena and of its generation table. Takes both descriptors and closes them.

    `array` is `[nbytes] uint8`, shared and writable: write only into slots that a write lease names, read only those that a
    lease names. `generations` is `[nbytes // 4096] uint64`, read-only: the entry of a slot's first page is its generation;
    compare before and after a copy. Whoever keeps a reference to either keeps the mapping; `close` only ends the background
    work. A fork does not inherit the mapping (MADV_DONTFORK): the sidecar watches the process that connected, not its
    children.

    The first access to a page through a fresh mapping costs ten times the copy itself, so a thread populates what the
    sidecar has faulted so far, and nothing beyond: memory is charged to whoever touches it first.
    """

    def __init__(self, boot_id: bytes, nbytes: int, segment_nbytes: int, fd: int, generations_fd: int) -> None:
        self.boot_id = boot_id
        self._segment_nbytes = segment_nbytes
        self._fd = fd
        self._stop = threading.Event()
        try:
            generations = mmap.mmap(generations_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            for memory in (mapping, generations):
                memory.madvise(mmap.MADV_DONTFORK)
            mapping.madvise(mmap.MADV_DONTDUMP)
        except OSError:
            os.close(fd)
            raise
        finally:
            os.close(generations_fd)
        self.array: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.generations: NDArray[np.uint64] = np.frombuffer(generations, np.uint64)
        self._populator = threading.Thread(target=self._populate, name="kvstore-populate", daemon=True)
        self.populated_nbytes = 0

    def start(self) -> None:
        """Populate in the background."""
        self._populator.start()

    def close(self) -> None:
        """Stop populating and close the descriptor. Idempotent."""
        self._stop.set()
        if self._populator.is_alive():
            self._populator.join(_STOP_DEADLINE_S)
        elif self._fd >= 0:
            self._close_fd()

    def _populate(self) -> None:
        """Until the whole arena is populated or somebody closes. Faulted bytes are those the memfd has blocks for."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.array.ctypes.data)
        while self.populated_nbytes < len(self.array):
            faulted = os.fstat(self._fd).st_blocks * 512 // self._segment_nbytes * self._segment_nbytes
            until = min(faulted, self.populated_nbytes + _POPULATE_STEP_BYTES, len(self.array))
            if until <= self.populated_nbytes:
                if self._stop.wait(_FAULTED_POLL_S):
                    break
                continue
            start = ctypes.c_void_p((address.value or 0) + self.populated_nbytes)
            if libc.madvise(start, ctypes.c_size_t(until - self.populated_nbytes), _MADV_POPULATE_WRITE):
                logger.info("arena not populated beforehand reason=%s", os.strerror(ctypes.get_errno()))
                break  # an older kernel: pages are mapped as they are touched
            self.populated_nbytes = until
            if self._stop.is_set():
                break
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        os.close(fd)
