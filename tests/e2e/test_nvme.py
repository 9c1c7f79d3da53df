"""A sidecar with a drive: what was put outlives kill -9, comes back right, once for all who want it, or is a miss."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from block_client import content, keys_of, put
from drive import (
    ARRIVAL_DEADLINE_S,
    Drive,
    acquire,
    arrival,
    get,
    kill_and_restart,
    nvme_of,
    read,
    running_on,
    stats_of,
    wait_for_arrival,
    wait_until_durable,
    wait_until_recovered,
)
from sidecar_process import (
    BLOCK_NBYTES,
    SPEC,
    SidecarProcess,
    connected,
    running_sidecar,
    wait_until,
)

from kvstore.client import Acquired, Client
from kvstore.client_arena import Arrival
from kvstore.core.keys import KVSpec
from kvstore.core.plans import TIERS
from kvstore.proto import kvstore_pb2 as pb

pytestmark = [pytest.mark.e2e, pytest.mark.crash]

PINNED, NVME = bytes([TIERS.index("pinned")]), bytes([TIERS.index("nvme")])
NUM_CLIENTS = 50
NUM_BLOCKS = 64
NAMESPACE = SPEC.namespace()


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return Drive(tmp_path / "drive")


@pytest.fixture
def sidecar(drive: Drive, tmp_path: Path) -> Iterator[SidecarProcess]:
    with running_on(drive, tmp_path) as process:
        yield process


def put_durably(sidecar: SidecarProcess, drive: Drive, *seeds: int, num_blocks: int = NUM_BLOCKS) -> None:
    with connected(sidecar) as client:
        for seed in seeds:
            assert put(client, keys_of(seed, num_blocks)) == num_blocks
    wait_until_durable(sidecar, drive)


def right(num_blocks: int) -> dict[str, int]:
    return {"right": num_blocks, "lost": 0, "wrong": 0}


# --- it survives -----------------------------------------------------------------------------------------------------------


def test_what_is_durable_is_served_byte_for_byte_after_kill_9(sidecar: SidecarProcess, drive: Drive) -> None:
    put_durably(sidecar, drive, 1, 2, 3)

    kill_and_restart(sidecar)

    with connected(sidecar) as client:
        assert client.namespaces[0].num_blocks == 3 * NUM_BLOCKS, "Hello says so"
        for seed in (1, 2, 3):
            keys = keys_of(seed, NUM_BLOCKS)
            assert client.match(NAMESPACE, keys).tiers == NVME * NUM_BLOCKS
            assert get(client, keys) == right(NUM_BLOCKS)
            assert client.match(NAMESPACE, keys).tiers == PINNED * NUM_BLOCKS
    stats = stats_of(sidecar)
    assert stats.counters["restored_blocks_total"] == 3 * NUM_BLOCKS
    assert stats.counters["promoted_blocks_total"] == 3 * NUM_BLOCKS
    assert nvme_of(stats).ready_blocks == 3 * NUM_BLOCKS


def test_it_survives_again_and_again_and_grows(sidecar: SidecarProcess, drive: Drive) -> None:
    for generation in range(1, 5):
        put_durably(sidecar, drive, generation)

        kill_and_restart(sidecar)

        with connected(sidecar) as client:
            for seed in range(1, generation + 1):
                assert get(client, keys_of(seed, NUM_BLOCKS)) == right(NUM_BLOCKS)


def test_what_was_dropped_does_not_come_back(sidecar: SidecarProcess, drive: Drive) -> None:
    put_durably(sidecar, drive, 1, 2)
    with connected(sidecar) as client:
        assert client.drop(NAMESPACE, keys_of(1, NUM_BLOCKS)) == NUM_BLOCKS
    wait_until(lambda: drive.num_durable == NUM_BLOCKS, "removed for good")

    kill_and_restart(sidecar)

    with connected(sidecar) as client:
        assert client.match(NAMESPACE, keys_of(1, NUM_BLOCKS)).num_blocks == 0
        assert get(client, keys_of(2, NUM_BLOCKS)) == right(NUM_BLOCKS)


def test_a_sidecar_told_to_stop_leaves_all_it_held(sidecar: SidecarProcess, drive: Drive) -> None:
    """Nobody waits here until it is durable: the sidecar does, at its end."""
    keys = keys_of(1, NUM_BLOCKS)
    with connected(sidecar) as client:
        put(client, keys)

    assert sidecar.stop() == 0
    sidecar.start()

    wait_until_recovered(sidecar)
    with connected(sidecar) as client:
        assert get(client, keys) == right(NUM_BLOCKS)


def test_kill_9_at_any_moment_leaves_prefixes_of_right_blocks(sidecar: SidecarProcess, drive: Drive) -> None:
    """Killed while it writes: what is found afterwards is a prefix, and every byte of it is right."""
    keys = keys_of(1, 256)
    for num_written in (1, 64, 200):
        with connected(sidecar) as client:
            put(client, keys)
        wait_until(lambda at_least=num_written: drive.num_durable >= at_least, "some are durable")

        kill_and_restart(sidecar)

        with connected(sidecar) as client:
            num_found = client.match(NAMESPACE, keys).num_blocks
            assert num_found >= num_written
            assert get(client, keys) == right(num_found)


def test_a_drive_in_use_is_refused_with_the_process_that_has_it(
    sidecar: SidecarProcess, drive: Drive, tmp_path: Path
) -> None:
    second = SidecarProcess(tmp_path / "second.sock", *drive.flags)
    second.spawn()

    wait_until(lambda: not second.alive(), "ended")

    assert second.stop() != 0
    assert f"in use by process {sidecar.pid}" in second.log
    assert "Traceback" not in second.log


# --- more than RAM holds ---------------------------------------------------------------------------------------------------


def test_what_ram_has_no_room_for_comes_from_the_drive(drive: Drive, tmp_path: Path) -> None:
    """1 MiB of RAM, 3 MiB of blocks: each prefix pushes another one out, to be found on the drive."""
    with running_on(drive, tmp_path, arena="1MiB") as sidecar, connected(sidecar) as client:
        for seed in range(6):
            assert put(client, keys_of(seed, 32)) == 32
            wait_until_durable(sidecar, drive)

        for seed in range(6):
            assert get(client, keys_of(seed, 32)) == right(32)

        stats = stats_of(sidecar)
    assert stats.counters["evicted_blocks_total"] > 0
    assert stats.counters["lost_blocks_total"] == 0
    assert nvme_of(stats).ready_blocks == 6 * 32


# --- many at once ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def many_clients(sidecar: SidecarProcess, count: int) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(connected(sidecar, call_deadline_s=20.0)) for _ in range(count)]


def acquire_at_once(sidecar: SidecarProcess, clients: list[Client], keys: list[bytes]) -> list[Acquired]:
    """All requests lie in the sidecar's sockets when it comes to the first of them."""
    grants: dict[int, Acquired] = {}

    def ask(number: int) -> None:
        grants[number] = acquire(clients[number], keys)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(clients))]
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        for thread in threads:
            thread.start()
        wait_until(lambda: all(client._lock.locked() for client in clients), "all have asked")
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(20.0)
    return [grants[number] for number in range(len(clients))]


