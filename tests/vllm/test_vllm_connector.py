"""The connector beside vLLM's own classes: what it refuses, and that it is what vLLM's factory expects."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from make_model import make_random_model

from kvstore.core.errors import ConfigError
from kvstore.core.keys import differing_fields
from kvstore.engine_connector.protocol import ConnectorMetadata, WorkerOutput

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own imports warn


@pytest.fixture(scope="module")
def connector():
    from kvstore.engine_connector import vllm

    return vllm


@pytest.fixture(scope="module")
def engine():
    from kvstore.engine_connector import vllm_engine

    return vllm_engine


def configs(**changes):
    """Configuration of an engine that is served, but for the changes."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    full = object.__new__(FullAttentionSpec)
    values = {"kv_role": "kv_both", "policy": "recompute", "pp": 1, "pcp": 1, "dcp": 1, "speculative": None}
    values |= {"specs": [full]} | changes
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role=values["kv_role"], kv_load_failure_policy=values["policy"], kv_connector_extra_config={}
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=values["pp"],
            prefill_context_parallel_size=values["pcp"],
            decode_context_parallel_size=values["dcp"],
        ),
        speculative_config=values["speculative"],
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(dtype="torch.float32"),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in values["specs"]]
    return vllm_config, SimpleNamespace(kv_cache_groups=groups)


def test_an_engine_with_one_group_is_served_by_any_number_of_ranks(engine):
    engine.refuse_unsupported(*configs())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_role": "kv_producer"}, "kv_role"),
        ({"policy": "fail"}, "kv_load_failure_policy"),
        ({"pp": 2}, "pipeline_parallel_size"),
        ({"pcp": 2}, "prefill_context_parallel_size"),
        ({"dcp": 2}, "decode_context_parallel_size"),
        ({"speculative": "eagle"}, "speculative_config"),
        ({"specs": [object()]}, "kv_cache_groups[0]"),
        ({"specs": []}, "kv_cache_groups"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_with_what_would_be_right(engine, changes, field):
    with pytest.raises(ConfigError, match="is not served by the kvstore connector; it needs") as caught:
        engine.refuse_unsupported(*configs(**changes))

    assert caught.value.fields["field"] == field


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
LONGROPE |= {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


@pytest.mark.parametrize(
    ("common", "change", "fields"),
    [
        ({"hf_overrides": {"rope_parameters": LONGROPE}}, {"max_model_len": 1024}, ["rope"]),
        ({"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": 1024}, {"max_model_len": 2048}, []),
        ({}, {"max_model_len": 1024}, []),
        ({}, {"hf_overrides": {"rope_parameters": LONGROPE}}, ["rope"]),
        ({}, {"load_format": "dummy"}, ["weights"]),
    ],
)
def test_settings_of_vllm_separate_engines_where_they_decide_k_and_v(engine, cache, common, change, fields):
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = str(make_random_model(cache / "random"))
    pages = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=pages, layer_names=["model.layers.0.self_attn.attn"])
    kv_cache = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")
    left, right = (
        engine.engine_specs(
            EngineArgs(
                **{"model": model, "block_size": 32, "max_model_len": 512, "skip_tokenizer_init": True} | args
            ).create_engine_config(),
            kv_cache,
            b"i" * 16,
        )[0]
        for args in (common, common | change)
    )

    assert differing_fields(left, right) == fields


def test_vllm_finds_the_class_and_takes_a_lost_save_for_no_loss(connector):
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    transfer = KVTransferConfig(
        kv_connector="KVStoreConnector",
        kv_connector_module_path="kvstore.engine_connector.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )

    assert KVConnectorFactory.get_connector_class(transfer) is connector.KVStoreConnector
    assert KVConnectorFactory.supports_hma_config(transfer)
    assert object.__new__(connector.KVStoreConnector).requires_kv_delivery is False


def test_messages_between_the_processes_can_be_pickled(connector):
    messages = (
        connector.StepMetadata(ConnectorMetadata(boot_id=b"b" * 16), frozenset({"r"})),
        connector.StepOutput(((1, WorkerOutput(finished_loading=frozenset({"r"}))),)),
    )

    assert pickle.loads(pickle.dumps(messages)) == messages


def test_the_record_that_tests_without_vllm_go_by_is_of_this_vllm():
    """tests/vllm/record_contract.py writes a new one; what differs is what the plug-ins have to follow."""
    from record_contract import signatures

    recorded = json.loads((Path(__file__).parent.parent / "data" / "vllm_contract.json").read_text())

    assert {name: recorded[name] for name in ("version", "classes")} == signatures()
