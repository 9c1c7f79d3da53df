"""A benchmark: one workload, one or two servers, and the order in which they are asked."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvstore.bench.api import RequestForm
from kvstore.bench.arrivals import Arrivals
from kvstore.bench.compare import Comparison, compare
from kvstore.bench.composer import Cold, Composer
from kvstore.bench.http_client import HttpClient
from kvstore.bench.incident import COMMAND_DEADLINE_S, Incident, IncidentOutcome, carry_out
from kvstore.bench.measures import Slo, Summary, summarise
from kvstore.bench.runner import Runner
from kvstore.bench.sample import Sample
from kvstore.bench.workload import Conversation, Span, Workload, rounds
from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError

_END_S = 1.0  # for a killed command to be gone


class Target(NamedTuple):
    """A server: what reports call it, its address up to /v1, and body fields for it alone."""

    label: str
    url: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. With two targets and more than one round they take turns, A B, B A, A B, ...: what drifts with time
    touches both alike. `cold_by` is "" (as it comes), "auto" or one of Cold's ways."""

    workload: Workload
    arrivals: Arrivals
    targets: tuple[Target, ...]
    api: str
    model: str = ""
    temperature: float = 0.0
    ignore_eos: bool = False
    token_ids: Span | None = None
    deadline_s: float = 300.0
    connect_deadline_s: float = 5.0
    warmup: int = 1
    rounds: int = 1
    slo: Slo = field(default_factory=dict)
    scenario: str = ""
    cold_by: str = ""
    nonce: str = ""
    incident: Incident | None = None
    api_key: str = ""


@dataclass(slots=True)
class SideResult:
    """Of one target. `incident` is None when there was none to come, or the run ended before its time. `sidecar` is that of
    a kvstore engine, "" when it names none."""

    target: Target
    model: str
    cold_by: str
    samples: list[Sample]
    duration_s: float
    summary: Summary
    incident: IncidentOutcome | None
    sidecar: str = ""


@dataclass(slots=True)
class Result:
    """Of the benchmark; `comparison` is of the second side with the first."""

    plan: Plan
    sides: list[SideResult]
    comparison: Comparison | None


OnSample = Callable[[Target, Sample], None]


async def run_plan(plan: Plan, clock: Clock, on_sample: OnSample) -> Result:
    """Raises PeerUnavailable when a server does not answer at the start, ConfigError when it refuses the kind of request."""
    async with contextlib.AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(_Side(plan, target, clock, on_sample)) for target in plan.targets]
        for side in sides:
            await side.prepare()
        for number, (first, part) in enumerate(_parts(plan)):
            for side in sides if number % 2 == 0 else reversed(sides):
                await side.run(first, part)
    results = [side.result() for side in sides]
    comparison = None
    if len(results) == 2:
        one, other = results
        comparison = compare(one.samples, other.samples, (one.summary, other.summary))
    return Result(plan, results, comparison)


def _parts(plan: Plan) -> list[tuple[int, tuple[Conversation, ...]]]:
    """Each round's conversations, with the place of their first."""
    parts = rounds(plan.workload, plan.rounds)
    return [(part[0].index, part) for part in parts]


