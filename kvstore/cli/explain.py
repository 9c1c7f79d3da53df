"""`kvstore explain`: what was found, predicted, chosen, and what happened, request by request."""

import json
from typing import Any

import click

from kvstore.cli.finite import SECONDS


@click.command()
@click.argument("request_id", default="")
@click.option(
    "--last", type=click.IntRange(1, 1000), default=10, show_default=True, help="So many plans, newest first."
)
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of text.")
@click.option("--deadline-s", type=SECONDS, default=5.0, show_default=True)
def explain(*, request_id: str, last: int, socket: str | None, as_json: bool, deadline_s: float) -> None:
    """Say why requests fetched or computed their prefixes: one request, by the id that its engine gave it, or the last ones."""
    from kvstore.client import Client
    from kvstore.fields import fields_of
    from kvstore.proto import kvstore_pb2 as pb

    client = Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s)
    with client:
        plans = client.explain(request_id=request_id, last=last)
    if as_json:
        click.echo(json.dumps([fields_of(plan) for plan in plans], indent=2))
    elif plans:
        _print(plans)
    else:
        click.echo(
            f"no plan of a request {request_id!r} is remembered" if request_id else "nothing has been planned yet"
        )


def _print(plans: list[Any]) -> None:
    from rich.text import Text

    from kvstore.cli.console import ago, shown, wide_console

    console = wide_console()
    for record in plans:
        plan = record.plan
        label = [(f"  {plan_label}", "bold")] if (plan_label := record.wish.label) else []
        console.print(Text.assemble((shown(record.request_id), "bold"), *label, (f"  {ago(record.age_s)} ago", "dim")))
        console.print(Text(record.words))
        console.print(
            Text(f"Predicted: {plan.total_s:.3f} s this way, {plan.recompute_s:.3f} s all computed.\n", style="dim")
        )
