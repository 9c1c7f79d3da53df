"""A tier that stops after the plan was made: it costs a request its deadline at most, and the next one does without it until it
goes again. The engine computes slowly here, so that fetching is what a planner chooses."""

import contextlib
import dataclasses
import math
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drive import Drive, wait_until_durable, wait_until_recovered
from engines import BLOCK, Bench, Engine
from sidecar_process import SidecarProcess, connected, tool, wait_until

from kvstore.client import Client
from kvstore.core.plans import FetchPlan, Match, MatchWish
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.protocol import FetchPolicy
from kvstore.engine_connector.session import StoreSession

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.paced_file import Pace

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 401
LOADABLE = 400
STEP_S = 0.04  # of computing 32 tokens: a prompt takes half a second
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
SLACK_S = 0.5  # of a busy machine


class PacedSidecar(SidecarProcess):
    """Its drive reads at the pace that `pace` has."""

    def __init__(self, folder: Path, drive: Drive) -> None:
        super().__init__(folder / "kvstore.sock")
        self.pace = Pace.create(folder / "pace")
        self._command[self._command.index("kvstore.cli.main") : self._command.index("--socket")] = [
            "benchmarks.paced_sidecar"
        ]
        self._command += ["--nvme", str(drive.path), "--nvme-bytes", drive.size, "--pace-file", str(folder / "pace")]


class StallingClient(Client):
    """Stops the drive as soon as the next plan is made."""

    pace: Pace | None = None
    plans: list[FetchPlan]

    def match(
        self, namespace: bytes, keys: Sequence[bytes] | bytes, wish: MatchWish | None = None, **named: str
    ) -> Match:
        match = super().match(namespace, keys, wish, **named)
        assert match.plan is not None
        self.plans.append(match.plan)
        if self.pace is not None:
            self.pace.set(0.0)
            self.pace = None
        return match


class SlowEngine(Engine):
    """It follows plans, and takes STEP_S for a step at least."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, fetch=FetchPolicy.PLANNED, **settings)
        execute = self.llm._runner.execute

        def slow(step: Any, **kwargs: Any) -> Any:
            if step.chunks:
                time.sleep(STEP_S)
            return execute(step, **kwargs)

        self.llm._runner.execute = slow  # type: ignore[method-assign]

    def _open_session(self, **hello: Any) -> StoreSession:
        self.client = StallingClient(str(self._socket), call_deadline_s=5.0, connect_deadline_s=5.0, **hello)
        self.client.plans = []
        session = StoreSession(self.client, backoff_s=(0.01, 0.05))
        session.start()
        return session

    def ask_for(self, prompt: list[int]) -> "Answer":
        """Of an engine whose own pages are empty."""
        self.llm.reset_prefix_cache()
        self.client.plans.clear()
        (output,) = self.ask(prompt, params=ONE)
        assert output.ttft_s is not None
        return Answer(output, output.ttft_s, self.client.plans[0])


class Answer(NamedTuple):
    output: RequestOutput
    ttft_s: float
    plan: FetchPlan


class House(NamedTuple):
    """Prompts that are on the drive and nowhere else, and an engine that knows what it costs to compute them and to fetch."""

    sidecar: PacedSidecar
    engine: SlowEngine
    prompts: list[list[int]]
    compute_s: float

    def evict(self) -> None:
        """Take the arena for others, and give it back, until no prompt is in it."""
        spec = self.engine.llm.spec
        with connected(self.sidecar, spec=dataclasses.replace(spec, weights="others")) as others:
            (info,) = others.namespaces
            keys = [uuid.uuid4().bytes for _ in range(4096)]

            def gone() -> bool:
                grant = others.reserve(uuid.uuid4().hex, info.namespace, keys)
                if grant.lease_id:
                    others.abort(grant.lease_id)
                with connected(self.sidecar, spec=spec) as client:
                    tiers = [
                        client.match(client.namespaces[0].namespace, self.keys(each)).tiers for each in self.prompts
                    ]
                return all(set(found) == {1} and len(found) == LOADABLE // BLOCK for found in tiers)

            wait_until(gone, "on the drive alone", 20.0)

    def keys(self, prompt: list[int]) -> list[bytes]:
        return self.engine.llm.spec.hash.hash_blocks(prompt)


@pytest.fixture(params=[True, False], ids=["both ends", "prefix"])
def house(bench: Bench, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[House]:
    drive = Drive(tmp_path / "drive")
    sidecar = PacedSidecar(tmp_path, drive)
    with contextlib.ExitStack() as stack:
        stack.callback(sidecar.stop)
        sidecar.start()
        wait_until_recovered(sidecar)
        prompts = bench.prompts(*[PROMPT_TOKENS] * 3, seed=21)
        bench.engine(sidecar.socket).ask(*prompts)
        wait_until_durable(sidecar, drive)
        engine = bench.engine(sidecar.socket, made_by=SlowEngine, both_ends=request.param)
        house = House(sidecar, engine, prompts, learn_to_compute(engine, bench))
        house.evict()
        found = engine.ask_for(prompts[0])
        assert found.output.num_fetched_tokens == LOADABLE, found.plan
        house.evict()
        yield house
        sidecar.pace.set(math.inf)


def learn_to_compute(engine: SlowEngine, bench: Bench) -> float:
    """Until plans rest on what was measured; engines report once a second. The seconds of a prompt."""
    until_s = time.monotonic() + 20.0
    for fresh in bench.prompts(*[PROMPT_TOKENS] * 40, seed=22):
        answer = engine.ask_for(fresh)
        assert answer.output.num_fetched_tokens == 0
        if answer.plan.recompute_s:
            return answer.ttft_s
        assert time.monotonic() < until_s, answer.plan
    raise AssertionError(answer.plan)


def test_a_tier_that_stops_costs_one_request_its_deadline_and_is_used_again_when_it_goes(
    bench: Bench, house: House
) -> None:
    """Reads that hang in it come at last; that is news, and nobody has to try it."""
    engine, (_, prompt, other) = house.engine, house.prompts
    pace = engine.client.pace = house.sidecar.pace

    stalled = engine.ask_for(prompt)
    assert pace.get() == 0.0
    following = engine.ask_for(other)

    bench.expect_same([stalled.output, following.output], prompt, other, params=ONE)
    assert stalled.plan.num_blocks == LOADABLE // BLOCK, stalled.plan
    assert stalled.output.num_fetched_tokens == 0
    assert stalled.ttft_s < stalled.plan.deadline_s + house.compute_s + SLACK_S
    assert following.plan.num_blocks == 0
    assert following.ttft_s < house.compute_s + SLACK_S
    with tool(house.sidecar) as client:
        plans = client.explain(last=2)
    assert [plan.plan.num_blocks for plan in plans] == [0, LOADABLE // BLOCK]
    assert "nvme does not answer" in plans[0].words
    assert plans[1].outcome in {"failed", "cancelled"}

    pace.set(math.inf)

    until_s = time.monotonic() + 20.0
    while not (again := engine.ask_for(other)).output.num_fetched_tokens:
        assert time.monotonic() < until_s, again.plan
    assert again.output.num_fetched_tokens == LOADABLE
