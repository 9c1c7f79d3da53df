"""A link within one process, for tests: it copies from arena to arena, late, wrong or not at all, as a seed decides."""

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.transport.link import Gatekeeper, LinkHealth, LinkProblem, LinkStats, OnDone, ReadExtent
from kvstore.transport.read_queue import Pending, ReadQueue, is_right

_MAGIC = b"KVLL"
_ID_NBYTES = 16
_IDLE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What a loopback link does to each extent. Rates are of 0 to 1, drawn once an extent, in this order."""

    drop: float = 0.0  # no answer: TIMEOUT
    cut: float = 0.0  # half of the bytes, then GONE, for all that waits too
    corrupt: float = 0.0  # one byte is flipped: CORRUPT if there is a checksum
    unsettled: float = 0.0  # TIMEOUT at the deadline; the bytes still come, `late_s` afterwards
    late_s: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)  # before the first byte, from a range
    bytes_per_s: float = 0.0  # 0: as fast as memory


HEALTHY = Faults()


class LoopbackNetwork:
    """Endpoints that can reach one another. `faults` may be replaced at any time; it holds for reads begun afterwards."""

    def __init__(self, *, seed: int = 0, faults: Faults = HEALTHY) -> None:
        self.faults = faults
        self.random = Random(seed)  # noqa: S311 - faults, not secrets
        self.endpoints: dict[bytes, LoopbackEndpoint] = {}  # those that are open


class LoopbackEndpoint:
    """An Endpoint (transport/link.py)."""

    kind = "loopback"

    def __init__(
        self,
        network: LoopbackNetwork,
        *,
        memory: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        gatekeeper: Gatekeeper,
    ) -> None:
        self.memory = memory
        self.generations = generations
        self.gatekeeper = gatekeeper
        self._network = network
        self._id = secrets.token_bytes(_ID_NBYTES)
        self._links: list[LoopbackLink] = []

    def open(self) -> Self:
        """Endpoint.open."""
        self._network.endpoints[self._id] = self
        return self

    def describe(self) -> bytes:
        """Endpoint.describe."""
        return _MAGIC + self._id

    def connect(self, peer: str, descriptor: bytes) -> "LoopbackLink":
        """Endpoint.connect."""
        if len(descriptor) != len(_MAGIC) + _ID_NBYTES or not descriptor.startswith(_MAGIC):
            raise RemoteProtocolError(
                f"descriptor: {descriptor[:32].hex()} is not right; expected {_MAGIC.hex()} and {_ID_NBYTES} bytes",
                field="descriptor",
                value=descriptor[:32].hex(),
            )
        link = LoopbackLink(peer, self._network, descriptor.removeprefix(_MAGIC), memory=self.memory)
        self._links.append(link)
        return link

    def close(self, deadline_s: float) -> bool:
        """Endpoint.close."""
        self._network.endpoints.pop(self._id, None)
        ends_s = time.monotonic() + deadline_s
        gone = [link.close(max(0.0, ends_s - time.monotonic())) for link in self._links]
        return all(gone)


class LoopbackLink:
    """A Link (transport/link.py). One thread copies one extent at a time."""

    def __init__(self, peer: str, network: LoopbackNetwork, owner: bytes, *, memory: NDArray[np.uint8]) -> None:
        self.peer = peer
        self._network = network
        self._owner = owner
        self._memory = memory
        self._reads = ReadQueue(arena_nbytes=memory.nbytes)
        self._unsettled: list[tuple[float, Pending]] = []  # the copying thread's: (when the bytes come, what)
        self._thread = threading.Thread(target=self._work, name=f"kvstore-loopback-{peer}", daemon=True)

    def read(self, batch: Sequence[ReadExtent], *, lease: bytes, deadline_s: float, on_done: OnDone) -> None:
        """Link.read."""
        self._reads.submit(batch, lease=lease, deadline_s=deadline_s, on_done=on_done)
        with self._reads.changed:
            if self._thread.ident is None and not self._reads.closed:
                self._thread.start()

    def health(self) -> LinkHealth:
        """Link.health."""
        return self._reads.health(connected=self._thread.is_alive())

    def stats(self) -> LinkStats:
        """Link.stats."""
        return self._reads.stats()

    def check(self) -> None:
        """Nothing is counted twice or lost."""
        self._reads.check()

    def close(self, deadline_s: float) -> bool:
        """Link.close."""
        self._reads.close()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)
        gone = not self._thread.is_alive()
        if not gone:
            self._reads.give_up()
        return gone

    # --- the copying thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._reads.closed or self._unsettled:
            taken = self._reads.take(1, 1)
            if taken:
                self._carry(taken[0])
            else:
                self._rest(_IDLE_WAIT_S)

    def _rest(self, seconds: float) -> None:
        """Wait so long, or until there is news, and see to what is due."""
        with self._reads.changed:
            due_s = min([at_s for at_s, _ in self._unsettled] + [self._reads.next_deadline_s()])
            has_news = self._reads.has_queued and seconds == _IDLE_WAIT_S
            if not has_news and (self._unsettled or not self._reads.closed):
                self._reads.changed.wait(max(0.0, min(seconds, due_s - time.monotonic())))
        self._reads.expire()
        now_s = time.monotonic()
        come = [entry for entry in self._unsettled if entry[0] <= now_s]
        self._unsettled = [entry for entry in self._unsettled if entry[0] > now_s]
        for _, pending in come:
            self._copy(pending.extent, pending.extent.nbytes)
            self._reads.settle([(pending, LinkProblem.TIMEOUT)])

    def _carry(self, pending: Pending) -> None:
        faults, random = self._network.faults, self._network.random
        drop, cut, corrupt, unsettled = (
            random.random() < rate for rate in (faults.drop, faults.cut, faults.corrupt, faults.unsettled)
        )
        delay_s = random.uniform(*faults.delay_s)
        if faults.bytes_per_s:
            delay_s += pending.extent.nbytes / faults.bytes_per_s
        problem = self._wait(pending, _IDLE_WAIT_S if drop or unsettled else delay_s)
        if problem is LinkProblem.TIMEOUT and unsettled:
            self._reads.end([(pending, problem)], settled=False)
            self._unsettled.append((time.monotonic() + faults.late_s, pending))
            return
        if problem is None:
            problem = self._fetch(pending, cut=cut, corrupt=corrupt)
        self._reads.end([(pending, problem)])
        if problem is LinkProblem.GONE:
            self._reads.fail(problem)

    def _wait(self, pending: Pending, seconds: float) -> LinkProblem | None:
        until_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < until_s:
            if self._reads.closed:
                return LinkProblem.STOPPED
            if now_s >= pending.batch.ends_s:
                return LinkProblem.TIMEOUT
            self._rest(until_s - now_s)
        return None

    def _fetch(self, pending: Pending, *, cut: bool, corrupt: bool) -> LinkProblem | None:
        owner = self._network.endpoints.get(self._owner)
        extent = pending.extent
        if owner is None:
            return LinkProblem.GONE
        outside = extent.remote_offset + extent.nbytes > owner.memory.nbytes
        if outside or not owner.gatekeeper.may_read(pending.batch.lease, [extent.remote]):
            return LinkProblem.REFUSED
        slot = extent.remote_offset // SLOT_ALIGN_BYTES
        if owner.generations[slot] != extent.generation:
            return LinkProblem.STALE
        self._copy(extent, extent.nbytes // 2 if cut else extent.nbytes)
        if cut:
            return LinkProblem.GONE
        if corrupt:
            self._memory[extent.local_offset + self._network.random.randrange(extent.nbytes)] ^= 0xFF
        if owner.generations[slot] != extent.generation:
            return LinkProblem.STALE
        return None if is_right(extent, self._memory.data) else LinkProblem.CORRUPT

    def _copy(self, extent: ReadExtent, nbytes: int) -> None:
        owner = self._network.endpoints.get(self._owner)
        if owner is not None:
            into = self._memory[extent.local_offset : extent.local_offset + nbytes]
            np.copyto(into, owner.memory[extent.remote_offset : extent.remote_offset + nbytes])
