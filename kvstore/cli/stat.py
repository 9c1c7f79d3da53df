"""`kvstore stat`: what a running sidecar holds."""

import json
from typing import Any

import click

from kvstore.cli.finite import SECONDS


@click.command()
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--deadline-s", type=SECONDS, default=5.0, show_default=True)
def stat(*, socket: str | None, as_json: bool, deadline_s: float) -> None:
    """Show what a running sidecar holds and gave: alarms, tokens hit and missed, what other sizes would hit, bytes by state,
    drives, other nodes, tenants, queues, counters."""
    from kvstore.client import Client
    from kvstore.fields import fields_of
    from kvstore.proto import kvstore_pb2 as pb

    client = Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s)
    with client:
        stats = client.stats()
    if as_json:
        click.echo(json.dumps(fields_of(stats), indent=2, sort_keys=True))
    else:
        _print_tables(stats)


def _print_tables(stats: Any) -> None:
    from kvstore.alarms import alarms
    from kvstore.cli import stat_tables as tables
    from kvstore.cli.console import wide_console

    console = wide_console()
    console.print(tables.header(stats))
    for line in tables.alarm_lines(alarms(stats)):
        console.print(line)
    if stats.capacity_curve.requested_tokens:
        console.print(stats.capacity_curve.words)
    shown = [
        tables.usage_table(stats.usage),
        tables.curve_table(stats.capacity_curve),
        tables.tier_table(stats.tiers),
        tables.drive_table(stats.tiers),
        tables.peer_table(stats.peers),
        tables.tenant_table(stats.tenants),
        tables.queue_table(stats.queues),
        tables.counter_table(dict(stats.counters)),
    ]
    for table in shown:
        if table.row_count:
            console.print(table)
