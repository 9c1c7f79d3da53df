"""Three ways of moving blocks between a device's pages and host memory; DevicePages chooses.

    runs     page <----- copy engine -----> block                       pages that are blocks already: nothing to convert
    staged   page <- kernel -> ring <- copy engine -> block             a ring of two slots: one is packed while one is copied
    direct   page <------------ kernel -----------> block               the kernel reads and writes page-locked host memory

Each way has one thread, one direction, streams and memory of its own: nothing is allocated after construction. A copy out begins
after all that the engine has queued so far, and so does the write of a copy in; calls return when the bytes are there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import overlaps
from kvstore.kernels.streams import Stream, new_event, new_stream, on
from kvstore.kernels.triton_pack import Packer, check_moves

RING_SLOT_BYTES = 8 << 20
"""Or one block, if that is larger. Copies of 2 MiB reach full speed, so a slot of a few of them hides the kernel's time."""

MAX_BATCH = 1024
"""Blocks of one call; DevicePages cuts longer ones."""

_ROW_ALIGNMENT = 256  # bytes, of blocks in the ring


class Batch(NamedTuple):
    """Blocks `[page_nbytes] uint8` in host memory, writable (torch wants it so), and their pages; of each these layers."""

    block_ids: Sequence[int]
    blocks: Sequence[npt.NDArray[np.uint8]]
    layers: range


class Way(Protocol):
    """One way, of one direction."""

    def copy_out(self, batch: Batch) -> None:
        """Pages to blocks. Releases the GIL while it waits."""
        ...

    def copy_in(self, batch: Batch) -> None:
        """Blocks to pages; likewise."""
        ...


