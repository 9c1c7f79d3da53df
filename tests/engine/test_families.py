"""Each family and rotary variant computes what transformers' own class computes, from either format; the rest is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import HFModel, edit_json, save_small, write_gguf_twin
from paged_model import Paged
from safetensors.torch import load_file, save_file
from tiny_llama import CONTROL, TOKENS, random_prompt

from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSpec
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.loader import LoadedModel, load_model
from kvstore.engine_connector.engine.model import Transformer
from kvstore.engine_connector.engine.sampler import SamplingParams

PROMPT = random_prompt(np.random.default_rng(1), 200)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with a head_dim of its own": ("llama", {"head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_theta": 5e3, "rope_type": "linear", "factor": 4.0}}),
    "llama 3": (
        "llama",
        {"rope_parameters": {"rope_theta": 5e4, **LLAMA3, "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def hf(request, tmp_path_factory) -> HFModel:
    architecture, changes = VARIANTS[request.param]
    return save_small(tmp_path_factory.mktemp("hf") / "model", architecture, **changes)


@pytest.fixture
def small(tmp_path) -> HFModel:
    return save_small(tmp_path / "small", "qwen2")


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def logits(loaded: LoadedModel) -> torch.Tensor:
    """Of PROMPT, in chunks and then one token at a time, over fp32 pages."""
    paged = Paged(Transformer(loaded.config, loaded.weights), "float32")
    table = paged.table(len(PROMPT))
    rows = [paged.prefill(PROMPT, table, start, start + 64) for start in (0, 64, 128)]
    rows += [paged.decode([PROMPT[i]], [i], [table]) for i in range(192, 200)]
    return torch.cat(rows)


def test_a_directory_computes_what_transformers_computes(hf):
    difference = (logits(load_model(hf.path)) - hf.logits(PROMPT)).abs().max()

    assert difference < 1e-4


def test_a_gguf_file_of_the_same_weights_is_the_same_model(hf, tmp_path):
    scaling = hf.model.config.rope_parameters
    rope = {"scaling__type": "linear", "scaling__factor": 4.0} if scaling["rope_type"] == "linear" else {}
    twin = load_model(write_gguf_twin(tmp_path / "twin.gguf", hf, **rope))

    directory = load_model(hf.path)
    if scaling["rope_type"] == "llama3":  # factors that transformers computed in fp32
        assert torch.allclose(logits(twin), logits(directory), atol=1e-4)
    else:
        assert torch.equal(logits(twin), logits(directory))
    assert twin.tokenizer.encode("the the 12<|im_end|>") == directory.tokenizer.encode("the the 12<|im_end|>")
    assert twin.tokenizer.stop_ids == directory.tokenizer.stop_ids


def test_llama_3s_factors_are_those_of_transformers(tmp_path):
    hf = save_small(tmp_path / "model", "llama", **VARIANTS["llama 3"][1])
    rope = load_model(hf.path).config.rope
    plain = rope.theta ** -(np.arange(0, 16, 2) / 16)

    theirs = plain / hf.model.model.rotary_emb.inv_freq.numpy()

    assert np.allclose(rope.divisors, theirs, rtol=1e-5)
    assert min(rope.divisors) == 1.0
    assert max(rope.divisors) == pytest.approx(8.0)
    assert any(1.01 < divisor < 7.9 for divisor in rope.divisors), (
        "no frequency in the blend: the test shows too little"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_are_widened(small, dtype):
    file = small.path / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)

    weights = load_model(small.path).weights

    narrow = small.model.model.layers[1].mlp.down_proj.weight.to(dtype).float()
    assert weights.layers[1].down.dtype == torch.float32
    assert torch.equal(weights.layers[1].down, narrow)


def test_shards_with_an_index_are_one_model(small, tmp_path):
    whole = load_model(small.path)
    small.model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    shutil.copy(small.path / "tokenizer.json", tmp_path / "sharded")

    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(logits(load_model(tmp_path / "sharded")), logits(whole))


def test_settings_of_transformers_before_version_5_are_understood(tmp_path):
    hf = save_small(tmp_path / "model", "llama", **VARIANTS["llama 3"][1])
    now = load_model(hf.path).config
    scaling = {k: v for k, v in hf.model.config.rope_parameters.items() if k != "rope_theta"}
    edit_json(hf.path / "config.json", rope_parameters=None, rope_theta=5e4, rope_scaling=scaling)

    assert load_model(hf.path).config == now


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "default", "mscale": 1.0}}, "with mscale"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"intermediate_size": 80}, "shape (96, 64), the settings ask for (80, 64)"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "has no place in a plain qwen2 model"),
        ({"model_type": "llama"}, "k_proj.bias has no place in a plain llama model"),
        ({"model_type": "qwen3", "head_dim": 16}, "q_norm.weight is missing"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
    ],
)
def test_settings_that_we_would_not_honour_are_refused(small, changes, reason):
    edit_json(small.path / "config.json", **changes)

    with pytest.raises(ConfigError) as caught:
        load_model(small.path)

    assert reason in str(caught.value)
    assert caught.value.fields == {"field": "model", "value": str(small.path)}


def break_file(path: Path, how: str) -> str:
    """Damage a directory; returns what the error must say."""
    weights = path / "model.safetensors"
    if how == "no weights":
        weights.unlink()
        return "0 .safetensors files"
    if how == "two files, no index":
        shutil.copy(weights, path / "more.safetensors")
        return "2 .safetensors files"
    if how == "cut off":
        weights.write_bytes(weights.read_bytes()[:-100])
        return "model.safetensors"
    if how == "eight bits":
        tensors = load_file(weights)
        save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}, weights)
        return "float8_e4m3fn"
    if how == "index that leads outside":
        (path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../model.safetensors"}}')
        return "'../model.safetensors'"
    if how == "no tokenizer":
        (path / "tokenizer.json").unlink()
        return "tokenizer.json is missing"
    if how == "broken tokenizer":
        (path / "tokenizer.json").write_text("{}")
        return "tokenizer.json: "
    if how == "another decoder":
        edit_json(path / "tokenizer.json", decoder={"type": "Fuse"})
        return "byte-level BPE is supported"
    assert how == "config is no JSON"
    (path / "config.json").write_text("{")
    return "config.json is not JSON"


@pytest.mark.parametrize(
    "how",
    [
        "no weights",
        "two files, no index",
        "cut off",
        "eight bits",
        "index that leads outside",
        "no tokenizer",
        "broken tokenizer",
        "another decoder",
        "config is no JSON",
    ],
)
def test_a_damaged_directory_is_refused(small, how):
    reason = break_file(small.path, how)

    with pytest.raises(ConfigError) as caught:
        load_model(small.path)

    assert reason in str(caught.value)


def spec_of(path: Path) -> KVSpec:
    with LLM(path, num_pages=16, num_threads=1) as llm:
        return llm.spec


def test_whatever_decides_k_is_in_the_spec(small):
    """The weights' fingerprint does not cover config.json, so these must: blocks of two of them never meet."""
    specs = [spec_of(small.path)]
    for changes in (
        {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 20000.0, **LLAMA3, "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_theta": 20000.0, **LLAMA3, "original_max_position_embeddings": 128}},
        {"rms_norm_eps": 1e-3},
    ):
        edit_json(small.path / "config.json", **changes)
        specs.append(spec_of(small.path))

    assert len({spec.namespace() for spec in specs}) == 7
    assert len({spec.weights for spec in specs}) == 1


