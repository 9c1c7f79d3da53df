"""Sick drives under the real service: bytes that changed, files that vanish, full, failing and read-only file systems. What is
damaged is a miss, counted by its reason; a slot that lied is not used again; readiness says what is wrong; everything else is
served, and never a wrong byte.
"""

import contextlib
import json
import os
import resource
import shutil
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from block_client import content
from drive import nvme_of, stats_of, wait_until_recovered
from drive_index import Entry, damage_in, entries_in, glance, is_settled
from engine_load import LoadClient
from sick_fs import (
    ext4_on_loop,
    fill,
    frozen,
    needs_loop_devices,
    needs_mounts,
    place_on_device,
    remount,
    tmpfs,
)
from sidecar_process import BLOCK_NBYTES, SPEC, SidecarProcess, running_sidecar, wait_until, wait_until_faulted

from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.tiers.nvme.records import HEADER_NBYTES

pytestmark = [pytest.mark.e2e, pytest.mark.crash]

CHAIN_BLOCKS = 32
DAMAGED = 12
"""A block in the middle of the chain: what is before it stays a hit."""
STATE_DEADLINE_S = 20.0


def chain(seed: int, num_blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    return SPEC.hash.hash_blocks([seed, *range(num_blocks * SPEC.block_tokens - 1)])


@dataclass
class Service:
    """A sidecar with 2 MiB of RAM and drives of 4 MiB, and an engine."""

    sidecar: SidecarProcess
    directories: tuple[Path, ...]
    engine: LoadClient
    port: int

    @property
    def file(self) -> Path:
        return self.directories[0] / "blocks.kv"

    @property
    def counters(self) -> Counter[str]:
        return Counter(dict(stats_of(self.sidecar).counters))

    @property
    def quarantined_bytes(self) -> int:
        return int(nvme_of(stats_of(self.sidecar)).quarantined_bytes)

    def ready(self) -> dict[str, Any]:
        """What /readyz says of the drives."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as reply:
            answer = json.load(reply)
        assert answer["ready"] is True, "RAM is served whatever the drives do"
        tier: dict[str, Any] = answer["tiers"]["nvme"]
        return tier

    def problems(self) -> list[tuple[str, str]]:
        """What it says is wrong, and with which drive."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as reply:
            return [(each["problem"], each["subject"]) for each in json.load(reply)["problems"]]

    def states(self) -> list[str]:
        return [drive["state"] for drive in self.ready()["drives"]]

    def reason(self) -> str:
        return "; ".join(drive["reason"] for drive in self.ready()["drives"])

    def wait_for(self, *states: str) -> None:
        wait_until(lambda: self.states() == list(states), f"drives are {states}", STATE_DEADLINE_S)

    def settle(self) -> None:
        wait_until(lambda: is_settled(self.sidecar, self.directories), "durable", STATE_DEADLINE_S)

    def put_durably(self, *seeds: int) -> None:
        for seed in seeds:
            assert self.engine.put(chain(seed)) == CHAIN_BLOCKS
        self.settle()

    def restart(self) -> None:
        """Now RAM is empty: whatever is found comes from the drives."""
        self.sidecar.kill()
        self.sidecar.start()
        wait_until(lambda: "recovering" not in self.states(), "recovered", STATE_DEADLINE_S)
        self.engine.client.connect()

    def entry(self, key: bytes) -> Entry:
        """When nothing is being written."""
        (entry,) = [entry for entry in entries_in(self.directories[0]) if entry.key == key]
        return entry

    def overwrite(self, start: int, data: bytes) -> None:
        """Behind the back of the sidecar."""
        with self.file.open("r+b") as file:
            file.seek(start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def require_all(self, *seeds: int) -> None:
        for seed in seeds:
            assert self.engine.get(chain(seed)) == Counter(right=CHAIN_BLOCKS)

    def require_service_from_ram(self, seed: int) -> None:
        """Put and get as if there were no drive."""
        assert self.engine.put(chain(seed)) == CHAIN_BLOCKS
        self.require_all(seed)


@contextlib.contextmanager
def service_on(*directories: Path, folder: Path, arena: str = "2MiB") -> Iterator[Service]:
    flags = [flag for directory in directories for flag in ("--nvme", str(directory))]
    port = free_port()
    flags += ["--no-grpc", "--nvme-bytes", "4MiB", "--metrics-port", str(port)]
    with running_sidecar(folder, *flags, arena=arena) as sidecar:
        engine = LoadClient(sidecar.socket, SPEC, [])
        service = Service(sidecar, directories, engine, port)
        wait_until(lambda: "recovering" not in service.states(), "recovered", STATE_DEADLINE_S)
        with engine.client as client:
            wait_until_faulted(client)
            yield service
        assert engine.wrong == []
        assert sidecar.alive()
    assert "Traceback" not in sidecar.log


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with service_on(tmp_path / "drive", folder=tmp_path) as running:
        yield running


# --- bytes that are not those that were written ------------------------------------------------------------------------------


def flip(service: Service, entry: Entry) -> None:
    """One bit of the block."""
    byte = content(entry.key)[5000]
    service.overwrite(entry.start + 5000, bytes([byte ^ 0x04]))


def tear(service: Service, entry: Entry) -> None:
    """The third page never reached the drive."""
    service.overwrite(entry.start + 2 * SLOT_ALIGN_BYTES, bytes(SLOT_ALIGN_BYTES))


def misdirect(service: Service, entry: Entry) -> None:
    """The drive wrote another block here: whole, and intact in itself."""
    service.overwrite(entry.start, content(chain(5)[0]).tobytes())


def lose_write(service: Service, entry: Entry) -> None:
    """The slot has what it had before."""
    service.overwrite(entry.start, bytes(BLOCK_NBYTES))


DAMAGES = {1: flip, 2: tear, 3: misdirect, 4: lose_write}
"""By the chain in which a block gets it."""


@pytest.mark.parametrize("while_running", [True, False], ids=["while it runs", "between runs"])
def test_blocks_whose_bytes_changed_are_misses_and_their_slots_are_given_up(
    service: Service, while_running: bool
) -> None:
    service.put_durably(*DAMAGES, 5)
    entries = {seed: service.entry(chain(seed)[DAMAGED]) for seed in DAMAGES}
    if while_running:
        service.restart()
    else:
        service.sidecar.kill()
    for seed, damage in DAMAGES.items():
        damage(service, entries[seed])
    assert len(damage_in(service.directories[0])) == len(DAMAGES)
    if not while_running:
        service.restart()

    for num_damaged, seed in enumerate(DAMAGES, 1):
        found = service.engine.get(chain(seed))
        assert (found["wrong"], found["right"] >= DAMAGED, found["lost"] >= 1) == (0, True, True), DAMAGES[seed]
        assert service.engine.num_found(chain(seed)) == DAMAGED, "from now on it is a miss"
        counters = service.counters
        assert counters["failed_reads_checksum_total"] == counters["nvme_problems_checksum_total"] == num_damaged
        assert service.quarantined_bytes == num_damaged * BLOCK_NBYTES
    service.require_all(5)
    assert service.states() == ["ready"], "blocks that lie say nothing about whether the drive can be read"

    for seed, entry in entries.items():
        assert service.engine.put(chain(seed)) >= 1, "whoever recomputes it stores it again"
        wait_until(lambda entry=entry: is_elsewhere(service.directories[0], entry), "elsewhere", STATE_DEADLINE_S)
    service.settle()
    service.restart()
    service.require_all(*DAMAGES, 5)
    assert service.quarantined_bytes == len(DAMAGES) * BLOCK_NBYTES


def is_elsewhere(directory: Path, entry: Entry) -> bool:
    return {other.start for other in glance(directory) if other.key == entry.key} not in ({entry.start}, set())


# --- the data file ---------------------------------------------------------------------------------------------------------


def test_a_data_file_that_is_deleted_is_read_on_and_not_written(service: Service) -> None:
    service.put_durably(1)
    service.restart()
    service.file.unlink()

    service.wait_for("degraded")
    assert "deleted" in service.reason()
    service.require_all(1)
    service.require_service_from_ram(2)
    wait_until(lambda: service.counters["failed_writes_gone_total"] > 0, "the write was refused")
    assert service.counters["nvme_problems_deleted_total"] == 1
    assert service.problems() == [("tier_degraded", str(service.directories[0]))]

    service.restart()
    assert service.states() == ["ready"], "with a new file"
    assert f"{CHAIN_BLOCKS} blocks are lost" in service.sidecar.log
    assert service.engine.num_found(chain(1)) == 0
    service.put_durably(3)
    service.restart()
    service.require_all(3)


def test_a_directory_that_is_removed_costs_what_was_in_it(service: Service) -> None:
    service.put_durably(1)
    service.restart()
    shutil.rmtree(service.directories[0])

    service.wait_for("degraded")
    assert "deleted" in service.reason()
    service.require_all(1)
    service.require_service_from_ram(2)

    service.restart()
    assert service.states() == ["ready"], "with a new directory"
    assert service.engine.num_found(chain(1)) == 0
    service.put_durably(3)
    service.restart()
    service.require_all(3)


def test_a_data_file_that_is_cut_short_loses_what_was_cut_off_and_no_more(service: Service) -> None:
    service.put_durably(1)
    service.restart()
    keys = chain(1)
    cut = service.entry(keys[DAMAGED]).start
    num_kept = sum(service.entry(key).start < cut for key in keys)
    os.truncate(service.file, cut)

    found = service.engine.get(keys)

    assert found["right"] == num_kept == DAMAGED, "slots are given out in order"
    assert found["right"] + found["lost"] <= CHAIN_BLOCKS
    assert service.engine.num_found(keys) == DAMAGED
    counters = service.counters
    assert counters["failed_reads_short_total"] > 0
    assert service.quarantined_bytes == counters["failed_reads_short_total"] * BLOCK_NBYTES
    service.require_service_from_ram(2)

    service.restart()
    assert service.states() == ["ready"]
    assert service.file.stat().st_size == HEADER_NBYTES + (4 << 20), "as large as it was"
    assert service.engine.get(keys)["right"] == DAMAGED, "where others wrote behind the cut, the file has holes"
    assert service.engine.num_found(keys) == DAMAGED
    assert service.engine.put(chain(3)) == CHAIN_BLOCKS
    wait_until(lambda: all_in(service.directories[0], 3), "written", STATE_DEADLINE_S)
    service.restart()
    service.require_all(3)


def test_a_data_file_that_is_swapped_for_another_is_noticed_before_it_is_believed(
    service: Service, tmp_path: Path
) -> None:
    """Somebody restores the wrong backup: each file is fine, and they do not belong together."""
    service.put_durably(1)
    (tmp_path / "two").mkdir()
    with service_on(tmp_path / "other", folder=tmp_path / "two") as other:
        other.put_durably(2)
    service.sidecar.kill()
    service.file.write_bytes((tmp_path / "other" / "blocks.kv").read_bytes())

    service.sidecar.spawn()

    wait_until(lambda: not service.sidecar.alive(), "it ends", STATE_DEADLINE_S)
    assert service.sidecar.stop() == 2
    assert "belongs to drive" in service.sidecar.log
    (tmp_path / "drive" / "index" / "data.mdb").unlink()
    service.sidecar.start()
    wait_until_recovered(service.sidecar)
    service.engine.client.connect()
    assert service.engine.num_found(chain(1)) == service.engine.num_found(chain(2)) == 0


@pytest.mark.parametrize("damage", ["deleted", "cut short"])
def test_an_index_that_vanishes_while_it_is_used_is_noticed_before_anything_else_relies_on_it(
    service: Service, damage: str
) -> None:
    """Without a look lmdb writes on into a file that nobody finds again, or ends the process with SIGBUS."""
    service.put_durably(1)
    service.restart()
    index = service.directories[0] / "index" / "data.mdb"
    if damage == "deleted":
        index.unlink()
    else:
        os.truncate(index, 2 * 4096)

    for seed in range(2, 6):
        service.require_service_from_ram(seed)

    service.wait_for("degraded")
    assert f"its file was {damage}" in service.reason()
    service.require_all(1)
    wait_until(lambda: writes_refused(service), "writes stop")

    service.restart()
    assert service.states() == ["ready" if damage == "deleted" else "off"]
    service.require_service_from_ram(6)


def writes_refused(service: Service) -> bool:
    service.engine.put(chain(100 + service.engine.tally["stored"], num_blocks=1))
    return service.counters["failed_writes_gone_total"] > 0


@pytest.mark.parametrize("damage", ["scribbled", "cut short"])
def test_an_index_that_is_damaged_turns_the_drive_off_and_nothing_else(service: Service, damage: str) -> None:
    service.put_durably(1)
    service.sidecar.kill()
    index = service.directories[0] / "index" / "data.mdb"
    intact = index.read_bytes()
    pages = bytearray(intact)
    if damage == "scribbled":
        pages[4096 * 2 :] = b"\xa5" * (len(pages) - 4096 * 2)
    else:
        del pages[len(pages) // 2 :]
    index.write_bytes(pages)

    service.restart()

    assert service.states() == ["off"]
    assert "damaged" in service.reason()
    assert service.engine.num_found(chain(1)) == 0
    service.require_service_from_ram(2)
    assert index.read_bytes() == pages, "nobody wiped it"

    service.sidecar.kill()
    index.write_bytes(intact)
    service.restart()
    assert service.states() == ["ready"]
    service.require_all(1)


# --- no room ---------------------------------------------------------------------------------------------------------------


def test_a_full_file_system_stops_writes_until_there_is_room_again(tmp_path: Path) -> None:
    """The data file has its space; what finds none is the index. What it could not commit is committed later."""
    needs_mounts()
    with tmpfs(12 << 20) as folder, service_on(folder / "drive", folder=tmp_path) as service:
        service.put_durably(1)
        service.restart()
        other = fill(folder)
        seeds = 2
        while service.states() == ["ready"]:
            assert seeds < 9, "the index never grew"
            service.require_service_from_ram(seeds)
            seeds += 1

        assert "No space left" in service.reason()
        assert service.problems() == [("disk_full", str(folder / "drive"))]
        service.require_all(1)
        service.require_service_from_ram(10)
        wait_until(lambda: service.counters["failed_writes_no_space_total"] > 0, "a write was refused")
        assert service.counters["nvme_problems_index_total"] > 0
        assert service.quarantined_bytes == 0, "no slot is to blame"

        other.unlink()
        service.wait_for("ready")
        service.settle()
        service.restart()
        num_found = {seed: service.engine.num_found(chain(seed)) for seed in range(1, seeds)}
        assert num_found[1] == CHAIN_BLOCKS
        assert sum(num_found.values()) > CHAIN_BLOCKS, "what was written before the index was full"
        for seed, count in num_found.items():
            assert service.engine.get(chain(seed)) == Counter(right=count)
        service.put_durably(11)
    assert "committed again" in service.sidecar.log


def test_killed_while_the_file_system_is_full_it_has_what_was_durable_before(tmp_path: Path) -> None:
    needs_mounts()
    with tmpfs(12 << 20) as folder, service_on(folder / "drive", folder=tmp_path) as service:
        service.put_durably(1)
        fill(folder)
        seeds = 2
        while service.states() == ["ready"]:
            assert seeds < 9, "the index never grew"
            service.require_service_from_ram(seeds)
            seeds += 1

        service.restart()

        assert service.states() == ["ready"], "until it has something to write"
        service.require_all(1)
        assert damage_in(service.directories[0]) == []
        for seed in range(2, 20):
            service.require_service_from_ram(seed)
        service.require_all(1)


def test_a_thin_volume_that_runs_full_stops_writes_and_nothing_else(tmp_path: Path) -> None:
    """The file system believes that it has room, and the device below does not: the writes themselves fail."""
    needs_loop_devices()
    with (
        tmpfs(16 << 20) as below,
        ext4_on_loop(below / "image", 32 << 20) as (folder, _),
        service_on(folder / "drive", folder=tmp_path) as service,
    ):
        service.put_durably(1)
        service.restart()
        other = fill(below)

        seeds = 2
        while service.states() == ["ready"]:
            assert seeds < 9, "writes went on"
            service.require_service_from_ram(seeds)
            seeds += 1

        service.require_all(1)
        service.require_service_from_ram(10)
        wait_until(lambda: service.states() == ["degraded"], "the probe failed too")
        other.unlink()
        wait_until(lambda: writes_again(service), "writes go on", STATE_DEADLINE_S)


def test_a_limit_of_file_sizes_stops_writes_beyond_it_until_it_is_lifted(service: Service) -> None:
    service.put_durably(1)
    service.restart()
    free = [HEADER_NBYTES + slot for slot in range(0, 4 << 20, BLOCK_NBYTES)]
    limit = max(entry.start + entry.nbytes for entry in entries_in(service.directories[0]))
    assert limit < max(free)
    resource.prlimit(service.sidecar.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    service.require_service_from_ram(2)

    service.wait_for("degraded")
    assert "writes fail: no_space" in service.reason()
    wait_until(lambda: service.counters["failed_writes_no_space_total"] > 0, "a write was refused")
    assert service.quarantined_bytes == 0, "no slot is to blame"
    service.require_all(1)

    resource.prlimit(service.sidecar.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    wait_until(lambda: writes_again(service), "writes go on", STATE_DEADLINE_S)
    service.settle()
    service.restart()
    service.require_all(1)


def writes_again(service: Service) -> bool:
    """Put something new, since a drive is tried again only when there is something to write."""
    seed = 100 + service.engine.tally["stored"]
    service.engine.put(chain(seed, num_blocks=1))
    return service.states() == ["ready"]


# --- no writes -------------------------------------------------------------------------------------------------------------


def test_a_file_system_that_turns_read_only_is_read_on(tmp_path: Path) -> None:
    """ext4 does it when it meets an error of its own."""
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, device),
        service_on(folder / "drive", folder=tmp_path) as service,
    ):
        service.put_durably(1)
        service.restart()
        device.fail_file_system()

        service.require_service_from_ram(2)

        service.wait_for("degraded")
        assert "read_only" in service.reason() or "Read-only" in service.reason()
        wait_until(lambda: service.counters["failed_writes_read_only_total"] > 0, "a write was refused")
        assert service.quarantined_bytes == 0
        service.require_all(1, 2)

        service.restart()
        assert service.states() == ["off"], "it cannot even be opened for writing"
        assert "Read-only" in service.reason()
        service.require_service_from_ram(3)


def test_a_drive_mounted_read_only_at_the_start_is_off_and_comes_back_when_it_is_writable(tmp_path: Path) -> None:
    needs_mounts()
    with tmpfs(12 << 20) as folder, service_on(folder / "drive", folder=tmp_path) as service:
        service.put_durably(1)
        service.sidecar.kill()
        remount(folder, "ro")

        service.restart()

        assert service.states() == ["off"]
        assert "Read-only" in service.reason()
        service.require_service_from_ram(2)

        service.sidecar.kill()
        remount(folder, "rw")
        service.restart()
        service.require_all(1)


def test_a_drive_that_hangs_in_a_write_is_read_on_and_holds_up_nothing_in_ram(tmp_path: Path) -> None:
    """What is being written stays in RAM until the drive answers: as much as the drive has room for, of 16 MiB."""
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, _),
        service_on(folder / "drive", folder=tmp_path, arena="16MiB") as service,
    ):
        service.put_durably(1)
        service.restart()
        with frozen(folder):
            service.require_service_from_ram(2)
            service.require_all(1)
            for seed in range(3, 38):
                service.require_service_from_ram(seed)
            assert service.counters["evicted_blocks_total"] > 0
            assert nvme_of(stats_of(service.sidecar)).writing_bytes > 0
            service.wait_for("degraded")
            assert "hangs" in service.reason()

        service.wait_for("ready")
        wait_until(
            lambda: service.counters["demoted_blocks_total"] >= CHAIN_BLOCKS, "what hung is written", STATE_DEADLINE_S
        )
        service.restart()
        assert damage_in(service.directories[0]) == []
        service.put_durably(50)


# --- sectors that fail -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def index_elsewhere(directory: Path) -> Iterator[None]:
    """The index on a file system of its own, so that only the data file lies on what fails."""
    (directory / "index").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(tmpfs(8 << 20))
        (directory / "index").rmdir()
        (directory / "index").symlink_to(there)
        yield


def test_a_bad_sector_loses_one_block_and_its_slot(tmp_path: Path) -> None:
    """The last block of the chain lies on the last slot in use; behind its first page the device is bad."""
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, device),
        index_elsewhere(folder / "drive"),
        service_on(folder / "drive", folder=tmp_path) as service,
    ):
        service.put_durably(1, 2)
        service.restart()
        keys = chain(2)
        entry = service.entry(keys[-1])
        assert entry.start == max(other.start for other in entries_in(service.directories[0]))
        with device.without_sectors(place_on_device(service.file, entry.start + SLOT_ALIGN_BYTES)):
            found = service.engine.get(keys)

            assert found == Counter(right=CHAIN_BLOCKS - 1, lost=1)
            assert service.engine.num_found(keys) == CHAIN_BLOCKS - 1
            assert service.counters["failed_reads_eio_total"] == 1
            assert service.quarantined_bytes == BLOCK_NBYTES
            assert service.states() == ["ready"], "one bad sector is not a bad drive"
            service.require_all(1)


