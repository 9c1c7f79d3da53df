"""How fast do blocks go to a drive and come back, against plain preadv and pwritev of the same sizes?

Ours: moves submitted to a Drive at once, as many I/Os in flight as the depth says, from and into an arena, checksums made
and checked. Raw: so many threads, one preadv or pwritev a block, nothing else. Both go through the same file
(O_DIRECT, every page of it written before), the same blocks in the same shuffled order, and take turns. No two blocks that
follow each other are neighbours, so ours cannot win by joining; the rows "in sequence" show what joining is for: there ours
takes blocks as a sequence wrote them, and raw still takes them one by one.
"""

import contextlib
import itertools
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from benchmarks.harness import (
    Goal,
    Report,
    Row,
    Samples,
    at_least,
    interleave,
    machine_card,
    millis,
    paired_ratio,
    show,
)
from kvstore.core.moves import BlockRecord, Move, MoveDone, Urgency
from kvstore.tiers.nvme.drive import Drive
from kvstore.tiers.nvme.file import DirectFile, page_aligned

QUESTION = "Blocks to a drive and back"
GOAL = 0.9
SEED = 1
SIZES_KIB = (1024, 2048, 4096)
DEPTHS = (1, 4, 16)
SMALL_SIZES_KIB = (64, 368)
"""Blocks of SmolLM2 (23 KiB a token, 16 tokens) and smaller: these are joined."""
SMALL_DEPTH = 4
DEADLINE_S = 120.0


def run(
    *,
    folder: Path | None = None,
    pool_mib: int = 1024,
    run_mib: int = 128,
    rounds: int = 15,
) -> Report:
    with _pool(folder, pool_mib << 20) as pool:
        rows: dict[_Case, Row] = {}
        for case in _cases():
            with _pair(pool, case, run_mib << 20) as pair:
                rows[case] = _row(pair, *_measure(pair, rounds))
        hashed = _hash_rate(pool.arena)
        how = "O_DIRECT" if pool.file.direct else "BUFFERED: this file system has no direct I/O"
    return Report(
        question=QUESTION,
        command="python -m benchmarks.nvme",
        rows=list(rows.values()),
        goals=_goals(rows),
        remarks=[
            f"{run_mib} MiB a run, in turns over {pool_mib // 2} MiB to read and as much to write, {how}",
            _checksum_remark(rows, hashed),
        ],
    )


class _Case(NamedTuple):
    verb: str
    nbytes: int
    depth: int
    shuffled: bool

    @property
    def name(self) -> str:
        return f"{self.verb} {self.nbytes >> 10} KiB at {self.depth}{'' if self.shuffled else ', in sequence'}"


def _cases() -> list[_Case]:
    verbs = "read", "write"
    shuffled = itertools.product(verbs, SIZES_KIB, DEPTHS)
    in_sequence = itertools.product(verbs, SMALL_SIZES_KIB)
    return [
        *[_Case(verb, size_kib << 10, depth, shuffled=True) for verb, size_kib, depth in shuffled],
        *[_Case(verb, size_kib << 10, SMALL_DEPTH, shuffled=False) for verb, size_kib in in_sequence],
    ]


class _Pool(NamedTuple):
    """A file whose first half is read, the second written; the arena lies against it byte for byte, half by half."""

    file: DirectFile
    half: int
    arena: NDArray[np.uint8]
    content: NDArray[np.uint8]  # of the half that is read


class _Pair(NamedTuple):
    """Ours and raw for one case; each call does the next run, and answers the CPU seconds that it took."""

    case: _Case
    nbytes: int
    ours: Callable[[], float]
    raw: Callable[[], float]


