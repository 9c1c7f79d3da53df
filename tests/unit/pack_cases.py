"""Where pages may lie, for moving them to and from stored blocks: in torch, in Triton's interpreter, and on a device.

As a program it runs the kernels on all of them in the interpreter and prints a line of JSON for each:
    TRITON_INTERPRET=1 python pack_cases.py [--all]         each place with each quantisation; all: and each type and shape
"""

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent.parent.parent))

from kvstore.kernels.block_part import QUANTISED, BlockPart
from kvstore.kernels.pack import pack, unpack
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
QUANTISATIONS = ("", *QUANTISED)


@dataclass(frozen=True)
class Case:
    place: str
    shape: Shape
    dtype: str
    quantisation: str

    @property
    def name(self) -> str:
        s = self.shape
        return f"{self.place}, {s.heads}x{s.tokens}x{s.dim}, {self.dtype}, {self.quantisation or 'as it is'}"

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
        return BlockPart.of(pages, quantisation=self.quantisation, **of_more)


CASES = [
    Case(place, shape, dtype, quantisation)
    for place, shape, dtype, quantisation in itertools.product(PLACES, SHAPES, DTYPES, QUANTISATIONS)
    if place != "latent" or shape.heads == 1
]


def tensor_of(pages: PageMap) -> torch.Tensor:
    """A copy `[pages, layers, heads, tokens, planes, dims]`."""
    layers = [torch.stack(planes, dim=3) for planes in pages.views]
    return torch.stack(layers, dim=1)


def error_bound(quantisation: str, tiles: torch.Tensor) -> torch.Tensor:
    """What kernels/pack.py promises for `tiles [..., T, D]`, with the rounding to the type that is read."""
    x = tiles.double().abs()
    largest = x.amax((-2, -1), keepdim=True)
    info = torch.finfo(tiles.dtype)
    stored = {"fp8_e4m3": torch.maximum(x / 16, largest / 458752), "int8": largest / 254 + 0 * x}[quantisation]
    arithmetic = largest * 2.0**-22  # of float32
    rounding = (x + stored) * info.eps / 2 + info.smallest_normal * info.eps / 2
    return stored + arithmetic + rounding


# --- the kernels -------------------------------------------------------------------------------------------------------

BLOCK_IDS = (3, 0)


def checked_whole(case: Case, device: str) -> str:
    """Move two pages by the kernels and by torch; what differs, in words: "" for nothing."""
    pages, like = case.pages(device, seed=7), case.pages(seed=7)
    part, layers = case.part(like), range(LAYERS)
    return _packed_alike(pages, like, part, layers) or _unpacked_alike(case, part, layers, device)


def checked_part(case: Case, device: str) -> str:
    """The same for one layer, of pages that have layers 1 and 2 of three, and all heads but the first."""
    pages, like = case.pages(device, seed=7), case.pages(seed=7)
    part = case.part(like, num_layers=3, first_layer=1, num_kv_heads=case.shape.heads + 1, first_head=1)
    return _packed_alike(pages, like, part, range(1, 2)) or _unpacked_alike(case, part, range(1, 2), device)