class Runs:
    """See Way. `pieces [num_pages, n] uint8`: the pages' bytes in a block's order, one piece or one a layer (layer_runs)."""

    def __init__(self, pieces: Sequence[torch.Tensor], part: BlockPart, compute: Stream) -> None:
        self._pieces = [piece.view(torch.uint8) for piece in pieces]
        self._layer_nbytes = part.layout.strides_bytes[0]
        self._compute = compute
        self._stream = new_stream(pieces[0].device)

    def copy_out(self, batch: Batch) -> None:
        """See Way."""
        with until_done(self._stream):
            self._stream.wait_stream(self._compute)
            for in_block, in_page in self._pairs(batch):
                in_block.copy_(in_page, non_blocking=True)

    def copy_in(self, batch: Batch) -> None:
        """See Way."""
        with until_done(self._stream):
            self._stream.wait_stream(self._compute)
            for in_block, in_page in self._pairs(batch):
                in_page.copy_(in_block, non_blocking=True)

    def _pairs(self, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first, last = batch.layers.start * self._layer_nbytes, batch.layers.stop * self._layer_nbytes
        sizes = [piece.shape[1] for piece in self._pieces]
        places = list(overlaps(sizes, first, last))
        for block_id, block in zip(batch.block_ids, batch.blocks, strict=True):
            for piece, in_block, in_page in places:
                yield torch.from_numpy(block[in_block]), self._pieces[piece][block_id, in_page]


class Staged:
    """See Way."""

    def __init__(self, pages: PageMap, part: BlockPart, compute: Stream) -> None:
        device = pages.first.device
        self._part = part
        self._packer = Packer(pages, part)
        self._moves = _MoveList(pages)
        self._compute = compute
        self._kernels, self._copies = new_stream(device), new_stream(device)
        row = -(-part.layout.nbytes // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        self._ring = torch.empty(2, max(1, RING_SLOT_BYTES // row), row, dtype=torch.uint8, device=device)
        self._filled, self._emptied = ([new_event(device) for _ in range(2)] for _ in "ab")

    def copy_out(self, batch: Batch) -> None:
        """See Way."""
        with until_done(self._kernels, self._copies):
            self._kernels.wait_stream(self._compute)
            moves = self._queue_moves(batch)
            for slot, group in self._groups(len(batch.blocks)):
                with on(self._kernels):
                    self._kernels.wait_event(self._emptied[slot])
                    self._packer.pack(moves[group], batch.layers)
                    self._filled[slot].record(self._kernels)
                with on(self._copies):
                    self._copies.wait_event(self._filled[slot])
                    for in_block, in_ring in self._pairs(batch, slot, group):
                        in_block.copy_(in_ring, non_blocking=True)
                    self._emptied[slot].record(self._copies)

    def copy_in(self, batch: Batch) -> None:
        """See Way. The copies to the ring wait for nobody."""
        with until_done(self._copies, self._kernels):
            moves = self._queue_moves(batch)
            self._kernels.wait_stream(self._compute)
            for slot, group in self._groups(len(batch.blocks)):
                with on(self._copies):
                    self._copies.wait_event(self._emptied[slot])
                    for in_block, in_ring in self._pairs(batch, slot, group):
                        in_ring.copy_(in_block, non_blocking=True)
                    self._filled[slot].record(self._copies)
                with on(self._kernels):
                    self._kernels.wait_event(self._filled[slot])
                    self._packer.unpack(moves[group], batch.layers)
                    self._emptied[slot].record(self._kernels)

    def _groups(self, num_blocks: int) -> Iterator[tuple[int, slice]]:
        """Slots of the ring in turn, and which of the batch go there."""
        rows = self._ring.shape[1]
        for number, first in enumerate(range(0, num_blocks, rows)):
            yield number % 2, slice(first, min(first + rows, num_blocks))

    def _queue_moves(self, batch: Batch) -> torch.Tensor:
        addresses = [
            self._ring[slot, row].data_ptr()
            for slot, group in self._groups(len(batch.blocks))
            for row in range(group.stop - group.start)
        ]
        with on(self._kernels):
            return self._moves.put(batch.block_ids, addresses)

    def _pairs(self, batch: Batch, slot: int, group: slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        runs = [slice(run.offset, run.offset + run.nbytes) for run in self._part.runs(batch.layers)]
        for row, block in enumerate(batch.blocks[group]):
            for run in runs:
                yield torch.from_numpy(block[run]), self._ring[slot, row, run]


class Direct:
    """See Way. The blocks are in page-locked memory that kernels reach at its host address, and aligned to 16 bytes."""

    def __init__(self, pages: PageMap, part: BlockPart, compute: Stream) -> None:
        self._packer = Packer(pages, part)
        self._moves = _MoveList(pages)
        self._compute = compute
        self._stream = new_stream(pages.first.device)

    def copy_out(self, batch: Batch) -> None:
        """See Way."""
        with until_done(self._stream):
            self._packer.pack(self._queue_moves(batch), batch.layers)

    def copy_in(self, batch: Batch) -> None:
        """See Way."""
        with until_done(self._stream):
            self._packer.unpack(self._queue_moves(batch), batch.layers)

    def _queue_moves(self, batch: Batch) -> torch.Tensor:
        self._stream.wait_stream(self._compute)
        return self._moves.put(batch.block_ids, [block.ctypes.data for block in batch.blocks])


class _MoveList:
    """Page numbers and addresses, for a Packer: on the host, page-locked, and on the device."""

    def __init__(self, pages: PageMap) -> None:
        device = pages.first.device
        self._pages = pages
        self._here = torch.zeros(MAX_BATCH, 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._there = torch.zeros(MAX_BATCH, 2, dtype=torch.int64, device=device)
        self._rows: npt.NDArray[np.int64] = self._here.numpy()

    def put(self, block_ids: Sequence[int], addresses: Sequence[int]) -> torch.Tensor:
        """Queue the copy on the current stream; valid until the next put, which must wait until it has been used."""
        check_moves(self._pages, block_ids, addresses)
        count = len(block_ids)
        self._rows[:count, 0] = block_ids
        self._rows[:count, 1] = addresses
        return self._there[:count].copy_(self._here[:count], non_blocking=True)


@contextmanager
def until_done(*streams: Stream) -> Iterator[None]:
    """Queue on the first, and wait for all, also after an error: what was queued may still touch pages and blocks."""
    try:
        with (
            torch.inference_mode(),
            on(streams[0]),
        ):  # an engine's pages may be tensors that only that mode lets us write
            yield
    finally:
        for stream in streams:
            stream.synchronize()
