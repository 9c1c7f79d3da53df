"""Attention, copies and the engine on a GPU give what they give on the CPU."""

import numpy as np
import pytest
import torch
from attention_cases import CASES, TOLERANCE, run

from kvstore.core.layout import BlockLayout
from kvstore.kernels.device_pages import DevicePages, allocate_device_pages

LAYOUT = BlockLayout(num_layers=3, num_kv_heads=2, block_tokens=16, planes=2, head_dim=64, item_nbytes=2)
CUDA = torch.device("cuda")


@pytest.fixture
def pages() -> torch.Tensor:
    return allocate_device_pages(6, LAYOUT, "float16", CUDA)


def random_block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.nbytes, np.uint8)


def as_bytes(page: torch.Tensor) -> bytes:
    return page.cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_give_what_torch_gives(case):
    outcome = run(case, "cuda")

    assert outcome.difference < TOLERANCE * case.gain
    assert outcome.same_pages
    assert outcome.zero_padding
    assert outcome.same_alone


def test_a_block_goes_in_and_comes_out_with_the_same_bytes(pages):
    copies, block, back = DevicePages(pages), random_block(1), np.zeros(LAYOUT.nbytes, np.uint8)

    copies.copy_in(4, block)
    copies.copy_out(4, back)

    assert as_bytes(pages[4]) == block.tobytes() == back.tobytes()
    assert not pages[[0, 1, 2, 3, 5]].any()


def test_layers_go_alone_to_their_place(pages):
    copies, block, back = DevicePages(pages), random_block(2), np.zeros(LAYOUT.nbytes, np.uint8)
    layer = LAYOUT.nbytes // 3

    copies.copy_in_layers(2, block, range(1, 2))
    copies.copy_out_layers(2, back, range(1, 3))

    assert as_bytes(pages[2]) == bytes(layer) + block[layer : 2 * layer].tobytes() + bytes(layer)
    assert back.tobytes() == as_bytes(pages[2])


def test_a_copy_waits_for_what_the_engine_has_queued(pages):
    """Out: the block has what was queued to be written. In: what was queued before sees the old bytes."""
    copies, block = DevicePages(pages), np.zeros(LAYOUT.nbytes, np.uint8)
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


def test_the_engine_answers_as_on_the_cpu_cold_and_from_a_store(tmp_path):
    pytest.importorskip("gguf", reason="the tiny model is a GGUF file")
    from fake_connector import FakeConnector, FakeStore
    from tiny_llama import random_prompt, random_tensors, same_tokens, write_gguf

    from kvstore.engine_connector.engine.llm import LLM
    from kvstore.engine_connector.engine.sampler import SamplingParams

    model = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    rng = np.random.default_rng(5)
    prompts = [random_prompt(rng, length) for length in (3, 45, 90)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    settings = {"num_pages": 128, "block_tokens": 4, "chunk_tokens": 32}
    with LLM(model, **settings) as llm:
        expected = llm.generate(prompts, params)

    store = FakeStore()
    for _ in ("cold", "from the store"):
        with LLM(model, device="cuda", connector_factory=FakeConnector(store).factory, **settings) as llm:
            got = llm.generate(prompts, params)
            assert sum(same_tokens(*pair) for pair in zip(expected, got, strict=True)) >= 12

    assert store.blocks
    assert max(output.num_fetched_tokens for output in got) > 0
