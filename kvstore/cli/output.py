"""What a calculation prints: one `Report`, as tables for people, or as JSON or CSV for scripts, with its working on request.

A command gathers figures and rows, and says nothing of how they are printed:

    @click.command()
    @output_options
    def speculative(*, form: Form, ...) -> None:
        write(Report(figures=[Figure("speed_up", "speed-up", 2.1, as_number)], tables=[...], work=[...]), form)

JSON is one object: every figure by its name, then every table by its name as a list of objects, and `work` with
--show-work. CSV is the first table, every figure being a column in front of it, so that a line can stand alone. JSON has
no infinity: null stands for it there, `inf` in CSV.
"""

import csv
import functools
import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import click

from kvstore.core.errors import ConfigError

Value = float | int | str | bool | None
Show = Callable[[Any], str]
"""A value, which is not None, as a person reads it."""

_WIDTH = 80  # of the working, whatever the terminal has: longer lines are hard to follow


class Figure(NamedTuple):
    """One number of the answer."""

    name: str  # in JSON and CSV; ends in its unit
    title: str  # for people
    value: Value
    show: Show = str


class Column(NamedTuple):
    """Of a `Rows`."""

    name: str  # in JSON and CSV, and the key in each row; ends in its unit
    title: str  # its header for people: short, as a table has 80 characters; empty: not shown to them
    show: Show = str


class Rows(NamedTuple):
    """A table."""

    name: str  # in JSON
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Value]]
    title: str = ""


class Work(NamedTuple):
    """How a number came about: `name = formula = substituted = result`."""

    name: str
    formula: str  # in letters: "a*n + b*n^2/2"
    substituted: str  # the same with numbers: "2.2156e-05*8192 + 9.3661e-10*8192^2/2"; empty when nothing is calculated
    result: str  # with its unit: "0.21293 s"


class Report(NamedTuple):
    """All that a command has to say."""

    figures: Sequence[Figure] = ()
    tables: Sequence[Rows] = ()
    work: Sequence[Work] = ()
    notes: Sequence[str] = ()  # for people, below the tables; in JSON under `notes` when there are any
    head: str = ""  # for people, above the tables


class Form(Enum):
    """How it is printed."""

    TABLES = "tables"
    TABLES_AND_WORK = "tables and work"
    JSON = "json"
    JSON_AND_WORK = "json and work"
    CSV = "csv"


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --json, --csv and --show-work; it is called with them as `form`."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.option("--csv", "as_csv", is_flag=True, help="Print the main table as CSV.")
    @click.option("--show-work", is_flag=True, help="Every number with its formula, and with the values put in.")
    @functools.wraps(command)
    def with_form(*args: Any, as_json: bool, as_csv: bool, show_work: bool, **options: Any) -> None:
        if as_csv and (as_json or show_work):
            other = "--json" if as_json else "--show-work"
            raise ConfigError(f"--csv: given with {other}; use one of the two", field="csv", value="true")
        if as_csv:
            form = Form.CSV
        elif as_json:
            form = Form.JSON_AND_WORK if show_work else Form.JSON
        else:
            form = Form.TABLES_AND_WORK if show_work else Form.TABLES
        command(*args, form=form, **options)

    return with_form


def write(report: Report, form: Form) -> None:
    """Print it to standard output."""
    if form is Form.CSV:
        click.echo(as_csv_text(report), nl=False)
    elif form in {Form.JSON, Form.JSON_AND_WORK}:
        click.echo(json.dumps(as_json_object(report, with_work=form is Form.JSON_AND_WORK), indent=2, allow_nan=False))
    else:
        _print_tables(report)
        if form is Form.TABLES_AND_WORK:
            click.echo("\n" + "\n".join(line for work in report.work for line in work_lines(work)))


def as_json_object(report: Report, *, with_work: bool = False) -> dict[str, Any]:
    """Of plain values: no inf or nan is left in it."""
    found: dict[str, Any] = {figure.name: _plain(figure.value) for figure in report.figures}
    for table in report.tables:
        found[table.name] = [{name: _plain(value) for name, value in row.items()} for row in table.rows]
    if report.notes:
        found["notes"] = list(report.notes)
    if with_work:
        found["work"] = [work._asdict() for work in report.work]
    return found


