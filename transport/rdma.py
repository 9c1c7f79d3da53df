"""Links of one-sided reads: the peer's memory is read by a network device, or by the kernel on one host; the peer does nothing.

Whoever has an endpoint's descriptor may read its arena: give it to peers only, as one would a key. The library takes one
thread, so an endpoint has one, which posts the reads of all its links, looks how they go, and lets peers connect.

    link.read -> ReadQueue -> | thread: Group: generations, data, generations | -> checksum -> on_done
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import SLOT_ALIGN_BYTES
from kvstore.transport.link import LinkHealth, LinkProblem, LinkStats, OnDone, ReadExtent
from kvstore.transport.nixl import Agent, TransferFailed
from kvstore.transport.rdma_reads import MAX_GROUP_EXTENTS, SCRATCH_WORDS, Group, Scratch
from kvstore.transport.rdma_remote import BEACON_NBYTES, ArenaPlace, PreparedGrids, Remote
from kvstore.transport.read_queue import Pending, ReadQueue, is_right

_log = logging.getLogger(__name__)

MAX_GROUPS_PER_LINK = 2
"""One's data is under way while the other's generations are."""

MAX_GROUPS = 64
"""In flight at once, all links together."""

GROUP_S = 0.008
"""A group has as many bytes as take so long at the bandwidth that was seen: on one host the thread itself copies them, and comes
to deadlines and other peers in between; three rounds of some 0.05 ms are little beside it."""

GROUP_NBYTES = (32 << 20, 64 << 20)
"""But at least and at most so many."""

IDLE_POLL_S = 0.005
"""How often the thread looks whether a peer wants to connect, when it has nothing to do: 0.5 % of a core."""

CHECK_ALONE_NBYTES = 1 << 20
"""Checksums of so many bytes take 50 us or more: they are made on another thread."""

BUSY_POLL_S = (0.00002, 0.0005)
"""First and longest pause between two looks at transfers under way; doubles in between."""


class RdmaEndpoint:
    """An Endpoint (transport/link.py). There is no gatekeeper to ask: see there."""

    kind = "rdma"

    def __init__(self, *, memory: NDArray[np.uint8], generations: NDArray[np.uint64]) -> None:
        assert generations.nbytes // 8 * SLOT_ALIGN_BYTES >= memory.nbytes
        self.memory = memory
        self._generations = generations
        self._beacon = np.frombuffer(bytearray(secrets.token_bytes(BEACON_NBYTES)), np.uint64)
        self._arena_at = memory.ctypes.data
        self._scratch = np.zeros((MAX_GROUPS, SCRATCH_WORDS), np.uint64)
        self.free_scratch = [Scratch(words, words.ctypes.data) for words in self._scratch]  # not in use by a group
        self._place: ArenaPlace | None = None
        self._agent: Agent | None = None
        self._grids: PreparedGrids | None = None
        self._remotes: dict[bytes, Remote] = {}
        self._links: tuple[RdmaLink, ...] = ()
        self._lock = threading.RLock()  # of the two above
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="kvstore-rdma", daemon=True)
        self._to_check: SimpleQueue[tuple[RdmaLink, Group] | None] = SimpleQueue()  # at most MAX_GROUPS
        self._checker = threading.Thread(target=self._check, name="kvstore-rdma-check", daemon=True)

    @property
    def agent(self) -> Agent:
        """The library's; for the thread alone once it runs."""
        assert self._agent is not None
        return self._agent

    def open(self) -> Self:
        """Endpoint.open. Registering pins the arena: 25 ms a GiB where devices need page tables of their own."""
        agent = Agent(f"kvstore-{secrets.token_hex(8)}")
        agent.register([self.memory, self._generations, self._beacon, self._scratch])
        self._agent = agent
        self._grids = PreparedGrids(agent, "", self._arena_at, self.memory.nbytes)
        self._place = ArenaPlace(
            self._beacon.tobytes(),
            self._beacon.ctypes.data,
            self.memory.ctypes.data,
            self.memory.nbytes,
            self._generations.ctypes.data,
            agent.metadata(),
        )
        self._thread.start()
        self._checker.start()
        return self

    def describe(self) -> bytes:
        """Endpoint.describe."""
        assert self._place is not None
        return self._place.encode()

    def connect(self, peer: str, descriptor: bytes) -> "RdmaLink":
        """Endpoint.connect."""
        place = ArenaPlace.decode(descriptor)
        with self._lock:
            remote = self._remotes.setdefault(place.beacon, Remote(place))
            if remote.place != place:
                raise RemoteProtocolError(
                    "descriptor: another one of this endpoint is known", field="descriptor", value=place.beacon.hex()
                )
            link = RdmaLink(peer, self, remote)
            self._links = (*self._links, link)
            if self._stopping:
                link.close(0.0)
        return link

    def close(self, deadline_s: float) -> bool:
        """Endpoint.close."""
        ends_s = time.monotonic() + deadline_s
        self._beacon[:] = 0  # who reads from us from here on knows that we have gone
        gone = [link.close(max(0.0, ends_s - time.monotonic())) for link in self._links]
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(max(0.0, ends_s - time.monotonic()))
        return all(gone) and not self._thread.is_alive()

    def wake(self) -> None:
        """There is news for the thread. Any thread."""
        self._wake.set()

    def leave(self, link: "RdmaLink") -> None:
        """A link has closed and nothing of it is in flight. Any thread."""
        with self._lock:
            self._links = tuple(other for other in self._links if other is not link)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def group(self, remote: Remote, pendings: list[Pending]) -> Group:
        """A group of extents; its scratch comes back to `free_scratch` when it is over."""
        assert self._grids is not None
        scratch = self.free_scratch.pop()
        return Group(self.agent, remote, pendings, scratch=scratch, arena=self._arena_at, grids=self._grids)

    def conclude(self, link: "RdmaLink", group: Group) -> None:
        """A group is over. Checksums of large ones are made while the next bytes are copied."""
        if group.num_bytes_to_check < CHECK_ALONE_NBYTES:
            link.conclude(group)
        else:
            self._to_check.put((link, group))

    def _check(self) -> None:
        while (work := self._to_check.get()) is not None:
            link, group = work
            link.conclude(group)
            self._wake.set()

    def give_up(self, remote: Remote) -> None:
        """A peer that never was reached: stop all that waits for it, forget it, and only then say so."""
        links = [link for link in self._links if link.has_groups]
        stopped = [(link, link.give_up(remote)) for link in links]
        if remote.num_groups == 0:
            remote.unload(self.agent)
        else:
            remote.is_broken = True
        for link, pendings in stopped:
            link.answer(pendings)

    def _work(self) -> None:
        try:
            self._carry()
        except Exception:  # noqa: BLE001 - a bug of ours or of the library; what is in flight must not be waited for
            _log.exception("rdma: the thread crashed; its links are closed")
            self._stopping = True
            for link in self._links:
                link.crash()
        else:
            self._end()

    def _carry(self) -> None:
        pause_s = BUSY_POLL_S[0]
        while True:
            links = self._links
            moves = [link.drive() for link in links]
            self.agent.progress()
            is_busy = any(link.is_flying for link in links)
            if self._stopping and not any(link.has_groups for link in links):
                break
            if any(moves):
                pause_s = BUSY_POLL_S[0]
            elif is_busy:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BUSY_POLL_S[1])
            else:
                self._rest(links)

    def _rest(self, links: "Sequence[RdmaLink]") -> None:
        self._forget_unused()
        due_s = min((link.next_deadline_s() for link in links), default=math.inf)
        self._wake.wait(max(0.0, min(IDLE_POLL_S, due_s - time.monotonic())))
        self._wake.clear()

    def _forget_unused(self) -> None:
        """Peers that no link leads to any more."""
        with self._lock:
            used = {link.remote.place.beacon for link in self._links}
            unused = [self._remotes.pop(beacon) for beacon in self._remotes.keys() - used]
        for remote in unused:
            remote.unload(self.agent)

    def _end(self) -> None:
        self._to_check.put(None)
        for remote in self._remotes.values():
            remote.unload(self.agent)
        assert self._grids is not None
        self._grids.release()
        self.agent.close()
        self._agent = None


