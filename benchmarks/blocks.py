"""How fast do blocks of 2 MiB go into the store and out of it, against a plain copy of the same bytes?

put = Reserve, one np.copyto a block into the shared arena, Commit; get = Acquire, one np.copyto a block out of it with the
generation compared before and after, Release: what the connector does, against a real sidecar process. The limit is
np.copyto between two private buffers. All three take turns. Every buffer and the arena are larger than the last-level cache
and used in rotation, and every page of them has been touched before the clock starts.
"""

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row, Samples, at_least, interleave, machine_card, millis, paired_ratio, show
from benchmarks.sidecar import running_sidecar
from kvstore.client import Client
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.proto.kvstore_pb2 import BOTH, LOADED

QUESTION = "Put and get of 2 MiB blocks"
GOAL = 0.8
DEFAULT_BATCH = 32
"""Blocks of one prefill chunk of 512 tokens: what a connector reserves at once. With 16 a put comes to 0.79 to 0.81."""

SPEC = KVSpec(weights="benchmark:blocks", num_layers=32, num_kv_heads=8, head_dim=128, dtype="float16")
"""An 8-billion-parameter model's block of 16 tokens."""


def run(*, pool_mib: int | None = None, batch: int = DEFAULT_BATCH, rounds: int = 40) -> Report:
    pool_blocks = (pool_mib or default_pool_mib()) * 2**20 // SPEC.block_nbytes
    assert pool_blocks % batch == 0
    source, target = (_touched_pool(pool_blocks, fill) for fill in (1, 2))
    with running_sidecar(pool_blocks * SPEC.block_nbytes) as socket, _connected(socket) as client:
        store = _Store(client, source, target, batch)
        for _ in range(pool_blocks // batch):  # every slot of the arena has been mapped, written and read
            store.put()
            store.get()
        samples = interleave({"np.copyto": store.copy, "put": store.put, "get": store.get}, rounds=rounds)
    nbytes = batch * SPEC.block_nbytes
    limit = samples["np.copyto"]
    return Report(
        question=QUESTION,
        command="python -m benchmarks.blocks",
        rows=[_row(name, taken, limit, nbytes) for name, taken in samples.items()],
        goals=[
            at_least(f"{name}, part of np.copyto's rate", round(limit.median_s / samples[name].median_s, 3), GOAL)
            for name in ("put", "get")
        ],
        remarks=[
            f"{batch} blocks a call; source, target and arena of {pool_blocks * SPEC.block_nbytes >> 20} MiB each"
        ],
    )


def default_pool_mib() -> int:
    """Half as much again as the last-level cache, but not less than 256 MiB."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    cache_bytes = max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=0)
    return max(256, -(-cache_bytes * 3 // 2 // 2**26) * 64)


class _Store:
    """The three cases over rotating buffers. Keys are new in every put, so that the arena evicts its oldest blocks."""

    def __init__(self, client: Client, source: NDArray[np.uint8], target: NDArray[np.uint8], batch: int) -> None:
        self._client = client
        self._namespace = client.namespaces[0].namespace
        assert client.arena is not None
        self._arena = client.arena.array
        self._generations = client.arena.generations
        self._source, self._target, self._batch = source, target, batch
        self._sources = _batches(len(source), batch)
        self._targets = _batches(len(target), batch)
        self._put: list[list[bytes]] = []
        self._num_got = 0
        self._requests = itertools.count()

    def copy(self) -> None:
        for i, j in zip(next(self._sources), next(self._targets), strict=True):
            np.copyto(self._target[j], self._source[i])

    def put(self) -> None:
        keys = [uuid.uuid4().bytes for _ in range(self._batch)]
        grant = self._client.reserve(f"put-{next(self._requests)}", self._namespace, keys)
        assert len(grant.offsets) == self._batch, grant.declined_reason
        for i, offset, generation in zip(
            next(self._sources), grant.offsets.tolist(), grant.generations.tolist(), strict=True
        ):
            assert self._generations[offset // SLOT_ALIGN_BYTES] == generation
            np.copyto(self._arena[offset : offset + SPEC.block_nbytes], self._source[i])
        committed = self._client.commit(grant.lease_id, keys)
        assert committed == self._batch
        self._put.append(keys)

    def get(self) -> None:
        keys = self._oldest_kept()
        grant = self._client.acquire(f"get-{next(self._requests)}", self._namespace, keys)
        assert grant.num_blocks == self._batch
        for j, offset, generation in zip(
            next(self._targets), grant.offsets.tolist(), grant.generations.tolist(), strict=True
        ):
            assert self._generations[offset // SLOT_ALIGN_BYTES] == generation
            np.copyto(self._target[j], self._arena[offset : offset + SPEC.block_nbytes])
            assert self._generations[offset // SLOT_ALIGN_BYTES] == generation
        self._client.release(grant.lease_id, LOADED)

    def _oldest_kept(self) -> list[bytes]:
        """Batches in turn among the younger half of those put: none of them has been evicted, nor is in the cache."""
        kept = self._put[-max(1, len(self._source) // self._batch // 2) :]
        self._num_got += 1
        return kept[self._num_got % len(kept)]


def _batches(num_blocks: int, batch: int) -> Iterator[range]:
    """Ranges of block numbers, round and round."""
    return itertools.cycle([range(first, first + batch) for first in range(0, num_blocks, batch)])


def _touched_pool(num_blocks: int, fill: int) -> NDArray[np.uint8]:
    return np.full((num_blocks, SPEC.block_nbytes), fill, np.uint8)


@contextlib.contextmanager
def _connected(socket: Path) -> Iterator[Client]:
    client = Client(str(socket), instance=uuid.uuid4().bytes, role=BOTH, specs=[SPEC], call_deadline_s=5.0)
    client.connect()
    with contextlib.closing(client):
        yield client


def _row(name: str, taken: Samples, limit: Samples, nbytes: int) -> Row:
    return {
        "case": name,
        "p50_ms": millis(taken.median_s),
        "p99_ms": millis(taken.p99_s),
        "gb_per_s": round(nbytes / taken.median_s / 1e9, 2),
        "of_copyto": round(limit.median_s / taken.median_s, 3),
        "of_copyto_paired": round(1 / paired_ratio(taken, limit), 3),
        "n": len(taken),
    }


@click.command()
@click.option("--pool-mib", default=None, type=int, help="Size of each buffer and of the arena.")
@click.option("--batch", default=DEFAULT_BATCH, show_default=True, help="Blocks in a call.")
@click.option("--rounds", default=40, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, pool_mib: int | None, batch: int, rounds: int, as_json: bool) -> None:
    card = machine_card()
    show(run(pool_mib=pool_mib, batch=batch, rounds=rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
