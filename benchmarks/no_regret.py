"""Does planning ever cost a request more than the better of always fetching and never fetching? Time to first token, measured
with a real engine and model, over a drive whose reads pass a link of a bandwidth that we set.

Three engines that differ in their fetch policy alone take turns on one sidecar. Before each run the prompt's prefix lies on the
drive and nowhere else: the sidecar's memory was taken by others meanwhile, and the engine's own pages are forgotten. An arm
that takes three times as long as the best so far is hopeless: its request is aborted, and that time stands for it. In some
points the bandwidth changes tenfold while the request is under way, in all arms alike; before each of their runs the old
bandwidth is measured again by a fetch that does not count.
"""

import contextlib
import dataclasses
import math
import random
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.harness import Goal, Report, Row, at_most, machine_card, millis, show
from benchmarks.paced_file import Pace
from benchmarks.paced_sidecar import running_paced_sidecar
from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.client import Client
from kvstore.core.blocks import slot_nbytes
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.outputs import RequestOutput
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector
from kvstore.engine_connector.protocol import CacheOptions
from kvstore.models import find_model
from kvstore.proto.kvstore_pb2 import BOTH

QUESTION = "Fetch or recompute: planned, always, never"
SEED = 3
GOAL = 1.15
HOPELESS = 3.0
ARMS = ("always", "never", "planned")
PACES = (3e6, 10e6, 30e6, 100e6, math.inf)
CHANGES = ((30e6, 3e6), (3e6, 30e6))
CHANGE_AFTER = (
    0.3  # of the time that fetching would take as it was, or a tenth of what computing takes if that is sooner
)
LEARN_TOKENS = 512  # of the prompt that is fetched to measure a bandwidth
CHUNK_TOKENS = 256  # of a step: on two cores half a second
MIDDLE = 3.0  # always and never differ by less: there doing both at once must pay
ALL_OF_IT_DEADLINE_S = 60.0
_CALL_DEADLINE_S = 10.0
_POLL_S = 0.02
_ANSWER = SamplingParams(max_tokens=1, ignore_eos=True)
_READ_ONLY = RequestOptions(cache=CacheOptions(no_store=True))


class Point(NamedTuple):
    """What is the same for all arms."""

    context: int  # tokens of the prompt
    bytes_per_s: float
    then_bytes_per_s: float | None = None

    @property
    def bandwidth(self) -> str:
        """In words."""
        before, after = _in_words(self.bytes_per_s), self.then_bytes_per_s
        return before if after is None else f"{before}, then {_in_words(after)}"


class Run(NamedTuple):
    """One request."""

    ttft_s: float
    num_fetched: int  # tokens
    hopeless: bool


@dataclass
class Runs:
    """Of one point, by arm."""

    by_arm: dict[str, list[Run]] = field(default_factory=lambda: {arm: [] for arm in ARMS})

    def median_s(self, arm: str) -> float:
        return statistics.median(run.ttft_s for run in self.by_arm[arm])

    @property
    def best_s(self) -> float:
        """The least median so far."""
        return min(self.median_s(arm) for arm, runs in self.by_arm.items() if runs)

    @property
    def better_s(self) -> float:
        """Of the two that plan nothing."""
        return min(self.median_s("always"), self.median_s("never"))

    @property
    def ratio(self) -> float:
        return self.median_s("planned") / self.better_s

    @property
    def spread(self) -> float:
        """How far the two are apart: 1, they take the same time."""
        return max(self.median_s("always"), self.median_s("never")) / self.better_s


