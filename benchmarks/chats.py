"""Eight chats at once whose histories do not fit the engine's own pages: what does the store save?

Two real servers of the included engine, one with a sidecar and one without, are asked the same by `kvstore bench serve`, one
after the other. Each turn sends the whole history, so without a store a chat that lost its pages is prefilled again. The limit
for a gap between two tokens is one prefill chunk: measured alone, on the server without a store.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click

from benchmarks.harness import Report, Row, at_least, at_most, machine_card, show
from benchmarks.sidecar import running_sidecar
from kvstore.models import find_model

QUESTION = "Eight multi-turn chats at once, with the store and without"
ARENA_BYTES = 512 << 20
CHUNK_TOKENS = 512
SEED = 3
GOAL_TTFT_RATIO = 0.8
_START_DEADLINE_S = 120.0
_STOP_DEADLINE_S = 30.0
_BENCH_DEADLINE_S = 1800.0


def run(
    *, model: Path | None = None, chats: int = 8, turns: int = 4, question_tokens: int = 384, num_pages: int = 160
) -> Report:
    path = str(model or find_model())
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(running_sidecar(ARENA_BYTES, "--no-grpc"))
        pages = ("--num-pages", str(num_pages), "--chunk-tokens", str(CHUNK_TOKENS))
        on = stack.enter_context(_server(path, "--socket", str(socket), *pages))
        off = stack.enter_context(_server(path, "--no-store", *pages))
        alone = ("--workload", "random", "--requests", "3", "--concurrency", "1", "--output-tokens", "1")
        (chunk,) = _bench(f"off={off}", options=(*alone, "--input-tokens", str(CHUNK_TOKENS)))["sides"]
        found = _bench(
            f"on={on}",
            f"off={off}",
            options=(
                *("--workload", "multi-turn", "--conversations", str(chats), "--concurrency", str(chats)),
                *("--turns", str(turns), "--input-tokens", str(question_tokens), "--output-tokens", "16"),
            ),
        )
    sides = {side["label"]: side["summary"] for side in found["sides"]}
    chunk_s = chunk["summary"]["latencies"]["ttft_s"]["p50"]
    ttft = {label: side["latencies"]["ttft_s"]["mean"] for label, side in sides.items()}
    return Report(
        question=QUESTION,
        command="python -m benchmarks.chats",
        rows=[_row(label, side, chunk_s) for label, side in sides.items()],
        goals=[
            at_most("mean TTFT with the store, of that without", ttft["on"] / ttft["off"], GOAL_TTFT_RATIO),
            at_least("outputs that are the same, of all", _same(found), 1.0),
            at_most("p99 of the gaps between tokens, of one chunk's time", _gap(sides["on"]) / chunk_s, 1.5),
        ],
        remarks=[
            f"SmolLM2; {chats} chats, {turns} turns, {question_tokens} tokens a question; own pages: {num_pages * 16:,} tokens",
            "a gap may hold one chunk of another's prompt and a decode step of all",
        ],
    )


def _row(label: str, side: dict[str, Any], chunk_s: float) -> Row:
    latencies = side["latencies"]
    return {
        "store": label,
        "n": side["succeeded"],
        "ttft_mean_s": round(latencies["ttft_s"]["mean"], 2),
        "ttft_p50_s": round(latencies["ttft_s"]["p50"], 2),
        "ttft_p99_s": round(latencies["ttft_s"]["p99"], 2),
        "itl_p99_s": round(_gap(side), 3),
        "chunk_s": round(chunk_s, 3),
        "prompt_tokens": side["prompt_tokens"],
        "cached_tokens": side["cached_tokens"],
    }


def _gap(side: dict[str, Any]) -> float:
    return float(side["latencies"]["itl_s"]["p99"])


def _same(found: dict[str, Any]) -> float:
    comparison = found["comparison"]
    compared: int = comparison["compared"]
    same: int = compared - comparison["different"]
    return same / max(1, compared + comparison["unmatched"])


@contextlib.contextmanager
def _server(model: str, *options: str) -> Iterator[str]:
    """The address of a `kvstore engine serve`, gone when the block ends."""
    command = [sys.executable, "-m", "kvstore.cli.main", "engine", "serve", model, "--port", "0", *options]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        )
        assert child.stdout is not None
        try:
            line = first_line(child.stdout)
            assert " url=" in line, line
            yield line.split(" url=")[1].split("/v1")[0]
        finally:
            child.terminate()
            try:
                child.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def first_line(stream: IO[str]) -> str:
    """What a server that was started says when it is ready."""
    until_s = time.monotonic() + _START_DEADLINE_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(until_s - time.monotonic()):
            raise TimeoutError(f"the engine server is not ready within {_START_DEADLINE_S:.0f} s")
    return stream.readline()


def _bench(*urls: str, options: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvstore-chats-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvstore.cli.main", "bench", "serve", "--seed", str(SEED), *options]
        for url in urls:
            command += ["--url", url]
        subprocess.run(
            [*command, "--json", str(result)], check=True, stdout=subprocess.DEVNULL, timeout=_BENCH_DEADLINE_S
        )
        found: dict[str, Any] = json.loads(result.read_text())
    return found


@click.command()
@click.option("--chats", default=8, show_default=True)
@click.option("--turns", default=4, show_default=True)
@click.option("--question-tokens", default=384, show_default=True)
@click.option("--num-pages", default=160, show_default=True)
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="[default: as for kvstore demo]")
@click.option("--json", "as_json", is_flag=True)
def main(*, chats: int, turns: int, question_tokens: int, num_pages: int, model: Path | None, as_json: bool) -> None:
    card = machine_card()
    report = run(chats=chats, turns=turns, question_tokens=question_tokens, num_pages=num_pages, model=model)
    show(report, card, as_json=as_json)


if __name__ == "__main__":
    main()
