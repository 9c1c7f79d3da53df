"""Extents that a device reads together, and the state they go through until their bytes are known to be right.

    BEFORE   the beacon and the slots' generations           another beacon: GONE; another generation: STALE
    DATA     the bytes, into the local arena
    AFTER    the beacon and the generations once more        as before

Nobody at the owner takes part, so the reader itself makes sure that the slots were those blocks' from before the first byte to
after the last. What keeps them so is the lease, at the owner.
"""

import enum
import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.transport.link import LinkProblem
from kvstore.transport.nixl import Agent, Places, TransferFailed
from kvstore.transport.rdma_remote import BEACON_NBYTES, PreparedGrids, Remote
from kvstore.transport.read_queue import Pending

MAX_GROUP_EXTENTS = 64
SCRATCH_WORDS = MAX_GROUP_EXTENTS + BEACON_NBYTES // 8


class Phase(enum.IntEnum):
    """What a group waits for."""

    BEFORE = 0
    DATA = 1
    AFTER = 2
    OVER = 3


class Scratch(NamedTuple):
    """Registered words that generations are read into: `words: [SCRATCH_WORDS] uint64`, at address `at`."""

    words: NDArray[np.uint64]
    at: int


class Group:
    """Up to MAX_GROUP_EXTENTS extents of one peer. `scratch` is the group's until it is over. Problems found are collected in
    `ended`, which the owner of the group takes."""

    def __init__(
        self,
        agent: Agent,
        remote: Remote,
        pendings: list[Pending],
        *,
        scratch: Scratch,
        arena: int,
        grids: PreparedGrids,
    ) -> None:
        assert 0 < len(pendings) <= MAX_GROUP_EXTENTS
        self.remote = remote
        self.scratch = scratch
        self.pendings = pendings  # those that have not ended
        self.late: list[Pending] = []  # ended unsettled; in flight all the same
        self.ended: list[tuple[Pending, LinkProblem | None]] = []
        self.phase = Phase.BEFORE
        self.data_bytes_per_s = 0.0  # once the data is there
        self._agent = agent
        self._arena = arena
        self._grids = grids
        self._transfer: Any = None
        self._data_since_s = 0.0
        self._asked: list[Pending] = []  # those whose generations are being read

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight, and nothing will be."""
        return self.phase is Phase.OVER

    @property
    def num_bytes_to_check(self) -> int:
        """Bytes that have come and have a checksum to be held against."""
        came = [pending.extent for pending, problem in self.ended if problem is None]
        return sum(extent.nbytes for extent in came if extent.checksum is not None)

    def take_ended(self) -> list[tuple[Pending, LinkProblem | None]]:
        """What has ended since the last time."""
        ended, self.ended = self.ended, []
        return ended

    def begin(self) -> bool:
        """Post the first phase. Raises TransferFailed, as `advance` does; then `fail` follows."""
        self.remote.num_groups += 1
        self._ask_generations()
        return True

    def advance(self, *, stops: bool) -> bool:
        """Go on as far as what was posted is done; whether anything moved. `stops`: post nothing more."""
        moved = False
        while self.phase is not Phase.OVER and self._agent.is_done(self._transfer):
            moved = self.remote.is_connected = True
            self._release()
            if stops and self.phase is not Phase.AFTER:
                self._end(LinkProblem.STOPPED)
            else:
                self._next()
        return moved

    def lose(self, late: list[Pending]) -> None:
        """These have ended unsettled: their time is over, their bytes are still under way."""
        self.pendings = [pending for pending in self.pendings if pending not in late]
        self.late += late

    def abandon(self) -> bool:
        """Stop a transfer to a peer that never was connected: it has touched nothing. False: it cannot be stopped."""
        if self._transfer is not None and not self._agent.release(self._transfer):
            return False
        self._transfer = None
        self._over()
        return True

    def fail(self) -> None:
        """The transfer has failed: nothing touches the local bytes any more."""
        self._release()
        self._end(LinkProblem.GONE)

    def _next(self) -> None:
        if self.phase is Phase.BEFORE:
            self._compare()
            if not self.pendings:
                self._over()
                return
            self.phase = Phase.DATA
            self._data_since_s = time.monotonic()
            self._ask_data()
        elif self.phase is Phase.DATA:
            nbytes = sum(pending.extent.nbytes for pending in (*self.pendings, *self.late))
            self.data_bytes_per_s = nbytes / max(1e-6, time.monotonic() - self._data_since_s)
            self.phase = Phase.AFTER
            self._ask_generations()
        else:
            self._compare()
            self._end(None)

    def _end(self, problem: LinkProblem | None) -> None:
        self.ended += [(pending, problem) for pending in self.pendings]
        self.pendings = []
        self._over()

    def _over(self) -> None:
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            self.remote.num_groups -= 1

    def _release(self) -> None:
        if self._transfer is not None:
            self._agent.release(self._transfer)
            self._transfer = None

    def _ask_generations(self) -> None:
        """One word for each extent, and the beacon behind them."""
        self._asked = list(self.pendings)
        into, place = self.scratch.at, self.remote.place
        local: Places = [(into + 8 * number, 8, 0) for number in range(len(self._asked))]
        remote: Places = [
            (place.generations_at + pending.extent.remote_offset // SLOT_ALIGN_BYTES * 8, 8, 0)
            for pending in self._asked
        ]
        local.append((into + 8 * len(self._asked), BEACON_NBYTES, 0))
        remote.append((place.beacon_at, BEACON_NBYTES, 0))
        self._transfer = self._agent.read(self.remote.name, local, remote)

    def _compare(self) -> None:
        """Hold what came against what it must be."""
        count = len(self._asked)
        if self.scratch.words[count : count + 2].tobytes() != self.remote.place.beacon:
            raise TransferFailed("another process answers in the peer's place, or its arena is closed")
        found = self.scratch.words[:count].tolist()
        stale = {
            id(pending)
            for pending, generation in zip(self._asked, found, strict=True)
            if generation != pending.extent.generation
        }
        if stale:
            self.ended += [(pending, LinkProblem.STALE) for pending in self.pendings if id(pending) in stale]
            self.pendings = [pending for pending in self.pendings if id(pending) not in stale]

    def _ask_data(self) -> None:
        columns = np.array([pending.extent[1:4] for pending in self.pendings], np.int64)
        theirs, ours, nbytes = columns[:, 0], columns[:, 1], columns[:, 2]
        if (nbytes == nbytes[0]).all() and self._ask_prepared(int(nbytes[0]), ours, theirs):
            return
        local, remote = np.zeros((len(columns), 3), np.uint64), np.zeros((len(columns), 3), np.uint64)
        local[:, 0], remote[:, 0] = self._arena + ours, self.remote.place.memory_at + theirs
        local[:, 1] = remote[:, 1] = nbytes
        self._transfer = self._agent.read(self.remote.name, local, remote)

    def _ask_prepared(self, nbytes: int, ours: NDArray[np.int64], theirs: NDArray[np.int64]) -> bool:
        """By index, when all are slots of one size: a third of the time that descriptors of their own take."""
        assert self.remote.grids is not None
        local, remote = self._grids.get(nbytes), self.remote.grids.get(nbytes)
        if local is None or remote is None:
            return False
        local_at, remote_at = local[0].indexes(ours), remote[0].indexes(theirs)
        if local_at is None or remote_at is None:
            return False
        self._transfer = self._agent.read_prepared(local[1], local_at, remote[1], remote_at)
        return True
