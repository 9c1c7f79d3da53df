"""The plug-ins for vLLM where vLLM is not installed: they fit the recorded signatures of its classes, and do what they did when
vLLM called them, call by call. tests/vllm/test_vllm_connector.py checks that the record is that of the installed vLLM."""

import inspect
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_stub import CONTRACT, FullAttentionSpec, KVConnectorRole, parameters, vllm_stubbed

from kvstore.core.errors import ConfigError
from kvstore.core.keys import HashScheme, KVSpec
from kvstore.kernels.host_pages import host_pages

DEADLINE_S = 10.0
IDLE = {"num_scheduled_tokens": {}, "preempted_req_ids": [], "tables": {}, "new_block_ids": []}
OURS_TO_THEIRS = [
    ("vllm", "KVStoreConnector", "KVConnectorBase_V1"),
    ("vllm", "StepOutput", "KVConnectorWorkerMetadata"),
    ("vllm_metrics", "StoreStats", "KVConnectorStats"),
    ("vllm_metrics", "StoreProm", "KVConnectorPromMetrics"),
    ("vllm_tier", "KVStoreOffloadingConnector", "OffloadingConnector"),
    ("vllm_tier", "KVStoreTier", "SecondaryTierManager"),
]


@pytest.fixture(scope="module")
def modules():
    with vllm_stubbed() as ours:
        yield ours


