"""What do 10, 100 and 1,000 nodes cost that share a directory: traffic, the server's time, memory, and a look-up?

Each of N nodes holds B blocks and stores c a second, so it removes as many. Of these every S-th is published. S is the least
power of two with which a node reads no more than BUDGET:

    updates of a node            2 c / S per second, 8 bytes each
    a turn                       max(0.2, 0.005 N) seconds
    a node reads                 N * (16 c / S + 40 / turn) bytes a second: updates, and heads of some 40 bytes
    the server sends             N times that
    the server is called         N / turn * (3 + N) times a second: STRLEN, APPEND, the beat, N GETRANGE in one round trip
    an update is known after     a turn on average, two at most: half of its node's, half of the reader's
    a node's memory              16 to 32 bytes * N B / S
    the servers of a cluster     share the GETRANGEs; the beats are all on one
    the servers' memory          8 to 24 bytes * N B / S
    a node that joins reads      8 to 24 bytes * N B / S

The static directory (64 nodes at most) asks each peer four times a second instead: the same bytes, without the server.

Measured here: the table of such a cluster, filled, and look-ups of a prefix in it; processor time of a real server (where
redis-server is installed) for the beat of one of N nodes whose heads have all changed, and for one GETRANGE. The rest follows.
"""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import redis

from benchmarks.harness import Cell, Report, Row, Samples, at_most, machine_card, millis, show, timed
from kvstore.transport.block_log import RECORD_NBYTES, BlockLog, Cursor, Head, stored
from kvstore.transport.directory import Node, fingerprints
from kvstore.transport.redis_beat import Beat
from kvstore.transport.redis_directory import INTERVAL_PER_NODE_S
from kvstore.transport.snapshot import Snapshot

QUESTION = "A directory of 10, 100 and 1,000 nodes"
NAMESPACE = bytes(16)
BUDGET_BYTES_PER_S = 500_000
GOAL_LOOKUP_MS, GOAL_SERVER_CORES = 0.5, 0.75
SERVERS = 3
_HEAD_NBYTES = 40
_INTERVAL_S = 0.2
_START_DEADLINE_S = 10.0
_GETRANGES = 20_000


class ServerCosts(NamedTuple):
    """Processor seconds of the server; 0 where there is none to ask."""

    beat_s: float
    getrange_s: float


def run(
    *,
    nodes: tuple[int, ...] = (10, 100, 1000),
    blocks: int = 100_000,
    per_s: int = 1000,
    keys: int = 512,
    rounds: int = 500,
) -> Report:
    rows = [_row(count, blocks, per_s, keys, rounds) for count in nodes]
    last = rows[-1]
    lookup_ms, cores = last["p50_ms"], last["busiest_of_3_cores"]
    assert not isinstance(lookup_ms, str)
    goals = [at_most(f"look-up of {keys} keys with {nodes[-1]} nodes, p50 in ms", lookup_ms, GOAL_LOOKUP_MS)]
    if not isinstance(cores, str):
        goals.append(
            at_most(f"cores of the busiest of {SERVERS} servers with {nodes[-1]} nodes", cores, GOAL_SERVER_CORES)
        )
    return Report(
        question=QUESTION,
        command="python -m benchmarks.directory_scale",
        rows=rows,
        goals=goals,
        remarks=[
            f"{blocks:,} blocks a node; each stores and removes {per_s:,} a second",
            f"a node reads at most {BUDGET_BYTES_PER_S / 1e6} MB/s, which decides sample_every; formulas are in the file",
        ],
    )


def sample_every(nodes: int, per_s: int) -> int:
    """The least power of two with which a node's share of all updates stays within the budget."""
    step = 1
    while nodes * 2 * per_s * RECORD_NBYTES / step > BUDGET_BYTES_PER_S:
        step *= 2
    return step


