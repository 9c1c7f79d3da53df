"""Pages in host memory, of any PageMap, for copying whole or by layers to and from stored blocks."""

import numpy as np
import numpy.typing as npt
import torch

from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.pack import pack, unpack
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import PagedCache


def host_pages(pages: PageMap, part: BlockPart | None = None) -> "PagedCache | HostPages":
    """The quickest way for these pages: as runs of bytes, where a page has its numbers in a block's order; else number by number.
    Without `part` they have all of the block, stored as it is."""
    part = part or BlockPart.of(pages)
    runs = layer_runs(pages, part)
    return HostPages(pages, part) if runs is None else PagedCache(runs, num_layers=pages.num_layers)


class HostPages:
    """Implements protocol.LayeredPages. `page_nbytes` is the whole block's size, also when the pages have a part of it; copies
    out write, and copies in read, that part alone. Layers are numbered as in `pages`. Any thread; blocks are writable
    (torch wants it so)."""

    def __init__(self, pages: PageMap, part: BlockPart) -> None:
        assert pages.first.device.type == "cpu", pages.first.device
        self._pages = pages
        self._part = part
        self.num_pages = pages.num_pages
        self.num_layers = pages.num_layers
        self.page_nbytes = part.layout.nbytes

    def copy_out(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Pack a page's part into `block [page_nbytes] uint8`. Releases the GIL."""
        self.copy_out_layers(block_id, block, range(self.num_layers))

    def copy_in(self, block_id: int, block: npt.NDArray[np.uint8]) -> None:
        """Unpack a page's part from `block [page_nbytes] uint8`. Releases the GIL."""
        self.copy_in_layers(block_id, block, range(self.num_layers))

    def copy_out_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of a page only these layers, to their place in `block`."""
        self._check(block_id, layers)
        if self._part.writer:
            pack(self._pages, self._part, block_id, torch.from_numpy(block), layers)

    def copy_in_layers(self, block_id: int, block: npt.NDArray[np.uint8], layers: range) -> None:
        """Of `block` only these layers, to their place in a page."""
        self._check(block_id, layers)
        with torch.inference_mode():  # an engine's pages may be tensors that only that mode lets us write
            unpack(self._pages, self._part, block_id, torch.from_numpy(block), layers)

    def _check(self, block_id: int, layers: range) -> None:
        assert 0 <= block_id < self.num_pages, (block_id, self.num_pages)
        assert 0 <= layers.start <= layers.stop <= self.num_layers, (layers, self.num_layers)
        assert layers.step == 1, layers


def layer_runs(pages: PageMap, part: BlockPart) -> list[torch.Tensor] | None:
    """If the pages have all of a block, and each layer of a page is one run of numbers in a block's order: views `[num_pages, n]`
    of them, one for each layer, or one for all if they are neighbours. Of pages on any device."""
    layout = part.layout
    layer_nbytes, *_, plane_nbytes, item_nbytes = layout.strides_bytes
    bases = pages.bases()
    whole = not part.is_quantised and part.writer and (len(part.layers), len(part.heads)) == layout.shape[:2]
    beside = all(base == planes[0] + i * plane_nbytes for planes in bases for i, base in enumerate(planes))
    if not (whole and beside and _in_block_order(pages)):
        return None
    layer_numel = layer_nbytes // item_nbytes
    neighbours = pages.stacked is not None and all(
        planes[0] == bases[0][0] + layer * layer_nbytes for layer, planes in enumerate(bases)
    )
    layers_a_run = pages.num_layers if neighbours else 1
    run = (pages.num_pages, layers_a_run * layer_numel)
    stride = pages.strides.page or run[1]
    return [planes[0].as_strided(run, (stride, 1)) for planes in pages.views[::layers_a_run]]


def _in_block_order(pages: PageMap) -> bool:
    _, heads, tokens, dims = pages.first.shape
    row = pages.num_planes * dims
    wanted = zip((tokens * row, row, 1), (heads, tokens, dims), pages.strides[1:], strict=True)
    return all(size == 1 or stride == block_stride for block_stride, size, stride in wanted)