@pytest.mark.parametrize(("module", "ours", "theirs"), OURS_TO_THEIRS)
def test_each_method_of_vllm_is_overridden_with_parameters_that_its_calls_fit(modules, module, ours, theirs):
    cls, recorded = getattr(modules[module], ours), CONTRACT["classes"][theirs]

    assert not inspect.isabstract(cls), sorted(cls.__abstractmethods__)
    for name in vars(cls).keys() & recorded["methods"].keys() - {"__init__"}:
        mine, wanted = parameters(inspect.getattr_static(cls, name)), recorded["methods"][name]
        positional = [p.name for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional[: len(wanted)] == [p for p, kind, _ in wanted if kind == "POSITIONAL_OR_KEYWORD"], name
        for parameter in mine[len(wanted) :]:
            assert parameter.default is not parameter.empty, f"{name}: vLLM does not give {parameter.name}"
        if any(kind == "VAR_KEYWORD" for _, kind, _ in wanted):
            assert any(p.kind is p.VAR_KEYWORD for p in mine), name


def test_no_method_is_misspelt(modules):
    """A public method of the connector that vLLM does not know would never be called."""
    for module, ours, theirs in OURS_TO_THEIRS:
        cls, known = getattr(modules[module], ours), set(CONTRACT["classes"][theirs]["methods"])
        known |= set(CONTRACT["classes"]["SupportsHMA"]["methods"])
        known |= {"requires_kv_delivery", "reset", "outputs", "data"}
        public = {name for name in vars(cls) if not name.startswith("_")}
        assert public <= known, (ours, public - known)


# --- replay --------------------------------------------------------------------------------------------------------------


class Replay:
    """Our connector in both roles, called as vLLM called it. Pages hold numbers that tell the block they are of."""

    def __init__(self, modules, config, socket):
        self.module, self.engine = modules["vllm"], modules["vllm_engine"]
        (register,) = [call for call in CONTRACT["calls"] if call["name"] == "register_kv_caches"]
        shapes = {name: shape for name, (shape, _) in register["args"][0].items()}
        self.num_pages = 1 + max(page for call in CONTRACT["calls"] for page in pages_of(call))
        self.caches = {name: torch.zeros(self.num_pages, *shape[1:]) for name, shape in shapes.items()}
        _, heads, tokens, content = next(iter(shapes.values()))
        page = FullAttentionSpec(
            block_size=tokens,
            head_size=content // 2,
            num_kv_heads=heads,
            page_size_bytes=heads * tokens * content * 4,
        )
        group = SimpleNamespace(kv_cache_spec=page, layer_names=list(shapes))
        kv_cache_config = SimpleNamespace(kv_cache_groups=[group], kv_cache_layout="LBHNC")
        self.scheduler, self.worker = (
            self.module.KVStoreConnector(config, role, kv_cache_config)
            for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER)
        )
        self.requests, self.meta, self.received, self.released = {}, None, [], []
        self.held, self.fails = set(), False

    def run(self):
        for call in CONTRACT["calls"]:
            getattr(self, "on_" + call["name"], self.on_other)(call)
        self.until(lambda: self.held <= set(self.released))

    def request(self, recorded):
        request = self.requests.setdefault(recorded["request_id"], SimpleNamespace())
        vars(request).update(recorded | {"block_hashes": [bytes.fromhex(key) for key in recorded["block_hashes"]]})
        return request

    def on_other(self, call):
        """Nothing of what it takes, returns or does is looked at."""
        connector = self.scheduler if call["role"] == "scheduler" else self.worker
        args = [SimpleNamespace() if str(arg).startswith("<") else arg for arg in call["args"]]
        getattr(connector, call["name"])(*args, **call["kwargs"])

    def on_fail_loads(self, call):
        self.fails = True

    def on_register_kv_caches(self, call):
        replay, cache = self, self.engine.PagedCache

        class Pages(cache):
            def copy_in(self, block_id, block):
                if replay.fails:
                    raise OSError("as recorded")
                super().copy_in(block_id, block)

        self.engine.PagedCache = Pages
        self.worker.register_kv_caches(self.caches)
        self.engine.PagedCache = cache

    def on_bind_kv_cache_manager(self, call):
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(block_pool=None))

    def on_on_new_request(self, call):
        self.scheduler.on_new_request(self.request(call["args"][0]))

    def on_get_num_new_matched_tokens(self, call):
        """As many as recorded, once what was saved before is committed."""
        request, expected = self.request(call["args"][0]), tuple(call["result"])
        self.until(lambda: self.scheduler.get_num_new_matched_tokens(request, call["args"][1]) == expected)

    def on_update_state_after_alloc(self, call):
        request, tables, num_tokens = call["args"]
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(tables))
        for page in tables[0] if num_tokens else ():  # vLLM calls again with 0 after a load
            self.fill(page, b"")
        self.scheduler.update_state_after_alloc(self.request(request), blocks, num_tokens)

    def on_build_connector_meta(self, call):
        for request in call["requests"]:
            self.request(request)
        (output,) = call["args"]
        state = SimpleNamespace(get_block_ids=output["tables"].get)
        step = SimpleNamespace(
            num_scheduled_tokens=output["num_scheduled_tokens"],
            preempted_req_ids=set(output["preempted_req_ids"]),
            kv_connector_block_state=state,
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=output["new_block_ids"]),
        )
        for request_id, num_tokens in output["num_scheduled_tokens"].items():
            request = self.requests[request_id]
            self.check_pages_before(request, output["tables"][request_id][0])
            num_full = (request.num_computed_tokens + num_tokens) // 32
            for page, key in zip(output["tables"][request_id][0][:num_full], request.block_hashes, strict=False):
                self.fill(page, key)
        self.meta = self.scheduler.build_connector_meta(step)

    def on_handle_preemptions(self, call):
        self.worker.handle_preemptions(self.meta)

    def on_bind_connector_metadata(self, call):
        self.worker.bind_connector_metadata(self.meta)

    def on_get_transfer_results(self, call):
        """At the latest here what had been received when it was recorded."""
        expected = set(call["result"]["finished_recving"])
        self.take_results()
        self.until(lambda: expected <= set(self.received))

    def on_request_finished_all_groups(self, call):
        request, block_ids = call["args"]
        keep, parameters = self.scheduler.request_finished_all_groups(self.request(request), block_ids)
        assert parameters is None
        if keep:
            self.held.add(request["request_id"])

    def on_get_block_ids_with_load_errors(self, call):
        """With the results; see take_results."""

    on_build_connector_worker_meta = on_update_connector_output = on_get_block_ids_with_load_errors

    def take_results(self):
        """The end of a step. Failed pages come with their request."""
        results = self.worker.get_transfer_results(set())
        failed = self.worker.get_block_ids_with_load_errors()
        output = self.worker.build_connector_worker_meta()
        self.received += results.finished_recving
        self.released += results.finished_sending
        assert bool(failed) == (self.fails and bool(results.finished_recving))
        if output is not None:
            self.scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=output))

    def until(self, condition):
        """Idle steps until it holds."""
        until_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < until_s
            self.on_build_connector_meta(
                {
                    "requests": [],
                    "args": [{"num_scheduled_tokens": {}, "preempted_req_ids": [], "tables": {}, "new_block_ids": []}],
                }
            )
            self.worker.handle_preemptions(self.meta)
            self.worker.bind_connector_metadata(self.meta)
            self.worker.start_load_kv(None)
            self.worker.wait_for_save()
            self.take_results()
            time.sleep(0.002)

    def fill(self, page, key):
        for layer, cache in enumerate(self.caches.values()):
            cache[page] = self.content(key, layer) if key else float("nan")

    def content(self, key, layer):
        rng = np.random.default_rng([layer, *key])
        return torch.from_numpy(rng.random(next(iter(self.caches.values())).shape[1:], np.float32))

    def check_pages_before(self, request, pages):
        """What is computed already, locally or by a load, is in the pages."""
        for page, key in zip(pages[: request.num_computed_tokens // 32], request.block_hashes, strict=False):
            for layer, cache in enumerate(self.caches.values()):
                assert torch.equal(cache[page], self.content(key, layer)), (request.request_id, page)

    def close(self):
        self.scheduler.shutdown()
        self.worker.shutdown()


def pages_of(call):
    if call["name"] == "build_connector_meta":
        return [page for tables in call["args"][0]["tables"].values() for page in tables[0]]
    return call["args"][1][0] if call["name"] == "update_state_after_alloc" else []


def config_for(socket, directory, **changes):
    """vLLM's configuration as far as it is read."""
    (directory / "model.safetensors").write_bytes(b"weights")
    model = SimpleNamespace(
        model=str(directory),
        revision=None,
        quantization=None,
        quantization_config=None,
        multimodal_config=None,
        max_model_len=4096,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4}),
        dtype=torch.float32,
        get_total_num_kv_heads=lambda: 2,
    )
    parallel = {"tensor": 1, "pipeline": 1} | changes
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": str(socket), "fetch": "always"},
            engine_id="engine",
        ),
        instance_id="instance",
        parallel_config=SimpleNamespace(
            tensor_parallel_size=parallel["tensor"],
            pipeline_parallel_size=parallel["pipeline"],
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        speculative_config=None,
        lora_config=None,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
    )


