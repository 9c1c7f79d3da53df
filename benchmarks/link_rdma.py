"""How fast do blocks come from another process's arena by one-sided reads, against the library's own read and nothing else?

Link: batches of blocks through RdmaEndpoint.connect().read, with checksums that are verified on arrival and without. Raw: one
transfer of prepared descriptors for the whole batch between the same two arenas, posted and polled in a loop: no
generations, no checksums, no queue, no other thread. All cases read in turns, each at another place of
arenas larger than the cache. Without a network device the library copies by process_vm_readv.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import process_time

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Report, Row, Samples, at_least, interleave, machine_card, millis, paired_ratio, show
from benchmarks.rdma_owner import PAGE, Owner, running_owner
from kvstore.transport.link import Link, ReadDone, ReadExtent
from kvstore.transport.nixl import Agent
from kvstore.transport.rdma import RdmaEndpoint
from kvstore.transport.rdma_remote import ArenaPlace, PreparedGrids

QUESTION = "Blocks from a peer by one-sided reads"
GOAL = 0.9
BLOCK_BYTES = 2 << 20
DEADLINE_S = 60.0
LEASE = bytes(16)

Read = Callable[[Sequence[int]], None]
"""Brings those blocks of the owner's arena to the same places of ours."""

_RAW, _LINK, _CHECKED = "raw one-sided read", "link, not verified", "link, verified"


def run(*, pool_mib: int = 512, batch: int = 32, rounds: int = 41, singles: int = 400) -> Report:
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(running_owner(pool_mib, BLOCK_BYTES))
        memory = np.ones(pool_mib << 20, np.uint8)
        link = stack.enter_context(_link(owner, memory))
        reads: dict[str, Read] = {
            _RAW: stack.enter_context(_raw(owner, memory)),
            _LINK: partial(_read_link, link, None),
            _CHECKED: partial(_read_link, link, owner.checksums),
        }
        _check(reads, memory, owner)
        cpu: dict[str, list[float]] = {name: [] for name in reads}
        batches = interleave(_turns(reads, batch, owner, cpu), rounds=rounds)
        alone = interleave(_turns(reads, 1, owner, {name: [] for name in reads}), rounds=singles)
    rows = [_row(name, batches, alone, cpu[name], batch * BLOCK_BYTES) for name in reads]
    return Report(
        question=QUESTION,
        command="python -m benchmarks.link_rdma",
        rows=rows,
        goals=[
            at_least("bandwidth of the link to that of the raw read", paired_ratio(batches[_RAW], batches[_LINK]), GOAL)
        ],
        remarks=[f"{batch} blocks of 2 MiB a batch, {rounds} rounds; single blocks: {singles} rounds; two processes"],
    )


def _row(name: str, batches: dict[str, Samples], alone: dict[str, Samples], cpu: Sequence[float], nbytes: int) -> Row:
    return {
        "case": name,
        "gb_per_s": nbytes / 1e9 / batches[name].median_s,
        "of_raw": paired_ratio(batches[_RAW], batches[name]),
        "cpu_s_per_gb": sorted(cpu)[len(cpu) // 2] / nbytes * 1e9,
        "block_p50_ms": millis(alone[name].median_s),
        "block_p99_ms": millis(alone[name].p99_s),
    }


def _turns(reads: dict[str, Read], batch: int, owner: Owner, cpu: dict[str, list[float]]) -> dict[str, "_Turns"]:
    """Each case at another place of the arena: none finds in the cache what the one before it read."""
    apart = len(owner.checksums) // len(reads)
    return {
        name: _Turns(read, batch, owner, cpu[name], first=number * apart)
        for number, (name, read) in enumerate(reads.items())
    }


class _Turns:
    """Reads the next blocks at each call, round the arena; notes the processor time of both processes."""

    def __init__(self, read: Read, batch: int, owner: Owner, cpu: list[float], *, first: int) -> None:
        self._read = read
        self._batch = batch
        self._owner = owner
        self._cpu = cpu
        self._next = first

    def __call__(self) -> None:
        numbers = [(self._next + number) % len(self._owner.checksums) for number in range(self._batch)]
        self._next += self._batch
        before_s = process_time() + self._owner.cpu_s()
        self._read(numbers)
        self._cpu.append(process_time() + self._owner.cpu_s() - before_s)


def _check(reads: dict[str, Read], memory: NDArray[np.uint8], owner: Owner) -> None:
    """Every case brings the bytes that it says it brings, and is connected."""
    from xxhash import xxh3_64_intdigest

    for name, read in reads.items():
        memory[:] = 0
        read(range(len(owner.checksums)))
        found = [xxh3_64_intdigest(block) for block in memory.reshape(-1, BLOCK_BYTES)]
        assert found == owner.checksums, name


@contextlib.contextmanager
def _link(owner: Owner, memory: NDArray[np.uint8]) -> Iterator[Link]:
    endpoint = RdmaEndpoint(memory=memory, generations=np.zeros(memory.nbytes // PAGE, np.uint64)).open()
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
def _raw(owner: Owner, memory: NDArray[np.uint8]) -> Iterator[Read]:
    agent = Agent("kvstore-benchmark")
    agent.register([memory])
    place = ArenaPlace.decode(owner.descriptor)
    name = agent.load(place.metadata)
    ours = PreparedGrids(agent, "", memory.ctypes.data, memory.nbytes)
    theirs = PreparedGrids(agent, name, place.memory_at, place.memory_nbytes)
    lists = ours.get(BLOCK_BYTES), theirs.get(BLOCK_BYTES)
    assert lists[0] is not None
    assert lists[1] is not None
    local, remote = lists[0], lists[1]

    def read(numbers: Sequence[int]) -> None:
        offsets = np.array(numbers, np.int64) * BLOCK_BYTES
        local_at, remote_at = local[0].indexes(offsets), remote[0].indexes(offsets)
        assert local_at is not None
        assert remote_at is not None
        transfer = agent.read_prepared(local[1], local_at, remote[1], remote_at)
        while not agent.is_done(transfer):
            pass
        agent.release(transfer)

    try:
        yield read
    finally:
        ours.release()
        theirs.release()
        agent.forget(name)
        agent.close()


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
