"""vLLM's OpenAI servers on one sidecar: blocks are shared, tokens stay what they are, and no failure shows but as time.

One server runs without a store and gives the tokens that the others must give. Two live through all tests in file order,
`first` with plenty of pages, `second` with few and with loads that can be slowed down. The last three start a server each.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from make_model import make_model
from servers import (
    BLOCK_TOKENS,
    SLOW_CONNECTOR,
    Answer,
    Sidecar,
    Slow,
    VllmServer,
    assert_same_tokens,
    eventually,
)

from kvstore.client import Client
from kvstore.proto.kvstore_pb2 import TOOL

NUM_LONG_TOKENS = 2000
NUM_LOADABLE_TOKENS = (NUM_LONG_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
FEW_PAGES = 72  # one prompt of max_model_len fits, four of the small ones with their answers do not
NUM_SMALL_TOKENS, NUM_SMALL_OUTPUT = 500, 100
SMALL = ("key", "ring", "stamp", "clock")


def second_turn(name: str, prompts: dict[str, list[int]], answers: dict[str, Answer]) -> list[int]:
    """A prompt, its answer, and a little more."""
    return [*prompts[name], *answers[name].token_ids, *prompts["letter"][:20]]


@pytest.fixture(scope="module")
def served(directory: Path, cache: Path) -> Path:
    """The path that all servers are given. What is behind it may change."""
    path = directory / "model"
    path.symlink_to(make_model(cache / "smollm2"))
    return path


@pytest.fixture(scope="module")
def prompts(served: Path) -> dict[str, list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(served / "tokenizer.json"))

    def text(subject: str) -> str:
        places = ("shelf", "box", "drawer", "room", "desk")
        facts = (f"The {subject} number {i} lies in {places[i % 5]} {i * i % 97}. " for i in range(1, 200))
        return "".join(facts)

    long = {name: tokenizer.encode(text(name)).ids[:NUM_LONG_TOKENS] for name in ("letter", "coin", "map")}
    small = {name: tokenizer.encode(text(name)).ids[:NUM_SMALL_TOKENS] for name in SMALL}
    assert {len(prompt) for prompt in long.values()} == {NUM_LONG_TOKENS}
    return long | small


@pytest.fixture(scope="module")
def reference(served: Path, directory: Path, prompts: dict[str, list[int]]) -> dict[str, Answer]:
    """What vLLM answers without a connector."""
    server = VllmServer("reference", served, directory)
    try:
        server.start()
        answers = {
            name: server.complete(prompt, max_tokens=NUM_SMALL_OUTPUT if name in SMALL else 48)
            for name, prompt in prompts.items()
        }
        turns = {f"{name} turn": second_turn(name, prompts, answers) for name in SMALL}
        return answers | {name: server.complete(turn) for name, turn in turns.items()}
    finally:
        server.stop()


@pytest.fixture(scope="module")
def first(served: Path, directory: Path, sidecar: Sidecar, reference: dict[str, Answer]) -> Iterator[VllmServer]:
    server = VllmServer("first", served, directory, store=sidecar.socket)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def second(served: Path, directory: Path, sidecar: Sidecar, slow: Slow) -> Iterator[VllmServer]:
    server = VllmServer(
        "second",
        served,
        directory,
        store=sidecar.socket,
        connector=SLOW_CONNECTOR,
        args=["--num-gpu-blocks-override", str(FEW_PAGES)],
        env=slow.env,
    )
    try:
        server.start()
        yield server
    finally:
        server.stop()


def test_without_a_sidecar_vllm_computes_and_uses_it_once_it_is_there(first, sidecar, prompts, reference):
    alone = first.complete(prompts["map"], max_tokens=48)
    sidecar.start()
    first.wait_for_log("store connected")
    first.complete(prompts["map"], max_tokens=48)  # blocks of vLLM's own cache are offered too
    first.forget_local_prefixes()
    loaded = first.complete(prompts["map"], max_tokens=48)

    assert_same_tokens(alone, reference["map"])
    assert_same_tokens(loaded, reference["map"])
    assert first.external_hits == NUM_LOADABLE_TOKENS


def test_a_second_server_answers_from_the_blocks_of_the_first(first, second, prompts, reference, capsys):
    second.complete(prompts["map"][:100])  # whatever a first request costs
    first.complete(prompts["letter"], max_tokens=48)
    cold = second.complete(prompts["coin"], max_tokens=48)
    hits, computed = second.external_hits, second.metric(COMPUTED)

    warm = second.complete(prompts["letter"], max_tokens=48)

    with capsys.disabled():
        print(f"\nTTFT of {NUM_LONG_TOKENS} tokens: cold {cold.ttft_s:.2f} s, warm {warm.ttft_s:.3f} s")
    assert_same_tokens(cold, reference["coin"])
    assert_same_tokens(warm, reference["letter"])
    assert second.external_hits - hits == NUM_LOADABLE_TOKENS
    assert second.metric(COMPUTED) - computed == NUM_LONG_TOKENS - NUM_LOADABLE_TOKENS
    assert second.metric("vllm:kvstore_hit_tokens_pinned_total") >= NUM_LOADABLE_TOKENS
    assert warm.ttft_s <= cold.ttft_s / 5


def test_the_sidecar_planned_the_load_from_speeds_that_vllm_showed(second, sidecar):
    """The plan's record of the prompt that was just loaded; a step of vLLM has been timed by then."""
    with Client(str(sidecar.socket), role=TOOL) as client:
        loaded = [plan for plan in client.explain(last=20) if plan.outcome == "loaded"]

    assert loaded
    assert loaded[0].plan.num_blocks == loaded[0].num_loaded == NUM_LOADABLE_TOKENS // BLOCK_TOKENS
    assert 0 < loaded[0].actual_s < loaded[0].plan.recompute_s


