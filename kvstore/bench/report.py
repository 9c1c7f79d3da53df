"""A result as JSON for scripts and as tables for people."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore import __version__
from kvstore.bench.compare import STATISTICS
from kvstore.bench.incident import IncidentOutcome
from kvstore.bench.measures import LATENCIES, Spread, Summary, around, latencies
from kvstore.bench.plan import Result, SideResult
from kvstore.bench.sample import Sample

FORMAT = 1
"""Of the JSON; a change that would mislead a reader of the old one raises it."""

_TITLES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}
_LATE_S = 0.1  # a client this late (p99) is worth a word


def find_problems(result: Result) -> list[str]:
    """What makes a run one that should not be relied upon; the command then exits with 1."""
    found = [
        f"{side.target.label}: no request succeeded ({_failures(side.summary)})"
        for side in result.sides
        if side.summary.succeeded == 0
    ]
    incident = result.plan.incident
    for side in result.sides if incident else []:
        if side.incident is None:
            found.append(
                f"{side.target.label}: the run was over after {side.duration_s:.1f} s, before --at: use an earlier time or more "
                "requests"
            )
        elif side.incident.exit_code != 0:
            found.append(f"{side.target.label}: the command failed ({side.incident.exit_code}): {side.incident.output}")
    comparison = result.comparison
    if comparison and comparison.first_difference and result.plan.temperature == 0:
        first = comparison.first_difference
        found.append(
            f"outputs differ in {comparison.different} of {comparison.compared} requests, first in request {first.request} at "
            f"character {first.position}: {first.first!r} against {first.second!r}"
        )
    return found


def find_warnings(result: Result) -> list[str]:
    """What may make a comparison say less than it seems to."""
    if len(result.sides) < 2 or result.plan.cold_by:
        return []
    one, other = result.sides
    if not one.sidecar or one.sidecar != other.sidecar or one.target.url == other.target.url:
        return []
    labels = f"{one.target.label} and {other.target.label}"
    return [
        f"{labels} use one sidecar: what one has computed the other finds; give each its own, or use --scenario all-cold"
    ]


def as_json(result: Result) -> dict[str, Any]:
    """Everything but the texts; times in seconds."""
    plan = result.plan
    return {
        "format": FORMAT,
        "kvstore_version": __version__,
        "workload": {
            "name": plan.workload.name,
            "seed": plan.workload.seed,
            "digest": plan.workload.digest(),
            "requests": plan.workload.num_requests,
            "arrival": plan.arrivals.kind,
            "concurrency": plan.arrivals.concurrency or None,
        },
        "api": plan.api,
        "temperature": plan.temperature,
        "ignore_eos": plan.ignore_eos,
        "deadline_s": plan.deadline_s,
        "rounds": plan.rounds,
        "scenario": plan.scenario,
        "nonce": plan.nonce,
        "slo_s": plan.slo,
        "sides": [_side_as_json(side) for side in result.sides],
        "comparison": None if result.comparison is None else dataclasses.asdict(result.comparison),
        "warnings": find_warnings(result),
        "problems": find_problems(result),
    }


def _side_as_json(side: SideResult) -> dict[str, Any]:
    incident = None
    if side.incident:
        groups = around(side.samples, side.incident.at_s)
        incident = dataclasses.asdict(side.incident) | {
            name: {
                "requests": len(group),
                "failed": sum(not s.ok for s in group),
                "latencies": _plain(latencies(group)),
            }
            for name, group in groups.items()
        }
    summary = {entry.name: getattr(side.summary, entry.name) for entry in dataclasses.fields(side.summary)}
    return {
        "label": side.target.label,
        "url": side.target.url,
        "extra_body": side.target.extra,
        "model": side.model,
        "cold_by": side.cold_by,
        "summary": {name: _plain(value) for name, value in summary.items()},
        "incident": incident,
        "requests": [_sample_as_json(s) for s in sorted(side.samples, key=lambda s: (s.conversation, s.turn))],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return dataclasses.asdict(value)
    return {name: _plain(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _sample_as_json(sample: Sample) -> dict[str, Any]:
    failure = sample.exchange.failure
    return {
        "request": sample.name,
        "due_s": sample.due_s,
        "sent_s": sample.exchange.sent_s,
        "ttft_s": sample.ttft_s,
        "tpot_s": sample.tpot_s,
        "max_itl_s": max(sample.itl_s, default=None),
        "e2e_s": sample.e2e_s,
        "asked_prompt_tokens": sample.asked_prompt_tokens,
        "prompt_tokens": sample.prompt_tokens,
        "output_tokens": sample.output_tokens,
        "cached_tokens": sample.cached_tokens,
        "finish_reason": sample.exchange.finish_reason,
        "output_digest": sample.output_digest(),
        "failure": None if failure is None else dataclasses.asdict(failure),
    }


def make_report(result: Result) -> Group:
    """All tables."""
    plan = result.plan
    head = f"{plan.workload.name}, {plan.arrivals.kind} arrivals, seed {plan.workload.seed}"
    rows = {side.target.label: side.summary.latencies for side in result.sides}
    ratios = result.comparison.ratios if result.comparison else None
    parts: list[Table | Text] = [Text(f"{head}, workload {plan.workload.digest()}")]
    parts += [_latency_table(rows, ratios), _totals_table(result)]
    for side in result.sides:
        if side.incident:
            parts += _incident_tables(side, side.incident)
    parts += [Text(note, style="yellow") for note in _notes(result)]
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table


def _latency_table(rows: Mapping[str, Mapping[str, Spread | None]], ratios: Mapping[str, float] | None = None) -> Table:
    """A line for each of `rows` under each latency; `ratios` are of the second row with the first."""
    table = _table("", "", "count", *(f"{what} ms" for what in STATISTICS), "max ms")
    labels = list(rows)
    for name in LATENCIES:
        for label, spreads in rows.items():
            spread = spreads[name]
            title = _TITLES[name] if label == labels[0] else ""
            cells = [_ms(spread, what) for what in (*STATISTICS, "max")]
            table.add_row(title, label, f"{spread.count:,}" if spread else "0", *cells)
        if ratios is not None:
            table.add_row(
                "", f"{labels[1]} / {labels[0]}", "", *(_ratio(ratios.get(f"{name} {what}")) for what in STATISTICS)
            )
        if len(rows) > 1:
            table.add_section()
    return table


def _totals_table(result: Result) -> Table:
    sides = [side.summary for side in result.sides]
    table = _table("", *(side.target.label for side in result.sides))
    ratios = result.comparison.ratios if result.comparison else {}
    if result.comparison:
        table.add_column("ratio", justify="right", no_wrap=True)
    for title, name, cells in _totals(sides):
        table.add_row(title, *cells, *([_ratio(ratios.get(name))] if result.comparison else []))
    return table


def _totals(sides: Sequence[Summary]) -> Iterator[tuple[str, str, list[str]]]:
    yield "requests", "", [f"{side.requests:,}" for side in sides]
    yield "succeeded", "", [f"{side.succeeded:,}" for side in sides]
    for kind in sorted({kind for side in sides for kind in side.failures}):
        yield f"failed: {kind}", "", [f"{side.failures.get(kind, 0):,}" for side in sides]
    if any(side.retry_after_s for side in sides):
        yield "Retry-After, mean s", "", [f"{s.retry_after_s.mean:.1f}" if s.retry_after_s else "-" for s in sides]
    yield "duration, s", "", [f"{side.duration_s:.2f}" for side in sides]
    yield "requests / s", "requests_per_s", [f"{side.requests_per_s:.2f}" for side in sides]
    yield "output tokens / s", "output_tokens_per_s", [f"{side.output_tokens_per_s:.1f}" for side in sides]
    yield "all tokens / s", "total_tokens_per_s", [f"{side.total_tokens_per_s:.1f}" for side in sides]
    if any(side.goodput_per_s is not None for side in sides):
        yield "goodput: within the SLO / s", "goodput_per_s", [f"{side.goodput_per_s or 0:.2f}" for side in sides]
        yield "within the SLO", "", [f"{side.good or 0:,}" for side in sides]
    yield "prompt tokens", "", [f"{side.prompt_tokens:,}" for side in sides]
    yield "  asked for", "", [f"{side.asked_prompt_tokens:,}" for side in sides]
    yield "  cached", "", [_cached(side) for side in sides]
    yield "output tokens", "", [f"{side.output_tokens:,}" for side in sides]
    yield "output hash", "", [side.output_hash for side in sides]


def _incident_tables(side: SideResult, incident: IncidentOutcome) -> list[Table | Text]:
    groups = around(side.samples, incident.at_s)
    counts = ", ".join(f"{len(group)} {name} ({sum(not s.ok for s in group)} failed)" for name, group in groups.items())
    title = f"{side.target.label}: command at {incident.at_s:.1f} s, exit code {incident.exit_code}; requests: {counts}"
    return [Text(title), _latency_table({name: latencies(group) for name, group in groups.items()})]


def _notes(result: Result) -> Iterator[str]:
    for side in result.sides:
        label, summary = side.target.label, side.summary
        for kind, message in summary.failure_examples.items():
            yield f"{label}: {kind}, for example: {message}"
        if summary.without_usage:
            yield f"{label}: {summary.without_usage} answers came without usage; their chunks were counted as tokens"
        if summary.lag_s and summary.lag_s.p99 > _LATE_S:
            yield f"{label}: requests were sent late (p99 {summary.lag_s.p99:.2f} s): this client was the limit"
        if side.cold_by:
            yield f"{label}: every request made cold by {side.cold_by}"
    if len({side.model for side in result.sides}) > 1:
        yield "the servers' model names differ: " + ", ".join(side.model for side in result.sides)
    yield from find_warnings(result)
    if result.comparison:
        yield _sameness(result)


def _sameness(result: Result) -> str:
    comparison = result.comparison
    assert comparison is not None
    same = "the same" if comparison.same_outputs else f"{comparison.different} different"
    rest = f"; {comparison.unmatched} not compared" if comparison.unmatched else ""
    return f"outputs of {comparison.compared} requests: {same}{rest}"


def _ms(spread: Spread | None, what: str) -> str:
    return "-" if spread is None else f"{getattr(spread, what) * 1000:,.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _cached(summary: Summary) -> str:
    if summary.cached_tokens is None:
        return "not told"
    share = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    return f"{summary.cached_tokens:,} ({share:.1%})"


def _failures(summary: Summary) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in summary.failures.items())
