"""Pack and unpack in torch: a page's numbers to a stored block's bytes and back. Slow and plain: what triton_pack.py is
compared with, and what host memory uses whose pages are not blocks already.

A quantised block has one scale for each tile, the [tokens, dims] of one layer, head and plane:

    scale = max |x| / top      stored = round(x * (top / max |x|))      read = stored * scale      top: 448 (fp8 e4m3), 127 (int8)

all in float32, rounded to nearest, ties to even. How far what is read may be from x, beside the rounding of float32 and of
the page's own type:

    fp8 e4m3    |x| / 16, and max |x| / 458,752 near zero (half a step of the smallest numbers)
    int8        max |x| / 254

A tile whose largest magnitude is below 2^-100 is read as zeros. A tile with a NaN or an infinity in it is read as NaN
throughout: its scale is NaN. Of float32 pages int8 may read the very largest number as infinity. Nothing becomes a plausible
number that was none.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvstore.kernels.block_part import QUANTISED, BlockPart, NumberFormat
from kvstore.kernels.page_map import PageMap

SMALLEST = 2.0**-100
"""A largest magnitude from which on top / max |x| and max |x| / top are normal float32 numbers."""


_ALL_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


class Quantised(NamedTuple):
    """Tiles, and one scale for each."""

    stored: torch.Tensor  # [..., tokens, dims], of the format's dtype
    scales: torch.Tensor  # [...] float32


def pack(pages: PageMap, part: BlockPart, block_id: int, block: torch.Tensor, layers: range) -> None:
    """Into `block [nbytes] uint8` these layers (numbered as in `pages`) of a page. Nothing else of the block changes."""
    for tiles, numbers, scales in _pieces(pages, part, block_id, block, layers):
        if part.is_quantised:
            quantised = quantise(tiles, QUANTISED[part.quantisation])
            numbers.copy_(quantised.stored)
            scales.copy_(quantised.scales)
        else:
            numbers.copy_(tiles)


def unpack(pages: PageMap, part: BlockPart, block_id: int, block: torch.Tensor, layers: range) -> None:
    """The inverse: these layers of a page out of `block`, which is only read."""
    for tiles, numbers, scales in _pieces(pages, part, block_id, block, layers):
        tiles.copy_(dequantise(Quantised(numbers, scales)) if part.is_quantised else numbers)


def quantise(tiles: torch.Tensor, number: NumberFormat) -> Quantised:
    """`tiles [..., tokens, dims]`, of any float type."""
    tiles = tiles.float()
    largest = tiles.abs().amax((-2, -1))
    top = torch.full_like(largest, number.top)  # by a plain number torch may divide as x * (1 / y), rounded twice
    scales = torch.where(largest < SMALLEST, 0.0, largest / top).where(largest.isfinite(), torch.nan)
    inverse = torch.where(largest < SMALLEST, 0.0, top / largest).where(largest.isfinite(), 0.0)
    scaled = tiles * inverse[..., None, None]
    if number.dtype is torch.int8:
        scaled = scaled.nan_to_num(0.0).round()
    return Quantised(scaled.to(number.dtype), scales)


def dequantise(quantised: Quantised) -> torch.Tensor:
    """In float32."""
    return _wide(quantised.stored) * quantised.scales[..., None, None]


def _wide(stored: torch.Tensor) -> torch.Tensor:
    """As float32. For fp8 by a table: torch's own conversion of one takes four times as long on a CPU."""
    if stored.dtype is not torch.float8_e4m3fn or stored.device.type != "cpu":
        return stored.float()
    return _ALL_E4M3.index_select(0, stored.view(torch.uint8).reshape(-1).int()).view(stored.shape)


class _Piece(NamedTuple):
    """A page's numbers, and their place in a block: `[layers, planes, heads, tokens, dims]`, scales `[layers, planes, heads]`."""

    tiles: torch.Tensor
    numbers: torch.Tensor
    scales: torch.Tensor


def _pieces(pages: PageMap, part: BlockPart, block_id: int, block: torch.Tensor, layers: range) -> Iterator[_Piece]:
    """All in one where the pages allow it: a call of torch takes longer than the numbers of one layer's plane."""
    numbers, scales = _views(part, block, pages.first.dtype)
    in_block = slice(part.layers.start + layers.start, part.layers.start + layers.stop)
    numbers = numbers[in_block, _slice(part.heads)].permute(0, 3, 1, 2, 4)
    scales = scales[in_block, _slice(part.heads)].permute(0, 2, 1) if part.is_quantised else scales
    if pages.stacked is not None:
        yield _Piece(pages.stacked[_slice(layers), :, block_id], numbers, scales)
        return
    for i, layer in enumerate(layers):
        for plane, view in enumerate(pages.views[layer]):
            at = (slice(i, i + 1), slice(plane, plane + 1))
            yield _Piece(view[block_id][None, None], numbers[at], scales[at] if part.is_quantised else scales)


def _views(part: BlockPart, block: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block's bytes: the numbers `[L, H, T, P, D]` and the scales `[L, H, P]` (none: empty)."""
    layout = part.layout
    assert block.shape == (layout.nbytes,), (block.shape, layout.nbytes)
    assert block.dtype == torch.uint8, block.dtype
    stored = QUANTISED[part.quantisation].dtype if part.is_quantised else dtype
    numbers = block[: layout.data_nbytes].view(stored).view(layout.shape)
    scales = block[layout.data_nbytes :].view(torch.float32)
    return numbers, scales.view(*layout.shape[:2], layout.planes) if part.is_quantised else scales


def _slice(some: range) -> slice:
    return slice(some.start, some.stop)
