"""How long until the blocks on a drive are known again after a restart?

Two drives are made: 10,000 blocks in slots of 2 MiB (the data file is sparse: recovery reads no byte of a block), and a
million entries of the smallest blocks. A restart is a real `kvstore serve`, from its start until it says that the drive is
ready; beside it the tier's part alone (look at the index's pages, open, scan, drop what is not usable, put parents before
children), and the limit: reading the index file once, from the page cache.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.harness import Report, Row, Samples, at_most, interleave, machine_card, show
from benchmarks.sidecar import running_sidecar
from kvstore.client import Client
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SEGMENT_BYTES
from kvstore.core.moves import BlockRecord
from kvstore.proto.kvstore_pb2 import TOOL
from kvstore.tiers.nvme.directory import DriveDirectory
from kvstore.tiers.nvme.file import DirectFile
from kvstore.tiers.nvme.records import encode_namespace
from kvstore.tiers.nvme.tier import NvmeTier

QUESTION = "Restart: until a drive's blocks are known again"
GOAL_S = 5.0
SEED = 1
SEQUENCE_BLOCKS = 64
DEADLINE_S = 60.0
POLL_S = 0.02
_COMMIT_ENTRIES = 20_000


class Shape(NamedTuple):
    """A drive to restart from."""

    name: str
    spec: KVSpec
    num_blocks: int


class SparseFile(DirectFile):
    """Its space is not taken: 20 GB for a benchmark that reads none of it would be rude."""

    def resize(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)


def shapes(num_large: int, num_small: int) -> tuple[Shape, ...]:
    large = KVSpec(weights="large", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    small = KVSpec(weights="small", num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16")
    assert large.block_nbytes == 2 << 20
    assert small.block_nbytes == 4096
    return Shape("2 MiB blocks", large, num_large), Shape("4 KiB blocks", small, num_small)


def run(*, num_large: int = 10_000, num_small: int = 1_000_000, rounds: int = 5, folder: Path | None = None) -> Report:
    root = Path(tempfile.mkdtemp(prefix="kvstore-restart-", dir=folder))
    try:
        rows: list[Row] = []
        goals = []
        for shape in shapes(num_large, num_small):
            path = root / shape.name.replace(" ", "-")
            make_drive(path, shape)
            samples = interleave(
                {
                    "serve": lambda path=path, shape=shape: serve(path, shape),
                    "tier": lambda path=path, shape=shape: recover(path, shape),
                    "read": lambda path=path: read_index(path),
                },
                rounds=rounds,
            )
            rows += [_row(shape, path, case, samples[case]) for case in samples]
            goals.append(
                at_most(f"restart with {shape.num_blocks:,} {shape.name}, s", samples["serve"].median_s, GOAL_S)
            )
        return Report(
            question=QUESTION,
            command="python -m benchmarks.nvme_restart",
            rows=rows,
            goals=goals,
            remarks=["Hello is answered long before: the drive's blocks are restored behind it"],
        )
    finally:
        shutil.rmtree(root)


def _row(shape: Shape, path: Path, case: str, samples: Samples) -> Row:
    return {
        "drive": f"{shape.num_blocks:,} {shape.name}",
        "index_mib": round((path / "index" / "data.mdb").stat().st_size / 2**20, 1),
        "case": {"serve": "kvstore serve", "tier": "its tier", "read": "one read of the index"}[case],
        "n": len(samples),
        "p50_ms": round(samples.median_s * 1e3, 1),
        "p99_ms": round(samples.p99_s * 1e3, 1),
        "us_per_entry": round(samples.median_s / shape.num_blocks * 1e6, 2),
    }


def make_drive(path: Path, shape: Shape) -> None:
    """A drive as a long life leaves it: sequences of SEQUENCE_BLOCKS, entries committed in groups."""
    directory = DriveDirectory(path, segment_bytes=SEGMENT_BYTES, open_file=SparseFile.open)
    directory.open(drive_nbytes(shape))
    try:
        named = {shape.spec.namespace(): encode_namespace("", shape.spec.canonical())}
        for group in _groups(shape):
            directory.tables.commit(group, named, 0)
        directory.settle()
    finally:
        directory.close()


def drive_nbytes(shape: Shape) -> int:
    slots_per_segment = SEGMENT_BYTES // shape.spec.block_nbytes
    return -(-shape.num_blocks // slots_per_segment) * SEGMENT_BYTES


def _groups(shape: Shape) -> Iterator[Sequence[BlockRecord]]:
    packed = np.random.default_rng(SEED).bytes(16 * shape.num_blocks)
    keys = [packed[start : start + 16] for start in range(0, len(packed), 16)]
    namespace, nbytes = shape.spec.namespace(), shape.spec.block_nbytes
    for first in range(0, shape.num_blocks, _COMMIT_ENTRIES):
        yield [
            BlockRecord(
                namespace, keys[i], keys[i - 1] if i % SEQUENCE_BLOCKS else b"", i * nbytes, nbytes, i + 1, i, i, 1
            )
            for i in range(first, min(first + _COMMIT_ENTRIES, shape.num_blocks))
        ]


def serve(path: Path, shape: Shape) -> None:
    """From the process's start until all blocks can be found."""
    options = ("--nvme", str(path), "--nvme-bytes", str(drive_nbytes(shape)), "--no-grpc")
    with (
        running_sidecar(SEGMENT_BYTES, *options) as socket,
        Client(str(socket), role=TOOL, call_deadline_s=DEADLINE_S) as client,
    ):
        until_s = time.monotonic() + DEADLINE_S
        while (tier := client.stats().tiers[1]).drives[0].state != "ready":
            assert time.monotonic() < until_s, tier
            time.sleep(POLL_S)
        assert tier.ready_blocks == shape.num_blocks


def recover(path: Path, shape: Shape) -> None:
    tier = NvmeTier(
        [path],
        drive_nbytes(shape),
        segment_bytes=SEGMENT_BYTES,
        arena=np.zeros(4096, np.uint8),
        on_moved=lambda _: None,
        on_forgotten=lambda _: None,
        open_file=SparseFile.open,
    )
    tier.open()
    try:
        (blocks,) = tier.recover().namespaces
        assert len(blocks.keys) == shape.num_blocks
    finally:
        tier.close(10.0)


def read_index(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with (path / "index" / "data.mdb").open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


@click.command()
@click.option("--large", default=10_000, show_default=True, help="Blocks of 2 MiB.")
@click.option("--small", default=1_000_000, show_default=True, help="Blocks of 4 KiB.")
@click.option("--rounds", default=5, show_default=True)
@click.option(
    "--folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Where to make the drives."
)
@click.option("--json", "as_json", is_flag=True)
def main(*, large: int, small: int, rounds: int, folder: Path | None, as_json: bool) -> None:
    card = machine_card()
    show(run(num_large=large, num_small=small, rounds=rounds, folder=folder), card, as_json=as_json)


if __name__ == "__main__":
    main()