def new_blocks(part: BlockPart, device: str, seed: int) -> torch.Tensor:
    """`[2, nbytes] uint8` random bytes, views of rows that are aligned."""
    generator = torch.Generator().manual_seed(seed)
    row = -(-part.layout.nbytes // 256) * 256
    rows = torch.randint(0, 256, (len(BLOCK_IDS), row), generator=generator, dtype=torch.uint8)
    return rows.to(device)[:, : part.layout.nbytes]


def moves_of(pages: PageMap, blocks: torch.Tensor) -> torch.Tensor:
    from kvstore.kernels.triton_pack import check_moves

    addresses = [block.data_ptr() for block in blocks]
    check_moves(pages, BLOCK_IDS, addresses)
    return torch.tensor([BLOCK_IDS, addresses], dtype=torch.int64).T.contiguous().to(blocks.device)


def _packed_alike(pages: PageMap, like: PageMap, part: BlockPart, layers: range) -> str:
    from kvstore.kernels.triton_pack import Packer

    got, wanted = new_blocks(part, str(pages.first.device), 1), new_blocks(part, "cpu", 1)
    Packer(pages, part).pack(moves_of(pages, got), layers)
    for block_id, block in zip(BLOCK_IDS, wanted, strict=True):
        pack(like, part, block_id, block, layers)
    return "" if torch.equal(got.cpu(), wanted) else f"packed: {_differing(got.cpu(), wanted)}"


def _unpacked_alike(case: Case, part: BlockPart, layers: range, device: str) -> str:
    from kvstore.kernels.triton_pack import Packer

    source, got, wanted = case.pages(seed=8), case.pages(device, seed=9), case.pages(seed=9)
    blocks = new_blocks(part, "cpu", 2)
    for block_id, block in zip(BLOCK_IDS, blocks, strict=True):
        pack(source, part, block_id, block, layers)
    there = blocks.to(device)
    if there.stride(0) != blocks.stride(0):  # a copy to a device closes the gaps
        there = new_blocks(part, device, 2).copy_(blocks)
    Packer(got, part).unpack(moves_of(got, there), layers)
    for block_id, block in zip(BLOCK_IDS, blocks, strict=True):
        unpack(wanted, part, block_id, block, layers)
    ours, theirs = tensor_of(got).cpu(), tensor_of(wanted)
    return "" if torch.equal(ours, theirs) else f"unpacked: {_differing(ours, theirs)}"


def _differing(got: torch.Tensor, wanted: torch.Tensor) -> str:
    at = (got != wanted).nonzero()
    return f"{len(at)} of {wanted.numel()} differ, the first at {at[0].tolist()}"


def checked_numbers(device: str) -> str:
    """All 16-bit numbers, and many of 32 bits, to fp8 and int8 and back, as torch converts them."""
    from number_kernels import convert

    generator = torch.Generator().manual_seed(3)
    bfloats = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    near = torch.arange(-480, 480, dtype=torch.float32) + torch.randn(960, generator=generator)
    halves = torch.arange(-4096, 4096, dtype=torch.float32) / 1024
    x = torch.cat([bfloats, near, halves, near / 4096, torch.tensor([464.0, 464.1, -464.0, 479.9])]).to(device)
    numel = 1 << (len(x) - 1).bit_length()
    padded = torch.zeros(numel, device=device)
    padded[: len(x)] = x
    to_fp8, to_int8 = (torch.zeros(numel, dtype=torch.uint8, device=device) for _ in range(2))
    from_fp8, from_int8 = (torch.zeros(numel, device=device) for _ in range(2))
    as_bfloat = torch.zeros(numel, dtype=torch.bfloat16, device=device)

    convert[(1,)](padded, to_fp8, from_fp8, to_int8, from_int8, as_bfloat, SIZE=numel, enable_fp_fusion=False)
    padded, codes = padded.cpu(), torch.arange(numel).to(torch.uint8)
    clamped = padded.clamp(-127, 127).nan_to_num(0.0).round().to(torch.int8)
    real, defined = ~padded.isnan(), ~(padded.abs() > 464)
    wrong = {
        "to fp8": (to_fp8.cpu() != padded.to(torch.float8_e4m3fn).view(torch.uint8)) & defined,
        "above fp8": (to_fp8.cpu() & 0x7F != 0x7E) & ~defined,
        "from fp8": _unlike(from_fp8.cpu(), codes.view(torch.float8_e4m3fn).float()),
        "to int8": (to_int8.cpu().view(torch.int8) != clamped) & real,
        "from int8": from_int8.cpu() != codes.view(torch.int8).float(),
        "bfloat16": _unlike(as_bfloat.cpu(), padded.to(torch.bfloat16)),
    }
    return ", ".join(f"{name}: {int(bad.sum())} wrong" for name, bad in wrong.items() if bad.any())


def _unlike(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (got != wanted) & ~(got.isnan() & wanted.isnan())


def checked_rubbish(quantisation: str, device: str) -> str:
    """A tile with NaN or infinity is read as NaN, one of tiny numbers as zeros; their neighbours as ever."""
    from kvstore.kernels.triton_pack import Packer

    case = Case("separate NHD", Shape(2, 3, 16), "float32", quantisation)
    pages, back = case.pages(device, seed=4), case.pages(device)
    pages.views[0][0][3, 0, 1, 5] = torch.nan
    pages.views[0][1][3, 1, 2, 0] = -torch.inf
    pages.views[1][0][3, 0] = 1e-38
    blocks = torch.zeros(1, case.part(pages).layout.nbytes, dtype=torch.uint8, device=device)
    moves = torch.tensor([[3, blocks.data_ptr()]], dtype=torch.int64, device=device)
    Packer(pages, case.part(pages)).pack(moves, range(LAYERS))
    Packer(back, case.part(back)).unpack(moves, range(LAYERS))
    tiles = tensor_of(back)[3].cpu().movedim(3, 2)  # [L, H, P, T, D]
    bad = torch.zeros(LAYERS, 2, 2, dtype=torch.bool)
    bad[0, 0, 0] = bad[0, 1, 1] = True
    ok = tiles.isnan().all(-1).all(-1)[bad].all() and not tiles[~bad].isnan().any()
    ok = ok and not tiles[1, 0, 0].any() and bool(tiles[1, 1].any())
    return "" if ok else "not as stated"


def checked_refusals(device: str) -> str:
    """What a launch refuses; and that it does nothing when there is nothing to do."""
    from kvstore.kernels.triton_pack import Packer, check_moves

    case = Case("packed", SHAPES[0], "float16", "")
    pages = case.pages(device, seed=5)
    packer, block = Packer(pages, case.part(pages)), new_blocks(case.part(pages), device, 1)
    before = block.clone()
    for block_ids, addresses in (
        ([NUM_PAGES], [block[0].data_ptr()]),
        ([-1], [block[0].data_ptr()]),
        ([0], [block[0].data_ptr() + 8]),
        ([0], [0]),
        ([0, 1], [block[0].data_ptr()]),
    ):
        try:
            check_moves(pages, block_ids, addresses)
        except AssertionError:
            continue
        return f"taken: {block_ids}"
    check_moves(pages, [], [])
    packer.pack(torch.zeros(0, 2, dtype=torch.int64, device=device), range(LAYERS))
    packer.pack(moves_of(pages, block), range(1, 1))
    for layers in (range(LAYERS + 1), range(0, 2, 2), range(-1, 1)):
        try:
            packer.pack(moves_of(pages, block), layers)
        except AssertionError:
            continue
        return f"taken: {layers}"
    return "" if torch.equal(block, before) else "written"


def _rotated() -> list[Case]:
    """Each place with each quantisation; types and shapes take turns. The interpreter needs 3 ms for a tile."""
    pairs = itertools.product(PLACES, QUANTISATIONS)
    return [
        Case(place, SHAPES[1] if place == "latent" else SHAPES[i * 7 % 5], DTYPES[(i + i // 3) % 3], quantisation)
        for i, (place, quantisation) in enumerate(pairs)
    ]


INTERPRETED = _rotated()

CHECKS: dict[str, Callable[[str], str]] = {
    "numbers": checked_numbers,
    "refusals": checked_refusals,
    **{f"rubbish, {quantisation}": partial(checked_rubbish, quantisation) for quantisation in QUANTISATIONS[1:]},
}


def main() -> None:
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        print(json.dumps({"name": name, "problem": check("cpu")}), flush=True)
    for i, case in enumerate(CASES if "--all" in sys.argv else INTERPRETED):
        problem = (checked_part if i % 2 else checked_whole)(case, "cpu")
        print(json.dumps({"name": case.name, "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
