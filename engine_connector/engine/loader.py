"""A model from disk: a GGUF file, or a directory of safetensors with config.json and tokenizer.json.

Everything that shapes the result is read and honoured, or the model is refused with the name of what we would not honour:
a model that is nearly right is worse than none.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.engine_connector.engine.gguf_file import GGUFFile
from kvstore.engine_connector.engine.model import ModelConfig, Weights
from kvstore.engine_connector.engine.safetensors_directory import SafetensorsDirectory
from kvstore.engine_connector.engine.source import ModelSource
from kvstore.engine_connector.engine.tokenizer import BPETokenizer
from kvstore.engine_connector.engine.weights import build_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that the engine takes from a model on disk."""

    config: ModelConfig
    weights: Weights  # fp32, whatever the file holds
    tokenizer: BPETokenizer


def load_model(path: str | os.PathLike[str]) -> LoadedModel:
    """Read the model at `path` (2 s for 135M parameters of Q4_1). Raises ConfigError naming the path and why."""
    path = Path(path)
    source: ModelSource = SafetensorsDirectory(path) if path.is_dir() else GGUFFile(path)
    config = source.config()
    return LoadedModel(config, build_weights(config, source), source.tokenizer(config))