def as_csv_text(report: Report) -> str:
    """A header, and a line for each row of the first table; without a table one line of figures."""
    shared = {figure.name: figure.value for figure in report.figures}
    main = report.tables[0] if report.tables else Rows("", (), ({},))
    names = [*shared, *(column.name for column in main.columns if column.name not in shared)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in main.rows:
        values = shared | dict(row)  # a row's own value goes before the one that all share
        writer.writerow(["" if (value := values.get(name)) is None else value for name in names])
    return text.getvalue()


def work_lines(work: Work) -> list[str]:
    """`name = formula`, and `= ...` below it in line with the first."""
    steps = [step for step in (work.formula, work.substituted, work.result) if step]
    indent = " " * min(len(work.name), 24)
    lines = []
    for number, step in enumerate(steps):
        start = work.name if number == 0 else indent
        lines += textwrap.wrap(
            f"{start} = {step}",
            _WIDTH,
            subsequent_indent=f"{indent}     ",
            drop_whitespace=True,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return lines


def _print_tables(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if report.head:
        console.print(Text(report.head))
    if report.figures:
        console.print(_figure_table(report.figures))
    for table in report.tables:
        console.print(_row_table(table))
    for note in report.notes:
        console.print(Text(note, style="yellow"))


def _figure_table(figures: Sequence[Figure]) -> Any:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for figure in figures:
        table.add_row(_text(figure.title), _text(_shown(figure.value, figure.show)))
    return table


def _row_table(rows: Rows) -> Any:
    from rich import box
    from rich.table import Table

    shown = [column for column in rows.columns if column.title]
    title = _text(rows.title) if rows.title else None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for column in shown:
        words = any(isinstance(row.get(column.name), str) for row in rows.rows)
        table.add_column(_text(column.title), justify="left" if words else "right", overflow="fold")
    for row in rows.rows:
        table.add_row(*(_text(_shown(row.get(column.name), column.show)) for column in shown))
    return table


def _text(words: str) -> Any:
    """Words as they are: rich would read square brackets as markup."""
    from rich.text import Text

    return Text(words)


def _shown(value: Value, show: Show) -> str:
    return "-" if value is None else show(value)


def _plain(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Numbers for people. Bytes and bandwidths are decimal (GB = 10^9 B).


def as_number(value: float) -> str:
    """Four figures: 3.362, 0.01234, 12,340."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def as_term(value: float) -> str:
    """As it stands in a formula: whole if it is and no longer than 12 digits, else with six figures (2.21558e-05)."""
    whole = abs(value) < 1e12 and math.isclose(value, round(value), rel_tol=1e-12)
    return str(round(value)) if whole else f"{value:.6g}"


def as_count(value: float) -> str:
    """Whole: 327,680."""
    return f"{value:,.0f}"


def as_percent(share: float) -> str:
    """63.7 %."""
    return f"{share * 100:.1f} %"


def as_dollars(value: float) -> str:
    """$5.556, $0.0180, $12,340."""
    if abs(value) >= 1000:
        return f"${value:,.0f}"
    return f"${value:.3f}" if abs(value) >= 1 or value == 0 else f"${value:.3g}"


def as_seconds(value: float) -> str:
    """21.47 ms, 1.229 s, 2.4 min, 3.1 h."""
    for limit, unit, divisor in ((1e-3, "us", 1e-6), (1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if abs(value) < limit:
            return f"{value / divisor:.4g} {unit}" if value else "0 s"
    if abs(value) < 172_800:
        return f"{value / 3600:.3g} h"
    return f"{value / 86_400:,.3g} days" if math.isfinite(value) else str(value)


def as_bytes(value: float) -> str:
    """1.074 GB; GB = 10^9 B."""
    return _scaled(value, "B")


def as_bandwidth(value: float) -> str:
    """44.3 GB/s."""
    return _scaled(value, "B/s")


def _scaled(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return f"{value} {unit}"
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.95 and power + 1 < len(prefixes):
        value, power = value / 1000, power + 1
    return f"{value:.4g} {prefixes[power]}{unit}"
