"""What does the store cost when it has nothing to give? Prefill with the store on against store off, prompts never seen before.

Both engines run in this process and take turns on the same random tokens, so that one slow minute hits both. The engine
with the store looks up, reserves, copies its pages out and commits while it goes on computing.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.harness import Report, Row, Samples, at_most, machine_card, millis, paired_ratio, show
from benchmarks.sidecar import running_sidecar
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector
from kvstore.models import find_model

QUESTION = "Prefill with the store on and nothing to reuse"
GOAL = 1.03
ARENA_BYTES = 512 << 20
SEED = 4


def run(*, model: Path | None = None, prompt_tokens: int = 1024, pairs: int = 8) -> Report:
    path = find_model(None) if model is None else model
    with (
        running_sidecar(ARENA_BYTES) as socket,
        LLM(path) as off,
        LLM(path, connector_factory=lambda spec: open_connector(spec, socket_path=str(socket))) as on,
    ):
        engines = {"off": off, "on": on}
        seconds: dict[str, list[float]] = {"off": [], "on": []}
        for number, prompt in enumerate(_prompts(off.tokenizer.vocab_size, prompt_tokens, pairs + 1)):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                ttft_s = _prefill(engines[name], prompt)
                if number:  # the first pair warms both up
                    seconds[name].append(ttft_s)
        block_nbytes, block_tokens = on.spec.block_nbytes, on.spec.block_tokens
    samples = {name: Samples(tuple(taken)) for name, taken in seconds.items()}
    rows: list[Row] = [
        {
            "store": name,
            "prompt_tokens": prompt_tokens,
            "ttft_p50_ms": millis(taken.median_s),
            "ttft_p99_ms": millis(taken.p99_s),
            "saved_mb": round(prompt_tokens // block_tokens * block_nbytes / 1e6, 1) if name == "on" else 0,
            "n": len(taken),
        }
        for name, taken in samples.items()
    ]
    ratio = samples["on"].median_s / samples["off"].median_s
    paired = paired_ratio(samples["on"], samples["off"])
    return Report(
        question=QUESTION,
        command="python -m benchmarks.overhead",
        rows=rows,
        goals=[at_most("time to first token, on / off, ratio of medians", round(ratio, 4), GOAL)],
        remarks=[f"median of the pairs' ratios: {paired:.4f}"],
    )


def _prompts(vocab_size: int, num_tokens: int, count: int) -> Iterator[list[int]]:
    rng = random.Random(SEED)
    for _ in range(count):
        yield [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _prefill(engine: LLM, prompt: list[int]) -> float:
    (output,) = engine.generate([prompt], SamplingParams(max_tokens=1))
    assert output.ttft_s is not None
    assert output.num_prefilled_tokens == len(prompt), "something was reused"
    return output.ttft_s


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--prompt-tokens", default=1024, show_default=True)
@click.option("--pairs", default=8, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, model: Path | None, prompt_tokens: int, pairs: int, as_json: bool) -> None:
    card = machine_card()
    show(run(model=model, prompt_tokens=prompt_tokens, pairs=pairs), card, as_json=as_json)


if __name__ == "__main__":
    main()
