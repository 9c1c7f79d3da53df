"""What a vLLM engine's blocks are, said as a KVSpec, and which engines we serve. Imports nothing of vLLM, so that it is
tested without it; `vllm.py` reads vLLM's configuration and gives plain values.

vLLM's own block hashes are used verbatim: they chain tokens, images and cache salts. They hold no model, dtype or page
format, so all of that goes into the spec. Pages of a CPU are opaque: the first half of a page is K, packed by instruction
set, so the set, the attention backend, the physical layout, vLLM's version and the number of ranks are part of the page format.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.core.keys import KVSTORE_PAGE_FORMAT, HashScheme, KVSpec
from kvstore.engine_connector.fingerprint import config_digest, weights_as_loaded
from kvstore.engine_connector.protocol import FetchPolicy

_LONG_ROPES = frozenset({"longrope", "su"})
_LLAMA4_TUNED_TOKENS = 32768
_DIGEST_NBYTES = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}


class ConnectorSettings(NamedTuple):
    """What kv_connector_extra_config may hold."""

    socket: str | None = None
    tenant: str = ""
    fetch: FetchPolicy = FetchPolicy.PLANNED
    trace: bool = False  # send spans of requests that vLLM traces (kvstore/tracing.py)

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, object]) -> "ConnectorSettings":
        """Raises ConfigError for an unknown key, a value of the wrong kind, or an unknown policy."""
        for name, value in extra.items():
            if name not in cls._fields:
                raise ConfigError(
                    f"kv_connector_extra_config.{name}: not known; use {' or '.join(cls._fields)}",
                    field=name,
                    value=str(value),
                )
            kind, called = (bool, "true or false") if name == "trace" else (str, "text")
            if not isinstance(value, kind):
                raise ConfigError(
                    f"kv_connector_extra_config.{name}: {value!r} is not {called}", field=name, value=str(value)
                )
        settings = cls(**extra)  # type: ignore[arg-type]  # checked above
        return settings._replace(fetch=FetchPolicy.named(settings.fetch))


class GroupFacts(NamedTuple):
    """A layer group."""

    name: str  # KVSpec.group
    num_layers: int
    num_kv_heads: int  # of all ranks; those that several ranks have count once
    head_size: int
    planes: int
    block_tokens: int
    attention: (
        str  # backend and instruction set that pages are packed for; "" where they are in nobody's order but ours
    )
    page_nbytes: int  # of one rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What decides the bytes of an engine's blocks, read from vLLM's configuration."""

    version: str  # vLLM's
    weights: str  # fingerprint
    quantization: str  # as vLLM applies it; "" for none
    load_format: str
    model_config: Mapping[str, Any]  # the model's config.json as vLLM understood it
    settings: Mapping[str, Any]  # vLLM's own that decide K and V: `settings_by_length`, how images are prepared
    dtype: str  # of the computation
    cache_dtype: str  # of K and V; "auto": the same
    layout: str  # order of layer, block, head, token, content in memory
    num_ranks: int  # workers with a part of each page: tensor parallelism
    hash_tokens: int  # of one of a request's hashes
    hash_algorithm: str
    hash_seed: str

    def spec(self, group: GroupFacts) -> KVSpec:
        """The spec of a layer group's namespace. Raises ConfigError for a hash that we do not know the size of."""
        if self.hash_algorithm not in _DIGEST_NBYTES:
            raise ConfigError(
                f"prefix_caching_hash_algo: {self.hash_algorithm!r} is not known; use one of {', '.join(_DIGEST_NBYTES)}",
                field="prefix_caching_hash_algo",
                value=self.hash_algorithm,
            )
        return KVSpec(
            weights=weights_as_loaded(self.weights, quantization=self.quantization, load_format=self.load_format),
            group=group.name,
            num_layers=group.num_layers,
            num_kv_heads=group.num_kv_heads,
            head_dim=group.head_size,
            planes=group.planes,
            dtype=self.dtype if self.cache_dtype == "auto" else f"{self.dtype}/{self.cache_dtype}",
            rope=f"config:{config_digest({**self.model_config, **self._changed})}",
            block_tokens=group.block_tokens,
            hash=HashScheme(
                algorithm=f"engine:vllm-{self.hash_algorithm}",
                seed=self.hash_seed,
                block_tokens=self.hash_tokens,
                digest_nbytes=_DIGEST_NBYTES[self.hash_algorithm],
            ),
            page_format=(page_format := self._page_format(group)),
            stored_format=page_format,
            opaque_block_nbytes=group.page_nbytes * self.num_ranks if group.attention else 0,
        )

    @property
    def _changed(self) -> dict[str, Any]:
        return {f"vllm.{name}": value for name, value in self.settings.items() if value}

    def _page_format(self, group: GroupFacts) -> str:
        """The ranks' parts of an opaque block lie one after the other, so that another number of ranks is another format."""
        if not group.attention:
            return KVSTORE_PAGE_FORMAT
        ranks = f":tp{self.num_ranks}" if self.num_ranks > 1 else ""
        return f"opaque:vllm-{self.version}:{group.attention}:{self.layout}{ranks}"


def settings_by_length(config: Mapping[str, Any], max_model_len: int) -> dict[str, bool]:
    """What vLLM decides by the longest context that it serves, for all positions: whether longrope takes its long factors
    (rotary_embedding/phi3_long_rope_scaled_rope.py), and whether Llama 4 tunes the temperature of its attention (llama4.py). The
    length itself is none of it: engines of other models share whatever theirs is."""
    parts = list(_mappings(config))
    kinds = {part.get(name) for part in parts for name in ("rope_type", "type")}
    trained = [part.get("original_max_position_embeddings") or max_model_len for part in parts]
    is_llama4 = any(str(part.get("model_type", "")).startswith("llama4") for part in parts)
    return {
        "long_rope": not kinds.isdisjoint(_LONG_ROPES) and max_model_len > min(trained),
        "temperature_tuning": is_llama4 and max_model_len > _LLAMA4_TUNED_TOKENS,
    }


def _mappings(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A model's config, and those within: of its language model, of its rotary embedding."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from _mappings(value)


def group_name(kind: str, number: int, layer_names: Sequence[str], *, num_groups: int) -> str:
    """KVSpec.group. Which layers the groups of a model have is vLLM's choice (its version's, and that of settings such as
    kv_cache_dtype_skip_layers), so their names are in it where there are several."""
    if num_groups == 1:
        return kind
    digest = hashlib.sha256("\0".join(layer_names).encode()).hexdigest()
    return f"{kind}.{number}_{digest[:16]}"


def hash_seed(algorithm: str, python_hash_seed: str | None, *, default: str, instance: bytes) -> str:
    """The seed of vLLM's hashes (its NONE_HASH). Without PYTHONHASHSEED vLLM draws a random one for xxhash, so that only
    this engine ever finds what it saved; the spec then says so, and the near miss names the field."""
    if python_hash_seed is not None:
        return python_hash_seed
    return default if algorithm.startswith("sha256") else f"random:{instance.hex()}"


def instance_of(*names: str) -> bytes:
    """The 16 bytes by which all processes of one engine are known, from names they share."""
    return hashlib.sha256("\0".join(names).encode()).digest()[:16]
