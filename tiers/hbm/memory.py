"""Device memory that another process can map: what the slab stands on, and which kind a device's name means.

    sidecar   DeviceMemory.open -> fd ──(the local socket, SCM_RIGHTS)──> DeviceMapping   engine: slot(offset, nbytes)

The sidecar makes the memory and hands out its slots; it maps nothing and copies nothing. An engine maps it next to its own
pages, and copies between the two as its pages do.
"""

import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.tiers.hbm.cuda import CudaMapping, CudaMemory
from kvstore.tiers.hbm.host import HostMapping, HostMemory
from kvstore.tiers.host_memory import available_memory_bytes

_CUDA = re.compile(r"cuda:(\d{1,3})")


class DeviceMemory(Protocol):
    """The sidecar's end. `nbytes` is what was asked for, rounded down to what the device gives out; known after `open`."""

    @property
    def device(self) -> str:
        """`host` or `cuda:N`."""
        ...

    @property
    def nbytes(self) -> int:
        """Whole size."""
        ...

    @property
    def fd(self) -> int:
        """Descriptor that another process maps it by; open until `close`."""
        ...

    def open(self) -> None:
        """Take the memory. Blocks. Raises ConfigError for a device that is not there, or has not so much."""
        ...

    def close(self) -> None:
        """Give it up; it goes back to the device when the last mapping, in any process, is gone. Idempotent."""
        ...


class DeviceMapping(Protocol):
    """An engine's end. Whoever keeps a slot's view keeps the mapping."""

    def slot(self, offset: int, nbytes: int) -> Any:
        """A view of these bytes, `[nbytes] uint8`, to be read: a numpy array (host) or a torch tensor on the device (cuda)."""
        ...

    def write(self, offset: int, block: NDArray[np.uint8]) -> None:
        """Copy a block from host memory to these bytes; it is there when the call returns. Releases the GIL."""
        ...


def device_memory(
    device: str, nbytes: int, *, available_bytes: Callable[[], int] = available_memory_bytes
) -> DeviceMemory:
    """Memory of that device, not taken yet; `available_bytes`: of the host's, how much may be. Raises ConfigError for a name
    that is none."""
    if device == "host":
        return HostMemory(nbytes, available_bytes=available_bytes)
    return CudaMemory(_ordinal(device), nbytes)


def map_device_memory(device: str, fd: int, nbytes: int) -> DeviceMapping:
    """Map what the sidecar has made; takes and closes `fd`, also when it raises: ConfigError where that device is not."""
    if device == "host":
        return HostMapping(fd, nbytes)
    return CudaMapping(_ordinal(device), fd, nbytes)


def check_device(device: str) -> None:
    """Raises ConfigError for a name that is none."""
    if device != "host":
        _ordinal(device)


def _ordinal(device: str) -> int:
    match = _CUDA.fullmatch(device)
    if match is None:
        raise ConfigError(
            f"hbm_device: {device!r} is not right; use cuda:N, or host to try it without a GPU",
            field="hbm_device",
            value=device,
        )
    return int(match[1])
