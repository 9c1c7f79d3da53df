"""What tests of links need: nodes with a small arena and an endpoint, and something that collects ends."""

import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import Extent
from kvstore.core.clock import MonotonicClock
from kvstore.tiers.arena import Arena
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.link import Endpoint, Link, LinkProblem, ReadDone, ReadExtent

PAGE = 4096
SLOT = 64 << 10
SEGMENT = 1 << 20
LEASE = bytes(range(16))
SECRET = b"a secret of the tests"
DEADLINE_S = 20.0  # of what must come; no test waits for it


class Node:
    """An arena of `num_segments` of random bytes, a gate, and the endpoint that `make` makes of them."""

    def __init__(self, make: Callable[["Node"], Endpoint], *, seed: int, num_segments: int = 4) -> None:
        self.arena = Arena(num_segments * SEGMENT, segment_bytes=SEGMENT).open()
        for segment in range(num_segments):
            self.arena.fault_segment(segment)
        rng = np.random.default_rng(seed)
        self.memory = self.arena.memory
        self.memory[:] = rng.integers(0, 256, self.memory.size, np.uint8)
        self.arena.generations[:] = rng.integers(1, 1 << 62, self.arena.generations.size, np.uint64)
        self.gate = LeaseGate(MonotonicClock())
        self.endpoint = make(self).open()

    def generation(self, offset: int) -> int:
        return int(self.arena.generations[offset // PAGE])

    def checksum(self, offset: int, nbytes: int) -> int:
        return xxh3_64_intdigest(self.memory[offset : offset + nbytes])

    def read_of(
        self, read_id: int, offset: int, nbytes: int, into: int, *, checked: bool = False, lease: bytes = LEASE
    ) -> ReadExtent:
        """What a peer reads of this node, granted to `lease`."""
        extent = Extent(offset, nbytes, self.generation(offset))
        self.gate.grant(lease, [extent])
        checksum = self.checksum(offset, nbytes) if checked else None
        return ReadExtent(read_id, offset, into, nbytes, extent.generation, checksum)

    def slots(self, count: int, *, nbytes: int = SLOT, checked: bool = False, first: int = 0) -> list[ReadExtent]:
        """`count` blocks, each to the same place of the other arena."""
        places = [(number, number * nbytes) for number in range(first, first + count)]
        return [self.read_of(number, place, nbytes, place, checked=checked) for number, place in places]

    def close(self) -> None:
        assert self.endpoint.close(DEADLINE_S)
        self.arena.close()


class Ends:
    """An `on_done` that keeps every ReadDone and can be waited for."""

    def __init__(self) -> None:
        self.done: list[ReadDone] = []
        self._changed = threading.Condition()

    def __call__(self, done: list[ReadDone]) -> None:
        with self._changed:
            self.done += done
            self._changed.notify_all()

    def wait(self, count: int) -> dict[int, LinkProblem | None]:
        """Problems by read id once `count` have ended; none twice."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, DEADLINE_S), f"{len(self.done)} of {count}"
            assert len(self.done) == count
            problems = {each.read_id: each.problem for each in self.done}
        assert len(problems) == count
        return problems


def read(link: Link, batch: Sequence[ReadExtent], *, lease: bytes = LEASE, deadline_s: float = DEADLINE_S) -> Ends:
    ends = Ends()
    link.read(batch, lease=lease, deadline_s=deadline_s, on_done=ends)
    return ends


def read_all(
    link: Link, batch: Sequence[ReadExtent], *, lease: bytes = LEASE, deadline_s: float = DEADLINE_S
) -> dict[int, LinkProblem | None]:
    return read(link, batch, lease=lease, deadline_s=deadline_s).wait(len(batch))


def make_certificates(folder: Path, *names: str) -> None:
    """A CA, and for each name a key and a certificate of it: ca.pem, NAME.pem, NAME.key."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA")
    for name in names:
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
