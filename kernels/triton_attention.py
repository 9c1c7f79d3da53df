"""Paged attention on the GPU, in Triton: write K and V of new rows into pages, and attend to a sequence's own pages.

Import this module only where pages are on a GPU: it needs triton. One layer of the pages `[num_pages, L, H, T, P, D]` is read
and written in place, by strides, in the 16 bit that it has; queries, sums and outputs are fp32.

One kernel attends, at two tile sizes: a decode batch is many sequences of one new row, a prefill chunk one sequence of many.
The query heads that share a KV head lie side by side in a tile, so that each K and V is read once for all of them:

    tile       | row 0: head 0, 1, 2 | row 1: head 0, 1, 2 | ..          of one KV head (here three query heads have one)
    attends to | page 3 | page 7 | page 4, only tokens up to the row's own position | nothing of what lies beyond is read

What a row sums, and in which order, depends only on its sequence and its place in the chunk, never on who else is in the
batch. The softmax is computed as the pages go by (Milakov and Gimelshein 2018; as in FlashAttention 2, Dao 2023). A product
is two in TF32, on tensor cores: 16-bit K and V are exact in TF32 (bfloat16 and float16 have no more than its 10 bits), the
other side is split in two. That leaves out 2^-21 of a factor, where one TF32 product would leave out 2^-10.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvstore.kernels.triton_numbers import rounded

# ruff: noqa: N803, PLR0917 (Triton's convention: what is known at compile time is written large; kernels have no keywords)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# A kernel's arguments have no types in Python: Triton takes every annotation but constexpr for a type of its own.

HEAD_DIMS = (16, 32, 64, 128, 256)
"""A tile spans the whole head, and Triton's tiles are powers of two; products want 16 at least."""

PAGE_DTYPES = (torch.float16, torch.bfloat16)

_DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"

_LOG2_E = math.log2(math.e)

