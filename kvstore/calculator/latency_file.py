"""Latencies of requests from a file: JSON of `kvstore bench serve`, or a line for each request as CSV or JSON.

A CSV's first line names its columns; a .jsonl has an object on each line. A latency is a number in `ttft_s` or `ttft_ms` (or
plain `ttft`, in seconds), and likewise `tpot`, `itl` (a request's longest) and `e2e`; other columns are named by the caller.
`sent_s` and `duration_s` are not needed: without them there is a share of good requests, but no rate. A request failed
when its column `failure` (or `error`) says anything. An empty cell, or null, is a latency the request has not (an answer of
one token has no TPOT).
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.tables.names import nearest

LATENCIES = ("ttft", "tpot", "itl", "e2e")
MAX_BYTES = 1 << 30
"""Of a file: it is read whole."""

_UNITS = (("_s", 1.0), ("_ms", 1e-3), ("_us", 1e-6), ("", 1.0))
_FAILURES = ("failure", "error")
_NO_FAILURE = ("", "0", "false", "none", "null")


class Request(NamedTuple):
    """One; seconds by the latency's name, without those it has not."""

    ok: bool
    latencies_s: Mapping[str, float]
    sent_s: float | None = None


class Requests(NamedTuple):
    """A file's, or of one side of a comparison."""

    label: str
    requests: Sequence[Request]
    duration_s: float | None  # from the first request to the end of the last; None: not known