def test_fifty_who_want_one_prefix_start_one_promotion_and_wait_for_the_same_blocks(
    sidecar: SidecarProcess, drive: Drive
) -> None:
    """The last waits no longer than the first: when the first has all its blocks, so have the others."""
    num_blocks = 512
    put_durably(sidecar, drive, 1, num_blocks=num_blocks)
    kill_and_restart(sidecar)
    keys = keys_of(1, num_blocks)

    with many_clients(sidecar, NUM_CLIENTS) as clients:
        grants = acquire_at_once(sidecar, clients, keys)
        slots = [list(zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True)) for grant in grants]
        assert all(of_one == slots[0] for of_one in slots), "one copy of each block, however many ask"
        assert sum(0 in grant.ready for grant in grants) > 1, "and somebody joined moves under way"

        assert all(wait_for_arrival(clients[0], *slot) is Arrival.THERE for slot in slots[0])
        for client, of_one in zip(clients, slots, strict=True):
            assert all(arrival(client, *slot) is Arrival.THERE for slot in of_one), "no other has to wait any more"

        for client, grant in zip(clients, grants, strict=True):
            assert read(client, keys, grant) == right(num_blocks)
            client.release(grant.lease_id, pb.LOADED)
    counters = stats_of(sidecar).counters
    assert counters["promoted_blocks_total"] == num_blocks, "each block was read once"
    assert counters["acquired_blocks_total"] == NUM_CLIENTS * num_blocks


