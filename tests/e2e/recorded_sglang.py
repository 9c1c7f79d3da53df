"""The parts of SGLang that a storage backend sees, made from what was recorded of the package (tests/data/sglang_contract.json):
the backend is loaded against them where SGLang is not installed. `make sglang-test` compares the record with the package."""

import abc
import dataclasses
import enum
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

CONTRACT = json.loads((Path(__file__).parent.parent / "data" / "sglang_contract.json").read_text())
_BACKEND = "kvstore.engine_connector.sglang"


def load_backend() -> types.ModuleType:
    """The module of the backend, over these parts; the interpreter has none of them afterwards."""
    parts = _modules()
    assert not parts.keys() & sys.modules.keys(), "SGLang is installed here: use make sglang-test"
    sys.modules.update(parts)
    try:
        return importlib.import_module(_BACKEND)
    finally:
        for name in (*parts, _BACKEND):
            sys.modules.pop(name, None)


def _modules() -> dict[str, types.ModuleType]:
    values = {name: _value(name, fields) for name, fields in CONTRACT["values"].items()}
    enums = {name: enum.Enum(name, members, type=str) for name, members in CONTRACT["enums"].items()}
    for kind in enums.values():
        kind.__str__ = lambda member: member.value  # type: ignore[method-assign]  # as SGLang's
    top = types.ModuleType("sglang")
    top.__version__ = CONTRACT["version"]  # type: ignore[attr-defined]
    found = {"sglang": top}
    for name, content in {
        "sglang.srt": {},
        "sglang.srt.mem_cache": {},
        "sglang.srt.observability": {},
        "sglang.srt.mem_cache.hicache_storage": values | enums | {"HiCacheStorage": _base()},
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": values["StorageMetrics"]},
        "sglang.srt.runtime_context": {"get_context": _NotServing},
    }.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(content)
    return found


def _value(name: str, fields: list[str]) -> type:
    return dataclasses.make_dataclass(
        name,
        [
            (field.removesuffix("?"), Any, dataclasses.field(default=None)) if field.endswith("?") else (field, Any)
            for field in fields
        ],
    )


def _base() -> type:
    """HiCacheStorage: what is abstract there is abstract here, and registering remembers."""

    def register_mem_pool_host(self: Any, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    methods = {name: lambda *_: None for name in CONTRACT["methods"]}
    methods |= {name: abc.abstractmethod(lambda *_: None) for name in CONTRACT["abstract"]}
    return abc.ABCMeta("HiCacheStorage", (), methods | {"register_mem_pool_host": register_mem_pool_host})


class _NotServing:
    def config_leaf(self, name: str) -> str:
        raise ValueError("config not published")
