"""An engine's paged KV cache as the rest of the house sees it: pages whose bytes are stored blocks.

The included engine keeps one torch tensor `[num_pages, L, H, T, P, D]` (BlockLayout's order), so that page `i` is block
bytes as they are stored, and moving a block is one copy of `block_nbytes` bytes. vLLM keeps one tensor a layer, so that a
page is in as many pieces. `PagedCache` is both.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.errors import ConfigError, SpecMismatch
from kvstore.core.layout import BlockLayout

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def allocate_pages(num_pages: int, layout: BlockLayout, dtype: str) -> torch.Tensor:
    """A zeroed page cache `[num_pages, L, H, T, P, D]` in host memory, contiguous.

    The memory comes from calloc through numpy: a page that was never written costs no RAM. torch.zeros writes it all.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    assert torch_dtype.itemsize == layout.item_nbytes
    try:
        memory = np.zeros((num_pages, layout.nbytes), dtype=np.uint8)
    except MemoryError as err:
        raise ConfigError(
            f"num_pages: {num_pages} pages of {layout.nbytes} bytes do not fit in memory; use fewer",
            field="num_pages",
            value=num_pages,
        ) from err
    return torch.from_numpy(memory).view(torch_dtype).view(num_pages, *layout.shape)


class PagedCache:
    """The pages of one layer group, for copying whole or by layers: page i is row i of each piece, one after the other.

        pieces     layer 0 [num_pages, n0]    layer 1 [num_pages, n1]    ...      uint8 views of the engine's tensors
        block i    |          n0 bytes        |        n1 bytes          | ... |

    Built from tensors `[num_pages, ...]` in host memory, of which each page is one run of bytes, in whatever order its
    numbers are (a permuted view is fine, gaps between pages are fine). The views share the tensors' memory and are valid
    as long as they are. Raises SpecMismatch for a tensor that has no such pages.

    `num_layers` says that a block is so many layers of equal size, one after the other: in one piece for a tensor
    `[num_pages, num_layers, ...]`, or in as many pieces as there are layers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, num_layers: int = 1) -> None:
        assert tensors
        self._pieces = [pages_as_bytes(tensor) for tensor in tensors]
        self.num_pages = self._pieces[0].shape[0]
        assert all(piece.shape[0] == self.num_pages for piece in self._pieces)
        self.page_nbytes = sum(piece.shape[1] for piece in self._pieces)
        self.num_layers = num_layers
        self._layer_nbytes = self.page_nbytes // num_layers
        assert self._layer_nbytes * num_layers == self.page_nbytes, (self.page_nbytes, num_layers)
        assert len(tensors) == 1 or num_layers == 1 or all(p.shape[1] == self._layer_nbytes for p in self._pieces)

    def copy_out(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy a page into `block [page_nbytes] uint8`. Releases the GIL, and never broadcasts."""
        self.copy_out_layers(block_id, block, range(self.num_layers))

    def copy_in(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Copy `block [page_nbytes] uint8` into a page. Releases the GIL, and never broadcasts."""
        self.copy_in_layers(block_id, block, range(self.num_layers))

    def copy_out_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of a page only these layers, to their place in `block`."""
        for in_block, in_page in self._runs(block_id, block, layers):
            np.copyto(in_block, in_page)

    def copy_in_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of `block` only these layers, to their place in a page."""
        for in_block, in_page in self._runs(block_id, block, layers):
            np.copyto(in_page, in_block)

    def _runs(
        self, block_id: int, block: npt.NDArray[np.uint8], layers: range
    ) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """The layers' runs of bytes: in the block, and in the page."""
        assert block.shape == (self.page_nbytes,), (block.shape, self.page_nbytes)
        assert 0 <= block_id < self.num_pages, (block_id, self.num_pages)
        assert 0 <= layers.start <= layers.stop <= self.num_layers, (layers, self.num_layers)
        assert layers.step == 1, layers
        first, last = layers.start * self._layer_nbytes, layers.stop * self._layer_nbytes
        for piece, in_block, in_page in overlaps([piece.shape[1] for piece in self._pieces], first, last):
            yield block[in_block], self._pieces[piece][block_id, in_page]


def overlaps(sizes: Sequence[int], first: int, last: int) -> Iterator[tuple[int, slice, slice]]:
    """Of pieces of these sizes, in a row: which of them lie in [first, last), where in the whole, where in the piece."""
    start = 0
    for piece, size in enumerate(sizes):
        low, high = max(first, start), min(last, start + size)
        if low < high:
            yield piece, slice(low, high), slice(low - start, high - start)
        start += size


def pages_as_bytes(pages: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A view `[num_pages, page_nbytes] uint8` of the pages: shares their memory, valid as long as they are."""
    page_numel = pages[0].numel()
    if pages.device.type != "cpu" or not _is_one_run(pages[0]) or pages.stride(0) < page_numel:
        raise SpecMismatch(
            f"pages: {list(pages.shape)} with strides {list(pages.stride())} on {pages.device} has pages that are not one "
            "run of bytes each in host memory",
            field="pages",
            value=str(list(pages.shape)),
        )
    runs = pages.as_strided((pages.shape[0], page_numel), (pages.stride(0), 1))
    view: npt.NDArray[np.uint8] = runs.view(torch.uint8).numpy()
    return view


def _is_one_run(page: torch.Tensor) -> bool:
    """Whether the page's numbers fill one range of memory, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
