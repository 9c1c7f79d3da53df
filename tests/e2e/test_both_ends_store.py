"""Loads from both ends on a real sidecar: the same tokens, wherever front and back meet and whatever happens to the sidecar.
The plans are the test's; what a sidecar plans is not the question here."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from engines import BLOCK, GREEDY, Bench, Engine, SplitEngine
from sidecar_process import SidecarProcess, tool, wait_until

from kvstore.client import Client
from kvstore.core.plans import FetchPlan, Match, MatchWish
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sequence import FinishReason
from kvstore.engine_connector.protocol import FetchPolicy
from kvstore.engine_connector.session import StoreSession

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 203
LOADABLE = 200  # full blocks before the last token
NUM_BLOCKS = LOADABLE // BLOCK


class PlanningClient(Client):
    """For each match a plan to fill all of it from both ends."""

    def match(
        self, namespace: bytes, keys: Sequence[bytes] | bytes, wish: MatchWish | None = None, **named: str
    ) -> Match:
        match = super().match(namespace, keys, wish, **named)
        assert wish is not None
        assert wish.both_ends
        num_blocks = max(0, match.num_blocks - wish.first_needed)
        plan = FetchPlan(num_blocks, num_blocks > 1, num_blocks // 2, 1.0, 1.0, 0.5, 2.0, "for a test")
        return match._replace(plan=plan)

    def report(self, namespace: bytes, **speeds: Any) -> None:
        assert speeds["prefill"] or speeds["copy_nbytes"]


class _Planned(Engine):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, fetch=FetchPolicy.PLANNED, **settings)

    def _open_session(self, **hello: Any) -> StoreSession:
        client = PlanningClient(
            str(self._socket), call_deadline_s=self._call_deadline_s, connect_deadline_s=5.0, **hello
        )
        session = StoreSession(client, backoff_s=(0.01, 0.05))
        session.start()
        return session


class PlannedEngine(_Planned):
    pass


class PlannedSplitEngine(_Planned, SplitEngine):
    pass


@pytest.fixture
def prompt(bench: Bench, sidecar: SidecarProcess) -> list[int]:
    """The store has it."""
    (prompt,) = bench.prompts(PROMPT_TOKENS, seed=9)
    bench.engine(sidecar.socket).ask(prompt)
    return prompt


def expect_nothing_held(sidecar: SidecarProcess) -> None:
    with tool(sidecar) as client:
        stats = client.stats()
    tier = stats.tiers[0]
    assert (stats.num_leases, tier.writing_bytes, tier.leaving_bytes, tier.limbo_bytes) == (0, 0, 0, 0)


def expect_all_filled(engine: Engine, output: RequestOutput) -> None:
    total = engine.llm.stats().total
    assert total.filled_front + total.filled_back == LOADABLE
    assert output.num_fetched_tokens == total.filled_back
    assert output.num_fetched_tokens + output.num_prefilled_tokens == PROMPT_TOKENS


@pytest.mark.parametrize("made_by", [PlannedEngine, PlannedSplitEngine])
@pytest.mark.parametrize("pause_s", [0.0, 0.001, 0.02])
def test_front_and_back_meet(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], made_by: type[Engine], pause_s: float
) -> None:
    engine = bench.engine(sidecar.socket, made_by=made_by, before=lambda way, number: time.sleep(pause_s))

    outputs = engine.ask(prompt)

    bench.expect_same(outputs, prompt)
    expect_all_filled(engine, outputs[0])
    assert pause_s == 0.0 or engine.llm.stats().total.filled_front > 0
    expect_nothing_held(sidecar)


@pytest.mark.parametrize("number", [1, 7, 20])
def test_a_copy_that_hangs_holds_up_no_more_than_its_own_block(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], number: int
) -> None:
    gate = threading.Event()

    def hang(way: str, copy: int) -> None:
        if (way, copy) == ("in", number):
            assert gate.wait(10.0)

    engine = bench.engine(sidecar.socket, made_by=PlannedEngine, before=hang)
    engine.llm.add_request(prompt, GREEDY)
    while engine.llm.stats().total.filled_front < (NUM_BLOCKS - number) * BLOCK:
        engine.llm.step()
    assert engine.llm.stats().num_loading == 1
    gate.set()
    outputs = run_to_end(engine)

    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == number * BLOCK
    expect_nothing_held(sidecar)


def run_to_end(engine: Engine) -> list[RequestOutput]:
    outputs = []
    while engine.llm.has_unfinished:
        outputs += [delta.output for delta in engine.llm.step() if delta.output is not None]
    assert engine.llm.drain(10.0)
    engine.check()
    return outputs


@pytest.mark.parametrize("number", [1, 20])
def test_a_sidecar_killed_in_mid_fill_costs_nothing_but_time(
    bench: Bench, sidecar: SidecarProcess, prompt: list[int], number: int
) -> None:
    killed = threading.Event()

    def kill(way: str, copy: int) -> None:
        if (way, copy) == ("in", number) and not killed.is_set():
            sidecar.kill()
            killed.set()

    engine = bench.engine(sidecar.socket, made_by=PlannedEngine, before=kill)

    bench.expect_same(engine.ask(prompt), prompt)

    assert killed.is_set()
    sidecar.start()
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)


def test_what_the_front_computed_is_saved_in_the_end(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    """The sidecar comes back empty in mid-fill, and has all of it afterwards."""
    killed = threading.Event()

    def kill(way: str, copy: int) -> None:
        if (way, copy) == ("in", 5) and not killed.is_set():
            sidecar.kill()
            sidecar.start()
            killed.set()

    engine = bench.engine(sidecar.socket, made_by=PlannedEngine, before=kill)
    bench.expect_same(engine.ask(prompt), prompt)
    wait_until(lambda: engine.session.link, "reconnected")
    bench.expect_same(engine.ask(prompt), prompt)

    outputs = bench.engine(sidecar.socket).ask(prompt)

    bench.expect_same(outputs, prompt)
    assert outputs[0].num_fetched_tokens == LOADABLE
    expect_nothing_held(sidecar)


def test_an_abort_in_mid_fill_gives_the_lease_back(bench: Bench, sidecar: SidecarProcess, prompt: list[int]) -> None:
    gate = threading.Event()
    engine = bench.engine(sidecar.socket, made_by=PlannedEngine, before=lambda way, _: way == "out" or gate.wait(10.0))
    engine.llm.add_request(prompt, GREEDY, request_id="r")
    for _ in range(3):
        engine.llm.step()

    output = engine.llm.abort("r")

    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert engine.llm.is_draining
    gate.set()
    assert engine.llm.drain(10.0)
    bench.expect_same(engine.ask(prompt), prompt)
    expect_nothing_held(sidecar)
