"""Host memory that a device copies from and to, and writes by itself: page-locked piece by piece as blocks in it are used.

The arena's memory belongs to the sidecar, and grows: page-locking it all at once would touch pages that nobody has used yet and
charge them to this process. A slot is only granted in memory that the sidecar has touched, so the 64 MiB around it are there.
"""

import logging
import weakref
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.limits import SEGMENT_BYTES

logger = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped (driver_types.h)


class HostMemory(Protocol):
    """What page-locks."""

    @property
    def reached_by_kernels(self) -> bool:
        """Whether kernels read and write page-locked memory at its host address."""
        ...

    def register(self, address: int, nbytes: int) -> bool:
        """Page-lock. False: the system does not let us."""
        ...

    def unregister(self, address: int) -> None:
        """The inverse, once, with the same address."""
        ...


class CudaHostMemory:
    """See HostMemory, of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore] # torch's gap
        self.reached_by_kernels = _kernels_reach_host_addresses(device)

    def register(self, address: int, nbytes: int) -> bool:
        """See HostMemory."""
        with torch.cuda.device(self._device):  # another thread's would be the first GPU, and cost memory there
            error = self._cudart.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
            if int(error):
                reason = self._cudart.cudaGetErrorString(error)
                logger.warning("memory not page-locked nbytes=%d reason=%s", nbytes, reason)
                self._forget_error()
        return not int(error)

    def unregister(self, address: int) -> None:
        """See HostMemory."""
        with torch.cuda.device(self._device):
            error = self._cudart.cudaHostUnregister(address)
            if int(error):
                logger.warning("memory stays page-locked reason=%s", self._cudart.cudaGetErrorString(error))
                self._forget_error()

    def _forget_error(self) -> None:
        """The runtime keeps a thread's last error for whoever asks next, which is torch after its next kernel."""
        try:
            torch.zeros(1, device=self._device)
        except RuntimeError as err:
            logger.debug("error taken back: %s", err)


class PinnedMemory:
    """Which memory is page-locked. One thread at a time. A piece is let go when the array that it belongs to is (a mapping's,
    before it is unmapped): nothing here keeps a mapping alive."""

    def __init__(self, memory: HostMemory, *, piece_nbytes: int = SEGMENT_BYTES) -> None:
        self._memory = memory
        self._piece_nbytes = piece_nbytes
        self._pieces: dict[int, dict[int, bool]] = {}  # by address of the whole array and number of the piece

    @property
    def reached_by_kernels(self) -> bool:
        """See HostMemory."""
        return self._memory.reached_by_kernels

    def pin(self, block: npt.NDArray[np.uint8]) -> bool:
        """Page-lock the memory around `block`, a slice of a larger array that begins a mapping (the arena). False: it is not
        page-locked, since it is by itself, lies across two pieces, or the system does not let us; copies of it work, but
        take longer."""
        whole = block.base
        if not isinstance(whole, np.ndarray) or not whole.flags.c_contiguous:
            return False
        start = whole.ctypes.data
        first = block.ctypes.data - start
        piece, last = first // self._piece_nbytes, (first + block.nbytes - 1) // self._piece_nbytes
        if piece != last:
            return False
        if start not in self._pieces:
            self._pieces[start] = {}
            weakref.finalize(whole, self._let_go, start)
        pieces = self._pieces[start]
        if piece not in pieces:
            at = piece * self._piece_nbytes
            pieces[piece] = self._memory.register(start + at, min(self._piece_nbytes, whole.nbytes - at))
        return pieces[piece]

    def _let_go(self, start: int) -> None:
        for piece, is_pinned in self._pieces.pop(start).items():
            if is_pinned:
                self._memory.unregister(start + piece * self._piece_nbytes)


def _kernels_reach_host_addresses(device: torch.device) -> bool:
    """By the driver's word: to try it on a device that does not would end this process's use of it."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return False
    attribute = runtime.cudaDeviceAttr.cudaDevAttrCanUseHostPointerForRegisteredMem
    error, value = runtime.cudaDeviceGetAttribute(attribute, device.index or 0)
    return not int(error) and bool(value)
