"""Between the brain and the other nodes: fetches go out to threads that borrow and read, and their ends come back to the loop.

    loop thread                                      a thread of the node's lane, one fetch at a time
    store.take_fetches -> PeerMover.submit -> lane   ->  lend (control call) -> link.read -> all settled: release
    store.finish_fetches <- Mailbox <--------------------------------------- on_done, on the link's threads

Each node has a lane of its own, so one that is slow or hangs holds up nobody else's blocks. A link that fails is given up for
another kind that both nodes speak, within the fetch's deadline; then the fetch fails, and the brain asks another holder.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.errors import KVStoreError, LeaseRefused, Overloaded, PeerUnavailable
from kvstore.core.loans import Fetch, FetchDone, LoanProblem
from kvstore.link_choice import KnownLink, best_first
from kvstore.peer_control import PeerControl
from kvstore.peer_identity import Identity
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.directory import Directory, Node
from kvstore.transport.link import LEASE_NBYTES, PEER_AT_FAULT, Endpoint, Link, ReadDone, ReadExtent

logger = logging.getLogger(__name__)

Report = Callable[[Sequence[FetchDone]], None]

FETCHES_PER_NODE = 2
"""Under way at once at one node: one asks while the other reads. The blocks of two fit the queue of a link."""

IDLE_S = 30.0
"""A node of which nothing was wanted for so long: its threads end and its connections close."""

_LEND_FRACTION = (
    0.6  # of a fetch's time, in which the owner answers; and of that, in which blocks may come from its drives
)
_RELEASE_DEADLINE_S = 1.0
_LINK_GRACE_S = 2.0  # links keep their deadlines; one that has not by then breaks its contract


class _Job:
    """A fetch on its way: tells the end of each block once, whatever happens, and a second time when the first was not settled.

    `open`: blocks whose end is not told. `in_flight`: blocks that a link may write to. `failed`: open, and what ailed them on
    the last link; held back since another may do better.
    """

    def __init__(self, fetch: Fetch, report: Report) -> None:
        self.fetch = fetch
        self.until_s = time.monotonic() + fetch.deadline_s
        self.cancelled = False
        self.open = set(range(len(fetch.arena_offsets)))
        self.in_flight: set[int] = set()
        self.failed: dict[int, LoanProblem] = {}
        self._report = report
        self._changed = threading.Condition()

    @property
    def left_s(self) -> float:
        """Until its deadline."""
        return self.until_s - time.monotonic()

    def begin(self) -> list[int]:
        """Blocks to be asked of the next link, ascending: those that were asked of none, or that another may have."""
        with self._changed:
            wanted = [i for i in sorted(self.open) if self.failed.get(i) in _TRY_ANOTHER or i not in self.failed]
            for i in wanted:
                self.failed.pop(i, None)
            self.in_flight.update(wanted)
        return wanted

    def on_done(self, done: list[ReadDone]) -> None:
        """What a link tells, on its threads."""
        reports: list[FetchDone] = []
        with self._changed:
            for each in done:
                i, problem = each.read_id, None if each.problem is None else LoanProblem(each.problem)
                assert i in self.in_flight, "a link tells of a block that it was not asked for, or twice"
                if each.settled:
                    self.in_flight.discard(i)
                if i not in self.open:
                    reports.append(FetchDone(self.fetch.fetch_id, i, problem or LoanProblem.TIMEOUT))
                elif problem is not None and each.settled:
                    self.failed[i] = problem
                else:
                    self.open.discard(i)
                    reports.append(FetchDone(self.fetch.fetch_id, i, problem, each.settled))
            self._tell(reports)
            self._changed.notify_all()

    def wait(self, deadline_s: float) -> bool:
        """Until every block has ended on this link; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self.in_flight & self.open), max(0.0, deadline_s))

    def fail(self, problem: LoanProblem, blocks: Iterable[int] | None = None) -> None:
        """What is open of `blocks` (None: all) ends, with what a link said of it, or with `problem`."""
        with self._changed:
            ended = sorted(self.open if blocks is None else self.open.intersection(blocks))
            self.open.difference_update(ended)
            fetch_id, flying, failed = self.fetch.fetch_id, self.in_flight, self.failed
            self._tell([FetchDone(fetch_id, i, failed.get(i, problem), i not in flying) for i in ended])

    def _tell(self, reports: list[FetchDone]) -> None:
        """With the lock held, so that a second end of a block does not overtake the first."""
        if reports:
            self._report(reports)


