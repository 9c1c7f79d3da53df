"""Small random models of transformers' own classes, saved as directories, and the same weights as GGUF files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tiny_llama import CONTROL, MERGES, TOKENS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.reference_model import gguf_name

_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_SMALL: Mapping[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class HFModel:
    """A model in a directory, and in memory."""

    path: Path
    model: PreTrainedModel
    architecture: str

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] of the whole sequence at once."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0]


def save_small(path: Path, architecture: str, *, seed: int = 0, **changes: Any) -> HFModel:
    """Random weights, norms and biases included; `changes` replace settings."""
    config_class, model_class = _CLASSES[architecture]
    head_dim = {"head_dim": 24} if architecture == "qwen3" else {}  # heads x head_dim is not the hidden size
    config = config_class(**{**_SMALL, **head_dim, **changes})
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.0 if "bias" in name else 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    small_tokenizer().save(str(path / "tokenizer.json"))
    return HFModel(path, model, architecture)


def small_tokenizer() -> Tokenizer:
    """tiny_llama's vocabulary."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


def edit_json(path: Path, **changes: Any) -> None:
    """Change settings of a JSON file; None takes one out."""
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


def write_gguf_twin(path: Path, hf: HFModel, **rope: object) -> Path:
    """The same model as llama.cpp's converter lays it out. `rope` adds settings, dots written as `__`."""
    config = hf.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, hf.architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in rope.items():
        key = f"{hf.architecture}.rope.{name.replace('__', '.')}"
        writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(TOKENS) - len(CONTROL)))
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    if config.rope_parameters["rope_type"] == "llama3":  # llama.cpp keeps these as what divides the plain frequencies
        plain = config.rope_parameters["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / hf.model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    for name, tensor in hf.model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if hf.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = to_pairs(values, head_dim)
        writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def to_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """llama.cpp's order of a Llama's Q and K rows: those that turn together are neighbours."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
