"""What an SGLang engine's pages are: whatever decides their bytes separates them, and nothing else does."""

import dataclasses
import hashlib

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.keys import differing_fields
from kvstore.engine_connector.sglang_identity import (
    BackendSettings,
    ModelFacts,
    PoolFacts,
    digests,
    kv_spec,
    part_of,
)

MODEL = ModelFacts(
    version="0.5.23",
    weights="dir:0123",
    quantization="",
    load_format="auto",
    model_config={"rope_theta": 10000.0, "_name_or_path": "/models/a"},
    dtype="bfloat16",
    cache_dtype="auto",
)
POOL = PoolFacts(
    name="kv",
    kind="MHATokenToKVPoolHost",
    layout="page_first",
    dtype="bfloat16",
    part="layers0-4",
    num_layers=4,
    num_kv_heads=2,
    head_dim=32,
    page_tokens=64,
    page_nbytes=65536,
)
WHOLE = {"layers": range(4), "stage": (0, 1), "heads": (0, 1), "replicated": False, "context": (0, 1)}


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"weights": "dir:4567"}, ["weights"]),
        ({"quantization": "fp8"}, ["weights"]),
        ({"load_format": "dummy"}, ["weights"]),
        ({"cache_scales": "xxh3:01"}, ["dtype"]),
        ({"adapters": "a xxh3:02"}, ["hash.seed"]),
        ({"model_config": {"rope_theta": 1e6}}, ["rope"]),
        ({"dtype": "float16"}, ["dtype"]),
        ({"cache_dtype": "fp8_e5m2"}, ["dtype"]),
        ({"version": "0.5.24"}, ["page_format", "stored_format"]),
        ({"salt": "after step 100"}, ["hash.seed"]),
    ],
)
def test_models_that_differ_do_not_share(change: dict, fields: list[str]) -> None:
    other = kv_spec(dataclasses.replace(MODEL, **change), POOL)

    assert differing_fields(kv_spec(MODEL, POOL), other) == fields


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"layout": "layer_first"}, ["page_format", "stored_format"]),
        ({"kind": "MLATokenToKVPoolHost"}, ["page_format", "stored_format"]),
        ({"part": "layers0-4:heads1of2"}, ["page_format", "stored_format"]),
        ({"dtype": "uint8"}, ["dtype"]),
        ({"name": "mamba"}, ["group"]),
        ({"page_tokens": 32, "page_nbytes": 32768}, ["block_tokens", "opaque_block_nbytes", "hash.block_tokens"]),
    ],
)
def test_pools_that_differ_do_not_share(change: dict, fields: list[str]) -> None:
    other = kv_spec(MODEL, dataclasses.replace(POOL, **change))

    assert differing_fields(kv_spec(MODEL, POOL), other) == fields


@pytest.mark.parametrize(("pool", "fields"), [("kv", []), ("draft", ["weights"]), ("draft_swa", ["weights"])])
def test_only_pools_of_the_draft_model_are_apart_for_its_weights(pool: str, fields: list[str]) -> None:
    of_pool = dataclasses.replace(POOL, name=pool)
    first, second = (kv_spec(dataclasses.replace(MODEL, draft=draft), of_pool) for draft in ("xxh3:01", "xxh3:02"))

    assert differing_fields(first, second) == fields


def test_where_the_model_lies_does_not_matter() -> None:
    moved = dataclasses.replace(MODEL, model_config={"rope_theta": 10000.0, "_name_or_path": "/models/b"})

    assert kv_spec(moved, POOL) == kv_spec(MODEL, POOL)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({}, "layers0-4"),
        ({"heads": (1, 2)}, "layers0-4:heads1of2"),
        ({"heads": (1, 2), "replicated": True}, "layers0-4"),
        ({"layers": range(4, 8), "stage": (1, 2)}, "layers4-8:stage1of2"),
        ({"heads": (1, 2), "context": (0, 2)}, "layers0-4:heads1of2:context0of2"),
    ],
)
def test_a_rank_s_part_is_named(change: dict, part: str) -> None:
    assert part_of(**WHOLE | change) == part


def test_keys_are_sglang_s_own() -> None:
    pages = [hashlib.sha256(bytes([i])) for i in range(3)]

    assert digests([page.hexdigest() for page in pages]) == [page.digest() for page in pages]


@pytest.mark.parametrize("odd", ["", "12", "g" * 64, "0" * 63, "0" * 66, " " * 64, "0 " * 32])
def test_what_is_no_page_hash_ends_the_run(odd: str) -> None:
    page = hashlib.sha256(b"1")

    assert digests([page.hexdigest(), odd, page.hexdigest()]) == [page.digest()]


def test_settings_are_read_beside_those_of_sglang() -> None:
    extra = {"backend_name": "kvstore", "module_path": "m", "class_name": "c", "interface_v1": 1, "tenant": "a"}

    assert BackendSettings.from_extra_config(extra) == BackendSettings(tenant="a")


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (None, "interface_v1"),
        ({}, "interface_v1"),
        ({"interface_v1": 0}, "interface_v1"),
        ({"interface_v1": 1, "sockt": "/run/kv"}, "sockt"),
        ({"interface_v1": 1, "socket": 5}, "socket"),
    ],
)
def test_wrong_settings_are_refused_by_name(extra: dict | None, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        BackendSettings.from_extra_config(extra)

    assert refused.value.fields["field"] == field
