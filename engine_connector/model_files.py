"""Where an engine has its model's files from: what is fingerprinted."""

from pathlib import Path

from kvstore.core.errors import ConfigError


def local_model_files(model: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The path `model`, or the local copy of what the engine downloaded under that name. Reaches for no network. Raises
    ConfigError when there is neither."""
    if Path(model).exists():
        return Path(model)
    import huggingface_hub  # every engine that takes a name has it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=["*.safetensors", "config.json"],
                local_files_only=True,
            )
        )
    except (OSError, ValueError) as err:
        raise ConfigError(
            f"model: no local weights of {model} to fingerprint: {err}", field="model", value=model
        ) from err