def test_blocks_of_generated_tokens_are_shared_like_those_of_the_prompt(first, second, prompts):
    turn = first.complete(prompts["letter"], max_tokens=24)  # a block and a half, and room for another answer
    hits = second.external_hits
    second.forget_local_prefixes()

    second.complete([*prompts["letter"], *turn.token_ids, *prompts["key"][:4]])

    assert second.external_hits - hits > NUM_LONG_TOKENS


def test_preempted_requests_give_the_tokens_of_an_engine_with_room(first, second, prompts, reference, slow):
    """Saves are slow, so that vLLM takes pages back, the last first, while they wait to be read. What was saved of them
    shows in a second turn, which loads the blocks of the answer too."""
    preempted = second.metric("vllm:num_preemptions_total")

    with slow.each("saves", 0.15), ThreadPoolExecutor(len(SMALL)) as pool:
        answers = list(pool.map(lambda name: second.complete(prompts[name], max_tokens=NUM_SMALL_OUTPUT), SMALL))

    assert second.metric("vllm:num_preemptions_total") > preempted
    for answer, name in zip(answers, SMALL, strict=True):
        assert_same_tokens(answer, reference[name])
    for server in (second, first):
        hits = server.external_hits
        server.forget_local_prefixes()
        for name in SMALL:
            turn = server.complete(second_turn(name, prompts, reference))
            assert_same_tokens(turn, reference[f"{name} turn"])
        assert server.external_hits > hits


def test_a_load_past_its_deadline_is_computed_from_the_first_block_that_is_missing(second, prompts, reference, slow):
    second.forget_local_prefixes()
    before = len(second.read_log())

    with slow.each("loads", 0.3):
        answer = second.complete(prompts["letter"], max_tokens=48)

    loaded, failed = second.wait_for_log(r"load incomplete .* loaded=(\d+) failed=(\d+)", after=before).groups()
    assert 0 < int(loaded) < NUM_LOADABLE_TOKENS // BLOCK_TOKENS
    assert int(loaded) + int(failed) == NUM_LOADABLE_TOKENS // BLOCK_TOKENS
    assert_same_tokens(answer, reference["letter"])


def test_a_request_aborted_in_mid_load_gives_its_pages_back(second, prompts, reference, slow):
    """Two such loads fill more pages than there are, so that the last request would wait for ever."""
    for _ in range(2):
        second.forget_local_prefixes()
        with slow.each("loads", 0.05) as started:
            second.start_and_hang_up(prompts["letter"], started.exists)
    eventually(lambda: second.metric("vllm:num_requests_waiting") == 0)

    assert_same_tokens(second.complete(prompts["letter"], max_tokens=48), reference["letter"])


