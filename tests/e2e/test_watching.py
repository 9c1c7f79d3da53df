"""`kvstore top`, `stat` and `inspect` on a real sidecar that three engines have used."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_traffic import Traffic
from sidecar_process import ROOT, SPEC, SidecarProcess, connected, running_sidecar, tool, wait_until

from kvstore.client import Client
from kvstore.core.errors import ProtocolError
from kvstore.core.plans import MatchWish
from kvstore.proto import kvstore_pb2 as pb

pytestmark = [pytest.mark.e2e]


class Used(NamedTuple):
    sidecar: SidecarProcess
    stats: pb.StatsReply

    def run(self, *arguments: str, status: int = 0, columns: str = "80") -> str:
        """Into a pipe, as from a script in a terminal of 80 columns."""
        command = [sys.executable, "-m", "kvstore.cli.main", arguments[0], "--socket", str(self.sidecar.socket)]
        done = subprocess.run(
            [*command, *arguments[1:]],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=30,
            env=os.environ | {"COLUMNS": columns},
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Used]:
    folder = tmp_path_factory.mktemp("watched")
    drive = ("--nvme", str(folder / ("drive-with-a-long-name-" + "x" * 60)), "--nvme-bytes", "32MiB", "--no-grpc")
    with running_sidecar(folder, *drive) as sidecar, tool(sidecar) as client:
        with Traffic(str(sidecar.socket)) as traffic:
            wait_until(lambda: traffic.asked["requests"] > 60, "requests")
        wait_until(lambda: client.stats().usage.num_requests == traffic.asked["requests"], "all settled")
        wait_until(lambda: client.stats().tiers[1].writing_bytes == 0, "all written")
        yield Used(sidecar, client.stats())


def test_stat_cuts_nothing_and_counts_to_the_token(used: Used) -> None:
    shown = used.run("stat")

    assert "…" not in shown
    assert "x" * 60 in shown
    usage = used.stats.usage
    assert f"{usage.requested_tokens:,}" in shown
    assert f"{usage.hit_tokens['pinned']:,}" in shown
    for counter in ("stored_blocks_total", "acquired_blocks_total"):
        assert f"{used.stats.counters[counter]:,}" in shown
    told = json.loads(used.run("stat", "--json"))
    assert told["usage"]["requested_tokens"] == usage.requested_tokens
    parts = sum(told["usage"]["hit_tokens"].values()) + sum(told["usage"]["missed_tokens"].values())
    assert parts == usage.requested_tokens


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_top_into_a_pipe_is_one_picture(used: Used, flags: tuple[str, ...]) -> None:
    shown = used.run("top", "--interval-s", "0.2", *flags)

    assert shown.count("kvstore 0.") == 1
    assert "no alarms" in shown
    assert "hit rate" in shown
    assert "RAM" in shown
    assert "\x1b" not in shown


def test_top_shows_rates_while_engines_work(used: Used) -> None:
    with Traffic(str(used.sidecar.socket), seed=9):
        shown = used.run("top", "--interval-s", "1")

    line = next(line for line in shown.splitlines() if line.startswith("requests"))
    assert float(line.split()[1].removesuffix("/s,").replace(",", "")) > 0
    assert "loaded" in shown


def test_top_in_a_terminal_goes_on_without_the_sidecar_until_it_is_stopped(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        command = [
            sys.executable,
            "-m",
            "kvstore.cli.main",
            "top",
            "--socket",
            str(sidecar.socket),
            "--interval-s",
            "0.2",
        ]
        terminal = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
        child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=terminal)
        try:
            os.close(theirs)
            screen = Screen(ours)
            screen.wait_for("hit rate")
            sidecar.kill()
            screen.wait_for("NO ANSWER")
            sidecar.start()
            screen.wait_for("no alarms")
            child.send_signal(signal.SIGINT)
            screen.drain()
            assert child.wait(10) == 0
        finally:
            child.kill()  # it may be waiting for us to read
            child.wait(10)
    os.close(ours)


class Screen:
    """What a program writes to its terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._written = ""

    def wait_for(self, text: str, deadline_s: float = 15.0) -> None:
        """From what was written since the last one."""
        until_s = time.monotonic() + deadline_s
        while text not in self._written:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, f"no {text!r} in {self._written[-500:]!r}"
            self._written += os.read(self._fd, 1 << 16).decode(errors="replace")
        self._written = self._written.rpartition(text)[2]

    def drain(self, quiet_s: float = 0.5) -> None:
        """So that nobody waits for us to read."""
        while select.select([self._fd], [], [], quiet_s)[0]:
            try:
                os.read(self._fd, 1 << 16)
            except OSError:  # EIO: the other side has closed
                return


