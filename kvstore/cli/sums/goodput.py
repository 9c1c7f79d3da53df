"""`kvstore break-even goodput`: which requests of a latency file met the objectives."""

import re
from pathlib import Path

import click

from kvstore.calculator.goodput import Goodput, Objective
from kvstore.calculator.goodput import goodput as find_goodput
from kvstore.calculator.latency_file import LATENCIES, Requests, read_latencies
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_count,
    as_number,
    as_percent,
    as_seconds,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import POSITIVE, POSITIVE_SHARE, refuse

_COLUMNS = (
    Column("side", ""),
    Column("objective", "objective"),
    Column("bound_s", "bound", as_seconds),
    Column("share", "met by", as_percent),
    Column("p50_s", "p50", as_seconds),
    Column("p90_s", "p90", as_seconds),
    Column("p99_s", "p99", as_seconds),
    Column("wanted_bound_s", "bound for target", as_seconds),
)
_SIDE_COLUMNS = (
    Column("side", "side"),
    Column("requests", "requests", as_count),
    Column("succeeded", "succeeded", as_count),
    Column("good", "good", as_count),
    Column("good_share", "share good", as_percent),
    Column("requests_per_s", "requests/s", as_number),
    Column("goodput_per_s", "goodput/s", as_number),
)


@click.command(short_help="Requests of a latency file that meet an SLO.")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@click.option(
    "--slo", required=True, metavar="NAME=S,...", help="Bounds on ttft, tpot, itl, e2e, such as ttft=500ms,tpot=0.05."
)
@click.option("--target", type=POSITIVE_SHARE, default=0.9, show_default=True, help="Share that should meet them.")
@click.option("--duration-s", type=POSITIVE, help="Of the run, for rates.  [default: as the file says]")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME=COLUMN", help="Where a latency is: ttft=time_to_first_ms."
)
@click.option("--side", help="Of a comparison: its label.  [default: every side]")
@output_options
def goodput(
    *,
    file: Path,
    slo: str,
    target: float,
    duration_s: float | None,
    columns: tuple[str, ...],
    side: str | None,
    form: Form,
) -> None:
    """Share and rate of requests that meet an objective for TTFT, TPOT, ITL or E2E, from FILE.

    FILE is the JSON of `kvstore bench serve --json` or of `vllm bench serve --save-result --save-detailed`, or a CSV with a
    head, or a .jsonl with an object a line. Columns: ttft_s or ttft_ms (plain ttft: seconds), and likewise tpot, itl, e2e; and
    if there are any sent_s, duration_s, failure.

    \b
    Example:
      kvstore break-even goodput run.json --slo ttft=500ms,tpot=50ms
    """
    from kvstore.bench.options import parse_slo

    bounds = parse_slo(slo)
    sides = _chosen(read_latencies(file, _columns(columns)), side)
    _check_bounds(file, sides, bounds)
    found = [(one, find_goodput(one, bounds, target, duration_s)) for one in sides]
    compared = len(found) > 1
    rows = [_row(one.label, objective) for one, good in found for objective in good.objectives]
    shown = [column._replace(title="side") if column.name == "side" and compared else column for column in _COLUMNS]
    tables = [Rows("objectives", shown, rows)]
    if compared:
        tables.append(Rows("sides", _SIDE_COLUMNS, [{"side": one.label, **_numbers(good)} for one, good in found]))
    figures = () if compared else tuple(_figures(found[0][1]))
    work = [line for one, good in found for line in _work(f"{one.label}: " if compared else "", good, bounds)]
    write(Report(figures, tables, work, _notes(found, target)), form)


def _columns(given: tuple[str, ...]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for text in given:
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(.*\S)\s*", text)
        if not found or found[1] not in LATENCIES:
            refuse(
                "--column", repr(text), f"NAME=COLUMN, such as ttft=time_to_first_ms; names are {', '.join(LATENCIES)}"
            )
        chosen[found[1]] = found[2]
    return chosen


def _chosen(sides: list[Requests], label: str | None) -> list[Requests]:
    if label is None:
        return sides
    chosen = [one for one in sides if one.label == label]
    if not chosen:
        refuse("--side", repr(label), "one of " + ", ".join(one.label for one in sides))
    return chosen


def _check_bounds(file: Path, sides: list[Requests], bounds: dict[str, float]) -> None:
    """A bound on a latency that no request has would be met by all of them."""
    for one in sides:
        there = {name for request in one.requests for name in request.latencies_s}
        missing = [name for name in bounds if name not in there]
        if missing and any(request.ok for request in one.requests):
            right = (
                f"bounds on {', '.join(sorted(there))}, or --column {missing[0]}=COLUMN" if there else "another file"
            )
            refuse("--slo", f"{missing[0]}: no request of {file} has one", right)


def _numbers(good: Goodput) -> dict[str, float | None]:
    return {
        "requests": good.requests,
        "succeeded": good.succeeded,
        "good": good.good,
        "good_share": good.share,
        "requests_per_s": good.requests_per_s,
        "goodput_per_s": good.good_per_s,
    }


def _figures(good: Goodput) -> list[Figure]:
    columns = {column.name: column for column in _SIDE_COLUMNS}
    return [Figure(name, columns[name].title, value, columns[name].show) for name, value in _numbers(good).items()]


def _row(side: str, objective: Objective) -> dict[str, float | str | None]:
    return {
        "side": side,
        "objective": objective.latency,
        "bound_s": objective.bound_s,
        "share": objective.share,
        "p50_s": objective.p50_s,
        "p90_s": objective.p90_s,
        "p99_s": objective.p99_s,
        "wanted_bound_s": objective.wanted_bound_s,
    }


def _work(prefix: str, good: Goodput, bounds: dict[str, float]) -> list[Work]:
    rule = " and ".join(f"{name} <= {bound_s:g} s" for name, bound_s in bounds.items())
    work = [
        Work(
            f"{prefix}good", "requests that succeeded and whose latencies are within all bounds", rule, str(good.good)
        ),
        Work(f"{prefix}share", "good / requests", f"{good.good} / {good.requests}", as_percent(good.share)),
    ]
    if good.good_per_s is not None and good.requests_per_s:
        seconds = good.requests / good.requests_per_s
        values = f"{good.good} / {as_term(seconds)}"
        work.append(Work(f"{prefix}goodput", "good / duration", values, f"{as_term(good.good_per_s)} /s"))
    for one in good.objectives:
        met = round(one.share * good.requests)
        values = f"{met} / {good.requests}"
        name = f"{prefix}{one.latency} met"
        work.append(
            Work(name, f"requests with {one.latency} <= {one.bound_s:g} s / requests", values, as_percent(one.share))
        )
    return work


def _notes(found: list[tuple[Requests, Goodput]], target: float) -> list[str]:
    notes = []
    for one, good in found:
        if good.good_per_s is None:
            notes.append(f"{one.label}: no rate: the file does not tell its duration; give --duration-s")
        if good.share < target:
            least = min(good.objectives, key=lambda objective: objective.share)
            notes.append(
                f"{one.label}: {as_percent(good.share)} within the bounds, {as_percent(target)} wanted; {least.latency} is "
                f"met least, by {as_percent(least.share)}"
            )
    return notes
