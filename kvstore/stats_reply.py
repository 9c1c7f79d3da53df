"""The answer to Stats: everything that metrics, dashboard and tools show, put together on the loop from what is counted there.

Sums and sizes that are kept anyway: nothing here looks at every block.
"""

from collections.abc import Iterable, Mapping

from kvstore import __version__
from kvstore.advisor import Advisor
from kvstore.cluster import Cluster, NoCluster
from kvstore.core.plans import TIERS
from kvstore.health import problems
from kvstore.live_curve import LiveCurve
from kvstore.mover import Mover, NoMover
from kvstore.proto import kvstore_pb2 as pb
from kvstore.store import Store
from kvstore.usage import Account, Usage

_NVME = TIERS[1]


def stats_reply(  # noqa: PLR0917 - what a sidecar is made of
    store: Store,
    usage: Usage,
    curve: LiveCurve,
    advisor: Advisor,
    mover: Mover | NoMover,
    cluster: Cluster | NoCluster,
    counters: Mapping[str, int],
    now_s: float,
    *,
    boot_id: bytes,
    uptime_s: float,
    num_sessions: int,
    arena_nbytes: int,
    faulted_nbytes: int,
) -> pb.StatsReply:
    """A snapshot."""
    usage.settle_old(now_s)
    stats = store.stats()
    drives = [
        pb.DriveStats(path=str(drive.path), state=drive.state, reason=drive.reason, capacity_bytes=drive.capacity_bytes)
        for drive in mover.drives()
    ]
    budget = store.write_budget(now_s)
    reply = pb.StatsReply(
        boot_id=boot_id,
        server_version=__version__,
        uptime_s=uptime_s,
        tiers=[pb.TierStats(**tier._asdict(), drives=drives if tier.name == _NVME else ()) for tier in stats.tiers],
        num_blocks=stats.num_blocks,
        num_namespaces=stats.num_namespaces,
        num_sessions=num_sessions,
        num_leases=stats.num_leases,
        num_expired_leases=stats.num_expired_leases,
        counters={**stats.counters, **mover.counters(), **counters},
        seconds=advisor.seconds,
        peers=_peers(store, cluster, now_s),
        usage=_usage(usage.total),
        tenants=_tenants(usage, store.held_by_tenant()),
        histograms=[pb.Histogram(**reading._asdict()) for reading in store.meters.readings()],
        queues=[pb.QueueDepth(**depth._asdict()) for depth in store.queues()],
        removals=[pb.Removals(**removals._asdict()) for removals in store.removals()],
        write_budget=None if budget is None else pb.WriteBudget(**budget._asdict()),
        predictions=[
            pb.Prediction(kind=kind, num=log.num, num_close=log.num_close, ratio=log.ratio)
            for kind, log in (("fetch", advisor.fetches), ("prefill", advisor.steps))
        ],
        directory=_directory(cluster, now_s),
        capacity_curve=curve_reply(curve, {tier.name: tier.capacity_bytes for tier in stats.tiers}),
        loop_lag_s=store.meters.largest_lag_s(now_s),
        num_open_requests=usage.num_open,
    )
    reply.problems.extend(problems(reply, arena_nbytes=arena_nbytes, faulted_nbytes=faulted_nbytes))
    return reply


def curve_reply(curve: LiveCurve, capacity_bytes: Mapping[str, int]) -> pb.CapacityCurve:
    """What other sizes would hit, given the sizes that there are, by tier."""
    fields = curve.figures(capacity_bytes[TIERS[0]], capacity_bytes.get(_NVME, 0))._asdict()
    capacities = [pb.CapacityHits(**each._asdict()) for each in fields.pop("capacities")]
    return pb.CapacityCurve(capacities=capacities, **fields)


def _peers(store: Store, cluster: Cluster | NoCluster, now_s: float) -> list[pb.PeerStats]:
    return [
        pb.PeerStats(
            node_id=node.node_id,
            address=node.control_address,
            links=kinds,
            **store.peer_figures(node.node_id, now_s)._asdict(),
        )
        for node, kinds in cluster.nodes()
    ]


def _directory(cluster: Cluster | NoCluster, now_s: float) -> pb.DirectoryStats | None:
    figures = cluster.figures()
    if figures is None:
        return None
    fields = figures._asdict()
    return pb.DirectoryStats(age_s=now_s - max(fields.pop("last_refresh_s"), cluster.opened_s), **fields)


def _usage(account: Account) -> pb.Usage:
    return pb.Usage(
        num_requests=account.num_requests,
        requested_tokens=account.requested,
        hit_tokens=account.hits,
        missed_tokens=account.misses,
    )


def _tenants(usage: Usage, held: Mapping[str, Mapping[str, int]]) -> Iterable[pb.TenantUsage]:
    """Those that have asked, and those that only hold; a label each. A tenant may be called as we call the others."""
    by_label: dict[str, pb.TenantUsage] = {}
    for label, account in usage.tenants():
        by_label.setdefault(label, pb.TenantUsage(tenant=label)).usage.MergeFrom(_usage(account))
    for tenant, nbytes in held.items():
        label = usage.label(tenant)
        entry = by_label.setdefault(label, pb.TenantUsage(tenant=label))
        for tier, count in nbytes.items():
            entry.held_bytes[tier] += count
    return by_label.values()
