"""How fast do blocks come from another process's arena over TCP, against plain sockets that move the same bytes?

Link: batches of blocks through TcpEndpoint.connect().read, with checksums that are verified on arrival (pages go to the
network by sendfile) and without (they are copied). Raw: sendmsg from the same arena, recv_into the same arena, nothing
else: no leases, no generations, no checksums; on one connection, and on several with a thread each on both sides. All
cases read the same blocks to the same places, in turns. The goals are judged against whichever raw case was fastest.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import process_time

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row, Samples, at_least, interleave, machine_card, millis, paired_ratio, show
from benchmarks.link_owner import SECRET, Owner, running_owner, tuned
from benchmarks.open_gate import OpenGate
from kvstore.core.limits import LINK_STREAMS
from kvstore.tiers.arena import Arena
from kvstore.transport.link import Link, ReadDone, ReadExtent
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

QUESTION = "Blocks from a peer over TCP"
GOAL = 0.8
RAW_CONNECTIONS = (1, 2, 4)
BLOCK_BYTES = 2 << 20
DEADLINE_S = 60.0
LEASE = bytes(16)

Read = Callable[[Sequence[int]], None]
"""Brings those blocks of the owner's arena to the same places of ours."""


def run(*, pool_mib: int = 512, batch: int = 32, rounds: int = 41, singles: int = 400) -> Report:
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(running_owner(pool_mib, BLOCK_BYTES))
        arena = stack.enter_context(_arena(pool_mib))
        reads = _reads(stack, owner, arena)
        _check(reads, arena, owner)
        cpu: dict[str, list[float]] = {name: [] for name in reads}
        batches = interleave(
            {name: _Turns(read, batch, len(owner.checksums), owner, cpu[name]) for name, read in reads.items()},
            rounds=rounds,
        )
        alone = interleave(
            {name: _Turns(read, 1, len(owner.checksums), owner, []) for name, read in reads.items()}, rounds=singles
        )
    best = min((name for name in reads if name.startswith("raw")), key=lambda name: batches[name].median_s)
    nbytes = batch * BLOCK_BYTES
    rows = [_row(name, batches, alone, cpu[name], best, nbytes) for name in reads]
    goals = [
        at_least(f"bandwidth of {name}, to that of {best}", paired_ratio(batches[best], batches[name]), GOAL)
        for name in (_COPIED, _CHECKED)
    ]
    return Report(
        question=QUESTION,
        command="python -m benchmarks.link_tcp",
        rows=rows,
        goals=goals,
        remarks=[
            f"{batch} blocks of 2 MiB a batch; p50 and p99 are those of a single block, read alone ({singles} times)",
            "verified: the reader computes each block's checksum, which the raw cases do not; here that is some 0.1 s a GB",
            "processor time is that of both processes; the link's includes a thread that waits for the whole batch",
        ],
    )


_CHECKED, _COPIED = "link, verified", "link, copied, not verified"


