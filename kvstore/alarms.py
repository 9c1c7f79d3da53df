"""What somebody should look at: what is wrong now, and what went wrong lately, in words, with what to do about it."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from kvstore.figures import sum_of
from kvstore.proto import kvstore_pb2 as pb

Level = Literal["critical", "warning"]


class Alarm(NamedTuple):
    """One sentence of what, one of why, one of what to do."""

    level: Level
    title: str
    why: str
    advice: str


_PROBLEMS: dict[str, tuple[Level, str, str]] = {
    "loop_slow": (
        "critical",
        "The sidecar answers late",
        "Give it a core of its own; look for a process that takes it.",
    ),
    "tier_degraded": (
        "critical",
        "A drive is not well",
        "Look at the kernel's log and the drive; blocks on it are misses.",
    ),
    "disk_full": ("critical", "A drive is full", "Free space on its file system, or set nvme_bytes lower."),
    "directory_lost": (
        "warning",
        "The directory of other nodes does not answer",
        "Blocks of others are found as last known. Look at the directory server and the network.",
    ),
    "peer_suspect": ("warning", "Another node failed", "It is asked again by itself; look at that node and its link."),
    "arena_small": (
        "warning",
        "The arena is smaller than it was meant to be",
        "Free memory, or set arena_bytes lower.",
    ),
}
_FEW_TOKENS = 20_000  # requests for fewer tell nothing of a rate
_FELL_TO = 0.5  # of the hit rate before
_FEW_FETCHES = 20
_SLOW_RATIO = 1.5
_LATE_S = 0.02  # a fetch, in the mean: what is late by less delays nobody's first token


def alarms(
    now: pb.StatsReply, before: pb.StatsReply | None = None, earlier: pb.StatsReply | None = None
) -> list[Alarm]:
    """The critical ones first. `before` is from some minutes ago and `earlier` from some minutes before that; without them
    nothing is said of what went wrong lately."""
    found = [*_problems(now), *_predictions(now)]
    if before is not None and before.boot_id == now.boot_id:
        found += _lately(now, before)
        if earlier is not None and earlier.boot_id == now.boot_id:
            found += _hit_rate(now, before, earlier)
    return sorted(found, key=lambda alarm: alarm.level)


def hit_rate(now: pb.StatsReply, before: pb.StatsReply) -> float | None:
    """Of the tokens requested in between; None: too few to tell."""
    requested = now.usage.requested_tokens - before.usage.requested_tokens
    if requested < _FEW_TOKENS:
        return None
    return (sum(now.usage.hit_tokens.values()) - sum(before.usage.hit_tokens.values())) / requested


def _problems(now: pb.StatsReply) -> Iterator[Alarm]:
    for each in now.problems:
        level, title, advice = _PROBLEMS.get(each.problem, ("warning", each.problem.replace("_", " "), ""))
        yield Alarm(level, f"{title}: {each.subject}" if each.subject else title, each.reason, advice)


def _predictions(now: pb.StatsReply) -> Iterator[Alarm]:
    for each in now.predictions:
        if each.kind != "fetch" or each.num < _FEW_FETCHES:
            continue
        late_s = (now.seconds["actual_fetch"] - now.seconds["predicted_fetch"]) / each.num
        if each.ratio > _SLOW_RATIO and late_s > _LATE_S:
            yield Alarm(
                "warning",
                "Fetches take longer than predicted",
                f"{each.ratio:.1f} times as long, over the recent ones.",
                "Something else uses the drives, the links or the memory; plans follow within some requests.",
            )


def _lately(now: pb.StatsReply, before: pb.StatsReply) -> Iterator[Alarm]:
    new = {name: count - before.counters[name] for name, count in now.counters.items() if count > before.counters[name]}
    if count := new.get("crashes_total", 0):
        yield Alarm("critical", "Requests met a bug", f"{count} lately.", "The log has a traceback; please report it.")
    if count := sum_of(new, "failed_reads_checksum", "failed_fetches_corrupt"):
        yield Alarm(
            "critical",
            "Blocks were damaged",
            f"{count:,} did not match their checksum, and were misses.",
            "No wrong token came of it. Check the drive (kvstore check), the link, the memory.",
        )
    others = {
        "failed_reads_": "read from a drive",
        "failed_writes_": "written to a drive",
        "failed_fetches_": "fetched",
    }
    for beginning, what in others.items():
        reasons = {
            name.removeprefix(beginning).removesuffix("_total"): count
            for name, count in new.items()
            if name.startswith(beginning) and not name.endswith(("checksum_total", "corrupt_total", "absent_total"))
        }
        if reasons:
            why = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in sorted(reasons.items()))
            yield Alarm(
                "warning",
                f"Blocks could not be {what}",
                f"{why}.",
                "They are misses; the drive or node is named below.",
            )
    if count := new.get("declined_blocks_no_space_total", 0):
        yield Alarm(
            "warning",
            "Blocks were not stored for lack of room",
            f"{count:,} lately: everything in RAM is in use.",
            "A larger arena, or fewer requests at once; see limbo for engines that died.",
        )
    if count := new.get("skipped_writes_backlog_total", 0):
        yield Alarm(
            "warning",
            "Drives do not keep up",
            f"{count:,} blocks were not written lately.",
            "They are lost when RAM evicts them. Another drive, or nvme_write_policy write_through_selective.",
        )


def _hit_rate(now: pb.StatsReply, before: pb.StatsReply, earlier: pb.StatsReply) -> Iterator[Alarm]:
    recent, usual = hit_rate(now, before), hit_rate(before, earlier)
    if recent is not None and usual is not None and recent < _FELL_TO * usual:
        yield Alarm(
            "warning",
            "The hit rate fell",
            f"{recent:.0%} lately, {usual:.0%} before.",
            "Look at misses by reason: never stored means new prompts or another namespace, evicted means too little room.",
        )
