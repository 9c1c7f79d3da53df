"""How fast does the included engine compute beside transformers? Prefill and decode of the same model on the same threads.

Both hold the same weights in fp32 in this process and take turns, so that one slow minute hits both. The engine keeps K and V
in 16-bit pages, transformers in fp32 tensors that it copies with each token. A batch of the engine is prefilled one prompt
after the other, that of transformers all at once.
"""

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from benchmarks.harness import Report, Row, Samples, at_least, machine_card, paired_ratio, show
from benchmarks.reference_model import llama_of_gguf
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.models import find_model

QUESTION = "Prefill and decode of the engine beside transformers"
GOAL = 0.7
SEED = 6
DECODE_STEPS = 16


class Shape(NamedTuple):
    """So many prompts of so many tokens, together."""

    batch: int
    prompt_tokens: int


SHAPES = (Shape(1, 128), Shape(1, 512), Shape(1, 2048), Shape(8, 512))


class Taken(NamedTuple):
    """Seconds from the prompts to their first tokens, and of one decode step."""

    prefill_s: float
    decode_s: float


def run(*, model: Path | None = None, shapes: Sequence[Shape] = SHAPES, rounds: int = 5, threads: int = 2) -> Report:
    path = find_model(None) if model is None else model
    torch.set_num_threads(threads)
    reference = llama_of_gguf(path)
    rows: list[Row] = []
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    with LLM(path, num_threads=threads, prefix_caching=False) as engine:
        for shape in shapes:
            taken = _take_turns(engine, reference, shape, rounds)
            for part, tokens in (("prefill", shape.batch * shape.prompt_tokens), ("decode", shape.batch)):
                seconds = {name: Samples(tuple(getattr(t, f"{part}_s") for t in of)) for name, of in taken.items()}
                ratio = paired_ratio(seconds["transformers"], seconds["engine"])
                ratios[part].append(ratio)
                rows.append(
                    {
                        "part": part,
                        "batch": shape.batch,
                        "prompt_tokens": shape.prompt_tokens,
                        "engine_tokens_per_s": round(tokens / seconds["engine"].median_s, 1),
                        "transformers_tokens_per_s": round(tokens / seconds["transformers"].median_s, 1),
                        "engine_of_transformers_paired": round(ratio, 3),
                        "n": len(seconds["engine"]),
                    }
                )
    return Report(
        question=QUESTION,
        command="python -m benchmarks.engine_speed",
        rows=rows,
        goals=[
            at_least(f"{part}, engine's rate / transformers', the worst shape", round(min(of), 3), GOAL)
            for part, of in ratios.items()
        ],
        remarks=[f"{threads} threads, fp32; rates are medians, the ratio is the median of the rounds' own ratios"],
    )


def _take_turns(engine: LLM, reference: Any, shape: Shape, rounds: int) -> dict[str, list[Taken]]:
    rng, vocab = random.Random(SEED), engine.tokenizer.vocab_size
    taken: dict[str, list[Taken]] = {"engine": [], "transformers": []}
    for number in range(rounds + 1):
        prompts = [[rng.randrange(vocab) for _ in range(shape.prompt_tokens)] for _ in range(shape.batch)]
        for name in ("engine", "transformers") if number % 2 else ("transformers", "engine"):
            one = _run_engine(engine, prompts) if name == "engine" else _run_transformers(reference, prompts)
            if number:  # the first round warms both up
                taken[name].append(one)
    return taken


def _run_engine(engine: LLM, prompts: list[list[int]]) -> Taken:
    """Steps that bring a token for every prompt are decode; what comes before them is prefill."""
    params = SamplingParams(max_tokens=2 * len(prompts) + DECODE_STEPS, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    begun, steps, first_tokens = time.perf_counter(), [], 0
    while first_tokens < len(prompts):
        first_tokens = max(first_tokens, len(engine.step()))
    prefill_s = time.perf_counter() - begun
    while len(steps) < DECODE_STEPS:
        before = time.perf_counter()
        assert len(engine.step()) == len(prompts)
        steps.append(time.perf_counter() - before)
    for request_id in ids:
        engine.abort(request_id)
    return Taken(prefill_s, statistics.median(steps))


@torch.inference_mode()
def _run_transformers(model: Any, prompts: list[list[int]]) -> Taken:
    begun, steps = time.perf_counter(), []
    result = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    tokens = result.logits[:, -1].argmax(-1)
    prefill_s = time.perf_counter() - begun
    for _ in range(DECODE_STEPS):
        before = time.perf_counter()
        result = model(tokens[:, None], cache=result.past_key_values, use_cache=True, logits_to_keep=1)
        tokens = result.logits[:, -1].argmax(-1)
        steps.append(time.perf_counter() - before)
    return Taken(prefill_s, statistics.median(steps))


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, model: Path | None, rounds: int, threads: int, as_json: bool) -> None:
    card = machine_card()
    show(run(model=model, rounds=rounds, threads=threads), card, as_json=as_json)


if __name__ == "__main__":
    main()
