"""`kvstore inspect`: where a block lives, and what is known of it."""

import json
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.finite import SECONDS
from kvstore.core.moves import DRIVE_SHIFT

if TYPE_CHECKING:
    from kvstore.proto import kvstore_pb2 as pb

_MAX_SPEC_FIELD = 60  # characters
_MAX_CHILDREN = 4
_DRIVE_MASK = (1 << DRIVE_SHIFT) - 1


@click.command()
@click.argument("prefix")
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--deadline-s", type=SECONDS, default=5.0, show_default=True)
def inspect(*, prefix: str, socket: str | None, as_json: bool, deadline_s: float) -> None:
    """Say where a block lives: PREFIX is what its hash, or a namespace, begins with, in 4 to 64 hex digits.

    Of a block: its copies and their states, leases, hits, how recently it was used, its neighbours, other nodes that hold it,
    the plans that found it. Of a namespace: its model and tenant, and what each tier holds of it.
    """
    from kvstore.client import Client
    from kvstore.fields import fields_of
    from kvstore.proto import kvstore_pb2 as pb

    client = Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s)
    with client:
        found = client.inspect(prefix)
    if as_json:
        click.echo(json.dumps(fields_of(found), indent=2))
    elif found.blocks or found.namespaces or found.absences:
        _print(found)
    else:
        click.echo(f"no block and no namespace that begins with {prefix!r} is known here")


def _print(found: "pb.InspectReply") -> None:
    from kvstore.cli.console import wide_console
    from kvstore.usage import MISSES

    console = wide_console()
    for namespace in found.namespaces:
        _print_namespace(console, namespace)
    for block in found.blocks:
        _print_block(console, block)
    for absence in found.absences:
        console.print(
            f"not in namespace {absence.namespace.hex()} any more: {MISSES.get(absence.reason, absence.reason)}"
        )
    if found.num_found > len(found.blocks):
        console.print(f"{found.num_found - len(found.blocks):,} more blocks begin so; give more digits")


def _print_namespace(console: Any, namespace: "pb.InspectedNamespace") -> None:
    from rich.filesize import decimal
    from rich.text import Text

    from kvstore.cli.console import shown

    tenant = shown(namespace.tenant) or "none"
    console.print(Text.assemble((f"namespace {namespace.namespace.hex()}", "bold"), f"  tenant {tenant}"))
    console.print(f"  {namespace.num_rows:,} blocks known, {decimal(namespace.block_bytes)} each")
    for tier in namespace.tiers:
        states = {"ready": tier.ready_bytes, "writing": tier.writing_bytes, "leaving": tier.leaving_bytes}
        held = ", ".join(f"{state} {decimal(nbytes)}" for state, nbytes in states.items() if nbytes)
        console.print(f"  {tier.name}: {tier.ready_blocks:,} blocks{f' ({held})' if held else ''}")
    for name, value in json.loads(namespace.spec).items():
        console.print(f"  {name} = {str(value)[:_MAX_SPEC_FIELD]}", style="dim")


def _print_block(console: Any, block: "pb.InspectedBlock") -> None:
    from rich.filesize import decimal
    from rich.text import Text

    from kvstore.cli.console import ago, shown

    console.print(Text.assemble((f"block {block.key.hex()}", "bold"), f"  of namespace {block.namespace.hex()}"))
    if block.label:
        console.print(f"  of a prompt that is called {shown(block.label)}")
    marks = [mark for mark, is_set in (("pinned", block.pinned), ("has a time to live", block.mortal)) if is_set]
    console.print(
        f"  block {block.position} of its sequence, read {block.hits:,} times, "
        f"{block.num_uses_since:,} blocks were used since{''.join(f', {mark}' for mark in marks)}"
    )
    for copy in block.copies:
        drive = f"on drive {copy.offset >> DRIVE_SHIFT} " if copy.tier == "nvme" else ""
        place = f"{drive}at {copy.offset & _DRIVE_MASK}, generation {copy.generation}"
        console.print(f"  {copy.tier}: {copy.state}, {decimal(copy.bytes)} {place}, {copy.users} users")
    if not block.copies:
        console.print("  no copy here: only blocks behind it are held")
    for instance in block.pools:
        console.print(f"  hbm: engine {instance.hex()} has it in its own pool")
    for peer in block.peers:
        console.print(f"  node {peer.node_id} at {peer.address} holds it, as far as is known")
    for lease in block.leases:
        ends = "has expired, its end is not confirmed" if lease.expired else f"ends in {lease.expires_in_s:.1f} s"
        request = f" for {shown(lease.request_id)}" if lease.request_id else ""
        console.print(f"  {lease.kind} lease {lease.lease_id}{request} of {lease.instance.hex()}: {ends}")
    console.print(f"  behind {block.parent.hex() or 'nothing: it is the first of its sequence'}")
    told = block.children[:_MAX_CHILDREN]
    for child in told:
        console.print(f"  before {child.hex()}")
    if block.num_children > len(told):
        console.print(f"  and before {block.num_children - len(told):,} more")
    for plan in block.plans:
        console.print(f"  {ago(plan.age_s)} ago {shown(plan.request_id)}: {plan.words}", style="dim")
