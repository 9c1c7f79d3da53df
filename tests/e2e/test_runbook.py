"""Symptoms of deploy/RUNBOOK.md, made on a real sidecar: the metrics that it names show what it says.

A bug is planted (buggy_sidecar.py), as none is known, and a kernel without memory (poor_sidecar.py). That a load was late is what
its engine says. Drives that are full, gone, or change bits are made in test_nvme_damage.py.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from block_client import keys_of, put
from cluster_nodes import SECRET, cluster_in, free_ports
from prometheus_client.parser import text_string_to_metric_families
from sidecar_process import (
    BLOCK_NBYTES,
    SPEC,
    SidecarProcess,
    connected,
    running_sidecar,
    wait_until,
    wait_until_faulted,
)

from kvstore.client import Client
from kvstore.core.errors import KVStoreError, LeaseRefused, PeerUnavailable
from kvstore.core.plans import MatchWish
from kvstore.health import DIRECTORY_LOST_S
from kvstore.proto import kvstore_pb2 as pb

pytestmark = pytest.mark.e2e

BLOCKS = 32
TOKENS = BLOCKS * SPEC.block_tokens
RAM_BLOCKS = 128
SETTLED_S = 8.0
"""REQUEST_SETTLE_S, and a busy machine."""


class Watched:
    """A sidecar with 2 MiB of RAM, its port, and an engine."""

    def __init__(self, sidecar: SidecarProcess, port: int, engine: Client) -> None:
        self.sidecar, self.engine, self.port = sidecar, engine, port

    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=15) as reply:
            text: str = reply.read().decode()
        return text

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        samples = [
            sample
            for family in text_string_to_metric_families(self.page("metrics"))
            for sample in family.samples
            if sample.name == f"kvstore_{name}" and labels.items() <= sample.labels.items()
        ]
        assert samples, f"{name} {labels} is not exported"
        return sum(sample.value for sample in samples)

    def problems(self) -> set[str]:
        try:
            ready: dict[str, Any] = json.loads(self.page("readyz"))
        except urllib.error.HTTPError as err:
            with err:
                ready = json.load(err)
        return {each["problem"] for each in ready["problems"]}

    def ask(self, seed: int, *, num_blocks: int = BLOCKS) -> pb.Plan | Any:
        """As an engine does that takes nothing up: the plan."""
        wish = MatchWish(uuid.uuid4().hex, num_blocks * SPEC.block_tokens + 1)
        return self.engine.match(SPEC.namespace(), keys_of(seed, num_blocks), wish).plan

    def ask_simply(self, seed: int) -> None:
        """As an engine does that wants no plan: what it misses counts at once."""
        self.engine.match(SPEC.namespace(), keys_of(seed, BLOCKS))

    def put(self, *seeds: int) -> None:
        for seed in seeds:
            assert put(self.engine, keys_of(seed, BLOCKS)) == BLOCKS

    def wait_for_misses(self, reason: str, tokens: int = TOKENS) -> None:
        wait_until(
            lambda: self.value("missed_tokens_total", reason=reason) >= tokens, f"{tokens} tokens {reason}", SETTLED_S
        )
        assert self.value("hit_tokens_total") + self.value("missed_tokens_total") == self.value(
            "requested_tokens_total"
        )


def watched(folder: Path, *flags: str) -> Iterator[Watched]:
    (port,) = free_ports(1)
    with (
        running_sidecar(folder, "--no-grpc", "--metrics-port", str(port), *flags, arena="2MiB") as sidecar,
        connected(sidecar) as engine,
    ):
        wait_until_faulted(engine)
        yield Watched(sidecar, port, engine)


@pytest.fixture(scope="module", autouse=True)
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A node whose only other one is killed before the first test: by the last one nothing was heard for a while."""
    (port,) = free_ports(1)
    with cluster_in(tmp_path_factory.mktemp("left")) as cluster:
        one, two = cluster.start("one", "two", own={"one": ("--metrics-port", str(port))})
        two.put(1, BLOCKS)
        one.wait_until_found(1, BLOCKS, "two")
        two.kill()
        yield Watched(one, port, one.client)


@pytest.fixture
def in_ram(tmp_path: Path) -> Iterator[Watched]:
    yield from watched(tmp_path)


def with_drive(*flags: str) -> Callable[[Path], Iterator[Watched]]:
    return lambda folder: watched(folder, "--nvme", str(folder / "drive"), "--nvme-bytes", "8MiB", *flags)


def test_the_hit_rate_is_0_by_reason(in_ram: Watched) -> None:
    """Never stored, evicted, dropped: three requests, all at once settled."""
    in_ram.put(1, 2, 3, 4, 5, 6)
    in_ram.ask_simply(1)  # evicted by the last ones
    in_ram.engine.drop(SPEC.namespace(), keys_of(6, BLOCKS))
    in_ram.ask_simply(6)
    in_ram.ask_simply(7)
    for reason in ("evicted", "dropped", "never_stored"):
        in_ram.wait_for_misses(reason)

    assert in_ram.value("hit_tokens_total") == 0
    assert in_ram.value("removed_blocks_total", reason="evicted") == 2 * BLOCKS
    assert in_ram.value("dropped_blocks_total") == BLOCKS


