"""A Stats reply as tables for a terminal: what `kvstore stat` prints and `kvstore top` repeats."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvstore.alarms import Alarm
from kvstore.cli.console import shown
from kvstore.figures import STATES
from kvstore.proto import kvstore_pb2 as pb

TIER_NAMES = {"pinned": "RAM", "nvme": "NVMe", "peer": "other nodes", "hbm": "engine's own"}
_TIER_STYLES = {"pinned": "blue", "nvme": "yellow", "peer": "green", "hbm": "magenta"}
_STATE_STYLES = {"ready": "green", "recovering": "yellow", "probing": "yellow"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def header(stats: pb.StatsReply) -> Text:
    """Who answers."""
    return Text.assemble(
        (f"kvstore {stats.server_version}", "bold"),
        f"  up {stats.uptime_s:,.0f} s  boot {stats.boot_id.hex()}\n",
        f"{stats.num_blocks:,} blocks in {stats.num_namespaces} namespaces, {stats.num_sessions} sessions, "
        f"{stats.num_leases} leases, {stats.num_open_requests} requests open",
    )


def alarm_lines(found: Sequence[Alarm]) -> list[Text]:
    """The worst first; nothing when there is nothing."""
    return [
        Text.assemble(
            (f"{alarm.level.upper()} ", "bold red" if alarm.level == "critical" else "bold yellow"),
            (f"{alarm.title}: ", "bold"),
            f"{alarm.why} ",
            (alarm.advice, "dim"),
        )
        for alarm in found
    ]


def tier_table(tiers: Iterable[pb.TierStats]) -> Table:
    """A column for each tier, so that it fits anywhere."""
    tiers = list(tiers)
    table = Table("bytes", *[_right(tier.name) for tier in tiers])
    table.add_row("capacity", *[decimal(tier.capacity_bytes) for tier in tiers])
    for state in STATES:
        table.add_row(state, *[_part(getattr(tier, f"{state}_bytes"), tier.capacity_bytes) for tier in tiers])
    table.add_row("blocks", *[f"{tier.ready_blocks:,}" for tier in tiers])
    return table


def usage_table(usage: pb.Usage) -> Table:
    """Where requested tokens came from, and why others did not."""
    table = Table("tokens", _right(""), _right("share"), title=f"{usage.num_requests:,} requests", title_justify="left")
    table.add_row("requested", f"{usage.requested_tokens:,}", "")
    for tier, name in TIER_NAMES.items():
        if tokens := usage.hit_tokens[tier]:
            table.add_row(
                f"hit: {name}", f"{tokens:,}", _share(tokens, usage.requested_tokens), style=_TIER_STYLES[tier]
            )
    for reason, tokens in sorted(usage.missed_tokens.items(), key=lambda item: -item[1]):
        if tokens:
            table.add_row(f"missed: {words(reason)}", f"{tokens:,}", _share(tokens, usage.requested_tokens))
    return table


def since_start(usage: pb.Usage) -> Text:
    """The same in a line."""
    hits = [f"{name} {usage.hit_tokens[tier]:,}" for tier, name in TIER_NAMES.items() if usage.hit_tokens[tier]]
    missed = f"missed {sum(usage.missed_tokens.values()):,}"
    asked = f"{usage.num_requests:,} requests, {usage.requested_tokens:,} tokens: {', '.join([*hits, missed])}"
    return Text.assemble(("all       ", "bold"), asked)


def curve_table(curve: pb.CapacityCurve) -> Table:
    """What other sizes of RAM would have hit."""
    table = Table("capacity", _right("bytes"), _right("would hit"))
    if curve.requested_tokens:
        for each in curve.capacities:
            name = {"drives": "as the drives", "endless": "without end"}.get(each.capacity, f"{each.capacity} the RAM")
            table.add_row(name, decimal(each.bytes) if each.bytes else "", f"{each.hit_rate:.1%}")
    return table


def drive_table(tiers: Iterable[pb.TierStats]) -> Table:
    """Drives of all tiers."""
    table = Table("drive", "state", _right("capacity"), "reason")
    for drive in [drive for tier in tiers for drive in tier.drives]:
        table.add_row(drive.path, _state(drive.state), decimal(drive.capacity_bytes), drive.reason)
    return table


def peer_table(peers: Iterable[pb.PeerStats]) -> Table:
    """Other nodes."""
    table = Table("peer", "address", "state", "links", *map(_right, ("fetched", "queued", "bandwidth", "latency")))
    for peer in peers:
        speed = f"{decimal(int(peer.bytes_per_s))}/s", f"{peer.latency_s * 1e3:.1f} ms"
        amounts = decimal(peer.fetched_bytes), decimal(peer.queued_bytes)
        table.add_row(peer.node_id, peer.address, _state(peer.state), ", ".join(peer.links), *amounts, *speed)
    return table


def tenant_table(tenants: Iterable[pb.TenantUsage], count: int = 20) -> Table:
    """Those that asked for most."""
    table = Table("tenant", *map(_right, ("requests", "requested", "hit rate", "held")))
    for each in sorted(tenants, key=lambda each: -each.usage.requested_tokens)[:count]:
        usage = each.usage
        table.add_row(
            shown(each.tenant),
            f"{usage.num_requests:,}",
            f"{usage.requested_tokens:,}",
            _share(sum(usage.hit_tokens.values()), usage.requested_tokens),
            decimal(sum(each.held_bytes.values())),
        )
    return table


def queue_table(queues: Iterable[pb.QueueDepth]) -> Table:
    """What waits."""
    table = Table("queue", _right("waiting"), _right("limit"))
    for queue in queues:
        table.add_row(words(queue.queue), f"{queue.length:,}", f"{queue.limit:,}" if queue.limit else "")
    return table


def counter_table(counters: dict[str, int]) -> Table:
    """Those that are not 0."""
    table = Table("counter", _right("since start"))
    for name, value in sorted(counters.items()):
        if value:
            table.add_row(name, f"{value:,}")
    return table


def bar(share: float, width: int, style: str = "blue") -> Text:
    """`share` of `width` characters."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (_EIGHTHS[rest] if rest else "")
    return Text.assemble((drawn, style), ("·" * (width - len(drawn)), "dim"))


def tier_style(tier: str) -> str:
    """A colour that a tier has everywhere."""
    return _TIER_STYLES.get(tier, "white")


def words(name: str) -> str:
    """A name as people read it."""
    return name.replace("_", " ")


def _part(nbytes: int, capacity: int) -> str:
    return f"{decimal(nbytes)}  {_share(nbytes, capacity):>5}" if nbytes else "0"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _state(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, "bold red"))


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
