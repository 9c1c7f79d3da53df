"""A model with two layer groups, full attention and a sliding window: both are loaded for one length of a prefix, no more of the
window than it needs, and pages that leave the window while they are saved do no harm."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_model import make_hybrid_model
from servers import (
    BLOCK_TOKENS,
    Answer,
    Sidecar,
    Slow,
    VllmServer,
    answers_alone,
    assert_same_tokens,
    eventually,
    slowed_server,
)

PROMPTS = [[11 + k + i * i % (7919 - 2 * k) for i in range(700)] for k in range(3)]
NUM_LOADABLE_TOKENS = (len(PROMPTS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
NUM_WINDOW_BLOCKS = 2  # cover 63 tokens
CHUNKS = ["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "120"]


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    return make_hybrid_model(cache / "hybrid")


@pytest.fixture(scope="module")
def computed(model: Path, directory: Path) -> list[Answer]:
    return answers_alone(model, directory, PROMPTS, CHUNKS)


@pytest.fixture(scope="module")
def server(model: Path, directory: Path, sidecar: Sidecar, slow: Slow, computed: list[Answer]) -> Iterator[VllmServer]:
    with slowed_server("hybrid", model, directory, sidecar, slow, args=CHUNKS) as server:
        yield server


def hits_of_all(server: VllmServer, computed: list[Answer]) -> float:
    """Tokens from the store for the three prompts, of which vLLM's own cache has nothing; the answers are right."""
    hits = server.external_hits
    for prompt, expected in zip(PROMPTS, computed, strict=True):
        server.forget_local_prefixes()
        assert_same_tokens(server.complete(prompt), expected)
    return server.external_hits - hits


def test_pages_that_leave_the_window_under_a_slow_save_poison_nothing(server, computed, slow):
    """Requests run side by side on few pages, so that what leaves the window of one is given to another at once."""
    with slow.each("saves", 0.05), ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(server.complete, PROMPTS))

    for answer, expected in zip(answers, computed, strict=True):
        assert_same_tokens(answer, expected)
    eventually(lambda: hits_of_all(server, computed) == len(PROMPTS) * NUM_LOADABLE_TOKENS, deadline_s=120.0)


def test_of_the_window_no_more_is_loaded_than_it_needs(server, computed):
    loaded, blocks = (server.metric(f"vllm:kvstore_{name}_total") for name in ("load_bytes", "hit_tokens_pinned"))
    hits_of_all(server, computed)
    loaded = server.metric("vllm:kvstore_load_bytes_total") - loaded
    blocks = (server.metric("vllm:kvstore_hit_tokens_pinned_total") - blocks) / BLOCK_TOKENS

    full_block = 3 * 2 * BLOCK_TOKENS * 2 * 64 * 4  # layers, heads, tokens, K and V, float32; likewise of the window
    assert loaded == full_block * (blocks + len(PROMPTS) * NUM_WINDOW_BLOCKS)


def test_a_load_that_fails_in_any_group_is_computed(server, computed, slow):
    server.forget_local_prefixes()
    failed = server.metric("vllm:kvstore_failed_load_blocks_total")
    with slow.each("loads", 0.7):
        answer = server.complete(PROMPTS[0])

    assert_same_tokens(answer, computed[0])
    assert server.metric("vllm:kvstore_failed_load_blocks_total") > failed


def test_a_restarted_server_loads_both_groups(server, computed, model, directory, sidecar):
    server.stop()
    again = VllmServer("again", model, directory, store=sidecar.socket, extra={"fetch": "always"}, args=CHUNKS)
    try:
        again.start()
        assert_same_tokens(again.complete(PROMPTS[1]), computed[1])
        assert again.external_hits == NUM_LOADABLE_TOKENS
    finally:
        again.stop()
