"""Loads and saves by layers on a real sidecar: the same tokens as without, whatever happens to the sidecar at whichever copy."""

import threading

import pytest
from engines import BLOCK, GREEDY, Bench, Engine, SplitEngine
from sidecar_process import SidecarProcess, tool, wait_until
from tiny_llama import LAYERS

from kvstore.client import ClientArena
from kvstore.engine_connector import block_copies, worker_side
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.local import open_connector
from kvstore.engine_connector.protocol import BlockMove

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 203
LOADABLE = 200  # full blocks before the last token
NUM_BLOCKS = LOADABLE // BLOCK


@pytest.fixture
def prompt(bench: Bench, sidecar: SidecarProcess) -> list[int]:
    """The store has it."""
    (prompt,) = bench.prompts(PROMPT_TOKENS, seed=9)
    bench.engine(sidecar.socket).ask(prompt)
    return prompt


@pytest.fixture(autouse=True)
def _a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step that is patient: this machine may be busy."""
    monkeypatch.setattr(block_copies, "LAYERS_COPY_BYTES", 1)
    monkeypatch.setattr(worker_side, "LAYERS_DEADLINE_S", 5.0)


def expect_nothing_held(sidecar: SidecarProcess) -> None:
    with tool(sidecar) as client:
        stats = client.stats()
    tier = stats.tiers[0]
    assert (stats.num_leases, tier.writing_bytes, tier.leaving_bytes, tier.limbo_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("made_by", [Engine, SplitEngine])
def test_one_step_loads_and_computes(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], made_by: type[Engine]
) -> None:
    copies: list[int] = []
    engine = bench.engine(
        sidecar.socket, layerwise=True, made_by=made_by, before=lambda way, number: copies.append(number)
    )
    engine.llm.add_request(prompt, GREEDY)

    deltas = engine.llm.step()

    assert len(deltas) == 1
    assert len(copies) == NUM_BLOCKS * LAYERS
    outputs = run_to_end(engine)
    bench.expect_same(outputs, prompt)
    assert (outputs[0].num_fetched_tokens, outputs[0].num_prefilled_tokens) == (LOADABLE, PROMPT_TOKENS - LOADABLE)
    expect_nothing_held(sidecar)


def run_to_end(engine: Engine) -> list:
    outputs = []
    while engine.llm.has_unfinished:
        outputs += [delta.output for delta in engine.llm.step() if delta.output is not None]
    assert engine.llm.drain(10.0)
    engine.check()
    return outputs


def test_the_connector_that_users_open_can(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    with LLM(
        bench.model,
        connector_factory=lambda spec: open_connector(spec, socket_path=str(sidecar.socket), fetch="always"),
        layerwise=True,
        num_pages=128,
        block_tokens=4,
        chunk_tokens=32,
    ) as llm:
        llm.add_request(prompt, GREEDY)

        assert len(llm.step()) == 1

        assert llm.stats().total.fetched == LOADABLE


def test_batches_that_share_a_document(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    prompts = [prompt + tail for tail in bench.prompts(1, 3, 4, 17, 40, seed=1)]

    engine = bench.engine(sidecar.socket, layerwise=True)

    bench.expect_same(engine.ask(*prompts), *prompts)
    expect_nothing_held(sidecar)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_sidecar_killed_in_mid_load_costs_nothing_but_time(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], layer: int
) -> None:
    """Its memory stays mapped, so the load is good or it is not; the next one is from the sidecar that came back."""
    killed = threading.Event()

    def kill(way: str, number: int) -> None:
        if (way, number) == ("in", layer * NUM_BLOCKS + NUM_BLOCKS // 2):
            sidecar.kill()
            killed.set()

    engine = bench.engine(sidecar.socket, layerwise=True, before=kill)

    bench.expect_same(engine.ask(prompt), prompt)

    assert killed.is_set()
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_slot_that_is_not_the_leases_any_more_is_recomputed(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are another's from that copy on. The generation table is the sidecar's to write, so the answer is changed."""
    changed, seen, real = threading.Event(), [], block_copies.is_current
    num_good = 10

    def is_current(arena: ClientArena, move: BlockMove) -> bool:
        seen.append((arena, move))
        return real(arena, move) and not (changed.is_set() and move == seen[num_good][1])

    def change(way: str, number: int) -> None:
        if (way, number) == ("in", layer * NUM_BLOCKS + 1):
            arena, move = seen[num_good]
            arena.array[move.offset : move.offset + 2048] = 0xFF  # NaN
            changed.set()

    monkeypatch.setattr(block_copies, "is_current", is_current)
    engine = bench.engine(sidecar.socket, layerwise=True, before=change)
    engine.llm.add_request(prompt, GREEDY)

    assert engine.llm.step() == []

    assert changed.is_set()
    outputs = run_to_end(engine)
    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == num_good * BLOCK
    expect_nothing_held(sidecar)


