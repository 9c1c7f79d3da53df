"""What is wrong, by name."""

import pytest

from kvstore.health import ARENA_DEADLINE_S, DIRECTORY_LOST_S, LOOP_SLOW_S, PROBLEMS, problems
from kvstore.proto import kvstore_pb2 as pb


def names(stats: pb.StatsReply, *, faulted: int = 100) -> list[tuple[str, str]]:
    return [(each.problem, each.subject) for each in problems(stats, arena_nbytes=100, faulted_nbytes=faulted)]


def drive(state: str, reason: str) -> pb.StatsReply:
    drives = [pb.DriveStats(path="/mnt/0", state=state, reason=reason)]
    return pb.StatsReply(tiers=[pb.TierStats(name="nvme", drives=drives)])


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (pb.StatsReply(loop_lag_s=LOOP_SLOW_S), []),
        (pb.StatsReply(loop_lag_s=LOOP_SLOW_S + 0.01), [("loop_slow", "")]),
        (drive("ready", ""), []),
        (drive("recovering", "being opened"), []),
        (drive("degraded", "reads fail: eio"), [("tier_degraded", "/mnt/0")]),
        (drive("off", "locked by another process"), [("tier_degraded", "/mnt/0")]),
        (drive("degraded", "writes fail: no_space"), [("disk_full", "/mnt/0")]),
        (drive("degraded", "index: [Errno 28] No space left on device"), [("disk_full", "/mnt/0")]),
        (pb.StatsReply(directory=pb.DirectoryStats(age_s=DIRECTORY_LOST_S)), []),
        (pb.StatsReply(directory=pb.DirectoryStats(age_s=DIRECTORY_LOST_S + 1)), [("directory_lost", "")]),
        (pb.StatsReply(peers=[pb.PeerStats(node_id="b", state="ready")]), []),
        (pb.StatsReply(peers=[pb.PeerStats(node_id="b", state="suspect")]), [("peer_suspect", "b")]),
    ],
)
def test_each_is_named_with_its_subject(stats: pb.StatsReply, expected: list[tuple[str, str]]) -> None:
    assert names(stats) == expected
    assert {problem for problem, _ in expected} <= set(PROBLEMS)


def test_an_arena_that_grows_still_is_not_small() -> None:
    assert names(pb.StatsReply(uptime_s=ARENA_DEADLINE_S), faulted=99) == []
    assert names(pb.StatsReply(uptime_s=ARENA_DEADLINE_S + 1), faulted=99) == [("arena_small", "")]
    assert names(pb.StatsReply(uptime_s=ARENA_DEADLINE_S + 1), faulted=100) == []
