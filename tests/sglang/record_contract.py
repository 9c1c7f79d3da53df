"""Writes down what SGLang's package expects of a storage backend, for the tests that run without it:

.venv-sglang/bin/python tests/sglang/record_contract.py > tests/data/sglang_contract.json
"""

import dataclasses
import inspect
import json

import sglang
import stand_ins  # noqa: F401 - before anything of sglang
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.observability.metrics_collector import StorageMetrics

DATACLASSES = ("HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolTransfer", "PoolTransferResult")
ENUMS = ("PoolName", "PoolHitPolicy")


def contract():
    """Methods with the names of their parameters (an optional one ends in "?"), fields of values likewise, members of enums."""
    base = hicache_storage.HiCacheStorage
    methods = {name: method for name, method in vars(base).items() if inspect.isfunction(method)}
    values = {name: getattr(hicache_storage, name) for name in DATACLASSES} | {"StorageMetrics": StorageMetrics}
    return {
        "version": sglang.__version__,
        "abstract": sorted(base.__abstractmethods__),
        "methods": {name: parameters(method) for name, method in methods.items()},
        "values": {name: fields(value) for name, value in values.items()},
        "enums": {name: {each.name: each.value for each in getattr(hicache_storage, name)} for name in ENUMS},
        "batch": hicache_storage.STORAGE_BATCH_SIZE,
    }


def parameters(method):
    return [
        each.name + ("" if each.default is inspect.Parameter.empty else "?")
        for each in list(inspect.signature(method).parameters.values())[1:]
    ]


def fields(value):
    missing = dataclasses.MISSING
    return [
        each.name + ("" if each.default is missing and each.default_factory is missing else "?")
        for each in dataclasses.fields(value)
    ]


if __name__ == "__main__":
    print(json.dumps(contract(), indent=1, sort_keys=True))
