"""Stats as named numbers: what the dashboard draws over time and `kvstore top` makes rates of.

    tokens.requested, tokens.hit.<tier>, tokens.missed.<reason>, requests    sums since start
    saved_s, fetch.predicted_s, fetch.actual_s                               likewise
    moved.<tier>.<direction>                                                 bytes, likewise
    removed.<tier>.<reason>, stored, declined, failed, peer.<node>           blocks, and bytes of a peer, likewise
    bytes.<tier>.<state>, capacity.<tier>, queue.<name>, leases, loop_lag_s  as of now

The same messages are behind /metrics, so the figures are the same.
"""

from collections.abc import Iterator

from kvstore.proto import kvstore_pb2 as pb

STATES = ("ready", "writing", "leaving", "limbo", "quarantined", "free")
"""Of a tier's bytes; together they are its capacity."""

_MAX_PEERS = 16  # with a line of their own


def figures(stats: pb.StatsReply) -> dict[str, float]:
    """By name."""
    return dict(_figures(stats))


def sum_of(counters: dict[str, int], *beginnings: str) -> int:
    """All counters whose names begin so."""
    return sum(count for name, count in counters.items() if name.startswith(beginnings))


def _figures(stats: pb.StatsReply) -> Iterator[tuple[str, float]]:
    counters, seconds, usage = dict(stats.counters), dict(stats.seconds), stats.usage
    yield "requests", usage.num_requests
    yield "tokens.requested", usage.requested_tokens
    for name, tokens in usage.hit_tokens.items():
        yield f"tokens.hit.{name}", tokens
    for reason, tokens in usage.missed_tokens.items():
        yield f"tokens.missed.{reason}", tokens
    yield "saved_s", seconds.get("saved_prefill", 0.0)
    for kind in ("predicted", "actual"):
        yield f"fetch.{kind}_s", seconds.get(f"{kind}_fetch", 0.0)
    for histogram in stats.histograms:
        if histogram.name == "transfer_bytes":
            yield "moved." + ".".join(histogram.labels), histogram.sum
    yield from _by_place(stats)
    yield "stored", counters.get("stored_blocks_total", 0)
    yield "declined", sum_of(counters, "declined_blocks_")
    yield "failed", sum_of(counters, "failed_reads_", "failed_writes_", "failed_fetches_")
    for peer in stats.peers[:_MAX_PEERS]:
        yield f"peer.{peer.node_id}", peer.fetched_bytes
    for tier in stats.tiers:
        yield f"capacity.{tier.name}", tier.capacity_bytes
        for state in STATES:
            yield f"bytes.{tier.name}.{state}", getattr(tier, f"{state}_bytes")
    for queue in stats.queues:
        yield f"queue.{queue.queue}", queue.length
    yield "leases", stats.num_leases
    yield "loop_lag_s", stats.loop_lag_s


def _by_place(stats: pb.StatsReply) -> Iterator[tuple[str, float]]:
    """Removals by tier and reason, whatever the policy."""
    removed: dict[str, int] = {}
    for each in stats.removals:
        name = f"removed.{each.tier}.{each.reason}"
        removed[name] = removed.get(name, 0) + each.num_blocks
    yield from removed.items()
