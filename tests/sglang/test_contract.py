"""The backend beside SGLang's own classes: what the fast tests take for SGLang is SGLang, and models with several pools."""

import json
from pathlib import Path

import numpy as np
import pytest
from sidecar_process import running_sidecar

RECORDED = Path(__file__).parent.parent / "data" / "sglang_contract.json"


@pytest.fixture(scope="module")
def hicache():
    """Imported here and not above: it takes half a minute on a busy machine."""
    import hicache

    return hicache


def test_the_recorded_contract_is_that_of_the_package(hicache):
    import record_contract

    assert record_contract.contract() == json.loads(RECORDED.read_text())


@pytest.fixture
def extra(tmp_path):
    """Of a sidecar that runs."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(np.random.default_rng(1).bytes(1 << 12))
    extra = {
        "backend_name": "kvstore",
        "module_path": "kvstore.engine_connector.sglang",
        "class_name": "KVStoreHiCache",
    }
    with running_sidecar(tmp_path) as sidecar:
        yield extra | {"interface_v1": 1, "socket": str(sidecar.socket), "model_path": str(tmp_path / "model")}


@pytest.fixture
def engine(hicache, extra):
    """With a pool of attention, and two others under names of SGLang's."""
    engine = hicache.Engine(hicache.host_pool("page_first"), backend="dynamic", extra=extra)
    engine.side_pools = {name: hicache.host_pool("page_first", layers=1) for name in ("draft", "swa")}
    for name, pool in engine.side_pools.items():
        engine.backend.register_mem_host_pool_v2(pool, name)  # as some models do when SGLang serves already
    yield engine
    engine.close()


def transfer(engine, name, hashes, policy):
    """Of pages that are filled with what their hash says."""
    import hicache
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    pool = engine.side_pools.get(name, engine.pool)
    indices = pool.alloc(len(hashes) * hicache.PAGE)
    for i, page_hash in enumerate(hashes):
        pool.set_from_flat_data_page(int(indices[i * hicache.PAGE]), hicache.page_of(pool, page_hash))
    return PoolTransfer(PoolName(name), host_indices=indices, keys=list(hashes), hit_policy=PoolHitPolicy(policy))


@pytest.mark.parametrize(
    ("field", "pool", "file"),
    [
        ("lora_paths", "kv", "adapter_model.safetensors"),
        ("quantization_param_path", "kv", "scales.json"),
        ("speculative_draft_model_path", "draft", "model.safetensors"),
    ],
)
def test_files_that_sglang_s_keys_name_at_most_by_their_path_separate_by_content(hicache, tmp_path, field, pool, file):
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.runtime_context import get_context

    from kvstore.engine_connector.sglang import KVStoreHiCache

    (tmp_path / "model.safetensors").write_bytes(b"model")
    folder = tmp_path / "other"
    folder.mkdir()
    lora = LoRARef(lora_id=LoRARef.deterministic_id("a", str(folder)), lora_name="a", lora_path=str(folder))
    value = {"lora_paths": [lora], "quantization_param_path": str(folder / file)}.get(field, str(folder))
    shape = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    namespaces = set()
    for content in (b"one", b"two"):
        (folder / file).write_bytes(content)
        with get_context().override_server_args(**{field: value}):
            backend = KVStoreHiCache(
                HiCacheStorageConfig(
                    **shape,
                    is_mla_model=False,
                    enable_storage_metrics=False,
                    is_page_first_layout=False,
                    model_name="",
                    extra_config={
                        "interface_v1": 1,
                        "model_path": str(tmp_path),
                        "socket": str(tmp_path / "none.sock"),
                    },
                )
            )
            backend.register_mem_host_pool_v2(hicache.host_pool("page_first", layers=1, pages=8), pool)
        namespaces |= set(backend._pools[pool].namespaces)

    assert len(namespaces) == 2


def test_a_prefix_is_as_long_as_every_pool_s(hicache, engine):
    hashes = engine.hashes(list(range(10 * hicache.PAGE)))
    engine.save(list(range(10 * hicache.PAGE)))
    draft = transfer(engine, "draft", hashes[:7], "all_pages")

    assert engine.backend.batch_set_v2([draft]) == {"draft": [True] * 7}

    result = engine.backend.batch_exists_v2(hashes, [draft])
    assert result.kv_hit_pages == 7
    assert result.extra_pool_hit_pages == {"kv": 10, "draft": 7}