def test_after_a_restart_nothing_was_ever_stored(in_ram: Watched) -> None:
    in_ram.put(1)
    in_ram.sidecar.kill()
    in_ram.sidecar.start()
    in_ram.engine.connect()
    in_ram.ask_simply(1)
    in_ram.wait_for_misses("never_stored")

    assert in_ram.value("uptime_seconds") < 60
    assert in_ram.value("stored_blocks_total") == 0


def test_fetching_is_slower_than_computing(tmp_path: Path) -> None:
    """The engine says that it computes a token in a nanosecond."""
    for node in with_drive()(tmp_path):
        node.put(*range(8))
        wait_until(lambda node=node: node.value("demoted_blocks_total") == 8 * BLOCKS, "written", SETTLED_S)
        node.ask(0)
        steps = [(float(n * 64), float(n * 64 * 32), n * 64e-9) for n in range(1, 30)]
        node.engine.report(SPEC.namespace(), prefill=steps, copy_nbytes=0, copy_s=0.0)
        assert node.ask(0).num_blocks == 0
        node.wait_for_misses("too_slow")
        assert node.value("drive_state", state="ready") == 1


def test_a_load_that_fails_past_its_deadline(in_ram: Watched) -> None:
    in_ram.put(1)
    wish = MatchWish("late", TOKENS + 1)
    match = in_ram.engine.match(SPEC.namespace(), keys_of(1, BLOCKS), wish)
    assert match.plan is not None
    grant = in_ram.engine.acquire("late", SPEC.namespace(), keys_of(1, BLOCKS), plan_id=match.plan_id)
    seconds = match.plan.deadline_s + 1.0
    in_ram.engine.release(grant.lease_id, pb.FAILED, num_loaded=BLOCKS // 2, seconds=seconds)

    assert in_ram.value("hit_tokens_total", tier="pinned") == TOKENS / 2
    late = in_ram.value("missed_tokens_total", reason="over_deadline")
    failed = in_ram.value("missed_tokens_total", reason="failed")
    assert late + failed == TOKENS / 2
    assert late == (TOKENS / 2 if match.plan.deadline_s else 0)


def test_puts_are_dropped_while_everything_is_leased(in_ram: Watched) -> None:
    in_ram.put(1, 2, 3, 4)
    leases = [in_ram.engine.acquire(str(i), SPEC.namespace(), keys_of(i, BLOCKS)).lease_id for i in range(1, 5)]
    assert put(in_ram.engine, keys_of(5, BLOCKS)) == 0

    assert in_ram.value("declined_blocks_total", reason="no_space") == BLOCKS
    assert in_ram.value("leases") == len(leases)
    assert in_ram.value("tier_blocks", tier="pinned", state="ready") == RAM_BLOCKS
    in_ram.ask_simply(5)
    in_ram.wait_for_misses("declined")


def test_blocks_are_not_written_when_the_budget_is_spent(tmp_path: Path) -> None:
    for node in with_drive("--nvme-write-bytes-per-day", str(4 * BLOCK_NBYTES))(tmp_path):
        node.put(1)
        wait_until(lambda node=node: node.value("demoted_blocks_total") == 4, "the budget is spent", SETTLED_S)

        assert node.value("nvme_day_written_bytes") == node.value("nvme_write_limit_bytes_per_day") == 4 * BLOCK_NBYTES
        assert node.value("nvme_written_bytes_total") == 4 * BLOCK_NBYTES
        assert node.value("queue_length", queue="write_backlog") > 0


def test_the_sidecar_answers_late(in_ram: Watched) -> None:
    """A machine that gave it no time for a second."""
    os.kill(in_ram.sidecar.pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(in_ram.sidecar.pid, signal.SIGCONT)

    wait_until(lambda: "loop_slow" in in_ram.problems(), "it is named", 5.0)
    assert in_ram.value("problem", problem="loop_slow") == 1
    slow = in_ram.value("loop_lag_seconds_count") - in_ram.value("loop_lag_seconds_bucket", le="0.5")
    assert slow >= 1


def test_leases_are_refused_while_an_engine_keeps_limbo(in_ram: Watched) -> None:
    """Its write leases expire; it lives, and does not say that it stopped."""
    engine = in_ram.engine
    for seed in (1, 2):
        engine.reserve(str(seed), SPEC.namespace(), keys_of(seed, BLOCKS), ttl_s=0.1)
    wait_until(lambda: in_ram.value("limbo_leases") == 2, "they are in limbo", SETTLED_S)

    with pytest.raises(LeaseRefused):
        engine.reserve("3", SPEC.namespace(), keys_of(3, BLOCKS))
    assert in_ram.value("refused_leases_total") == 1
    assert in_ram.value("errors_total", code="LeaseRefused") == 1
    assert in_ram.value("expired_leases_total") == 2
    assert in_ram.value("tier_bytes", tier="pinned", state="limbo") == 2 * BLOCKS * BLOCK_NBYTES


def test_one_node_does_not_answer(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with cluster_in(tmp_path) as cluster:
        one, two = cluster.start("one", "two", own={"one": ("--metrics-port", str(port))})
        two.put(1, BLOCKS)
        one.wait_until_found(1, BLOCKS, "two")
        node = Watched(one, port, one.client)
        two.pause()
        assert not any(one.get(1, BLOCKS))

        assert node.value("peer_state", node="two", state="suspect") + node.value("peer_state", state="probing") == 1
        assert node.value("failed_fetches_total") >= BLOCKS
        assert node.value("directory_age_seconds") >= 0


def test_one_tenant_has_it_all(in_ram: Watched) -> None:
    other = Client(
        str(in_ram.sidecar.socket),
        instance=uuid.uuid4().bytes,
        role=pb.BOTH,
        specs=[SPEC],
        tenant="big",
        call_deadline_s=5.0,
    )
    with other:
        namespace = SPEC.namespace("big")
        for seed in range(4):
            grant = other.reserve(str(seed), namespace, keys_of(seed, BLOCKS))
            assert other.commit(grant.lease_id) == BLOCKS
        in_ram.ask_simply(1)
        other.match(namespace, keys_of(9, BLOCKS))
        in_ram.wait_for_misses("never_stored", 2 * TOKENS)

        assert in_ram.value("tenant_requested_tokens_total", tenant="big") == TOKENS
        assert in_ram.value("tenant_requested_tokens_total", tenant="(none)") == TOKENS
        assert in_ram.value("tenant_held_bytes", tenant="big", tier="pinned") == RAM_BLOCKS * BLOCK_NBYTES


def planted(folder: Path, program: str) -> Iterator[Watched]:
    """A program of this folder in place of `kvstore`."""
    (port,) = free_ports(1)
    sidecar = SidecarProcess(folder / "kvstore.sock", "--no-grpc", "--metrics-port", str(port), arena="2MiB")
    at = sidecar._command.index("-m")
    sidecar._command[at : at + 2] = [str(Path(__file__).parent / program)]
    try:
        with connected(sidecar.start()) as engine:
            yield Watched(sidecar, port, engine)
    finally:
        sidecar.stop()


def test_a_bug_of_ours_costs_the_one_who_met_it_a_connection_and_a_hanging_loop_is_named(tmp_path: Path) -> None:
    for node in planted(tmp_path, "buggy_sidecar.py"):
        with connected(node.sidecar) as other:
            with pytest.raises(KVStoreError, match="the sidecar has a bug"):
                other.drop(SPEC.namespace(), keys_of(1, 1))
            wait_until(lambda other=other: not other.alive, "its connection is closed")
        node.put(1)
        assert node.value("crashes_total") == 1
        assert "request crashed" in node.sidecar.log
        assert "TypeError" in node.sidecar.log
        assert node.problems() == set()

        with connected(node.sidecar, call_deadline_s=0.25) as unlucky, pytest.raises(PeerUnavailable):
            unlucky.pin(SPEC.namespace(), keys_of(1, 1), 1.0)
        with ThreadPoolExecutor() as threads:
            problems, health = threads.submit(node.problems), threads.submit(node.page, "healthz")
        assert problems.result() == {"loop_stuck"}
        error = health.exception()
        assert isinstance(error, urllib.error.HTTPError)
        assert error.code == 503
        error.close()


def test_the_arena_is_smaller_than_it_was_set(tmp_path: Path) -> None:
    for node in planted(tmp_path, "poor_sidecar.py"):
        wait_until(lambda node=node: node.problems() == {"arena_small"}, "it is named", SETTLED_S)

        assert node.value("problem", problem="arena_small") == 1
        assert node.value("tier_capacity_bytes", tier="pinned") == 1 << 20
        assert "arena stays smaller" in node.sidecar.log
        node.put(1)  # it serves from what there is
        assert node.engine.match(SPEC.namespace(), keys_of(1, BLOCKS)).num_blocks == BLOCKS


@pytest.mark.parametrize("path", ["", "metrics", "healthz", "readyz", "api/now", "api/history", "api/plans"])
def test_no_page_tells_the_secret_or_takes_anything(left_alone: Watched, path: str) -> None:
    """Of a node that has one, and the file with it."""
    text = left_alone.page(path)
    url = f"http://127.0.0.1:{left_alone.port}/{path}"

    assert text
    assert SECRET.decode() not in text
    assert SECRET.hex() not in text
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, b"{}", method=method), timeout=15)
        with refused.value:
            assert refused.value.code == HTTPStatus.NOT_IMPLEMENTED


def test_the_directory_is_lost(left_alone: Watched) -> None:
    """With a list of peers: no other one answers."""
    wait_until(lambda: "directory_lost" in left_alone.problems(), "it is named", DIRECTORY_LOST_S + SETTLED_S)

    assert left_alone.value("problem", problem="directory_lost") == 1
    assert left_alone.value("directory_age_seconds") > DIRECTORY_LOST_S
    assert left_alone.value("directory_failures_total") > 0
