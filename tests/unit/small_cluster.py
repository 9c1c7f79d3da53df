"""Owners and a reader in one process: a PeerMover over loopback links, whose control calls are answered here."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import peer_mover
from kvstore.core.blocks import Extent
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import KVStoreError, PeerUnavailable
from kvstore.core.loans import Fetch, FetchDone, LoanProblem
from kvstore.peer_identity import Identity
from kvstore.peer_mover import PeerMover
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.directory import LinkDescriptor, Node
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.loopback import LoopbackEndpoint, LoopbackNetwork

BLOCK = 4096
NUM_BLOCKS = 64
NAMESPACE = b"n" * 16
WAIT_S = 10.0  # for what must come
Answer = Callable[[pb.LendRequest, pb.LendReply], pb.LendReply]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


class SecondEndpoint(LoopbackEndpoint):
    kind = "second"


class SmallOwner:
    """A node that holds blocks 0 to NUM_BLOCKS of every sequence. `answer`, on the asker's thread, may spoil what it says."""

    def __init__(self, name: str, networks: Sequence[LoopbackNetwork], seed: int) -> None:
        self.name, self.epoch = name, 1
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(0, 256, NUM_BLOCKS * BLOCK, np.uint8)
        self.generations = rng.integers(1, 1 << 62, NUM_BLOCKS, np.uint64)
        self.gate = LeaseGate(MonotonicClock())
        self.networks = networks
        self.answer: Answer = lambda _request, reply: reply
        self.num_lent = self.num_asked = 0
        self.open_loans: dict[int, bytes] = {}
        self.restart()

    def restart(self) -> None:
        self.epoch += 1
        self.endpoints = [
            kind(network, memory=self.memory, generations=self.generations, gatekeeper=self.gate).open()
            for kind, network in zip((LoopbackEndpoint, SecondEndpoint), self.networks, strict=True)
        ]

    def node(self) -> Node:
        links = tuple(LinkDescriptor(endpoint.kind, endpoint.describe()) for endpoint in self.endpoints)
        return Node(self.name, self.epoch, f"{self.name}:1", links)

    def block(self, number: int) -> np.ndarray:
        return self.memory[number * BLOCK : (number + 1) * BLOCK]

    def lend(self, request: pb.LendRequest) -> pb.LendReply:
        self.num_asked += 1
        numbers = range(request.first_needed, len(request.keys) // 16)
        extents = [Extent(i * BLOCK, BLOCK, int(self.generations[i])) for i in numbers]
        self.num_lent += 1
        loan = self.num_lent.to_bytes(16, "little")
        self.gate.grant(loan, extents)
        self.open_loans[self.num_lent] = loan
        checksums = [xxh3_64_intdigest(self.block(i)) for i in numbers]
        reply = pb.LendReply(
            lease_id=self.num_lent,
            loan=loan,
            num_blocks=len(request.keys) // 16,
            offsets=np.array([each.offset for each in extents], "<u8").tobytes(),
            generations=np.array([each.generation for each in extents], "<u8").tobytes(),
            checksums=np.array(checksums, "<u8").tobytes(),
        )
        return self.answer(request, reply)

    def release(self, lease_id: int) -> None:
        self.gate.release(self.open_loans.pop(lease_id))


class SmallCluster:
    """`owners` and a reader with `num_slots` blocks of room. Every end of a block is looked at as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, seed: int = 0, num_slots: int = 256) -> None:
        self.networks = [LoopbackNetwork(seed=seed), LoopbackNetwork(seed=seed + 1)]
        self.owners = {name: SmallOwner(name, self.networks, seed + i) for i, name in enumerate(names)}
        self.absent: set[str] = set()  # of the directory
        self.memory = np.zeros(num_slots * BLOCK, np.uint8)
        gate = LeaseGate(MonotonicClock())
        generations = np.zeros(num_slots, np.uint64)
        self.endpoints = [
            kind(network, memory=self.memory, generations=generations, gatekeeper=gate).open()
            for kind, network in zip((LoopbackEndpoint, SecondEndpoint), self.networks, strict=True)
        ]
        self.controls: list[FakeControl] = []
        monkeypatch.setattr(peer_mover, "PeerControl", self._control)
        self.fetches: dict[int, Fetch] = {}
        self.ends: dict[tuple[int, int], list[FetchDone]] = {}
        self.wrong: list[FetchDone] = []
        self._changed = threading.Condition()
        self._next_slot = 0
        self.mover = PeerMover(self, self.endpoints, Identity("reader", b"r" * 16, b"", None), self._report)  # type: ignore[arg-type]

    def nodes(self) -> tuple[Node, ...]:
        """Of a Directory, all that a mover asks for."""
        return tuple(owner.node() for owner in self.owners.values() if owner.name not in self.absent)

    def _control(self, address: str, _identity: Identity) -> "FakeControl":
        self.controls.append(FakeControl(address, self.owners[address.removesuffix(":1")]))
        return self.controls[-1]

    def fetch(self, name: str, count: int = 4, *, first: int = 0, deadline_s: float = WAIT_S) -> Fetch:
        offsets = tuple((self._next_slot + i) * BLOCK for i in range(count))
        self._next_slot += count
        keys = tuple(map(key, range(first + count)))
        fetch = Fetch(len(self.fetches) + 1, name, NAMESPACE, keys, first, offsets, BLOCK, deadline_s)
        self.fetches[fetch.fetch_id] = fetch
        self.mover.submit([fetch])
        return fetch

    def _report(self, done: Sequence[FetchDone]) -> None:
        with self._changed:
            for each in done:
                before = self.ends.setdefault((each.fetch_id, each.block), [])
                told_twice = before and (before[-1].settled or not each.settled or each.problem is None)
                fetch = self.fetches[each.fetch_id]
                at = fetch.arena_offsets[each.block]
                right = self.owners[fetch.node_id].block(fetch.first + each.block)
                if told_twice or (each.problem is None and (self.memory[at : at + BLOCK] != right).any()):
                    self.wrong.append(each)
                before.append(each)
            self._changed.notify_all()

    def wait(self, *fetches: Fetch, settled: bool = False) -> Counter[LoanProblem | None]:
        """How the blocks of these (none: all) have ended, once they have."""
        wanted = [
            (fetch.fetch_id, i) for fetch in fetches or self.fetches.values() for i in range(len(fetch.arena_offsets))
        ]

        def done() -> bool:
            ends = [self.ends.get(each) for each in wanted]
            return all(each and (each[-1].settled or not settled) for each in ends)

        with self._changed:
            assert self._changed.wait_for(done, WAIT_S), "not every block has ended"
            assert not self.wrong
            return Counter(self.ends[each][0].problem for each in wanted)

    def num_loans(self) -> int:
        return sum(len(owner.open_loans) for owner in self.owners.values())

    def close(self) -> None:
        """Nothing was told twice or wrong, and nothing is left of fetches."""
        self.mover.stop(WAIT_S)
        self.wait(settled=True)
        self.mover.check()
        for endpoint in self.endpoints:
            assert endpoint.close(WAIT_S)


class FakeControl:
    """As PeerControl, to an owner in this process."""

    def __init__(self, address: str, owner: SmallOwner) -> None:
        self.address, self._owner = address, owner
        self.closed = False

    def lend(self, request: pb.LendRequest, deadline_s: float) -> pb.LendReply:
        assert 0 < request.deadline_s < deadline_s
        assert not self.closed
        return self._owner.lend(request)

    def release(self, request: pb.ReleaseRequest, _deadline_s: float) -> None:
        self._owner.release(request.lease_id)

    def close(self) -> None:
        self.closed = True


def refusing(error: KVStoreError) -> Answer:
    def answer(_request: pb.LendRequest, _reply: pb.LendReply) -> Any:
        raise error

    return answer


def hanging(until: threading.Event) -> Answer:
    """Answers nothing before the deadline or `until`, as a call to a process that is stopped."""

    def answer(request: pb.LendRequest, _reply: pb.LendReply) -> Any:
        until.wait(request.deadline_s)
        raise PeerUnavailable("hangs")

    return answer


@contextlib.contextmanager
def small_cluster(monkeypatch: pytest.MonkeyPatch, *names: str, **kwargs: Any) -> Iterator[SmallCluster]:
    cluster = SmallCluster(monkeypatch, *names, **kwargs)
    with contextlib.closing(cluster):
        yield cluster


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)
