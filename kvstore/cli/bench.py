"""`kvstore bench`: measure a server."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvstore.cli.finite import NOT_NEGATIVE, POSITIVE, SECONDS

if TYPE_CHECKING:
    from rich.console import Console

    from kvstore.bench.plan import Plan, Result

SCENARIOS = ("all-cold", "burst", "sidecar-killed")
_COUNT = click.IntRange(min=1)


@click.group()
def bench() -> None:
    """Measure a server."""


@bench.command()
@click.option("--url", "urls", multiple=True, metavar="[LABEL=]URL", help="The server's address; twice: compare two.")
@click.option("--compare", metavar="[LABEL=]URL", help="A second server, asked the same.")
@click.option(
    "--compare-body",
    metavar="JSON",
    help="Ask the one server twice, then with these body fields; it may find what it cached.",
)
@click.option("--rounds", type=_COUNT, default=1, show_default=True, help="Parts in which two servers take turns.")
@click.option("--api", type=click.Choice(["completions", "chat"]), default="chat", show_default=True)
@click.option("--model", default="", help="Its name at the server.  [default: the first that it lists]")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that has the key.")
@click.option("--extra-body", metavar="JSON", default="{}", help="Fields to add to every request's body.")
@click.option(
    "--workload", default="random", show_default=True, help="random, shared-system, multi-turn, document-qa or trace."
)
@click.option("--seed", type=click.IntRange(min=0, max=(1 << 63) - 1), default=0, show_default=True)
@click.option("--requests", type=_COUNT, help="How many; of a trace: its first.  [default: 100; of a trace: all]")
@click.option("--input-tokens", metavar="N or N-M", help="Length of a question.  [default: by workload]")
@click.option("--output-tokens", metavar="N or N-M", help="Length of an answer, at most.  [default: by workload]")
@click.option(
    "--system-tokens",
    type=click.IntRange(min=0),
    help="Length of the shared system prompt.  [default: 1024; multi-turn: 0]",
)
@click.option("--conversations", type=_COUNT, help="Chats.  [default: 8]")
@click.option("--turns", type=_COUNT, help="Questions of a chat.  [default: 4]")
@click.option("--think-s", type=NOT_NEGATIVE, help="Mean time between an answer and the next question.  [default: 0]")
@click.option("--documents", type=_COUNT, help="[default: 4]")
@click.option("--document-tokens", type=_COUNT, help="[default: 2048]")
@click.option("--questions", type=_COUNT, help="About each document.  [default: 4]")
@click.option("--trace", type=click.Path(dir_okay=False), help="A file in Mooncake's format, .jsonl or .jsonl.gz.")
@click.option("--trace-block-tokens", type=_COUNT, help="Tokens of a hash id.  [default: 512]")
@click.option("--time-scale", type=POSITIVE, help="The trace's times are multiplied by it.  [default: 1]")
@click.option(
    "--arrival", help="poisson, burst, closed or trace.  [default: trace for a trace, poisson with --rate, else closed]"
)
@click.option("--rate", type=POSITIVE, help="Conversations a second.  [default: 1]")
@click.option("--burst-size", type=_COUNT, help="Conversations at once, at --rate on average.  [default: all at once]")
@click.option("--concurrency", type=_COUNT, help="Conversations under way in a closed loop.  [default: 4]")
@click.option(
    "--token-ids", metavar="N-M", help="Prompts of random token ids of this range instead of words (completions)."
)
@click.option("--temperature", type=NOT_NEGATIVE, default=0.0, show_default=True)
@click.option(
    "--ignore-eos", is_flag=True, help="Ask for answers of full length (a field that not every server knows)."
)
@click.option("--deadline-s", type=SECONDS, default=300.0, show_default=True, help="Of each request.")
@click.option(
    "--connect-deadline-s", type=SECONDS, default=5.0, show_default=True, help="To find the server at the start."
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests before, not measured."
)
@click.option("--slo", metavar="NAME=S,...", help="For goodput: ttft, tpot, itl, e2e, such as ttft=500ms,tpot=0.05.")
@click.option("--scenario", type=click.Choice(SCENARIOS), help="A degraded run.")
@click.option(
    "--cold-by",
    type=click.Choice(["auto", "kvstore", "cache_salt", "prefix"]),
    help="all-cold: a salt, or a prefix.  [default: auto]",
)
@click.option("--nonce", help="all-cold: what tells this run from the last one.  [default: drawn]")
@click.option("--at", "at_s", type=NOT_NEGATIVE, metavar="S", help="sidecar-killed: when, in seconds.")
@click.option("--run", "command", metavar="CMD", help="sidecar-killed: the command to run, such as 'kill -9 1234'.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Write everything there (-: standard output).",
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw TTFT against input length.")
def serve(**options: Any) -> None:
    """Drive an OpenAI-compatible server with a workload, and report latencies, throughput, goodput, cache hits and errors.

    The same seed asks the same: equal output hashes mean equal outputs. Times are measured here, from sending a request to
    each chunk of its stream; percentiles interpolate linearly. Nothing is retried. Exits with 1 when a comparison's greedy
    outputs differ, when nothing succeeded, or when --run's command did not do its work.
    """
    from rich.console import Console

    json_path, plot = options.pop("json_path"), options.pop("plot")
    _check_folder("json", json_path)
    _check_folder("plot", plot)
    if plot:
        from kvstore.bench.plot import check_plot

        check_plot(plot)
    plan = _plan(options)
    messages = Console(stderr=True)
    result = _run(plan, messages)
    sys.exit(_report(result, messages, json_path, plot))


def _plan(options: dict[str, Any]) -> "Plan":
    _need_aiohttp()
    from kvstore.bench import options as parse
    from kvstore.bench.incident import Incident
    from kvstore.bench.plan import Plan

    scenario = options["scenario"] or ""
    _check_scenario(scenario, options)
    workload = parse.make_workload(options["workload"], options["seed"], _pick(options, parse.WORKLOADS))
    arrival = "burst" if scenario == "burst" else options["arrival"]
    extra = parse.parse_object("extra-body", options["extra_body"])
    other = options["compare_body"]
    compare_extra = None if other is None else extra | parse.parse_object("compare-body", other)
    targets = parse.parse_targets(options["urls"], options["compare"], extra, compare_extra)
    if options["rounds"] > 1 and len(targets) == 1:
        raise parse.refuse("rounds", options["rounds"], "1 with one server: rounds are for two that take turns")
    if options["rounds"] > 1 and scenario == "sidecar-killed":
        raise parse.refuse("rounds", options["rounds"], "1 with --scenario sidecar-killed")
    if options["token_ids"] and (options["api"] != "completions" or options["workload"] == "multi-turn"):
        raise parse.refuse("token-ids", options["token_ids"], "--api completions and a workload of single turns")
    return Plan(
        workload=workload,
        arrivals=parse.make_arrivals(arrival, workload, _pick(options, parse.ARRIVALS)),
        targets=targets,
        token_ids=parse.parse_token_ids(options["token_ids"]) if options["token_ids"] else None,
        slo=parse.parse_slo(options["slo"]) if options["slo"] else {},
        scenario=scenario,
        cold_by=(options["cold_by"] or "auto") if scenario == "all-cold" else "",
        nonce=(options["nonce"] or secrets.token_hex(4)) if scenario == "all-cold" else "",
        incident=Incident(options["at_s"], options["command"]) if scenario == "sidecar-killed" else None,
        api_key=_api_key(options["api_key_env"]),
        **{
            name: options[name]
            for name in (
                "api",
                "model",
                "temperature",
                "ignore_eos",
                "deadline_s",
                "connect_deadline_s",
                "warmup",
                "rounds",
            )
        },
    )


def _check_scenario(scenario: str, options: dict[str, Any]) -> None:
    from kvstore.bench.options import refuse

    for option, owner in (
        ("cold_by", "all-cold"),
        ("nonce", "all-cold"),
        ("at_s", "sidecar-killed"),
        ("command", "sidecar-killed"),
    ):
        flag = {"at_s": "at", "command": "run"}.get(option, option.replace("_", "-"))
        if options[option] is not None and scenario != owner:
            raise refuse(flag, options[option], f"it with --scenario {owner} only")
        if options[option] is None and scenario == owner == "sidecar-killed":
            raise refuse(flag, "absent", "--at SECONDS and --run COMMAND with --scenario sidecar-killed")
    if scenario == "burst" and options["arrival"] not in {None, "burst"}:
        raise refuse("arrival", options["arrival"], "burst, or leave it out, with --scenario burst")


def _pick(options: dict[str, Any], table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: options[name] for entry in table.values() for name in entry}


def _api_key(variable: str | None) -> str:
    from kvstore.bench.options import refuse

    if variable is None:
        return ""
    if not os.environ.get(variable):
        raise refuse("api-key-env", f"{variable} is not set", "the name of an environment variable that has the key")
    return os.environ[variable]


def _need_aiohttp() -> None:
    import importlib.util

    from kvstore.core.errors import ConfigError

    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(
            "aiohttp is not installed; use pip install 'kvstore-tiered[engine]'", field="aiohttp", value=""
        )


def _check_folder(option: str, path: Path | None) -> None:
    from kvstore.bench.options import refuse

    if path is not None and not path.parent.is_dir():
        raise refuse(option, path, f"a file in a folder that exists; {path.parent} does not")


def _run(plan: "Plan", messages: "Console") -> "Result":
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from kvstore.bench.plan import Target, run_plan
    from kvstore.bench.sample import Sample
    from kvstore.core.clock import MonotonicClock

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[failed]}"),
    )
    # Drawn twice a second: the bar shares the machine with what is measured.
    with Progress(*columns, console=messages, refresh_per_second=2) as progress:
        bars = {t.label: progress.add_task(t.label, total=plan.workload.num_requests, failed="") for t in plan.targets}
        failed = dict.fromkeys(bars, 0)

        def on_sample(target: Target, sample: Sample) -> None:
            failed[target.label] += not sample.ok
            text = f"{failed[target.label]} failed" if failed[target.label] else ""
            progress.update(bars[target.label], advance=1, failed=text)

        return asyncio.run(run_plan(plan, MonotonicClock(), on_sample))


def _report(result: "Result", messages: "Console", json_path: Path | None, plot: Path | None) -> int:
    from rich.console import Console
    from rich.markup import escape

    from kvstore.bench.report import as_json, find_problems, make_report

    to_stdout = str(json_path) == "-"
    (messages if to_stdout else Console()).print(make_report(result), highlight=False)
    if to_stdout:
        click.echo(json.dumps(as_json(result), indent=1))
    elif json_path is not None:
        _write("json", json_path, lambda path: path.write_text(json.dumps(as_json(result), indent=1) + "\n"))
    if plot is not None:
        from kvstore.bench.plot import save_plot

        _write("plot", plot, lambda path: save_plot(result, path))
    problems = find_problems(result)
    for problem in problems:
        messages.print(f"[bold red]{escape(problem)}[/bold red]", highlight=False)
    return 1 if problems else 0


def _write(option: str, path: Path, write: Callable[[Path], object]) -> None:
    from kvstore.bench.options import refuse

    try:
        write(path)
    except OSError as err:
        raise refuse(option, f"{path} cannot be written: {err.strerror}", "a file that can be") from err
