"""The table of metrics: what it says is what is exported, under names that Prometheus wants."""

import re
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvstore.counters import COUNTERS
from kvstore.health import PROBLEMS
from kvstore.meters import LAG_WINDOW_S, Meters
from kvstore.metrics import METRICS, StatsCollector, as_markdown, exported_names
from kvstore.proto import kvstore_pb2 as pb
from kvstore.usage import MISSES

ROOT = Path(__file__).parent.parent.parent


def full_reply() -> pb.StatsReply:
    """Something of everything that there can be."""
    meters = Meters()
    meters.rpc("match", 0.0003)
    meters.rpc("match", 99.0)
    meters.transfer("nvme", "read", 1 << 20, 0.01)
    meters.transfer("pinned", "write", 1 << 40, None)
    meters.lag(0.004, 1.0)
    usage = pb.Usage(num_requests=2, requested_tokens=50, hit_tokens={"nvme": 30}, missed_tokens={"evicted": 20})
    drive = pb.DriveStats(path="/mnt/0", state="degraded", reason="r", capacity_bytes=9)
    labelled = ["calls_match", "errors_NoSpace", "nvme_problems_eio", "trace_spans_exported"]
    return pb.StatsReply(
        server_version="1",
        boot_id=bytes(16),
        tiers=[pb.TierStats(name="pinned"), pb.TierStats(name="nvme", drives=[drive])],
        peers=[pb.PeerStats(node_id="b", address="b:1", state="ready")],
        usage=usage,
        tenants=[pb.TenantUsage(tenant="t", usage=usage, held_bytes={"pinned": 7})],
        histograms=[pb.Histogram(**reading._asdict()) for reading in meters.readings()],
        queues=[pb.QueueDepth(queue="write_backlog", length=3, limit=10)],
        removals=[pb.Removals(tier="nvme", policy="leaf_lru", reason="evicted", num_blocks=4, nbytes=5)],
        write_budget=pb.WriteBudget(policy="write_through", bytes_per_day=100, day_bytes=60),
        predictions=[pb.Prediction(kind="fetch", num=4, num_close=3, ratio=1.1)],
        problems=[pb.Problem(problem="disk_full", subject="/mnt/0")],
        directory=pb.DirectoryStats(num_nodes=2),
        capacity_curve=pb.CapacityCurve(capacities=[pb.CapacityHits(capacity="2x", bytes=9, hit_rate=0.4)]),
        counters=dict.fromkeys([*COUNTERS, *(f"{name}_total" for name in labelled)], 1),
        seconds={
            name.removesuffix("_seconds"): 0.5 for name in METRICS if name.startswith(("predicted", "actual", "saved"))
        },
    )


def exported(stats: pb.StatsReply) -> dict[str, dict[tuple[str, ...], float]]:
    """By name, then by label values."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: stats))
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            of_name = samples.setdefault(sample.name, {})
            edge = sample.labels.pop("le", None)
            labels = (*sample.labels.values(), *([edge] if edge else []))
            assert labels not in of_name, f"{sample.name}{labels} twice"
            of_name[labels] = sample.value
    return samples


def test_what_the_table_names_is_what_is_exported() -> None:
    assert exported(full_reply()).keys() == exported_names().keys()


def test_the_document_is_the_table() -> None:
    assert (ROOT / "deploy" / "METRICS.md").read_text() == as_markdown(), (
        "python -m kvstore.metrics > deploy/METRICS.md"
    )


def test_names_and_units_are_as_prometheus_wants_them() -> None:
    for name, family in METRICS.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not name.endswith(("_total", "_count", "_sum", "_bucket", "_info", "_ms", "_us", "_kb", "_mb"))
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in family.labels)
        assert family.text.endswith((".", ")."))
        assert family.source


def test_every_counter_is_in_the_table() -> None:
    names = {f"{name}_total" for name, family in METRICS.items() if family.kind == "counter"}
    labelled = re.compile(r"(declined_blocks|skipped_writes|failed_reads|failed_writes|failed_fetches)_\w+_total")

    assert {labelled.sub(r"\1_total", name) for name in COUNTERS} <= names


def test_labels_are_fixed_sets() -> None:
    samples = exported(full_reply())

    assert set(samples["kvstore_missed_tokens_total"]) == {(reason,) for reason in MISSES}
    assert set(samples["kvstore_problem"]) == {(problem,) for problem in PROBLEMS}
    assert samples["kvstore_problem"]["disk_full",] == 1


def test_what_other_sizes_would_hit_has_a_label_for_each_of_a_fixed_set() -> None:
    from kvstore.live_curve import LiveCurve
    from kvstore.stats_reply import curve_reply

    curve = curve_reply(LiveCurve(), {"pinned": 1 << 30, "nvme": 1 << 34})
    samples = exported(pb.StatsReply(capacity_curve=curve))["kvstore_capacity_hit_ratio"]

    assert samples == dict.fromkeys([(name,) for name in ("0.5x", "1x", "2x", "4x", "8x", "drives", "endless")], 0.0)


def test_histograms_are_cumulative_and_end_with_all() -> None:
    samples = exported(full_reply())
    buckets = [value for (verb, _), value in samples["kvstore_rpc_seconds_bucket"].items() if verb == "match"]

    assert buckets == sorted(buckets)
    assert buckets[-2:] == [1, 2]
    assert samples["kvstore_rpc_seconds_count"]["match",] == 2
    assert abs(samples["kvstore_rpc_seconds_sum"]["match",] - 99.0003) < 1e-9
    edges = Counter(edge for _, _, edge in samples["kvstore_transfer_bytes_bucket"])
    assert edges["1048576"] == 2


def test_the_lag_that_is_shown_is_the_largest_of_the_last_seconds() -> None:
    meters = Meters()
    for at_s, lag_s in [(0.0, 0.5), (1.0, 2.0), (2.0, 0.1), (3.0, 0.3)]:
        meters.lag(lag_s, at_s)

    assert meters.largest_lag_s(3.0) == 2.0
    assert meters.largest_lag_s(1.1 + LAG_WINDOW_S) == 0.3
    assert meters.largest_lag_s(100.0) == 0.0