def test_a_device_that_fails_is_given_up_and_tried_again(tmp_path: Path) -> None:
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, device),
        index_elsewhere(folder / "drive"),
        service_on(folder / "drive", folder=tmp_path) as service,
    ):
        service.put_durably(1, 2)
        service.restart()
        with device.without_sectors(place_on_device(service.file, HEADER_NBYTES)):
            assert service.engine.get(chain(1)) == Counter(lost=CHAIN_BLOCKS)

            service.wait_for("degraded")
            assert "reads fail: eio" in service.reason()
            quarantined = service.quarantined_bytes
            assert quarantined == service.counters["failed_reads_eio_total"] * BLOCK_NBYTES
            assert quarantined < CHAIN_BLOCKS * BLOCK_NBYTES, "a dead drive is not to use up its slots"
            assert service.engine.num_found(chain(2)) == 0, "nobody waits for a drive that does not answer"
            service.require_service_from_ram(3)
            wait_until(lambda: "writes fail: eio" in service.reason(), "writes fail too", STATE_DEADLINE_S)

        wait_until(lambda: service.engine.get(chain(2))["right"] == CHAIN_BLOCKS, "read again", STATE_DEADLINE_S)
        wait_until(lambda: writes_again(service), "writes go on", STATE_DEADLINE_S)
        service.settle()
        service.restart()
        service.require_all(2)


