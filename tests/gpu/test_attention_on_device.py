"""Attention and the engine on a GPU give what they give on the CPU."""

import numpy as np
import pytest
from attention_cases import CASES, TOLERANCE, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_kernels_give_what_torch_gives(case):
    outcome = run(case, "cuda")

    assert outcome.difference < TOLERANCE * case.gain
    assert outcome.same_pages
    assert outcome.zero_padding
    assert outcome.same_alone


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
