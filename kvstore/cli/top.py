"""`kvstore top`: a running sidecar, live in a terminal."""

import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.finite import SECONDS, FiniteRange
from kvstore.core.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client import Client
    from kvstore.proto import kvstore_pb2 as pb

_NUM_SAMPLES = 150
_RATE_S = 10.0  # rates are over so long
_BAR = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_NUM_PLANS = 6


@click.command()
@click.option("--socket", help="Path of the sidecar's local socket.  [default: as for serve]")
@click.option("--once", is_flag=True, help="One picture, of one interval; also when the output is no terminal.")
@click.option("--interval-s", type=FiniteRange(0.1, 1e6), default=2.0, show_default=True)
@click.option("--deadline-s", type=SECONDS, default=5.0, show_default=True)
def top(*, socket: str | None, once: bool, interval_s: float, deadline_s: float) -> None:
    """Watch a running sidecar: alarms, hit rate, what is saved, tiers, bandwidth, tenants, nodes, the last decisions."""
    from rich.live import Live

    from kvstore.cli.console import wide_console
    from kvstore.client import Client
    from kvstore.proto import kvstore_pb2 as pb

    client = Client(socket, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s)
    watch, console = _Watch(), wide_console()
    with client:
        watch.look(client)
        if once or not sys.stdout.isatty():
            time.sleep(interval_s)
            watch.look(client)
            console.print(watch)
            return
        with Live(watch, console=console, screen=True, auto_refresh=False) as live:
            try:
                while True:
                    live.refresh()
                    time.sleep(interval_s)
                    watch.look_again(client)
            except KeyboardInterrupt:
                return


class _Watch:
    """What was seen lately; rich draws it."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, pb.StatsReply, dict[str, float]]] = deque(maxlen=_NUM_SAMPLES)
        self._plans: list[pb.PlanRecord] = []
        self._problem = ""

    def look(self, client: "Client") -> None:
        """Ask. Raises KVStoreError."""
        from kvstore.figures import figures

        stats = client.stats()
        self._plans = client.explain(last=_NUM_PLANS)
        if self._samples and self._samples[-1][1].boot_id != stats.boot_id:
            self._samples.clear()
        self._samples.append((time.monotonic(), stats, figures(stats)))
        self._problem = ""

    def look_again(self, client: "Client") -> None:
        """Likewise, but a sidecar that is gone is waited for."""
        try:
            if not client.alive:
                client.connect()
            self.look(client)
        except KVStoreError as err:
            self._problem = err.message

    def __rich_console__(self, console: Any, _options: Any) -> Iterator[Any]:
        from rich.columns import Columns
        from rich.text import Text

        from kvstore.alarms import alarms
        from kvstore.cli import stat_tables as tables
        from kvstore.cli.console import shown

        _, stats, _ = self._samples[-1]
        yield tables.header(stats)
        if self._problem:
            yield Text(f"NO ANSWER {self._problem}; figures are the last known", style="bold red")
        yield from tables.alarm_lines(alarms(stats, self._samples[0][1])) or [Text("no alarms", style="green")]
        yield Text()
        yield from self._rates()
        yield Text()
        for tier in stats.tiers:
            yield from self._tier(tier)
        yield Text()
        small = [tables.tenant_table(stats.tenants, 6), tables.drive_table(stats.tiers), tables.peer_table(stats.peers)]
        yield Columns([table for table in small if table.row_count], padding=(0, 2))
        for record in self._plans:
            label = [(f"{record.wish.label}: ", "bold")] if record.wish.label else []
            yield Text.assemble(
                (f"{record.outcome:<9} ", "bold"), (f"{shown(record.request_id)}  ", "cyan"), *label, record.words
            )

    def _rates(self) -> Iterator[Any]:
        from rich.text import Text

        from kvstore.cli import stat_tables as tables
        from kvstore.cli.stat_tables import TIER_NAMES, bar, tier_style

        hits = {tier: self._growth(f"tokens.hit.{tier}") for tier in TIER_NAMES}
        requested = self._growth("tokens.requested")
        rate = sum(hits.values()) / requested if requested else None
        yield Text.assemble(
            ("hit rate  ", "bold"),
            f"{rate:.1%}" if rate is not None else "no request ended",
            f"  {self._sparks()}  ",
            *[
                (f"{TIER_NAMES[tier]} {tokens / requested:.1%}  ", tier_style(tier))
                for tier, tokens in hits.items()
                if tokens
            ],
        )
        if rate is not None:
            yield Text("          ").append_text(bar(rate, _BAR, "green"))
        requests, saved = self._per_s("requests"), self._per_s("saved_s")
        yield Text.assemble(
            ("requests  ", "bold"),
            f"{requests:,.1f}/s, {self._per_s('tokens.requested'):,.0f} tokens/s   ",
            ("saves  ", "bold"),
            f"{saved:,.2f} GPU seconds a second, {saved / requests if requests else 0.0:,.3f} s a request",
        )
        yield tables.since_start(self._samples[-1][1].usage)

    def _tier(self, tier: "pb.TierStats") -> Iterator[Any]:
        from rich.filesize import decimal
        from rich.text import Text

        from kvstore.cli.stat_tables import TIER_NAMES, bar, tier_style

        used = 1 - tier.free_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        figures = self._samples[-1][2]
        beginning = f"moved.{tier.name}."
        moved = [
            f"{name.removeprefix(beginning)} {decimal(int(self._per_s(name)))}/s"
            for name in figures
            if name.startswith(beginning)
        ]
        if (evicted := f"removed.{tier.name}.evicted") in figures:  # engines' own pools are theirs to evict
            moved.append(f"evicts {self._per_s(evicted):,.0f}/s")
        yield Text.assemble(
            (f"{TIER_NAMES.get(tier.name, tier.name):<9} ", "bold"),
            bar(used, _BAR, tier_style(tier.name)),
            f" {used:.0%} of {decimal(tier.capacity_bytes)}, {tier.ready_blocks:,} blocks",
            "".join(f", {each}" for each in moved),
        )

    def _growth(self, name: str, end: int = -1) -> float:
        """Of a sum, over the last _RATE_S before sample `end`."""
        at_s, _, now = self._samples[end]
        return now.get(name, 0.0) - self._before(at_s)[2].get(name, 0.0)

    def _per_s(self, name: str) -> float:
        at_s = self._samples[-1][0]
        elapsed_s = at_s - self._before(at_s)[0]
        return self._growth(name) / elapsed_s if elapsed_s else 0.0

    def _before(self, at_s: float) -> tuple[float, "pb.StatsReply", dict[str, float]]:
        """The oldest sample of the last _RATE_S, or the one before `at_s`."""
        return next(sample for sample in self._samples if sample[0] >= at_s - _RATE_S)

    def _sparks(self) -> str:
        """The hit rate over time."""
        drawn = []
        for end in range(1, len(self._samples))[-_BAR:]:
            requested = self._growth("tokens.requested", end)
            hit = sum(self._growth(name, end) for name in self._samples[end][2] if name.startswith("tokens.hit."))
            drawn.append(_SPARKS[min(7, int(8 * hit / requested))] if requested else " ")
        return "".join(drawn)