class RdmaLink:
    """A Link (transport/link.py)."""

    def __init__(self, peer: str, endpoint: RdmaEndpoint, remote: Remote) -> None:
        self.peer = peer
        self._endpoint = endpoint
        self.remote = remote
        self._reads = ReadQueue(arena_nbytes=endpoint.memory.nbytes)
        self._arena = endpoint.memory.data
        self._groups: list[Group] = []  # in flight, or over and being checked
        self._bytes_per_s = 1e9
        self._idle = threading.Condition()

    @property
    def has_groups(self) -> bool:
        """Whether anything is in flight or being checked."""
        return bool(self._groups)

    @property
    def is_flying(self) -> bool:
        """Whether anything is in flight."""
        return bool(self._flying())

    def read(self, batch: Sequence[ReadExtent], *, lease: bytes, deadline_s: float, on_done: OnDone) -> None:
        """Link.read. The lease is not shown to anybody."""
        self._reads.submit(batch, lease=lease, deadline_s=deadline_s, on_done=on_done)
        self._endpoint.wake()

    def health(self) -> LinkHealth:
        """Link.health."""
        return self._reads.health(connected=self.remote.is_connected)

    def stats(self) -> LinkStats:
        """Link.stats."""
        return self._reads.stats()

    def check(self) -> None:
        """Nothing is counted twice or lost."""
        self._reads.check()

    def close(self, deadline_s: float) -> bool:
        """Link.close."""
        self._reads.close()
        self._endpoint.wake()
        with self._idle:
            gone = self._idle.wait_for(lambda: not self._groups, deadline_s)
        if gone:
            self._endpoint.leave(self)
        else:
            self._reads.give_up()
        return gone

    def next_deadline_s(self) -> float:
        """Of all that waits or is in flight."""
        return self._reads.next_deadline_s()

    # --- the endpoint's thread ----------------------------------------------------------------------------------------

    def drive(self) -> bool:
        """Go on with what is in flight, begin what waits; whether anything moved."""
        self._reads.expire()
        moves = [self._advance(group) for group in self._flying()]
        while len(self._flying()) < MAX_GROUPS_PER_LINK and self._reads.has_queued and self._begin():
            moves.append(True)
        return any(moves)

    def give_up(self, remote: Remote) -> list[Pending]:
        """The peer was never reached. What was in flight, whose transfers are stopped and whose groups are over."""
        stopped = [group for group in self._flying() if group.remote is remote and group.abandon()]
        pendings = [pending for group in stopped for pending in group.pendings]
        for group in stopped:
            self._drop(group)
        return pendings

    def answer(self, pendings: list[Pending]) -> None:
        """What was given up: over, or to be tried again until its time is over."""
        now_s = time.monotonic()
        late = [pending for pending in pendings if pending.batch.ends_s <= now_s]
        rest = [pending for pending in pendings if pending.batch.ends_s > now_s]
        self._reads.end([(pending, LinkProblem.TIMEOUT) for pending in late])
        if self._reads.closed:
            self._reads.end([(pending, LinkProblem.STOPPED) for pending in rest])
        else:
            self._reads.put_back(rest, retried=True)

    def crash(self) -> None:
        """Nobody looks after what is in flight any more: it never settles, and `close` answers False."""
        self._reads.close()
        self._reads.end(
            [(each, LinkProblem.GONE) for group in self._flying() for each in group.pendings], settled=False
        )

    def _begin(self) -> bool:
        """Take the next extents and post them. False when that has to wait."""
        remote = self.remote
        try:
            if not self._endpoint.free_scratch or not remote.load(self._endpoint.agent):
                return False
        except RemoteProtocolError:
            self._reads.fail(LinkProblem.BROKEN)
            return True
        except TransferFailed:
            self._reads.fail(LinkProblem.GONE)
            return True
        low, high = GROUP_NBYTES
        with self._idle:  # a close in between must not find nothing in flight
            taken = self._reads.take(int(min(max(self._bytes_per_s * GROUP_S, low), high)), MAX_GROUP_EXTENTS)
            within = [pending for pending in taken if remote.holds(pending.extent)]
            group = self._endpoint.group(remote, within) if within else None
            if group is not None:
                self._groups.append(group)
        if len(within) < len(taken):
            outside = [pending for pending in taken if not remote.holds(pending.extent)]
            self._reads.end([(pending, LinkProblem.REFUSED) for pending in outside])
        if group is not None:
            self._try(group, group.begin)
        return bool(taken)

    def _advance(self, group: Group) -> bool:
        if group.is_over:
            return True  # given up with another one of the same peer
        moved = self._try(group, lambda: group.advance(stops=self._reads.closed))
        if not group.is_over:
            self._look_at_the_time(group)
        return moved

    def _try(self, group: Group, step: Callable[[], bool]) -> bool:
        """One step of a group; and its end, if that is it."""
        moved = False
        try:
            moved = step()
        except TransferFailed:
            group.remote.is_broken = moved = True
            group.fail()
            self._reads.fail(LinkProblem.GONE)
        if group.is_over:
            if group.data_bytes_per_s:
                self._bytes_per_s += (group.data_bytes_per_s - self._bytes_per_s) / 8
            self._endpoint.conclude(self, group)
        elif group.ended:
            self._reads.end(group.take_ended())
        return moved

    def conclude(self, group: Group) -> None:
        """Verify what came, and say how all of it ended. Here or on the checking thread, where nothing else is done."""
        self._reads.end([(pending, self._verdict(pending, problem)) for pending, problem in group.take_ended()])
        if group.late:
            self._reads.settle([(pending, LinkProblem.TIMEOUT) for pending in group.late])
        self._drop(group)

    def _flying(self) -> list[Group]:
        return [group for group in self._groups if not group.is_over]

    def _verdict(self, pending: Pending, problem: LinkProblem | None) -> LinkProblem | None:
        if problem is None and not is_right(pending.extent, self._arena):
            return LinkProblem.CORRUPT
        return problem

    def _look_at_the_time(self, group: Group) -> None:
        now_s = time.monotonic()
        late = [pending for pending in group.pendings if pending.batch.ends_s <= now_s]
        if (late or self._reads.closed) and not group.remote.is_connected:
            self._endpoint.give_up(group.remote)
        elif late:
            self._reads.end([(pending, LinkProblem.TIMEOUT) for pending in late], settled=False)
            group.lose(late)

    def _drop(self, group: Group) -> None:
        with self._idle:
            self._groups.remove(group)
            self._endpoint.free_scratch.append(group.scratch)
            self._idle.notify_all()
