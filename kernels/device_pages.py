"""Pages in a GPU's memory, of any PageMap, for copying whole or by layers to and from stored blocks in host memory.

The engine queues its kernels on one stream; the copies have some of their own, other ones each way, so that a load never queues
behind a save. A copy begins after all that the engine has queued so far, and the call returns when the bytes are there:

    engine    | writes page 7 | reads page 3 | ...      what the engine queues next, after a load was reported, sees its bytes
    out                       | page 7 -> block |       what the engine had queued when the copy was asked for is in the block
    in                                       | block -> page 3 |     nobody reads the page's old bytes any more

Which way the bytes go (device_moves.py), and how many layers are worth a call, is measured at the start on the device itself.
"""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.errors import ConfigError
from kvstore.core.layout import BlockLayout
from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.device_moves import MAX_BATCH, Batch, Direct, Runs, Staged, Way, until_done
from kvstore.kernels.host_pages import layer_runs
from kvstore.kernels.pack import unpack
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import TORCH_DTYPES
from kvstore.kernels.pinned import CudaHostMemory, HostMemory, PinnedMemory
from kvstore.kernels.streams import current_stream, new_stream
from kvstore.kernels.triton_pack import ALIGNMENT
from kvstore.kernels.way_choice import Choice, Measured

_MEASURED_BLOCKS = 8
_MEASURED_BYTES = 64 << 20  # of host memory, at most, for as long as it is measured
MEASURED_ROUNDS = 5


def allocate_device_pages(num_pages: int, layout: BlockLayout, dtype: str, device: torch.device) -> torch.Tensor:
    """A zeroed page cache `[num_pages, L, H, T, P, D]` on `device`, contiguous."""
    try:
        return torch.zeros(num_pages, *layout.shape, dtype=TORCH_DTYPES[dtype], device=device)
    except torch.OutOfMemoryError as err:
        raise ConfigError(
            f"num_pages: {num_pages} pages of {layout.nbytes} bytes do not fit in the memory of {device}; use fewer",
            field="num_pages",
            value=num_pages,
        ) from err


class _Lane(NamedTuple):
    """One direction."""

    ways: dict[str, Way]
    lock: threading.Lock


