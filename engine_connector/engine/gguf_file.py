"""A GGUF file as a ModelSource: Llama, Qwen2, Qwen3.

The `gguf` library parses and dequantises. For `llama` alone, llama.cpp stores the rows of Q and K so that rotary pairs are
neighbours (row 2i and 2i + 1 of a head); we undo that here and rotate half-split (row i and i + head_dim / 2).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

from kvstore.engine_connector.engine.gguf_tokenizer import Vocabulary, gguf_tokenizer
from kvstore.engine_connector.engine.model import ModelConfig
from kvstore.engine_connector.engine.refusal import refuse
from kvstore.engine_connector.engine.rope import Rope
from kvstore.engine_connector.engine.source import check_config
from kvstore.engine_connector.engine.tokenizer import BPETokenizer

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ROPE_FACTORS = "rope_freqs.weight"
_PARSE_ERRORS = (ValueError, IndexError, KeyError, OverflowError, NotImplementedError)
"""What the library raises on a file that is cut off or not GGUF."""


class GGUFFile:
    """An open GGUF file (source.ModelSource)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _PlainReader(path)
        except OSError as err:
            refuse(path, err.strerror or str(err), err)
        except _PARSE_ERRORS as err:
            refuse(path, f"not a whole GGUF file ({err})", err)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = self._field("general.architecture", str)
        if self._architecture not in _ARCHITECTURES:
            refuse(path, f"architecture is {self._architecture!r}; this engine runs {', '.join(_ARCHITECTURES)}")

    def config(self) -> ModelConfig:
        """See ModelSource."""
        heads, hidden = self._count("attention.head_count"), self._count("embedding_length")
        head_dim = self._setting("attention.key_length", int, hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._setting(key, int, head_dim)) != head_dim:
                refuse(self.path, f"{self._architecture}.{key} {found} must equal the head_dim {head_dim}")
        config = ModelConfig(
            architecture=self._architecture,
            num_layers=self._count("block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._setting("attention.head_count_kv", int, heads),
            head_dim=head_dim,
            ffn_size=self._count("feed_forward_length"),
            vocab_size=len(self._field("tokenizer.ggml.tokens", list)),
            context_length=self._count("context_length"),
            rms_eps=self._setting("attention.layer_norm_rms_epsilon", float),
            rope=self._rope(head_dim),
            tied_embeddings="output.weight" not in self._tensors,
            qkv_bias=self._architecture == "qwen2",
            qk_norm=self._architecture == "qwen3",
        )
        return check_config(self.path, config)

    def tokenizer(self, config: ModelConfig) -> BPETokenizer:
        """See ModelSource."""
        assert config.vocab_size == len(self._field("tokenizer.ggml.tokens", list))
        pre_tokenizer = self._field("tokenizer.ggml.pre", str, "default")
        return gguf_tokenizer(
            Vocabulary(
                model=self._field("tokenizer.ggml.model", str),
                pre_tokenizer=pre_tokenizer,
                tokens=self._field("tokenizer.ggml.tokens", list),
                token_types=self._field("tokenizer.ggml.token_type", list),
                merges=self._field("tokenizer.ggml.merges", list),
                eos_token_id=self._field("tokenizer.ggml.eos_token_id", int),
                bos_token_id=self._field("tokenizer.ggml.bos_token_id", int, -1),
                adds_bos=self._field("tokenizer.ggml.add_bos_token", bool, pre_tokenizer == "llama-bpe"),
                adds_eos=self._field("tokenizer.ggml.add_eos_token", bool, default=False),
                chat_template=self._field("tokenizer.chat_template", str, ""),
            )
        )

    def tensor_names(self) -> frozenset[str]:
        """See ModelSource. The rotary factors are part of `config`."""
        return frozenset(self._tensors.keys() - {_ROPE_FACTORS})

    def file_name(self, name: str) -> str:
        """See ModelSource: the same."""
        return name

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """See ModelSource."""
        tensor = self._tensors.get(name)
        if tensor is None:
            refuse(self.path, f"tensor {name} is missing")
        if (found := tuple(int(n) for n in reversed(tensor.shape))) != shape:
            refuse(self.path, f"tensor {name} has shape {found}, the settings ask for {shape}")
        try:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).reshape(shape).copy())
        except NotImplementedError as err:
            refuse(self.path, f"tensor {name}: {err}", err)
        if self._architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            return _half_split(values, self._head_dim())
        return values

    def _head_dim(self) -> int:
        head_dim: int = self._setting(
            "attention.key_length", int, self._count("embedding_length") // self._count("attention.head_count")
        )
        return head_dim

    def _rope(self, head_dim: int) -> Rope:
        theta = self._setting("rope.freq_base", float, 10000.0)
        scaling = self._setting("rope.scaling.type", str, "none")
        factors = _ROPE_FACTORS in self._tensors
        if f"{self._architecture}.rope.scale_linear" in self._reader.fields:
            refuse(self.path, f"{self._architecture}.rope.scale_linear is not supported; use rope.scaling.type")
        if scaling == "linear" and not factors:
            return Rope.linear(theta, head_dim, self._setting("rope.scaling.factor", float))
        if scaling != "none":
            with_factors = " with rope_freqs" if factors else ""
            refuse(self.path, f"rope.scaling.type {scaling!r}{with_factors} is not supported; 'none' and 'linear' are")
        if factors:
            return Rope.divided(theta, self.tensor(_ROPE_FACTORS, head_dim // 2).tolist())
        return Rope(theta)

    def _count(self, key: str) -> int:
        value: int = self._setting(key, int)
        if value < 1:
            refuse(self.path, f"{self._architecture}.{key} is {value}; it must be at least 1")
        return value

    def _setting(self, key: str, kind: type[Any], default: Any = None) -> Any:
        return self._field(f"{self._architecture}.{key}", kind, default)

    def _field(self, key: str, kind: type[Any], default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                refuse(self.path, f"{key} is missing")
            return default
        try:
            value = _strings(field) if field.types[-1] == GGUFValueType.STRING and kind is list else field.contents()
        except _PARSE_ERRORS as err:
            refuse(self.path, f"{key} cannot be read ({err})", err)
        if not isinstance(value, kind):
            refuse(self.path, f"{key} is {value!r}, not a {kind.__name__}")
        return value


class _PlainReader(GGUFReader):
    """Slices the file as a plain array: slices of np.memmap make 98,000 strings take 2.4 s instead of 0.8 s."""

    @property  # type: ignore[override] # declared a memmap, used as an array
    def data(self) -> npt.NDArray[np.uint8]:
        return self._plain

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._plain = mapped.view(np.ndarray)


def _strings(field: Any) -> list[str]:
    """An array of strings; `contents()` of 49,152 strings takes four times as long."""
    return [bytes(field.parts[index]).decode() for index in field.data]


def _half_split(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head from pair-neighbouring order (0, d/2, 1, d/2 + 1, ...) back to (0, 1, ..., d - 1)."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
