"""What an SGLang engine's pages are, said as KVSpecs. Imports nothing of SGLang, so that it is tested without it; `sglang.py`
reads SGLang's configuration and pools and gives plain values.

SGLang's page hashes are used verbatim: a chain of sha256 over the tokens, begun with the request's extra key (its adapter) and
cache salt. They hold no weights, dtype or layout, and HiCacheStorageConfig lacks the first two, so all of that goes into the
spec. An adapter named at the start is in them by name and path (one loaded later by a random id), so what its files hold goes
into the spec too, and into that of a draft model's pools its weights. A page of the host pool is stored as it lies there, so the
pool's class and layout are part of the page format. A rank of a tensor-parallel engine has the heads of its own;
`PoolFacts.part` says which.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.engine_connector.fingerprint import config_digest, weights_as_loaded

_OF_SGLANG = ("backend_name", "module_path", "class_name")
_DIGEST_NBYTES = 32
_DIGEST_HEX = 2 * _DIGEST_NBYTES


class BackendSettings(NamedTuple):
    """What --hicache-storage-backend-extra-config may hold beside what SGLang reads itself."""

    socket: str | None = None
    tenant: str = ""
    model_path: str = ""  # of the weights; "": where SGLang has them from
    salt: str = (
        ""  # another one: other blocks. For weights that were changed in memory, which the fingerprint does not see
    )

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, object] | None) -> "BackendSettings":
        """Raises ConfigError for a key that is not known, a value that is not text, and an engine that copies pages twice."""
        ours = {name: value for name, value in (extra or {}).items() if name not in _OF_SGLANG}
        if ours.pop("interface_v1", 0) != 1:
            raise ConfigError(
                'interface_v1: missing from the extra config; kvstore copies pages in place only, so give "interface_v1": 1',
                field="interface_v1",
                value="",
            )
        for name, value in ours.items():
            if name not in cls._fields:
                raise ConfigError(
                    f"hicache-storage-backend-extra-config.{name}: not known; use {', '.join(cls._fields)}",
                    field=name,
                    value=str(value),
                )
            if not isinstance(value, str):
                raise ConfigError(
                    f"hicache-storage-backend-extra-config.{name}: {value!r} is not text", field=name, value=str(value)
                )
        return cls(**ours)  # type: ignore[arg-type]  # checked above


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Of the engine: what decides the content of its pages."""

    version: str  # SGLang's
    weights: str  # fingerprint
    quantization: str  # as SGLang applies it; "" for none
    load_format: str
    model_config: Mapping[str, Any]  # the model's config.json, with what the operator changed in it
    dtype: str  # of the computation
    cache_dtype: str  # of K and V; "auto": the same
    cache_scales: str = ""  # fingerprint of the file with the scales of K and V; "": those of the weights
    adapters: str = ""  # fingerprints of those that SGLang knows by name
    draft: str = ""  # of the draft model's weights; "": none of its own
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Of a host pool, or of a part of it: what decides how a page's bytes lie."""

    name: str  # SGLang's; "kv" is the pool of attention
    kind: str  # class
    layout: str
    dtype: str  # of an element as it is stored
    part: str  # which layers and heads, of how many ranks
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    page_nbytes: int


def kv_spec(model: ModelFacts, pool: PoolFacts) -> KVSpec:
    """The namespace's spec."""
    page_format = f"opaque:sglang-{model.version}:{pool.kind}:{pool.layout}:{pool.part}"
    dtype = model.dtype if model.cache_dtype == "auto" else f"{model.dtype}/{model.cache_dtype}"
    dtype += f"*{model.cache_scales}" if model.cache_scales else ""
    weights = weights_as_loaded(model.weights, quantization=model.quantization, load_format=model.load_format)
    seed = model.salt
    if model.adapters:
        seed += f"+adapters:{hashlib.sha256(model.adapters.encode()).hexdigest()[:32]}"
    return KVSpec(
        weights=f"{weights}+draft:{model.draft}" if model.draft and pool.name.startswith("draft") else weights,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        dtype=f"{dtype}:{pool.dtype}",
        rope=f"config:{config_digest(model.model_config)}",
        block_tokens=pool.page_tokens,
        group="full" if pool.name == "kv" else f"sglang:{pool.name}",
        hash=HashScheme(
            algorithm="engine:sglang-sha256",
            seed=seed,
            block_tokens=pool.page_tokens,
            digest_nbytes=_DIGEST_NBYTES,
        ),
        page_format=page_format,
        stored_format=page_format,
        opaque_block_nbytes=pool.page_nbytes,
    )


def part_of(
    *, layers: range, stage: tuple[int, int], heads: tuple[int, int], replicated: bool, context: tuple[int, int]
) -> str:
    """Which part of a whole page it is; of pairs (rank, number of ranks) those of more than one are named. Pages that all ranks
    have alike (`replicated`, as MLA's) are one page, whoever wrote it."""
    named = {"stage": stage, "heads": (0, 1) if replicated else heads, "context": context}
    ranks = [f"{name}{rank}of{size}" for name, (rank, size) in named.items() if size > 1]
    return ":".join([f"layers{layers.start}-{layers.stop}", *ranks])


def digests(page_hashes: list[str]) -> list[bytes]:
    """SGLang's keys as the store has them: those before the first that is not the hex digits of a sha256."""
    found = []
    for text in page_hashes:
        try:
            digest = bytes.fromhex(text) if len(text) == _DIGEST_HEX else b""
        except ValueError:
            digest = b""
        if len(digest) != _DIGEST_NBYTES:
            break
        found.append(digest)
    return found