@dataclass(slots=True, eq=False)
class _Lane:
    """A node of which something is wanted: what waits, its threads, its connections. Guarded by the mover's lock."""

    node_id: str
    changed: threading.Condition
    waiting: deque[_Job] = field(default_factory=deque)
    threads: set[threading.Thread] = field(default_factory=set)
    num_idle: int = 0
    control: PeerControl | None = None
    links: dict[str, KnownLink] = field(default_factory=dict)  # by name


class PeerMover:
    """Carries fetches out. `report` may be called on any thread and gets every end of a block. `endpoints` in the order of
    preference; they, the directory and the arena belong to the caller."""

    def __init__(self, directory: Directory, endpoints: Sequence[Endpoint], identity: Identity, report: Report) -> None:
        self._directory = directory
        self._endpoints: dict[str, Endpoint] = {}
        for endpoint in endpoints:
            self._endpoints.setdefault(endpoint.kind, endpoint)  # any of a kind reads from all interfaces of a node
        self._identity = identity
        self._report = report
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._jobs: dict[int, _Job] = {}  # bounded by the brain's slots
        self._stopping = False

    def submit(self, fetches: Sequence[Fetch]) -> None:
        """Never blocks."""
        for fetch in fetches:
            job = _Job(fetch, self._report)
            with self._lock:
                problem = LoanProblem.STOPPED if self._stopping else self._queue(job)
            if problem is not None:
                job.fail(problem)

    def cancel(self, fetch_ids: Collection[int]) -> None:
        """What has not begun to be read need not be. Never blocks."""
        for fetch_id in fetch_ids:
            with self._lock:
                job = self._jobs.get(fetch_id)
                if job is None:
                    continue
                job.cancelled = True
                waiting = self._lanes[job.fetch.node_id].waiting
                if job not in waiting:
                    continue
                waiting.remove(job)
                del self._jobs[fetch_id]
            job.fail(LoanProblem.CANCELLED)

    def links(self) -> Mapping[tuple[str, str], Link]:
        """By node and name (KnownLink), for metrics."""
        with self._lock:
            return {
                (lane.node_id, name): known.link for lane in self._lanes.values() for name, known in lane.links.items()
            }

    def stop(self, deadline_s: float) -> None:
        """Fetches that have not begun end with STOPPED; those under way are waited for."""
        with self._lock:
            self._stopping = True
            lanes = list(self._lanes.values())
            threads = [thread for lane in lanes for thread in lane.threads]
            for lane in lanes:
                lane.changed.notify_all()
        for lane in lanes:
            self._fail_waiting(lane, LoanProblem.STOPPED)
        until_s = time.monotonic() + deadline_s
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def check(self) -> None:
        """Everything that was submitted has ended; for tests, when it should have."""
        with self._lock:
            assert not self._jobs
            assert not any(lane.waiting for lane in self._lanes.values())

    # --- lanes ----------------------------------------------------------------------------------------------------------

    def _queue(self, job: _Job) -> LoanProblem | None:
        """With the lock held. A problem: it was not queued."""
        node_id = job.fetch.node_id
        lane = self._lanes.get(node_id)
        if lane is None:
            lane = self._lanes[node_id] = _Lane(node_id, threading.Condition(self._lock))
        if lane.num_idle > len(lane.waiting):
            lane.changed.notify()
        elif len(lane.threads) < FETCHES_PER_NODE:
            thread = threading.Thread(target=self._work, args=(lane,), name=f"kvstore-peer-{node_id}", daemon=True)
            try:
                thread.start()
            except RuntimeError as err:
                logger.warning("no thread for another fetch node=%s reason=%s", node_id, err)
                if not lane.threads:
                    return LoanProblem.OVERLOADED
            else:
                lane.threads.add(thread)
        lane.waiting.append(job)
        self._jobs[job.fetch.fetch_id] = job
        return None

    def _work(self, lane: _Lane) -> None:
        while (job := self._next(lane)) is not None:
            try:
                self._carry_out(lane, job)
            except Exception:  # outermost frame of a fetch: whatever it was, its blocks must be reported
                logger.exception("fetch crashed node=%s", lane.node_id)
            job.fail(LoanProblem.BROKEN)
            with self._lock:
                self._jobs.pop(job.fetch.fetch_id, None)

    def _next(self, lane: _Lane) -> _Job | None:
        """What is to be done; None: this thread is to end."""
        with self._lock:
            lane.num_idle += 1
            lane.changed.wait_for(lambda: lane.waiting or self._stopping, IDLE_S)
            lane.num_idle -= 1
            if lane.waiting and not self._stopping:
                return lane.waiting.popleft()
            lane.threads.discard(threading.current_thread())
            if lane.threads:
                return None
            if not lane.waiting and self._lanes.get(lane.node_id) is lane:
                del self._lanes[lane.node_id]
            control, links = lane.control, [known.link for known in lane.links.values()]
            lane.control, lane.links = None, {}
        if control is not None:
            control.close()
        for link in links:
            link.close(_LINK_GRACE_S)
        return None

    def _fail_waiting(self, lane: _Lane, problem: LoanProblem) -> None:
        with self._lock:
            jobs = list(lane.waiting)
            lane.waiting.clear()
            for job in jobs:
                del self._jobs[job.fetch.fetch_id]
        for job in jobs:
            job.fail(problem)

    # --- a fetch --------------------------------------------------------------------------------------------------------

    def _carry_out(self, lane: _Lane, job: _Job) -> None:
        fetch = job.fetch
        if job.left_s <= 0:
            job.fail(LoanProblem.OVERLOADED)  # by ourselves: nothing was asked
            return
        node = next((node for node in self._directory.nodes() if node.node_id == fetch.node_id), None)
        if node is None:
            job.fail(LoanProblem.UNREACHABLE)
            return
        control = self._control(lane, node.control_address)
        reply = self._lend(job, control)
        if isinstance(reply, LoanProblem):
            job.fail(reply)
            if reply is LoanProblem.UNREACHABLE:
                self._fail_waiting(lane, reply)  # others need not find out one by one
            return
        num_lent = reply.num_blocks - fetch.first if reply.lease_id else 0
        job.fail(LoanProblem.ABSENT, range(num_lent, len(fetch.arena_offsets)))
        if not reply.lease_id:
            return
        if job.cancelled:
            job.fail(LoanProblem.CANCELLED)
        else:
            self._read(lane, job, node, reply)
        if not job.in_flight:
            self._release(control, reply.lease_id)
        # else: something may still be read there; the owner keeps the slots until the loan's time is over

    def _lend(self, job: _Job, control: PeerControl) -> "pb.LendReply | LoanProblem":
        fetch, deadline_s = job.fetch, job.left_s * _LEND_FRACTION
        request = pb.LendRequest(
            namespace=fetch.namespace,
            keys=b"".join(fetch.keys),
            first_needed=fetch.first,
            deadline_s=deadline_s * _LEND_FRACTION,
            traceparent=fetch.traceparent,
        )
        try:
            reply = control.lend(request, deadline_s)
        except PeerUnavailable as err:
            logger.info("peer unreachable node=%s reason=%s", fetch.node_id, err.message)
            return LoanProblem.UNREACHABLE
        except (LeaseRefused, Overloaded) as err:
            logger.info("peer refused node=%s reason=%s", fetch.node_id, err.message)
            return LoanProblem.REFUSED
        except KVStoreError as err:
            logger.warning("peer answered node=%s error=%s", fetch.node_id, err.message)
            return LoanProblem.BROKEN
        if not _is_sound(reply, fetch):
            logger.warning("peer answered node=%s error=a loan that makes no sense", fetch.node_id)
            return LoanProblem.BROKEN
        return reply

    def _read(self, lane: _Lane, job: _Job, node: Node, reply: pb.LendReply) -> None:
        """Read what was lent, over one link after the other."""
        fetch = job.fetch
        offsets, generations, checksums = (
            np.frombuffer(column, "<u8").tolist() for column in (reply.offsets, reply.generations, reply.checksums)
        )
        for link in self._usable_links(lane, node, fetch.nbytes * len(offsets)):
            left_s = job.left_s
            if left_s <= 0:
                break
            batch = [
                ReadExtent(i, offsets[i], fetch.arena_offsets[i], fetch.nbytes, generations[i], checksums[i])
                for i in job.begin()
            ]
            link.read(batch, lease=reply.loan, deadline_s=left_s, on_done=job.on_done)
            if not job.wait(left_s + _LINK_GRACE_S) or not _TRY_ANOTHER.intersection(job.failed.values()):
                break
        job.fail(LoanProblem.TIMEOUT if job.left_s <= 0 else LoanProblem.UNREACHABLE)

    def _release(self, control: PeerControl, lease_id: int) -> None:
        try:
            control.release(pb.ReleaseRequest(lease_id=lease_id, outcome=pb.LOADED), _RELEASE_DEADLINE_S)
        except KVStoreError as err:  # it ends by itself
            logger.debug("loan not given back address=%s reason=%s", control.address, err.message)

    # --- connections ----------------------------------------------------------------------------------------------------

    def _control(self, lane: _Lane, address: str) -> PeerControl:
        with self._lock:
            old = lane.control
            if old is not None and old.address == address:
                return old
            control = lane.control = PeerControl(address, self._identity)
        if old is not None:
            old.close()
        return control

    def _usable_links(self, lane: _Lane, node: Node, nbytes: int) -> list[Link]:
        """Links that both speak, the best for `nbytes` first: each interface that the node describes is one."""
        links: list[KnownLink] = []
        for kind, endpoint in self._endpoints.items():
            payloads = [link.payload for link in node.links if link.kind == kind]
            for number, payload in enumerate(payloads, 1):
                name = kind if number == 1 else f"{kind} {number}"
                try:
                    links.append(self._link(lane, node, name, endpoint, payload))
                except KVStoreError as err:
                    logger.warning("no link node=%s link=%s error=%s", node.node_id, name, err.message)
        return [known.link for known in best_first(links, nbytes, time.monotonic())]

    def _link(self, lane: _Lane, node: Node, name: str, endpoint: Endpoint, payload: bytes) -> KnownLink:
        with self._lock:
            old = lane.links.get(name)
            if old is not None and old.epoch == node.epoch:
                return old
            known = lane.links[name] = KnownLink(name, node.epoch, endpoint.connect(node.node_id, payload))
        if old is not None:
            _close_later(old.link)
        return known


def _close_later(link: Link) -> None:
    """Of a node's earlier life, which another thread may still wait for. Waiting is nobody's job here."""
    threading.Thread(target=link.close, args=(_LINK_GRACE_S,), name="kvstore-link-close", daemon=True).start()


_TRY_ANOTHER = frozenset(LoanProblem(problem) for problem in PEER_AT_FAULT)


def _is_sound(reply: pb.LendReply, fetch: Fetch) -> bool:
    """Whether it lends blocks that were asked for, and tells as much of each."""
    count = reply.num_blocks - fetch.first if reply.lease_id else 0
    if reply.lease_id and not (0 < count <= len(fetch.arena_offsets) and len(reply.loan) == LEASE_NBYTES):
        return False
    return all(len(column) == 8 * count for column in (reply.offsets, reply.generations, reply.checksums))
