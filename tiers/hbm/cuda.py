"""Memory of one GPU, shared between processes by a POSIX descriptor (CUDA driver API, "Virtual Memory Management").

    sidecar   cuMemCreate -> cuMemExportToShareableHandle -> fd
    engine    fd -> cuMemImportFromShareableHandle -> cuMemAddressReserve -> cuMemMap -> cuMemSetAccess -> a torch tensor

Legacy IPC handles (cudaIpcGetMemHandle) would need shared pid and IPC namespaces, which pods do not have; a descriptor needs a
Unix socket only. cuda-bindings is imported when it is first needed; it can be there without a driver, and then says so at
cuInit, by an exception whose class differs between its versions. Has not run on a GPU.
"""

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import ConfigError


class CudaMemory:
    """See memory.DeviceMemory. Needs the driver, and no context: nothing is mapped here, and no kernel launched."""

    def __init__(self, ordinal: int, nbytes: int, *, driver: Any = None) -> None:
        """`driver`: cuda.bindings.driver, or what stands for it."""
        self.device = f"cuda:{ordinal}"
        self.nbytes = nbytes
        self._ordinal = ordinal
        self._driver = driver
        self._handle: Any = None
        self._fd = -1

    @property
    def fd(self) -> int:
        """See DeviceMemory."""
        assert self._fd >= 0, "the memory is not open"
        return self._fd

    def open(self) -> None:
        """See DeviceMemory."""
        assert self._handle is None
        cuda = _Calls("hbm_device", self.device, self._driver)
        cuda.start(self._ordinal)
        driver, prop = cuda.driver, cuda.allocation(self._ordinal)
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = cuda.call("cuMemGetAllocationGranularity", prop, recommended)
        self.nbytes = self.nbytes // granularity * granularity
        if not self.nbytes:
            raise ConfigError(
                f"hbm_slab_bytes: less than {self.device} gives out; use at least {granularity} bytes",
                field="hbm_slab_bytes",
                value=granularity,
            )
        try:
            self._handle = cuda.call("cuMemCreate", self.nbytes, prop, 0)
            self._fd = int(cuda.call("cuMemExportToShareableHandle", self._handle, cuda.posix_descriptor, 0))
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """See DeviceMemory."""
        if self._fd >= 0:
            os.close(self._fd)
        if self._handle is not None:
            _Calls("hbm_device", self.device, self._driver).call("cuMemRelease", self._handle)
        self._fd, self._handle = -1, None


class CudaMapping:
    """See memory.DeviceMapping. Mapped into the device's primary context, which is torch's, until the process ends: an engine's
    views of it cannot be called back, and a mapping costs address space only."""

    def __init__(self, ordinal: int, fd: int, nbytes: int, *, driver: Any = None) -> None:
        self._device = f"cuda:{ordinal}"
        self._nbytes = nbytes
        self._bytes: Any = None  # torch's view, made when it is first needed
        try:
            cuda = _Calls("slab", self._device, driver)
            cuda.start(ordinal)
            device = cuda.call("cuDeviceGet", ordinal)
            cuda.call("cuDevicePrimaryCtxRetain", device)
            handle = cuda.call("cuMemImportFromShareableHandle", fd, cuda.posix_descriptor)
            self.address = int(cuda.call("cuMemAddressReserve", nbytes, 0, 0, 0))
            cuda.call("cuMemMap", self.address, nbytes, 0, handle, 0)
            cuda.call("cuMemSetAccess", self.address, nbytes, [cuda.read_write(ordinal)], 1)
            cuda.call("cuMemRelease", handle)  # the mapping keeps the memory
        finally:
            os.close(fd)

    def slot(self, offset: int, nbytes: int) -> Any:
        """See DeviceMapping."""
        assert 0 <= offset <= offset + nbytes <= self._nbytes, (offset, nbytes)
        if self._bytes is None:
            torch = importlib.import_module("torch")
            self._bytes = torch.as_tensor(_DeviceArray(self.address, self._nbytes), device=self._device)
        return self._bytes[offset : offset + nbytes]

    def write(self, offset: int, block: NDArray[np.uint8]) -> None:
        """See DeviceMapping."""
        torch = importlib.import_module("torch")
        self.slot(offset, len(block)).copy_(torch.from_numpy(block))
        torch.cuda.current_stream(self._device).synchronize()


class _DeviceArray:
    """What torch makes a tensor of without a copy (numba's CUDA array interface, version 3)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class _Calls:
    """The driver's calls, whose errors become ConfigError of `field`."""

    def __init__(self, field: str, device: str, driver: Any) -> None:
        self._field = field
        self._device = device
        self.driver = driver or self._import()

    @property
    def posix_descriptor(self) -> Any:
        """The kind of handle."""
        return self.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def start(self, ordinal: int) -> None:
        """Whether there is such a device."""
        self.call("cuInit", 0)
        if ordinal >= (count := self.call("cuDeviceGetCount")):
            raise self._refusal(f"this machine has {count} CUDA devices")

    def allocation(self, ordinal: int) -> Any:
        """What to take: memory of the device that can be exported."""
        prop = self.driver.CUmemAllocationProp()
        prop.type = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED  # CUDA's word for "stays where it is"
        prop.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = ordinal
        prop.requestedHandleTypes = self.posix_descriptor
        return prop

    def read_write(self, ordinal: int) -> Any:
        """Who may do what with a mapping."""
        access = self.driver.CUmemAccessDesc()
        access.location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = self.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def call(self, name: str, *arguments: Any) -> Any:
        """What the call answers beside its status. Raises ConfigError."""
        try:
            status, *answers = getattr(self.driver, name)(*arguments)
        except RuntimeError as err:  # no libcuda.so.1; DynamicLibNotFoundError, newer versions' own class, is one
            raise self._refusal(f"there is no CUDA driver here ({err})") from err
        if int(status) != 0:
            raise self._refusal(f"{name} answered {getattr(status, 'name', status)}")
        return answers[0] if answers else None

    def _import(self) -> Any:
        try:
            return importlib.import_module("cuda.bindings.driver")
        except ImportError as err:
            raise self._refusal("cuda-bindings is not installed (pip install 'kvstore-tiered[gpu]')") from err

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._field}: {self._device} cannot be used: {reason}; use host, or leave the slab out",
            field=self._field,
            value=self._device,
        )
