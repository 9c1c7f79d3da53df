"""Run by test_nvme_index.py in a process of its own: damages copies of an index and uses each of them.

python read_damaged_index.py FOLDER COPY COUNT    prints how many copies were refused and how many could be read
"""

import random
import shutil
import sys
from pathlib import Path

from small_drive import NAMESPACE, SPEC, key, record

from kvstore.core.errors import TierIOError
from kvstore.tiers.nvme.lmdb_pages import require_sound
from kvstore.tiers.nvme.records import encode_namespace
from kvstore.tiers.nvme.tables import IndexTables

NAMESPACES = {NAMESPACE: encode_namespace("tenant", SPEC.canonical())}


def damage(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "flip", "zero page", "rubbish page", "swap pages", "rubbish word"))
    first, second = (4096 * rng.randrange(len(data) // 4096) for _ in range(2))
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 8, 64))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "zero page":
        data[first : first + 4096] = bytes(4096)
    elif kind == "rubbish page":
        data[first : first + 4096] = rng.randbytes(4096)
    elif kind == "swap pages":
        data[first : first + 4096], data[second : second + 4096] = (
            data[second : second + 4096],
            data[first : first + 4096],
        )
    else:  # where the structure is: a page's head and node table
        place = first + 2 * rng.randrange(64)
        data[place : place + 2] = rng.randbytes(2)
    path.write_bytes(data)
    return kind


def main(folder: Path, copy: Path, count: int) -> None:
    refused = read = 0
    known = {key(number): record(number) for number in range(3000)}
    for seed in range(count):
        rng = random.Random(seed)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        kind = damage(copy / "data.mdb", rng)
        print(seed, kind, flush=True)  # the last line names what killed us
        tables = IndexTables(copy)
        try:
            require_sound(copy)
            tables.open()
            rows = tables.scan().rows[16]
            for row in rows:
                assert row["offset"] == known[row["key"].tobytes()].offset
            tables.commit([record(number) for number in rng.sample(range(3000), 400)], NAMESPACES, 1)
            tables.scan()
            read += 1
        except TierIOError:
            refused += 1
        finally:
            tables.close()
    print(refused, read)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
