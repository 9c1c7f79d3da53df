"""What does it buy to prefill in one process and decode in another? Time to first token and between tokens, the prompts handed
over through the store, against one process that does both with the same number of threads.

All three engines are there all the time, on one sidecar; rounds of the two set-ups take turns, each with prompts never seen
before. A round keeps `in_flight` requests going: when one ends, the next one comes. The first token is the prefill
engine's, handed out at once; the decode engine gets the request when its prompt has been saved.
"""

import contextlib
import math
import multiprocessing
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.harness import Report, Row, at_most, machine_card, millis, show
from benchmarks.sidecar import running_sidecar
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector
from kvstore.engine_connector.protocol import HandOver
from kvstore.models import find_model

QUESTION = "Prefill and decode in two processes against one that does both"
ARENA_BYTES = 256 << 20
SEED = 6
GOAL = 0.5
_START_DEADLINE_S = 120.0
_QUIET_DEADLINE_S = 120.0
_STOP_DEADLINE_S = 20.0


class Job(NamedTuple):
    """To an engine."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    first_token_ids: tuple[int, ...] = ()


class Token(NamedTuple):
    """From an engine: one token, at that time of the monotonic clock, which all processes share."""

    request_id: str
    token_id: int
    time_s: float


class Done(NamedTuple):
    """From an engine: the request has ended, and what it saved can be found by others."""

    request_id: str
    num_prefilled_tokens: int


@dataclass
class Timeline:
    """One request, as its user sees it."""

    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_prefilled_by_decode: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class EngineProcess:
    """An engine in a process of its own, fed through a pipe."""

    def __init__(self, model: Path, socket: Path, *, hand_over: HandOver | None, num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads half
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, model, str(socket), hand_over, num_threads), daemon=True
        )
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """The model is loaded."""
        if not self.pipe.poll(_START_DEADLINE_S):
            raise TimeoutError(f"an engine was not ready within {_START_DEADLINE_S:.0f} s")
        self.pipe.recv()

    def close(self) -> None:
        """Let it end by itself, at most _STOP_DEADLINE_S long."""
        with contextlib.suppress(BrokenPipeError):  # it has died; join says so at once
            self.pipe.send(None)
        self._process.join(_STOP_DEADLINE_S)
        self._process.kill()
        self.pipe.close()


def serve(pipe: Connection, model: Path, socket: str, hand_over: HandOver | None, num_threads: int) -> None:
    """The engine's process: one step after another as long as there is work, else wait for a job; None ends it.

    A producer takes one prompt at a time: they are computed one after the other anyway, and what a step has filled is saved
    before a next prompt begins, not after it.
    """
    with LLM(
        model,
        connector_factory=lambda spec: open_connector(spec, socket_path=socket, hand_over=hand_over),
        num_threads=num_threads,
    ) as llm:
        pipe.send("ready")
        queue: deque[Job] = deque()
        saving: dict[str, Done] = {}
        while True:
            while pipe.poll(0 if queue or llm.has_unfinished or saving else None):
                job: Job | None = pipe.recv()
                if job is None:
                    return
                queue.append(job)
            while queue and not (hand_over is HandOver.PRODUCER and (llm.has_unfinished or saving)):
                _add(llm, queue.popleft())
            for delta in llm.step():
                assert delta.token_id is not None
                pipe.send(Token(delta.request_id, delta.token_id, time.monotonic()))
                if delta.output is not None:
                    saving[delta.request_id] = Done(delta.request_id, delta.output.num_prefilled_tokens)
            for request_id in [request_id for request_id in saving if not llm.in_use(request_id)]:
                pipe.send(saving.pop(request_id))


def _add(llm: LLM, job: Job) -> None:
    params = SamplingParams(max_tokens=job.max_tokens, ignore_eos=True)
    llm.add_request(job.prompt, params, request_id=job.request_id, first_token_ids=job.first_token_ids)


class Setup(NamedTuple):
    """Where prompts are prefilled, and where tokens are decoded; the same engine does both, or hands over."""

    prefill: EngineProcess
    decode: EngineProcess

    @property
    def hands_over(self) -> bool:
        return self.prefill is not self.decode


def run(
    *,
    model: Path | None = None,
    prompt_tokens: int = 384,
    max_tokens: int = 32,
    in_flight: int = 4,
    requests: int = 6,
    rounds: int = 2,
) -> Report:
    path = find_model(None) if model is None else model
    found: dict[str, list[Timeline]] = {"one process": [], "two processes": []}
    rng = random.Random(SEED)
    vocab_size = _vocab_size(path)
    with running_sidecar(ARENA_BYTES) as socket, _setups(path, socket) as setups:
        for number in range(-1, 2 * rounds):  # the first one warms up
            for name in list(found)[:: 1 if number % 2 else -1]:
                prompts = [[rng.randrange(vocab_size) for _ in range(prompt_tokens + i)] for i in range(requests)]
                timelines = _drive(setups[name], prompts, max_tokens, in_flight, f"{name} {number}")
                found[name] += timelines if number >= 0 else []
    rows = [_row(name, timelines, prompt_tokens) for name, timelines in found.items()]
    one, two = (_gaps(timelines) for timelines in found.values())
    ratio = _percentile(two, 99) / _percentile(one, 99)
    prefilled = sum(timeline.num_prefilled_by_decode for timeline in found["two processes"])
    return Report(
        question=QUESTION,
        command="python -m benchmarks.disaggregation",
        rows=rows,
        goals=[
            at_most("p99 of the time between tokens from the second on, two processes / one", round(ratio, 3), GOAL),
            at_most("prompt tokens that the decode engine prefilled", prefilled, 0),
        ],
        remarks=[
            f"{in_flight} requests in flight, {max_tokens} tokens each; prompts of {prompt_tokens} tokens and a few more",
            "two processes: one thread each; one process: two threads",
            "itl: from the second token on; second: from the first token to the second, which is the hand-over's time",
        ],
    )


@contextlib.contextmanager
def _setups(model: Path, socket: Path) -> Iterator[Mapping[str, Setup]]:
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(contextlib.closing(EngineProcess(model, socket, hand_over=role, num_threads=threads)))
            for role, threads in ((None, 2), (HandOver.PRODUCER, 1), (HandOver.CONSUMER, 1))
        ]
        for engine in engines:
            engine.wait_until_ready()
        both, producer, consumer = engines
        yield {"one process": Setup(both, both), "two processes": Setup(producer, consumer)}


def _drive(setup: Setup, prompts: Sequence[list[int]], max_tokens: int, in_flight: int, label: str) -> list[Timeline]:
    """Answer all prompts, `in_flight` at a time."""
    jobs = [Job(f"{label} {i}", prompt, 1 if setup.hands_over else max_tokens) for i, prompt in enumerate(prompts)]
    timelines: dict[str, Timeline] = {}
    first_tokens: dict[str, int] = {}
    todo, num_ended = list(reversed(jobs)), 0
    while num_ended < len(jobs):
        while todo and len(timelines) - num_ended < in_flight:
            job = todo.pop()
            timelines[job.request_id] = Timeline(time.monotonic())
            setup.prefill.pipe.send(job)
        for engine, news in _news(setup):
            timeline = timelines[news.request_id]
            if isinstance(news, Token):
                timeline.token_times_s.append(news.time_s)
                first_tokens.setdefault(news.request_id, news.token_id)
            elif setup.hands_over and engine is setup.prefill:
                (job,) = (job for job in jobs if job.request_id == news.request_id)
                first = (first_tokens[news.request_id],)
                setup.decode.pipe.send(job._replace(max_tokens=max_tokens, first_token_ids=first))
            else:
                timeline.num_prefilled_by_decode = news.num_prefilled_tokens if setup.hands_over else 0
                num_ended += 1
    assert all(len(timeline.token_times_s) == max_tokens for timeline in timelines.values())
    return list(timelines.values())


def _news(setup: Setup) -> Iterator[tuple[EngineProcess, Token | Done]]:
    """What the engines say next."""
    engines = {engine.pipe: engine for engine in setup}
    ready = wait(list(engines), _QUIET_DEADLINE_S)
    if not ready:
        raise TimeoutError(f"no engine said anything for {_QUIET_DEADLINE_S:.0f} s")
    for pipe in ready:
        assert isinstance(pipe, Connection)
        yield engines[pipe], pipe.recv()


def _vocab_size(model: Path) -> int:
    with LLM(model, num_pages=16) as llm:
        return llm.tokenizer.vocab_size


def _row(name: str, timelines: Sequence[Timeline], prompt_tokens: int) -> Row:
    ttfts = [timeline.ttft_s for timeline in timelines]
    gaps = _gaps(timelines)
    seconds = [timeline.gaps_s[0] for timeline in timelines]
    return {
        "set-up": name,
        "prompt_tokens": prompt_tokens,
        "ttft_p50_ms": millis(statistics.median(ttfts)),
        "ttft_p99_ms": millis(_percentile(ttfts, 99)),
        "itl_p50_ms": millis(statistics.median(gaps)),
        "itl_p99_ms": millis(_percentile(gaps, 99)),
        "itl_max_ms": millis(max(gaps)),
        "second_p50_ms": millis(statistics.median(seconds)),
        "second_max_ms": millis(max(seconds)),
        "n": len(timelines),
    }


def _gaps(timelines: Sequence[Timeline]) -> list[float]:
    """From the second token on: the gap before it is the hand-over's, and has columns of its own."""
    return [gap for timeline in timelines for gap in timeline.gaps_s[1:]]


def _percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--prompt-tokens", default=384, show_default=True)
@click.option("--max-tokens", default=32, show_default=True)
@click.option("--in-flight", default=4, show_default=True)
@click.option("--requests", default=6, show_default=True, help="In a round.")
@click.option("--rounds", default=2, show_default=True, help="Pairs of rounds of each set-up.")
@click.option("--json", "as_json", is_flag=True)
def main(*, as_json: bool, **sizes: Any) -> None:
    card = machine_card()
    show(run(**sizes), card, as_json=as_json)


if __name__ == "__main__":
    main()