@contextlib.contextmanager
def _pool(folder: Path | None, nbytes: int) -> Iterator[_Pool]:
    half = nbytes // 2
    assert half % (4 << 20) == 0, "the pool is filled in pieces of 4 MiB, and its halves alike"
    content = page_aligned(half)
    content[:] = np.random.default_rng(SEED).integers(0, 256, half, np.uint8)
    with (
        tempfile.TemporaryDirectory(prefix=".bench-nvme-", dir=folder or Path.cwd()) as name,
        contextlib.closing(DirectFile.open(Path(name) / "blocks.kv")) as file,
    ):
        file.resize(nbytes)
        for offset in range(0, nbytes, 4 << 20):
            start = offset % half
            assert file.write_from(offset, [content.data[start : start + (4 << 20)]]) == 4 << 20
        file.sync()
        arena = page_aligned(half)
        arena[:] = 1
        yield _Pool(file, half, arena, content)


@contextlib.contextmanager
def _pair(pool: _Pool, case: _Case, run_nbytes: int) -> Iterator[_Pair]:
    num_blocks = pool.half // case.nbytes
    starts = [number * case.nbytes for number in range(num_blocks)]
    if case.shuffled:
        starts = _without_neighbours(starts, case.nbytes)
    batch = max(1, run_nbytes // case.nbytes)
    runs = [starts[first : first + batch] for first in range(0, num_blocks - batch + 1, batch)]
    assert runs, "the pool is smaller than a run"
    with _ours(pool, case, runs) as ours, _raw(pool, case, runs) as raw:
        yield _Pair(case, batch * case.nbytes, ours, raw)


def _without_neighbours(starts: list[int], nbytes: int) -> list[int]:
    """Even blocks shuffled, then odd ones: in no run are there two that could be joined, save at the seam."""
    rng = random.Random(SEED)
    halves = [[start for start in starts if start // nbytes % 2 == odd] for odd in (0, 1)]
    for half in halves:
        rng.shuffle(half)
    return halves[0] + halves[1]


@contextlib.contextmanager
def _ours(pool: _Pool, case: _Case, runs: list[list[int]]) -> Iterator[Callable[[], float]]:
    """A Drive with `depth` I/Os in flight; for writes twice as many, of which half may be writes."""
    finished = _Countdown()
    writes = case.verb == "write"
    drive = Drive(
        pool.file,
        name=case.name,
        arena=pool.arena,
        on_done=finished.report,
        on_written=lambda _: None,
        first_slot=pool.half if writes else 0,
        threads=case.depth * (2 if writes else 1),
    )
    batches = itertools.cycle([[_move(pool, case, start) for start in starts] for starts in runs])

    def one_run() -> float:
        moves = next(batches)
        started = time.process_time()
        finished.expect(len(moves))
        drive.submit(moves)
        finished.wait()
        return time.process_time() - started

    drive.start()
    yield one_run
    assert drive.close(DEADLINE_S)


def _move(pool: _Pool, case: _Case, start: int) -> Move:
    checksum = xxh3_64_intdigest(pool.content.data[start : start + case.nbytes]) if case.verb == "read" else 0
    record = BlockRecord(b"benchmark" + bytes(7), bytes(16), b"", start, case.nbytes, 1, checksum, 0, 0)
    return Move(start, Urgency.READ if case.verb == "read" else Urgency.WRITE, start, record)


class _Countdown:
    """Waits until so many moves have ended, all of them well."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._missing = 0

    def expect(self, count: int) -> None:
        self._missing = count

    def report(self, ends: list[MoveDone]) -> None:
        with self._changed:
            assert all(end.problem is None for end in ends), ends
            self._missing -= len(ends)
            if not self._missing:
                self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: not self._missing, DEADLINE_S), f"{self._missing} moves do not end"


@contextlib.contextmanager
def _raw(pool: _Pool, case: _Case, runs: list[list[int]]) -> Iterator[Callable[[], float]]:
    """`depth` threads that take the next block from one iterator."""
    batches = itertools.cycle(runs)
    verb = pool.file.read_into if case.verb == "read" else pool.file.write_from
    first_slot = 0 if case.verb == "read" else pool.half
    arena = pool.arena.data

    def work(starts: Iterator[int]) -> None:
        for start in starts:
            assert verb(first_slot + start, [arena[start : start + case.nbytes]]) == case.nbytes

    def one_run() -> float:
        starts = iter(next(batches))  # next() of a list's iterator is atomic under the GIL
        started = time.process_time()
        for future in [threads.submit(work, starts) for _ in range(case.depth)]:
            future.result(DEADLINE_S)
        return time.process_time() - started

    with ThreadPoolExecutor(case.depth) as threads:
        yield one_run


def _measure(pair: _Pair, rounds: int) -> tuple[Samples, Samples, float]:
    """Wall samples of both, and ours' CPU seconds of all rounds."""
    cpu_s = [0.0]

    def ours() -> None:
        cpu_s.append(pair.ours())

    samples = interleave({"raw": pair.raw, "ours": ours}, rounds=rounds)
    return samples["ours"], samples["raw"], sum(cpu_s) / (rounds + 1)


def _row(pair: _Pair, ours: Samples, raw: Samples, cpu_s: float) -> Row:
    return {
        "case": pair.case.name,
        "p50_ms": millis(ours.median_s),
        "p99_ms": millis(ours.p99_s),
        "gb_per_s": round(pair.nbytes / ours.median_s / 1e9, 2),
        "raw_gb_per_s": round(pair.nbytes / raw.median_s / 1e9, 2),
        "of_raw": round(raw.median_s / ours.median_s, 3),
        "of_raw_paired": round(1 / paired_ratio(ours, raw), 3),
        "cpu_s_per_gb": round(cpu_s / pair.nbytes * 1e9, 3),
        "n": len(ours),
    }


def _goals(rows: Mapping[_Case, Row]) -> list[Goal]:
    """By verb and depth: the median over the sizes, those in sequence aside."""
    found: dict[tuple[str, int], list[float]] = {}
    for case, row in rows.items():
        if case.shuffled:
            found.setdefault((case.verb, case.depth), []).append(float(row["of_raw_paired"]))
    return [
        at_least(f"{verb} at {depth}, part of raw's rate", round(statistics.median(parts), 3), GOAL)
        for (verb, depth), parts in found.items()
    ]


def _hash_rate(arena: NDArray[np.uint8]) -> dict[int, float]:
    """xxh3_64 in bytes/s by block size, over memory that no cache holds."""
    rates = {}
    for nbytes in (64 << 10, 368 << 10, 2 << 20):
        views = [arena.data[start : start + nbytes] for start in range(0, len(arena) - nbytes + 1, nbytes)]
        started = time.perf_counter()
        for view in views:
            xxh3_64_intdigest(view)
        rates[nbytes] = len(views) * nbytes / (time.perf_counter() - started)
    return rates


def _checksum_remark(rows: Mapping[_Case, Row], rates: Mapping[int, float]) -> str:
    """A core's share: seconds of hashing for each second of I/O at the fastest rate."""
    named = ", ".join(f"{rate / 1e9:.1f} GB/s for {nbytes >> 10} KiB" for nbytes, rate in rates.items())
    shares = []
    for verb in ("read", "write"):
        fastest = max(float(row["gb_per_s"]) for case, row in rows.items() if case.verb == verb)
        shares.append(f"{fastest * 1e9 / min(rates.values()):.0%} of a core at the fastest {verb}")
    return f"xxh3_64 of blocks in memory: {named}; that is {' and '.join(shares)}"


@click.command()
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Where to put the file; default: here.",
)
@click.option("--pool-mib", default=1024, show_default=True, help="Size of the file.")
@click.option("--run-mib", default=128, show_default=True, help="Bytes in one run.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, folder: Path | None, pool_mib: int, run_mib: int, rounds: int, as_json: bool) -> None:
    card = machine_card()
    show(run(folder=folder, pool_mib=pool_mib, run_mib=run_mib, rounds=rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
