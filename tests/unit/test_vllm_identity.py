"""What a vLLM engine's blocks are: whatever decides their bytes separates them, and nothing else does."""

import dataclasses

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.keys import differing_fields
from kvstore.engine_connector.vllm_identity import ConnectorSettings, EngineFacts, hash_seed, instance_of

FACTS = EngineFacts(
    version="0.32.0",
    weights="dir:0123",
    quantization="",
    model_config={
        "rope_theta": 10000.0,
        "_name_or_path": "/models/a",
        "dtype": "bfloat16",
        "transformers_version": "5",
    },
    dtype="float32",
    cache_dtype="auto",
    attention="cpu-vec",
    layout="LBHNC",
    num_layers=30,
    num_ranks=1,
    num_kv_heads=3,
    head_size=64,
    block_tokens=32,
    block_nbytes=30 * 3 * 32 * 128 * 4,
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"weights": "dir:4567"}, ["weights"]),
        ({"quantization": "fp8"}, ["weights"]),
        ({"model_config": {"rope_theta": 1e6}}, ["rope"]),
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"cache_dtype": "fp8"}, ["dtype"]),
        ({"version": "0.33.0"}, ["page_format", "stored_format"]),
        ({"attention": "cpu-amx"}, ["page_format", "stored_format"]),
        ({"layout": "LBNHC"}, ["page_format", "stored_format"]),
        ({"num_ranks": 2}, ["page_format", "stored_format"]),
        ({"block_tokens": 64}, ["block_tokens", "hash.block_tokens"]),
        ({"hash_algorithm": "sha256_cbor"}, ["hash.algorithm"]),
        ({"hash_algorithm": "xxhash"}, ["hash.algorithm", "hash.digest_nbytes"]),
        ({"hash_seed": "42"}, ["hash.seed"]),
    ],
)
def test_whatever_decides_the_bytes_separates_and_is_named(change, fields):
    other = dataclasses.replace(FACTS, **change).spec()

    assert differing_fields(FACTS.spec(), other) == fields
    assert other.namespace() != FACTS.spec().namespace()


def test_names_paths_and_library_versions_do_not_separate():
    elsewhere = {"rope_theta": 10000.0, "_name_or_path": "/models/b", "dtype": "float32", "transformers_version": "6"}

    assert dataclasses.replace(FACTS, model_config=elsewhere).spec().namespace() == FACTS.spec().namespace()


def test_a_block_is_as_large_as_all_layers_of_the_page():
    assert FACTS.spec().block_nbytes == 1_474_560


def test_a_hash_of_unknown_size_is_refused():
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(FACTS, hash_algorithm="md5").spec()

    assert caught.value.fields["field"] == "prefix_caching_hash_algo"


@pytest.mark.parametrize(
    ("algorithm", "variable", "seed"),
    [
        ("sha256", None, "vllm-none-hash"),
        ("sha256_cbor", "7", "7"),
        ("xxhash", "7", "7"),
        ("xxhash", None, f"random:{'61' * 16}"),
    ],
)
def test_the_seed_is_what_vllm_hashes_with(algorithm, variable, seed):
    assert hash_seed(algorithm, variable, default="vllm-none-hash", instance=b"a" * 16) == seed


def test_processes_of_one_engine_have_one_instance_and_engines_have_their_own():
    assert len(instance_of("engine", "1")) == 16
    assert instance_of("engine", "1") == instance_of("engine", "1")
    assert len({instance_of("engine", "1"), instance_of("engine", "2"), instance_of("engine1", "")}) == 3


def test_settings_come_from_the_extra_config():
    assert ConnectorSettings.from_extra_config({}) == ConnectorSettings(None, "")
    assert ConnectorSettings.from_extra_config({"socket": "/s", "tenant": "t"}) == ConnectorSettings("/s", "t")
    assert ConnectorSettings.from_extra_config({"trace": True}).trace


@pytest.mark.parametrize(
    ("extra", "field"), [({"sokcet": "/s"}, "sokcet"), ({"socket": 7}, "socket"), ({"trace": "yes"}, "trace")]
)
def test_a_setting_that_is_not_right_is_refused_by_name(extra, field):
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.from_extra_config(extra)

    assert caught.value.fields["field"] == field
