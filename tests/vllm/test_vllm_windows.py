"""A model all of whose layers have sliding windows, in one group: pages leave the window while the request goes on, and tokens
before it have none."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_model import make_hybrid_model
from servers import Answer, Sidecar, Slow, VllmServer, answers_alone, assert_same_tokens, eventually, slowed_server

PROMPTS = [[11 + k + i * i % (7919 - 2 * k) for i in range(700)] for k in range(3)]
CHUNKS = ["--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "48"]


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    return make_hybrid_model(cache / "windows", layers=["sliding"])


@pytest.fixture(scope="module")
def computed(model: Path, directory: Path) -> list[Answer]:
    return answers_alone(model, directory, PROMPTS, CHUNKS)


@pytest.fixture(scope="module")
def server(model: Path, directory: Path, sidecar: Sidecar, slow: Slow, computed: list[Answer]) -> Iterator[VllmServer]:
    with slowed_server("windows", model, directory, sidecar, slow, args=CHUNKS) as server:
        yield server


def loaded_answers(server: VllmServer) -> list[Answer]:
    """From the store alone: vLLM's own cache is empty before each."""
    answers = []
    for prompt in PROMPTS:
        server.forget_local_prefixes()
        answers.append(server.complete(prompt))
    return answers


def test_pages_that_leave_the_window_under_a_slow_save_poison_nothing(server, computed, slow):
    with slow.each("saves", 0.05), ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(server.complete, PROMPTS))

    for answer, expected in zip(answers, computed, strict=True):
        assert_same_tokens(answer, expected)
    hits = server.external_hits
    for answer, expected in zip(loaded_answers(server), computed, strict=True):
        assert_same_tokens(answer, expected)
    eventually(lambda: bool(loaded_answers(server)) and server.external_hits > hits, deadline_s=120.0)
    for answer, expected in zip(loaded_answers(server), computed, strict=True):
        assert_same_tokens(answer, expected)


def test_a_load_that_fails_is_computed_from_the_start_since_what_is_before_the_window_has_no_pages(
    server, computed, slow
):
    server.forget_local_prefixes()
    failed = server.metric("vllm:kvstore_failed_load_blocks_total")
    with slow.each("loads", 11.0):
        answer = server.complete(PROMPTS[0])

    assert_same_tokens(answer, computed[0])
    assert server.metric("vllm:kvstore_failed_load_blocks_total") > failed
