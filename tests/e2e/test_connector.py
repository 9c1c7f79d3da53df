"""The included engine on a real sidecar over real sockets. Two engines with the store, one without: the same tokens, fewer
prefilled. Then the sidecar is absent, killed, hung, slow, or takes blocks away, at a chosen copy: the same tokens still."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from engines import BLOCK, GREEDY, SMALL, Bench, Engine
from sidecar_process import SidecarProcess, running_sidecar, tool, wait_until

from kvstore.core.limits import CALL_DEADLINE_S
from kvstore.engine_connector import open_load, worker_side
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 201
LOADABLE = 200  # full blocks before the last token


@pytest.fixture
def prompt(bench: Bench) -> list[int]:
    return bench.prompts(PROMPT_TOKENS)[0]


def expect_nothing_held(sidecar: SidecarProcess) -> None:
    """No lease, nothing being written, nothing in limbo."""
    with tool(sidecar) as client:
        stats = client.stats()
    tier = stats.tiers[0]
    assert (stats.num_leases, tier.writing_bytes, tier.leaving_bytes, tier.limbo_bytes) == (0, 0, 0, 0)


def expect_shared(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    """The store has the prompt: an engine that starts now fetches all that can be fetched."""
    fresh = bench.engine(sidecar.socket)
    outputs = fresh.ask(prompt)
    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert outputs[0].num_prefilled_tokens == len(prompt) - outputs[0].num_fetched_tokens


# --- the main job --------------------------------------------------------------------------------------------------------


def test_what_one_engine_prefilled_another_fetches(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    a, b = bench.engine(sidecar.socket), bench.engine(sidecar.socket)

    cold, warm = a.ask(prompt), b.ask(prompt)

    assert (cold[0].num_prefilled_tokens, cold[0].num_fetched_tokens) == (PROMPT_TOKENS, 0)
    assert (warm[0].num_prefilled_tokens, warm[0].num_fetched_tokens) == (PROMPT_TOKENS - LOADABLE, LOADABLE)
    for outputs in (cold, warm):
        bench.expect_same(outputs, prompt)
    expect_nothing_held(sidecar)


def test_batches_share_what_they_have_in_common(bench: Bench, sidecar: SidecarProcess) -> None:
    document, *tails = bench.prompts(120, 1, 3, 4, 17, 40, seed=1)
    prompts = [document + tail for tail in tails]
    a, b = bench.engine(sidecar.socket), bench.engine(sidecar.socket)
    a.ask(document + document[:5])

    outputs = b.ask(*prompts)

    bench.expect_same(outputs, *prompts)
    for output in outputs:
        assert output.num_fetched_tokens + output.num_local_cached_tokens >= len(document)
    expect_nothing_held(sidecar)


def test_an_answer_is_fetched_as_part_of_the_next_turn(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    a, b = bench.engine(sidecar.socket), bench.engine(sidecar.socket)
    (first,) = a.ask(prompt)
    turn = [*prompt, *first.token_ids, 7, 8, 9]

    outputs = b.ask(turn)

    bench.expect_same(outputs, turn)
    # The last token an answer ends with has never been computed, so its block was not full in the pages.
    assert outputs[0].num_fetched_tokens == (len(prompt) + len(first.token_ids) - 1) // BLOCK * BLOCK


def test_the_connector_that_users_open_does_the_same(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    bench.engine(sidecar.socket).ask(prompt)

    with LLM(
        bench.model,
        connector_factory=lambda spec: open_connector(spec, socket_path=str(sidecar.socket), fetch="always"),
        **SMALL,
    ) as llm:
        outputs = llm.generate([prompt], GREEDY)

    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == LOADABLE


def test_other_weights_share_nothing(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    bench.engine(sidecar.socket).ask(prompt)

    (output,) = bench.engine(sidecar.socket, hash_seed="another").ask(prompt)

    assert output.num_fetched_tokens == 0


# --- a sidecar that is not there -----------------------------------------------------------------------------------------


def test_an_engine_starts_without_a_sidecar_and_uses_it_once_it_is_there(
    bench: Bench, tmp_path: Path, prompt: list[int]
) -> None:
    engine = bench.engine(tmp_path / "kvstore.sock")
    bench.expect_same(engine.ask(prompt), prompt)

    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        wait_until(lambda: engine.session.link, "connected")
        bench.expect_same(engine.ask(prompt), prompt)

        expect_shared(bench, sidecar, prompt)
        expect_nothing_held(sidecar)


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("at", [1, 20])
def test_a_sidecar_killed_at_a_copy_costs_nothing_but_time(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], way: str, at: int
) -> None:
    """kill -9 in the middle of a load or a save, restart, and the store fills again from the engine's own pages."""
    killed = threading.Event()

    def kill(copied: str, number: int) -> None:
        if (copied, number) == (way, at) and not killed.is_set():
            sidecar.kill()
            killed.set()

    if way == "in":
        bench.engine(sidecar.socket).ask(prompt)
    engine = bench.engine(sidecar.socket, before=kill)

    bench.expect_same(engine.ask(prompt), prompt)

    assert killed.is_set()
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(prompt), prompt)
    expect_shared(bench, sidecar, prompt)
    expect_nothing_held(sidecar)


