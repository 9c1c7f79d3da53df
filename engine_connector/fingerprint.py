"""A fingerprint of a model's weights: equal content gives equal fingerprints, whatever the file's place and name.

Files of up to 1 GiB are hashed whole. Of a larger one we hash what a change of weights cannot leave alone, so that a
100 GB model costs 0.1 GB of reading:

    | header: first 16 MiB | region 0: 64 MiB        | region 1        | ... | size in bytes |
                           |    one page of 64 KiB, at a place that depends on the region's number

The header holds names, shapes and types of all tensors (and GGUF's metadata). Training touches every tensor, so a
fine-tuned, merged or requantised file differs in every page. What a sample can miss: a change confined to bytes between
the sampled pages, such as one small tensor patched by hand. Set a salt (HashScheme.seed) for such experiments.

A directory's fingerprint is made of those of its `.safetensors` files in sorted order of the fingerprints; its
config.json is not part of it: what of that decides a block's bytes is in the KVSpec itself.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from kvstore.core.errors import ConfigError

WHOLE_FILE_LIMIT_BYTES = 1 << 30
"""Hashed whole up to here: 0.1 s from the page cache, a second or so from a disk."""

_HEADER_BYTES = 16 << 20
_REGION_BYTES = 64 << 20
_PAGE_BYTES = 64 << 10
_CHUNK_BYTES = 8 << 20
_ADAPTER_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".json"})
_VOLATILE_CONFIG = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


class _FileVersion(NamedTuple):
    """What changes when a file is replaced or written; a fingerprint is computed once for each in a process."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    whole_limit_bytes: int


_known: dict[_FileVersion, str] = {}


def weights_fingerprint(path: str | os.PathLike[str], *, whole_file_limit_bytes: int = WHOLE_FILE_LIMIT_BYTES) -> str:
    """Fingerprint of one weights file, or of a directory of `.safetensors` files. Blocks while it reads.

    Raises ConfigError when there is nothing readable at `path`.
    """
    path = Path(path)
    try:
        if not path.is_dir():
            return _file_fingerprint(path, whole_file_limit_bytes)
        shards = [_file_fingerprint(shard, whole_file_limit_bytes) for shard in path.glob("*.safetensors")]
    except OSError as err:
        raise ConfigError(f"weights: cannot read {path}: {err.strerror}", field="weights", value=str(path)) from err
    if not shards:
        raise ConfigError(f"weights: no .safetensors file in {path}", field="weights", value=str(path))
    return "dir:" + xxhash.xxh3_128_hexdigest("\n".join(sorted(shards)).encode())


def adapter_fingerprint(directory: Path) -> str:
    """Of a LoRA adapter's weights and settings, with their names. Raises ConfigError when there are none to read."""
    files = adapter_files(directory)
    if not files:
        raise ConfigError(f"lora_path: {directory} holds no adapter", field="lora_path", value=str(directory))
    return "\n".join(f"{path.name} {weights_fingerprint(path)}" for path in files)


def adapter_files(directory: Path) -> list[Path]:
    """Raises ConfigError for a directory that is not there."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix in _ADAPTER_SUFFIXES)
    except OSError as err:
        raise ConfigError(
            f"lora_path: {directory} cannot be read ({err.strerror}); give a local directory",
            field="lora_path",
            value=str(directory),
        ) from err


def weights_as_loaded(fingerprint: str, *, quantization: str, load_format: str) -> str:
    """Of what an engine makes of the files: it may quantise them, or draw random numbers in their place ("dummy")."""
    made = (quantization, load_format if load_format == "dummy" else "")
    return "+".join((fingerprint, *filter(None, made)))


def config_digest(config: Mapping[str, Any]) -> str:
    """Of a model's config.json: rotary embedding, norms, windows and whatever else the weights do not show."""
    lasting = {name: value for name, value in config.items() if name not in _VOLATILE_CONFIG}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _file_fingerprint(path: Path, whole_limit_bytes: int) -> str:
    with path.open("rb") as file:
        stat = os.fstat(file.fileno())
        version = _FileVersion(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, whole_limit_bytes)
        if version not in _known:
            whole = stat.st_size <= whole_limit_bytes
            _known[version] = f"xxh3:{_hash_whole(file)}" if whole else f"sample:{_hash_sample(file, stat.st_size)}"
        return _known[version]


def _hash_whole(file: BinaryIO) -> str:
    digest = xxhash.xxh3_128()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _hash_sample(file: BinaryIO, size: int) -> str:
    digest = xxhash.xxh3_128()
    digest.update(file.read(_HEADER_BYTES))
    for region, start in enumerate(range(_HEADER_BYTES, size, _REGION_BYTES)):
        file.seek(start + _page_in_region(region, min(_REGION_BYTES, size - start)))
        digest.update(file.read(_PAGE_BYTES))
    digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()


def _page_in_region(region: int, region_bytes: int) -> int:
    """Where the sampled page starts: spread by a hash, so that no tensor layout with a period of 64 MiB hides."""
    spread = xxhash.xxh3_64_intdigest(region.to_bytes(8, "little"))
    return spread % max(1, region_bytes - _PAGE_BYTES + 1)
