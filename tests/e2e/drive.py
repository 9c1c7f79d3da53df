"""A sidecar with a drive, what is on it, and blocks that come from it."""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
from block_client import content
from numpy.typing import NDArray
from sidecar_process import (
    BLOCK_NBYTES,
    SidecarProcess,
    connected,
    running_sidecar,
    tool,
    wait_until,
    wait_until_faulted,
)

from kvstore.client import Acquired, Client
from kvstore.client_arena import Arrival, arrival_of
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.nvme.tables import BLOCK_TABLES

ARRIVAL_DEADLINE_S = 20.0
"""For a block to come from the drive of a busy machine."""


@dataclass
class Drive:
    """A drive's directory, which outlives its sidecars."""

    path: Path
    size: str = "16MiB"

    @property
    def flags(self) -> tuple[str, ...]:
        """For `kvstore serve`."""
        return "--no-grpc", "--nvme", str(self.path), "--nvme-bytes", self.size

    @property
    def num_durable(self) -> int:
        """Blocks that a crash now would leave: entries that are committed to the index, looked at from outside."""
        return self._num_entries(*BLOCK_TABLES.values())

    @property
    def num_quarantined(self) -> int:
        """Slots that are not used again, not after a crash either."""
        return self._num_entries("quarantine")

    def _num_entries(self, *tables: str) -> int:
        with lmdb.open(str(self.path / "index"), readonly=True, max_dbs=16) as env, env.begin() as txn:
            return sum(txn.stat(env.open_db(name.encode(), txn, create=False))["entries"] for name in tables)

    def flip(self, block: NDArray[np.uint8], at: int) -> None:
        """Turn one bit of the block's only copy in the data file. Its sidecar is stopped."""
        with (self.path / "blocks.kv").open("r+b") as file:
            data = file.read()
            start = data.find(block.tobytes())
            assert start > 0
            assert data.find(block.tobytes(), start + 1) < 0
            file.seek(start + at)
            file.write(bytes([data[start + at] ^ 0x10]))
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def running_on(drive: Drive, folder: Path, *, arena: str = "16MiB") -> Iterator[SidecarProcess]:
    """A sidecar on the drive, from the moment on at which all that was on it can be found."""
    with running_sidecar(folder, *drive.flags, arena=arena) as sidecar:
        wait_until_recovered(sidecar)
        yield sidecar


def kill_and_restart(sidecar: SidecarProcess) -> None:
    """kill -9, and again on the same drive."""
    sidecar.kill()
    sidecar.start()
    wait_until_recovered(sidecar)


def stats_of(sidecar: SidecarProcess) -> pb.StatsReply:
    with tool(sidecar) as client:
        return client.stats()


def nvme_of(stats: pb.StatsReply) -> pb.TierStats:
    (tier,) = [tier for tier in stats.tiers if tier.name == "nvme"]
    return tier


def wait_until_recovered(sidecar: SidecarProcess) -> None:
    """Until all that is on the drive can be found, and has room in RAM."""
    with connected(sidecar) as client:
        wait_until(lambda: [d.state for d in nvme_of(client.stats()).drives] == ["ready"], "recovered", 20.0)
        wait_until_faulted(client)


def wait_until_durable(sidecar: SidecarProcess, drive: Drive) -> int:
    """Until all that the sidecar holds is on the drive for good; how many blocks."""
    with tool(sidecar) as client:
        wait_until(lambda: drive.num_durable == client.stats().num_blocks, "all blocks durable", 20.0)
        return client.stats().num_blocks


def acquire(client: Client, keys: Sequence[bytes], *, first_needed: int = 0) -> Acquired:
    return client.acquire(uuid.uuid4().hex, client.namespaces[0].namespace, keys, first_needed=first_needed)


def read(client: Client, keys: Sequence[bytes], grant: Acquired) -> dict[str, int]:
    """Copy what was granted as it arrives: how many blocks were right, lost, or wrong without a sign."""
    assert client.arena is not None
    found = {"right": 0, "lost": 0, "wrong": 0}
    slots = zip(grant.offsets.tolist(), grant.generations.tolist(), strict=True)
    for key, (offset, generation) in zip(keys, slots, strict=True):
        if wait_for_arrival(client, offset, generation) is Arrival.LOST:
            found["lost"] += 1
            continue
        block = client.arena.array[offset : offset + BLOCK_NBYTES].copy()
        if arrival(client, offset, generation) is not Arrival.THERE:
            found["lost"] += 1
        else:
            found["right" if (block == content(key)).all() else "wrong"] += 1
    return found


def get(client: Client, keys: Sequence[bytes]) -> dict[str, int]:
    """Acquire, read, release."""
    grant = acquire(client, keys)
    found = read(client, keys[: grant.num_blocks], grant)
    if grant.lease_id:
        client.release(grant.lease_id, pb.LOADED)
    return found


def arrival(client: Client, offset: int, generation: int) -> Arrival:
    assert client.arena is not None
    return arrival_of(int(client.arena.generations[offset // 4096]), generation)


def wait_for_arrival(client: Client, offset: int, generation: int) -> Arrival:
    until_s = time.monotonic() + ARRIVAL_DEADLINE_S
    while (found := arrival(client, offset, generation)) is Arrival.ON_ITS_WAY:
        assert time.monotonic() < until_s, "neither there nor given up"
        time.sleep(0.0005)
    return found
