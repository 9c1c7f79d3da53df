"""A model's config.json: the same numbers as its row of the table, and errors that name the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.calculator.hf_config import read_config
from kvstore.core.errors import ConfigError
from kvstore.tables import rows

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "sliding_window": None,
    "use_sliding_window": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
}
GEMMA_27B = {
    "model_type": "gemma3",
    "text_config": {
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "tie_word_embeddings": True,
    },
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "vocab_size": 32000,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "vocab_size": 201088,
}


def write(tmp_path: Path, fields: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (LLAMA_8B, "Llama-3.1-8B"),
        (QWEN3_30B, "Qwen3-30B-A3B"),
        (DEEPSEEK_V3, "DeepSeek-V3"),
        (GEMMA_27B, "Gemma-3-27B"),
        (MIXTRAL, "Mixtral-8x7B"),
        (GPT_OSS, "gpt-oss-120b"),
    ],
)
def test_a_config_gives_what_the_table_has(tmp_path: Path, fields: dict[str, Any], name: str) -> None:
    known = rows.model(name)

    found = read_config(write(tmp_path, fields))

    assert found.kv_bytes_per_token == known.kv_bytes_per_token
    assert found.attn_flops_per_pair == known.attn_flops_per_pair
    assert found.attn_flops_per_pair_full == known.attn_flops_per_pair_full
    assert found.prefill_params == pytest.approx(known.prefill_params, rel=0.005)
    assert found.total_params == pytest.approx(known.check_params, rel=0.005)
    assert (found.window_tokens, found.full_layers) == (known.window_tokens, known.full_layers)


def test_a_folder_stands_for_its_file(tmp_path: Path) -> None:
    write(tmp_path, LLAMA_8B)

    assert read_config(tmp_path).layers == 32


def test_one_without_gqa_has_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    fields = {name: value for name, value in LLAMA_8B.items() if name != "num_key_value_heads"}

    assert read_config(write(tmp_path, fields)).kv_bytes_per_token == 4 * 131072


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    fields = {name: value for name, value in LLAMA_8B.items() if name != field}

    with pytest.raises(ConfigError, match=f"{field}: missing") as caught:
        read_config(write(tmp_path, fields))

    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", "32", "'32'; a whole number"),
        ("num_hidden_layers", -1, "-1; a whole number"),
        ("num_hidden_layers", True, "True; a whole number"),
        ("num_hidden_layers", 0, "0; at least 1"),
        ("num_key_value_heads", 5, "5 does not divide 32 heads"),
        ("num_key_value_heads", 0, "0 does not divide 32 heads"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(write(tmp_path, LLAMA_8B | {field: value}))

    assert caught.value.fields["field"] == field


def test_more_experts_chosen_than_there_are_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok: 129; needs 1 to 128"):
        read_config(write(tmp_path, QWEN3_30B | {"num_experts_per_tok": 129}))


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ("[1]", "is no JSON object")])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=words):
        read_config(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_config(tmp_path / "none.json")