def test_the_first_blocks_are_there_while_the_last_are_read(tmp_path: Path) -> None:
    """96 MiB in blocks of 1 MiB. A read that takes long is overtaken, but the first half is there before the second, by and
    large. Each look at the generation table goes from the last block to the first: it favours none of the first."""
    spec = KVSpec(weights="large blocks", num_layers=16, num_kv_heads=8, head_dim=128, dtype="float16")
    drive, keys = Drive(tmp_path / "drive", size="128MiB"), spec.hash.hash_blocks(range(96 * spec.block_tokens))
    with running_on(drive, tmp_path, arena="128MiB") as sidecar:
        with connected(sidecar, spec=spec) as client:
            grant = client.reserve("put", spec.namespace(), keys)
            for key, offset in zip(keys, grant.offsets.tolist(), strict=True):
                client.arena.array[offset : offset + spec.block_nbytes] = key[0]
            client.commit(grant.lease_id)
        wait_until_durable(sidecar, drive)
        kill_and_restart(sidecar)

        with connected(sidecar, spec=spec) as client:
            grant = client.acquire("get", spec.namespace(), keys)
            slots = list(zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True))
            until_s = time.monotonic() + ARRIVAL_DEADLINE_S
            looks = [[False] * len(keys)]
            while not all(looks[-1]):
                assert time.monotonic() < until_s
                looks.append([arrival(client, *slot) is Arrival.THERE for slot in reversed(slots)][::-1])
            for key, (offset, _) in zip(keys, slots, strict=True):
                assert (client.arena.array[offset : offset + spec.block_nbytes] == key[0]).all()
            client.release(grant.lease_id, pb.LOADED)

    assert any(any(look) and not all(look) for look in looks)
    seen = [next(number for number, look in enumerate(looks) if look[i]) for i in range(len(keys))]
    half = len(keys) // 2
    assert sum(seen[:half]) < sum(seen[half:])


def test_a_prefetch_brings_blocks_to_ram_before_they_are_leased(sidecar: SidecarProcess, drive: Drive) -> None:
    put_durably(sidecar, drive, 1)
    kill_and_restart(sidecar)
    keys = keys_of(1, NUM_BLOCKS)

    with connected(sidecar) as client:
        assert client.prefetch(NAMESPACE, keys, first_needed=16) == (NUM_BLOCKS, NUM_BLOCKS - 16)
        assert client.prefetch(NAMESPACE, keys, first_needed=16).num_started == 0, "they are on their way, or there"
        expected = NVME * 16 + PINNED * (NUM_BLOCKS - 16)
        wait_until(lambda: client.match(NAMESPACE, keys).tiers == expected, "in RAM")

        grant = acquire(client, keys, first_needed=16)
        assert grant.ready == b"\x01" * (NUM_BLOCKS - 16)
        assert read(client, keys[16:], grant) == right(NUM_BLOCKS - 16)
        client.release(grant.lease_id, pb.LOADED)
    assert stats_of(sidecar).counters["promoted_blocks_total"] == NUM_BLOCKS - 16


# --- damage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [0, 20, NUM_BLOCKS - 1])
def test_a_flipped_bit_is_a_miss_counted_and_its_slot_is_given_up(
    sidecar: SidecarProcess, drive: Drive, damaged: int
) -> None:
    put_durably(sidecar, drive, 1)
    keys = keys_of(1, NUM_BLOCKS)
    sidecar.kill()
    drive.flip(content(keys[damaged]), at=BLOCK_NBYTES // 3)
    sidecar.start()
    wait_until_recovered(sidecar)

    with connected(sidecar) as client:
        found = get(client, keys)
        assert (found["wrong"], found["right"] >= damaged, found["lost"] >= 1) == (0, True, True)
        assert client.match(NAMESPACE, keys).num_blocks == damaged, "it is a miss from now on"

        stats = stats_of(sidecar)
        assert stats.counters["failed_reads_checksum_total"] == 1
        assert nvme_of(stats).quarantined_bytes == BLOCK_NBYTES
        assert put(client, keys) >= 1, "whoever recomputes it stores it again, elsewhere"
        assert get(client, keys) == right(NUM_BLOCKS)
    wait_until(lambda: drive.num_quarantined == 1, "quarantined for good")
    wait_until_durable(sidecar, drive)

    kill_and_restart(sidecar)

    with connected(sidecar) as client:
        assert get(client, keys) == right(NUM_BLOCKS)
    assert nvme_of(stats_of(sidecar)).quarantined_bytes == BLOCK_NBYTES, "nor is the slot trusted after a restart"


def test_a_sidecar_without_a_drive_finds_nothing_of_before(drive: Drive, tmp_path: Path) -> None:
    """The measure of the tests above."""
    keys = keys_of(1, NUM_BLOCKS)
    with running_sidecar(tmp_path, "--no-grpc") as sidecar:
        with connected(sidecar) as client:
            put(client, keys)
        sidecar.kill()
        sidecar.start()
        with connected(sidecar) as client:
            assert client.match(NAMESPACE, keys).num_blocks == 0
