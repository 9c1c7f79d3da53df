"""What DevicePages promises, checked where the device is the host (Triton's interpreter) and on a GPU.

As a program it checks all in the interpreter and prints a line of JSON for each:
    TRITON_INTERPRET=1 python device_pages_cases.py
"""

import itertools
import json
import mmap
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.append(str(Path(__file__).parent.parent.parent))

from pack_cases import LAYERS, Case, Shape, tensor_of

from kvstore.kernels.block_part import BlockPart
from kvstore.kernels.host_pages import host_pages
from kvstore.kernels.page_map import PageMap
from kvstore.kernels.pinned import HostMemory

SMALL = Shape(2, 4, 16)
WAYS = ("runs", "staged", "direct")


class AllMemory:
    """Host memory that kernels reach: of a device that is the host."""

    reached_by_kernels = True

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> bool:
        self.registered[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.registered[address]


def memory_of(device: str) -> HostMemory | None:
    return AllMemory() if device == "cpu" else None


def new_blocks(nbytes: int, count: int, seed: int | None = None) -> list[np.ndarray]:
    """Slices of one mapping, as of an arena."""
    row = -(-nbytes // 256) * 256
    memory = np.frombuffer(mmap.mmap(-1, count * row), np.uint8)
    blocks = [memory[i * row : i * row + nbytes] for i in range(count)]
    if seed is not None:
        rng = np.random.default_rng(seed)
        for block in blocks:
            block[:] = rng.integers(0, 256, nbytes, np.uint8)
    return blocks


def checked_way(place: str, quantisation: str, way: str, device: str) -> str:
    """Five blocks, over a ring of two slots with two blocks each, by layers, in both directions, give what one at a time gives on
    the host; and touch nothing else."""
    from kvstore.kernels import device_moves
    from kvstore.kernels.device_pages import DevicePages

    case = Case(place, SMALL, "bfloat16", quantisation)
    pages, like, back, like_back = case.pages(device, seed=1), case.pages(seed=1), case.pages(device), case.pages()
    part = case.part(like)
    device_moves.RING_SLOT_BYTES = 2 * (-(-part.layout.nbytes // 256) * 256)
    ids, layers = [3, 0, 4, 1, 2], range(1, LAYERS)
    got, wanted = (new_blocks(part.layout.nbytes, 5, seed=2) for _ in range(2))

    copies = DevicePages(pages, part, memory=memory_of(device))
    if way not in copies.ways:
        return f"has only {copies.ways}"
    copies.copy_out_blocks(ids, got, layers, way=way)
    DevicePages(back, part, memory=memory_of(device)).copy_in_blocks(ids[::-1], got, layers, way=way)
    for block_id, block, back_id in zip(ids, wanted, ids[::-1], strict=True):
        host_pages(like, part).copy_out_layers(block_id, block, layers)
        host_pages(like_back, part).copy_in_layers(back_id, block, layers)

    if any(a.tobytes() != b.tobytes() for a, b in zip(got, wanted, strict=True)):
        return "other blocks"
    return "" if torch.equal(tensor_of(back).cpu(), tensor_of(like_back)) else "other pages"


def checked_measure(place: str, device: str) -> str:
    """Every way is timed at every size in both directions, the pages have their numbers afterwards, and copies go on."""
    from kvstore.kernels import device_pages
    from kvstore.kernels.device_pages import DevicePages

    device_pages._MEASURED_BLOCKS = 2
    case = Case(place, Shape(1, 3, 16), "float16", "")
    pages = case.pages(device, seed=3)
    before = tensor_of(pages)
    copies = DevicePages(pages, memory=memory_of(device))
    if copies.layers_a_copy(1) != LAYERS:
        return "layers before it was measured"
    measured = copies.measure(rounds=1)
    block, back = new_blocks(copies.page_nbytes, 2)
    copies.copy_out(2, block)
    copies.copy_in(2, block)
    copies.copy_out(2, back)
    points = [{(one.way, one.nbytes) for one in ones} for ones in measured.values()]
    sizes = {nbytes for _, nbytes in points[0]}
    if points[0] != points[1] or points[0] != set(itertools.product(copies.ways, sizes)) or len(sizes) < 3:
        return f"measured {points}"
    if not 1 <= copies.layers_a_copy(1000) <= copies.layers_a_copy(1) <= LAYERS:
        return "layers a copy"
    return "" if torch.equal(before, tensor_of(pages)) and block.tobytes() == back.tobytes() else "numbers changed"


def checked_refusals(device: str) -> str:
    """A page or a layer that is not there, a block of another size; and nothing to do is nothing done."""
    from kvstore.kernels.device_pages import DevicePages

    pages = Case("separate NHD", SMALL, "float16", "").pages(device, seed=4)
    copies = DevicePages(pages, memory=memory_of(device))
    (block,) = new_blocks(copies.page_nbytes, 1)
    copies.copy_in_blocks([], [], range(LAYERS))
    copies.copy_out_blocks([0], [block], range(1, 1))
    for ids, blocks, layers in (
        ([pages.num_pages], [block], range(1)),
        ([-1], [block], range(1)),
        ([0], [block[1:]], range(1)),
        ([0], [block, block], range(1)),
        ([0], [block], range(LAYERS + 1)),
        ([0], [block], range(0, 2, 2)),
    ):
        try:
            copies.copy_out_blocks(ids, blocks, layers)
        except AssertionError:
            continue
        return f"taken: {ids} {layers}"
    return "wrote" if block.any() else ""


def checked_unpinned(device: str) -> str:
    """Blocks that are not page-locked, or at odd addresses, go another way, and are the same."""
    from kvstore.kernels.device_pages import DevicePages

    pages = Case("separate NHD", SMALL, "float16", "int8").pages(device, seed=5)
    part = BlockPart.of(pages, quantisation="int8")
    copies = DevicePages(pages, part, memory=memory_of(device))
    (expected,) = new_blocks(copies.page_nbytes, 1)
    alone, odd = np.zeros(copies.page_nbytes, np.uint8), np.zeros(copies.page_nbytes + 300, np.uint8)
    at = -odd.ctypes.data % 256 + 4
    for block in (expected, alone, odd[at : at + copies.page_nbytes]):
        copies.copy_out_blocks([3], [block], range(LAYERS), way="direct" if "direct" in copies.ways else "")
        if block.tobytes() != expected.tobytes():
            return "other bytes"
    return "" if expected.any() else "nothing"


def checked_near(place: str, quantisation: str, device: str) -> str:
    """A block on the device itself gives the page that the same block in host memory gives."""
    from kvstore.kernels.device_pages import DevicePages

    case = Case(place, SMALL, "bfloat16", quantisation)
    pages, like = case.pages(device), case.pages()
    part = case.part(like)
    copies = DevicePages(pages, part, memory=memory_of(device))
    blocks = new_blocks(part.layout.nbytes, 2)
    for source, block in enumerate(blocks):
        host_pages(case.pages(seed=4), part).copy_out(source, block)
    for block_id, block in zip((3, 1), blocks, strict=True):
        copies.copy_in_device(block_id, torch.from_numpy(block).to(device))
        host_pages(like, part).copy_in(block_id, block)
    return "" if torch.equal(tensor_of(pages).cpu(), tensor_of(like)) else "other pages"


def checked_ranks(device: str) -> str:
    """Two ranks with half of the heads write one block; one that has what another writes leaves it alone, and reads."""
    from kvstore.kernels.device_pages import DevicePages

    whole = Case("separate NHD", SMALL, "float16", "fp8_e4m3").pages(device, seed=6)
    like = Case("separate NHD", SMALL, "float16", "fp8_e4m3").pages(seed=6)
    (block, expected) = new_blocks(BlockPart.of(like, quantisation="fp8_e4m3").layout.nbytes, 2)
    host_pages(like, BlockPart.of(like, quantisation="fp8_e4m3")).copy_out(1, expected)
    for rank, writer in ((0, True), (1, False), (1, True)):
        before = block.copy()
        mine = PageMap(tuple(tuple(view[:, rank : rank + 1] for view in planes) for planes in whole.views))
        part = BlockPart.of(mine, quantisation="fp8_e4m3", num_kv_heads=2, first_head=rank, writer=writer)
        DevicePages(mine, part, memory=memory_of(device)).copy_out(1, block)
        if writer == (before.tobytes() == block.tobytes()):
            return "wrote" if writer is False else "wrote nothing"
    return "" if block.tobytes() == expected.tobytes() else "other bytes"


CHECKS: dict[str, Callable[[str], str]] = {
    "refusals": checked_refusals,
    "not page-locked": checked_unpinned,
    "ranks": checked_ranks,
    **{
        f"from the device, {place}, {quantisation or 'as it is'}": partial(checked_near, place, quantisation)
        for place, quantisation in (("packed", ""), ("fused", ""), ("separate NHD", ""), ("separate NHD", "fp8_e4m3"))
    },
    **{f"measured, {place}": partial(checked_measure, place) for place in ("packed", "latent")},
    **{
        f"{way}, {place}, {quantisation or 'as it is'}": partial(checked_way, place, quantisation, way)
        for way, place, quantisation in (
            ("runs", "packed", ""),
            ("runs", "fused", ""),
            ("direct", "packed", ""),
            *itertools.product(("staged", "direct"), ("separate NHD",), ("", "fp8_e4m3")),
        )
    },
}


def main() -> None:
    torch.set_num_threads(1)
    for name, check in CHECKS.items():
        print(json.dumps({"name": name, "problem": check("cpu")}), flush=True)


if __name__ == "__main__":
    main()
