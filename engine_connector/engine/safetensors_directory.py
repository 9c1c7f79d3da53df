"""A Hugging Face directory as a ModelSource: config.json, safetensors (one file, or an index of several), tokenizer.json.

`model_type` says which class of transformers the settings are for; every setting that this class reads is honoured here or
must have the value that leaves it without effect.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvstore.engine_connector.engine.json_tokenizer import json_tokenizer
from kvstore.engine_connector.engine.model import ModelConfig
from kvstore.engine_connector.engine.refusal import refuse
from kvstore.engine_connector.engine.rope import Rope
from kvstore.engine_connector.engine.source import check_config
from kvstore.engine_connector.engine.tokenizer import BPETokenizer

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
        "rope_interleaved": (False,),
    }
)
"""Settings that we honour with these values alone."""

_HEAD = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_DERIVED = ".rotary_emb.inv_freq"
"""Old checkpoints carry the rotary frequencies, which follow from config.json."""


class SafetensorsDirectory:
    """An open directory (source.ModelSource)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._settings = self._json("config.json")
        self._model_type = self._setting("model_type", str)
        if self._model_type not in _MODEL_TYPES:
            refuse(path, f"model_type is {self._model_type!r}; this engine runs {', '.join(_MODEL_TYPES)}")
        self._files = {name: file for file in self._weight_files() for name in file.keys()}  # noqa: SIM118 (no mapping)

    def config(self) -> ModelConfig:
        """See ModelSource."""
        self._refuse_what_we_do_not_honour()
        heads, hidden = self._count("num_attention_heads"), self._count("hidden_size")
        if self._model_type != "qwen3" and self._settings.get("head_dim") is None:
            head_dim = hidden // heads
        else:
            head_dim = self._count("head_dim")
        config = ModelConfig(
            architecture=self._model_type,
            num_layers=self._count("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._setting("num_key_value_heads", int, heads),
            head_dim=head_dim,
            ffn_size=self._count("intermediate_size"),
            vocab_size=self._count("vocab_size"),
            context_length=self._count("max_position_embeddings"),
            rms_eps=float(self._setting("rms_norm_eps", (int, float))),
            rope=self._rope(head_dim),
            tied_embeddings=self._setting("tie_word_embeddings", bool, default=False),
            qkv_bias=self._model_type == "qwen2",
            qk_norm=self._model_type == "qwen3",
        )
        return check_config(self.path, config)

    def tokenizer(self, config: ModelConfig) -> BPETokenizer:
        """See ModelSource."""
        optional = {
            name: self._json(name) if (self.path / name).exists() else {}
            for name in ("generation_config.json", "tokenizer_config.json")
        }
        eos_ids = [*_ids(self._settings), *_ids(optional["generation_config.json"])]
        return json_tokenizer(
            self.path, optional["tokenizer_config.json"], vocab_size=config.vocab_size, eos_ids=eos_ids
        )

    def tensor_names(self) -> frozenset[str]:
        """See ModelSource."""
        return frozenset(name for name in self._files if not name.endswith(_DERIVED))

    def file_name(self, name: str) -> str:
        """See ModelSource: blk.3.attn_q.weight is model.layers.3.self_attn.q_proj.weight here."""
        part, _, kind = name.rpartition(".")
        if part in _HEAD:
            return f"{_HEAD[part]}.{kind}"
        _, layer, role = part.split(".")
        return f"model.layers.{layer}.{_LAYER[role]}.{kind}"

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """See ModelSource."""
        name = self.file_name(name)
        if name not in self._files:
            refuse(self.path, f"tensor {name} is missing")
        try:
            values: torch.Tensor = self._files[name].get_tensor(name)
        except SafetensorError as err:
            refuse(self.path, f"tensor {name}: {err}", err)
        if tuple(values.shape) != shape:
            refuse(self.path, f"tensor {name} has shape {tuple(values.shape)}, the settings ask for {shape}")
        if values.dtype not in _DTYPES:
            refuse(self.path, f"tensor {name} is {values.dtype}; this engine reads float32, float16 and bfloat16")
        return values.float()

    def _weight_files(self) -> list[Any]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            weight_map = self._json(index.name).get("weight_map")
            if not isinstance(weight_map, dict):
                refuse(self.path, f"{index.name} has no weight_map")
            names = sorted(set(weight_map.values()))
        else:
            names = sorted(file.name for file in self.path.glob("*.safetensors"))
            if len(names) != 1:
                refuse(
                    self.path, f"{len(names)} .safetensors files and no {index.name}; one file, or an index, is right"
                )
        return [self._open(name) for name in names]

    def _open(self, name: str) -> Any:
        if Path(name).name != name:
            refuse(self.path, f"the index names {name!r}, which is not a file of this directory")
        try:
            return safe_open(self.path / name, framework="pt")
        except (OSError, SafetensorError) as err:
            refuse(self.path, f"{name}: {err}", err)

    def _refuse_what_we_do_not_honour(self) -> None:
        for name, right in _ONLY.items():
            if name in self._settings and self._settings[name] not in right:
                refuse(self.path, f"{name} {self._settings[name]!r} is not supported; only {right[0]!r} is")
        other = set(self._settings.get("layer_types") or ()) - {"full_attention"}
        if other:
            refuse(self.path, f"layer_types has {min(other)!r}; only 'full_attention' is supported")

    def _rope(self, head_dim: int) -> Rope:
        """Since version 5 transformers writes `rope_parameters` with theta in it; before, rope_theta and rope_scaling."""
        scaling = self._settings.get("rope_parameters") or self._settings.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            refuse(self.path, f"rope_scaling is {scaling!r}, not an object")
        theta = scaling.get("rope_theta", self._settings.get("rope_theta", 10000.0))
        kind = str(scaling.get("rope_type", scaling.get("type", "default")))
        needed = {
            "default": (),
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        }.get(kind)
        if needed is None:
            refuse(self.path, f"rope_type {kind!r} is not supported; 'default', 'linear' and 'llama3' are")
        known = {"rope_type", "type", "rope_theta", *needed}
        if unknown := {key for key, value in scaling.items() if value is not None} - known:
            refuse(self.path, f"rope_type {kind!r} with {min(unknown)} is not supported")
        for key, value in [("rope_theta", theta), *((key, scaling.get(key)) for key in needed)]:
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                refuse(self.path, f"{key} is {value!r}; it must be a number above 0")
        if kind == "linear":
            return Rope.linear(float(theta), head_dim, float(scaling["factor"]))
        if kind == "llama3":
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            if low >= high:
                refuse(self.path, f"low_freq_factor {low} must be below high_freq_factor {high}")
            context = int(scaling["original_max_position_embeddings"])
            return Rope.llama3(
                float(theta), head_dim, factor=float(scaling["factor"]), low=low, high=high, original_context=context
            )
        return Rope(float(theta))

    def _count(self, key: str) -> int:
        value: int = self._setting(key, int)
        if value < 1:
            refuse(self.path, f"{key} is {value}; it must be at least 1")
        return value

    def _setting(self, key: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        value = self._settings.get(key)
        if value is None:
            if default is None:
                refuse(self.path, f"{key} is missing in config.json")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            refuse(self.path, f"{key} is {value!r} in config.json, which is of the wrong type")
        return value

    def _json(self, name: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / name).read_bytes())
        except OSError as err:
            refuse(self.path, f"{name}: {err.strerror}", err)
        except ValueError as err:
            refuse(self.path, f"{name} is not JSON ({err})", err)
        if not isinstance(content, dict):
            refuse(self.path, f"{name} holds no object")
        return content


def _ids(settings: Mapping[str, Any]) -> list[int]:
    """`eos_token_id` is one number or a list."""
    value = settings.get("eos_token_id")
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
