"""Pages in a GPU's memory, for copying whole or by layers to and from stored blocks in host memory.

The engine queues its kernels on one stream; the copies have two of their own, one each way, so that a load never queues behind
a save. A copy begins after all that the engine has queued so far, and the call returns when the bytes are there:

    engine    | writes page 7 | reads page 3 | ...      what the engine queues next, after a load was reported, sees its bytes
    out                       | page 7 -> block |       what the engine had queued when the copy was asked for is in the block
    in                                       | block -> page 3 |     nobody reads the page's old bytes any more
"""

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.errors import ConfigError
from kvstore.core.layout import BlockLayout
from kvstore.kernels.paged import TORCH_DTYPES


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


class DevicePages:
    """Page i of `pages [num_pages, L, ...]` is block bytes as they are stored. Make it on the thread that queues the engine's
    kernels: its current stream is the one that copies wait for. Copies may be asked for from any thread."""

    def __init__(self, pages: torch.Tensor) -> None:
        assert pages.device.type == "cuda", pages.device
        assert pages.is_contiguous(), pages.stride()
        self.num_pages, self.num_layers = pages.shape[:2]
        self._bytes = pages.view(self.num_pages, -1).view(torch.uint8)
        self.page_nbytes = self._bytes.shape[1]
        self._layer_nbytes = self.page_nbytes // self.num_layers
        self._compute = torch.cuda.current_stream(pages.device)
        self._out: torch.cuda.Stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call, unused-ignore] # torch's gap
        self._in: torch.cuda.Stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call, unused-ignore] # likewise

    def copy_out(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy a page into `block [page_nbytes] uint8`, writable. Releases the GIL."""
        self.copy_out_layers(block_id, block, range(self.num_layers))

    def copy_in(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy `block [page_nbytes] uint8`, writable (torch wants it so), into a page. Releases the GIL."""
        self.copy_in_layers(block_id, block, range(self.num_layers))

    def copy_out_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of a page only these layers, to their place in `block`."""
        run = self._run(block_id, block, layers)
        self._copy(self._out, torch.from_numpy(block[run]), self._bytes[block_id, run])

    def copy_in_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of `block` only these layers, to their place in a page."""
        run = self._run(block_id, block, layers)
        self._copy(self._in, self._bytes[block_id, run], torch.from_numpy(block[run]))

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        stream.wait_stream(self._compute)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.synchronize()

    def _run(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> slice:
        """Where the layers lie in a block, and alike in a page."""
        assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
        assert 0 <= block_id < self.num_pages, (block_id, self.num_pages)
        assert 0 <= layers.start <= layers.stop <= self.num_layers, (layers, self.num_layers)
        assert layers.step == 1, layers
        return slice(layers.start * self._layer_nbytes, layers.stop * self._layer_nbytes)
