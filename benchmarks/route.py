"""Chats over three engines behind `kvstore route`: what does it save to send a turn where its history is cached?

Three fake engines (benchmarks.fake_engine: real servers on real sockets, a simulated prefix cache, nothing computed) behind
the real router, asked by `kvstore bench serve`. The caches hold all chats' histories together, but no engine's holds them
all, so that a policy that scatters turns loses by evictions too. Each policy begins with new engines; the policies take turns.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.chats import first_line
from benchmarks.fake_engine import BLOCK_TOKENS
from benchmarks.harness import Report, Row, at_least, at_most, machine_card, show

QUESTION = "Multi-turn chats over three engines: where the prefix is, or wherever there is room?"
POLICIES = ("round_robin", "least_loaded", "prefix")
SEED = 11
_STOP_DEADLINE_S = 10.0
_BENCH_DEADLINE_S = 600.0


class Sums:
    """Of one policy, over all rounds."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.possible_tokens = 0
        self.failures = 0
        self.spread: list[float] = []  # of each round: the busiest engine's requests, of an equal share

    def add(self, side: dict[str, Any], requests: list[int], possible_tokens: int) -> None:
        """One round."""
        self.possible_tokens += possible_tokens
        self.ttft_s += [sample["ttft_s"] for sample in side["requests"] if sample["ttft_s"] is not None]
        self.prompt_tokens += side["summary"]["prompt_tokens"]
        self.cached_tokens += side["summary"]["cached_tokens"] or 0
        self.failures += side["summary"]["requests"] - side["summary"]["succeeded"]
        self.spread.append(max(requests) * len(requests) / sum(requests))

    @property
    def mean_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s)

    @property
    def p99_s(self) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def run(
    *,
    num_engines: int = 3,
    chats: int = 36,
    turns: int = 6,
    concurrency: int = 18,
    question_tokens: int = 300,
    system_tokens: int = 500,
    prefill_us: float = 60.0,
    capacity_tokens: int = 24_000,
    rounds: int = 3,
) -> Report:
    sums = {policy: Sums() for policy in POLICIES}
    for number in range(rounds):
        for policy in POLICIES[:: 1 if number % 2 == 0 else -1]:
            workload = (
                *("--workload", "multi-turn", "--conversations", str(chats), "--turns", str(turns)),
                *(
                    "--concurrency",
                    str(concurrency),
                    "--input-tokens",
                    f"{question_tokens // 2}-{question_tokens * 3 // 2}",
                ),
                *("--system-tokens", str(system_tokens), "--output-tokens", "40", "--think-s", "0.1"),
                *("--warmup", "0", "--seed", str(SEED + number)),
            )
            with _engines(num_engines, prefill_us, capacity_tokens) as urls, _router(urls, policy) as url:
                side = _bench(url, workload)
                counts = [_num_requests(engine) for engine in urls]
                sums[policy].add(side, counts, _possible(side["requests"], system_tokens))
    prefix, others = sums["prefix"], [sums[name] for name in POLICIES if name != "prefix"]
    return Report(
        question=QUESTION,
        command="python -m benchmarks.route",
        rows=[_row(policy, found) for policy, found in sums.items()],
        goals=[
            at_most(
                "mean TTFT by prefix, of the better of the others", prefix.mean_s / min(o.mean_s for o in others), 0.8
            ),
            at_most(
                "p99 TTFT by prefix, of the better of the others", prefix.p99_s / min(o.p99_s for o in others), 1.0
            ),
            at_least("hits by prefix, of what one endless cache would have", _hits(prefix), 0.9),
            at_most("the busiest engine's requests by prefix, of an equal share", max(prefix.spread), 1.3),
            at_most("requests that failed", float(sum(found.failures for found in sums.values())), 0.0),
        ],
        remarks=[
            f"{num_engines} engines, {capacity_tokens:,} cached tokens each, {prefill_us:g} us a token, one prompt at a time",
            "the engines are simulated, the router and the sockets are real: only ratios mean something",
            f"{chats} chats of {turns} turns, {concurrency} at once, some {question_tokens} tokens a question",
            f"a system prompt of {system_tokens} tokens; {rounds} rounds",
        ],
    )


def _row(policy: str, found: Sums) -> Row:
    return {
        "policy": policy,
        "n": len(found.ttft_s),
        "mean_ms": round(found.mean_s * 1e3, 1),
        "p99_ms": round(found.p99_s * 1e3, 1),
        "prompt_tok": found.prompt_tokens,
        "hit_tok": found.cached_tokens,
        "possible": found.possible_tokens,
        "busiest": round(max(found.spread), 2),
    }


def _hits(found: Sums) -> float:
    return found.cached_tokens / max(1, found.possible_tokens)


def _possible(requests: list[dict[str, Any]], system_tokens: int) -> int:
    """Hits of an endless cache that all engines share: of a first turn the system prompt, of others the turn before."""
    total, before = 0, 0
    for number, request in enumerate(requests):
        if request["request"].endswith(".0"):
            before = system_tokens if number else 0
        total += before // BLOCK_TOKENS * BLOCK_TOKENS
        before = request["prompt_tokens"] + request["output_tokens"]
    return total


@contextlib.contextmanager
def _engines(count: int, prefill_us: float, capacity_tokens: int) -> Iterator[list[str]]:
    """Their addresses, each a process of its own."""
    model = ("--prefill-s", str(prefill_us * 1e-6), "--capacity-tokens", str(capacity_tokens))
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_started("benchmarks.fake_engine", *model)) for _ in range(count)]
        yield [_url(child) for child in started]


@contextlib.contextmanager
def _router(engines: list[str], policy: str) -> Iterator[str]:
    options = [part for url in engines for part in ("--engine", url)]
    command = ("kvstore.cli.main", "route", "--listen", "127.0.0.1:0", "--policy", policy, *options)
    with _started(*command) as child:
        yield _url(child).removesuffix("/v1")


@contextlib.contextmanager
def _started(module: str, *options: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-m", module, *options]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stdout is not None
        child.stdout.close()


def _url(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    line = first_line(child.stdout)
    assert " url=" in line, line
    return line.rpartition(" url=")[2].strip()


def _num_requests(engine: str) -> int:
    with urllib.request.urlopen(engine + "/state", timeout=_STOP_DEADLINE_S) as answer:
        return int(json.load(answer)["requests"])


def _bench(url: str, workload: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvstore-route-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvstore.cli.main", "bench", "serve", "--url", url, *workload]
        subprocess.run(
            [*command, "--json", str(result)], check=True, stdout=subprocess.DEVNULL, timeout=_BENCH_DEADLINE_S
        )
        (side,) = json.loads(result.read_text())["sides"]
    found: dict[str, Any] = side
    return found


@click.command()
@click.option("--engines", "num_engines", default=3, show_default=True)
@click.option("--chats", default=36, show_default=True)
@click.option("--turns", default=6, show_default=True)
@click.option("--concurrency", default=18, show_default=True)
@click.option("--capacity-tokens", default=24_000, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, as_json: bool, **options: int) -> None:
    card = machine_card()
    show(run(**options), card, as_json=as_json)


if __name__ == "__main__":
    main()
