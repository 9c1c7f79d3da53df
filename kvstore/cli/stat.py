"""`kvstore stat`: what a running sidecar holds."""

import json
from typing import Any

import click


@click.command()
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--deadline-s", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
def stat(*, socket: str | None, as_json: bool, deadline_s: float) -> None:
    """Show what a running sidecar holds: bytes by state, blocks, drives, other nodes, sessions, leases, counters."""
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
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    console = Console()
    console.print(
        f"kvstore {stats.server_version}  up {stats.uptime_s:,.0f} s  boot {stats.boot_id.hex()}", highlight=False
    )
    console.print(
        f"{stats.num_blocks:,} blocks in {stats.num_namespaces} namespaces, "
        f"{stats.num_sessions} sessions, {stats.num_leases} leases",
        highlight=False,
    )
    states = ("capacity", "ready", "writing", "leaving", "limbo", "quarantined", "free")
    tiers = Table("tier", *states, "blocks")
    for tier in stats.tiers:
        sizes = [decimal(getattr(tier, f"{state}_bytes")) for state in states]
        tiers.add_row(tier.name, *sizes, f"{tier.ready_blocks:,}")
    console.print(tiers)
    drives = Table("drive", "state", "capacity", "reason")
    for drive in [drive for tier in stats.tiers for drive in tier.drives]:
        drives.add_row(drive.path, drive.state, decimal(drive.capacity_bytes), drive.reason)
    if drives.row_count:
        console.print(drives)
    peers = Table("peer", "address", "state", "links", "fetched", "queued", "bandwidth", "latency")
    for peer in stats.peers:
        speed = f"{decimal(int(peer.bytes_per_s))}/s", f"{peer.latency_s * 1e3:.1f} ms"
        amounts = decimal(peer.fetched_bytes), decimal(peer.queued_bytes)
        peers.add_row(peer.node_id, peer.address, peer.state, ", ".join(peer.links), *amounts, *speed)
    if peers.row_count:
        console.print(peers)
    counters = Table("counter", "since start")
    for name, value in sorted(stats.counters.items()):
        if value:
            counters.add_row(name, f"{value:,}")
    console.print(counters)