_CHANGING = ["num_rows", "stride_table"]
"""Differ from step to step: a kernel of its own for the value 1, or multiples of 16, would only be compiled in mid-service."""


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Where the tokens of some sequences lie, on the pages' device. The last `num_rows` of each context are the new rows."""

    tables: torch.Tensor  # [sequences, blocks] int32, page numbers; what is beyond a context is never read
    contexts: torch.Tensor  # [sequences] int32: tokens of the sequence, the new rows included
    num_rows: int

    @property
    def total_rows(self) -> int:
        """New rows of all sequences."""
        return self.contexts.shape[0] * self.num_rows

    @classmethod
    def build(
        cls, pages: torch.Tensor, block_tables: Sequence[Sequence[int]], contexts: Sequence[int], *, num_rows: int = 1
    ) -> "BlockTables":
        """Asserts that every page that will be touched exists: the kernels cannot."""
        num_pages, block_tokens = pages.shape[0], pages.shape[3]
        used = [
            list(table[: -(-context // block_tokens)]) for table, context in zip(block_tables, contexts, strict=True)
        ]
        width = max(len(table) for table in used)
        for table, context in zip(used, contexts, strict=True):
            assert num_rows <= context <= len(table) * block_tokens, (num_rows, context, len(table))
            assert min(table) >= 0, table
            assert max(table) < num_pages, (max(table), num_pages)
        rows = torch.tensor([table + [0] * (width - len(table)) for table in used], dtype=torch.int32)
        lengths = torch.tensor(contexts, dtype=torch.int32)
        return cls(rows.to(pages.device), lengths.to(pages.device), num_rows)


@dataclass(frozen=True, slots=True)
class Tile:
    """How much one program works on at a time."""

    rows: int  # query heads x rows
    tokens: int
    num_warps: int
    num_stages: int


def tile_of(num_rows: int, head_dim: int) -> Tile:
    """For one row a sequence, of which a KV head's queries fill a part of the 16 rows that a product has at least, or for
    many. As large as no supported GPU spills registers for or lacks shared memory (99 KiB on the smallest)."""
    if num_rows == 1:
        return Tile(16, 32, 4, 2) if head_dim <= 64 else Tile(16, 32, 8, 2)
    if head_dim <= 64:
        return Tile(64, 32, 4, 2)
    return Tile(32, 32, 4, 2) if head_dim == 128 else Tile(32, 16, 8, 2)


def write(pages: torch.Tensor, layer: int, tables: BlockTables, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store k and v `[sequences * num_rows, H, D]` fp32 at their rows' places, rounded to the pages' type."""
    one_layer = _checked_layer(pages, layer, tables)
    heads, block_tokens, _, dim = one_layer.shape[1:]
    for x in (k, v):
        _check_rows(x, pages, tables.total_rows)
        assert x.shape[1:] == (heads, dim), (x.shape, one_layer.shape)
    _write_kernel[(tables.total_rows,)](
        one_layer,
        k,
        v,
        tables.tables,
        tables.contexts,
        tables.num_rows,
        k.stride(0),
        v.stride(0),
        *one_layer.stride()[:3],
        tables.tables.stride(0),
        HEADS=heads,
        HEADS_PADDED=triton.next_power_of_2(heads),
        HEAD_DIM=dim,
        BLOCK_TOKENS=block_tokens,
        num_warps=1,
        enable_fp_fusion=True,
    )


def attend(out: torch.Tensor, pages: torch.Tensor, layer: int, tables: BlockTables, q: torch.Tensor) -> None:
    """Into `out [sequences * num_rows, num_heads, D]`: what these rows of q (alike) see of their sequences up to themselves."""
    one_layer = _checked_layer(pages, layer, tables)
    kv_heads, block_tokens, _, dim = one_layer.shape[1:]
    heads = q.shape[1]
    for x in (q, out):
        _check_rows(x, pages, tables.total_rows)
        assert x.shape[2] == dim, (x.shape, one_layer.shape)
    assert out.shape == q.shape, (out.shape, q.shape)
    assert heads % kv_heads == 0, (heads, kv_heads)
    group = heads // kv_heads
    tile = tile_of(tables.num_rows, dim)
    _attend_kernel[(triton.cdiv(tables.num_rows * group, tile.rows), kv_heads, tables.contexts.shape[0])](
        out,
        q,
        one_layer,
        tables.tables,
        tables.contexts,
        dim**-0.5 * _LOG2_E,
        tables.num_rows,
        out.stride(0),
        q.stride(0),
        *one_layer.stride()[:3],
        tables.tables.stride(0),
        GROUP=group,
        HEAD_DIM=dim,
        BLOCK_TOKENS=block_tokens,
        TILE_ROWS=tile.rows,
        TILE_TOKENS=tile.tokens,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
    )


def _checked_layer(pages: torch.Tensor, layer: int, tables: BlockTables) -> torch.Tensor:
    """`[num_pages, H, T, 2, D]`, K and V of a token side by side."""
    assert pages.device.type == _DEVICE, (pages.device, _DEVICE)
    assert pages.dtype in PAGE_DTYPES, pages.dtype
    assert 0 <= layer < pages.shape[1], (layer, pages.shape)
    assert tables.tables.device == pages.device, (tables.tables.device, pages.device)
    one_layer = pages[:, layer]
    planes, dim = one_layer.shape[3:]
    assert planes == 2, one_layer.shape
    assert dim in HEAD_DIMS, dim
    assert one_layer.stride()[3:] == (dim, 1), one_layer.stride()
    return one_layer


def _check_rows(x: torch.Tensor, pages: torch.Tensor, num_rows: int) -> None:
    assert x.device == pages.device, (x.device, pages.device)
    assert x.dtype == torch.float32, x.dtype
    assert x.shape[0] == num_rows, (x.shape, num_rows)
    assert x.stride()[1:] == (x.shape[2], 1), x.stride()
    assert num_rows * x.stride(0) < 1 << 31, "rows are addressed with 32 bits"


@triton.jit(do_not_specialize=_CHANGING)
def _write_kernel(
    pages,
    k,
    v,
    tables,
    contexts,
    num_rows,
    stride_k,
    stride_v,
    stride_page,
    stride_head,
    stride_token,
    stride_table,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program a row: all its heads."""
    row = tl.program_id(0)
    sequence = row // num_rows
    position = tl.load(contexts + sequence) - num_rows + row % num_rows
    page = tl.load(tables + sequence * stride_table + position // BLOCK_TOKENS).to(tl.int64)
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    at = pages + page * stride_page + (position % BLOCK_TOKENS) * stride_token + heads * stride_head + dims
    inside = (heads < HEADS) & (dims < HEAD_DIM)
    new_k = tl.load(k + row * stride_k + heads * HEAD_DIM + dims, mask=inside, other=0.0)
    new_v = tl.load(v + row * stride_v + heads * HEAD_DIM + dims, mask=inside, other=0.0)
    tl.store(at, rounded(new_k, pages.dtype.element_ty), mask=inside)
    tl.store(at + HEAD_DIM, rounded(new_v, pages.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_CHANGING)
def _attend_kernel(
    out,
    q,
    pages,
    tables,
    contexts,
    scale,
    num_rows,
    stride_out,
    stride_q,
    stride_page,
    stride_head,
    stride_token,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
):
    """One program a sequence, KV head and tile of its query heads. `scale` includes log2(e): powers of 2 are the fast ones."""
    tile, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = index // GROUP
    live = (index < num_rows * GROUP)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    at_row = sequence * num_rows + row[:, None]
    at_head = (kv_head * GROUP + index % GROUP)[:, None] * HEAD_DIM + dims
    queries = tl.load(q + at_row * stride_q + at_head, mask=live, other=0.0) * scale
    coarse_queries, fine_queries = _split(queries)

    before = tl.load(contexts + sequence) - num_rows
    position = before + row
    end = before + tl.minimum((tile + 1) * TILE_ROWS - 1, num_rows * GROUP - 1) // GROUP + 1

    highest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    for first in range(0, end, TILE_TOKENS):
        token = first + tl.arange(0, TILE_TOKENS)
        inside = token < end
        page = tl.load(tables + sequence * stride_table + token // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        slot = page * stride_page + kv_head * stride_head + (token % BLOCK_TOKENS) * stride_token
        at = pages + slot[:, None] + dims
        # What lies beyond the end may be anything, NaN too: it is not read.
        keys = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
        scores = _product(coarse_queries, fine_queries, tl.trans(keys), tl.zeros([TILE_ROWS, TILE_TOKENS], tl.float32))
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        # The first tile holds token 0, which every row sees: `higher` is never -inf.
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        faded = tl.exp2(highest - higher)
        shares = tl.exp2(scores - higher[:, None])
        values = tl.load(at + HEAD_DIM, mask=inside[:, None], other=0.0).to(tl.float32)
        weight = weight * faded + tl.sum(shares, axis=1)
        coarse_shares, fine_shares = _split(shares)
        attended = _product(coarse_shares, fine_shares, values, attended * faded[:, None])
        highest = higher
    tl.store(out + at_row * stride_out + at_head, attended / weight[:, None], mask=live)


@triton.jit
def _split(x):
    """What TF32 keeps of x, and the rest."""
    coarse = (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return coarse, x - coarse


@triton.jit
def _product(coarse, fine, y, onto):
    """`onto` + (coarse + fine) y, for y that is exact in TF32."""
    onto = tl.dot(fine, y, onto, input_precision="tf32")
    return tl.dot(coarse, y, onto, input_precision="tf32")
