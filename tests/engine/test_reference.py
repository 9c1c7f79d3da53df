"""The real model gives the tokens that transformers gives, whatever the batch, the chunks, and the store's mood.

"The same tokens" as ARCHITECTURE.md defines it, with transformers as the reference: equal up to the first step at which
the reference's own two best logits lie closer than TIE_EPSILON. The reference computes each prompt alone and at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from fake_connector import FakeConnector, FakeStore, Temper
from tiny_llama import TIE_EPSILON

from benchmarks.reference_model import llama_of_gguf
from kvstore.engine_connector.engine.llm import LLM, RequestOutput
from kvstore.engine_connector.engine.loader import load_model
from kvstore.engine_connector.engine.sampler import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# 64, 65, 128: at and just over a block's end.
LENGTHS = (3000, 10, 13, 17, 23, 30, 40, 53, 600, 64, 65, 80, 96, 112, 128, 144, 160, 176, 200, 300)
NUM_FIRST = 9  # of the preempted runs' two halves
MAX_TOKENS = 6
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
BLOCK = 4
UNKIND = Temper(max_load_delay=4, max_save_delay=4, block_fails=0.02, load_loses_tail=0.25, seed=2026)
CHUNKED, UNCHUNKED = 256, 4096
SEED = 11

# All pairs of (store, batch, chunks) that can be; all triples would take twice the time. Nothing is preempted at batch 1.
CASES = [
    ("off", 1, CHUNKED),
    ("off", 8, UNCHUNKED),
    ("cold", 1, UNCHUNKED),
    ("cold", 8, CHUNKED),
    ("warm", 1, CHUNKED),
    ("warm", 8, UNCHUNKED),
    ("failing", 1, UNCHUNKED),
    ("failing", 8, CHUNKED),
    ("preempted", 8, CHUNKED),
    ("preempted", 8, UNCHUNKED),
]


@dataclass(frozen=True)
class Expected:
    """The reference's tokens for one prompt, and how far its two best logits were apart at each."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]

    @property
    def num_certain(self) -> int:
        """Tokens before the first toss-up."""
        return next((i for i, gap in enumerate(self.gaps) if gap < TIE_EPSILON), len(self.gaps))


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prompts(real_model) -> list[list[int]]:
    """Pieces of the Python reference, each from a place of its own."""
    tokens = load_model(real_model).tokenizer.encode("\n\n".join(str(topics[name]) for name in sorted(topics)))
    starts = np.random.default_rng(SEED).integers(0, len(tokens) - max(LENGTHS), len(LENGTHS)).tolist()
    return [tokens[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def reference(real_model, prompts, two_threads) -> list[Expected]:
    model = llama_of_gguf(real_model)
    return [greedy(model, prompt) for prompt in prompts]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> Expected:
    tokens, gaps = [], []
    feed, cache = torch.tensor([prompt]), None
    for _ in range(MAX_TOKENS):
        result = model(feed, cache=cache, use_cache=True, logits_to_keep=1)
        best, ids = result.logits[0, -1].topk(2)
        tokens.append(int(ids[0]))
        gaps.append(float(best[0] - best[1]))
        feed, cache = ids[None, :1], result.past_key_values
    return Expected(tuple(tokens), tuple(gaps))


def run(model: Path, prompts: list[list[int]], batch: int, chunk_tokens: int, **settings: Any) -> list[RequestOutput]:
    defaults = {"num_pages": 8 * max(LENGTHS) // BLOCK, "prefix_caching": False}
    settings = (
        {"block_tokens": BLOCK, "max_batch": batch, "chunk_tokens": chunk_tokens, "num_threads": 2}
        | defaults
        | settings
    )
    with LLM(model, **settings) as llm:
        outputs = llm.generate(prompts, GREEDY)
        llm.check()
    return outputs


@pytest.fixture(scope="module")
def filled(real_model, prompts, two_threads) -> tuple[FakeStore, list[RequestOutput]]:
    """What a run leaves in an empty store, and the run."""
    store = FakeStore()
    return store, run(real_model, prompts, 8, CHUNKED, connector_factory=FakeConnector(store).factory)


def outputs_of(case: tuple[str, int, int], model: Path, prompts: list[list[int]], request: Any) -> list[RequestOutput]:
    """Run a case, and make sure that what gives it its name happened."""
    store, batch, chunk_tokens = case
    if store == "off":
        return run(model, prompts, batch, chunk_tokens)
    filled_store, outputs_when_cold = request.getfixturevalue("filled")
    if case == ("cold", 8, CHUNKED):
        return outputs_when_cold
    if store == "preempted":
        return preempted(model, prompts, chunk_tokens, filled_store)
    fake = FakeConnector(FakeStore() if store == "cold" else filled_store, UNKIND if store == "failing" else Temper())
    outputs = run(model, prompts, batch, chunk_tokens, connector_factory=fake.factory)
    fetched = sum(output.num_fetched_tokens for output in outputs)
    loadable = sum((length - 1) // BLOCK * BLOCK for length in LENGTHS)
    if store == "cold":
        assert fake.num_saved_blocks >= loadable // BLOCK
        assert fetched == 0
    elif store == "warm":
        assert fetched == loadable
    else:
        assert 0 < fetched < loadable
        assert fake.num_failed_blocks > 2
    return outputs


def preempted(model: Path, prompts: list[list[int]], chunk_tokens: int, filled: FakeStore) -> list[RequestOutput]:
    """Each half has no more pages than its longest prompt needs in the end. The first gets back from a store what it gives
    up; the second computes it again."""
    halves = []
    for part, connector in (
        (slice(NUM_FIRST), FakeConnector(filled).factory),
        (slice(NUM_FIRST, None), None),
    ):
        pages = -(-(max(LENGTHS[part]) + MAX_TOKENS) // BLOCK)
        halves.append(run(model, prompts[part], 8, chunk_tokens, num_pages=pages, connector_factory=connector))
    assert sum(output.num_preemptions for output in halves[1]) > 0
    return halves[0] + halves[1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-batch{case[1]}-chunk{case[2]}")
def test_greedy_tokens_are_those_of_transformers(case, real_model, prompts, reference, request):
    outputs = outputs_of(case, real_model, prompts, request)

    compared = 0
    for length, expected, output in zip(LENGTHS, reference, outputs, strict=True):
        certain = expected.num_certain
        assert output.token_ids[:certain] == expected.token_ids[:certain], f"prompt of {length} tokens"
        compared += certain
    assert compared > 0.9 * MAX_TOKENS * len(LENGTHS), "too many toss-ups: the comparison shows too little"


def test_the_comparison_notices_wrong_pages(real_model, prompts, reference, filled):
    """A store that answers with the block after the one that was asked for must not pass for the same tokens."""
    blocks = filled[0].blocks
    wrong = FakeStore()
    wrong.blocks = dict(zip(blocks, [*list(blocks.values())[1:], next(iter(blocks.values()))], strict=True))
    wrong.compares = False
    fake = FakeConnector(wrong)
    outputs = run(real_model, prompts[1:], 8, CHUNKED, connector_factory=fake.factory)

    certain = [expected.num_certain for expected in reference[1:]]
    assert fake.num_loaded_blocks > 100
    assert any(
        output.token_ids[:n] != expected.token_ids[:n]
        for n, expected, output in zip(certain, reference[1:], outputs, strict=True)
    )