def test_what_vllm_called_gives_what_it_gave(modules, sidecar, tmp_path):
    """A prompt is stored, another request loads it, and the load of a third fails: pages hold what they should all the while."""
    replay = Replay(modules, config_for(sidecar.socket, tmp_path), sidecar.socket)
    try:
        replay.run()

        asked = [call["result"] for call in CONTRACT["calls"] if call["name"] == "get_num_new_matched_tokens"]
        assert [0, False] in asked
        assert [320, True] in asked
        assert len(replay.received) == len(set(replay.received)) == 2
        assert len(replay.released) == len(set(replay.released))
    finally:
        replay.close()


def test_an_engine_that_is_not_served_is_refused_in_a_sentence(modules, sidecar, tmp_path):
    with pytest.raises(
        ConfigError, match=r"pipeline_parallel_size: 2 is not served by the kvstore connector; it needs 1$"
    ):
        Replay(modules, config_for(sidecar.socket, tmp_path, pipeline=2), sidecar.socket)


# --- the tier ------------------------------------------------------------------------------------------------------------

CHUNK_NBYTES = 4096
KEYS = [bytes([i]) * 32 + bytes(4) for i in range(1, 5)]


class Tier:
    """A tier over a pool of 8 chunks, stepped by hand."""

    def __init__(self, modules, socket, engine_id):
        module = modules["vllm_tier"]
        self.result = modules["vllm_tier"].LookupResult
        scheme = HashScheme(algorithm="engine:vllm-sha256", digest_nbytes=32, block_tokens=32)
        spec = KVSpec(
            weights="tier",
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            dtype="float32",
            block_tokens=32,
            hash=scheme,
            page_format="opaque:vllm-test",
            stored_format="opaque:vllm-test",
            opaque_block_nbytes=CHUNK_NBYTES,
        )
        module._specs[engine_id] = spec
        config = SimpleNamespace(
            engine_id=engine_id,
            cache=SimpleNamespace(blocks_per_chunk=1),
            canonical_layout=False,
            kv_cache_layout="LBHNC",
            parallel=SimpleNamespace(tp_size=1),
        )
        self.pool = np.zeros((8, CHUNK_NBYTES), np.int8)
        self.tier = module.KVStoreTier(
            SimpleNamespace(config=config), memoryview(self.pool), "KVStoreTier", socket=str(socket)
        )
        self.request = SimpleNamespace(req_id="r")
        self.num_jobs = 0

    def lookup(self, keys):
        """Of a request: once more after the step, as vLLM does."""
        first = [self.tier.lookup(key, self.request) for key in keys]
        self.tier.on_schedule_end(None)
        assert set(first) <= {self.result.RETRY, self.result.MISS, self.result.HIT}
        return [self.tier.lookup(key, self.request).name for key in keys]

    def job(self, submit, keys, chunk_ids):
        self.num_jobs += 1
        chunk_ids = np.array(chunk_ids, np.int32)
        submit(SimpleNamespace(job_id=self.num_jobs, keys=keys, chunk_ids=chunk_ids, req_context=self.request))
        until_s = time.monotonic() + DEADLINE_S
        while True:
            self.tier.on_schedule_end(None)
            if done := list(self.tier.get_finished_jobs()):
                (result,) = done
                return result
            assert time.monotonic() < until_s
            time.sleep(0.002)


