"""How much memory does the sidecar need for each block it knows, beside the block's own bytes?

Everything that grows with blocks is counted: keys, dict, columns, eviction order, slots. Each row is a fresh process that
stores the blocks as the sidecar does and looks at its resident memory before and after. Not counted: the arena's
generation table, 8 bytes a page, which is as large with no block in it.
"""

import gc
import multiprocessing
import os
import random
from pathlib import Path

import click
import numpy as np

from benchmarks.harness import Report, Row, at_most, machine_card, show
from kvstore.core.blocks import Holder
from kvstore.core.keys import KVSpec
from kvstore.core.limits import SEGMENT_BYTES, SLOT_ALIGN_BYTES
from kvstore.store import Store
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations

QUESTION = "Resident memory of the index, for each block"
GOAL_BYTES = 300
SEED = 1
SPEC = KVSpec(weights="benchmark", num_layers=2, num_kv_heads=2, head_dim=32, dtype="bfloat16")  # 16 KiB blocks
SHAPES = {"64 blocks a sequence": 64, "1 block a sequence (all of them leaves)": 1}


def run(*, num_blocks: int = 200_000) -> Report:
    rows: list[Row] = []
    for name, sequence_blocks in SHAPES.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            grown_bytes = pool.apply(measure, (num_blocks, sequence_blocks))
        rows.append(
            {
                "shape": name,
                "blocks": num_blocks,
                "grown_mib": round(grown_bytes / 2**20, 1),
                "bytes_per_block": round(grown_bytes / num_blocks, 1),
            }
        )
    worst = max(float(row["bytes_per_block"]) for row in rows)
    return Report(
        question=QUESTION,
        command="python -m benchmarks.index_memory",
        rows=rows,
        goals=[at_most("bytes a block, the worse of the two", worst, GOAL_BYTES)],
        remarks=["keys of 16 bytes; columns grow by doubling, so that just after a doubling it is more"],
    )


def measure(num_blocks: int, sequence_blocks: int) -> int:
    """Bytes by which this process's resident memory grows while `num_blocks` blocks are stored."""
    slots_per_segment = SEGMENT_BYTES // SPEC.block_nbytes
    num_segments = -(-num_blocks // slots_per_segment)
    generations = np.ones(num_segments * SEGMENT_BYTES // SLOT_ALIGN_BYTES, np.uint64)
    slots = SegmentedSlots(num_segments * SEGMENT_BYTES, generations=SharedGenerations(generations))
    slots.add_segments(num_segments)
    store = Store(pinned=slots)
    namespace = store.open_namespace(SPEC, "").namespace
    put_sequence(store, namespace, random.Random(0), sequence_blocks)
    gc.collect()
    before = resident_bytes()
    rng = random.Random(SEED)
    for _ in range(num_blocks // sequence_blocks - 1):
        put_sequence(store, namespace, rng, sequence_blocks)
    gc.collect()
    grown = resident_bytes() - before
    assert store.stats().num_blocks == num_blocks // sequence_blocks * sequence_blocks
    return grown


def put_sequence(store: Store, namespace: bytes, rng: random.Random, num_blocks: int) -> None:
    keys = [rng.randbytes(16) for _ in range(num_blocks)]
    holder = Holder(bytes(16), 1)
    grant = store.reserve(holder, "", namespace, b"", keys, 30.0, 0.0)
    store.commit(holder, grant.lease_id, None, 0.0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@click.command()
@click.option("--blocks", default=200_000, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, blocks: int, as_json: bool) -> None:
    card = machine_card()
    show(run(num_blocks=blocks), card, as_json=as_json)


if __name__ == "__main__":
    main()
