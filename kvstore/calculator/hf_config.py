"""A model's shape from the config.json that is published with its weights, and its parameters rebuilt from that.

Knows decoders of the Llama kind (gated MLP; GQA; experts; sliding windows) and MLA. What the file does not say and cannot be
guessed is an error that names the field.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.tables.rows import ModelRow

_LARGEST = 10_000_000  # of any count in such a file; more is a slip


class _Counts(NamedTuple):
    """Parameters without embeddings."""

    total: float
    active: float


class _Config:
    """The fields of a file, each checked when it is asked for."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self._fields = fields
        self._path = path

    def count(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there. Raises ConfigError when none is and there is no default."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise self.error(name, f"{value!r}; a whole number from 0 to {_LARGEST:,} is needed", value)
            return value
        if default is None:
            raise self.error(names[0], f"missing (looked for {', '.join(names)})", "")
        return default

    def flag(self, name: str, *, default: bool) -> bool:
        return bool(self._fields.get(name, default))

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def error(self, name: str, what: str, value: object) -> ConfigError:
        return ConfigError(f"--config: {self._path}: {name}: {what}", field=name, value=str(value))


def read_config(path: Path) -> ModelRow:
    """The row of the table that this file would be. Raises ConfigError for what is missing or wrong."""
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"--config: {file}: {err.strerror}", field="--config", value=str(file)) from err
    except ValueError as err:
        raise ConfigError(f"--config: {file} is not JSON: {err}", field="--config", value=str(file)) from err
    if not isinstance(fields, dict):
        raise ConfigError(f"--config: {file} is no JSON object", field="--config", value=str(file))
    text = fields.get("text_config")  # of models with a vision tower
    name = str(fields.get("_name_or_path") or fields.get("model_type") or file.parent.name)
    return _row(_Config(fields | text if isinstance(text, dict) else fields, file), name)


def _row(config: _Config, name: str) -> ModelRow:
    layers, hidden, heads = (
        config.count("num_hidden_layers", "n_layer"),
        config.count("hidden_size", "n_embd"),
        config.count("num_attention_heads", "n_head"),
    )
    for field, value in (("num_hidden_layers", layers), ("hidden_size", hidden), ("num_attention_heads", heads)):
        if value == 0:
            raise config.error(field, "0; at least 1 is needed", 0)
    mla_rank = config.count("kv_lora_rank", default=0)
    rope_dim = config.count("qk_rope_head_dim") if mla_rank else 0
    qk_dim = (
        config.count("qk_nope_head_dim") + rope_dim if mla_rank else config.count("head_dim", default=hidden // heads)
    )
    v_dim = config.count("v_head_dim") if mla_rank else qk_dim
    kv_heads = 1 if mla_rank else config.count("num_key_value_heads", default=heads)
    if not mla_rank and (kv_heads == 0 or heads % kv_heads):
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide {heads} heads", kv_heads)
    attention = _mla_params(config) if mla_rank else hidden * qk_dim * 2 * (heads + kv_heads)
    mlp = _mlp_params(config, layers, hidden)
    vocab = config.count("vocab_size")
    embeddings = vocab * hidden * (1 if config.flag("tie_word_embeddings", default=False) else 2)
    full_layers, window_tokens = _full_layers(config, layers)
    attending = layers if window_tokens else full_layers
    kv_dims = mla_rank + rope_dim if mla_rank else 2 * kv_heads * qk_dim
    per_pair = 2.0 * heads * (qk_dim + v_dim)
    total = layers * attention + mlp.total + embeddings
    return ModelRow(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        mla_rank=mla_rank,
        rope_dim=rope_dim,
        window_tokens=window_tokens,
        full_layers=full_layers,
        total_params=total,
        active_params=layers * attention + mlp.active + embeddings,
        prefill_params=layers * attention + mlp.active,
        check_params=total,
        kv_bytes_per_token=attending * kv_dims * 2,
        attn_flops_per_pair=attending * per_pair,
        attn_flops_per_pair_full=full_layers * per_pair,
        source="config.json",
        note="",
    )


def _mla_params(config: _Config) -> float:
    """Of a layer: queries (through a latent or not), the latent of K and V, its two projections, the output."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    rank, rope, nope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim"), config.count("qk_nope_head_dim")
    v_dim, q_rank = config.count("v_head_dim"), config.count("q_lora_rank", default=0)
    queries = (hidden + heads * (nope + rope)) * q_rank if q_rank else hidden * heads * (nope + rope)
    return queries + hidden * (rank + rope) + rank * heads * (nope + v_dim) + heads * v_dim * hidden


def _mlp_params(config: _Config, layers: int, hidden: int) -> _Counts:
    """Of all layers: gated, so three matrices; of experts the chosen ones are active."""
    experts = config.count("n_routed_experts", "num_experts", "num_local_experts", default=0)
    if not experts:
        dense = 3.0 * layers * hidden * config.count("intermediate_size", "n_inner")
        return _Counts(dense, dense)
    chosen = config.count("num_experts_per_tok", "experts_per_token", "moe_topk")
    if not 1 <= chosen <= experts:
        raise config.error("num_experts_per_tok", f"{chosen}; needs 1 to {experts}, the number of experts", chosen)
    size = config.count("moe_intermediate_size", "intermediate_size")
    shared_size = config.count(
        "shared_expert_intermediate_size", default=size * config.count("n_shared_experts", default=0)
    )
    dense_layers = _dense_layers(config, layers)
    dense = 3.0 * hidden * config.count("intermediate_size", default=size) * dense_layers
    fixed = 3.0 * hidden * shared_size + hidden * experts  # the router
    moe_layers = layers - dense_layers
    one = 3.0 * hidden * size
    return _Counts(dense + moe_layers * (fixed + experts * one), dense + moe_layers * (fixed + chosen * one))


def _dense_layers(config: _Config, layers: int) -> int:
    """Layers without experts in a model that has them."""
    first = config.count("first_k_dense_replace", default=0)
    stride = config.count("decoder_sparse_step", "moe_layer_freq", default=1)
    named = config.get("mlp_only_layers")
    only = len(named) if isinstance(named, list) else 0
    return min(layers, max(first, only) + (layers - first) * (stride - 1) // stride if stride else layers)


def _full_layers(config: _Config, layers: int) -> tuple[int, int]:
    """(layers that attend to everything, window of the others; 0 if there are no others)."""
    window = config.count("sliding_window", default=0)
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        full = sum(kind == "full_attention" for kind in kinds)
        windowed = sum(kind == "sliding_attention" for kind in kinds)
        if windowed and not window:
            raise config.error("sliding_window", "missing, and layer_types has layers with a window", "")
        return full, window if windowed else 0
    if not window or not config.flag("use_sliding_window", default=True):
        return layers, 0
    pattern = config.count("sliding_window_pattern", "_sliding_window_pattern", default=0)
    if not pattern:
        model_type = config.get("model_type")
        pattern = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2}.get(str(model_type), 0)
    return (layers // pattern if pattern else 0), window