class House:
    """The sidecar, the engines by arm, and the prompts, whose prefixes are on the drive."""

    def __init__(
        self, engines: Mapping[str, LLM], evictor: Client, pace: Pace, *, arena_nbytes: int, learn_tokens: int
    ) -> None:
        self.engines = engines
        self.pace = pace
        self._learn_tokens = learn_tokens
        self._evictor = evictor
        self._rng = random.Random(SEED)
        self._prompts: dict[int, list[int]] = {}
        self._spec = engines["never"].spec
        self._fillers = [uuid.uuid4().bytes for _ in range(arena_nbytes // slot_nbytes(self._spec.block_nbytes))]
        self.compute_s: dict[int, float] = {}

    def store(self, contexts: Sequence[int]) -> None:
        """Compute each prompt once, and wait until its prefix is on the drive; this is how long computing takes."""
        for context in sorted({self._learn_tokens, *contexts}):
            prompt = self._prompts[context] = self._fresh(context)
            (output,) = self.engines["never"].generate([prompt], _ANSWER)
            assert output.ttft_s is not None
            self.compute_s[context] = output.ttft_s
            self.evict(context)

    def warm_up(self) -> None:
        """Each engine computes something that nobody has, so that what its steps take is known."""
        for llm in self.engines.values():
            llm.generate([self._fresh(2 * self._learn_tokens)], _ANSWER, options=_READ_ONLY)

    def learn(self) -> None:
        """Fetch something, so that the tier's present bandwidth is known."""
        self.run("always", Point(self._learn_tokens, self.pace.get()), math.inf)

    def run(self, arm: str, point: Point, patience_s: float) -> Run:
        """One request of an engine whose pages are empty, its prefix on the drive alone."""
        llm, prompt = self.engines[arm], self._prompts[point.context]
        self.evict(point.context)
        llm.reset_prefix_cache()
        self.pace.set(point.bytes_per_s)
        change = threading.Timer(self._change_after_s(point), partial(self._change_to, point))
        try:
            began_s = time.perf_counter()
            request_id = llm.add_request(prompt, _ANSWER, options=_READ_ONLY)
            change.start()
            output = _first_output(llm, request_id, began_s + patience_s)
            ttft_s = time.perf_counter() - began_s
        finally:
            change.cancel()
            change.join()
        llm.drain(_CALL_DEADLINE_S)
        if output is None:
            return Run(max(ttft_s, patience_s), 0, hopeless=True)
        assert output.num_local_cached_tokens == 0, output
        assert arm != "never" or output.num_fetched_tokens == 0, output
        return Run(ttft_s, output.num_fetched_tokens, hopeless=False)

    def evict(self, context: int) -> None:
        """Take all of the arena for somebody else's blocks, and give it back, until the prefix is on the drive alone: it may be
        on its way there, or a read of it under way."""
        keys = self._spec.hash.hash_blocks(self._prompts[context])
        known, filler = (info.namespace for info in self._evictor.namespaces)
        until_s = time.monotonic() + ALL_OF_IT_DEADLINE_S
        while True:
            reserved = self._evictor.reserve(uuid.uuid4().hex, filler, self._fillers)
            if reserved.lease_id:
                self._evictor.abort(reserved.lease_id)
            found = self._evictor.match(known, keys)
            if found.tiers == b"\x01" * len(keys):
                return
            if time.monotonic() > until_s:
                raise TimeoutError(
                    f"the prefix of {len(keys)} blocks is not on the drive alone within {ALL_OF_IT_DEADLINE_S:.0f} s: "
                    f"{found.tiers.count(0)} in memory, {found.tiers.count(1)} on the drive"
                )
            time.sleep(_POLL_S)

    def _change_after_s(self, point: Point) -> float:
        nbytes = point.context // self._spec.block_tokens * self._spec.block_nbytes
        return min(CHANGE_AFTER * nbytes / point.bytes_per_s, 0.1 * self.compute_s[point.context])

    def _change_to(self, point: Point) -> None:
        if point.then_bytes_per_s is not None:
            self.pace.set(point.then_bytes_per_s)

    def _fresh(self, num_tokens: int) -> list[int]:
        vocab_size = self.engines["never"].tokenizer.vocab_size
        return [self._rng.randrange(vocab_size) for _ in range(num_tokens)]


def _first_output(llm: LLM, request_id: str, until_s: float) -> RequestOutput | None:
    """Step until the request has its one token, or the time is up. None: aborted."""
    while time.perf_counter() < until_s:
        for delta in llm.step():
            if delta.output is not None:
                return delta.output
    llm.abort(request_id)
    return None


def run(
    *,
    model: Path | None = None,
    folder: Path | None = None,
    contexts: Sequence[int] = (1000, 4000),
    paces: Sequence[float] = PACES,
    changes: Sequence[tuple[float, float]] = CHANGES,
    change_context: int = 2000,
    rounds: int = 3,
    learn_tokens: int = LEARN_TOKENS,
    chunk_tokens: int = CHUNK_TOKENS,
    num_pages: int = 384,
    arena_mib: int = 320,
    plot: Path | None = None,
) -> Report:
    path = find_model(None) if model is None else model
    points = [Point(context, pace) for context in contexts for pace in paces]
    points += [Point(change_context, *change) for change in changes]
    sizes = {"num_pages": num_pages, "chunk_tokens": chunk_tokens}
    with _house(path, folder, arena_mib << 20, learn_tokens, **sizes) as house:
        house.store([point.context for point in points])
        house.warm_up()
        found = {point: _measure(house, point, rounds) for point in points}
    if plot is not None:
        _plot(plot, found)
    return Report(
        question=QUESTION,
        command="python -m benchmarks.no_regret",
        rows=[_row(point, runs) for point, runs in found.items()],
        goals=_goals(found),
        remarks=[
            f"{rounds} requests of each arm a point, in turns, one at a time; medians of the time to first token",
            f"an arm is aborted at {HOPELESS:g} x the best median so far: at least that long is what its row says",
            f"steps of {chunk_tokens} tokens at most",
            "a prompt's whole blocks are on the drive alone before each request; the rest of it is computed by all",
        ],
    )


@contextlib.contextmanager
def _house(model: Path, folder: Path | None, arena_nbytes: int, learn_tokens: int, **settings: Any) -> Iterator[House]:
    with contextlib.ExitStack() as stack:
        drive = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=".bench-no-regret-", dir=folder or Path.cwd()))
        )
        sidecar = stack.enter_context(
            running_paced_sidecar(arena_nbytes, nvme=drive / "drive", nvme_nbytes=2 * arena_nbytes)
        )
        engines = {
            arm: stack.enter_context(
                LLM(
                    model,
                    connector_factory=partial(open_connector, socket_path=str(sidecar.socket), fetch=arm),
                    **settings,
                )
            )
            for arm in ARMS
        }
        spec = engines["never"].spec
        evictor = stack.enter_context(
            Client(
                str(sidecar.socket),
                instance=uuid.uuid4().bytes,
                role=BOTH,
                specs=[spec, dataclasses.replace(spec, weights="filler")],
                call_deadline_s=_CALL_DEADLINE_S,
            )
        )
        yield House(engines, evictor, sidecar.pace, arena_nbytes=arena_nbytes, learn_tokens=learn_tokens)


