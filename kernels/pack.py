"""Pack and unpack in torch: a page's numbers to a stored block's bytes and back. Slow and plain: what triton_pack.py is
compared with, and what host memory uses whose pages are not blocks already.

A quantised block has one scale for each tile, the [tokens, dims] of one layer, head and plane:

    scale = max |x| / top      stored = round(x * (top / max |x|))      read = stored * scale      top: 448 (fp8 e4m3), 127 (int8)

all in float32, rounded to nearest, ties to even. How far what is read may be from x, beside the rounding to the page's own type:

    fp8 e4m3    |x| / 16, and max |x| / 458,752 near zero (half a step of the smallest numbers)
    int8        max |x| / 254

A tile whose largest magnitude is below 2^-100 is read as zeros. A tile with a NaN or an infinity in it is read as NaN
throughout: its scale is NaN. Nothing becomes a plausible number that was none.
"""

from typing import NamedTuple

import torch

from kvstore.kernels.block_part import QUANTISED, BlockPart, NumberFormat
from kvstore.kernels.page_map import PageMap

SMALLEST = 2.0**-100
"""A largest magnitude from which on top / max |x| and max |x| / top are normal float32 numbers."""


class Quantised(NamedTuple):
    """Tiles, and one scale for each."""

    stored: torch.Tensor  # [..., tokens, dims], of the format's dtype
    scales: torch.Tensor  # [...] float32


def pack(pages: PageMap, part: BlockPart, block_id: int, block: torch.Tensor, layers: range) -> None:
    """Into `block [nbytes] uint8` these layers (numbered as in `pages`) of a page. Nothing else of the block changes."""
    numbers, scales = _views(part, block, pages.first.dtype)
    for layer in layers:
        for plane, view in enumerate(pages.views[layer]):
            tiles, at = view[block_id], (part.layers[layer], _slice(part.heads))
            if part.is_quantised:
                quantised = quantise(tiles, QUANTISED[part.storage])
                numbers[(*at, slice(None), plane)] = quantised.stored
                scales[(*at, plane)] = quantised.scales
            else:
                numbers[(*at, slice(None), plane)] = tiles


def unpack(pages: PageMap, part: BlockPart, block_id: int, block: torch.Tensor, layers: range) -> None:
    """The inverse: these layers of a page out of `block`, which is only read."""
    numbers, scales = _views(part, block, pages.first.dtype)
    for layer in layers:
        for plane, view in enumerate(pages.views[layer]):
            at = (part.layers[layer], _slice(part.heads))
            tiles = numbers[(*at, slice(None), plane)]
            view[block_id] = dequantise(Quantised(tiles, scales[(*at, plane)])) if part.is_quantised else tiles


def quantise(tiles: torch.Tensor, number: NumberFormat) -> Quantised:
    """`tiles [..., tokens, dims]`, of any float type."""
    tiles = tiles.float()
    largest = tiles.abs().amax((-2, -1))
    scales = torch.where(largest < SMALLEST, 0.0, largest / number.top).where(largest.isfinite(), torch.nan)
    inverse = torch.where(largest < SMALLEST, 0.0, number.top / largest).where(largest.isfinite(), 0.0)
    scaled = tiles * inverse[..., None, None]
    if number.dtype is torch.int8:
        scaled = scaled.nan_to_num(0.0).round()
    return Quantised(scaled.to(number.dtype), scales)


def dequantise(quantised: Quantised) -> torch.Tensor:
    """In float32."""
    return quantised.stored.float() * quantised.scales[..., None, None]


def _views(part: BlockPart, block: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a block's bytes: the numbers `[L, H, T, P, D]` and the scales `[L, H, P]` (none: empty)."""
    layout = part.layout
    assert block.shape == (layout.nbytes,), (block.shape, layout.nbytes)
    assert block.dtype == torch.uint8, block.dtype
    stored = QUANTISED[part.storage].dtype if part.is_quantised else dtype
    numbers = block[: layout.data_nbytes].view(stored).view(layout.shape)
    scales = block[layout.data_nbytes :].view(torch.float32)
    return numbers, scales.view(*layout.shape[:2], layout.planes) if part.is_quantised else scales


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)
