"""A restart with another configuration: what fits it is served; what does not is a miss or a clear refusal, and no wrong byte."""

import contextlib
import dataclasses
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from drive import nvme_of, stats_of
from drive_index import damage_in, entries_in, is_settled
from engine_load import LoadClient
from sidecar_process import BLOCK_NBYTES, SPEC, START_DEADLINE_S, SidecarProcess, running_sidecar, wait_until

from kvstore.core.keys import KVSpec
from kvstore.tiers.nvme.records import FORMAT_VERSION, HEADER_NBYTES, MAGIC

pytestmark = pytest.mark.e2e

CHAIN_BLOCKS = 32
CHAIN_NBYTES = CHAIN_BLOCKS * BLOCK_NBYTES
MIB = 1 << 20


def chain(seed: int, spec: KVSpec = SPEC) -> list[bytes]:
    return spec.hash.hash_blocks([seed, *range(CHAIN_BLOCKS * spec.block_tokens - 1)])


class Running:
    """A sidecar that has recovered, and an engine of it."""

    def __init__(self, sidecar: SidecarProcess, directories: tuple[Path, ...], engine: LoadClient) -> None:
        self.sidecar = sidecar
        self.directories = directories
        self.engine = engine

    @property
    def capacity_bytes(self) -> int:
        return int(nvme_of(stats_of(self.sidecar)).capacity_bytes)

    def put(self, *seeds: int, spec: KVSpec = SPEC) -> None:
        """Until it is durable."""
        for seed in seeds:
            assert self.engine.put(chain(seed, spec)) == CHAIN_BLOCKS
            wait_until(lambda: is_settled(self.sidecar, self.directories), "durable", START_DEADLINE_S)

    def has(self, *seeds: int) -> bool:
        """Whole and right."""
        return all(self.engine.get(chain(seed)) == Counter(right=CHAIN_BLOCKS) for seed in seeds)


@contextlib.contextmanager
def running(
    folder: Path, *names: str, size: str = "4MiB", segment: str = "1MiB", spec: KVSpec = SPEC
) -> Iterator[Running]:
    """One life of a sidecar on the drives `names` of `folder`; its end is a SIGTERM."""
    directories = tuple(folder / name for name in names)
    with running_sidecar(folder, *flags_for(directories, size=size, segment=segment), arena="4MiB") as sidecar:
        wait_until(lambda: "recovering" not in states(sidecar), "recovered", START_DEADLINE_S)
        assert states(sidecar) == ["ready"] * len(names)
        engine = LoadClient(sidecar.socket, spec, [])
        with engine.client:
            yield Running(sidecar, directories, engine)
        assert engine.wrong == []
    assert "Traceback" not in sidecar.log
    for directory in directories:
        assert damage_in(directory) == []


def states(sidecar: SidecarProcess) -> list[str]:
    return [drive.state for drive in nvme_of(stats_of(sidecar)).drives]


def flags_for(directories: tuple[Path, ...], *, size: str, segment: str) -> list[str]:
    flags = ["--no-grpc", "--segment", segment]
    if size:
        flags += ["--nvme-bytes", size]
    for directory in directories:
        flags += ["--nvme", str(directory)]
    return flags


def refusal(folder: Path, *names: str, size: str = "4MiB", segment: str = "1MiB") -> str:
    """What a sidecar says that ends at once."""
    directories = tuple(folder / name for name in names)
    sidecar = SidecarProcess(folder / "refused.sock", *flags_for(directories, size=size, segment=segment))
    before = sidecar.log if sidecar._log.exists() else ""
    sidecar.spawn()
    wait_until(lambda: not sidecar.alive(), "refused", START_DEADLINE_S)
    assert sidecar.stop() == 2
    said = sidecar.log.removeprefix(before)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line


# --- size ------------------------------------------------------------------------------------------------------------------


