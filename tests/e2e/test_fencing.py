"""Processes that die, stop and come back: nobody's memory is reused while they might still touch it, and all of it afterwards."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import block_client
import pytest
from sidecar_process import (
    BLOCK_NBYTES,
    ROOT,
    SidecarProcess,
    connected,
    read_line,
    running_sidecar,
    tool,
    wait_until,
    wait_until_faulted,
)

from kvstore.client import Client
from kvstore.core.errors import LeaseExpired

pytestmark = [pytest.mark.e2e, pytest.mark.crash]

LINE_DEADLINE_S = 20.0
HELD = 16  # blocks that the process under test holds


class ClientProcess:
    """block_client.py in a process of its own."""

    def __init__(
        self, mode: str, sidecar: SidecarProcess, seed: int, num_blocks: int = HELD, *, ttl_s: float = 0.0
    ) -> None:
        command = [sys.executable, block_client.__file__, mode, str(sidecar.socket), str(seed), str(num_blocks)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TTL_S": str(ttl_s)}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def line(self) -> str:
        return read_line(self.child, LINE_DEADLINE_S)

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate(timeout=LINE_DEADLINE_S)


@contextlib.contextmanager
def client_process(
    mode: str, sidecar: SidecarProcess, seed: int, num_blocks: int = HELD, *, ttl_s: float = 0.0
) -> Iterator[ClientProcess]:
    process = ClientProcess(mode, sidecar, seed, num_blocks, ttl_s=ttl_s)
    try:
        yield process
    finally:
        process.end()


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar"), arena="4MiB") as process:
        yield process


@pytest.fixture
def client(sidecar: SidecarProcess) -> Iterator[Client]:
    """An engine beside the one under test; the arena is whole, empty and back in nobody's hands at the end."""
    with connected(sidecar) as engine:
        wait_until_faulted(engine)
        yield engine
        engine.drop(engine.namespaces[0].namespace)
        wait_until(lambda: tier(engine).free_bytes == tier(engine).capacity_bytes, "all memory free")


def tier(client: Client):
    return client.stats().tiers[0]


def fill(client: Client, seed: int, rounds: int = 2) -> list[list[bytes]]:
    """Write the arena `rounds` times over; the prefixes written last."""
    num_prefixes = rounds * tier(client).capacity_bytes // BLOCK_NBYTES // block_client.PREFIX_BLOCKS
    written = [block_client.keys_of(seed * 1000 + number, block_client.PREFIX_BLOCKS) for number in range(num_prefixes)]
    for keys in written:
        block_client.put(client, keys)
    return written


def check_all(client: Client, prefixes: list[list[bytes]]) -> int:
    """No block that is found is wrong; how many are found."""
    right = 0
    for keys in prefixes:
        found = block_client.get(client, keys)
        assert found["wrong"] == found["failed"] == 0
        right += found["right"]
    return right


def test_a_writer_killed_in_the_middle_leaves_nothing(sidecar: SidecarProcess, client: Client) -> None:
    with client_process("hold-write", sidecar, 1) as writer:
        assert writer.line().startswith("holding")
        assert tier(client).writing_bytes == HELD * BLOCK_NBYTES

        writer.child.kill()

        wait_until(lambda: tier(client).free_bytes == tier(client).capacity_bytes, "its slots are free")
    assert client.match(client.namespaces[0].namespace, block_client.keys_of(1, HELD)).num_blocks == 0


def test_a_reader_killed_in_the_middle_gives_its_blocks_back(sidecar: SidecarProcess, client: Client) -> None:
    keys = block_client.keys_of(2, HELD)
    assert block_client.put(client, keys) == HELD
    with client_process("hold-read", sidecar, 2) as reader:
        assert reader.line().startswith("holding")
        assert client.drop(client.namespaces[0].namespace, keys) == HELD
        assert tier(client).leaving_bytes == HELD * BLOCK_NBYTES

        reader.child.kill()

        wait_until(lambda: tier(client).free_bytes == tier(client).capacity_bytes, "its blocks are free")


def test_an_engine_that_hangs_up_and_lives_keeps_its_slots_in_limbo_until_it_dies(
    sidecar: SidecarProcess, client: Client
) -> None:
    with client_process("hang-up", sidecar, 3) as writer:
        assert writer.line().startswith("holding")
        writer.go_on()
        assert writer.line() == "closed"
        wait_until(lambda: tier(client).limbo_bytes == HELD * BLOCK_NBYTES, "its slots in limbo")
        fill(client, 3)
        assert tier(client).limbo_bytes == HELD * BLOCK_NBYTES

        writer.child.kill()

        wait_until(lambda: tier(client).limbo_bytes == 0, "limbo empty")


