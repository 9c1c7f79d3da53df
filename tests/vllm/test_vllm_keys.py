"""What must keep blocks apart does: salts, LoRA adapters by name and by content; and what an adapter's blocks are is still known
after a restart of vLLM."""

from pathlib import Path

import pytest
from make_model import make_adapter, make_random_model
from servers import BLOCK_TOKENS, Sidecar, VllmServer, assert_same_tokens

PROMPT = [11 + i * i % 7919 for i in range(500)]
NUM_LOADABLE_TOKENS = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def adapter(directory: Path) -> Path:
    return directory / "adapter"


def start(name: str, directory: Path, cache: Path, sidecar: Sidecar, adapter: Path) -> VllmServer:
    modules = ["--lora-modules", f"tuned={adapter}", f"copy={adapter}"]
    server = VllmServer(
        name,
        make_random_model(cache / "random"),
        directory,
        store=sidecar.socket,
        extra={"fetch": "always"},
        args=["--enable-lora", "--max-lora-rank", "8", *modules],
    )
    server.start()
    return server


def hits(server: VllmServer, **extra: object) -> tuple[float, object]:
    """Tokens from the store of a request that vLLM's own cache knows nothing of, and its answer."""
    server.forget_local_prefixes()
    before = server.external_hits
    answer = server.complete(PROMPT, **extra)
    return server.external_hits - before, answer


def test_salts_and_adapters_keep_blocks_apart_and_find_their_own(directory, cache, sidecar, adapter):
    make_adapter(adapter, seed=1)
    sidecar.start()
    server = start("first", directory, cache, sidecar, adapter)
    try:
        answers = {}
        for name, extra in (
            ("plain", {}),
            ("salt", {"cache_salt": "one"}),
            ("other salt", {"cache_salt": "two"}),
            ("adapter", {"model": "tuned"}),
            ("its copy", {"model": "copy"}),  # vLLM's hashes hold the name too
        ):
            num_hit, answers[name] = hits(server, **extra)
            assert num_hit == 0, name
            num_hit, again = hits(server, **extra)
            assert num_hit == NUM_LOADABLE_TOKENS, name
            assert_same_tokens(again, answers[name])
        assert answers["plain"].token_ids == answers["salt"].token_ids
        assert answers["adapter"].token_ids == answers["its copy"].token_ids != answers["plain"].token_ids
    finally:
        server.stop()

    make_adapter(adapter, seed=2)  # other weights at the same path, under the same name
    server = start("second", directory, cache, sidecar, adapter)
    try:
        num_hit, tuned = hits(server, model="tuned")
        assert num_hit == 0
        assert tuned.token_ids != answers["adapter"].token_ids
        assert hits(server)[0] == NUM_LOADABLE_TOKENS
    finally:
        server.stop()

    make_adapter(adapter, seed=1)
    server = start("third", directory, cache, sidecar, adapter)
    try:
        num_hit, tuned = hits(server, model="tuned")
        assert num_hit == NUM_LOADABLE_TOKENS
        assert_same_tokens(tuned, answers["adapter"])

        make_adapter(adapter, seed=2)  # which of both vLLM has loaded cannot be seen any more
        assert hits(server, model="tuned")[0] == 0
        assert "adapter not shared name=tuned" in server.read_log()
    finally:
        server.stop()
