"""Which attention: torch's where the pages are in host memory, Triton's where they are on a GPU. Nobody else asks."""

from collections.abc import Callable, Sequence

import torch

from kvstore.engine_connector.engine.attention import DecodeBatch, PrefillChunk
from kvstore.engine_connector.engine.model import Attention


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