def test_an_abort_after_a_step_that_gave_up_waiting(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_side, "LAYERS_DEADLINE_S", 0.02)
    gate = threading.Event()

    def hold_up(way: str, number: int) -> None:
        if (way, number) == ("in", NUM_BLOCKS + 1):
            assert gate.wait(10.0)

    engine = bench.engine(sidecar.socket, layerwise=True, before=hold_up)
    engine.llm.add_request(prompt, GREEDY, request_id="r")
    assert engine.llm.step() == []
    assert engine.llm.stats().num_loading == 1

    output = engine.llm.abort("r")

    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert engine.llm.is_draining
    gate.set()
    assert engine.llm.drain(10.0)
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)


def test_a_prompt_of_one_token_to_answer_saves_what_it_computed(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    """All in one step: load, compute, sample, end. The blocks of the chunk are in the store afterwards."""
    longer = prompt + bench.prompts(18, seed=2)[0]
    engine = bench.engine(sidecar.socket, layerwise=True)

    engine.ask(longer, params=SamplingParams(max_tokens=1, ignore_eos=True))

    fresh = bench.engine(sidecar.socket)
    outputs = fresh.ask(longer)
    bench.expect_same(outputs, longer)
    assert outputs[0].num_fetched_tokens == (len(longer) - 1) // BLOCK * BLOCK


def test_saves_go_on_during_the_forward(bench: Bench, sidecar: SidecarProcess) -> None:
    """The first layers of the prompt's blocks have been copied before the last ones are computed."""
    (prompt,) = bench.prompts(PROMPT_TOKENS, seed=12)
    copies_at_layer: list[int] = []
    engine = bench.engine(sidecar.socket, layerwise=True)
    worker = engine.llm._runner._worker
    real, (pages,) = worker.layer_computed, worker._pages

    def computed(request_ids: list[str], layer: int) -> None:
        real(request_ids, layer)
        wait_until(lambda: pages.num_copies["out"] == before + 8 * (layer + 1), "copied what was computed")
        copies_at_layer.append(layer)

    worker.layer_computed = computed
    engine.llm.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while engine.llm.has_unfinished and len(copies_at_layer) < 6 * LAYERS:  # chunks of eight blocks
        before = pages.num_copies["out"]
        engine.llm.step()
    assert copies_at_layer == list(range(LAYERS)) * 6
    del worker.layer_computed
    run_to_end(engine)

    fresh = bench.engine(sidecar.socket)
    outputs = fresh.ask(prompt)
    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == LOADABLE
    expect_nothing_held(sidecar)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_sidecar_killed_in_mid_save_costs_nothing_but_time(bench: Bench, sidecar: SidecarProcess, layer: int) -> None:
    (prompt,) = bench.prompts(PROMPT_TOKENS, seed=13)
    killed = threading.Event()

    def kill(way: str, number: int) -> None:
        if (way, number) == ("out", layer * 8 + 4):
            sidecar.kill()
            killed.set()

    engine = bench.engine(sidecar.socket, layerwise=True, before=kill)

    bench.expect_same(engine.ask(prompt), prompt)

    assert killed.is_set()
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(prompt), prompt)
    outputs = bench.engine(sidecar.socket, layerwise=True).ask(prompt)
    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == LOADABLE
    expect_nothing_held(sidecar)
