"""Pack and unpack on a GPU, in Triton: one launch for many blocks, between pages and stored blocks that lie anywhere.

Import this only where pages are on a GPU: it needs triton. One program moves one tile, the [tokens, dims] of one block, layer,
head and plane, 16 bytes at a time; a quantised tile it reads twice, first for the largest magnitude (the second time it is in
the cache). Results equal those of kernels/pack.py to the bit, except inside tiles that are NaN.

    page     | any order |    tile: row by row, at strides.token     program (head * planes + plane, layer, block)
    block    [L, H, T, P, D]  tile: row by row, at planes * dims     address of the block: moves[block]

Addresses are absolute: a block may lie in device memory, or in pinned host memory that the device reaches.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kvstore.kernels.block_part import QUANTISED, BlockPart
from kvstore.kernels.pack import SMALLEST
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.triton_numbers import from_fp8_e4m3, from_int8, rounded, to_fp8_e4m3, to_int8

# ruff: noqa: N803, PLR0917 (Triton's convention: what is known at compile time is written large; kernels have no keywords)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

MAX_BLOCKS = 65535
"""Of one launch: CUDA's limit for the last axis of a grid."""

ALIGNMENT = 16
"""Of blocks, in bytes: one wide load or store."""

_TILE_NUMEL = 4096
"""Of a program at a time; more would spill registers when it converts."""

_FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
_SMALLEST_BITS = tl.constexpr((127 - 100) << 23)
_INFINITE_BITS = tl.constexpr(0x7F800000)
_FP8_TOP = tl.constexpr(QUANTISED["fp8_e4m3"].top)
_INT8_TOP = tl.constexpr(QUANTISED["int8"].top)
assert SMALLEST == 2.0**-100


def check_moves(pages: PageMap, block_ids: Sequence[int], addresses: Sequence[int]) -> None:
    """Asserts that the pages exist and that the blocks' addresses are aligned: the kernels cannot."""
    assert len(block_ids) == len(addresses) <= MAX_BLOCKS, (len(block_ids), len(addresses))
    for block_id, address in zip(block_ids, addresses, strict=True):
        assert 0 <= block_id < pages.num_pages, (block_id, pages.num_pages)
        assert address > 0, address
        assert address % ALIGNMENT == 0, address


