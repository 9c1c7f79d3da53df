"""What a model on disk must tell, whatever its format."""

from pathlib import Path
from typing import Protocol

import torch

from kvstore.engine_connector.engine.model import ModelConfig
from kvstore.engine_connector.engine.refusal import refuse
from kvstore.engine_connector.engine.tokenizer import BPETokenizer


class ModelSource(Protocol):
    """An open model. Every method raises ConfigError (`refuse`) for what is missing, damaged, or would not be honoured.

    Tensors are asked for by the names that GGUF gives them (`blk.3.attn_q.weight`); `file_name` says how the file at hand
    calls one, for messages and for finding what was never asked for.
    """

    path: Path

    def config(self) -> ModelConfig:
        """Settings, checked."""
        ...

    def tokenizer(self, config: ModelConfig) -> BPETokenizer:
        """The model's own tokenizer."""
        ...

    def tensor_names(self) -> frozenset[str]:
        """Every tensor of the file that a model must use, by the file's names."""
        ...

    def file_name(self, name: str) -> str:
        """The file's name of the tensor that GGUF calls `name`."""
        ...

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor in fp32 and of this shape; rows of Q and K in half-split rotary order."""
        ...


def check_config(path: Path, config: ModelConfig) -> ModelConfig:
    """Refuse numbers that do not fit together."""
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        refuse(path, f"{config.num_heads} heads cannot share {config.num_kv_heads} KV heads")
    if config.head_dim % 2:
        refuse(path, f"head_dim {config.head_dim} is odd; rotary positions turn pairs")
    return config