def _measure(house: House, point: Point, rounds: int) -> Runs:
    """The arms in turns, every second time the other way round, once the bandwidth is known."""
    runs = Runs()
    house.pace.set(point.bytes_per_s)
    house.learn()
    for number in range(rounds):
        for arm in ARMS[:: 1 if number % 2 else -1]:
            if point.then_bytes_per_s is not None:
                house.pace.set(point.bytes_per_s)
                house.learn()
            best_s = runs.best_s if any(runs.by_arm.values()) else math.inf
            patience_s = HOPELESS * min(best_s, house.compute_s[point.context])
            runs.by_arm[arm].append(house.run(arm, point, patience_s))
    return runs


def _row(point: Point, runs: Runs) -> Row:
    hopeless = [arm for arm in ARMS if any(run.hopeless for run in runs.by_arm[arm])]
    return {
        "context_tokens": point.context,
        "bandwidth": point.bandwidth,
        **{f"{arm}_ms": millis(runs.median_s(arm)) for arm in ARMS},
        "planned_over_better": round(runs.ratio, 3),
        "fetched_tokens": int(statistics.median(run.num_fetched for run in runs.by_arm["planned"])),
        "aborted": ", ".join(hopeless),
        "n": min(len(each) for each in runs.by_arm.values()),
    }


