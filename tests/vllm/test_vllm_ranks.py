"""Tensor parallelism: two ranks write their parts of one block and read them again, here and in another server, and what
happens to one rank's part happens to the block. Servers with another number of ranks have other blocks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_model import make_random_model
from servers import BLOCK_TOKENS, Answer, Sidecar, Slow, VllmServer, assert_same_tokens, eventually, slowed_server

TWO_RANKS = ["--tensor-parallel-size", "2"]
PROMPT = [11 + i * i % 7919 for i in range(1000)]
NUM_LOADABLE_TOKENS = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    return make_random_model(cache / "random")


@pytest.fixture(scope="module")
def writer(model: Path, directory: Path, sidecar: Sidecar, slow: Slow) -> Iterator[VllmServer]:
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with slowed_server("writer", model, directory, sidecar, slow, args=TWO_RANKS, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def computed(writer: VllmServer) -> Answer:
    return writer.complete(PROMPT)


def hits_again(writer: VllmServer, computed: Answer) -> bool:
    """Whether the prompt comes from the store, not from vLLM's own cache. Blocks of a request are committed a moment after its
    answer; those of vLLM's own cache are offered anew, once scheduler and ranks have noticed another sidecar."""
    hits = writer.external_hits
    for _ in range(2):
        assert_same_tokens(writer.complete(PROMPT), computed)
        writer.forget_local_prefixes()
    return writer.external_hits - hits >= NUM_LOADABLE_TOKENS


def test_two_ranks_load_what_they_have_saved(writer, computed):
    eventually(lambda: hits_again(writer, computed), deadline_s=60.0)

    assert writer.metric("vllm:kvstore_failed_load_blocks_total") == 0


def test_a_load_that_is_late_on_both_ranks_is_computed_from_where_it_broke_off(writer, computed, slow):
    writer.forget_local_prefixes()
    with slow.each("loads", 0.6):
        answer = writer.complete(PROMPT)

    assert_same_tokens(answer, computed)
    assert 0 < writer.metric("vllm:kvstore_failed_load_blocks_total") < NUM_LOADABLE_TOKENS // BLOCK_TOKENS


def test_a_sidecar_killed_in_mid_load_of_two_ranks(writer, computed, sidecar, slow):
    writer.forget_local_prefixes()
    with slow.each("loads", 0.1) as started, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(writer.complete, PROMPT)
        eventually(started.exists)
        sidecar.kill()
        answer = under_way.result()
    sidecar.start()
    assert_same_tokens(answer, computed)

    eventually(lambda: hits_again(writer, computed), deadline_s=60.0)


def test_another_server_of_two_ranks_answers_from_these_blocks_and_one_of_one_rank_is_told_why_not(
    writer, computed, model, directory, sidecar
):
    writer.stop()
    reader = VllmServer(
        "reader",
        model,
        directory,
        store=sidecar.socket,
        extra={"fetch": "always"},
        args=TWO_RANKS,
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    try:
        reader.start()
        loaded = reader.complete(PROMPT)

        assert_same_tokens(loaded, computed)
        assert reader.external_hits == NUM_LOADABLE_TOKENS
    finally:
        reader.stop()

    single = VllmServer("single", model, directory, store=sidecar.socket)
    try:
        single.start()
        single.complete(PROMPT, max_tokens=2)

        fields = single.wait_for_log(r"cannot share num_blocks=[1-9]\d* differing_fields=(\S+)").group(1)
        assert "page_format" in fields.split(",")
        assert single.external_hits == 0
    finally:
        single.stop()