def _row(nodes: int, blocks: int, per_s: int, keys: int, rounds: int) -> Row:
    step = sample_every(nodes, per_s)
    turn_s = max(_INTERVAL_S, INTERVAL_PER_NODE_S * nodes)
    costs = _server_costs(nodes)
    snapshot = _filled(nodes, blocks // step)
    hits, misses = (_lookups(snapshot, keys, rounds, held=held) for held in (True, False))
    node_in = nodes * (2 * per_s * RECORD_NBYTES / step + _HEAD_NBYTES / turn_s)
    cores: Cell = "-"
    busiest: Cell = "-"
    if costs is not None:
        beats, reads = nodes / turn_s * costs.beat_s, nodes / turn_s * (nodes + 2) * costs.getrange_s
        cores, busiest = beats + reads, beats + reads / SERVERS
    return {
        "nodes": nodes,
        "sample_every": step,
        "turn_s": round(turn_s, 3),
        "known_after_s": round(turn_s, 3),
        "node_in_kb_per_s": node_in / 1e3,
        "node_out_kb_per_s": 2 * per_s * RECORD_NBYTES / step / 1e3,
        "server_out_mb_per_s": nodes * node_in / 1e6,
        "server_calls_per_s": nodes / turn_s * (3 + nodes),
        "server_cores": cores,
        "busiest_of_3_cores": busiest,
        "join_mb": nodes * blocks / step * RECORD_NBYTES / 1e6,
        "entries": snapshot.num_entries,
        "table_mb": snapshot.nbytes / 1e6,
        "bytes_per_entry": snapshot.nbytes / snapshot.num_entries,
        "p50_ms": millis(hits.median_s),
        "p99_ms": millis(hits.p99_s),
        "miss_p50_ms": millis(misses.median_s),
        "n": len(hits),
    }


def _filled(nodes: int, entries: int) -> Snapshot:
    """What one of the nodes knows of the others. Prefixes of 512 blocks are held by three nodes each, all else by one."""
    snapshot = Snapshot("me")
    rng = np.random.default_rng(1)
    for number in range(nodes):
        node = Node(f"node-{number}", 1, f"node-{number}:7000")
        snapshot.see(node)
        log = BlockLog(1)
        log.append(stored(rng.integers(0, 1 << 63, entries, dtype=np.uint64) << np.uint64(1)))
        if number < 3:
            log.append(stored(fingerprints(NAMESPACE, _prefix(512))))
        snapshot.apply(node.node_id, log.read(Cursor(), 1 << 40))
    return snapshot


def _prefix(keys: int, *, first: int = 0) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, first + keys)]


def _lookups(snapshot: Snapshot, keys: int, rounds: int, *, held: bool) -> Samples:
    hashes = _prefix(keys, first=0 if held else 1 << 40)
    found = snapshot.locate(NAMESPACE, hashes)
    assert bool(found) == held
    return Samples(tuple(timed(lambda: snapshot.locate(NAMESPACE, hashes)) for _ in range(rounds)))


# --- the server -------------------------------------------------------------------------------------------------------


def _server_costs(nodes: int) -> ServerCosts | None:
    """Processor seconds of one beat of N, when in each turn the heads of all nodes change, and of a GETRANGE in a pipeline."""
    if shutil.which("redis-server") is None:
        return None
    turns = max(1, 200 // nodes)
    with _running_server() as client:
        beats = [Beat("scale", Node(f"node-{number}", 1, f"node-{number}:7000")) for number in range(nodes)]
        for beat in beats:
            beat.say(client.eval, Head(1, 1, -1, 0, 0), 600.0)
        before_s = _cpu_s(client)
        for turn in range(1, turns + 1):
            for beat in beats:
                beat.say(client.eval, Head(1, 1, -1, 0, turn), 600.0)
        beat_s = (_cpu_s(client) - before_s) / (turns * nodes)
        client.append("log", bytes(1 << 20))
        before_s = _cpu_s(client)
        with client.pipeline(transaction=False) as pipeline:
            for number in range(_GETRANGES):
                pipeline.getrange("log", number, number + 511)
            pipeline.execute()
        return ServerCosts(beat_s, (_cpu_s(client) - before_s) / _GETRANGES)


def _cpu_s(client: redis.Redis) -> float:
    used = client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


@contextlib.contextmanager
def _running_server() -> Iterator[redis.Redis]:
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        socket = Path(folder) / "redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            client = redis.Redis(unix_socket_path=str(socket))
            _wait(socket.exists)
            yield client
            client.close()
        finally:
            process.kill()
            process.wait(10)


def _wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _START_DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "the server does not start"
        time.sleep(0.01)


@click.command()
@click.option("--nodes", default="10,100,1000", show_default=True, help="Sizes of clusters.")
@click.option("--blocks", default=100_000, show_default=True, help="Of each node.")
@click.option("--per-s", default=1000, show_default=True, help="Blocks that each node stores a second, and removes.")
@click.option("--keys", default=512, show_default=True)
@click.option("--rounds", default=500, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, nodes: str, blocks: int, per_s: int, keys: int, rounds: int, as_json: bool) -> None:
    card = machine_card()
    sizes = tuple(int(size) for size in nodes.split(","))
    show(run(nodes=sizes, blocks=blocks, per_s=per_s, keys=keys, rounds=rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