def _row(
    name: str, batches: dict[str, Samples], alone: dict[str, Samples], cpu: Sequence[float], best: str, nbytes: int
) -> Row:
    return {
        "case": name,
        "gb_per_s": nbytes / 1e9 / batches[name].median_s,
        "of_best_raw": paired_ratio(batches[best], batches[name]),
        "cpu_s_per_gb": sorted(cpu)[len(cpu) // 2] / nbytes * 1e9,
        "p50_ms": millis(alone[name].median_s),
        "p99_ms": millis(alone[name].p99_s),
        "n": len(batches[name]),
    }


class _Turns:
    """Reads the next blocks at each call, round the arena; notes the processor time of both processes."""

    def __init__(self, read: Read, batch: int, num_blocks: int, owner: Owner, cpu: list[float]) -> None:
        self._read = read
        self._batch = batch
        self._num_blocks = num_blocks
        self._owner = owner
        self._cpu = cpu
        self._next = 0

    def __call__(self) -> None:
        numbers = [(self._next + number) % self._num_blocks for number in range(self._batch)]
        self._next += self._batch
        before_s = process_time() + self._owner.cpu_s()
        self._read(numbers)
        self._cpu.append(process_time() + self._owner.cpu_s() - before_s)


def _reads(stack: contextlib.ExitStack, owner: Owner, arena: Arena) -> dict[str, Read]:
    reads: dict[str, Read] = {}
    for count in RAW_CONNECTIONS:
        name = f"raw, {count} connection{'s' if count > 1 else ''}"
        reads[name] = stack.enter_context(_raw(owner.raw_port, count, arena.memory))
    link = stack.enter_context(_link(owner, arena, LINK_STREAMS))
    reads[_CHECKED] = partial(_read_link, link, owner.checksums)
    reads[_COPIED] = partial(_read_link, link, None)
    one = stack.enter_context(_link(owner, arena, 1))
    reads["link, verified, 1 connection"] = partial(_read_link, one, owner.checksums)
    return reads


def _check(reads: dict[str, Read], arena: Arena, owner: Owner) -> None:
    """Every case brings the bytes that it says it brings, and is connected."""
    last = (len(owner.checksums) - 1) * BLOCK_BYTES
    expected: NDArray[np.uint8] | None = None
    for name, read in reads.items():
        arena.memory[last:] = 0
        read([len(owner.checksums) - 1])
        found = arena.memory[last:].copy()
        expected = found if expected is None else expected
        assert found.any(), name
        assert np.array_equal(found, expected), name


@contextlib.contextmanager
def _arena(pool_mib: int) -> Iterator[Arena]:
    with Arena(pool_mib << 20, segment_bytes=1 << 20) as arena:
        for segment in range(arena.num_segments):
            arena.fault_segment(segment)
        arena.memory[:] = 1  # mapped, not only there
        yield arena


@contextlib.contextmanager
def _link(owner: Owner, arena: Arena, streams: int) -> Iterator[Link]:
    endpoint = TcpEndpoint(
        memory=arena.memory,
        generations=arena.generations,
        gatekeeper=OpenGate(),
        security=TcpSecurity(secret=SECRET),
        max_streams=streams,
    ).open()
    try:
        yield endpoint.connect("owner", owner.descriptor)
    finally:
        assert endpoint.close(DEADLINE_S)


def _read_link(link: Link, checksums: Sequence[int] | None, numbers: Sequence[int]) -> None:
    left = len(numbers)
    lock, ended = threading.Lock(), threading.Event()

    def on_done(done: list[ReadDone]) -> None:
        nonlocal left
        assert all(each.problem is None for each in done), done
        with lock:
            left -= len(done)
            if not left:
                ended.set()

    batch = []
    for number in numbers:
        place = number * BLOCK_BYTES
        batch.append(ReadExtent(number, place, place, BLOCK_BYTES, 0, checksums[number] if checksums else None))
    link.read(batch, lease=LEASE, deadline_s=DEADLINE_S, on_done=on_done)
    assert ended.wait(DEADLINE_S)


@contextlib.contextmanager
def _raw(port: int, count: int, memory: NDArray[np.uint8]) -> Iterator[Read]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(tuned(socket.create_connection(("127.0.0.1", port)))) for _ in range(count)]
        if count == 1:
            yield partial(_read_raw, socks[0], memory.data)
            return
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def read(numbers: Sequence[int]) -> None:
            shares = [(sock, numbers[place::count]) for place, sock in enumerate(socks)]
            ended = [pool.submit(_read_raw, sock, memory.data, share) for sock, share in shares if share]
            for each in ended:
                each.result(DEADLINE_S)

        yield read


def _read_raw(sock: socket.socket, arena: memoryview, numbers: Sequence[int]) -> None:
    sock.sendall(struct.pack(f"<I{len(numbers)}I", len(numbers), *numbers))
    for number in numbers:
        into = arena[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        assert sock.recv_into(into, BLOCK_BYTES, socket.MSG_WAITALL) == BLOCK_BYTES


@click.command()
@click.option("--pool-mib", default=512, show_default=True, help="Of each arena; larger than the cache.")
@click.option("--batch", default=32, show_default=True)
@click.option("--rounds", default=41, show_default=True)
@click.option("--singles", default=400, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, pool_mib: int, batch: int, rounds: int, singles: int, as_json: bool) -> None:
    card = machine_card()
    show(run(pool_mib=pool_mib, batch=batch, rounds=rounds, singles=singles), card, as_json=as_json)


if __name__ == "__main__":
    main()
