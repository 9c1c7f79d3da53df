"""What one rank has of a stored block: which layers, which heads, and how its numbers are stored.

block of 2 layers, 4 heads     | 0: h0 h1 h2 h3 | 1: h0 h1 h2 h3 | scales, if quantised: 0: h0 h1 h2 h3 | 1: h0 h1 h2 h3 |
part of rank 1 of 2                      -- --            -- --                               -- --           -- --
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from kvstore.core.errors import SpecMismatch
from kvstore.core.keys import QUANTISATIONS, SCALE_NBYTES
from kvstore.core.layout import BlockLayout, ByteRun
from kvstore.kernels.page_map import PageMap


class NumberFormat(NamedTuple):
    """One number of a quantised block. `top` is stored for the largest magnitude of a tile (a block's tokens and dims of one
    layer, head and plane); a tile has one float32 scale."""

    dtype: torch.dtype
    top: float


QUANTISED = {"fp8_e4m3": NumberFormat(torch.float8_e4m3fn, 448.0), "int8": NumberFormat(torch.int8, 127.0)}
"""By KVSpec.quantisation; "" stands for the pages' own numbers, bit for bit."""

assert tuple(QUANTISED) == QUANTISATIONS
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPart:
    """The part `layers` x `heads` of a block that lies as `layout` says. `writer` is False on a rank whose heads another rank
    has too, and writes: copies out of its pages leave the block alone."""

    layout: BlockLayout
    layers: range
    heads: range
    quantisation: str = ""
    writer: bool = True

    @classmethod
    def of(
        cls,
        pages: PageMap,
        *,
        quantisation: str = "",
        num_layers: int | None = None,
        first_layer: int = 0,
        num_kv_heads: int | None = None,
        first_head: int = 0,
        writer: bool = True,
    ) -> Self:
        """What these pages have of a block with so many layers and KV heads (None: as many as the pages). Raises SpecMismatch
        when they have none of it, or when their numbers cannot be stored so."""
        num_layers = pages.num_layers if num_layers is None else num_layers
        num_kv_heads = pages.num_heads if num_kv_heads is None else num_kv_heads
        dtype = pages.first.dtype
        if quantisation and quantisation not in QUANTISED:
            raise SpecMismatch(
                f"quantisation: {quantisation!r} is not known; use '' (none) or {' or '.join(QUANTISED)}",
                field="quantisation",
                value=quantisation,
            )
        if quantisation and dtype not in _FLOATS:
            raise SpecMismatch(
                f"quantisation: {quantisation} is made of float32, bfloat16 or float16 pages, not of {dtype}",
                field="quantisation",
                value=quantisation,
            )
        layers = _inside("layer", first_layer, pages.num_layers, num_layers)
        heads = _inside("head", first_head, pages.num_heads, num_kv_heads)
        layout = BlockLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            block_tokens=pages.block_tokens,
            planes=pages.num_planes,
            head_dim=pages.head_dim,
            item_nbytes=1 if quantisation else dtype.itemsize,
            scale_nbytes=SCALE_NBYTES if quantisation else 0,
        )
        return cls(layout=layout, layers=layers, heads=heads, quantisation=quantisation, writer=writer)

    @property
    def is_quantised(self) -> bool:
        """Whether the block has scales."""
        return bool(self.quantisation)

    def runs(self, layers: range) -> list[ByteRun]:
        """Where these of the rank's layers lie in the block, as few runs as there are, numbers and then scales."""
        of_layers = [self.layers[layer] for layer in layers]
        heads = (self.heads.start, len(self.heads))
        runs = [self.layout.head_run(layer, *heads) for layer in of_layers]
        if self.is_quantised:
            runs += [self.layout.scale_run(layer, *heads) for layer in of_layers]
        return _joined(runs)


def _inside(what: str, first: int, count: int, total: int) -> range:
    if not 0 <= first <= first + count <= total:
        raise SpecMismatch(
            f"first_{what}: {what}s {first} to {first + count - 1} of the pages are not among the {total} of the block",
            field=f"first_{what}",
            value=first,
        )
    return range(first, first + count)


def _joined(runs: list[ByteRun]) -> list[ByteRun]:
    """Neighbours as one."""
    joined: list[ByteRun] = []
    for run in runs:
        if joined and joined[-1].offset + joined[-1].nbytes == run.offset:
            joined[-1] = ByteRun(joined[-1].offset, joined[-1].nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined
