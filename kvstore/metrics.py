"""What Prometheus sees: the Stats reply, under Prometheus's naming rules. Nothing is counted here.

METRICS is the one table of what there is: the collector makes families from it, deploy/METRICS.md is printed from it, and
dashboard and rules in deploy/ are checked against it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from kvstore.advisor import SECONDS
from kvstore.counters import COUNTERS
from kvstore.health import PROBLEMS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.usage import MISSES

DRIVE_STATES = ("recovering", "ready", "degraded", "off")
"""States of a drive, as they travel."""
PEER_STATES = ("ready", "suspect", "probing")
"""States of another node, likewise."""

_SLOT_STATES = ("ready", "writing", "leaving", "limbo", "quarantined", "free")
_BLOCK_STATES = ("ready", "writing", "leaving")


class Family(NamedTuple):
    """One metric, by its name without `kvstore_`, and `_total` for counters."""

    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    text: str
    source: str  # where it is counted, or kept


METRICS = {
    "sidecar": Family("info", ("version", "boot_id"), "Version, and boot id, which is new at each start.", "sidecar"),
    "uptime_seconds": Family("gauge", (), "Since start.", "dispatcher"),
    "namespaces": Family("gauge", (), "Namespaces that are open.", "index"),
    "sessions": Family("gauge", (), "Connections that said Hello.", "sessions"),
    "blocks": Family("gauge", (), "Blocks that can be found in RAM or on a drive, each once.", "placements"),
    "leases": Family("gauge", (), "Live leases.", "leases"),
    "limbo_leases": Family("gauge", (), "Expired leases whose slots wait in limbo for a confirmation.", "leases"),
    "problem": Family(
        "gauge", ("problem",), f"Things that are wrong now: {', '.join(PROBLEMS)} (kvstore/health.py).", "health"
    ),
    # --- does it pay ---
    "requests": Family("counter", (), "Requests that have been settled: their tokens are counted below.", "usage"),
    "open_requests": Family("gauge", (), "Requests that were matched or are loading, and not settled.", "usage"),
    "requested_tokens": Family(
        "counter", (), "Tokens of settled requests. Hits and misses together are this.", "usage"
    ),
    "hit_tokens": Family(
        "counter",
        ("tier",),
        "Tokens that were not computed, by where they came from; hbm: the engine had them.",
        "usage",
    ),
    "missed_tokens": Family("counter", ("reason",), "Tokens that were computed, by reason (below).", "usage"),
    "tenant_requested_tokens": Family("counter", ("tenant",), "As requested_tokens, of a tenant.", "usage"),
    "tenant_hit_tokens": Family("counter", ("tenant", "tier"), "As hit_tokens, of a tenant.", "usage"),
    "tenant_missed_tokens": Family(
        "counter", ("tenant",), "As missed_tokens, of a tenant, for whatever reason.", "usage"
    ),
    "tenant_held_bytes": Family(
        "gauge", ("tenant", "tier"), "Slots of a tenant's blocks that readers find.", "placements"
    ),
    "capacity_hit_ratio": Family(
        "gauge",
        ("capacity",),
        "Part of the tokens asked for lately that leaf-first LRU would have hit with 0.5x, 1x, 2x, 4x or 8x the RAM, with as much"
        " as the drives, and with everything that was used in a day (endless).",
        "live_curve",
    ),
    "capacity_curve_tokens": Family(
        "gauge", (), "Tokens that this rests on; half of them count after six hours.", "live_curve"
    ),
    # --- RAM, drives, other nodes ---
    "tier_capacity_bytes": Family("gauge", ("tier",), "Size of a tier.", "slots"),
    "tier_bytes": Family(
        "gauge", ("tier", "state"), "Bytes of a tier by slot and state; together its capacity.", "placements"
    ),
    "tier_blocks": Family("gauge", ("tier", "state"), "Blocks of a tier by state.", "placements"),
    "drive_capacity_bytes": Family("gauge", ("tier", "drive"), "Size of a drive's data file.", "nvme.tier"),
    "drive_state": Family("gauge", ("tier", "drive", "state"), "1 for the state a drive is in.", "mover"),
    "removed_blocks": Family(
        "counter",
        ("tier", "policy", "reason"),
        "Blocks that left a tier; policy: who chose what was evicted, empty for other reasons.",
        "inventory",
    ),
    "removed_bytes": Family("counter", ("tier", "policy", "reason"), "Their bytes.", "inventory"),
    "queue_length": Family("gauge", ("queue",), "What waits, or is under way.", "spill, borrowing"),
    "queue_limit": Family(
        "gauge", ("queue",), "The most that may; queues without a limit of their own have none.", "limits"
    ),
    "nvme_write_policy": Family("info", ("policy",), "When blocks are written to drives.", "spill"),
    "nvme_written_bytes": Family("counter", (), "Writes to drives that were begun, by slot.", "budget"),
    "nvme_write_limit_bytes_per_second": Family("gauge", (), "What the settings allow; 0: no limit.", "budget"),
    "nvme_write_limit_bytes_per_day": Family(
        "gauge", (), "What the settings allow in 24 hours; 0: no limit.", "budget"
    ),
    "nvme_day_written_bytes": Family("gauge", (), "What counts against that now.", "budget"),
    "nvme_problems": Family(
        "counter", ("reason",), "Reads, writes and commits that failed on a drive, retries among them.", "nvme.drive"
    ),
    "peer_state": Family("gauge", ("node", "address", "state"), "1 for the state another node is in.", "borrowing"),
    "peer_fetched_bytes": Family("counter", ("node",), "Bytes fetched from another node.", "borrowing"),
    "peer_queued_bytes": Family("gauge", ("node",), "Bytes asked of it, to come.", "borrowing"),
    "peer_bytes_per_second": Family("gauge", ("node",), "As it is believed to be.", "tier_speed"),
    "peer_latency_seconds": Family("gauge", ("node",), "As it is believed to be.", "tier_speed"),
    "directory_nodes": Family("gauge", (), "Other nodes that are alive.", "directory"),
    "directory_entries": Family("gauge", (), "Pairs of a block and a node that has it.", "directory"),
    "directory_own_blocks": Family("gauge", (), "Blocks that the others were told of.", "directory"),
    "directory_age_seconds": Family("gauge", (), "Since something was heard.", "directory"),
    "directory_sent_bytes": Family("counter", (), "To the server, or to nodes that asked.", "directory"),
    "directory_received_bytes": Family("counter", (), "From the server, or other nodes.", "directory"),
    "directory_failures": Family("counter", (), "Calls that failed or were late.", "directory"),
    "directory_resyncs": Family("counter", (), "States taken or given anew.", "directory"),
    "directory_dropped_updates": Family("counter", (), "Own updates lost, since nobody took them.", "directory"),
    # --- how long things take ---
    "rpc_seconds": Family("histogram", ("verb",), "Serving a request on the loop, refusals included.", "dispatcher"),
    "transfer_seconds": Family(
        "histogram",
        ("tier", "direction"),
        "From order to end, queues included. pinned read: loads of engines, as they tell; nvme and peer: a block each.",
        "spill, borrowing, dispatcher",
    ),
    "transfer_bytes": Family(
        "histogram",
        ("tier", "direction"),
        "Sizes of transfers. pinned write: what a commit publishes; peer write: what is lent.",
        "spill, borrowing, store, dispatcher",
    ),
    "loop_lag_seconds": Family("histogram", (), "How late the brain loop comes to a timer.", "loop_lag"),
    "predictions": Family("counter", ("kind",), "Predictions that could be compared with what happened.", "advisor"),
    "close_predictions": Family("counter", ("kind",), "Those that were within a quarter either way.", "advisor"),
    "prediction_ratio": Family("gauge", ("kind",), "Actual / predicted, of the recent ones.", "advisor"),
    **{f"{name}_seconds": Family("counter", (), text, "advisor") for name, text in SECONDS.items()},
    # --- counters by reason ---
    "calls": Family("counter", ("verb",), "Requests served or refused.", "dispatcher"),
    "errors": Family("counter", ("code",), "Requests answered with an error.", "dispatcher"),
    "crashes": Family("counter", (), "Requests that met a bug of ours.", "dispatcher"),
    "trace_spans": Family(
        "counter",
        ("result",),
        "Spans, where tracing is on: exported; dropped, since the queue was full; failed, since the collector took them not.",
        "otel",
    ),
    "declined_blocks": Family(
        "counter", ("reason",), "Blocks that were offered and not taken (puts dropped).", "store"
    ),
    "skipped_writes": Family("counter", ("reason",), "Blocks that were not written to a drive.", "spill"),
    "failed_reads": Family("counter", ("reason",), "Blocks that a drive could not give back.", "spill"),
    "failed_writes": Family("counter", ("reason",), "Blocks that a drive did not take.", "spill"),
    "failed_fetches": Family("counter", ("reason",), "Blocks that did not come from another node.", "borrowing"),
}
_LABELLED = re.compile(
    r"(calls|errors|declined_blocks|skipped_writes|failed_reads|failed_writes|failed_fetches|nvme_problems|trace_spans)_(\w+)_total"
)
_UNLABELLED = {
    name.removesuffix("_total"): Family("counter", (), text, "store, spill, borrowing")
    for name, text in COUNTERS.items()
    if not _LABELLED.fullmatch(name)
}
assert not METRICS.keys() & _UNLABELLED.keys()
METRICS |= _UNLABELLED

_MAKE = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": InfoMetricFamily,
}


def exported_names() -> dict[str, Family]:
    """Every name that a query may use."""
    names: dict[str, Family] = {}
    for name, family in METRICS.items():
        ends = {
            "counter": ("_total",),
            "gauge": ("",),
            "histogram": ("_bucket", "_sum", "_count"),
            "info": ("_info",),
        }[family.kind]
        names |= {f"kvstore_{name}{end}": family for end in ends}
    return names


def as_markdown() -> str:
    """deploy/METRICS.md."""
    lines = [
        "# Metrics",
        "",
        "Printed from `kvstore/metrics.py` by `python -m kvstore.metrics`; a test compares the two. Served at `/metrics`.",
        "",
        "The law, asserted in tests after every step: `sum(kvstore_hit_tokens_total) + sum(kvstore_missed_tokens_total) =",
        "kvstore_requested_tokens_total`. A request counts when it is settled: at Release, or 5 s after the last Match that",
        "nobody took up. Labels are bounded: tiers, verbs, reasons and states are fixed sets, drives and nodes are those of the",
        "settings, and 50 tenants have a label, the others are `(other)`.",
        "",
        "| name | type | labels | what | counted in |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, family in METRICS.items():
        end = {"counter": "_total", "info": "_info"}.get(family.kind, "")
        labels = ", ".join(family.labels)
        lines.append(f"| `kvstore_{name}{end}` | {family.kind} | {labels} | {family.text} | {family.source} |")
    lines += [
        "",
        "Reasons of `kvstore_missed_tokens_total`:",
        "",
        "| reason | the token was computed, because |",
        "| --- | --- |",
    ]
    lines += [f"| `{reason}` | {text} |" for reason, text in MISSES.items()]
    return "\n".join(lines) + "\n"


class StatsCollector:
    """A prometheus_client collector. `snapshot` is called once for each scrape, on the scraping thread."""

    def __init__(self, snapshot: Callable[[], pb.StatsReply]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        families = _Families()
        stats = self._snapshot()
        for fill in (
            _sidecar,
            _usage,
            _capacity,
            _tiers,
            _drives,
            _budget,
            _peers,
            _directory,
            _histograms,
            _predictions,
        ):
            fill(stats, families)
        _counters(dict(stats.counters), families)
        yield from families.made.values()


def tier_state(tier: pb.TierStats) -> str:
    """One word for a tier: that of its drives when they agree, recovering while any is, degraded when some are not well."""
    states = {drive.state for drive in tier.drives} or {"ready"}
    if "recovering" in states:
        return "recovering"
    return states.pop() if len(states) == 1 else "degraded"


class _Families:
    """Families of METRICS, made when they get their first sample."""

    def __init__(self) -> None:
        self.made: dict[str, Metric] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """A sample."""
        self._family(name).add_metric(labels, value)  # type: ignore[attr-defined]  # Metric's base has none

    def info(self, name: str, **values: str) -> None:
        self._family(name).add_metric((), values)  # type: ignore[attr-defined]  # likewise

    def histogram(
        self, name: str, labels: Sequence[str], bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> None:
        """Cumulative, as Prometheus wants it."""
        edges = [*(f"{bound:g}" if bound < _EXACT else str(int(bound)) for bound in bounds), "+Inf"]
        buckets = list(zip(edges, accumulate(counts), strict=True))
        self._family(name).add_metric(labels, buckets, total)  # type: ignore[attr-defined]  # likewise

    def _family(self, name: str) -> Metric:
        made = self.made.get(name)
        if made is None:
            family = METRICS[name]
            labels = () if family.kind == "info" else family.labels
            made = self.made[name] = _MAKE[family.kind](f"kvstore_{name}", family.text, labels=labels)
        return made


_EXACT = 1e4  # %g rounds what is larger

_Fill = Callable[[pb.StatsReply, _Families], None]


def _sidecar(stats: pb.StatsReply, families: _Families) -> None:
    families.info("sidecar", version=stats.server_version, boot_id=stats.boot_id.hex())
    families.add("uptime_seconds", stats.uptime_s)
    families.add("namespaces", stats.num_namespaces)
    families.add("sessions", stats.num_sessions)
    families.add("blocks", stats.num_blocks)
    families.add("leases", stats.num_leases)
    families.add("limbo_leases", stats.num_expired_leases)
    found = [each.problem for each in stats.problems]
    for problem in PROBLEMS:
        families.add("problem", found.count(problem), problem)


def _usage(stats: pb.StatsReply, families: _Families) -> None:
    usage = stats.usage
    families.add("requests", usage.num_requests)
    families.add("open_requests", stats.num_open_requests)
    families.add("requested_tokens", usage.requested_tokens)
    for tier in ("hbm", "pinned", "nvme", "peer"):
        families.add("hit_tokens", usage.hit_tokens.get(tier, 0), tier)
    for reason in MISSES:
        families.add("missed_tokens", usage.missed_tokens.get(reason, 0), reason)
    for tenant in stats.tenants:
        families.add("tenant_requested_tokens", tenant.usage.requested_tokens, tenant.tenant)
        families.add("tenant_missed_tokens", sum(tenant.usage.missed_tokens.values()), tenant.tenant)
        for tier, tokens in tenant.usage.hit_tokens.items():
            families.add("tenant_hit_tokens", tokens, tenant.tenant, tier)
        for tier, nbytes in tenant.held_bytes.items():
            families.add("tenant_held_bytes", nbytes, tenant.tenant, tier)


def _capacity(stats: pb.StatsReply, families: _Families) -> None:
    curve = stats.capacity_curve
    for each in curve.capacities:
        families.add("capacity_hit_ratio", each.hit_rate, each.capacity)
    families.add("capacity_curve_tokens", curve.requested_tokens)


def _tiers(stats: pb.StatsReply, families: _Families) -> None:
    for tier in stats.tiers:
        families.add("tier_capacity_bytes", tier.capacity_bytes, tier.name)
        for state in _SLOT_STATES:
            families.add("tier_bytes", getattr(tier, f"{state}_bytes"), tier.name, state)
        for state in _BLOCK_STATES:
            families.add("tier_blocks", getattr(tier, f"{state}_blocks"), tier.name, state)
    for removals in stats.removals:
        labels = removals.tier, removals.policy, removals.reason
        families.add("removed_blocks", removals.num_blocks, *labels)
        families.add("removed_bytes", removals.nbytes, *labels)
    for queue in stats.queues:
        families.add("queue_length", queue.length, queue.queue)
        if queue.limit:
            families.add("queue_limit", queue.limit, queue.queue)


def _drives(stats: pb.StatsReply, families: _Families) -> None:
    for tier in stats.tiers:
        for drive in tier.drives:
            families.add("drive_capacity_bytes", drive.capacity_bytes, tier.name, drive.path)
            for state in DRIVE_STATES:
                families.add("drive_state", drive.state == state, tier.name, drive.path, state)


def _budget(stats: pb.StatsReply, families: _Families) -> None:
    if not stats.HasField("write_budget"):
        return
    budget = stats.write_budget
    families.info("nvme_write_policy", policy=budget.policy)
    families.add("nvme_written_bytes", budget.written_bytes)
    families.add("nvme_write_limit_bytes_per_second", budget.bytes_per_s)
    families.add("nvme_write_limit_bytes_per_day", budget.bytes_per_day)
    families.add("nvme_day_written_bytes", budget.day_bytes)


def _peers(stats: pb.StatsReply, families: _Families) -> None:
    for peer in stats.peers:
        families.add("peer_fetched_bytes", peer.fetched_bytes, peer.node_id)
        families.add("peer_queued_bytes", peer.queued_bytes, peer.node_id)
        families.add("peer_bytes_per_second", peer.bytes_per_s, peer.node_id)
        families.add("peer_latency_seconds", peer.latency_s, peer.node_id)
        for state in PEER_STATES:
            families.add("peer_state", peer.state == state, peer.node_id, peer.address, state)


def _directory(stats: pb.StatsReply, families: _Families) -> None:
    if not stats.HasField("directory"):
        return
    directory = stats.directory
    for field in ("nodes", "entries"):
        families.add(f"directory_{field}", getattr(directory, f"num_{field}"))
    families.add("directory_own_blocks", directory.own_blocks)
    families.add("directory_age_seconds", directory.age_s)
    for field in ("sent_bytes", "received_bytes", "failures", "resyncs", "dropped_updates"):
        families.add(f"directory_{field}", getattr(directory, field))


def _histograms(stats: pb.StatsReply, families: _Families) -> None:
    for each in stats.histograms:
        if each.name in METRICS:
            families.histogram(each.name, each.labels, each.bounds, each.counts, each.sum)


def _predictions(stats: pb.StatsReply, families: _Families) -> None:
    for each in stats.predictions:
        families.add("predictions", each.num, each.kind)
        families.add("close_predictions", each.num_close, each.kind)
        families.add("prediction_ratio", each.ratio, each.kind)
    for name, seconds in sorted(stats.seconds.items()):
        families.add(f"{name}_seconds", seconds)


def _counters(counters: dict[str, int], families: _Families) -> None:
    for name, value in sorted({"crashes_total": 0, **counters}.items()):
        if match := _LABELLED.fullmatch(name):
            families.add(match[1], value, match[2])
        else:
            families.add(name.removesuffix("_total"), value)


if __name__ == "__main__":
    print(as_markdown(), end="")
