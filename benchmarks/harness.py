"""What all benchmarks share: interleaved runs, medians beside a limit measured in the same run, the machine's card.

A wall time on a shared machine means little; a ratio of medians whose runs took turns means more. So a benchmark hands all
its cases to `interleave`, the limit among them (a raw memcpy, an echo), and judges by the ratio.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

_PACKAGES = ("numpy", "xxhash", "torch", "uvloop", "grpcio", "protobuf")

Cell = str | int | float
Row = Mapping[str, Cell]


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each run of one case, in order."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99_s(self) -> float:
        """The largest one when there are fewer than a hundred."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that was promised, and what was found."""

    text: str
    found: float
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one benchmark found. All rows have the same keys; a key ends in its unit."""

    question: str
    command: str
    rows: Sequence[Row]
    goals: Sequence[Goal] = ()
    remarks: Sequence[str] = ()


def interleave(cases: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 1) -> dict[str, Samples]:
    """Run every case once a round, `rounds` times, after `warm_up` rounds that do not count.

    Every second round goes backwards, so that no case always follows the same other.
    """
    assert rounds > 0
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-warm_up, rounds):
        order = list(cases)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            took_s = timed(cases[name])
            if number >= 0:
                seconds[name].append(took_s)
    return {name: Samples(tuple(taken)) for name, taken in seconds.items()}


def timed(call: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e9


def paired_ratio(samples: Samples, limit: Samples) -> float:
    """Median over the rounds of sample / limit: what a slow minute does to both cancels out."""
    return statistics.median(a / b for a, b in zip(samples.seconds, limit.seconds, strict=True))


def millis(seconds: float) -> float:
    """Milliseconds, rounded to a microsecond."""
    return round(seconds * 1e3, 3)


def machine_card() -> dict[str, str]:
    """Where and when figures were taken."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "cpu": _cpu_model(),
        "cores": str(os.cpu_count()),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": ", ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name))),
        "load": f"{load} (1, 5, 15 minutes, before the run)",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def show(report: Report, card: Mapping[str, str], *, as_json: bool) -> None:
    """Print a report for people, or as one JSON object."""
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(report), "machine": dict(card)}))
        return
    console = Console()
    table = Table(title=report.question, title_justify="left")
    for name in report.rows[0]:
        table.add_column(name, justify="left" if isinstance(report.rows[0][name], str) else "right")
    for row in report.rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)
    for line in [goal_line(goal) for goal in report.goals] + list(report.remarks):
        console.print(f"  {line}", highlight=False)
    console.print("  " + "; ".join(f"{name}: {value}" for name, value in card.items()), style="dim", highlight=False)


def as_markdown(report: Report) -> str:
    """A section of RESULTS.md."""
    names = list(report.rows[0])
    lines = [f"## {report.question}", "", f"`{report.command}`", ""]
    lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(_text(value) for value in row.values()) + " |" for row in report.rows]
    lines += ["", *[f"- {goal_line(goal)}" for goal in report.goals], *[f"- {remark}" for remark in report.remarks], ""]
    return "\n".join(lines)


def goal_line(goal: Goal) -> str:
    """The goal, the figure, and whether it was met."""
    return f"{goal.text}: {_text(goal.found)}, {'met' if goal.met else 'NOT met'}"


def at_most(text: str, found: float, limit: float) -> Goal:
    """A goal that is met at or below `limit`."""
    return Goal(f"{text} (goal: at most {_text(limit)})", found, met=found <= limit)


def at_least(text: str, found: float, limit: float) -> Goal:
    """A goal that is met at or above `limit`."""
    return Goal(f"{text} (goal: at least {_text(limit)})", found, met=found >= limit)


def _text(value: Cell) -> str:
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
