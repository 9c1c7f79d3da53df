"""The HTTP port: what it answers, both families of addresses, and which setting an unusable address is blamed on."""

import errno
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.errors import ConfigError, PeerUnavailable
from kvstore.http_server import HttpServer
from kvstore.metrics import DRIVE_STATES, PEER_STATES
from kvstore.proto import kvstore_pb2 as pb


class Answer(NamedTuple):
    status: int
    text: str


def get(path: str, snapshot: Callable[[], pb.StatsReply]) -> Answer:
    server = HttpServer("127.0.0.1", 0, snapshot)
    server.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as err:
        with err:
            return Answer(err.code, err.read().decode())
    finally:
        server.stop()


def stats_with(*states: str, **fields: object) -> pb.StatsReply:
    """A pinned tier, and an NVMe tier whose drives are in these states."""
    drives = [
        pb.DriveStats(
            path=f"/mnt/{i}", state=state, reason=f"reason {i}" if state != "ready" else "", capacity_bytes=100
        )
        for i, state in enumerate(states)
    ]
    nvme = [pb.TierStats(name="nvme", capacity_bytes=200, quarantined_bytes=4096, drives=drives)] if drives else []
    return pb.StatsReply(tiers=[pb.TierStats(name="pinned", capacity_bytes=64), *nvme], **fields)


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("ready", "ready"), "ready"),
        (("ready", "degraded"), "degraded"),
        (("ready", "off"), "degraded"),
        (("degraded", "off"), "degraded"),
        (("recovering", "off"), "recovering"),
        (("off", "off"), "off"),
    ],
)
def test_drives_are_visible_in_readiness_and_take_nothing_from_it(states: tuple[str, ...], state: str) -> None:
    answer = get("/readyz", lambda: stats_with(*states))

    assert answer.status == 200
    assert json.loads(answer.text) == {
        "ready": True,
        "problems": [],
        "tiers": {
            "pinned": {"state": "ready"},
            "nvme": {
                "state": state,
                "drives": [
                    {"path": f"/mnt/{i}", "state": each, "reason": f"reason {i}" if each != "ready" else ""}
                    for i, each in enumerate(states)
                ],
            },
        },
    }


def test_without_drives_there_is_one_tier() -> None:
    assert json.loads(get("/readyz", stats_with).text) == {
        "ready": True,
        "problems": [],
        "tiers": {"pinned": {"state": "ready"}},
    }


def test_what_is_wrong_is_named() -> None:
    problem = {"problem": "disk_full", "subject": "/mnt/0", "reason": "degraded: writes fail: no_space"}
    answer = get("/readyz", lambda: stats_with("degraded", problems=[pb.Problem(**problem)]))

    assert answer.status == 200
    assert json.loads(answer.text)["problems"] == [problem]


@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/metrics"])
def test_a_loop_that_does_not_answer_is_503(path: str) -> None:
    def away() -> pb.StatsReply:
        raise PeerUnavailable("the sidecar is too busy", peer="brain loop", deadline_s=5.0)

    answer = get(path, away)

    assert answer.status == 503
    assert "the sidecar is too busy" in answer.text
    if path == "/readyz":
        reason = "the sidecar is too busy"
        assert json.loads(answer.text) == {
            "ready": False,
            "reason": reason,
            "problems": [{"problem": "loop_stuck", "subject": "", "reason": reason}],
        }


def test_metrics_tell_tiers_drives_and_problems_by_reason() -> None:
    counters = {"nvme_problems_eio_total": 3, "nvme_problems_no_space_total": 0, "calls_match_total": 7}
    text = get("/metrics", lambda: stats_with("ready", "degraded", counters=counters)).text

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    assert samples["kvstore_tier_capacity_bytes", "nvme"] == 200
    assert samples["kvstore_tier_bytes", "nvme", "quarantined"] == 4096
    assert samples["kvstore_drive_capacity_bytes", "/mnt/1", "nvme"] == 100
    assert samples["kvstore_nvme_problems_total", "eio"] == 3
    assert samples["kvstore_nvme_problems_total", "no_space"] == 0
    assert samples["kvstore_calls_total", "match"] == 7
    for path, state in (("/mnt/0", "ready"), ("/mnt/1", "degraded")):
        shown = {each: samples["kvstore_drive_state", path, *sorted(("nvme", each))] for each in DRIVE_STATES}
        assert shown == {each: float(each == state) for each in DRIVE_STATES}


def test_metrics_tell_how_other_nodes_do() -> None:
    stats = stats_with("ready", counters={"failed_fetches_timeout_total": 2})
    stats.peers.add(
        node_id="n1", address="h:1", state="ready", fetched_bytes=5, queued_bytes=6, bytes_per_s=7, latency_s=0.5
    )
    stats.peers.add(node_id="n2", address="h:2", state="suspect")

    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(get("/metrics", lambda: stats).text)
        for sample in family.samples
    }

    assert samples["kvstore_failed_fetches_total", "timeout"] == 2
    figures = {"fetched_bytes_total": 5, "queued_bytes": 6, "bytes_per_second": 7, "latency_seconds": 0.5}
    assert {name: samples[f"kvstore_peer_{name}", "n1"] for name in figures} == figures
    for node, address, state in (("n1", "h:1", "ready"), ("n2", "h:2", "suspect")):
        shown = {each: samples["kvstore_peer_state", *sorted((node, address, each))] for each in PEER_STATES}
        assert shown == {each: float(each == state) for each in PEER_STATES}


def has_ipv6() -> bool:
    """Whether ::1 can be bound here."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "url_host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("", "127.0.0.1"),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
    ],
)
def test_it_answers_on_addresses_of_both_families(host: str, url_host: str) -> None:
    server = HttpServer(host, 0, pb.StatsReply)
    server.start()
    try:
        with urllib.request.urlopen(f"http://{url_host}:{server.port}/healthz", timeout=10) as answer:
            assert answer.read() == b"ok\n"
    finally:
        server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 64 + ".invalid", "::1:7"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^metrics_host: .*{host}") as error:
        HttpServer(host, 0, pb.StatsReply).start()

    assert error.value.fields["field"] == "metrics_host"
    assert error.value.fields["value"] == host


def test_a_family_that_the_kernel_lacks_is_the_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ipv6(*_: object, **__: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr("socketserver.socket.socket", without_ipv6)
    with pytest.raises(ConfigError, match=r"^metrics_host: .*not supported"):
        HttpServer("::1", 0, pb.StatsReply).start()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^metrics_port: .*port {port}: Address already in use") as error:
            HttpServer("127.0.0.1", port, pb.StatsReply).start()

    assert error.value.fields["field"] == "metrics_port"
    assert error.value.fields["value"] == port


def test_a_port_that_we_may_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("http.server.HTTPServer.server_bind", refuse)
    with pytest.raises(ConfigError, match=r"^metrics_port: .*port 80: Permission denied"):
        HttpServer("127.0.0.1", 80, pb.StatsReply).start()