def test_a_stopped_writer_neither_commits_nor_scribbles_on_a_new_owner(sidecar: SidecarProcess, client: Client) -> None:
    with client_process("hold-write", sidecar, 4, ttl_s=0.3) as writer:
        assert writer.line().startswith("holding")
        os.kill(writer.child.pid, signal.SIGSTOP)
        wait_until(lambda: tier(client).limbo_bytes == HELD * BLOCK_NBYTES, "its lease expired")
        prefixes = fill(client, 4)

        os.kill(writer.child.pid, signal.SIGCONT)
        writer.go_on()

        assert writer.line() == "LeaseExpired"  # it has written all its blocks by now
        assert check_all(client, prefixes) >= (tier(client).capacity_bytes // BLOCK_NBYTES - HELD) * 0.9
        writer.go_on()
        assert writer.line() == "LeaseExpired"  # its abort, which confirms
        wait_until(lambda: tier(client).limbo_bytes == 0, "limbo empty")
    assert client.match(client.namespaces[0].namespace, block_client.keys_of(4, HELD)).num_blocks == 0


def test_a_stopped_reader_copies_what_it_leased_or_is_told(sidecar: SidecarProcess, client: Client) -> None:
    keys = block_client.keys_of(5, HELD)
    assert block_client.put(client, keys) == HELD
    with client_process("hold-read", sidecar, 5, ttl_s=0.3) as reader:
        assert reader.line().startswith("holding")
        os.kill(reader.child.pid, signal.SIGSTOP)
        expired = client.stats().counters["expired_leases_total"]
        wait_until(
            lambda: client.stats().counters["expired_leases_total"] > expired or client.stats().num_leases == 0,
            "its lease expired",
        )
        client.drop(client.namespaces[0].namespace, keys)
        prefixes = fill(client, 5)

        os.kill(reader.child.pid, signal.SIGCONT)
        reader.go_on()
        outcome = json.loads(reader.line())

        assert outcome == {"right": HELD, "failed": 0, "wrong": 0, "release": "LeaseExpired"}
        check_all(client, prefixes)


def test_a_lease_that_is_not_committed_publishes_nothing(sidecar: SidecarProcess, client: Client) -> None:
    namespace = client.namespaces[0].namespace
    aborted, hung_up = block_client.keys_of(6, HELD), block_client.keys_of(7, HELD)
    grant = client.reserve("aborted", namespace, aborted)
    for key, offset in zip(aborted, grant.offsets.tolist(), strict=True):
        block_client.write(client, offset, key)

    client.abort(grant.lease_id)
    instance = uuid.uuid4().bytes
    with connected(sidecar, instance=instance) as other:
        lost = other.reserve("hung up", namespace, hung_up)
    wait_until(lambda: tier(client).limbo_bytes == HELD * BLOCK_NBYTES, "its connection's end")
    with connected(sidecar, instance=instance) as other, pytest.raises(LeaseExpired):
        other.abort(lost.lease_id)  # the engine is back and confirms

    assert tier(client).limbo_bytes == 0
    assert client.match(namespace, aborted).num_blocks == 0
    assert client.match(namespace, hung_up).num_blocks == 0


def test_a_burst_of_more_than_the_arena_from_three_processes_is_never_declined(
    sidecar: SidecarProcess, client: Client
) -> None:
    """1.6 times the arena at once; eviction can always make room, so every block is taken, and what is found is right."""
    blocks = tier(client).capacity_bytes // BLOCK_NBYTES
    share = int(1.6 * blocks / 3) // block_client.PREFIX_BLOCKS * block_client.PREFIX_BLOCKS
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(client_process("put", sidecar, 100 + number, share)) for number in range(3)]
        assert [writer.line() for writer in writers] == ["ready"] * 3

        for writer in writers:
            writer.go_on()

        assert [int(writer.line()) for writer in writers] == [share] * 3
    prefixes = [
        block_client.keys_of((100 + number) * 1000 + i, block_client.PREFIX_BLOCKS)
        for number in range(3)
        for i in range(share // block_client.PREFIX_BLOCKS)
    ]
    assert check_all(client, prefixes) >= 0.9 * blocks


def test_engines_live_through_ten_kills_of_the_sidecar(tmp_path: Path) -> None:
    """kill -9 at ten random moments while three processes put and get: each meets the loss within its deadline, connects
    to the new boot, and never takes a wrong byte."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sidecar = SidecarProcess(tmp_path / "kvstore.sock", "--no-grpc", arena="4MiB")
    sidecar.start()
    try:
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(client_process("load", sidecar, number)) for number in range(3)]
            assert [engine.line() for engine in engines] == ["loading"] * 3
            for _ in range(10):
                with tool(sidecar) as watcher:
                    served = rng.randrange(10, 150)
                    start = watcher.stats().counters["calls_commit_total"]
                    wait_until(lambda: watcher.stats().counters["calls_commit_total"] >= start + served, "load")  # noqa: B023
                sidecar.kill()
                sidecar.start()
            with tool(sidecar) as watcher:
                wait_until(lambda: watcher.stats().num_sessions == len(engines) + 1, "all are back")

            for engine in engines:
                engine.go_on()
            outcomes = [json.loads(engine.line()) for engine in engines]
    finally:
        sidecar.stop()

    for outcome in outcomes:
        assert outcome["wrong"] == 0
        assert outcome["lost"] >= 10
        assert outcome["boots"] >= 8  # one boot may be over before an engine came back
        assert outcome["longest_lost_call_s"] < 5.0 + 1.0  # the connect deadline of block_client, and a busy machine
        assert outcome["right"] > 0
        assert outcome["committed"] > 0
