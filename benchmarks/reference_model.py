"""transformers' Llama with a GGUF file's weights in fp32: what the engine is compared with, in its tests and in its speed.

It shares no code with the engine's loader: the gguf library reads the file.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_of_gguf(path: Path) -> PreTrainedModel:
    """transformers' Llama with a GGUF file's weights in fp32, read with the gguf library alone."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def setting(key: str) -> Any:
        return reader.get_field(f"llama.{key}").contents()

    heads, hidden = setting("attention.head_count"), setting("embedding_length")
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=setting("feed_forward_length"),
        num_hidden_layers=setting("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=setting("attention.head_count_kv"),
        vocab_size=len(reader.get_field("tokenizer.ggml.tokens").data),
        max_position_embeddings=setting("context_length"),
        rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_theta": setting("rope.freq_base"), "rope_type": "default"},
        tie_word_embeddings="output.weight" not in tensors,
    )
    model = LlamaForCausalLM(config).float().eval()
    state = {}
    for name in model.state_dict():
        tensor = tensors.get(gguf_name(name)) or tensors["token_embd.weight"]  # a tied lm_head
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            values = from_pairs(values, hidden // heads)
        state[name] = torch.from_numpy(np.array(values))
    model.load_state_dict(state)
    return model


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    part, _, kind = name.rpartition(".")
    if part in _GGUF_NAMES:
        return f"{_GGUF_NAMES[part]}.{kind}"
    _, _, layer, role = part.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[role]}.{kind}"


def from_pairs(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes to_pairs."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
