"""Collects a model's tensors from its source, stacked as the forward pass wants them. Not one may be left over."""

import torch

from kvstore.engine_connector.engine.model import LayerWeights, ModelConfig, Weights
from kvstore.engine_connector.engine.refusal import refuse
from kvstore.engine_connector.engine.source import ModelSource


def build_weights(config: ModelConfig, source: ModelSource) -> Weights:
    """All tensors of `source`. Raises ConfigError for one that is missing, misshapen, or has no place in the model."""
    taken = _Taken(source)
    embedding = taken("token_embd.weight", config.vocab_size, config.hidden_size)
    layers = tuple(_layer(config, taken, f"blk.{index}.") for index in range(config.num_layers))
    norm = taken("output_norm.weight", config.hidden_size)
    lm_head = embedding if config.tied_embeddings else taken("output.weight", config.vocab_size, config.hidden_size)
    taken.expect_all(config)
    return Weights(embedding, layers, norm, lm_head)


class _Taken:
    """Hands out a source's tensors and remembers which."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._names: set[str] = set()

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        self._names.add(self._source.file_name(name))
        return self._source.tensor(name, *shape)

    def expect_all(self, config: ModelConfig) -> None:
        left = self._source.tensor_names() - self._names
        if left:
            refuse(self._source.path, f"tensor {min(left)} has no place in a plain {config.architecture} model")


def _layer(config: ModelConfig, taken: _Taken, prefix: str) -> LayerWeights:
    hidden, ffn, dim = config.hidden_size, config.ffn_size, config.head_dim
    rows = {"attn_q": config.num_heads * dim, "attn_k": config.num_kv_heads * dim, "attn_v": config.num_kv_heads * dim}

    def stacked(kind: str, *columns: int) -> torch.Tensor:
        return torch.cat([taken(f"{prefix}{name}.{kind}", count, *columns) for name, count in rows.items()])

    return LayerWeights(
        attn_norm=taken(prefix + "attn_norm.weight", hidden),
        qkv=stacked("weight", hidden),
        qkv_bias=stacked("bias") if config.qkv_bias else None,
        qk_norm=_qk_norm(config, taken, prefix) if config.qk_norm else None,
        attn_out=taken(prefix + "attn_output.weight", hidden, rows["attn_q"]),
        ffn_norm=taken(prefix + "ffn_norm.weight", hidden),
        gate_up=torch.cat([taken(f"{prefix}{name}.weight", ffn, hidden) for name in ("ffn_gate", "ffn_up")]),
        down=taken(prefix + "ffn_down.weight", hidden, ffn),
    )


def _qk_norm(config: ModelConfig, taken: _Taken, prefix: str) -> torch.Tensor:
    """One row a head, so that Q and K are normed in one go."""
    q, k = (taken(f"{prefix}attn_{name}_norm.weight", config.head_dim) for name in "qk")
    return torch.cat([q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)])