def read_latencies(path: Path, columns: Mapping[str, str] | None = None) -> list[Requests]:
    """Every side of a comparison, or the one set there is. `columns`: latency -> the column that has it; its unit is told by
    its ending (_s, _ms, _us; seconds without). Raises ConfigError, with the line where there is one."""
    text = _read(path)
    chosen = dict(columns or {})
    if path.suffix.lower() == ".csv":
        return [_from_rows(path, _csv_rows(path, text), chosen)]
    if path.suffix.lower() in {".jsonl", ".ndjson"}:
        return [_from_rows(path, _json_rows(path, text), chosen)]
    if path.suffix.lower() == ".json":
        return _from_report(path, text, chosen)
    raise _wrong(path, "is of no known kind; use a name that ends in .json (of a benchmark), .csv or .jsonl")


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _wrong(path, f"has more than {MAX_BYTES >> 20} MiB")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as err:
        raise _wrong(path, f"cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise _wrong(path, f"is not UTF-8 text (byte {err.start})") from err


class _Row(NamedTuple):
    where: str  # in the file, for errors
    values: Mapping[str, Any]


def _csv_rows(path: Path, text: str) -> Iterator[_Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise _wrong(path, f"column {twice!r} is there twice", where="line 1")
        for cells in reader:
            if cells and len(cells) != len(names):
                raise _wrong(
                    path, f"{len(cells)} cells, where the head has {len(names)}", where=f"line {reader.line_num}"
                )
            if cells:
                yield _Row(f"line {reader.line_num}", dict(zip(names, (cell.strip() for cell in cells), strict=True)))
    except csv.Error as err:
        raise _wrong(path, f"is not CSV: {err}", where=f"line {reader.line_num}") from err


def _json_rows(path: Path, text: str) -> Iterator[_Row]:
    for line, words in enumerate(text.split("\n"), start=1):
        if words.strip():
            value = _parse_json(path, words, line)
            if not isinstance(value, dict):
                raise _wrong(path, f"{_short(value)} is not an object", where=f"line {line}")
            yield _Row(f"line {line}", value)


def _parse_json(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as err:
        raise _wrong(
            path, f"is not JSON: {err.msg} (column {err.colno})", where=f"line {line + err.lineno - 1}"
        ) from err
    except (RecursionError, ValueError) as err:  # ValueError: a whole number of thousands of digits
        raise _wrong(path, "is nested too deeply, or has too long a number", where=f"line {line}") from err


def _from_rows(path: Path, rows: Iterator[_Row], columns: Mapping[str, str]) -> Requests:
    requests: list[Request] = []
    durations: list[float] = []
    found: dict[str, tuple[str, float]] | None = None
    known: set[str] = set()
    for row in rows:
        if not row.values.keys() <= known or found is None:  # lines of a .jsonl may have different fields
            known |= row.values.keys()
            found = _find_columns(known, columns)
        requests.append(_request(path, row, found))
        if "duration_s" in row.values:
            durations += [value for value in [_number(path, row, "duration_s")] if value is not None]
    if not requests:
        raise _wrong(path, "has no request")
    assert found is not None
    _check_columns(path, known, found, columns)
    return Requests(path.name, requests, max(durations, default=None) or _duration(requests))


def _find_columns(known: set[str], columns: Mapping[str, str]) -> dict[str, tuple[str, float]]:
    """Latency -> its column and the unit of that."""
    found: dict[str, tuple[str, float]] = {}
    for latency in LATENCIES:
        names = [columns[latency]] if latency in columns else [latency + ending for ending, _ in _UNITS]
        if latency == "itl" and latency not in columns:
            names += ["max_itl_s", "max_itl_ms"]
        name = next((name for name in names if name in known), None)
        if name is not None:
            found[latency] = name, next(unit for ending, unit in _UNITS if name.endswith(ending))
    return found


def _check_columns(path: Path, known: set[str], found: Mapping[str, object], columns: Mapping[str, str]) -> None:
    for latency, name in columns.items():
        if latency not in found:
            near = ", ".join(nearest(name, sorted(known)))
            raise _wrong(path, f"has no column {name!r}; the nearest names are {near}")
    if not found:
        listed = ", ".join(sorted(known))
        raise _wrong(
            path,
            f"has no latency among its columns ({listed}); name them ttft_s, ttft_ms, tpot_s, ..., or use --column",
        )


def _request(path: Path, row: _Row, found: Mapping[str, tuple[str, float]]) -> Request:
    latencies = {}
    for latency, (name, unit) in found.items():
        value = _number(path, row, name)
        if value is not None:
            latencies[latency] = value * unit
    sent_s = _number(path, row, "sent_s") if "sent_s" in row.values else None
    return Request(not any(_failed(row.values.get(name)) for name in _FAILURES), latencies, sent_s)


def _failed(value: object) -> bool:
    return bool(value) and str(value).strip().lower() not in _NO_FAILURE


def _number(path: Path, row: _Row, name: str) -> float | None:
    value = row.values.get(name)
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise _wrong(path, f"{name}: {_short(value)}; use a number, 0 or more", where=row.where)
    return number


def _duration(requests: Sequence[Request]) -> float | None:
    """From the first sent to the last ended, if every request tells its start, and every one that succeeded its end."""
    if any(r.sent_s is None or (r.ok and "e2e" not in r.latencies_s) for r in requests):
        return None
    starts = [r.sent_s for r in requests if r.sent_s is not None]
    ends = [r.sent_s + r.latencies_s.get("e2e", 0.0) for r in requests if r.sent_s is not None]
    return max(ends) - min(starts) or None


def _from_report(path: Path, text: str, columns: Mapping[str, str]) -> list[Requests]:
    report = _parse_json(path, text, 1)
    if isinstance(report, dict) and isinstance(report.get("sides"), list) and report["sides"]:
        return [_from_side(path, side, number, columns) for number, side in enumerate(report["sides"])]
    if isinstance(report, dict) and "ttfts" in report:
        return [_from_lists(path, report, columns)]
    raise _wrong(
        path,
        "has neither the list `sides` of kvstore bench serve --json nor the list `ttfts` of vllm bench serve --save-result "
        "--save-detailed; use one of them, or a .csv or .jsonl",
    )


def _from_lists(path: Path, report: Mapping[str, Any], columns: Mapping[str, str]) -> Requests:
    """A list for each latency: `ttfts` in seconds; `itls`, each a list; `errors`, empty where there was none. TPOT is from
    the first token to the last, by the tokens after the first; E2E ends with the last."""
    lists = {name: report.get(name) for name in ("ttfts", "itls", "errors", "output_lens")}
    count = len(lists["ttfts"]) if isinstance(lists["ttfts"], list) else 0
    for name, found in lists.items():
        if not isinstance(found, list) or len(found) != count:
            raise _wrong(path, f"has no list `{name}` as long as `ttfts`; use a result with --save-detailed")
    rows = []
    for index in range(count):
        ttft, gaps, error, tokens = (found[index] for found in lists.values() if found is not None)
        gaps_s = _gaps(path, gaps, f"itls[{index}]")
        ttft_s = _number(path, _Row(f"request {index}", {"ttft_s": ttft}), "ttft_s")
        values: dict[str, Any] = {"ttft_s": ttft_s, "failure": error}
        if gaps_s and ttft_s is not None:
            values |= {"itl_s": max(gaps_s), "e2e_s": ttft_s + sum(gaps_s)}
            if isinstance(tokens, int) and tokens > 1:
                values["tpot_s"] = sum(gaps_s) / (tokens - 1)
        rows.append(_Row(f"request {index}", values))
    return _with_duration(_from_rows(path, iter(rows), columns), report.get("duration"))


def _gaps(path: Path, gaps: object, where: str) -> list[float]:
    if not isinstance(gaps, list):
        raise _wrong(path, f"{_short(gaps)} is not a list", where=where)
    row = _Row(where, {f"gap {number}": gap for number, gap in enumerate(gaps)})
    return [value for value in (_number(path, row, name) for name in row.values) if value is not None]


def _from_side(path: Path, side: object, number: int, columns: Mapping[str, str]) -> Requests:
    if not isinstance(side, dict) or not isinstance(side.get("requests"), list):
        raise _wrong(path, "has no list `requests`; use a result of kvstore bench serve", where=f"sides[{number}]")
    label = side.get("label") if isinstance(side.get("label"), str) else str(number)
    rows = []
    for index, entry in enumerate(side["requests"]):
        if not isinstance(entry, dict):
            raise _wrong(path, f"{_short(entry)} is not an object", where=f"sides[{number}].requests[{index}]")
        rows.append(_Row(f"sides[{number}].requests[{index}]", entry))
    found = _from_rows(path, iter(rows), columns)._replace(label=str(label))
    summary = side.get("summary")
    return _with_duration(found, summary.get("duration_s") if isinstance(summary, dict) else None)


def _with_duration(found: Requests, duration_s: object) -> Requests:
    """What a report says goes before what its requests tell, if it is a time."""
    if isinstance(duration_s, bool) or not isinstance(duration_s, int | float) or not 0 < duration_s < math.inf:
        return found
    return found._replace(duration_s=float(duration_s))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _wrong(path: Path, problem: str, *, where: str = "") -> ConfigError:
    start = f"{path}: {where}: " if where else f"{path} "
    return ConfigError(start + problem, field="file", value=str(path))
