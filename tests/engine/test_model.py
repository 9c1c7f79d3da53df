"""The paged forward pass against the dense one, and what a row's result may depend on."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from paged_model import BLOCK, Paged
from tiny_llama import DIM, dense_logits, random_prompt, random_tensors, write_gguf

from kvstore.engine_connector.engine import attention
from kvstore.engine_connector.engine.attention import PrefillChunk
from kvstore.engine_connector.engine.loader import load_model
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.product import pad_rows


@pytest.fixture(scope="module")
def model(tiny) -> Transformer:
    loaded = load_model(tiny.path)
    return Transformer(loaded.config, loaded.weights)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def close(got: torch.Tensor, expected: np.ndarray, atol: float) -> None:
    assert np.abs(got.numpy() - expected).max() < atol


def test_prefill_is_the_dense_forward(model, tiny):
    tokens = random_prompt(np.random.default_rng(1), 75)
    exact, rounded = Paged(model, "float32"), Paged(model)

    close(exact.prefill(tokens, exact.table(75)), dense_logits(tiny.tensors, tokens, np.float32), 2e-3)
    close(rounded.prefill(tokens, rounded.table(75)), dense_logits(tiny.tensors, tokens), 2e-2)


def test_chunks_and_decode_steps_are_the_dense_forward(model, tiny):
    tokens = random_prompt(np.random.default_rng(2), 90)
    paged = Paged(model, "float32")
    table = paged.table(90)

    rows = [paged.prefill(tokens, table, start, end) for start, end in ((0, 32), (32, 50), (50, 51), (51, 80))]
    rows += [paged.decode([tokens[i]], [i], [table]) for i in range(80, 90)]

    close(torch.cat(rows), dense_logits(tiny.tensors, tokens, np.float32), 2e-3)


def test_rope_factors_reach_the_rotation(tmp_path, tiny, model):
    factors = np.full(DIM // 2, 2.0, np.float32)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", random_tensors() | {"rope_freqs": factors}))
    halved = Transformer(loaded.config, loaded.weights)
    tokens = pad_rows(torch.tensor(random_prompt(np.random.default_rng(3), 32)))[:32]

    def hidden(of: Transformer, at: torch.Tensor) -> torch.Tensor:
        paged = Paged(of, "float32")
        return of.hidden(tokens, at, PrefillChunk(paged.pages, paged.table(32), 0, 32))

    at = torch.arange(32)
    assert torch.allclose(hidden(halved, at * 2), hidden(model, at), atol=1e-3)
    assert not torch.allclose(hidden(halved, at), hidden(model, at), atol=1e-1)


def test_a_decode_row_is_bit_equal_whoever_else_is_in_the_batch(model, monkeypatch):
    monkeypatch.setattr(attention, "GATHER_TOKENS", 32)
    rng = np.random.default_rng(4)
    prompts = [random_prompt(rng, n) for n in (5, 31, 32, 33, 64, 90, 200, 7, 8, 12, 100, 63, 65)]

    def logits(together: bool) -> torch.Tensor:
        paged = Paged(model)
        tables = [paged.table(len(p)) for p in prompts]
        for prompt, table in zip(prompts, tables, strict=True):
            paged.prefill(prompt, table, 0, len(prompt) - 1)
        last = [(p[-1], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
        if together:
            return paged.decode(*map(list, zip(*last, strict=True)))
        return torch.cat(
            [paged.decode([token], [position], [table]) for token, position, table in reversed(last)]
        ).flip(0)

    assert torch.equal(logits(together=True), logits(together=False))


def test_a_decode_over_several_gathers_sees_all_of_a_long_context(model, tiny):
    tokens = random_prompt(np.random.default_rng(5), 700)
    paged = Paged(model, "float32")
    table = paged.table(700)
    for start in range(0, 699, 512):
        paged.prefill(tokens, table, start, min(start + 512, 699))

    got = paged.decode(tokens[-1:], [699], [table])

    close(got, dense_logits(tiny.tensors, tokens, np.float32)[-1:], 2e-3)


def test_k_and_v_lie_in_the_pages_where_the_layout_says(model, tiny):
    """Layer 0's V needs no attention to compute, so a hand-made one can be compared, token by token."""
    tokens = random_prompt(np.random.default_rng(6), 10)
    paged = Paged(model)
    table = paged.table(10)
    paged.prefill(tokens, table)

    x = tiny.tensors["token_embd"][tokens].astype(np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * tiny.tensors["blk.0.attn_norm"]
    v = (normed @ tiny.tensors["blk.0.attn_v"].T.astype(np.float64)).reshape(10, -1, DIM)
    for position in range(10):
        stored = paged.pages[table[position // BLOCK], 0, :, position % BLOCK, 1].float().numpy()
        assert np.allclose(stored, v[position], atol=5e-3)


def test_nothing_is_written_for_padding_rows(model):
    paged = Paged(model)
    table = paged.table(3)
    paged.prefill(random_prompt(np.random.default_rng(7), 3), table)

    written = paged.pages.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == table
    assert not paged.pages[table[0], :, :, 3].any()


def test_attention_reads_back_what_the_page_holds_in_the_same_chunk(model):
    """The same chunk again over its own pages gives the same bits: nothing comes from the unrounded K and V."""
    tokens = random_prompt(np.random.default_rng(8), 48)
    paged = Paged(model)
    table = paged.table(48)
    whole = paged.prefill(tokens, table)

    tail = paged.prefill(tokens, table, 32, 48)

    assert torch.allclose(tail, whole[32:], atol=1e-4)
