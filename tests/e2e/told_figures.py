"""The figures that one sidecar tells in several places, by the names that metrics have: to be compared to the token."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping

from browser import Browser
from prometheus_client.parser import text_string_to_metric_families
from sidecar_process import ROOT, SidecarProcess

from kvstore.cli.stat_tables import TIER_NAMES

Figures = dict[str, float]

_TIER_OF = {name: tier for tier, name in TIER_NAMES.items()}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def of_metrics(url: str) -> Figures:
    """By name, and label values where there are some."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        "|".join((sample.name.removeprefix("kvstore_").removesuffix("_total"), *sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_stats(stats: Mapping[str, object]) -> Figures:
    """Of a Stats reply as JSON: `kvstore stat --json`, /api/now."""
    usage, told = stats["usage"], {}
    for beginning, ending, each in [
        ("", "", usage),
        *[("tenant_", f"|{t['tenant']}", t["usage"]) for t in stats["tenants"]],
    ]:
        told[f"{beginning}requests{ending}"] = each["num_requests"]
        told[f"{beginning}requested_tokens{ending}"] = each["requested_tokens"]
    told |= {f"hit_tokens|{tier}": tokens for tier, tokens in usage["hit_tokens"].items()}
    told["missed_tokens"] = sum(usage["missed_tokens"].values())
    told["stored_blocks"] = stats["counters"]["stored_blocks_total"]
    return told


def of_api(url: str) -> Figures:
    """What the page reads."""
    with urllib.request.urlopen(f"{url}/api/now", timeout=10) as answer:
        return of_stats(json.load(answer)["stats"])


def of_stat(sidecar: SidecarProcess) -> Figures:
    command = [sys.executable, "-m", "kvstore.cli.main", "stat", "--json", "--socket", str(sidecar.socket)]
    return of_stats(json.loads(subprocess.run(command, capture_output=True, cwd=ROOT, timeout=30, check=True).stdout))


def of_page(browser: Browser) -> Figures:
    """What the browser shows now; missed tokens as their sum."""
    shown = browser.evaluate(
        "[...document.querySelectorAll('[data-metric]')].map(each => [each.dataset.metric, Number(each.dataset.value)])"
    )
    told = {name.removeprefix("kvstore_"): value for name, value in shown}
    told["missed_tokens"] = sum(value for name, value in told.items() if name.startswith("missed_tokens|"))
    return told


def of_top(sidecar: SidecarProcess, deadline_s: float = 20.0) -> Figures:
    """A screen of `kvstore top` in a terminal, read as people do."""
    screen = _screen(sidecar, deadline_s)
    line = re.search(r"all +([\d,]+) requests, ([\d,]+) tokens: (.*?)\r?\n", screen)
    assert line, screen
    told = {"requests": _number(line[1]), "requested_tokens": _number(line[2])}
    for part in line[3].split(", "):
        name, _, tokens = part.strip().rpartition(" ")
        told[f"hit_tokens|{_TIER_OF[name]}" if name in _TIER_OF else "missed_tokens"] = _number(tokens)
    for tenant, requests, requested in re.findall(r"│ (\S+) +│ +([\d,]+) │ +([\d,]+) │ +[\d.]+%", screen):
        told |= {
            f"tenant_requests|{tenant}": _number(requests),
            f"tenant_requested_tokens|{tenant}": _number(requested),
        }
    return told


def _screen(sidecar: SidecarProcess, deadline_s: float) -> str:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvstore.cli.main", "top", "--socket", str(sidecar.socket), "--interval-s", "0.2"]
    terminal = os.environ | {"TERM": "xterm", "COLUMNS": "140", "LINES": "50"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=terminal)
    try:
        os.close(theirs)
        written, until_s = "", time.monotonic() + deadline_s
        while written.count("kvstore 0.") < 2:  # then the first picture is whole
            ready, _, _ = select.select([ours], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, written
            written += os.read(ours, 1 << 16).decode(errors="replace")
    finally:
        child.kill()
        child.wait(10)
        os.close(ours)
    return _ESCAPES.sub("", written.split("kvstore 0.")[1])


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def table(told: Mapping[str, Figures]) -> str:
    """A column for each place, a row for each figure; "-" where a place does not tell it."""
    names = sorted(told["client"])
    lines = [["figure", *told], *[[name, *[_cell(figures.get(name)) for figures in told.values()]] for name in names]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
