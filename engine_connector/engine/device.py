"""What depends on where the pages are, host memory or a GPU: attention, and copies to and from stored blocks. Nobody else asks.

torch computes the rest of the model, on either.
"""

from collections.abc import Callable, Sequence

import torch

from kvstore.core.layout import BlockLayout
from kvstore.engine_connector.engine.attention import DecodeBatch, PrefillChunk
from kvstore.engine_connector.engine.model import Attention
from kvstore.engine_connector.protocol import LayeredPages
from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.host_pages import host_pages
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.paged import allocate_pages


def allocate(num_pages: int, layout: BlockLayout, dtype: str, device: torch.device) -> torch.Tensor:
    """Zeroed pages `[num_pages, L, H, T, P, D]`."""
    if device.type == "cpu":
        return allocate_pages(num_pages, layout, dtype)
    from kvstore.kernels.device_pages import allocate_device_pages  # imports triton

    return allocate_device_pages(num_pages, layout, dtype, device)


def block_copies(pages: torch.Tensor, quantisation: str = "") -> LayeredPages:
    """The pages, for copying to and from blocks in host memory, which are stored so (keys.QUANTISATIONS; "": as they are)."""
    packed = PageMap.packed(pages)
    part = BlockPart.of(packed, quantisation=quantisation)
    if pages.device.type == "cpu":
        return host_pages(packed, part)
    from kvstore.kernels.device_pages import DevicePages  # imports triton

    return DevicePages.open(packed, part)


def prefill_chunk(
    pages: torch.Tensor,
    block_ids: Sequence[int],
    start: int,
    end: int,
    wait_for_layer: Callable[[int], bool] | None = None,
) -> Attention:
    """See attention.PrefillChunk."""
    if pages.device.type == "cpu":
        return PrefillChunk(pages, block_ids, start, end, wait_for_layer)
    from kvstore.engine_connector.engine.gpu_attention import GpuPrefillChunk  # imports triton

    return GpuPrefillChunk(pages, block_ids, start, end, wait_for_layer)


def decode_batch(pages: torch.Tensor, block_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> Attention:
    """See attention.DecodeBatch."""
    if pages.device.type == "cpu":
        return DecodeBatch(pages, block_tables, positions)
    from kvstore.engine_connector.engine.gpu_attention import GpuDecodeBatch  # imports triton

    return GpuDecodeBatch(pages, block_tables, positions)
