"""What every DeviceMemory keeps, and what the CUDA one asks of the driver. A GPU's own runs where there is one."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import ConfigError
from kvstore.tiers.hbm.cuda import CudaMapping, CudaMemory
from kvstore.tiers.hbm.memory import DeviceMemory, check_device, device_memory, map_device_memory

PAGE = 4096
NBYTES = 4 << 20


@pytest.fixture(params=["host", "cuda:0"])
def memory(request: pytest.FixtureRequest) -> Iterator[DeviceMemory]:
    made = device_memory(request.param, NBYTES)
    if request.param != "host":
        try:
            made.open()
        except ConfigError as err:
            pytest.skip(err.message)
    else:
        made.open()
    yield made
    made.close()


def mapped(memory: DeviceMemory) -> Any:
    return map_device_memory(memory.device, os.dup(memory.fd), memory.nbytes)


def block(seed: int, nbytes: int = PAGE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def host_copy(view: Any) -> np.ndarray:
    return view.copy() if isinstance(view, np.ndarray) else view.cpu().numpy()


def test_what_one_mapping_writes_another_reads(memory: DeviceMemory) -> None:
    one, other = mapped(memory), mapped(memory)
    blocks = {0: block(1), NBYTES // 2: block(2, 3 * PAGE), NBYTES - PAGE: block(3)}

    for offset, content in blocks.items():
        one.write(offset, content)

    for offset, content in blocks.items():
        assert (host_copy(other.slot(offset, len(content))) == content).all()


def test_host_memory_that_is_not_there_is_not_taken() -> None:
    memory = device_memory("host", NBYTES, available_bytes=lambda: NBYTES - 1)

    with pytest.raises(ConfigError, match=r"asked for, 4194303 are available; use fewer") as caught:
        memory.open()

    assert caught.value.fields["field"] == "hbm_slab_bytes"
    memory.close()


def test_a_mapping_outlives_the_memory_that_its_maker_closed(memory: DeviceMemory) -> None:
    mapping = mapped(memory)
    mapping.write(PAGE, block(4))
    memory.close()
    memory.close()

    assert (host_copy(mapping.slot(PAGE, PAGE)) == block(4)).all()


def test_a_mapping_takes_its_descriptor(memory: DeviceMemory) -> None:
    fd = os.dup(memory.fd)
    map_device_memory(memory.device, fd, memory.nbytes)

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_beyond_its_end_there_is_nothing(memory: DeviceMemory) -> None:
    mapping = mapped(memory)
    with pytest.raises(AssertionError):
        mapping.slot(memory.nbytes - PAGE, 2 * PAGE)


@pytest.mark.parametrize("name", ["", "cuda", "cuda:", "cuda:x", "cuda:-1", "gpu", "cuda:0 "])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_device(name)
    assert caught.value.fields["field"] == "hbm_device"


def test_a_descriptor_that_is_too_small_is_refused_and_closed() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, PAGE)
    with pytest.raises(ConfigError, match="slab"):
        map_device_memory("host", fd, NBYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# --- CUDA, as far as it goes without a GPU ---------------------------------------------------------------------------------


class FakeDriver:
    """cuda.bindings.driver as CudaMemory and CudaMapping call it, over the real bindings' own types."""

    GRANULARITY = 2 << 20

    def __init__(self, *, devices: int = 1, fails: str = "") -> None:
        real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
        for name in (
            "CUmemAllocationProp",
            "CUmemAllocationType",
            "CUmemLocationType",
            "CUmemAllocationHandleType",
            "CUmemAllocationGranularity_flags",
            "CUmemAccessDesc",
            "CUmemAccess_flags",
        ):
            setattr(self, name, getattr(real, name))
        self._devices, self._fails = devices, fails
        self._errors = real.CUresult
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self._answer(name, arguments)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        if name == self._fails:
            return (self._errors.CUDA_ERROR_OUT_OF_MEMORY, None)
        answers: dict[str, Any] = {
            "cuDeviceGetCount": self._devices,
            "cuMemGetAllocationGranularity": self.GRANULARITY,
            "cuMemCreate": SimpleNamespace(name="handle"),
            "cuDeviceGet": SimpleNamespace(name="device"),
            "cuMemAddressReserve": 0x7F0000000000,
        }
        if name == "cuMemExportToShareableHandle":
            answers[name] = os.memfd_create("exported")
        return (self._errors.CUDA_SUCCESS, answers.get(name))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_memory_is_taken_in_whole_pages_of_the_gpu_and_exported_as_a_descriptor() -> None:
    driver = FakeDriver(devices=2)
    memory = CudaMemory(1, 5 << 20, driver=driver)
    memory.open()

    (nbytes, prop, flags) = dict(driver.calls)["cuMemCreate"]
    assert (memory.nbytes, nbytes, flags) == (4 << 20, 4 << 20, 0)
    assert (prop.location.id, int(prop.location.type)) == (1, 1)
    assert int(prop.requestedHandleTypes) == 1, "a POSIX descriptor"
    os.fstat(memory.fd)
    fd = memory.fd
    memory.close()
    memory.close()
    assert driver.names().count("cuMemRelease") == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_imported_descriptor_is_mapped_for_reading_and_writing() -> None:
    driver, fd = FakeDriver(), os.memfd_create("imported")
    mapping = CudaMapping(0, fd, 4 << 20, driver=driver)

    calls = dict(driver.calls)
    assert calls["cuMemImportFromShareableHandle"][0] == fd
    assert calls["cuMemMap"][:3] == (mapping.address, 4 << 20, 0)
    (access,) = calls["cuMemSetAccess"][2]
    assert (access.location.id, int(access.flags)) == (0, 3)
    assert driver.names()[-1] == "cuMemRelease"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize("call", ["cuInit", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_what_the_driver_refuses_is_said_by_name_and_given_back(call: str) -> None:
    driver = FakeDriver(fails=call)
    with pytest.raises(ConfigError, match=f"cuda:0 cannot be used: {call} answered CUDA_ERROR_OUT_OF_MEMORY"):
        CudaMemory(0, 4 << 20, driver=driver).open()
    assert driver.names().count("cuMemRelease") == (call == "cuMemExportToShareableHandle")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="this machine has 1 CUDA devices"):
        CudaMemory(3, 4 << 20, driver=FakeDriver()).open()


def test_a_slab_smaller_than_a_page_of_the_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="hbm_slab_bytes"):
        CudaMemory(0, 1 << 20, driver=FakeDriver()).open()
