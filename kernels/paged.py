"""An engine's paged KV cache as the rest of the house sees it: pages whose bytes are stored blocks.

The included engine keeps one torch tensor `[num_pages, L, H, T, P, D]` (BlockLayout's order), so that page `i` is block
bytes as they are stored, and moving a block is one copy of `block_nbytes` bytes. Other engines' caches get their
description here when there are kernels to pack them.
"""

import numpy as np
import numpy.typing as npt
import torch

from kvstore.core.errors import ConfigError
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


def pages_as_bytes(pages: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A view `[num_pages, page_nbytes] uint8` of the pages: shares their memory, valid as long as they are."""
    assert pages.device.type == "cpu", pages.device
    assert pages.is_contiguous()
    view: npt.NDArray[np.uint8] = pages.view(pages.shape[0], -1).view(torch.uint8).numpy()
    return view


def page_bytes(pages: torch.Tensor, block_id: int) -> npt.NDArray[np.uint8]:
    """A view `[page_nbytes] uint8` of one page, for np.copyto in either direction (which releases the GIL)."""
    assert 0 <= block_id < pages.shape[0], (block_id, pages.shape[0])
    view: npt.NDArray[np.uint8] = pages_as_bytes(pages)[block_id]
    return view