@pytest.fixture
def tiers(modules, sidecar):
    made = [Tier(modules, sidecar.socket, name) for name in ("first", "second")]
    yield made
    for each in made:
        each.tier.shutdown()


def test_chunks_of_one_pool_are_found_and_loaded_into_another(tiers):
    first, second = tiers
    first.pool[2:5] = [[1], [2], [3]]

    assert first.lookup(KEYS[:3]) == ["MISS"] * 3
    assert first.job(first.tier.submit_store, KEYS[:3], [2, 3, 4]).success
    assert second.lookup(KEYS) == ["HIT", "HIT", "HIT", "MISS"]
    result = second.job(second.tier.submit_load, KEYS[:3], [7, 0, 5])

    assert result.success
    assert second.pool[[7, 0, 5], 0].tolist() == [1, 2, 3]
    assert second.pool[[7, 0, 5], -1].tolist() == [1, 2, 3]
    assert not second.pool[[1, 2, 3, 4, 6]].any()


@pytest.mark.parametrize("num_left", [0, 2])
def test_what_is_gone_when_it_is_to_be_loaded_is_named_and_a_miss_from_then_on(tiers, sidecar, num_left):
    """vLLM would take its chunk for good, or look it up and load it for ever."""
    first, second = tiers
    first.pool[:3] = [[1], [2], [3]]
    first.job(first.tier.submit_store, KEYS[:3], [0, 1, 2])
    assert second.lookup(KEYS[:3]) == ["HIT"] * 3
    link = first.tier._session.link
    first.tier._session.ask(link, lambda client, link: client.drop(link.namespace, [KEYS[num_left][:32]]))

    result = second.job(second.tier.submit_load, KEYS[:3], [0, 1, 2])

    assert not result.success
    assert list(result.successful_keys or ()) == KEYS[:num_left]
    assert second.pool[:, 0].tolist() == [1, 2, 3][:num_left] + [0] * (8 - num_left)
    assert [second.tier.lookup(key, second.request).name for key in KEYS[num_left:3]] == ["MISS"] * (3 - num_left)


def test_without_a_sidecar_all_is_a_miss_and_no_job_waits(tiers, sidecar):
    first, _ = tiers
    sidecar.kill()

    assert first.lookup(KEYS) == ["MISS"] * 4
    first.job(first.tier.submit_store, KEYS[:1], [0])
    assert not first.job(first.tier.submit_load, KEYS[:1], [0]).success


def test_after_a_reset_nothing_from_before_is_found(tiers):
    first, _ = tiers
    first.job(first.tier.submit_store, KEYS[:1], [0])
    first.tier.reset()

    assert first.lookup(KEYS[:1]) == ["MISS"]


def test_what_a_request_from_before_a_reset_offers_is_not_stored_after_it(tiers):
    """vLLM offers all of its blocks anew, those too that older weights computed."""
    first, _ = tiers
    first.tier.on_new_request(first.request)
    first.tier.reset()

    assert first.job(first.tier.submit_store, KEYS[:1], [0]).success
    first.request = SimpleNamespace(req_id="of the new weights")
    first.tier.on_new_request(first.request)
    assert first.lookup(KEYS[:1]) == ["MISS"]

    assert first.job(first.tier.submit_store, KEYS[:1], [0]).success
    first.request = SimpleNamespace(req_id="another")
    assert first.lookup(KEYS[:1]) == ["HIT"]


def test_a_reset_that_vllm_breaks_off_is_one_for_the_store(modules, tiers, monkeypatch):
    """Its own pool's part waits for jobs, and raises when one does not end."""

    def fail(_):
        raise TimeoutError

    first, _ = tiers
    first.job(first.tier.submit_store, KEYS[:1], [0])
    kind = modules["vllm_tier"].KVStoreOffloadingConnector
    monkeypatch.setattr(kind.__base__, "reset_cache", fail, raising=False)
    connector = kind.__new__(kind)
    connector.scheduler = SimpleNamespace(manager=SimpleNamespace(secondary_tiers=[first.tier]))

    with pytest.raises(TimeoutError):
        connector.reset_cache()

    assert first.lookup(KEYS[:1]) == ["MISS"]


# --- a GPU's pages, as far as no GPU is needed ----------------------------------------------------------------------------