def test_a_sidecar_restarted_during_a_request_is_offered_all_its_blocks(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    engine = bench.engine(sidecar.socket)
    request_id = engine.llm.add_request(prompt, GREEDY)
    for _ in range(3):
        engine.llm.step()
    sidecar.kill()
    engine.llm.step()
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")

    outputs = run_to_end(engine, request_id)

    bench.expect_same(outputs, prompt)
    expect_shared(bench, sidecar, prompt)
    expect_nothing_held(sidecar)


def run_to_end(engine: Engine, request_id: str) -> list:
    outputs = []
    while engine.llm.has_unfinished:
        outputs += [d.output for d in engine.llm.step() if d.output is not None and d.request_id == request_id]
    assert engine.llm.drain(10.0)
    engine.check()
    return outputs


# --- a sidecar that hangs or is slow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "loading", "saving"])
def test_a_hung_sidecar_costs_one_deadline(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], moment: str
) -> None:
    bench.engine(sidecar.socket).ask(prompt)
    other = bench.prompts(PROMPT_TOKENS, seed=5)[0]
    asked = other if moment == "saving" else prompt
    hung = threading.Event()

    def hang(way: str, number: int) -> None:
        if way == {"loading": "in", "saving": "out"}.get(moment) and number == 3:
            stop()

    def stop() -> None:
        os.kill(sidecar.pid, signal.SIGSTOP)
        hung.set()

    engine = bench.engine(sidecar.socket, before=hang, call_deadline_s=CALL_DEADLINE_S)
    calls: list[float] = []
    ask = engine.session.ask

    def timed_ask(link, call):
        started_s = time.monotonic()
        try:
            return ask(link, call)
        finally:
            calls.append(time.monotonic() - started_s)

    engine.session.ask = timed_ask
    try:
        if moment == "before":
            stop()
        outputs = engine.ask(asked)
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)

    assert hung.is_set()
    bench.expect_same(outputs, asked)
    waited = [seconds for seconds in calls if seconds > CALL_DEADLINE_S / 2]
    assert len(waited) <= 1, "the breaker opens at the first call without an answer"
    assert sum(waited) < CALL_DEADLINE_S + 1.0
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(asked), asked)
    expect_shared(bench, sidecar, asked)
    expect_nothing_held(sidecar)


