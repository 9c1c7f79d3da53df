"""What each eviction policy hits, on two public traces and on shapes that are not theirs; and what a policy costs.

The traces are not in the repository: name their folder with --traces or TRACES_DIR. It has conversation_trace.jsonl.gz
(Mooncake, FAST 2025) and agentic_trace.jsonl.gz (kv-cache-tester, in blocks of 512 tokens), and, there or in the folder above,
trace_baselines.json with published hit rates by the same semantics. Without them only the other shapes are replayed.

`bound` is the most that foresight could hit; `gap closed` is how far a policy gets from LRU to there. No constant of the
default was chosen on these files: its learning rate and discount are LeCaR's. That it does not live off one of them is looked
at on each half of each trace by itself, and on loops, scans, popularity that shifts, sessions that grow, a mixture,
and one tenant that floods the tier with new prompts beside the sessions of others.
"""

import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.harness import Goal, Report, Row, at_least, at_most, machine_card, show
from kvstore.eviction import POLICIES, make_policy
from kvstore.eviction.mix import AdaptiveMix
from kvstore.replay.belady import most_hits
from kvstore.replay.cache import ReplayCache
from kvstore.replay.trace import read_trace

QUESTION = "What to keep: block hits by policy, %"
TRACES = ("conversation_trace", "agentic_trace")
CAPACITIES = (1000, 3000, 10_000, 30_000)
SEED = 9
LARGE_TIER = 1_000_000
MEASURED_BLOCKS = 100_000
CHAIN = 32
Requests = Sequence[Sequence[int]]


class Cell(NamedTuple):
    """A workload and a capacity."""

    workload: str
    capacity: int
    hits: dict[str, float]  # part of the blocks, by policy
    bound: float


def measure(workload: str, requests: Requests, capacity: int, policies: Sequence[str]) -> Cell:
    num_blocks = sum(map(len, requests))
    hits = {}
    for name in policies:
        cache = ReplayCache(capacity, make_policy(name))
        hits[name] = sum(cache.request(blocks) for blocks in requests) / num_blocks
        cache.check()  # no block without all before it
    return Cell(workload, capacity, hits, most_hits(requests, capacity) / num_blocks)


# --- shapes that the traces do not have ---------------------------------------------------------------------------------


def loop(draw: random.Random) -> Iterator[list[int]]:
    """40 documents of 32 blocks in turn, a little more than the tier holds."""
    del draw
    for turn in range(3000):
        first = turn % 40 * 100
        yield list(range(first, first + 32))


def scan(draw: random.Random) -> Iterator[list[int]]:
    """30 sessions that come back by chance, each behind prompts that nobody has twice."""
    for turn in range(3000):
        first = draw.randrange(30) * 100
        yield list(range(first, first + 16))
        once = 1_000_000 + turn * 100
        yield list(range(once, once + 20))


def shifting(draw: random.Random) -> Iterator[list[int]]:
    """Documents by Zipf's law; every 500 requests others are the popular ones."""
    weights = [1 / (rank + 1) for rank in range(200)]
    for turn in range(4000):
        document = draw.choices(range(200), weights)[0] + turn // 500 * 60
        yield list(range(document * 100, document * 100 + 8 + document % 20))


def sessions(draw: random.Random) -> Iterator[list[int]]:
    """60 conversations over one system prompt; each turn adds blocks, and one in twelve turns is the last."""
    alive: list[list[int]] = []
    new = itertools.count(1000)
    for _ in range(5000):
        if len(alive) < 60:
            alive.append(list(range(6)))
        session = draw.choice(alive)
        session += [next(new) for _ in range(draw.randint(1, 8))]
        yield list(session)
        if draw.random() < 1 / 12:
            alive.remove(session)


def mixture(draw: random.Random) -> Iterator[list[int]]:
    """Sessions, and scans by another tenant, in phases."""
    others = sessions(random.Random(SEED))
    for turn, blocks in enumerate(others):
        yield blocks
        if turn // 700 % 2:
            once = 10_000_000 + turn * 100
            yield list(range(once, once + draw.randint(5, 40)))