def test_a_sidecar_killed_in_mid_load_and_started_again(first, second, sidecar, prompts, reference, slow):
    second.forget_local_prefixes()
    with slow.each("loads", 0.05) as started, ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(second.complete, prompts["letter"], max_tokens=48)
        eventually(started.exists)
        sidecar.kill()
        in_mid_load = under_way.result()
    second.forget_local_prefixes()
    without = second.complete(prompts["letter"], max_tokens=48)

    assert_same_tokens(in_mid_load, reference["letter"])
    assert_same_tokens(without, reference["letter"])

    hits = second.external_hits
    start_again(sidecar, (first, second), prompts["map"])
    first.complete(prompts["letter"], max_tokens=48)
    second.forget_local_prefixes()
    again = second.complete(prompts["letter"], max_tokens=48)

    assert_same_tokens(again, reference["letter"])
    assert second.external_hits - hits == NUM_LOADABLE_TOKENS


def test_a_sidecar_that_hangs_costs_one_call(first, sidecar, prompts, reference):
    hits, before = first.external_hits, len(first.read_log())
    first.forget_local_prefixes()
    sidecar.pause()
    try:
        answer = first.complete(prompts["coin"], max_tokens=48)
    finally:
        sidecar.resume()

    assert_same_tokens(answer, reference["coin"])
    assert first.external_hits == hits
    assert first.read_log()[before:].count("store lost") == 1


def test_after_a_reset_nothing_saved_before_is_used(second, prompts, reference):
    second.complete(prompts["letter"])
    second.forget_local_prefixes(reset_external=True)
    hits = second.external_hits

    computed = second.complete(prompts["letter"], max_tokens=48)
    second.forget_local_prefixes()
    second.complete(prompts["letter"])

    assert_same_tokens(computed, reference["letter"])
    assert second.external_hits - hits == NUM_LOADABLE_TOKENS  # of the second request: what was saved since
    assert "cache reset" in second.read_log()


def start_again(sidecar: Sidecar, servers: tuple[VllmServer, ...], prompt: list[int], **settings: str) -> None:
    """Until all servers speak to it."""
    before = [len(server.read_log()) for server in servers]
    sidecar.start(**settings)
    for server, length in zip(servers, before, strict=True):
        server.complete(prompt[:100], max_tokens=2)  # a loss is noticed by asking
        server.wait_for_log("store connected", after=length)


def test_an_arena_smaller_than_a_prompt_gives_what_it_holds(first, second, sidecar, prompts, reference):
    sidecar.kill()
    start_again(sidecar, (first, second), prompts["map"], arena="64MiB")
    hits = second.external_hits
    for name in ("letter", "coin", "letter"):
        assert_same_tokens(first.complete(prompts[name], max_tokens=48), reference[name])
        second.forget_local_prefixes()
        assert_same_tokens(second.complete(prompts[name], max_tokens=48), reference[name])

    assert second.external_hits - hits < 3 * NUM_LOADABLE_TOKENS
    sidecar.kill()
    start_again(sidecar, (first, second), prompts["map"])


@pytest.mark.parametrize("different", ["dtype", "hash.seed", "weights"])
def test_engines_whose_blocks_differ_never_share_and_are_told_why(
    first, sidecar, served, directory, cache, prompts, different
):
    first.complete(prompts["letter"])
    args = ["--dtype", "bfloat16"] if different == "dtype" else []
    env = {"PYTHONHASHSEED": "7"} if different == "hash.seed" else {}
    if different == "weights":
        served.unlink()
        served.symlink_to(make_model(cache / "smollm2-other", scale_first_norm=1.01))
    server = VllmServer(different, served, directory, store=sidecar.socket, args=args, env=env)

    try:
        server.start()
        server.complete(prompts["letter"], max_tokens=2)

        fields = server.wait_for_log(r"cannot share num_blocks=[1-9]\d* differing_fields=(\S+)").group(1)
        assert different in fields.split(",")
        assert server.external_hits == 0
    finally:
        server.stop()


def test_all_the_while_no_page_was_lost_and_no_process_died(first, second, sidecar, prompts):
    second.complete([*prompts["letter"], *prompts["coin"]][: (FEW_PAGES - 8) * BLOCK_TOKENS - 16])
    assert first.running
    assert second.running
    assert sidecar.running
