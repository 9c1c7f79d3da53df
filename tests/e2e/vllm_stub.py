"""vLLM's modules as far as the connector imports them, made from a record of the real ones (tests/vllm/record_contract.py), for
tests where vLLM is not installed. Classes have the recorded methods, which do nothing, and what little the connector relies on.
"""

import enum
import importlib
import inspect
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

CONTRACT = json.loads((Path(__file__).parent.parent / "data" / "vllm_contract.json").read_text())
OURS = ("vllm", "vllm_engine", "vllm_metrics", "vllm_tier")


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class CacheHitSource(enum.StrEnum):
    HOST = "host"
    DISK = "disk"
    P2P = "p2p"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    RETRY = enum.auto()


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class FullAttentionSpec(SimpleNamespace):
    """Of a layer group."""


class SlidingWindowSpec(SimpleNamespace):
    """Likewise."""


class MLAAttentionSpec(FullAttentionSpec):
    """Likewise."""


def _block_sizes(kv_cache_config: Any, vllm_config: Any) -> tuple[int, int]:
    (group,) = kv_cache_config.kv_cache_groups
    return group.kv_cache_spec.block_size, group.kv_cache_spec.block_size


class _Empty:
    """A name that is only mentioned."""


def _recorded(name: str, **own: Any) -> type:
    """The class of that name, abstract where vLLM's is."""
    methods: dict[str, Any] = {}
    for method in CONTRACT["classes"][name]["methods"]:

        def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
            """Recorded by its signature only."""

        methods[method] = abstractmethod(nothing) if method in CONTRACT["classes"][name]["abstract"] else nothing
    return type(name, (ABC,), methods | own)


def _connector_init(self: Any, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
    self._vllm_config, self._role, self._kv_cache_config = vllm_config, role, kv_cache_config
    self._connector_metadata = None


def _bind(self: Any, metadata: Any) -> None:
    self._connector_metadata = metadata


def _stats_init(self: Any, data: dict[str, Any] | None = None) -> None:
    self.data = data or {}


def _tier_init(self: Any, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
    self.tier_type, self.block_size_bytes = tier_type, view.strides[0]


_NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": CONTRACT["version"]},
    "vllm.config": {"VllmConfig": _Empty},
    "vllm.distributed": {"get_tensor_model_parallel_rank": lambda: 0},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": _recorded(
            "KVConnectorBase_V1",
            __init__=_connector_init,
            role=property(lambda self: self._role),
            bind_connector_metadata=_bind,
            clear_connector_metadata=lambda self: _bind(self, None),
            _get_connector_metadata=lambda self: self._connector_metadata,
        ),
        "KVConnectorMetadata": _Empty,
        "KVConnectorRole": KVConnectorRole,
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorWorkerMetadata": _recorded("KVConnectorWorkerMetadata"),
        "SupportsHMA": _recorded("SupportsHMA"),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorStats": _recorded("KVConnectorStats", __init__=_stats_init),
        "KVConnectorPromMetrics": _recorded("KVConnectorPromMetrics"),
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector": {
        "OffloadingConnector": _recorded("OffloadingConnector", __init__=_connector_init)
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *_: "vec"},
    "vllm.v1.core.kv_cache_utils": {
        "DEFAULT_NONE_HASH_SEED": "vllm-none-hash",
        "resolve_kv_cache_block_sizes": _block_sizes,
    },
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": FullAttentionSpec,
        "SlidingWindowSpec": SlidingWindowSpec,
        "MLAAttentionSpec": MLAAttentionSpec,
        "KVCacheConfig": _Empty,
    },
    "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": CacheHitSource},
    "vllm.v1.kv_offload.base": {
        "LookupResult": LookupResult,
        "OffloadingSpec": _Empty,
        "OffloadKey": bytes,
        "ReqContext": _Empty,
        "RequestOffloadingContext": _Empty,
        "ScheduleEndContext": _Empty,
        "get_offload_block_hash": lambda key: key[:-4],
    },
    "vllm.v1.kv_offload.tiering.base": {
        "JobResult": JobResult,
        "SecondaryTierManager": _recorded("SecondaryTierManager", __init__=_tier_init),
        "TransferJob": _Empty,
    },
}


@contextmanager
def vllm_stubbed() -> Iterator[dict[str, ModuleType]]:
    """Our modules for vLLM by name, imported beside the stub. Forgotten afterwards, both."""
    assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules), "vLLM is installed here"
    before = set(sys.modules)
    for name, content in _NAMES.items():
        for end in range(len(parts := name.split("."))):
            parent = ".".join(parts[: end + 1])
            sys.modules.setdefault(parent, ModuleType(parent))
        vars(sys.modules[name]).update(content)
    try:
        yield {name: importlib.import_module(f"kvstore.engine_connector.{name}") for name in OURS}
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "vllm" or name.startswith("kvstore.engine_connector.vllm"):
                del sys.modules[name]


def parameters(function: Any) -> list[inspect.Parameter]:
    """Of a method, static or not."""
    return list(inspect.signature(getattr(function, "__func__", function)).parameters.values())