def _goals(found: Mapping[Point, Runs]) -> list[Goal]:
    goals = [
        at_most(
            f"planned / better of always and never, {point.context} tokens at {point.bandwidth}",
            round(runs.ratio, 3),
            GOAL,
        )
        for point, runs in found.items()
    ]
    steady = [point for point in found if point.then_bytes_per_s is None]
    for context in sorted({point.context for point in steady}):
        middle = min((point for point in steady if point.context == context), key=lambda point: found[point].spread)
        if found[middle].spread <= MIDDLE:
            text = f"planned / better where both are nearest, {context} tokens at {middle.bandwidth}"
            goals.append(at_most(text, round(found[middle].ratio, 3), 1.0))
    return goals


def _plot(path: Path, found: Mapping[Point, Runs]) -> None:
    """TTFT against bandwidth, a line for each arm and context; the fastest stands at ten times the one before."""
    steady = {point: runs for point, runs in found.items() if point.then_bytes_per_s is None}
    finite = [point.bytes_per_s for point in steady if math.isfinite(point.bytes_per_s)]
    unlimited = 10 * max(finite, default=1e8)
    series = [
        Series(
            f"{arm}, {context} tokens",
            [
                (min(point.bytes_per_s, unlimited) / 1e6, runs.median_s(arm))
                for point, runs in steady.items()
                if point.context == context
            ],
            marks=True,
            dashed=arm != "planned",
        )
        for context in sorted({point.context for point in steady})
        for arm in ARMS
    ]
    plot_lines(
        path,
        series,
        title=f"{QUESTION}: time to first token",
        x_label=f"MB/s of the drive ({unlimited / 1e6:.0f}: not limited)",
        y_label="seconds",
        log_x=True,
        log_y=True,
    )


def _in_words(bytes_per_s: float) -> str:
    return "unlimited" if math.isinf(bytes_per_s) else f"{bytes_per_s / 1e6:g} MB/s"


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--folder", type=click.Path(path_type=Path), default=None, help="On the drive to use; here if not given.")
@click.option("--quick", is_flag=True, help="Two points of short prompts, once each: does it run?")
@click.option(
    "--context", "contexts", default=(1000, 4000), show_default=True, multiple=True, help="Tokens of a prompt."
)
@click.option(
    "--pace",
    "paces",
    type=click.FloatRange(min=0, min_open=True),
    default=[pace / 1e6 for pace in PACES],
    show_default=True,
    multiple=True,
    help="MB/s.",
)
@click.option("--changes/--no-changes", default=True, show_default=True, help="Also bandwidths that change meanwhile.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--chunk-tokens", default=CHUNK_TOKENS, show_default=True, help="Of an engine's step.")
@click.option("--arena-mib", default=320, show_default=True)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE.png|html")
@click.option("--json", "as_json", is_flag=True)
def main(*, quick: bool, as_json: bool, plot: Path | None, paces: Sequence[float], changes: bool, **sizes: Any) -> None:
    if plot is not None:
        check_plot(plot)
    sizes |= {"paces": [pace * 1e6 for pace in paces], "changes": CHANGES if changes else ()}
    if quick:
        sizes |= {"contexts": (1000,), "paces": (10e6, math.inf), "changes": CHANGES[:1], "rounds": 1}
        sizes["change_context"] = 1000
    card = machine_card()
    show(run(plot=plot, **sizes), card, as_json=as_json)


if __name__ == "__main__":
    main()