def test_inspect_tells_where_a_block_lives_by_part_of_its_hash_or_all(used: Used) -> None:
    """Document 0 of engine_traffic, whose first eight blocks every tenant has."""
    key = SPEC.hash.hash_blocks([1] * 128)[3]

    whole = json.loads(used.run("inspect", key.hex(), "--json"))
    part = json.loads(used.run("inspect", key.hex()[:9], "--json"))
    text = used.run("inspect", key.hex()[:9])

    assert whole["num_found"] == part["num_found"] == 3
    assert {block["namespace"] for block in whole["blocks"]} == {
        SPEC.namespace(t).hex() for t in ("search", "assistant", "")
    }
    block = next(each for each in whole["blocks"] if each["namespace"] == SPEC.namespace("search").hex())
    assert block["position"] == 3
    assert block["hits"] > 0
    assert block["parent"] == SPEC.hash.hash_blocks([1] * 128)[2].hex()
    assert {(copy["tier"], copy["state"]) for copy in block["copies"]} >= {("nvme", "ready")}
    assert block["leases"] == []
    assert all(plan["namespace"] == block["namespace"] for plan in block["plans"])
    assert block["plans"]
    assert f"block {key.hex()}" in text
    assert "nvme: ready" in text


def test_inspect_tells_who_uses_a_block(used: Used) -> None:
    keys = SPEC.hash.hash_blocks([1] * 128)
    with connected(used.sidecar) as engine:
        grant = engine.acquire("long read", engine.namespaces[0].namespace, keys[:2])
        text = used.run("inspect", keys[1].hex())
        engine.release(grant.lease_id, pb.LOADED, num_loaded=2)

    assert f"read lease {grant.lease_id} for long read" in text


def test_inspect_tells_what_a_namespace_is(used: Used) -> None:
    text = used.run("inspect", SPEC.namespace("search").hex()[:10])

    assert "tenant search" in text
    assert "weights = tests" in text
    assert "dtype = float16" in text


def test_names_that_would_be_markup_or_move_the_cursor_are_shown_as_they_are(used: Used) -> None:
    """Tenants, requests and labels are chosen by others. A tenant called [/] once ended stat and top with a traceback."""
    tenant, request, label = "[/]\x1b[2J:smile:", "[red]\x07\n[/green]", "[bold]<i>"
    keys = SPEC.hash.hash_blocks([77] * 64)
    client = Client(str(used.sidecar.socket), instance=uuid.uuid4().bytes, role=pb.BOTH, tenant=tenant, specs=[SPEC])
    with client as engine:
        namespace = engine.namespaces[0].namespace
        engine.commit(engine.reserve(request, namespace, keys, label=label).lease_id)
        match = engine.match(namespace, keys, MatchWish(request, 65, label=label))
        grant = engine.acquire(request, namespace, keys, plan_id=match.plan_id)
        shown = [
            used.run(*command) for command in (("stat",), ("top", "--interval-s", "0.1"), ("explain", "--last", "1"))
        ]
        shown += [used.run("inspect", keys[3].hex()), used.run("inspect", namespace.hex())]
        engine.release(grant.lease_id, pb.LOADED, num_loaded=4)

    for page, names in zip(shown, ((), (request, label), (request, label), (request, label), (tenant,)), strict=True):
        assert not set(page) & {"\x1b", "\x07"}
        for name in names:
            assert name.encode("unicode_escape").decode() in page


def test_inspect_remembers_why_a_block_is_gone(used: Used) -> None:
    key = SPEC.hash.hash_blocks([999] * 16)[0]
    with connected(used.sidecar) as engine:
        namespace = engine.namespaces[0].namespace
        engine.commit(engine.reserve("gone soon", namespace, [key]).lease_id)
        engine.drop(namespace, [key])

    text = used.run("inspect", key.hex())

    assert f"not in namespace {namespace.hex()} any more: it was removed by Drop" in text


def test_inspect_says_what_is_not_known_and_what_is_no_hash(used: Used) -> None:
    assert "is known here" in used.run("inspect", "0123456789abcdef" * 2)
    for wrong in ("xyz", "\udcff"):  # the latter: a byte that is no UTF-8
        assert "use 4 to 64 hex digits" in used.run("inspect", wrong, status=2)
    assert "is remembered" in used.run("explain", "\udcff" + "x" * 300)


@pytest.mark.parametrize("log_format", ["keyvalue", "json"])
def test_each_decision_is_a_line_at_debug(tmp_path: Path, log_format: str) -> None:
    flags = ("--no-grpc", "--log-level", "debug", "--log-format", log_format)
    with running_sidecar(tmp_path, *flags) as sidecar:
        with Traffic(str(sidecar.socket)) as traffic:
            wait_until(lambda: traffic.asked["requests"] > 10, "requests")
        lines = [line for line in sidecar.log.splitlines() if line]

    events = [json.loads(line) if log_format == "json" else read_line(line) for line in lines]
    counts = Counter(event["event"] for event in events)
    assert counts["planned"] == counts["reserved"] == traffic.asked["requests"]
    assert counts["leased"] == counts["released"] > 0
    planned = next(event for event in events if event["event"] == "planned")
    assert {"request", "plan", "tokens", "found", "fetch", "total_s", "recompute_s", "reason"} < set(planned)
    assert all({"time", "level", "source", "event"} <= set(event) for event in events)


def read_line(line: str) -> dict[str, str]:
    """As a log collector does it."""
    found = re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)(?: |$)', line)
    assert " ".join(f"{name}={value}" for name, value in found) == line
    return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


def test_only_trusted_tools_may_inspect(used: Used) -> None:
    with connected(used.sidecar) as engine, pytest.raises(ProtocolError, match=r"^role: .*only TOOL"):
        engine.inspect("0123")
