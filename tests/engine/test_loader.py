"""A model file is used as it is meant, or refused with the path and the reason."""

import gguf
import numpy as np
import pytest
import torch
from tiny_llama import CONTEXT, DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, THETA, TOKENS, random_tensors, write_gguf

from kvstore.core.errors import ConfigError
from kvstore.engine_connector.engine.loader import load_model
from kvstore.engine_connector.engine.rope import Rope


def test_settings_vocabulary_and_matrices_are_those_of_the_file(tiny):
    loaded = load_model(tiny.path)

    assert (loaded.config.num_layers, loaded.config.num_kv_heads, loaded.config.context_length) == (4, 2, CONTEXT)
    assert loaded.tokenizer.vocab_size == loaded.config.vocab_size == len(TOKENS)
    assert len(loaded.weights.layers) == LAYERS
    down = torch.from_numpy(tiny.tensors["blk.2.ffn_down"])
    assert torch.equal(loaded.weights.layers[2].down, down)
    assert torch.equal(loaded.weights.layers[1].qkv[-KV_HEADS * DIM :], torch.from_numpy(tiny.tensors["blk.1.attn_v"]))


def test_rows_of_q_are_put_back_from_pairs_to_halves(tiny):
    q = load_model(tiny.path).weights.layers[0].qkv[: HEADS * DIM].numpy()

    stored = tiny.tensors["blk.0.attn_q"]
    for head in range(HEADS):
        mine, theirs = q[head * DIM : (head + 1) * DIM], stored[head * DIM : (head + 1) * DIM]
        assert np.array_equal(mine[: DIM // 2], theirs[0::2])
        assert np.array_equal(mine[DIM // 2 :], theirs[1::2])


def test_without_an_output_matrix_the_embedding_is_tied(tmp_path):
    tensors = random_tensors()
    del tensors["output"]

    weights = load_model(write_gguf(tmp_path / "m.gguf", tensors)).weights

    assert weights.lm_head is weights.embedding


def test_quantised_tensors_are_dequantised(tmp_path):
    tensors = random_tensors()
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    packed = gguf.quants.quantize(tensors["output"], gguf.GGMLQuantizationType.Q8_0)
    plain = load_model(write_gguf(tmp_path / "plain.gguf", tensors)).weights.lm_head
    writer.close()

    tensors_path = tmp_path / "mixed.gguf"
    _write_mixed(tensors_path, tensors, packed)
    got = load_model(tensors_path).weights.lm_head

    assert got.shape == plain.shape == (len(TOKENS), HIDDEN)
    assert not torch.equal(got, plain)
    assert torch.allclose(got, plain, atol=0.02)


def _write_mixed(path, tensors, packed_output):
    original = gguf.GGUFWriter.add_tensor

    def add(self, name, data, **options):
        if name == "output.weight":
            original(self, name, packed_output, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            original(self, name, data, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write_gguf(path, tensors)


def refusal(path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    assert caught.value.fields == {"field": "model", "value": str(path)}
    assert str(path) in str(caught.value)
    return caught.value


def test_files_that_are_no_model_are_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not a model\n" * 100)
    folder = tmp_path / "folder"
    folder.mkdir()

    assert "No such file" in str(refusal(tmp_path / "missing"))
    assert "config.json: No such file" in str(refusal(folder))
    assert "GGUF" in str(refusal(tmp_path / "empty"))
    assert "magic" in str(refusal(tmp_path / "text"))


def test_a_file_cut_off_anywhere_is_refused(tiny, tmp_path):
    whole = tiny.path.read_bytes()
    header = [*range(0, 4000, 61), *range(4000, 24000, 997)]
    body = np.linspace(24000, len(whole) - 1, 20).astype(int).tolist()
    cut = tmp_path / "cut.gguf"
    for size in header + body:
        cut.write_bytes(whole[:size])

        refusal(cut)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "gemma"}, "architecture is 'gemma'"),
        ({"rope__scaling__type": "yarn"}, "'yarn'"),
        ({"rope__dimension_count": 8}, "rope.dimension_count 8"),
        ({"attention__head_count_kv": 3}, "4 heads cannot share 3 KV heads"),
        ({"block_count": 0}, "llama.block_count is 0"),
        ({"block_count": 5}, "blk.4.attn_norm.weight is missing"),
        ({"block_count": 3}, "has no place"),
        ({"feed_forward_length": 64}, "shape (96, 64), the settings ask for (64, 64)"),
        ({"embedding_length": None}, "llama.embedding_length is missing"),
        ({"embedding_length": "wide"}, "llama.embedding_length is 'wide', not a int"),
    ],
)
def test_settings_that_we_would_not_honour_are_refused(tmp_path, changes, reason):
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), **changes)

    assert reason in str(refusal(path))


def test_a_tensor_that_a_plain_llama_lacks_is_refused(tmp_path):
    tensors = random_tensors() | {"blk.0.attn_q_norm": np.ones(DIM, np.float32)}

    assert "blk.0.attn_q_norm" in str(refusal(write_gguf(tmp_path / "m.gguf", tensors)))


def test_rope_factors_divide_the_frequencies(tmp_path):
    factors = np.linspace(1, 8, DIM // 2).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", random_tensors() | {"rope_freqs": factors})

    rope = load_model(path).config.rope
    assert rope.divisors == tuple(factors.tolist())
    assert rope.describe(DIM) not in (Rope(THETA).describe(DIM), Rope.linear(THETA, DIM, 8.0).describe(DIM))