def gpu_config(tmp_path, num_ranks, num_kv_heads):
    config = config_for("unused", tmp_path, tensor=num_ranks)
    config.model_config.get_total_num_kv_heads = lambda: num_kv_heads
    return config


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_blocks_of_a_gpu_are_the_same_for_any_layout_and_any_number_of_ranks(
    modules, tmp_path, monkeypatch, num_ranks, order
):
    """vLLM shows [block, head, token, K and V] of the heads that a rank has; ranks beyond the KV heads have another's. Pages lie
    in host memory here: the copies of device pages have tests of their own."""
    engine = modules["vllm_engine"]
    monkeypatch.setattr(engine, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(engine.DevicePages, "open", host_pages)
    num_layers, num_pages, num_heads, tokens, dim = 3, 4, 2, 32, 8
    whole = torch.rand(num_layers, num_pages, num_heads, tokens, 2 * dim)
    config = gpu_config(tmp_path, num_ranks, num_heads)
    heads_a_rank = max(1, num_heads // num_ranks)
    names = [f"layer {i}" for i in range(num_layers)]
    spec = FullAttentionSpec(block_size=tokens, head_size=dim, num_kv_heads=heads_a_rank, page_size_bytes=0)
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names)], kv_cache_layout="LBNHC"
    )

    def rank_pages(number, content):
        first = number * num_heads // num_ranks
        of_rank = content[:, :, first : first + heads_a_rank]
        if order == "NHD":
            of_rank = of_rank.transpose(2, 3).contiguous().transpose(2, 3)
        caches = dict(zip(names, of_rank.clone(memory_format=torch.preserve_format), strict=True))
        (pages,) = engine.open_pages(caches, config, kv_cache_config, engine.Rank(number, num_ranks))
        return pages, caches

    (kv_spec,) = engine.engine_specs(config, kv_cache_config, b"instance")
    block = np.zeros(kv_spec.block_nbytes, np.uint8)
    for number in range(num_ranks):
        rank_pages(number, whole)[0].copy_out(1, block)

    expected = whole[:, 1].unflatten(-1, (2, dim)).contiguous()  # [layer, head, token, plane, dim]
    assert np.array_equal(block, expected.view(torch.uint8).flatten().numpy())
    assert kv_spec.page_format == "kvstore:LHTPD"
    for number in range(num_ranks):
        pages, caches = rank_pages(number, torch.zeros_like(whole))
        pages.copy_in(2, block)
        first = number * num_heads // num_ranks
        for layer, name in enumerate(names):
            assert torch.equal(caches[name][2], whole[layer, 1, first : first + heads_a_rank])
            assert not caches[name][0].any()


@pytest.mark.parametrize("shape", [(8, 2, 16, 16), (4, 1, 32, 16), (4, 2, 32, 32)])
def test_pages_of_a_gpu_that_are_no_whole_blocks_are_refused(modules, tmp_path, monkeypatch, shape):
    """vLLM cuts a block where its kernels want smaller ones; block 1 is pages 2 and 3 then, and page 1 is another block's."""
    engine = modules["vllm_engine"]
    monkeypatch.setattr(engine, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(engine.DevicePages, "open", host_pages)
    spec = FullAttentionSpec(block_size=32, head_size=8, num_kv_heads=2, page_size_bytes=0)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])]

    with pytest.raises(ConfigError, match=f"kv_caches: .* use --block-size {shape[2]}"):
        engine.open_pages(
            {"layer": torch.zeros(shape)},
            gpu_config(tmp_path, 1, 2),
            SimpleNamespace(kv_cache_groups=groups),
            engine.Rank(0, 1),
        )


def test_scales_that_an_engine_draws_from_its_first_request_are_refused(modules, tmp_path):
    """Its fp8 numbers mean something else in every other engine, and after its own restart."""
    config = gpu_config(tmp_path, 1, 2)
    config.cache_config.calculate_kv_scales = True
    spec = FullAttentionSpec(block_size=32, head_size=8, num_kv_heads=2, page_size_bytes=4096)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])]
    kv_cache_config = SimpleNamespace(kv_cache_groups=groups, kv_cache_layout="LBNHC")

    with pytest.raises(ConfigError, match="calculate_kv_scales: True is not served"):
        modules["vllm_engine"].engine_specs(config, kv_cache_config, b"instance")


def test_a_gpu_with_other_numbers_in_its_cache_than_the_models_is_refused(modules, tmp_path, monkeypatch):
    engine = modules["vllm_engine"]
    monkeypatch.setattr(engine, "current_platform", SimpleNamespace(device_type="cuda"))
    config = gpu_config(tmp_path, 1, 2)
    config.cache_config.cache_dtype = "fp8"
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=[])])

    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'fp8' is not served .* it needs 'auto' or 'float32'"):
        engine.refuse_unsupported(config, groups)
