"""What lies in a drive's directory, read from outside while nobody writes there: the entries, and the bytes they speak of."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np
from block_client import content
from drive import nvme_of, stats_of
from sidecar_process import SidecarProcess
from xxhash import xxh3_64_intdigest

from kvstore.tiers.nvme.records import HEADER_NBYTES, ROW_DTYPES, decode_rows, intact
from kvstore.tiers.nvme.tables import BLOCK_TABLES


class Entry(NamedTuple):
    """A block that is durable."""

    namespace: bytes
    key: bytes
    start: int  # of its slot, in the data file
    nbytes: int
    checksum: int
    is_whole: bool  # the entry itself


def entries_in(directory: Path) -> list[Entry]:
    """Every entry of the index; none when there is no index yet."""
    if not (directory / "index" / "data.mdb").exists():
        return []
    found: list[Entry] = []
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=16) as env, env.begin() as txn:
        for digest_nbytes, table in BLOCK_TABLES.items():
            packed = b"".join(key + value for key, value in txn.cursor(env.open_db(table.encode(), txn, create=False)))
            if len(packed) % ROW_DTYPES[digest_nbytes].itemsize:
                raise lmdb.CorruptedError(f"{directory}: entries of another size in {table}")
            rows = decode_rows(packed, digest_nbytes)
            for row, is_whole in zip(rows, intact(rows).tolist(), strict=True):
                start = HEADER_NBYTES + int(row["offset"])
                name, key = row["namespace"].tobytes(), row["key"].tobytes()
                found.append(Entry(name, key, start, int(row["nbytes"]), int(row["checksum"]), is_whole))
    return found


def glance(directory: Path) -> list[Entry]:
    """As entries_in, while somebody writes; none when the pages were changed under the look. Look again."""
    try:
        return entries_in(directory)
    except lmdb.Error:
        return []


def num_entries_in(directory: Path) -> int:
    """How many. Somebody may write meanwhile: this looks at one page, and at nothing that is being changed in place."""
    if not (directory / "index" / "data.mdb").exists():
        return 0
    with lmdb.open(str(directory / "index"), readonly=True, lock=False, max_dbs=16) as env, env.begin() as txn:
        tables = [env.open_db(table.encode(), txn, create=False) for table in BLOCK_TABLES.values()]
        return sum(txn.stat(table)["entries"] for table in tables)


def damage_in(directory: Path, *, known: Collection[int] = ()) -> list[str]:
    """Entries that are not whole, or whose slot holds other bytes than block_client's for their key; in words. Slots that
    start at `known` are passed over."""
    entries = entries_in(directory)
    if not entries:
        return []
    data = np.fromfile(directory / "blocks.kv", np.uint8)
    wrong: list[str] = []
    for entry in entries:
        if entry.start in known:
            continue
        block = data[entry.start : entry.start + entry.nbytes]
        if not entry.is_whole:
            wrong.append(f"entry {entry.key.hex()}")
        elif block.nbytes != entry.nbytes or (block != content(entry.key, entry.nbytes)).any():
            wrong.append(f"bytes of {entry.key.hex()} at {entry.start}")
        elif xxh3_64_intdigest(block.data) != entry.checksum:
            wrong.append(f"checksum of {entry.key.hex()}")
    return wrong


def is_settled(sidecar: SidecarProcess, directories: Sequence[Path]) -> bool:
    """No move and no removal is under way, and the indexes have what the store has: all of it is durable."""
    tier = nvme_of(stats_of(sidecar))
    pending = tier.writing_bytes + tier.leaving_bytes + tier.limbo_bytes
    return not pending and sum(map(num_entries_in, directories)) == tier.ready_blocks
