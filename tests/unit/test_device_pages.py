"""Copies between a device's pages and blocks: in Triton's interpreter, where the device is the host; and what needs no device."""

import gc
import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from device_pages_cases import CHECKS, AllMemory, new_blocks
from pack_cases import LAYERS, Case, Shape, tensor_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvstore.engine_connector.protocol import BatchedPages
from kvstore.kernels import streams
from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.host_pages import host_pages
from kvstore.kernels.pinned import CudaHostMemory, PinnedMemory
from kvstore.kernels.streams import HostStream
from kvstore.kernels.way_choice import Choice, Measured

pytest.importorskip("triton", reason="triton is installed on Linux only")

INTERPRETER_DEADLINE_S = 110.0
PIECE = 4096


@pytest.fixture(scope="module")
def problems(interpreter_env) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "device_pages_cases.py")],
        env=interpreter_env,
        capture_output=True,
        text=True,
        timeout=INTERPRETER_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {outcome["name"]: outcome["problem"] for outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", CHECKS)
def test_device_pages_do_as_they_promise(problems, name):
    assert not problems[name]


def test_they_are_what_a_worker_side_gives_many_blocks_at_once():
    from kvstore.kernels.device_pages import DevicePages

    pages = Case("packed", Shape(2, 4, 16), "float16", "").pages(seed=1)
    copies = DevicePages(pages, memory=AllMemory())
    blocks = new_blocks(copies.page_nbytes, 2)

    copies.copy_out_blocks([3, 0], blocks, range(LAYERS))  # as runs of bytes: no kernel

    assert isinstance(copies, BatchedPages)
    assert copies.ways[0] == "runs"
    assert [block.tobytes() for block in blocks] == [tensor_of(pages)[page].numpy().tobytes() for page in (3, 0)]


@pytest.mark.parametrize("place", ["packed", "separate NHD"])
def test_pages_of_inference_mode_are_written_from_the_device_too(place):
    from kvstore.kernels.device_pages import DevicePages

    with torch.inference_mode():
        pages = Case(place, Shape(2, 4, 16), "float16", "").pages(seed=1)
    copies = DevicePages(pages, memory=AllMemory())
    (block,) = new_blocks(copies.page_nbytes, 1, seed=2)

    copies.copy_in_device(1, torch.from_numpy(block))

    (like,) = new_blocks(copies.page_nbytes, 1)
    host_pages(pages).copy_out(1, like)
    assert like.tobytes() == block.tobytes()


def test_a_copy_from_the_device_that_fails_has_ended_when_it_says_so(monkeypatch):
    """What it had queued would be written over what the engine computes into the page instead."""
    from kvstore.kernels import device_pages

    class Near(HostStream):
        num_ended = 0

        def synchronize(self) -> None:
            self.num_ended += 1

    def fail(*_) -> None:
        raise torch.OutOfMemoryError

    pages = Case("separate NHD", Shape(2, 4, 16), "float16", "fp8_e4m3").pages(seed=1)
    copies = device_pages.DevicePages(pages, BlockPart.of(pages, quantisation="fp8_e4m3"), memory=AllMemory())
    copies._near = Near()
    monkeypatch.setattr(device_pages, "unpack", fail)

    with pytest.raises(torch.OutOfMemoryError):
        copies.copy_in_device(1, torch.zeros(copies.page_nbytes, dtype=torch.uint8))

    assert copies._near.num_ended == 1


# --- the order of a ring: what one stream does to a slot comes after what another did to it before ------------------------


class Order:
    """Streams that count, and know of each other what they have waited for (vector clocks); and who touched which slot when."""

    def __init__(self) -> None:
        self.current: list[ClockStream] = []
        self.touched: list[tuple[int, ClockStream, int]] = []  # slot, stream, its count
        self.races: list[int] = []

    def touch(self, slot: int) -> None:
        stream = self.current[-1]
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        for other_slot, other, count in self.touched:
            if other_slot == slot and stream.clock.get(other, 0) < count:
                self.races.append(slot)
        self.touched.append((slot, stream, stream.clock[stream]))

    @contextmanager
    def on(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()


class ClockStream:
    def __init__(self) -> None:
        self.clock: dict[ClockStream, int] = {}

    def wait(self, clock) -> None:
        for stream, count in clock.items():
            self.clock[stream] = max(count, self.clock.get(stream, 0))

    def wait_stream(self, stream) -> None:
        self.wait(stream.clock)

    def wait_event(self, event) -> None:
        self.wait(event.clock)

    def synchronize(self) -> None:
        """The host waits; no stream does."""


class ClockEvent:
    def __init__(self) -> None:
        self.clock: dict[ClockStream, int] = {}

    def record(self, stream) -> None:
        self.clock = dict(stream.clock)


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_a_slot_of_the_ring_is_never_filled_while_it_is_emptied(monkeypatch, direction):
    """Nor the other way round, within a call and from one call to the next."""
    from kvstore.kernels import device_moves

    order = Order()
    pages = Case("separate NHD", Shape(2, 4, 16), "float16", "").pages(seed=1)
    part = BlockPart.of(pages)

    class TouchingPacker:
        def __init__(self, *_) -> None:
            pass

        def pack(self, moves, layers) -> None:
            ring = way._ring
            for slot in {(address - ring.data_ptr()) // ring.stride(0) for address in moves[:, 1].tolist()}:
                order.touch(slot)

        unpack = pack

    class TouchingStaged(device_moves.Staged):
        def _pairs(self, batch, slot, group):
            order.touch(slot)
            return super()._pairs(batch, slot, group)

    monkeypatch.setattr(device_moves, "Packer", TouchingPacker)
    monkeypatch.setattr(device_moves, "RING_SLOT_BYTES", 2 * part.layout.nbytes)
    monkeypatch.setattr(device_moves, "new_stream", lambda device: ClockStream())
    monkeypatch.setattr(device_moves, "new_event", lambda device: ClockEvent())
    monkeypatch.setattr(device_moves, "on", order.on)
    way = TouchingStaged(pages, part, ClockStream())
    blocks = new_blocks(part.layout.nbytes, 5)

    for _ in range(2):
        getattr(way, direction)(device_moves.Batch(range(5), blocks, range(LAYERS)))

    assert len(order.touched) == 2 * 3 * 2  # calls, groups, a kernel and copies
    assert order.races == []


class NewTensors(TorchDispatchMode):
    """Names of operations whose result lies in none of their arguments' memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        for each in tree_leaves(result):
            if torch.is_tensor(each) and each.untyped_storage().data_ptr() not in known:
                self.made_by.append(str(func))
        return result


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
@pytest.mark.parametrize("way", ["runs", "staged", "direct"])
def test_a_way_allocates_nothing_after_its_construction(monkeypatch, way, direction):
    """Kernels allocate nothing by themselves."""
    from kvstore.kernels import device_moves
    from kvstore.kernels.host_pages import layer_runs

    moved = []

    class NoPacker:
        def __init__(self, *_) -> None:
            pass

        def pack(self, moves, layers) -> None:
            moved.append(len(moves))

        unpack = pack

    monkeypatch.setattr(device_moves, "Packer", NoPacker)
    place = "packed" if way == "runs" else "separate NHD"
    pages = Case(place, Shape(2, 4, 16), "float16", "").pages(seed=1)
    part, compute = BlockPart.of(pages), streams.new_stream(pages.first.device)
    monkeypatch.setattr(device_moves, "RING_SLOT_BYTES", 2 * part.layout.nbytes)
    mover = {
        "runs": lambda: device_moves.Runs(layer_runs(pages, part), part, compute),
        "staged": lambda: device_moves.Staged(pages, part, compute),
        "direct": lambda: device_moves.Direct(pages, part, compute),
    }[way]()
    blocks = new_blocks(part.layout.nbytes, 5)

    with NewTensors() as new:
        torch.ones(1)
        made_before = len(new.made_by)
        for layers in (range(LAYERS), range(1, LAYERS)):
            getattr(mover, direction)(device_moves.Batch(range(5), blocks, layers))

    assert made_before == 1
    assert new.made_by[made_before:] == []
    assert moved == {"runs": [], "staged": [2, 2, 1] * 2, "direct": [5] * 2}[way]


# --- page-locked memory ----------------------------------------------------------------------------------------------------


def arena(nbytes: int) -> np.ndarray:
    return np.frombuffer(bytearray(nbytes), np.uint8)


def test_memory_is_page_locked_piece_by_piece_as_it_is_used_and_let_go_with_its_array():
    system = AllMemory()
    pinned, memory = PinnedMemory(system, piece_nbytes=PIECE), arena(2 * PIECE + 100)
    start = memory.ctypes.data

    assert pinned.pin(memory[PIECE + 8 : PIECE + 16])
    assert system.registered == {start + PIECE: PIECE}
    assert pinned.pin(memory[PIECE + 16 : 2 * PIECE])
    assert pinned.pin(memory[2 * PIECE :])
    assert system.registered == {start + PIECE: PIECE, start + 2 * PIECE: 100}

    del memory
    gc.collect()

    assert system.registered == {}


def test_memory_across_two_pieces_by_itself_or_refused_is_not_page_locked():
    class NoMemory(AllMemory):
        calls = 0

        def register(self, address, nbytes):
            self.calls += 1
            return False

    system, memory = AllMemory(), arena(2 * PIECE)
    pinned = PinnedMemory(system, piece_nbytes=PIECE)

    assert not pinned.pin(memory[PIECE - 1 : PIECE + 1])
    assert not pinned.pin(memory)
    assert not pinned.pin(np.zeros(8, np.uint8))
    assert system.registered == {}

    refusing = NoMemory()
    pinned = PinnedMemory(refusing, piece_nbytes=PIECE)
    assert not pinned.pin(memory[:8])
    assert not pinned.pin(memory[8:16])
    assert refusing.calls == 1
    del memory
    gc.collect()
    assert refusing.registered == {}


class Cudart:
    """torch.cuda.cudart() of a system that page-locks so many bytes. Names and order of arguments are the runtime's."""

    def __init__(self, most_nbytes: int) -> None:
        self.most_nbytes, self.locked = most_nbytes, {}

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 3, "portable and mapped"
        if size > self.most_nbytes:
            return 2
        self.locked[ptr] = size
        return 0

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        return 0 if self.locked.pop(ptr, None) else 713

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return f"error {error}"


def test_a_system_that_does_not_page_lock_is_believed_and_said_once(monkeypatch, caplog):
    cudart = Cudart(most_nbytes=PIECE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    system, memory = CudaHostMemory(torch.device("cpu")), arena(2 * PIECE)

    small, large = PinnedMemory(system, piece_nbytes=PIECE), PinnedMemory(system, piece_nbytes=2 * PIECE)

    assert small.pin(memory[8:16])
    assert [large.pin(memory[8:16]), large.pin(memory[PIECE:])] == [False, False]
    assert [record.getMessage() for record in caplog.records] == [
        f"memory not page-locked nbytes={2 * PIECE} reason=error 2"
    ]
    del memory
    gc.collect()
    assert cudart.locked == {}


# --- the choice ------------------------------------------------------------------------------------------------------------


def test_the_quickest_way_is_taken_at_each_size_and_a_kernel_must_be_quicker_by_a_quarter():
    choice = Choice(
        [
            Measured("staged", 1_000, 9e-6),
            Measured("direct", 1_000, 5e-6),
            Measured("staged", 1_000_000, 50e-6),
            Measured("direct", 1_000_000, 41e-6),
        ]
    )

    assert [choice.way(nbytes) for nbytes in (1, 1_000, 20_000, 50_000, 10**9)] == ["direct"] * 3 + ["staged"] * 2


def test_enough_is_the_smallest_size_that_reaches_nearly_the_best_bandwidth():
    sizes = {1_000: 0.1e9, 100_000: 30e9, 2_000_000: 46e9, 16_000_000: 50e9}
    choice = Choice([Measured("runs", nbytes, nbytes / speed) for nbytes, speed in sizes.items()])

    assert choice.enough_nbytes == 2_000_000


def test_a_machine_without_cuda_bindings_or_a_device_has_no_direct_way():
    from kvstore.kernels.pinned import _kernels_reach_host_addresses

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert _kernels_reach_host_addresses(torch.device("cuda", 0)) is False
