"""Paged attention for the CPU: one interface (model.Attention), two shapes of work.

    PrefillChunk   one sequence, rows at positions start..end-1; attends to its pages 0..end-1 with a causal mask
    DecodeBatch    many sequences, one row each; sequences of a like length are gathered and attended together

Both write the rows' K and V to the 16-bit pages first and then read everything, their own rows included, back from the
pages: a token's result is the same whether its context was computed in this chunk, in an earlier one, or loaded.

A gather copies a layer's part of pages into fp32 `[H, tokens, P, D]`, in two passes over plain rows of memory:

    pages    | page 0: layer 0 head 0, head 1, .. | layer 1 head 0, .. |  ..  | page 1: ..       a row: T x P x D numbers of
    rows     [num_pages * L * H, T * P * D]                                                     one head of one layer of a page
    index    for each sequence, head, block: the row           ->  16 bit  [sequences, H, blocks, T, P, D]  ->  fp32

Its size depends only on the sequence's own length, never on its neighbours: neither the sum's order nor the time of a short
sequence changes when a long one joins the batch.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

GATHER_TOKENS = 256
"""Decode gathers are padded to multiples of this: at most 256 wasted tokens a sequence, a group of its own for each multiple."""


class LayerMissing(Exception):
    """A layer that the chunk attends to did not come in time; what was computed so far is of no use."""


class PrefillChunk:
    """Attention for the tokens [start, end) of one sequence. `pages [num_pages, L, H, T, P, D]`, `block_ids` its table.

    `wait_for_layer`: pages before `start` are still being loaded; called with each layer before it is read. When it returns
    False, LayerMissing is raised.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        block_ids: Sequence[int],
        start: int,
        end: int,
        wait_for_layer: Callable[[int], bool] | None = None,
    ) -> None:
        block_tokens = pages.shape[3]
        self._pages = pages
        self._wait_for_layer = wait_for_layer
        self._num_tokens, self._context = end - start, end
        self._table = torch.tensor(block_ids[: -(-end // block_tokens)])
        positions = torch.arange(start, end)
        self._slots = (self._table[positions // block_tokens], positions % block_tokens)
        visible = torch.arange(end) <= positions[:, None]
        self._mask = torch.zeros(end - start, end).masked_fill_(~visible, -torch.inf)
        self._gather = _Gather(pages, self._table[None])

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See model.Attention."""
        rows, heads, dim = q.shape
        n, kv_heads = self._num_tokens, k.shape[1]
        if self._wait_for_layer is not None and not self._wait_for_layer(layer):
            raise LayerMissing
        _write(self._pages, layer, self._slots, k[:n], v[:n])
        keys, values = self._gather(layer)
        # Query heads that share a KV head lie side by side: [H, group, n, D] against an expanded [H, group, context, D].
        grouped = q[:n].view(n, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        keys, values = (x[0, :, None, : self._context].expand(-1, heads // kv_heads, -1, -1) for x in (keys, values))
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return _padded(attended.permute(2, 0, 1, 3).reshape(n, heads * dim), rows)


class DecodeBatch:
    """Attention for one token of each of `len(block_tables)` sequences, at `positions`."""

    def __init__(self, pages: torch.Tensor, block_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        block_tokens = pages.shape[3]
        self._pages = pages
        last = [table[position // block_tokens] for table, position in zip(block_tables, positions, strict=True)]
        self._slots = (torch.tensor(last), torch.tensor(positions) % block_tokens)
        by_size: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            by_size.setdefault(position // GATHER_TOKENS, []).append(row)
        self._groups = [
            _DecodeGroup(pages, rows, [block_tables[r] for r in rows], [positions[r] for r in rows], size + 1)
            for size, rows in by_size.items()
        ]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See model.Attention."""
        n = self._slots[0].shape[0]
        _write(self._pages, layer, self._slots, k[:n], v[:n])
        if len(self._groups) == 1:
            return _padded(self._groups[0].attend(layer, q[:n], k.shape[1]), q.shape[0])
        out = q.new_zeros(q.shape[0], q.shape[1] * q.shape[2])
        for group in self._groups:
            out[group.rows] = group.attend(layer, q[group.rows], k.shape[1])
        return out


class _DecodeGroup:
    """The sequences of a decode batch whose contexts fit in the same multiple of GATHER_TOKENS."""

    def __init__(
        self,
        pages: torch.Tensor,
        rows: list[int],
        block_tables: list[Sequence[int]],
        positions: list[int],
        size: int,
    ) -> None:
        num_blocks = -(-size * GATHER_TOKENS // pages.shape[3])
        self.rows = torch.tensor(rows)
        # Padding repeats the sequence's first page: finite numbers that the mask hides.
        padded = [[*table[:num_blocks], *[table[0]] * (num_blocks - len(table))] for table in block_tables]
        visible = torch.arange(num_blocks * pages.shape[3]) <= torch.tensor(positions)[:, None]
        self._mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None, None]
        self._gather = _Gather(pages, torch.tensor(padded))

    def attend(self, layer: int, q: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """`[len(rows), num_heads * head_dim]` of q `[len(rows), num_heads, head_dim]`; the query heads of a KV head are the
        rows of one small product."""
        _, heads, dim = q.shape
        keys, values = self._gather(layer)
        grouped = q.reshape(-1, kv_heads, heads // kv_heads, dim)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return attended.reshape(-1, heads * dim)


class _Gather:
    """Brings a layer's K and V of some sequences together. The buffers are filled anew for each layer: fresh memory for
    each would page-fault."""

    def __init__(self, pages: torch.Tensor, tables: torch.Tensor) -> None:
        """`tables [sequences, blocks]` are page numbers."""
        num_pages, layers, self._heads, block_tokens, planes, dim = pages.shape
        sequences, num_blocks = tables.shape
        self._rows = pages.view(num_pages * layers * self._heads, block_tokens * planes * dim)
        first = tables[:, None, :] * (layers * self._heads) + torch.arange(self._heads)[:, None]
        self._index = first.view(-1)  # of layer 0, in order of sequence, head, block
        self._packed = torch.empty(len(self._index), self._rows.shape[1], dtype=pages.dtype)
        self._wide = torch.empty(self._packed.shape)
        self._shape = (sequences, self._heads, num_blocks * block_tokens, planes, dim)

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 views `[sequences, H, tokens, D]` of K and of V, good until the next call."""
        torch.index_select(self._rows, 0, self._index + layer * self._heads, out=self._packed)
        kv = self._wide.copy_(self._packed).view(self._shape)
        return kv[..., 0, :], kv[..., 1, :]


def _write(
    pages: torch.Tensor, layer: int, slots: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor, v: torch.Tensor
) -> None:
    """Store k and v `[n, H, D]` at (page, token in page), rounded to the pages' type."""
    block_ids, tokens = slots
    pages[:, layer][block_ids, :, tokens] = torch.stack([k, v], dim=2).to(pages.dtype)


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], x.shape[1])])
