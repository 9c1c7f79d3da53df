"""`kvstore`: finds the subcommand, and turns our errors into one line and exit code 2."""

import importlib
import sys

import click

from kvstore import __version__
from kvstore.core.errors import KVStoreError

COMMANDS = {
    "bench": "kvstore.cli.bench:bench",
    "break-even": "kvstore.cli.break_even:break_even",
    "check": "kvstore.cli.check:check",
    "demo": "kvstore.cli.demo:demo",
    "doctor": "kvstore.cli.doctor:doctor",
    "engine": "kvstore.cli.engine:engine",
    "explain": "kvstore.cli.explain:explain",
    "inspect": "kvstore.cli.inspect:inspect",
    "replay": "kvstore.cli.replay:replay",
    "route": "kvstore.cli.route:route",
    "serve": "kvstore.cli.serve:serve",
    "size": "kvstore.cli.size:size",
    "stat": "kvstore.cli.stat:stat",
    "top": "kvstore.cli.top:top",
}
"""Subcommand -> module:function. A subcommand's module is imported when it is run or its help is shown."""

SHORT_HELP = {
    "bench": "Measure a server.",
    "break-even": "Calculate when fetching a cached prefix is faster than computing it.",
    "check": "Verify what is on a drive, and repair it.",
    "demo": "Show two engine processes share one prefill.",
    "doctor": "Check whether this machine is fit, and whether the sidecar answers.",
    "engine": "Run the included engine.",
    "explain": "Say why requests fetched or computed.",
    "inspect": "Say where a block lives, and what is known of it.",
    "replay": "Replay a trace: what it would have hit.",
    "route": "Spread requests over engines, to where their prefix is cached.",
    "serve": "Run the sidecar.",
    "size": "Say how much memory a trace is worth.",
    "stat": "Show what a running sidecar holds.",
    "top": "Watch a running sidecar in the terminal.",
}
"""For `kvstore --help`, which imports none of them."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, _, function = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SHORT_HELP.items()))


@click.command(cls=_Commands)
@click.version_option(__version__, prog_name="kvstore")
def cli() -> None:
    """A tiered KV-cache storage service for LLM inference."""


def main() -> None:
    """Entry point of the console script."""
    try:
        cli(prog_name="kvstore")
    except KVStoreError as err:
        click.echo(f"error: {err.message}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
