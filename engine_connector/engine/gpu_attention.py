"""Paged attention on a GPU: attention.py's two shapes of work, done by Triton's kernels (kernels/triton_attention.py).

Everything is queued on the current stream, and nothing here waits for it: a layer's rows are in the pages before the kernel
that attends to them begins, because both are in that one queue.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvstore.engine_connector.engine.attention import LayerMissing
from kvstore.kernels import triton_attention
from kvstore.kernels.triton_attention import BlockTables


class GpuDecodeBatch:
    """See attention.DecodeBatch. Sequences of any length go together: each program ends with its own sequence."""

    def __init__(self, pages: torch.Tensor, block_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        self._rows = _PagedRows(pages, BlockTables.build(pages, block_tables, [position + 1 for position in positions]))

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See model.Attention."""
        return self._rows.attend(layer, q, k, v)


class GpuPrefillChunk:
    """See attention.PrefillChunk."""

    def __init__(
        self,
        pages: torch.Tensor,
        block_ids: Sequence[int],
        start: int,
        end: int,
        wait_for_layer: Callable[[int], bool] | None = None,
    ) -> None:
        self._rows = _PagedRows(pages, BlockTables.build(pages, [block_ids], [end], num_rows=end - start))
        self._wait_for_layer = wait_for_layer

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See model.Attention."""
        if self._wait_for_layer is not None and not self._wait_for_layer(layer):
            raise LayerMissing
        return self._rows.attend(layer, q, k, v)


class _PagedRows(NamedTuple):
    pages: torch.Tensor
    tables: BlockTables

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = self.tables.total_rows
        triton_attention.write(self.pages, layer, self.tables, k[:n], v[:n])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        out[n:] = 0  # padding
        triton_attention.attend(out[:n], self.pages, layer, self.tables, q[:n])
        return out.view(q.shape[0], -1)
