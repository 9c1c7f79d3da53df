"""The real model: it answers, and every route gives the same answer."""

import inspect
from collections.abc import Iterator

import pytest
from fake_connector import FakeConnector, FakeStore
from tiny_llama import same_tokens

from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(real_model) -> Iterator[LLM]:
    with LLM(real_model, num_pages=256) as llm:
        yield llm


def test_it_knows_the_capital_of_france(llm):
    output = llm.generate([llm.tokenizer.encode_chat(QUESTION)], SamplingParams(max_tokens=24))[0]

    assert "Paris" in output.text
    assert output.finish_reason == "stop"


def test_its_tokenizer_is_the_published_one(llm):
    """Ids as Hugging Face's tokenizer.json of the same model gives them."""
    assert llm.tokenizer.encode("Once upon a time") == [6403, 1980, 253, 655]
    assert llm.tokenizer.decode(llm.tokenizer.encode("héllo 🙂 2024\n\tx")) == "héllo 🙂 2024\n\tx"
    assert len(llm.tokenizer.encode("2024")) == 4


def test_computed_cached_and_loaded_prefixes_give_the_same_answer(real_model, llm):
    document = llm.tokenizer.encode(inspect.getsource(inspect))[:400]
    prompts = [document + llm.tokenizer.encode(f"\n# {question}\n") for question in ("Summary:", "def main():")]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    store = FakeStore()
    with LLM(real_model, num_pages=256, connector_factory=FakeConnector(store).factory) as first:
        computed = first.generate(prompts, params)
        cached = first.generate(prompts, params)
    with LLM(real_model, num_pages=256, connector_factory=FakeConnector(store).factory) as second:
        loaded = [second.generate([prompt], params)[0] for prompt in prompts]

    assert loaded[0].num_fetched_tokens >= 400
    assert sum(same_tokens(a, b) for a, b in zip(computed, cached, strict=True)) > 10
    assert sum(same_tokens(a, b) for a, b in zip(computed, loaded, strict=True)) > 10
    assert loaded[0].logit_gaps == cached[0].logit_gaps