class Packer:
    """Launches the kernels for one PageMap and BlockPart. Everything is queued on the current stream; nothing waits, and nothing
    is allocated after construction. `moves [n, 2] int64` on the pages' device: page number and address of each block, checked
    by check_moves; it and the blocks are in use until the kernel has run. Layers are numbered as in the pages."""

    def __init__(self, pages: PageMap, part: BlockPart) -> None:
        strides = pages.strides
        assert pages.block_tokens * strides.token < 1 << 31, "rows are addressed with 32 bits"
        assert pages.head_dim * strides.dim < 1 << 31, strides
        self._pages = pages
        self._part = part
        self._bases = torch.tensor(pages.bases(), dtype=torch.int64).to(pages.first.device)
        self.constants = constants(pages, part)
        self._vectors = [stride // self.constants["VECTOR"] for stride in strides[:3]]

    def pack(self, moves: torch.Tensor, layers: range) -> None:
        """Pages to blocks. Nothing but the part's runs of these layers is written."""
        self._launch(_pack_kernel, moves, layers)

    def unpack(self, moves: torch.Tensor, layers: range) -> None:
        """Blocks to pages."""
        self._launch(_unpack_kernel, moves, layers)

    def _launch(self, kernel, moves: torch.Tensor, layers: range) -> None:
        pages, part = self._pages, self._part
        assert moves.dtype == torch.int64, moves.dtype
        assert moves.shape[1:] == (2,), moves.shape
        assert moves.is_contiguous(), moves.stride()
        assert moves.device == pages.first.device, (moves.device, pages.first.device)
        assert 0 <= layers.start <= layers.stop <= pages.num_layers, (layers, pages.num_layers)
        assert layers.step == 1, layers
        if not len(moves) or not layers:
            return
        kernel[(pages.num_heads * pages.num_planes, len(layers), len(moves))](
            self._bases,
            moves,
            layers.start,
            part.layers.start + layers.start,
            part.heads.start,
            *self._vectors,
            **self.constants,
            num_warps=num_warps(self.constants),
            enable_fp_fusion=False,  # rounding tricks: a product and a sum are two roundings
        )


def constants(pages: PageMap, part: BlockPart) -> dict[str, Any]:
    """What the kernels are compiled for."""
    layout, number = part.layout, pages.first.dtype
    alignment = pages.alignment()
    tile_dims = triton.next_power_of_2(pages.head_dim)
    return {
        "STRIDE_DIM": pages.strides.dim,
        "HEADS": layout.num_kv_heads,
        "TOKENS": layout.block_tokens,
        "PLANES": layout.planes,
        "DIMS": layout.head_dim,
        "SCALES_AT": layout.data_nbytes,
        "TILE_TOKENS": min(triton.next_power_of_2(layout.block_tokens), max(1, _TILE_NUMEL // tile_dims)),
        "TILE_DIMS": tile_dims,
        "PAGE_ALIGNMENT": alignment,
        "VECTOR": max(1, alignment // number.itemsize),
        "NUMBER": _BITS[number.itemsize] if not part.quantisation else _FLOATS[number],
        "STORED": _BITS[layout.item_nbytes],
        "QUANTISATION": part.quantisation,
    }


def num_warps(constants: dict[str, Any]) -> int:
    """16 numbers a thread: two wide accesses of 16-bit numbers on their way at once."""
    return max(1, min(8, int(constants["TILE_TOKENS"]) * int(constants["TILE_DIMS"]) // 512))


_CHANGING = ["first_layer", "block_layer", "block_head"]
"""Differ from launch to launch or rank to rank: a kernel of its own for the value 1 would only be compiled in mid-service."""

_UNALIGNED = ["bases", "moves"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def _pack_kernel(
    bases,
    moves,
    first_layer,
    block_layer,
    block_head,
    stride_page,
    stride_head,
    stride_token,
    STRIDE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANES: tl.constexpr,
    DIMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    PAGE_ALIGNMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    NUMBER: tl.constexpr,
    STORED: tl.constexpr,
    QUANTISATION: tl.constexpr,
):
    """One program a tile. Strides are in vectors of VECTOR numbers, so that their alignment is known at compile time."""
    page_tile = _page_tile(bases, moves, first_layer, stride_page, stride_head, PLANES, PAGE_ALIGNMENT, VECTOR, NUMBER)
    block, tile, stored = _block_tile(moves, block_layer, block_head, HEADS, TOKENS, PLANES, DIMS, STORED)
    rows = tl.arange(0, TILE_TOKENS)[:, None]
    dims = tl.arange(0, TILE_DIMS)[None, :]
    if QUANTISATION == "":
        for first in range(0, TOKENS, TILE_TOKENS):
            token = first + rows
            inside = (token < TOKENS) & (dims < DIMS)
            x = tl.load(page_tile + token * stride_token * VECTOR + dims * STRIDE_DIM, mask=inside)
            tl.store(stored + token * (PLANES * DIMS) + dims, x, mask=inside)
    else:
        largest = 0
        for first in range(0, TOKENS, TILE_TOKENS):
            token = first + rows
            inside = (token < TOKENS) & (dims < DIMS)
            x = tl.load(page_tile + token * stride_token * VECTOR + dims * STRIDE_DIM, mask=inside, other=0.0)
            # Magnitudes are ordered as their bits are, with infinity and then NaN on top.
            magnitude = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            largest = tl.maximum(largest, tl.max(magnitude))
        magnitude = tl.cast(largest, tl.float32, bitcast=True)
        top = _FP8_TOP if QUANTISATION == "fp8_e4m3" else _INT8_TOP
        good = (largest >= _SMALLEST_BITS) & (largest < _INFINITE_BITS)
        divisor = tl.where(good, magnitude, 1.0)
        scale = tl.where(good, tl.math.div_rn(divisor, top), 0.0)
        inverse = tl.where(good, tl.math.div_rn(top, divisor), 0.0)
        scale = tl.where(largest >= _INFINITE_BITS, float("nan"), scale)
        tl.store((block + SCALES_AT).to(tl.pointer_type(tl.float32)) + tile, scale)
        for first in range(0, TOKENS, TILE_TOKENS):
            token = first + rows
            inside = (token < TOKENS) & (dims < DIMS)
            x = tl.load(page_tile + token * stride_token * VECTOR + dims * STRIDE_DIM, mask=inside, other=0.0)
            scaled = x.to(tl.float32) * inverse
            code = to_fp8_e4m3(scaled) if QUANTISATION == "fp8_e4m3" else to_int8(scaled)
            tl.store(stored + token * (PLANES * DIMS) + dims, code, mask=inside)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_UNALIGNED)
def _unpack_kernel(
    bases,
    moves,
    first_layer,
    block_layer,
    block_head,
    stride_page,
    stride_head,
    stride_token,
    STRIDE_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANES: tl.constexpr,
    DIMS: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_DIMS: tl.constexpr,
    PAGE_ALIGNMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    NUMBER: tl.constexpr,
    STORED: tl.constexpr,
    QUANTISATION: tl.constexpr,
):
    """The inverse of _pack_kernel."""
    page_tile = _page_tile(bases, moves, first_layer, stride_page, stride_head, PLANES, PAGE_ALIGNMENT, VECTOR, NUMBER)
    block, tile, stored = _block_tile(moves, block_layer, block_head, HEADS, TOKENS, PLANES, DIMS, STORED)
    rows = tl.arange(0, TILE_TOKENS)[:, None]
    dims = tl.arange(0, TILE_DIMS)[None, :]
    if QUANTISATION != "":
        scale = tl.load((block + SCALES_AT).to(tl.pointer_type(tl.float32)) + tile)
    for first in range(0, TOKENS, TILE_TOKENS):
        token = first + rows
        inside = (token < TOKENS) & (dims < DIMS)
        x = tl.load(stored + token * (PLANES * DIMS) + dims, mask=inside)
        if QUANTISATION != "":
            number = from_fp8_e4m3(x) if QUANTISATION == "fp8_e4m3" else from_int8(x)
            x = rounded(number * scale, NUMBER)
        tl.store(page_tile + token * stride_token * VECTOR + dims * STRIDE_DIM, x, mask=inside)


@triton.jit
def _page_tile(
    bases,
    moves,
    first_layer,
    stride_page,
    stride_head,
    PLANES: tl.constexpr,
    PAGE_ALIGNMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Where this program's tile begins in the pages."""
    head, plane = tl.program_id(0) // PLANES, tl.program_id(0) % PLANES
    page = tl.load(moves + 2 * tl.program_id(2))
    base = tl.load(bases + (first_layer + tl.program_id(1)) * PLANES + plane)
    # The hint is kept only on the pointer, not on the integer.
    pointer = tl.multiple_of(base.to(tl.pointer_type(NUMBER)), PAGE_ALIGNMENT)
    return pointer + (page * stride_page + head.to(tl.int64) * stride_head) * VECTOR


@triton.jit
def _block_tile(
    moves,
    block_layer,
    block_head,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PLANES: tl.constexpr,
    DIMS: tl.constexpr,
    STORED: tl.constexpr,
):
    """The block's address, the number of this program's tile in it, planes innermost, and where the tile begins: K and V of a
    token lie side by side."""
    head, plane = tl.program_id(0) // PLANES, tl.program_id(0) % PLANES
    block = tl.load(moves + 2 * tl.program_id(2) + 1)
    tile = ((block_layer + tl.program_id(1)) * HEADS + block_head + head) * PLANES + plane
    offset = ((tile // PLANES).to(tl.int64) * (TOKENS * PLANES) + plane) * DIMS
    return block, tile, tl.multiple_of(block.to(tl.pointer_type(STORED)), 16) + offset