def flood(draw: random.Random) -> Iterator[list[int]]:
    """Sessions, and between any two of their turns three long prompts of another tenant, which nobody has twice. No quota."""
    first = 10_000_000
    for blocks in sessions(random.Random(SEED)):
        yield blocks
        for _ in range(3):
            num_blocks = draw.randint(20, 60)
            yield list(range(first, first + num_blocks))
            first += num_blocks


SHAPES: tuple[Callable[[random.Random], Iterator[list[int]]], ...] = (loop, scan, shifting, sessions, mixture, flood)


# --- cost of a policy ---------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of one block of a request, in a tier that is full."""

    stored_us: float  # new: looked up, stored, its place made by eviction
    used_us: float  # found
    policy_us: float  # of the first: what is the policy's own
    policy_nbytes: float  # a block of the tier, what is remembered of evicted ones among it


def measure_cost(capacity: int) -> Cost:
    cache = ReplayCache(capacity, make_policy("adaptive"))
    starts = iter(range(0, sys.maxsize, CHAIN))
    for start in itertools.islice(starts, capacity // CHAIN + 1000):
        cache.request(range(start, start + CHAIN))
    new = [range(start, start + CHAIN) for start in itertools.islice(starts, MEASURED_BLOCKS // CHAIN)]
    policy = cache.policy
    assert isinstance(policy, AdaptiveMix)
    spent = 0.0

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            nonlocal spent
            started = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent += time.perf_counter() - started

        return wrapper

    def median_us(requests: Requests, of_policy: bool = False, num_hits: int = 0) -> float:
        """Of a block, over the requests that find so many: what others do on the machine meanwhile is not in it."""
        nonlocal spent
        taken = []
        for blocks in requests:
            spent, started = 0.0, time.perf_counter()
            found = cache.request(blocks)
            seconds = time.perf_counter() - started
            if found == num_hits:
                taken.append(spent if of_policy else seconds)
        return statistics.median(taken) / CHAIN * 1e6

    def measuring_us() -> float:
        """What measuring a call adds to it."""
        nonlocal spent
        spent = 0.0
        call = timed(lambda row: row)
        for row in range(10_000):
            call(row)
        return spent / 10_000 * 1e6

    middle = len(new) // 2
    stored_us = median_us(new[:middle])
    for name in ("offer", "stored", "used", "next_victim"):
        setattr(policy, name, timed(getattr(policy, name)))
    policy_us = median_us(new[middle:], of_policy=True)
    for name in ("offer", "stored", "used", "next_victim"):
        delattr(policy, name)
    policy_us -= 2 * measuring_us()  # `offer` and `next_victim` are called for every block
    used_us = median_us(new[middle:], num_hits=CHAIN)
    nbytes = policy.ghosts.nbytes
    for order in policy.orders:
        nbytes += order.nbytes
    return Cost(stored_us, used_us, policy_us, nbytes / capacity)


# --- the report ---------------------------------------------------------------------------------------------------------


def run(traces: Path | None = None, policies: Sequence[str] = tuple(POLICIES)) -> Report:
    """Hit rates and goals. `traces` defaults to TRACES_DIR."""
    folder = traces or (Path(os.environ["TRACES_DIR"]) if "TRACES_DIR" in os.environ else None)
    goals: list[Goal] = []
    remarks: list[str] = []
    cells = [measure(shape.__name__, list(shape(random.Random(SEED))), 1000, policies) for shape in SHAPES]
    worst = min(100 * (cell.hits["adaptive"] - cell.hits["lru"]) for cell in cells)
    goals.append(at_least("the default against leaf-LRU in its worst shape, points", worst, -0.2))
    if folder is None or not all((folder / f"{name}.jsonl.gz").is_file() for name in TRACES):
        remarks.append(
            f"The traces are not here ({folder or 'TRACES_DIR is not set'}): only other shapes were replayed."
        )
    else:
        found = _trace_cells(folder, policies)
        goals += _trace_goals(folder, found)
        cells += [cell for group in found.values() for cell in group]
    goals.append(at_most("points that any policy is above the bound", 100 * max(_above(cell) for cell in cells), 0.0))
    cost = measure_cost(LARGE_TIER)
    goals.append(at_most(f"us of the policy for a new block, {LARGE_TIER:,} in the tier", cost.policy_us, 5.0))
    remarks.append(
        f"{LARGE_TIER:,} blocks: {cost.stored_us:.1f} us for a new block and {cost.used_us:.1f} us for a block found, index and "
        f"slots included; {cost.policy_nbytes:.0f} bytes of policy a block, ghosts included."
    )
    return Report(
        question=QUESTION,
        command="python -m benchmarks.eviction --traces DIR",
        rows=[_row(cell) for cell in cells],
        goals=goals,
        remarks=remarks,
    )


def _trace_cells(folder: Path, policies: Sequence[str]) -> dict[str, list[Cell]]:
    """Whole traces with every policy; their halves with LRU and the default."""
    cells: dict[str, list[Cell]] = {}
    for name in TRACES:
        requests = [request.blocks for request in read_trace(folder / f"{name}.jsonl.gz").requests]
        cells[name] = [measure(name, requests, capacity, policies) for capacity in CAPACITIES]
        middle = len(requests) // 2
        for half, part in (("first half", requests[:middle]), ("second half", requests[middle:])):
            label = f"{name}, {half}"
            cells[label] = [measure(label, part, capacity, ("lru", "adaptive")) for capacity in CAPACITIES]
    return cells


def _trace_goals(folder: Path, cells: dict[str, list[Cell]]) -> list[Goal]:
    whole = [cell for name in TRACES for cell in cells[name]]
    halves = [cell for name, group in cells.items() if name not in TRACES for cell in group]
    goals = [
        at_least("the default against leaf-LRU in its worst cell, points", _worst(whole), -0.2),
        at_least("likewise on halves of the traces", _worst(halves), -0.2),
        at_least("gap between LRU and the bound closed, pooled, %", 100 * _closed(whole), 10.0),
        at_least("likewise on halves of the traces, %", 100 * _closed(halves), 10.0),
    ]
    for parent in (folder, folder.parent):
        path = parent / "trace_baselines.json"
        if path.is_file():
            published = json.loads(path.read_text())["traces"]
            off = max(
                abs(100 * (cell.hits["lru"] - published[cell.workload]["leaf_lru"][str(cell.capacity)]))
                for cell in whole
            )
            goals.append(at_most("LRU against the published hit rates in its worst cell, points", off, 0.1))
            break
    return goals


def _worst(cells: Sequence[Cell]) -> float:
    return min(100 * (cell.hits["adaptive"] - cell.hits["lru"]) for cell in cells)


def _closed(cells: Sequence[Cell]) -> float:
    return sum(cell.hits["adaptive"] - cell.hits["lru"] for cell in cells) / sum(
        cell.bound - cell.hits["lru"] for cell in cells
    )


def _above(cell: Cell) -> float:
    return max(max(cell.hits.values()) - cell.bound, 0.0)


def _row(cell: Cell) -> Row:
    hits = {name: round(100 * cell.hits[name], 2) if name in cell.hits else "-" for name in POLICIES}
    return {"workload": cell.workload, "blocks": cell.capacity, **hits, "bound": round(100 * cell.bound, 2)}


@click.command()
@click.option("--traces", type=click.Path(file_okay=False, path_type=Path), help="Folder of the traces.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(*, traces: Path | None, as_json: bool) -> None:
    card = machine_card()
    show(run(traces), card, as_json=as_json)


if __name__ == "__main__":
    main()