def test_a_drive_that_grew_has_what_it_had_and_room_for_more(tmp_path: Path) -> None:
    with running(tmp_path, "drive", size="2MiB") as before:
        before.put(1, 2, 3, 4)
        assert before.capacity_bytes == 4 * CHAIN_NBYTES

    with running(tmp_path, "drive", size="4MiB") as after:
        assert after.capacity_bytes == 4 * MIB
        assert after.has(1, 2, 3, 4)
        after.put(5, 6, 7, 8)
        assert stats_of(after.sidecar).counters["nvme_evicted_blocks_total"] == 0
    assert (tmp_path / "drive" / "blocks.kv").stat().st_size == HEADER_NBYTES + 4 * MIB

    with running(tmp_path, "drive", size="4MiB") as again:
        assert again.has(1, 2, 3, 4, 5, 6, 7, 8)


def test_a_drive_that_shrank_has_what_lay_in_the_part_that_is_left(tmp_path: Path) -> None:
    with running(tmp_path, "drive", size="4MiB") as before:
        before.put(1, 2, 3, 4, 5, 6, 7)
    left = {entry.key for entry in entries_in(tmp_path / "drive") if entry.start < HEADER_NBYTES + 2 * MIB}
    expected = [seed for seed in range(1, 8) if set(chain(seed)) <= left]
    assert 0 < len(expected) < 7

    with running(tmp_path, "drive", size="2MiB") as after:
        assert after.capacity_bytes == 2 * MIB
        assert (tmp_path / "drive" / "blocks.kv").stat().st_size == HEADER_NBYTES + 2 * MIB
        assert [seed for seed in range(1, 8) if after.has(seed)] == expected
        after.put(8)
    assert {entry.key for entry in entries_in(tmp_path / "drive")} >= set(chain(8))

    with running(tmp_path, "drive", size="4MiB") as grown_again:
        assert grown_again.has(8)
        assert not any(grown_again.engine.num_found(chain(seed)) for seed in range(1, 8) if seed not in expected)


def test_without_a_size_a_drive_stays_as_large_as_it_is(tmp_path: Path) -> None:
    with running(tmp_path, "drive", size="3MiB") as before:
        before.put(1)

    with running(tmp_path, "drive", size="") as after:
        assert after.capacity_bytes == 3 * MIB
        assert after.has(1)


def test_a_size_that_the_file_system_does_not_have_is_refused_with_what_it_has(tmp_path: Path) -> None:
    said = refusal(tmp_path, "drive", size="200TiB")

    assert "nvme_bytes" in said
    assert "are free there" in said
    with running(tmp_path, "drive", size="2MiB") as after:
        after.put(1)


# --- drives ----------------------------------------------------------------------------------------------------------------


def test_one_drive_more_takes_its_share_of_what_comes(tmp_path: Path) -> None:
    with running(tmp_path, "one") as before:
        before.put(1, 2)

    with running(tmp_path, "one", "two") as after:
        assert after.capacity_bytes == 8 * MIB
        assert after.has(1, 2)
        after.put(3, 4)
        assert len(entries_in(tmp_path / "two")) == CHAIN_BLOCKS

    with running(tmp_path, "one", "two") as again:
        assert again.has(1, 2, 3, 4)


def test_the_order_in_which_drives_are_named_does_not_matter(tmp_path: Path) -> None:
    with running(tmp_path, "one", "two") as before:
        before.put(1, 2)

    with running(tmp_path, "two", "one") as after:
        assert after.has(1, 2)


def test_one_drive_less_leaves_the_prefixes_that_the_others_have(tmp_path: Path) -> None:
    """Blocks are dealt out in turn, so of what lay on both only the first block can be found; what is behind a gap is
    removed, and does not come back with the drive."""
    with running(tmp_path, "one") as before:
        before.put(1)
    with running(tmp_path, "one", "two") as both:
        both.put(2)
    first_on_one = chain(2)[0] in {entry.key for entry in entries_in(tmp_path / "one")}

    with running(tmp_path, "one") as after:
        assert after.has(1)
        assert after.engine.num_found(chain(2)) == first_on_one
        assert len(entries_in(tmp_path / "one")) == CHAIN_BLOCKS + first_on_one
        after.put(3)

    with running(tmp_path, "one", "two") as again:
        assert again.has(1, 3)
        num_found = again.engine.num_found(chain(2))
        assert num_found < CHAIN_BLOCKS
        assert again.engine.get(chain(2)) == Counter(right=num_found)
        assert again.engine.put(chain(2)) == CHAIN_BLOCKS - num_found
        assert again.has(2)

    with running(tmp_path, "one", "two") as at_last:
        assert at_last.has(1, 2, 3)


