"""How long does it take to hash the blocks of 8,192 tokens, given as a Python list, as an engine does for each request?"""

import functools
import random

import click

from benchmarks.harness import Report, Row, at_most, interleave, machine_card, millis, show
from kvstore.core.keys import HashScheme

QUESTION = "Prefix hashes of a prompt's blocks"
GOAL_MS = 1.0
SEED = 1


def run(*, num_tokens: int = 8192, rounds: int = 300) -> Report:
    rng = random.Random(SEED)
    token_ids = [rng.randrange(150_000) for _ in range(num_tokens)]
    schemes = {name: HashScheme(algorithm=name) for name in ("xxh3_128", "sha256")}

    samples = interleave(
        {name: functools.partial(scheme.hash_blocks, token_ids) for name, scheme in schemes.items()}, rounds=rounds
    )

    rows: list[Row] = [
        {
            "algorithm": name,
            "tokens": num_tokens,
            "p50_ms": millis(taken.median_s),
            "p99_ms": millis(taken.p99_s),
            "million_tokens_per_s": round(num_tokens / taken.median_s / 1e6, 1),
            "n": len(taken),
        }
        for name, taken in samples.items()
    ]
    goal = at_most("xxh3_128, p50 in ms", millis(samples["xxh3_128"].median_s), GOAL_MS)
    return Report(question=QUESTION, command="python -m benchmarks.hashing", rows=rows, goals=[goal])


@click.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--rounds", default=300, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, tokens: int, rounds: int, as_json: bool) -> None:
    card = machine_card()
    show(run(num_tokens=tokens, rounds=rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
