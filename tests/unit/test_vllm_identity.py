"""What a vLLM engine's blocks are: whatever decides their bytes separates them, and nothing else does."""

import dataclasses
from collections.abc import Sequence

import pytest

from kvstore.core.errors import ConfigError
from kvstore.core.keys import differing_fields
from kvstore.engine_connector.layer_groups import LayerGroup
from kvstore.engine_connector.vllm_identity import (
    ConnectorSettings,
    EngineFacts,
    GroupFacts,
    group_name,
    hash_seed,
    instance_of,
    settings_by_length,
)

FACTS = EngineFacts(
    version="0.32.0",
    weights="dir:0123",
    quantization="",
    load_format="auto",
    settings={},
    model_config={
        "rope_theta": 10000.0,
        "_name_or_path": "/models/a",
        "dtype": "bfloat16",
        "transformers_version": "5",
    },
    dtype="float32",
    cache_dtype="auto",
    layout="LBHNC",
    num_ranks=1,
    hash_tokens=32,
    hash_algorithm="sha256",
    hash_seed="vllm-none-hash",
)
GROUP = GroupFacts(
    name="full",
    num_layers=30,
    num_kv_heads=3,
    head_size=64,
    planes=2,
    block_tokens=32,
    attention="cpu-vec",
    page_nbytes=30 * 3 * 32 * 128 * 4,
)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"weights": "dir:4567"}, ["weights"]),
        ({"quantization": "fp8"}, ["weights"]),
        ({"load_format": "dummy"}, ["weights"]),
        ({"settings": {"long_rope": True}}, ["rope"]),
        ({"settings": {"mm_processor_kwargs": {"num_crops": 4}}}, ["rope"]),
        ({"model_config": {"rope_theta": 1e6}}, ["rope"]),
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"cache_dtype": "fp8"}, ["dtype"]),
        ({"version": "0.33.0"}, ["page_format", "stored_format"]),
        ({"layout": "LBNHC"}, ["page_format", "stored_format"]),
        ({"num_ranks": 2}, ["page_format", "stored_format", "opaque_block_nbytes"]),
        ({"hash_algorithm": "sha256_cbor"}, ["hash.algorithm"]),
        ({"hash_algorithm": "xxhash"}, ["hash.algorithm", "hash.digest_nbytes"]),
        ({"hash_seed": "42"}, ["hash.seed"]),
    ],
)
def test_whatever_decides_the_bytes_separates_and_is_named(change, fields):
    other = dataclasses.replace(FACTS, **change).spec(GROUP)

    assert differing_fields(FACTS.spec(GROUP), other) == fields
    assert other.namespace() != FACTS.spec(GROUP).namespace()


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"attention": "cpu-amx"}, ["page_format", "stored_format"]),
        ({"block_tokens": 64, "page_nbytes": 2 * GROUP.page_nbytes}, ["block_tokens", "opaque_block_nbytes"]),
        ({"name": "window:512"}, ["group"]),
    ],
)
def test_layer_groups_have_specs_of_their_own(change, fields):
    assert differing_fields(FACTS.spec(GROUP), FACTS.spec(GROUP._replace(**change))) == fields


LONGROPE = {
    "model_type": "phi3",
    "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
}
LLAMA4 = {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}


@pytest.mark.parametrize(
    ("config", "short", "long", "apart"),
    [
        (LONGROPE, 4096, 4097, True),
        ({"text_config": LONGROPE}, 4096, 131072, True),
        ({"original_max_position_embeddings": 4096, "rope_scaling": {"type": "su"}}, 4096, 8192, True),
        (LONGROPE, 8192, 131072, False),
        ({"rope_parameters": LONGROPE["rope_parameters"] | {"rope_type": "yarn"}}, 2048, 131072, False),
        ({"rope_scaling": None}, 2048, 131072, False),
        (LLAMA4, 32768, 32769, True),
        (LLAMA4, 65536, 131072, False),
    ],
)
def test_the_longest_context_separates_only_where_vllm_computes_otherwise_for_it(config, short, long, apart):
    assert (settings_by_length(config, short) != settings_by_length(config, long)) == apart


def test_groups_of_the_same_kind_and_size_but_of_other_layers_do_not_share():
    def names(layers: Sequence[int]) -> list[str]:
        return [f"model.layers.{i}.self_attn.attn" for i in layers]

    interleaved, in_order = (group_name("window:64", 1, names(layers), num_groups=2) for layers in ((1, 3), (1, 2)))

    assert interleaved != in_order
    assert LayerGroup.of(FACTS.spec(GROUP._replace(name=in_order))).num_needed == 2
    assert group_name("full", 0, names([0, 1]), num_groups=1) == "full"


def test_pages_that_are_in_nobodys_order_are_shared_by_any_number_of_ranks_and_any_version():
    pages = GROUP._replace(attention="", page_nbytes=0)
    other = dataclasses.replace(FACTS, num_ranks=4, layout="LBNHC", version="0.33.0")

    assert other.spec(pages) == FACTS.spec(pages)
    assert FACTS.spec(pages).block_nbytes == GROUP.page_nbytes  # float32
    assert FACTS.spec(pages).page_format == "kvstore:LHTPD"


def test_names_paths_and_library_versions_do_not_separate():
    elsewhere = {"rope_theta": 10000.0, "_name_or_path": "/models/b", "dtype": "float32", "transformers_version": "6"}

    assert dataclasses.replace(FACTS, model_config=elsewhere).spec(GROUP).namespace() == FACTS.spec(GROUP).namespace()


def test_a_block_is_as_large_as_all_layers_of_the_page():
    assert FACTS.spec(GROUP).block_nbytes == 1_474_560


def test_a_hash_of_unknown_size_is_refused():
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(FACTS, hash_algorithm="md5").spec(GROUP)

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