class DevicePages:
    """Implements protocol.BatchedPages. `page_nbytes` is the whole block's size, also when the pages have a part of it. Make it
    on the thread that queues the engine's kernels: its current stream is the one that copies wait for. Copies may be asked for
    from any thread; of each direction one goes on at a time.

    Until `measure` was called, copies go the first way of `ways`, all layers at once.
    """

    def __init__(self, pages: PageMap, part: BlockPart | None = None, *, memory: HostMemory | None = None) -> None:
        self._pages = pages
        self.part = part or BlockPart.of(pages)
        self.num_pages = pages.num_pages
        self.num_layers = pages.num_layers
        self.page_nbytes = self.part.layout.nbytes
        self._pinned = PinnedMemory(memory or CudaHostMemory(pages.first.device))
        self._pinning = threading.Lock()
        self._out, self._in = (_Lane(self._new_ways(), threading.Lock()) for _ in range(2))
        self._choices: dict[str, Choice] = {}
        self._runs = layer_runs(self._pages, self.part)
        self._near, self._compute = new_stream(pages.first.device), current_stream(pages.first.device)

    @classmethod
    def open(
        cls,
        pages: PageMap,
        part: BlockPart | None = None,
        *,
        memory: HostMemory | None = None,
        rounds: int = MEASURED_ROUNDS,
    ) -> Self:
        """Measured, and with all kernels compiled. What the pages hold stays."""
        copies = cls(pages, part, memory=memory)
        copies.measure(rounds=rounds)
        return copies

    @property
    def ways(self) -> tuple[str, ...]:
        """That these pages and this device have: runs or staged, direct."""
        return tuple(self._out.ways)

    def copy_out(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy a page into `block [page_nbytes] uint8`, writable. Releases the GIL."""
        self.copy_out_blocks([block_id], [block], range(self.num_layers))

    def copy_in(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy `block [page_nbytes] uint8`, writable (torch wants it so), into a page. Releases the GIL."""
        self.copy_in_blocks([block_id], [block], range(self.num_layers))

    def copy_in_device(self, block_id: int, block: torch.Tensor) -> None:
        """Copy `block [page_nbytes] uint8` into a page, from the same device's memory (a slab's slot): whole where a page has its
        numbers in a block's order."""
        assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
        assert 0 <= block_id < self.num_pages, (block_id, self.num_pages)
        with until_done(self._near):
            self._near.wait_stream(self._compute)
            if self._runs is None:
                unpack(self._pages, self.part, block_id, block, range(self.num_layers))
            else:
                numbers, first = block.view(self._runs[0].dtype), 0
                for run in self._runs:
                    end = first + run.shape[1]
                    run[block_id].copy_(numbers[first:end], non_blocking=True)
                    first = end

    def copy_out_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of a page only these layers, to their place in `block`."""
        self.copy_out_blocks([block_id], [block], layers)

    def copy_in_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of `block` only these layers, to their place in a page."""
        self.copy_in_blocks([block_id], [block], layers)

    def copy_out_blocks(
        self, block_ids: Sequence[int], blocks: Sequence[npt.NDArray[np.uint8]], layers: range, *, way: str = ""
    ) -> None:
        """Of many pages at once, these layers. `way`: that one, where it can be, instead of the one that was measured best."""
        self._check(block_ids, blocks, layers)
        if self.part.writer:
            with self._out.lock:
                for batch in _batches(block_ids, blocks, layers):
                    self._way(self._out, "out", batch, way).copy_out(batch)

    def copy_in_blocks(
        self, block_ids: Sequence[int], blocks: Sequence[npt.NDArray[np.uint8]], layers: range, *, way: str = ""
    ) -> None:
        """Into many pages at once; likewise."""
        self._check(block_ids, blocks, layers)
        with self._in.lock:
            for batch in _batches(block_ids, blocks, layers):
                self._way(self._in, "in", batch, way).copy_in(batch)

    def layers_a_copy(self, num_blocks: int) -> int:
        """So many layers of so many blocks are worth a call when the rest can follow: nearly the best bandwidth."""
        choice = self._choices.get("in")
        if choice is None:
            return self.num_layers
        of_one_layer = num_blocks * self._nbytes(range(1))
        return min(self.num_layers, -(-choice.enough_nbytes // of_one_layer))

    def measure(self, *, rounds: int = MEASURED_ROUNDS) -> dict[str, list[Measured]]:
        """Time each way in both directions, and go by that from now on. The pages have their old numbers afterwards."""
        layout_nbytes = self.page_nbytes
        count = max(1, min(_MEASURED_BLOCKS, self.num_pages, _MEASURED_BYTES // layout_nbytes))
        row = -(-layout_nbytes // 4096) * 4096
        memory = np.frombuffer(mmap.mmap(-1, count * row), np.uint8)  # pages of its own, as an arena's
        blocks = [memory[at : at + layout_nbytes] for at in range(0, count * row, row)]
        before = [[view[:count].clone() for view in planes] for planes in self._pages.views]
        measured = {
            "out": list(self._measured(self.copy_out_blocks, blocks, rounds)),
            "in": list(self._measured(self.copy_in_blocks, blocks, rounds)),
        }
        with torch.inference_mode():  # as in device_moves
            for planes, kept in zip(self._pages.views, before, strict=True):
                for view, numbers in zip(planes, kept, strict=True):
                    view[:count] = numbers
        current_stream(self._pages.first.device).synchronize()
        self._choices = {direction: Choice(points) for direction, points in measured.items()}
        return measured

    def _measured(
        self, copy: Callable[..., None], blocks: Sequence[npt.NDArray[np.uint8]], rounds: int
    ) -> Iterator[Measured]:
        for num_blocks in sorted({1, len(blocks)}):
            for num_layers in sorted({1, -(-self.num_layers // 4), self.num_layers}):
                layers = range(num_layers)
                for way in self.ways:
                    seconds = []
                    for _ in range(rounds + 1):
                        started_s = time.perf_counter()
                        copy(range(num_blocks), blocks[:num_blocks], layers, way=way)
                        seconds.append(time.perf_counter() - started_s)
                    # The first may have compiled a kernel.
                    yield Measured(way, num_blocks * self._nbytes(layers), float(np.median(seconds[1:])))

    def _new_ways(self) -> dict[str, Way]:
        pages, part, compute = self._pages, self.part, current_stream(self._pages.first.device)
        pieces = layer_runs(pages, part)
        ways: dict[str, Way] = {}
        if pieces is not None:
            ways["runs"] = Runs(pieces, part, compute)
        else:
            ways["staged"] = Staged(pages, part, compute)
        if self._pinned.reached_by_kernels:
            ways["direct"] = Direct(pages, part, compute)
        return ways

    def _way(self, lane: _Lane, direction: str, batch: Batch, wanted: str) -> Way:
        with self._pinning:
            pinned = [self._pinned.pin(block) for block in batch.blocks]
        choice = self._choices.get(direction)
        if not wanted and choice is not None:
            wanted = choice.way(len(batch.blocks) * self._nbytes(batch.layers))
        reachable = all(pinned) and all(block.ctypes.data % ALIGNMENT == 0 for block in batch.blocks)
        if wanted == "direct" and not reachable:
            wanted = ""
        return lane.ways[wanted or self.ways[0]]

    def _nbytes(self, layers: range) -> int:
        return sum(run.nbytes for run in self.part.runs(layers))

    def _check(self, block_ids: Sequence[int], blocks: Sequence[npt.NDArray[np.uint8]], layers: range) -> None:
        assert len(block_ids) == len(blocks), (len(block_ids), len(blocks))
        for block_id, block in zip(block_ids, blocks, strict=True):
            assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
            assert 0 <= block_id < self.num_pages, (block_id, self.num_pages)
        assert 0 <= layers.start <= layers.stop <= self.num_layers, (layers, self.num_layers)
        assert layers.step == 1, layers


def _batches(block_ids: Sequence[int], blocks: Sequence[npt.NDArray[np.uint8]], layers: range) -> Iterator[Batch]:
    for first in range(0, len(blocks) if layers else 0, MAX_BATCH):
        yield Batch(block_ids[first : first + MAX_BATCH], blocks[first : first + MAX_BATCH], layers)