def test_the_engine_runs_a_directory(hf):
    prompt = PROMPT[:40]
    with LLM(hf.path, num_pages=64, block_tokens=4, chunk_tokens=16, num_threads=1, kv_dtype="float32") as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0]

    tokens = [*prompt, *output.token_ids]
    expected = hf.logits(tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert min(output.logit_gaps) > 0.001
    assert list(output.token_ids) == expected


def test_a_chat_goes_through_the_directorys_template(small):
    template = "{% if messages[0].role == 'user' %}{{ raise_exception('system first') }}{% endif %}"
    template += "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}"
    (small.path / "chat_template.jinja").write_text(template)
    about = '{"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}}'
    (small.path / "tokenizer_config.json").write_text(about)
    tokenizer = load_model(small.path).tokenizer

    ids = tokenizer.encode_chat([{"role": "system", "content": " the <|im_end|>"}])

    end = TOKENS.index(CONTROL[2])
    assert ids[0] == TOKENS.index(CONTROL[0])
    assert (ids[-1], ids.count(end)) == (end, 1)
    assert tokenizer.decode(ids) == "[system] the <|im_end|>"
    with pytest.raises(ConfigError, match="system first"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_jinja_refuses_chats_and_serves_text(small):
    (small.path / "chat_template.jinja").write_text("{% for %}")
    tokenizer = load_model(small.path).tokenizer

    with pytest.raises(ConfigError, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])

    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_a_template_cannot_reach_out_of_its_sandbox(small):
    (small.path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = load_model(small.path).tokenizer

    with pytest.raises(ConfigError, match="chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