def test_a_device_that_fails_with_its_index_is_survived(tmp_path: Path) -> None:
    """No file on it can be read or written any more, but what the kernel has in its cache."""
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, device),
        service_on(folder / "drive", folder=tmp_path) as service,
    ):
        service.put_durably(1)
        service.restart()
        files = service.file, service.directories[0] / "index" / "data.mdb"
        with device.without_sectors(min(place_on_device(file, 0) for file in files)):
            assert service.engine.get(chain(1))["right"] == 0
            for seed in range(2, 12):
                service.require_service_from_ram(seed)

            service.wait_for("degraded")
            service.restart()
            assert service.states() == ["off"]
            service.require_service_from_ram(1)


def test_a_drive_that_fails_beside_one_that_does_not_costs_its_own_blocks(tmp_path: Path) -> None:
    needs_loop_devices()
    with (
        ext4_on_loop(tmp_path / "image", 32 << 20) as (folder, device),
        index_elsewhere(folder / "sick"),
        service_on(tmp_path / "well", folder / "sick", folder=tmp_path) as service,
    ):
        service.put_durably(1)
        assert len(entries_in(tmp_path / "well")) == len(entries_in(folder / "sick")) == CHAIN_BLOCKS // 2
        service.restart()
        with device.without_sectors(place_on_device(folder / "sick" / "blocks.kv", 0)):
            found = service.engine.get(chain(1))
            assert found["lost"] >= CHAIN_BLOCKS // 2
            assert found["wrong"] == 0
            service.require_service_from_ram(2)
            wait_until(lambda: "writes fail" in service.reason(), "noticed", STATE_DEADLINE_S)
            assert service.states() == ["ready", "degraded"]
            assert service.ready()["state"] == "degraded"

            service.require_service_from_ram(3)
            wait_until(lambda: all_in(tmp_path / "well", 3), "written to the drive that is well", STATE_DEADLINE_S)
            service.restart()
            assert service.states() == ["ready", "off"]
            service.require_all(3)


def all_in(directory: Path, seed: int) -> bool:
    return set(chain(seed)) <= {entry.key for entry in glance(directory)}
