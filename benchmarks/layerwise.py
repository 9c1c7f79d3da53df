"""What does it buy to attend to the first layers of a load while later ones arrive? Time to first token of a warm prompt, the
same engine twice, once with loads by layers and once without.

Both engines fetch the prompt's blocks from one sidecar each time: requests that may read the store and not write it leave
nothing in an engine's own pages either. What is new behind the warm part is another text each time.
"""

import contextlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.harness import Report, Row, Samples, at_most, machine_card, millis, paired_ratio, show
from benchmarks.sidecar import running_sidecar
from kvstore.engine_connector.engine.llm import LLM
from kvstore.engine_connector.engine.options import RequestOptions
from kvstore.engine_connector.engine.sampler import SamplingParams
from kvstore.engine_connector.local import open_connector
from kvstore.engine_connector.protocol import CacheOptions
from kvstore.models import find_model

QUESTION = "Attend to a load layer by layer, or when it is done"
SEED = 7
GOAL = 1.0
_ANSWER = SamplingParams(max_tokens=1, ignore_eos=True)
_READ_ONLY = RequestOptions(cache=CacheOptions(no_store=True))


class Case(NamedTuple):
    """One engine, and how many tokens are new behind those in the store."""

    layerwise: bool
    new_tokens: int


def run(
    *,
    model: Path | None = None,
    warm_tokens: int = 3984,
    new_tokens: tuple[int, ...] = (16, 128),
    rounds: int = 20,
    num_pages: int = 384,
    arena_mib: int = 384,
    **settings: Any,
) -> Report:
    path = find_model(None) if model is None else model
    rng = random.Random(SEED)
    with running_sidecar(arena_mib << 20) as socket, contextlib.ExitStack() as stack:
        engines = {
            layerwise: stack.enter_context(
                LLM(
                    path,
                    connector_factory=lambda spec: open_connector(spec, socket_path=str(socket), fetch="always"),
                    num_pages=num_pages,
                    layerwise=layerwise,
                    **settings,
                )
            )
            for layerwise in (False, True)
        }
        vocab_size = engines[False].tokenizer.vocab_size
        warm = [rng.randrange(vocab_size) for _ in range(warm_tokens)]
        engines[False].generate([warm], _ANSWER)
        engines[False].reset_prefix_cache()
        cases = [Case(layerwise, count) for count in new_tokens for layerwise in engines]
        taken: dict[Case, list[float]] = {case: [] for case in cases}
        for number in range(-2, rounds):  # the first ones warm up
            fresh = {count: [rng.randrange(vocab_size) for _ in range(count)] for count in new_tokens}
            for case in cases[:: 1 if number % 2 else -1]:
                ttft_s = _ttft_s(engines[case.layerwise], [*warm, *fresh[case.new_tokens]], case.new_tokens)
                taken[case] += [ttft_s] if number >= 0 else []
    samples = {case: Samples(tuple(seconds)) for case, seconds in taken.items()}
    return Report(
        question=QUESTION,
        command="python -m benchmarks.layerwise",
        rows=[_row(case, each, warm_tokens) for case, each in samples.items()],
        goals=[
            at_most(
                f"time to first token, layer by layer / whole, {count} new tokens (median of pairs)",
                round(paired_ratio(samples[Case(True, count)], samples[Case(False, count)]), 3),
                GOAL,
            )
            for count in new_tokens
        ],
        remarks=[
            "one request at a time; all blocks in the sidecar's memory; max_tokens=1",
            "off by default: what the copies gain by going on meanwhile they take from the forward, which uses the same cores",
        ],
    )


def _ttft_s(llm: LLM, prompt: list[int], new_tokens: int) -> float:
    (output,) = llm.generate([prompt], _ANSWER, options=_READ_ONLY)
    assert output.num_prefilled_tokens == new_tokens, output
    assert output.ttft_s is not None
    return output.ttft_s


def _row(case: Case, samples: Samples, warm_tokens: int) -> Row:
    return {
        "load": "layer by layer" if case.layerwise else "whole",
        "warm_tokens": warm_tokens,
        "new_tokens": case.new_tokens,
        "p50_ms": millis(samples.median_s),
        "p99_ms": millis(samples.p99_s),
        "n": len(samples),
    }


@click.command()
@click.option("--model", type=click.Path(path_type=Path), default=None)
@click.option("--warm-tokens", default=3984, show_default=True, help="A multiple of 16.")
@click.option("--new-tokens", default=(16, 128), show_default=True, multiple=True, type=int)
@click.option("--rounds", default=20, show_default=True)
@click.option("--num-threads", default=None, type=int, help="Of the forward; as many as there are cores if not given.")
@click.option("--arena-mib", default=384, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, as_json: bool, **sizes: Any) -> None:
    card = machine_card()
    show(run(**sizes), card, as_json=as_json)


if __name__ == "__main__":
    main()
