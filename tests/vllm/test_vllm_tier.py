"""kvstore behind vLLM's native offloading: what one server's pool held another gets, and no failure of the sidecar shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from make_model import make_random_model
from servers import BLOCK_TOKENS, Answer, Sidecar, Slow, VllmServer, assert_same_tokens

PROMPT = [11 + i * i % 7919 for i in range(1000)]
OTHER = [13 + i * i % 7907 for i in range(1000)]
THIRD = [17 + i * i % 7901 for i in range(1000)]
NUM_LOADABLE_TOKENS = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
CONNECTOR = {
    "kv_connector": "KVStoreOffloadingConnector",
    "kv_connector_module_path": "kvstore.engine_connector.vllm_tier",
}


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    return make_random_model(cache / "random")


def server(name: str, model: Path, directory: Path, sidecar: Sidecar, slow: Slow) -> VllmServer:
    tier = {
        "type": "KVStoreTier",
        "module_path": "kvstore.engine_connector.vllm_tier",
        "socket": str(sidecar.socket),
    }
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_offload",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [tier],
    }
    return VllmServer(name, model, directory, store=sidecar.socket, connector=CONNECTOR, extra=extra, env=slow.env)


@pytest.fixture(scope="module")
def reference(model: Path, directory: Path) -> dict[str, Answer]:
    alone = VllmServer("alone", model, directory)
    try:
        alone.start()
        prompts = {"prompt": PROMPT, "other": OTHER, "third": THIRD}
        return {name: alone.complete(prompt) for name, prompt in prompts.items()}
    finally:
        alone.stop()


@pytest.fixture(scope="module")
def first(
    model: Path, directory: Path, sidecar: Sidecar, slow: Slow, reference: dict[str, Answer]
) -> Iterator[VllmServer]:
    sidecar.start()
    first = server("first", model, directory, sidecar, slow)
    try:
        first.start()
        yield first
    finally:
        first.stop()


@pytest.fixture(scope="module")
def second(model: Path, directory: Path, sidecar: Sidecar, slow: Slow) -> Iterator[VllmServer]:
    second = server("second", model, directory, sidecar, slow)
    try:
        second.start()
        yield second
    finally:
        second.stop()


def test_a_second_server_answers_from_what_the_pool_of_the_first_held(first, second, reference):
    first.complete(PROMPT)
    first.complete(OTHER[:64], max_tokens=2)  # native offloading copies in the next step

    answer = second.complete(PROMPT)

    assert_same_tokens(answer, reference["prompt"])
    assert second.external_hits == NUM_LOADABLE_TOKENS
    assert second.metric("vllm:kv_offload_tiering_read_bytes_total") > 0
    assert second.metric("vllm:kv_offload_tiering_promotion_job_failures_total") == 0


def test_without_the_sidecar_requests_are_computed_and_with_it_again_they_hit(first, second, sidecar, reference):
    sidecar.kill()
    computed = first.complete(OTHER)
    before = [len(server.read_log()) for server in (first, second)]
    sidecar.start()
    for server, length in zip((first, second), before, strict=True):
        server.complete(PROMPT[1:65], max_tokens=2)  # a loss is noticed by asking
        server.wait_for_log("store connected", after=length)
    first.complete(THIRD)
    first.complete(OTHER[:64], max_tokens=2)
    hits = second.external_hits
    loaded = second.complete(THIRD)

    assert_same_tokens(computed, reference["other"])
    assert_same_tokens(loaded, reference["third"])
    assert second.external_hits - hits == NUM_LOADABLE_TOKENS


def test_after_a_reset_neither_the_pool_nor_the_store_gives_what_was_before(first, reference):
    first.forget_local_prefixes(reset_external=True)
    hits = first.external_hits

    assert_same_tokens(first.complete(THIRD), reference["third"])
    assert first.external_hits == hits
    assert "cache reset" in first.read_log()


def test_a_tier_in_vllms_own_connector_is_refused_with_what_is_needed(model, directory, sidecar, slow):
    wrong = server("wrong", model, directory, sidecar, slow)
    position = wrong._command.index("--kv-transfer-config") + 1
    wrong._command[position] = wrong._command[position].replace("KVStoreOffloadingConnector", "OffloadingConnector")

    with pytest.raises(AssertionError, match="ended early"):
        wrong.start()

    assert "needs KVStoreOffloadingConnector in place of OffloadingConnector" in wrong.read_log()
