"""What a request wishes of the caches, from LLM's options to a real sidecar: who finds what, for how long, and what goes when
the arena is full. The tokens are the same whatever is wished."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import BLOCK, GREEDY, SMALL, Bench, Engine
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until

from kvstore.engine_connector.engine.llm import LLM, RequestOutput
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.protocol import CacheOptions, FetchPolicy

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 81
LOADABLE = 80  # full blocks before the last token


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    """Its arena is one segment, which 256 blocks of the tiny model fill."""
    with running_sidecar(tmp_path, "--no-grpc", arena="1MiB") as process:
        yield process


@pytest.fixture
def prompt(bench: Bench) -> list[int]:
    return bench.prompts(PROMPT_TOKENS)[0]


def ask(engine: Engine, prompt: list[int], **wishes: object) -> RequestOutput:
    (output,) = engine.llm.generate([prompt], GREEDY, options=RequestOptions(cache=CacheOptions(**wishes)))
    engine.check()
    return output


def num_fetched(bench: Bench, sidecar: SidecarProcess, prompt: list[int], **wishes: object) -> int:
    """By an engine that starts now, so that its own pages are empty. It leaves nothing behind."""
    output = ask(bench.engine(sidecar.socket), prompt, **({"no_store": True} | wishes))
    bench.expect_same([output], prompt)
    return output.num_fetched_tokens


def num_free(sidecar: SidecarProcess, engine: Engine) -> int:
    """Blocks that fit in before one is pushed out."""
    with tool(sidecar) as client:
        stats = client.stats()
    slot_nbytes = -(-engine.llm.spec.block_nbytes // 4096) * 4096
    return stats.tiers[0].capacity_bytes // slot_nbytes - stats.num_blocks


def flood(bench: Bench, sidecar: SidecarProcess, *, seed: int) -> None:
    """Prompts enough to push out everything that can be."""
    engine = bench.engine(sidecar.socket)
    for prompt in bench.prompts(*[400] * 6, seed=seed):  # 100 blocks each
        ask(engine, prompt)


def test_a_prompt_is_shown_by_the_name_that_it_was_given(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    """Its blocks, those that another prompt stored before as well; and the plan."""
    engine = bench.engine(sidecar.socket, fetch=FetchPolicy.PLANNED)
    ask(engine, prompt[:40])
    ask(engine, prompt, label="contract <7>")

    keys = engine.llm.spec.hash.hash_blocks(prompt)
    with tool(sidecar) as client:
        assert [client.inspect(keys[i].hex()).blocks[0].label for i in (0, 19)] == ["contract <7>"] * 2
        assert [each.wish.label for each in client.explain(last=2)] == ["contract <7>", ""]


def test_a_request_that_stores_nothing_leaves_nothing_here_or_there(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    engine = bench.engine(sidecar.socket)
    bench.expect_same([ask(engine, prompt, no_store=True)], prompt)

    again = ask(engine, prompt, no_store=True)

    assert (again.num_local_cached_tokens, again.num_fetched_tokens) == (0, 0)
    assert num_fetched(bench, sidecar, prompt) == 0


def test_a_request_that_reads_nothing_computes_all_and_is_found_by_others(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    engine = bench.engine(sidecar.socket)
    ask(engine, prompt)

    again = ask(engine, prompt, no_read=True)

    bench.expect_same([again], prompt)
    assert again.num_prefilled_tokens == PROMPT_TOKENS
    assert num_fetched(bench, sidecar, prompt, no_read=True) == 0
    assert num_fetched(bench, sidecar, prompt) == LOADABLE


def test_salts_do_not_meet_here_or_there(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    engine = bench.engine(sidecar.socket)
    ask(engine, prompt, salt="anna")

    for salt in ("", "bert"):
        assert ask(engine, prompt, salt=salt, no_store=True).num_prefilled_tokens == PROMPT_TOKENS
        assert num_fetched(bench, sidecar, prompt, salt=salt) == 0
    assert ask(engine, prompt, salt="anna").num_local_cached_tokens == LOADABLE
    assert num_fetched(bench, sidecar, prompt, salt="anna") == LOADABLE


def test_blocks_with_a_time_to_live_are_gone_after_it(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    engine = bench.engine(sidecar.socket)
    ask(engine, prompt, ttl_s=3.0)
    assert num_fetched(bench, sidecar, prompt) == LOADABLE

    def num_blocks() -> int:
        with tool(sidecar) as client:
            return client.stats().num_blocks

    wait_until(lambda: num_blocks() == 0, "the blocks' time is over")
    assert num_fetched(bench, sidecar, prompt) == 0


def test_a_pinned_prompt_outlives_a_flood_that_takes_all_else(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    (other,) = bench.prompts(PROMPT_TOKENS, seed=1)
    engine = bench.engine(sidecar.socket)
    ask(engine, other)
    answer = ask(engine, prompt, pin_s=600.0)

    flood(bench, sidecar, seed=2)

    turn = [*prompt, *answer.token_ids]
    assert num_fetched(bench, sidecar, turn) == LOADABLE, "the prompt, and not the answer"
    assert num_fetched(bench, sidecar, other) == 0


def test_an_ended_session_is_given_up_first_tail_first(bench: Bench, sidecar: SidecarProcess) -> None:
    """Each request of 100 tokens leaves 27 blocks (what was computed of prompt and answer), each filler 6."""
    engine = bench.engine(sidecar.socket)
    system, of_session, of_other = bench.prompts(40, 60, 60, seed=3)
    ask(engine, [*system, *of_other], session_id="other")
    ask(engine, [*system, *of_session], session_id="s")
    num_fillers = num_free(sidecar, engine) // 6
    for filler in bench.prompts(*[16] * num_fillers, seed=4):
        ask(engine, filler)
    num_left = num_free(sidecar, engine)
    assert num_left < 6

    assert engine.llm.expect_session("s") == engine.llm.end_session("s") == 27
    assert engine.llm.end_session("s") == 0
    for filler in bench.prompts(16, 16, seed=5):
        ask(engine, filler)

    num_taken = 2 * 6 - num_left
    assert num_fetched(bench, sidecar, [*system, *of_session]) == (27 - num_taken) * BLOCK
    assert num_fetched(bench, sidecar, [*system, *of_other]) == 96


def test_hints_without_a_store_are_nothing(bench: Bench) -> None:
    with LLM(bench.model, **SMALL) as llm:
        assert (llm.expect_session("s"), llm.end_session("s")) == (0, 0)