def test_a_copy_that_is_older_loses_against_the_newer(tmp_path: Path) -> None:
    """A drive that was away comes back with blocks that were stored again meanwhile."""
    with running(tmp_path, "two") as before:
        before.put(1)
    with running(tmp_path, "one") as meanwhile:
        meanwhile.put(1)

    with running(tmp_path, "one", "two") as both:
        assert both.has(1)
        assert nvme_of(stats_of(both.sidecar)).ready_blocks == CHAIN_BLOCKS, "each block is there once"
        both.put(2)

    assert len(entries_in(tmp_path / "one")) + len(entries_in(tmp_path / "two")) == 2 * CHAIN_BLOCKS


# --- segments, models, formats ---------------------------------------------------------------------------------------------


def test_another_segment_size_is_refused_with_the_one_that_is_right(tmp_path: Path) -> None:
    with running(tmp_path, "drive", segment="1MiB") as before:
        before.put(1)

    said = refusal(tmp_path, "drive", segment="2MiB")

    assert f"segment_bytes: {2 * MIB} given" in said
    assert f"use {MIB}, or another directory" in said
    with running(tmp_path, "drive", segment="1MiB") as after:
        assert after.has(1), "the refusal changed nothing"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(SPEC, weights="another model"),
        dataclasses.replace(SPEC, dtype="float32"),
        dataclasses.replace(SPEC, hash=dataclasses.replace(SPEC.hash, algorithm="sha256", digest_nbytes=32)),
    ],
    ids=["weights", "block size", "longer keys"],
)
def test_another_model_finds_nothing_and_takes_nothing_away(tmp_path: Path, other: KVSpec) -> None:
    with running(tmp_path, "drive") as before:
        before.put(1)

    with running(tmp_path, "drive", spec=other) as after:
        assert after.engine.client.namespaces[0].num_blocks == 0
        assert after.engine.num_found(chain(1, other)) == 0
        after.put(1, spec=other)

    with running(tmp_path, "drive", spec=SPEC) as again:
        assert again.has(1)
        with LoadClient(again.sidecar.socket, other, []).client as client:
            assert client.namespaces[0].num_blocks == CHAIN_BLOCKS


def test_a_format_that_is_newer_is_refused_and_left_alone(tmp_path: Path) -> None:
    with running(tmp_path, "drive") as before:
        before.put(1)
    file = tmp_path / "drive" / "blocks.kv"
    with file.open("r+b") as data:
        data.write(MAGIC + struct.pack("<I", FORMAT_VERSION + 1))
    newer = file.read_bytes()

    said = refusal(tmp_path, "drive")

    assert f"format version {FORMAT_VERSION + 1}" in said
    assert "use the release that wrote it, or another directory" in said
    assert file.read_bytes() == newer


# --- directories -----------------------------------------------------------------------------------------------------------


def test_a_drive_in_use_is_refused_and_the_others_are_let_go(tmp_path: Path) -> None:
    with running(tmp_path, "taken") as holder:
        holder.put(1)

        said = refusal(tmp_path, "free", "taken")

        assert str(tmp_path / "taken") in said
        assert f"in use by process {holder.sidecar.pid}" in said
        assert holder.has(1)
    with running(tmp_path, "free", "taken") as after:
        assert after.has(1)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert "is not a directory" in refusal(tmp_path, "file")
    assert "its parent does not exist" in refusal(tmp_path, "no/where")
    assert "name each directory once" in refusal(tmp_path, "drive", "drive")
