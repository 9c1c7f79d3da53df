"""How a model on disk is refused: with its path and the reason."""

from pathlib import Path
from typing import NoReturn

from kvstore.core.errors import ConfigError


def refuse(path: Path, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise the ConfigError of a model that cannot be used."""
    raise ConfigError(f"model: cannot use {path}: {reason}", field="model", value=str(path)) from cause
