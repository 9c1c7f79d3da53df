"""What is wrong with a sidecar now, by name: /readyz, metrics and the dashboard say the same.

loop_slow       the brain loop came late to something within the last ten seconds (that it hangs, nobody can hear from it)
tier_degraded   a drive is degraded or off
disk_full       the file system of a drive is full, or a quota is reached
directory_lost  nothing was heard of other nodes for a while: blocks of theirs are found as last known
peer_suspect    another node failed and is left alone for a while
arena_small     the machine did not give all the memory for the arena
"""

from collections.abc import Iterator

from kvstore.core.moves import MoveProblem
from kvstore.proto import kvstore_pb2 as pb

PROBLEMS = ("loop_slow", "tier_degraded", "disk_full", "directory_lost", "peer_suspect", "arena_small")

LOOP_SLOW_S = 0.5
"""Twice a client's deadline (CALL_DEADLINE_S): engines have given up on us by then."""

DIRECTORY_LOST_S = 10.0
"""A directory of a thousand nodes is read every five seconds."""

ARENA_DEADLINE_S = 60.0
"""After the start; taking memory goes at some gigabytes a second."""

_FULL = (MoveProblem.NO_SPACE.value, "No space left", "quota", "File too large")


def problems(stats: pb.StatsReply, *, arena_nbytes: int, faulted_nbytes: int) -> Iterator[pb.Problem]:
    """All of them."""
    if stats.loop_lag_s > LOOP_SLOW_S:
        yield pb.Problem(problem="loop_slow", reason=f"it came {stats.loop_lag_s:.2f} s late within the last 10 s")
    for drive in (drive for tier in stats.tiers for drive in tier.drives):
        if drive.state in {"degraded", "off"}:
            full = any(sign in drive.reason for sign in _FULL)
            yield pb.Problem(
                problem="disk_full" if full else "tier_degraded",
                subject=drive.path,
                reason=f"{drive.state}: {drive.reason}",
            )
    if stats.HasField("directory") and stats.directory.age_s > DIRECTORY_LOST_S:
        yield pb.Problem(problem="directory_lost", reason=f"nothing was heard for {stats.directory.age_s:.0f} s")
    for peer in stats.peers:
        if peer.state == "suspect":
            yield pb.Problem(
                problem="peer_suspect",
                subject=peer.node_id,
                reason=f"it failed; {peer.address} is left alone for a while",
            )
    if faulted_nbytes < arena_nbytes and stats.uptime_s > ARENA_DEADLINE_S:
        yield pb.Problem(problem="arena_small", reason=f"{faulted_nbytes} of {arena_nbytes} bytes could be had")