def test_a_slow_sidecar_changes_nothing_but_time(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    """Stopped for 30 of every 40 ms: answers come late, but within a call's deadline."""
    a, b = bench.engine(sidecar.socket), bench.engine(sidecar.socket)
    done = threading.Event()

    def slow_down() -> None:
        while not done.is_set():
            os.kill(sidecar.pid, signal.SIGSTOP)
            done.wait(0.03)
            os.kill(sidecar.pid, signal.SIGCONT)
            done.wait(0.01)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        cold, warm = a.ask(prompt), b.ask(prompt)
    finally:
        done.set()
        thread.join()

    for outputs in (cold, warm):
        bench.expect_same(outputs, prompt)
    assert warm[0].num_fetched_tokens == LOADABLE
    expect_nothing_held(sidecar)


# --- loads that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [1, 2, 30, LOADABLE // BLOCK])
def test_from_the_first_block_that_fails_on_the_engine_recomputes(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    bench.engine(sidecar.socket).ask(prompt)
    num_in, is_current = [0], open_load.is_current

    def count(way: str, number: int) -> None:
        num_in[0] = number if way == "in" else 0

    monkeypatch.setattr(open_load, "is_current", lambda *args: is_current(*args) and num_in[0] != failing)
    engine = bench.engine(sidecar.socket, before=count)

    (output,) = engine.ask(prompt)

    bench.expect_same([output], prompt)
    assert output.num_fetched_tokens == (failing - 1) * BLOCK
    assert output.num_prefilled_tokens == PROMPT_TOKENS - output.num_fetched_tokens
    expect_nothing_held(sidecar)


def test_a_load_that_raises_is_recomputed_whole(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    bench.engine(sidecar.socket).ask(prompt)

    def fail(way: str, number: int) -> None:
        if (way, number) == ("in", 7):
            raise OSError("a page that cannot be copied")

    (output,) = bench.engine(sidecar.socket, before=fail).ask(prompt)

    bench.expect_same([output], prompt)
    assert (output.num_fetched_tokens, output.num_prefilled_tokens) == (0, PROMPT_TOKENS)
    expect_nothing_held(sidecar)


def test_blocks_dropped_while_they_are_loaded_stay_readable(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    """I4: a leased block keeps its bytes, whatever happens to it in the index."""
    first = bench.engine(sidecar.socket)
    first.ask(prompt)
    namespace = first.session.link.namespace
    num_dropped = []

    def drop(way: str, number: int) -> None:
        if (way, number) == ("in", 5):
            with tool(sidecar) as client:
                num_dropped.append(client.drop(namespace))

    (output,) = bench.engine(sidecar.socket, before=drop).ask(prompt)

    bench.expect_same([output], prompt)
    assert output.num_fetched_tokens == LOADABLE
    assert num_dropped[0] >= LOADABLE // BLOCK
    expect_nothing_held(sidecar)


# --- requests that do not run through ----------------------------------------------------------------------------------------


def test_an_abort_while_loading_waits_for_the_copy_and_leaks_nothing(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int]
) -> None:
    bench.engine(sidecar.socket).ask(prompt)
    reached, go_on = threading.Event(), threading.Event()

    def hold(way: str, number: int) -> None:
        if (way, number) == ("in", 3):
            reached.set()
            assert go_on.wait(10.0)

    engine = bench.engine(sidecar.socket, before=hold)
    request_id = engine.llm.add_request(prompt, GREEDY)
    engine.llm.step()
    assert reached.wait(10.0)

    engine.llm.abort(request_id)

    engine.llm.check()
    assert engine.llm.is_draining, "the copy still writes its pages"
    go_on.set()
    assert engine.llm.drain(10.0)
    engine.check()
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_step_leaks_nothing(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], steps: int
) -> None:
    bench.engine(sidecar.socket).ask(prompt[:101])
    engine = bench.engine(sidecar.socket)
    request_id = engine.llm.add_request(prompt, GREEDY)
    for _ in range(steps):
        engine.llm.step()

    engine.llm.abort(request_id)

    assert engine.llm.drain(10.0)
    engine.check()
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)


def test_preemption_while_saves_are_under_way_saves_no_wrong_byte(bench: Bench, sidecar: SidecarProcess) -> None:
    """Pages run out in decode, with every copy slowed down, so that preempted requests have saves under way."""
    prompts = bench.prompts(60, 61, 62, 63, seed=2)
    long = SamplingParams(max_tokens=60, ignore_eos=True)

    def slow(way: str, number: int) -> None:
        time.sleep(0.002)

    engine = bench.engine(sidecar.socket, before=slow, num_pages=80)

    outputs = engine.ask(*prompts, params=long)

    assert sum(output.num_preemptions for output in outputs) > 0
    bench.expect_same(outputs, *prompts, params=long)
    turns = [[*prompt, *output.token_ids, 5] for prompt, output in zip(prompts, outputs, strict=True)]
    fetched = bench.engine(sidecar.socket).ask(*turns)
    bench.expect_same(fetched, *turns)
    assert sum(output.num_fetched_tokens for output in fetched) > 4 * 60
    expect_nothing_held(sidecar)


def test_a_save_that_outlasts_a_preemption_is_not_published(
    bench: Bench, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for saves gives up at once: their pages are overwritten while they copy, and none of it may be found."""
    monkeypatch.setattr(worker_side, "PREEMPTION_DEADLINE_S", 0.0)
    prompts = bench.prompts(60, 61, 62, 63, seed=3)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    engine = bench.engine(sidecar.socket, before=lambda way, number: time.sleep(0.005), num_pages=80)

    outputs = engine.ask(*prompts, params=long)

    assert sum(output.num_preemptions for output in outputs) > 0
    bench.expect_same(outputs, *prompts, params=long)
    turns = [[*prompt, *output.token_ids, 5] for prompt, output in zip(prompts, outputs, strict=True)]
    bench.expect_same(bench.engine(sidecar.socket).ask(*turns), *turns)
    expect_nothing_held(sidecar)


def test_an_arena_smaller_than_the_work_costs_hits_and_nothing_else(bench: Bench, tmp_path: Path) -> None:
    """256 slots; each engine runs some 400 blocks through them."""
    prompts = bench.prompts(*[200] * 8, seed=4)
    with running_sidecar(tmp_path, "--no-grpc", arena="1MiB") as sidecar:
        a, b = bench.engine(sidecar.socket, num_pages=256), bench.engine(sidecar.socket, num_pages=256)

        for engine in (a, b):
            bench.expect_same(engine.ask(*prompts), *prompts)

        expect_nothing_held(sidecar)


def wake_up(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # killed in its sleep
        os.kill(pid, signal.SIGCONT)


def test_ten_random_misfortunes_under_load_change_no_token(bench: Bench, sidecar: SidecarProcess) -> None:
    """kill -9 with restart, or a hang of up to 0.4 s, at ten random moments while two engines work through shared prefixes."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    documents = bench.prompts(150, 170, 190, seed=seed)
    tails = bench.prompts(*[30] * 6, seed=seed + 1)
    num_copies, due = [0], [rng.randrange(1, 60)]
    misfortunes: list[str] = []

    def strike(way: str, number: int) -> None:
        num_copies[0] += 1
        if num_copies[0] != due[0] or len(misfortunes) == 10:
            return
        due[0] += rng.randrange(1, 120)
        misfortunes.append(rng.choice(("kill", "hang")))
        if misfortunes[-1] == "kill":
            sidecar.kill()
            sidecar.spawn()
        else:
            os.kill(sidecar.pid, signal.SIGSTOP)
            threading.Timer(rng.uniform(0.0, 0.4), wake_up, (sidecar.pid,)).start()

    engines = [bench.engine(sidecar.socket, before=strike, call_deadline_s=CALL_DEADLINE_S) for _ in range(2)]
    until_s = time.monotonic() + 60.0
    while len(misfortunes) < 10:
        assert time.monotonic() < until_s, misfortunes
        prompts = [rng.choice(documents)[: rng.randrange(1, 150)] + rng.choice(tails) for _ in range(3)]
        engine = rng.choice(engines)
        engine.llm.reset_prefix_cache()
        bench.expect_same(engine.ask(*prompts), *prompts)

    os.kill(sidecar.pid, signal.SIGCONT)
    for engine in engines:
        wait_until(lambda engine=engine: engine.session.link, "reconnected", 20.0)
        bench.expect_same(engine.ask(documents[0]), documents[0])
    expect_shared(bench, sidecar, documents[0])
    expect_nothing_held(sidecar)
