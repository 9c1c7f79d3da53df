"""Pages on a GPU to stored blocks and back: the whole table of unit/pack_cases.py, every way of copying, order and memory."""

import gc
import mmap

import numpy as np
import pytest
import torch
from device_pages_cases import CHECKS as DEVICE_CHECKS
from device_pages_cases import new_blocks
from pack_cases import CASES, CHECKS, checked_part, checked_whole

from kvstore.core.layout import BlockLayout
from kvstore.kernels.device_pages import DevicePages, allocate_device_pages
from kvstore.kernels.page_map import PageMap

LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, block_tokens=16, planes=2, head_dim=64, item_nbytes=2)
CUDA = torch.device("cuda")


@pytest.fixture
def pages() -> torch.Tensor:
    return allocate_device_pages(6, LAYOUT, "float16", CUDA)


def random_block(seed: int) -> np.ndarray:
    return new_blocks(LAYOUT.nbytes, 1, seed=seed)[0]


def as_bytes(page: torch.Tensor) -> bytes:
    return page.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_give_what_torch_gives_to_the_bit(case):
    """Whole blocks and parts in turn: each case compiles two kernels, all of them take some minutes."""
    check = checked_part if CASES.index(case) % 2 else checked_whole

    assert not check(case, "cuda")


@pytest.mark.parametrize("name", CHECKS)
def test_numbers_and_refusals_are_as_stated(name):
    assert not CHECKS[name]("cuda")


@pytest.mark.parametrize("name", DEVICE_CHECKS)
def test_device_pages_do_as_they_promise(name):
    """On a GPU that kernels do not reach host memory from, the direct way fails here: it says so by name."""
    assert not DEVICE_CHECKS[name]("cuda")


def mapping(nbytes: int) -> np.ndarray:
    """Shared memory, as an arena's."""
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_SHARED), np.uint8)


@pytest.mark.parametrize("way", ["", "runs", "direct"])
def test_a_mapping_is_page_locked_until_it_goes_and_the_next_one_works_too(pages, way):
    """As after a restart of the sidecar, when the new arena may lie at the old one's address."""
    copies = DevicePages.open(PageMap.packed(pages))
    for seed in range(3):
        arena = mapping(4 << 20)
        block, back = (arena[at : at + LAYOUT.nbytes] for at in (0, 1 << 20))
        block[:] = random_block(seed)

        copies.copy_in_blocks([seed], [block], range(3), way=way)
        copies.copy_out_blocks([seed], [back], range(3), way=way)

        assert back.tobytes() == block.tobytes() == as_bytes(pages[seed])
        assert copies._pinned._pieces[arena.ctypes.data] == {0: True}
        address = arena.ctypes.data
        del arena, block, back
        gc.collect()
        assert address not in copies._pinned._pieces


def test_a_batch_larger_than_a_list_of_moves_is_cut(monkeypatch):
    from kvstore.kernels import device_pages

    monkeypatch.setattr(device_pages, "MAX_BATCH", 4)
    big = torch.randn(11, *LAYOUT.shape, device=CUDA).half()
    copies, blocks = DevicePages(PageMap.packed(big)), new_blocks(LAYOUT.nbytes, 11)

    copies.copy_out_blocks(range(11), blocks, range(3))

    assert [block.tobytes() for block in blocks] == [as_bytes(page) for page in big]


def test_a_block_goes_in_and_comes_out_with_the_same_bytes(pages):
    copies, block, back = DevicePages(PageMap.packed(pages)), random_block(1), np.zeros(LAYOUT.nbytes, np.uint8)

    copies.copy_in(4, block)
    copies.copy_out(4, back)

    assert as_bytes(pages[4]) == block.tobytes() == back.tobytes()
    assert not pages[[0, 1, 2, 3, 5]].any()


def test_layers_go_alone_to_their_place(pages):
    copies, block, back = DevicePages(PageMap.packed(pages)), random_block(2), np.zeros(LAYOUT.nbytes, np.uint8)
    layer = LAYOUT.nbytes // 3

    copies.copy_in_layers(2, block, range(1, 2))
    copies.copy_out_layers(2, back, range(1, 3))

    assert as_bytes(pages[2]) == bytes(layer) + block[layer : 2 * layer].tobytes() + bytes(layer)
    assert back.tobytes() == as_bytes(pages[2])


def test_a_copy_waits_for_what_the_engine_has_queued(pages):
    """Out: the block has what was queued to be written. In: what was queued before sees the old bytes."""
    copies, block = DevicePages(PageMap.packed(pages)), np.zeros(LAYOUT.nbytes, np.uint8)
    slow = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()

    for _ in range(30):
        slow = slow @ slow * 1e-4
    pages[1] = 1.5
    copies.copy_out(1, block)
    for _ in range(30):
        slow = slow @ slow * 1e-4
    before = pages[1].clone()
    copies.copy_in(1, random_block(3))

    assert (block.view(np.float16) == 1.5).all()
    assert (before == 1.5).all()
    assert as_bytes(pages[1]) == random_block(3).tobytes()
