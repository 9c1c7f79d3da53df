"""The sidecar's slab of device memory as a client process sees it."""

import logging
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError
from kvstore.tiers.hbm.memory import DeviceMapping, map_device_memory

logger = logging.getLogger(__name__)

HOST = "host"
_PAGE_SHIFT = 12  # an entry of the generation table for each 4 KiB


class ClientSlab(NamedTuple):
    """A mapping of one boot's slab and of its generation table. Read a slot, or write it, only as a lease says
    (core/plans.SlabUse); compare its generation before and after a copy. Whoever keeps a reference keeps the mapping."""

    boot_id: bytes
    device: str
    mapping: DeviceMapping
    generations: NDArray[np.uint64]

    def slot(self, offset: int, nbytes: int) -> Any:
        """See tiers/hbm/memory.DeviceMapping."""
        return self.mapping.slot(offset, nbytes)

    def write(self, offset: int, block: NDArray[np.uint8]) -> None:
        """Likewise."""
        self.mapping.write(offset, block)

    def is_current(self, offset: int, generation: int) -> bool:
        """Whether the slot is what was granted."""
        return int(self.generations[offset >> _PAGE_SHIFT]) == generation


def map_slab(boot_id: bytes, device: str, nbytes: int, fd: int, generations_fd: int) -> ClientSlab | None:
    """Takes and closes both descriptors. None, with a line in the log, where the device is not there: the arena serves all."""
    try:
        generations = mmap.mmap(generations_fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        generations.madvise(mmap.MADV_DONTFORK)
    except OSError:
        os.close(fd)
        raise
    finally:
        os.close(generations_fd)
    try:
        mapping = map_device_memory(device, fd, nbytes)
    except ConfigError as err:
        logger.warning("slab not mapped, all is read from the arena reason=%s", err.message)
        return None
    return ClientSlab(boot_id, device, mapping, np.frombuffer(generations, np.uint64))
