"""Where pages may lie, for moving them to and from stored blocks: in torch, in Triton's interpreter, and on a device.

As a program it runs the kernels on all of them in the interpreter and prints a line of JSON for each:
    TRITON_INTERPRET=1 python pack_cases.py
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.page_map import PageMap

LAYERS, NUM_PAGES = 2, 5


@dataclass(frozen=True)
class Shape:
    heads: int
    tokens: int
    dim: int


SHAPES = (Shape(2, 4, 16), Shape(1, 3, 80), Shape(3, 2, 96), Shape(2, 3, 36), Shape(1, 16, 128))
"""36 numbers of 16 bits are not a multiple of 16 bytes; nor is an odd number of them at an odd place."""


def _packed(s: Shape, new: Callable) -> PageMap:
    return PageMap.packed(new(NUM_PAGES, LAYERS, s.heads, s.tokens, 2, s.dim))


def _packed_planes_outermost(s: Shape, new: Callable) -> PageMap:
    return PageMap.packed(new(2, LAYERS, NUM_PAGES, s.tokens, s.heads, s.dim), "PLBTHD")


def _separate_nhd(s: Shape, new: Callable) -> PageMap:
    keys, values = ([new(NUM_PAGES, s.tokens, s.heads, s.dim) for _ in range(LAYERS)] for _ in "KV")
    return PageMap.of_separate(keys, values, "BTHD")


def _separate_hnd(s: Shape, new: Callable) -> PageMap:
    keys, values = ([new(NUM_PAGES, s.heads, s.tokens, s.dim) for _ in range(LAYERS)] for _ in "KV")
    return PageMap.of_separate(keys, values, "BHTD")


def _planes_outermost_nhd(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_layers([new(2, NUM_PAGES, s.tokens, s.heads, s.dim) for _ in range(LAYERS)], "PBTHD")


def _planes_in_page_hnd(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_layers([new(NUM_PAGES, 2, s.heads, s.tokens, s.dim) for _ in range(LAYERS)], "BPHTD")


def _fused(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_layers([new(NUM_PAGES, s.heads, s.tokens, 2 * s.dim) for _ in range(LAYERS)], "BHTC")


def _fused_tokens_outermost(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_layers([new(NUM_PAGES, s.tokens, s.heads, 2 * s.dim) for _ in range(LAYERS)], "BTHC")


def _gaps(s: Shape, new: Callable) -> PageMap:
    """Pages, heads and rows lie apart, and begin at an odd place."""
    layers = [new(NUM_PAGES + 1, 2, s.heads + 1, s.tokens + 1, s.dim + 3) for _ in range(LAYERS)]
    return PageMap.of_layers([layer[1:, :, 1:, :-1, 1:-2] for layer in layers], "BPHTD")


def _dims_apart(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_layers([new(NUM_PAGES, 2, s.heads, s.dim, s.tokens) for _ in range(LAYERS)], "BPHDT")


def _latent(s: Shape, new: Callable) -> PageMap:
    return PageMap.of_latents([new(NUM_PAGES, s.tokens, s.dim) for _ in range(LAYERS)])


PLACES = {
    "packed": _packed,
    "packed, planes outermost": _packed_planes_outermost,
    "separate NHD": _separate_nhd,
    "separate HND": _separate_hnd,
    "planes outermost, NHD": _planes_outermost_nhd,
    "planes in the page, HND": _planes_in_page_hnd,
    "fused": _fused,
    "fused, tokens outermost": _fused_tokens_outermost,
    "gaps": _gaps,
    "dims apart": _dims_apart,
    "latent": _latent,
}

DTYPES = ("float32", "bfloat16", "float16")
STORAGES = ("same", "fp8_e4m3", "int8")


@dataclass(frozen=True)
class Case:
    place: str
    shape: Shape
    dtype: str
    storage: str

    @property
    def name(self) -> str:
        s = self.shape
        return f"{self.place}, {s.heads}x{s.tokens}x{s.dim}, {self.dtype}, {self.storage}"

    def pages(self, device: str = "cpu", *, seed: int | None = None) -> PageMap:
        """Of random numbers of very different sizes, or zeros without a seed. Equal on all devices."""
        generator = None if seed is None else torch.Generator().manual_seed(seed)

        def new(*shape: int) -> torch.Tensor:
            numbers = torch.zeros(shape)
            if generator is not None:
                numbers = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
            return numbers.to(getattr(torch, self.dtype)).to(device)

        return PLACES[self.place](self.shape, new)

    def part(self, pages: PageMap, **of_more: int) -> BlockPart:
        return BlockPart.of(pages, storage=self.storage, **of_more)


CASES = [
    Case(place, shape, dtype, storage)
    for place, shape, dtype, storage in itertools.product(PLACES, SHAPES, DTYPES, STORAGES)
    if place != "latent" or shape.heads == 1
]


def tensor_of(pages: PageMap) -> torch.Tensor:
    """A copy `[pages, layers, heads, tokens, planes, dims]`."""
    layers = [torch.stack(planes, dim=3) for planes in pages.views]
    return torch.stack(layers, dim=1)


def error_bound(storage: str, tiles: torch.Tensor) -> torch.Tensor:
    """What kernels/pack.py promises for `tiles [..., T, D]`, with the rounding to the type that is read."""
    x = tiles.double().abs()
    largest = x.amax((-2, -1), keepdim=True)
    info = torch.finfo(tiles.dtype)
    stored = {"fp8_e4m3": torch.maximum(x / 16, largest / 458752), "int8": largest / 254 + 0 * x}[storage]
    arithmetic = largest * 2.0**-22  # of float32
    rounding = (x + stored) * info.eps / 2 + info.smallest_normal * info.eps / 2
    return stored + arithmetic + rounding
