"""What Prometheus sees: the Stats reply, under Prometheus's naming rules. Nothing is counted here."""

import re
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from kvstore.advisor import SECONDS
from kvstore.counters import COUNTERS
from kvstore.proto import kvstore_pb2 as pb

_STATES = ("ready", "writing", "leaving", "limbo", "quarantined", "free")
_LABELLED = re.compile(r"(calls|errors|failed_reads|failed_writes|failed_fetches|nvme_problems)_(\w+)_total")
_LABELS = {
    "calls": ("verb", "Requests served or refused."),
    "errors": ("code", "Requests answered with an error."),
    "failed_reads": ("reason", "Blocks that a drive could not give back."),
    "failed_writes": ("reason", "Blocks that a drive did not take."),
    "failed_fetches": ("reason", "Blocks that did not come from another node."),
    "nvme_problems": ("reason", "Reads, writes and commits that failed on a drive, retries among them."),
}
DRIVE_STATES = ("recovering", "ready", "degraded", "off")
"""States of a drive, as they travel."""
PEER_STATES = ("ready", "suspect", "probing")
"""States of another node, likewise."""


class StatsCollector:
    """A prometheus_client collector. `snapshot` is called once for each scrape, on the scraping thread."""

    def __init__(self, snapshot: Callable[[], pb.StatsReply]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        stats = self._snapshot()
        build = InfoMetricFamily("kvstore_sidecar", "Version, and boot id, which is new at each start.")
        build.add_metric((), {"version": stats.server_version, "boot_id": stats.boot_id.hex()})
        yield build
        yield GaugeMetricFamily("kvstore_uptime_seconds", "Since start.", stats.uptime_s)
        yield GaugeMetricFamily("kvstore_namespaces", "Namespaces that are open.", stats.num_namespaces)
        yield GaugeMetricFamily("kvstore_sessions", "Connections that said Hello.", stats.num_sessions)
        yield GaugeMetricFamily("kvstore_leases", "Live leases.", stats.num_leases)
        yield from _tiers(stats)
        yield from _drives(stats)
        yield from _peers(stats)
        yield from _counters(dict(stats.counters))
        for name, seconds in sorted(stats.seconds.items()):
            yield CounterMetricFamily(f"kvstore_{name}_seconds", SECONDS.get(name, name), seconds)


def tier_state(tier: pb.TierStats) -> str:
    """One word for a tier: that of its drives when they agree, recovering while any is, degraded when some are not well."""
    states = {drive.state for drive in tier.drives} or {"ready"}
    if "recovering" in states:
        return "recovering"
    return states.pop() if len(states) == 1 else "degraded"


def _tiers(stats: pb.StatsReply) -> Iterator[Metric]:
    capacity = GaugeMetricFamily("kvstore_tier_capacity_bytes", "Size of a tier.", labels=("tier",))
    used = GaugeMetricFamily("kvstore_tier_bytes", "Bytes of a tier, by slot and state.", labels=("tier", "state"))
    blocks = GaugeMetricFamily("kvstore_tier_ready_blocks", "Blocks that readers find.", labels=("tier",))
    for tier in stats.tiers:
        capacity.add_metric((tier.name,), tier.capacity_bytes)
        blocks.add_metric((tier.name,), tier.ready_blocks)
        for state in _STATES:
            used.add_metric((tier.name, state), getattr(tier, f"{state}_bytes"))
    yield from (capacity, used, blocks)


def _drives(stats: pb.StatsReply) -> Iterator[Metric]:
    capacity = GaugeMetricFamily(
        "kvstore_drive_capacity_bytes", "Size of a drive's data file.", labels=("tier", "drive")
    )
    state = GaugeMetricFamily(
        "kvstore_drive_state", "1 for the state a drive is in.", labels=("tier", "drive", "state")
    )
    for tier in stats.tiers:
        for drive in tier.drives:
            capacity.add_metric((tier.name, drive.path), drive.capacity_bytes)
            for name in DRIVE_STATES:
                state.add_metric((tier.name, drive.path, name), drive.state == name)
    yield from (capacity, state)


def _peers(stats: pb.StatsReply) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvstore_peer_state", "1 for the state another node is in.", labels=("node", "address", "state")
    )
    fetched = CounterMetricFamily("kvstore_peer_fetched_bytes", "Bytes fetched from another node.", labels=("node",))
    gauges = {
        "queued_bytes": GaugeMetricFamily("kvstore_peer_queued_bytes", "Bytes asked of it, to come.", labels=("node",)),
        "bytes_per_s": GaugeMetricFamily("kvstore_peer_bytes_per_second", "As it is believed to be.", labels=("node",)),
        "latency_s": GaugeMetricFamily("kvstore_peer_latency_seconds", "As it is believed to be.", labels=("node",)),
    }
    for peer in stats.peers:
        fetched.add_metric((peer.node_id,), peer.fetched_bytes)
        for name, gauge in gauges.items():
            gauge.add_metric((peer.node_id,), getattr(peer, name))
        for name in PEER_STATES:
            state.add_metric((peer.node_id, peer.address, name), peer.state == name)
    yield from (state, fetched, *gauges.values())


def _counters(counters: dict[str, int]) -> Iterator[Metric]:
    labelled = {
        kind: CounterMetricFamily(f"kvstore_{kind}", text, labels=(label,)) for kind, (label, text) in _LABELS.items()
    }
    for name, value in sorted(counters.items()):
        if match := _LABELLED.fullmatch(name):
            labelled[match[1]].add_metric((match[2],), value)
        else:
            help_text = COUNTERS.get(name, "Requests that met a bug of ours." if name == "crashes_total" else name)
            yield CounterMetricFamily(f"kvstore_{name.removesuffix('_total')}", help_text, value)
    yield from labelled.values()
