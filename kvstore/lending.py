"""The owner's side of what other nodes read: which slots a loan covers, and how one is made.

    gRPC thread     Lend -> loop: store.acquire -> wait until blocks from drives are there -> checksums -> gate.grant -> reply
    link threads    gate.may_read for each request that shows the loan
    loop            Release -> Lender.end, and the lease's

A loan is short and bounded: Release ends it, or its time, or the session of who borrowed, and nothing but Lend begins or extends
one. Its lease ends with it, and leaves nothing in limbo: a reader that comes late finds another generation, or wrong checksums.
"""

import secrets
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvstore.client_arena import Arrival, arrival_of
from kvstore.core.blocks import Extent
from kvstore.core.clock import Clock
from kvstore.core.limits import ARRIVAL_POLL_S, SLOT_ALIGN_BYTES
from kvstore.core.plans import ReadGrant
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.link import LEASE_NBYTES

MAX_WAITING_LOANS = 6
"""Calls that wait for an owner's drives; the other threads that serve calls answer what nobody has to wait for."""


class Lender:
    """Makes loans out of leases, on the thread of the call that wants one."""

    def __init__(
        self, memory: NDArray[np.uint8], generations: NDArray[np.uint64], gate: LeaseGate, clock: Clock
    ) -> None:
        self._memory = memory
        self._generations = generations
        self._gate = gate
        self._clock = clock
        self._places = threading.BoundedSemaphore(MAX_WAITING_LOANS)
        self._lock = threading.Lock()
        self._loans: dict[int, tuple[bytes, float]] = {}  # by lease: what readers show, and its end

    def lend(
        self, acquire: Callable[[], ReadGrant], release: Callable[[int], None], first_needed: int, deadline_s: float
    ) -> pb.LendReply:
        """`acquire` and `release` run on the loop and are waited for. What is not in RAM by the deadline (or now, if
        enough others wait) is not lent; its blocks are on their way all the same, for whoever asks next."""
        until_s = self._clock.now_s() + deadline_s
        grant = acquire()
        extents = self._there(grant, until_s)
        checksums = [self._checksum(extent) for extent in extents]
        extents = extents[: self._num_current(extents)]
        if not extents:
            if grant.lease_id:
                release(grant.lease_id)
            return pb.LendReply(num_blocks=grant.num_blocks - len(grant.slots.offsets))
        loan = self._begin(grant.lease_id, extents, grant.expires_s)
        count = len(extents)
        return pb.LendReply(
            lease_id=grant.lease_id,
            loan=loan,
            num_blocks=first_needed + count,
            offsets=grant.slots.offsets[:count].astype("<u8").tobytes(),
            generations=grant.slots.generations[:count].astype("<u8").tobytes(),
            checksums=np.array(checksums[:count], "<u8").tobytes(),
            expires_in_s=grant.expires_s - self._clock.now_s(),
        )

    def end(self, lease_id: int) -> None:
        """Its lease was given back. Unknown ones are nothing: most leases are no loans."""
        with self._lock:
            loan, _ = self._loans.pop(lease_id, (b"", 0.0))
        self._gate.release(loan)

    def _begin(self, lease_id: int, extents: Sequence[Extent], until_s: float) -> bytes:
        loan = secrets.token_bytes(LEASE_NBYTES)
        with self._lock:
            now_s = self._clock.now_s()
            self._loans = {key: each for key, each in self._loans.items() if each[1] > now_s}
            self._loans[lease_id] = (loan, until_s)
        self._gate.grant(loan, extents, until_s)
        return loan

    def _there(self, grant: ReadGrant, until_s: float) -> list[Extent]:
        """The granted slots whose bytes are there, up to the first that does not come in time."""
        may_wait = self._places.acquire(blocking=False)
        try:
            return self._wait(grant, until_s if may_wait else 0.0)
        finally:
            if may_wait:
                self._places.release()

    def _wait(self, grant: ReadGrant, until_s: float) -> list[Extent]:
        there: list[Extent] = []
        pause_s = ARRIVAL_POLL_S[0]
        for extent in grant.extents:
            while (arrival := self._arrival(extent)) is Arrival.ON_ITS_WAY and self._clock.now_s() < until_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, ARRIVAL_POLL_S[1])
            if arrival is not Arrival.THERE:
                break
            there.append(extent)
        return there

    def _num_current(self, extents: Sequence[Extent]) -> int:
        """How many of them are still what they were when their checksums were made."""
        for i, extent in enumerate(extents):
            if self._arrival(extent) is not Arrival.THERE:
                return i
        return len(extents)

    def _arrival(self, extent: Extent) -> Arrival:
        return arrival_of(int(self._generations[extent.offset // SLOT_ALIGN_BYTES]), extent.generation)

    def _checksum(self, extent: Extent) -> int:
        return xxh3_64_intdigest(self._memory[extent.offset : extent.offset + extent.nbytes].data)
