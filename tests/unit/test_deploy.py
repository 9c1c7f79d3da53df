"""What is in deploy/ speaks of metrics, panels, alerts and sections that there are."""

import json
import re
from pathlib import Path

import pytest
import yaml

from kvstore.counters import COUNTERS
from kvstore.metrics import exported_names
from kvstore.usage import MISSES

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())
RUNBOOK = (DEPLOY / "RUNBOOK.md").read_text()
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
NAMES = exported_names()

QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDED = {rule["record"] for rule in ALERTS if "record" in rule}
EXPRESSIONS = [*QUERIES, *[(rule.get("alert", rule.get("record")), rule["expr"]) for rule in ALERTS]]


@pytest.mark.parametrize(("title", "expr"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_queries_use_metrics_and_labels_that_are_exported(title: str, expr: str) -> None:
    used = re.findall(r"\b(kvstore[a-z0-9_:]*)(?:\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', expr))

    assert used or expr.startswith(("up", "count(up")), title
    for name, matchers in used:
        if name in RECORDED:
            continue
        assert name in NAMES, f"{title}: {name} is not exported"
        labels = set(re.findall(r"(\w+)\s*[!=]~?", matchers))
        assert labels <= {*NAMES[name].labels, "job", "instance", "le"}, f"{title}: {name} has no label of {labels}"


def test_reasons_in_rules_are_reasons() -> None:
    for rule in ALERTS:
        for name, value in re.findall(r'kvstore[:_]missed_\w+(?::\w+)?\{reason=(~?)"([^"]+)"', rule["expr"]):
            assert set(value.split("|") if name else [value]) <= MISSES.keys(), rule


def test_every_metric_is_on_a_panel_in_an_alert_or_in_the_runbook() -> None:
    text = RUNBOOK + "".join(expr for _, expr in EXPRESSIONS)
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in NAMES}
    silent = {base for base in bases if base not in text}

    # Counters of single steps, for those who look closer.
    assert {name.removeprefix("kvstore_") for name in silent} <= {*COUNTERS, "uptime_seconds", *UNDRAWN}


UNDRAWN = {
    "requests_total",
    "sidecar_info",
    "removed_bytes_total",
    "drive_capacity_bytes",
    "nvme_write_policy_info",
    "peer_queued_bytes",
    "peer_latency_seconds",
    "directory_sent_bytes_total",
    "directory_received_bytes_total",
    "directory_dropped_updates_total",
    "tenant_missed_tokens_total",
    "trace_spans_total",
}


def test_panels_have_ids_titles_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["description"] and panel["targets"] for panel in PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_alerts_lead_to_sections_of_the_runbook() -> None:
    sections = {anchor(title) for title in re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE)}
    links = set(re.findall(r"\(#([\w-]+)\)", RUNBOOK))

    assert links == sections
    for rule in ALERTS:
        if "alert" in rule:
            assert rule["annotations"]["runbook"].removeprefix("RUNBOOK.md#") in sections, rule["alert"]
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert rule["alert"] in RUNBOOK


def test_the_runbook_names_panels_and_metrics_that_there_are() -> None:
    rows = re.findall(r"^\| \[(.+?)\]\(.*?\) \| (.+?) \| (.+?) \|$", RUNBOOK, re.MULTILINE)
    titles, alerts = {panel["title"] for panel in PANELS}, {rule.get("alert") for rule in ALERTS}

    assert len(rows) >= 12
    for symptom, panels, named in rows:
        left = panels
        for title in sorted(titles, key=len, reverse=True):
            left = left.replace(title, "")
        assert not re.search(r"\w", left), f"{symptom}: {panels}"
        assert set(named.split(", ")) <= {*alerts, "-"}, symptom
    bases = {re.sub(r"_bucket$", "", name) for name in NAMES} | set(NAMES)
    assert set(re.findall(r"\bkvstore_[a-z0-9_]+", RUNBOOK)) <= bases