def test_a_pool_that_has_some_pages_only_is_restored_where_it_has_them(hicache, engine):
    hashes = engine.hashes(list(range(10 * hicache.PAGE)))
    engine.save(list(range(10 * hicache.PAGE)))
    for pages in (slice(2, 4), slice(6, 8)):
        assert (
            engine.backend.batch_set_v2([transfer(engine, "swa", hashes[pages], "trailing_pages")])["swa"] == [True] * 2
        )

    result = engine.backend.batch_exists_v2(hashes, [transfer(engine, "swa", hashes[:2], "trailing_pages")])

    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (8, [4, 8])
    assert (
        engine.backend.batch_exists_v2(hashes[:7], [transfer(engine, "swa", hashes[:2], "trailing_pages")]).kv_hit_pages
        == 4
    )
    assert (
        engine.backend.batch_exists_v2(hashes[:2], [transfer(engine, "swa", hashes[:2], "trailing_pages")]).kv_hit_pages
        == 0
    )


def test_pages_of_another_pool_come_back(hicache, engine):
    import torch

    hashes = engine.hashes(list(range(5 * hicache.PAGE)))
    engine.backend.batch_set_v2([transfer(engine, "draft", hashes, "all_pages")])
    asked = transfer(engine, "draft", hashes, "all_pages")
    pool = engine.side_pools["draft"]
    pool.kv_buffer.view(torch.uint8).fill_(0xA5)

    assert engine.backend.batch_get_v2([asked]) == {"draft": [True] * 5}

    for i, page_hash in enumerate(hashes):
        page = pool.get_data_page(int(asked.host_indices[i * hicache.PAGE])).contiguous()
        assert torch.equal(page.view(torch.uint8), hicache.page_of(pool, page_hash).view(torch.uint8))
    assert engine.backend.batch_get_v2([transfer(engine, "swa", hashes, "all_pages")]) == {"swa": [False] * 5}


def test_sglang_gets_the_statistics_that_it_knows(hicache, engine):
    engine.save(list(range(3 * hicache.PAGE)))

    stats = engine.backend.get_stats()

    assert (stats.prefetch_pgs, stats.backup_pgs) == ([], [3])
    assert stats.backup_bandwidth[0] > 0
    assert engine.backend.get_stats().backup_pgs == []


def test_sglang_takes_the_command_of_the_documentation(hicache):
    import argparse
    import re
    import shlex

    from sglang.srt.server_args import ServerArgs

    text = (Path(__file__).parent.parent.parent / "docs" / "engines.md").read_text()
    flags = re.search(r"python -m sglang.launch_server (.*?)\n```", text, re.DOTALL).group(1).replace("\\\n", " ")
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)

    args = parser.parse_args(shlex.split(flags))

    assert (args.hicache_storage_backend, args.page_size, args.hicache_mem_layout) == ("dynamic", 64, "page_first")
    assert json.loads(args.hicache_storage_backend_extra_config)["class_name"] == "KVStoreHiCache"


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latents_of_mla_are_stored_once_for_all_ranks(hicache, extra, layout):
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvstore.engine_connector.sglang import KVStoreHiCache

    pools, backends = [hicache.mla_pool(layout) for _ in range(2)], []
    for rank, pool in enumerate(pools):
        shape = {"tp_rank": rank, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        config = HiCacheStorageConfig(
            **shape,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name="",
            extra_config=extra,
        )
        backends.append(KVStoreHiCache(config, {}))
        backends[-1].register_mem_pool_host(pool)
        backends[-1].on_host_pools_registered()
    keys = hicache.get_storage_hash_str(list(range(3 * hicache.PAGE)), page_size=hicache.PAGE)
    written, read = pools[0].alloc(3 * hicache.PAGE), pools[1].alloc(4 * hicache.PAGE)[hicache.PAGE :]
    for i, key in enumerate(keys):
        pools[0].set_from_flat_data_page(int(written[i * hicache.PAGE]), hicache.page_of(pools[0], key))

    assert backends[0].batch_set_v1(keys, written) == [True] * 3

    assert backends[1].batch_get_v1(keys, read) == [True] * 3
    for i, key in enumerate(keys):
        expected = hicache.page_of(pools[1], key).view(torch.uint8)
        place = pools[1].get_data_page(int(read[i * hicache.PAGE])).contiguous()
        assert torch.equal(place.view(torch.uint8), expected)
        assert torch.equal(backends[1].get(key, pools[1].get_dummy_flat_data_page()).view(torch.uint8), expected)
    for backend in backends:
        backend.close()