class _Side(contextlib.AbstractAsyncContextManager["_Side"]):
    """One target while the plan runs."""

    def __init__(self, plan: Plan, target: Target, clock: Clock, on_sample: OnSample) -> None:
        self._plan, self._target, self._clock, self._on_sample = plan, target, clock, on_sample
        self._client = HttpClient(target.url, clock, api_key=plan.api_key)
        self._model = ""
        self._cold: Cold | None = None
        self._sidecar = ""
        self._samples: list[Sample] = []
        self._duration_s = 0.0
        self._incident: IncidentOutcome | None = None

    async def __aenter__(self) -> "_Side":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    async def prepare(self) -> None:
        """Find the server, its model, how to make it cold; warm up."""
        models = await self._client.models(self._plan.connect_deadline_s)
        self._model = self._choose_model([str(entry["id"]) for entry in models])
        if self._plan.cold_by:
            owner = next((str(entry.get("owned_by")) for entry in models if entry["id"] == self._model), "")
            self._cold = Cold(_cold_by(self._plan.cold_by, owner), self._plan.nonce)
        await self._warm_up()
        for entry in await self._client.models(self._plan.connect_deadline_s):
            if entry["id"] == self._model:
                self._sidecar = str(entry.get("sidecar") or "")  # known from the first request on

    def _choose_model(self, served: list[str]) -> str:
        asked = self._plan.model
        if not asked and not served:
            raise ConfigError(f"model: {self._target.url} lists none; give --model", field="model", value="")
        if asked and served and asked not in served:
            raise ConfigError(
                f"model: {asked!r} is not served at {self._target.url}; use one of {', '.join(served)}",
                field="model",
                value=asked,
            )
        return asked or served[0]

    async def _warm_up(self) -> None:
        """Prompts of the workload's lengths and of another seed. A server that refuses the first will refuse the rest."""
        composer = self._composer(-1 - self._plan.workload.seed)
        for number in range(self._plan.warmup):
            conversation = self._plan.workload.conversations[number % len(self._plan.workload.conversations)]
            body = composer.body(conversation, 0, ())
            exchange = await self._client.ask(self._plan.api, body, self._plan.deadline_s)
            if exchange.failure and exchange.failure.kind in {
                "http_400",
                "http_401",
                "http_403",
                "http_404",
                "http_422",
            }:
                raise ConfigError(
                    f"url: {self._target.url} refused the warm-up request: {exchange.failure.message}",
                    field="url",
                    value=self._target.url,
                )

    def _composer(self, seed: int) -> Composer:
        plan = self._plan
        form = RequestForm(
            api=plan.api,
            model=self._model,
            temperature=plan.temperature,
            seed=plan.workload.seed & 0x7FFFFFFF,
            ignore_eos=plan.ignore_eos,
            extra=self._target.extra,
        )
        return Composer(seed, form, label=self._target.label, token_ids=plan.token_ids, cold=self._cold)

    async def run(self, first: int, conversations: tuple[Conversation, ...]) -> None:
        """One round."""
        plan = self._plan
        runner = Runner(
            self._client,
            self._composer(plan.workload.seed),
            api=plan.api,
            deadline_s=plan.deadline_s,
            clock=self._clock,
            on_sample=lambda sample: self._on_sample(self._target, sample),
        )
        arrivals = plan.arrivals.part(first, len(conversations))
        incident, began_s = self._start_incident(), self._clock.now_s()
        begun = False
        try:
            part = await runner.run(conversations, arrivals, start_s=self._duration_s)
            begun = plan.incident is not None and self._clock.now_s() - began_s >= plan.incident.at_s
        finally:
            self._incident = await _end_incident(incident, begun=begun)
        self._samples += part.samples
        self._duration_s += part.duration_s

    def _start_incident(self) -> asyncio.Task[IncidentOutcome] | None:
        if self._plan.incident is None:
            return None
        outcome = carry_out(self._plan.incident, self._clock, label=self._target.label, url=self._target.url)
        return asyncio.create_task(outcome)

    def result(self) -> SideResult:
        """After the last round."""
        return SideResult(
            target=self._target,
            model=self._model,
            cold_by=self._cold.by if self._cold else "",
            samples=self._samples,
            duration_s=self._duration_s,
            summary=summarise(self._samples, self._duration_s, self._plan.slo),
            incident=self._incident,
            sidecar=self._sidecar,
        )


async def _end_incident(task: asyncio.Task[IncidentOutcome] | None, *, begun: bool) -> IncidentOutcome | None:
    """Its outcome, once the command has ended; None when the run ended before its time or was broken off."""
    if task is None:
        return None
    if not begun:
        task.cancel()
    await asyncio.wait({task}, timeout=COMMAND_DEADLINE_S + _END_S)
    return task.result() if task.done() and not task.cancelled() else None


def _cold_by(wanted: str, owner: str) -> str:
    """Auto: by who the server says owns its model."""
    if wanted != "auto":
        return wanted
    return {"kvstore": "kvstore", "vllm": "cache_salt"}.get(owner, "prefix")
