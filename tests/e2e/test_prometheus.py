"""Debian's Prometheus scrapes real sidecars under load: every panel's query and every rule is evaluated, and figures add up.

Without `prometheus` and `promtool` (tests/setup_debian.sh installs them) these tests are skipped.
"""

import json
import re
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from block_client import keys_of
from cluster_nodes import ClusterNode, ClusterOfNodes, cluster_in, free_ports
from sidecar_process import SPEC, wait_until

from kvstore.core.plans import MatchWish
from kvstore.proto import kvstore_pb2 as pb

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
PANELS = [
    panel for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"] if panel["type"] != "row"
]
RULES = DEPLOY / "prometheus-rules.yml"
DEADLINE_S = 30.0
BLOCKS = 8
NEVER_STORED = 1 << 20  # from such seeds on
QUIET = {"Drives not ready", "Nodes not ready", "Writes against budget"}
"""Panels with nothing to show while all is well and nothing is limited."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus and promtool are not installed (tests/setup_debian.sh)",
    ),
]


class Prometheus:
    """A server on `port`, which scrapes `targets` twice a second and evaluates our rules as often."""

    def __init__(self, folder: Path, port: int, targets: list[str]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        rules = folder / "rules.yml"
        rules.write_text(re.sub(r"interval: 30s", "interval: 500ms", RULES.read_text()))
        config = folder / "prometheus.yml"
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
                    "rule_files": [str(rules)],
                    "scrape_configs": [{"job_name": "kvstore", "static_configs": [{"targets": targets}]}],
                }
            )
        )
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with (folder / "log").open("w") as log:
            self._child = subprocess.Popen(
                ["prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )

    def ask(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def value(self, expr: str) -> float:
        (found,) = self.query(expr)
        return float(found["value"][1])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=1):
                return True
        except OSError:
            assert self._child.poll() is None
            return False

    def stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        finally:
            self._child.kill()


class Load:
    """An engine that puts prompts and gets half of them back, and counts for itself."""

    def __init__(self, node: ClusterNode) -> None:
        self.num_requests = self.requested = self.loaded = 0
        self._node = node
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        seed = 1000
        while not self._stopping.is_set():
            seed += 1
            self._node.put(seed, BLOCKS)
            self._get(seed)
            self._get(seed + NEVER_STORED)
            client, namespace = self._node.client, self._node.namespace
            client.report(namespace, prefill=[(256.0, 256.0 * 128, 0.05)] * 3, copy_nbytes=1 << 20, copy_s=0.001)
            time.sleep(0.02)

    def _get(self, seed: int) -> None:
        client, namespace, keys = self._node.client, self._node.namespace, keys_of(seed, BLOCKS)
        wish = MatchWish(uuid.uuid4().hex, num_tokens=BLOCKS * SPEC.block_tokens + 3)
        match = client.match(namespace, keys, wish)
        self.num_requests += 1
        self.requested += wish.num_tokens
        assert match.plan is not None
        if match.plan.num_blocks:
            grant = client.acquire(uuid.uuid4().hex, namespace, keys[: match.plan.num_blocks], plan_id=match.plan_id)
            num_loaded = grant.num_blocks
            client.release(grant.lease_id, pb.LOADED, num_loaded=num_loaded, seconds=0.01)
            self.loaded += num_loaded * SPEC.block_tokens


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Load, ClusterOfNodes]]:
    """Two nodes with drives, one of them under load, and a Prometheus that has seen them for some seconds."""
    folder = tmp_path_factory.mktemp("watched")
    ports = free_ports(3)
    with cluster_in(folder) as cluster:
        names = ("one", "two")
        own = {
            name: ("--metrics-port", str(port), "--nvme", str(folder / f"drive-{name}"), "--nvme-bytes", "64MiB")
            for name, port in zip(names, ports, strict=False)
        }
        one, two = cluster.start(*names, own=own, flags=("--nvme-write-bytes-per-day", "1GiB"))
        load = Load(one)
        two.put(1, BLOCKS)
        one.wait_until_found(1, BLOCKS, "two")
        assert all(one.get(1, BLOCKS))
        load.start()
        prometheus = Prometheus(folder, ports[2], [f"127.0.0.1:{port}" for port in ports[:2]])
        try:
            wait_until(prometheus.is_ready, "Prometheus answers", DEADLINE_S)
            enough = 'min(count_over_time(kvstore_uptime_seconds{job="kvstore"}[1m])) >= 10'
            wait_until(lambda: bool(prometheus.query(enough)), "ten scrapes", DEADLINE_S)
            yield prometheus, load, cluster
        finally:
            load.stop()
            prometheus.stop()


def expression(expr: str) -> str:
    """As Grafana sends it."""
    filled = expr.replace("$job", "kvstore").replace("$instance", ".*")
    return filled.replace("$__rate_interval", "10s").replace("$__range", "10s")


def test_every_query_of_every_panel_is_answered(watched: tuple[Prometheus, Load, ClusterOfNodes]) -> None:
    prometheus = watched[0]
    empty = {
        f"{panel['title']}: {target['expr']}"
        for panel in PANELS
        for target in panel["targets"]
        if not prometheus.query(expression(target["expr"])) and panel["title"] not in QUIET
    }

    # In all of these nothing has happened: no error was answered, no failure was seen.
    assert not [query for query in empty if "errors_total" not in query and "> 0" not in query], empty


def test_every_rule_is_evaluated_and_none_fires_that_should_not(
    watched: tuple[Prometheus, Load, ClusterOfNodes],
) -> None:
    prometheus = watched[0]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), "rules are evaluated", DEADLINE_S)
    assert {rule["name"]: rule.get("lastError") for rule in rules() if rule["health"] != "ok"} == {}
    firing = {rule["name"] for rule in rules() if rule.get("state") in {"firing", "pending"}}
    assert firing <= {"KVStoreRestarted", "KVStoreLoopSlow", "KVStorePredictionsOff"}, "on a busy machine"
    assert "KVStoreRestarted" in firing
    assert prometheus.query("kvstore:hit_ratio:rate5m")


def test_promtool_accepts_rules_and_names(watched: tuple[Prometheus, Load, ClusterOfNodes], tmp_path: Path) -> None:
    target = watched[0].ask("targets")["activeTargets"][0]
    with urllib.request.urlopen(target["scrapeUrl"], timeout=10) as reply:
        text = reply.read().decode()

    for arguments, given in ((["check", "rules", str(RULES)], ""), (["check", "metrics"], text)):
        outcome = subprocess.run(
            ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=30, check=False
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_prometheus_the_stats_and_the_engine_agree_to_the_token(
    watched: tuple[Prometheus, Load, ClusterOfNodes],
) -> None:
    """Hits and misses together are what was asked for, counted three times. The last test: the load ends."""
    prometheus, load, cluster = watched
    load.stop()
    one = cluster.nodes[0]
    wait_until(lambda: one.stats().num_open_requests == 0, "all is settled", DEADLINE_S)
    usage = one.stats().usage

    assert load.num_requests > 20
    assert sum(usage.hit_tokens.values()) + sum(usage.missed_tokens.values()) == usage.requested_tokens
    asked_before = 2 * BLOCKS * SPEC.block_tokens  # to fetch what the other node had: an Acquire without a Match
    assert load.requested <= usage.requested_tokens <= load.requested + asked_before
    hits = sum(usage.hit_tokens.values())
    assert load.loaded <= hits <= load.loaded + asked_before
    instance = f'{{instance="127.0.0.1:{metrics_port(one)}"}}'
    wait_until(
        lambda: prometheus.value(f"kvstore_requested_tokens_total{instance}") == usage.requested_tokens,
        "Prometheus has seen it",
        DEADLINE_S,
    )
    assert prometheus.value(f"sum(kvstore_hit_tokens_total{instance})") == hits
    law = "sum(kvstore_hit_tokens_total) + sum(kvstore_missed_tokens_total) - sum(kvstore_requested_tokens_total)"
    assert prometheus.value(law) == 0


def metrics_port(node: ClusterNode) -> int:
    words = Path(f"/proc/{node.pid}/cmdline").read_text().split("\0")
    return int(words[words.index("--metrics-port") + 1])
