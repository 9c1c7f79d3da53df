"""Between the brain and the other nodes: fetches go out to threads that borrow and read, and their ends come back to the loop.

    loop thread                                        a worker thread, one fetch at a time
    store.take_fetches -> PeerMover.pump -> queue  ->  lend (control call) -> link.read -> all settled: release
    store.finish_fetches <- Mailbox <--------------------------------------- on_done, on the link's threads

A link that fails is given up for another kind that both nodes speak, within the fetch's deadline; then the fetch fails, and the
brain asks another holder.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.core.errors import KVStoreError, LeaseRefused, Overloaded, PeerUnavailable
from kvstore.core.loans import Fetch, FetchDone, LoanProblem
from kvstore.peer_control import Identity, PeerControl
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.directory import Directory, Node
from kvstore.transport.link import PEER_AT_FAULT, Endpoint, Link, LinkProblem, ReadDone, ReadExtent

logger = logging.getLogger(__name__)

NUM_WORKERS = 8
"""Fetches under way at once; each is mostly a wait for an answer."""

_LEND_FRACTION = 0.5  # of a fetch's time, in which the owner answers what it lends
_RELEASE_DEADLINE_S = 1.0
_STOP_DEADLINE_S = 2.0


@dataclass(slots=True)
class _Read:
    """What a fetch has out on links. `open`: blocks whose end is not told; `unsettled`: told, but their bytes may change yet."""

    fetch: Fetch
    open: set[int]
    unsettled: set[int] = field(default_factory=set)
    failed: dict[int, LoanProblem] = field(default_factory=dict)  # on this link, and not told yet
    changed: threading.Condition = field(default_factory=threading.Condition)


class PeerMover:
    """Carries fetches out. `report` may be called on any thread and gets every end of a block. `endpoints` in the order of
    preference; they, the directory and the arena belong to the caller."""

    def __init__(
        self,
        directory: Directory,
        endpoints: Sequence[Endpoint],
        identity: Identity,
        report: Callable[[Sequence[FetchDone]], None],
    ) -> None:
        self._directory = directory
        self._endpoints = {endpoint.kind: endpoint for endpoint in endpoints}
        self._identity = identity
        self._report = report
        self._fetches: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()  # bounded by the brain's slots
        self._cancelled: set[int] = set()
        self._lock = threading.Lock()
        self._controls: dict[str, PeerControl] = {}  # by address
        self._links: dict[tuple[str, int, str], Link] = {}  # by node, epoch, kind
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"kvstore-peer-{i}", daemon=True) for i in range(NUM_WORKERS)
        ]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def submit(self, fetches: Sequence[Fetch]) -> None:
        """Never blocks."""
        for fetch in fetches:
            self._fetches.put(fetch)

    def cancel(self, fetch_ids: Sequence[int]) -> None:
        """What has not begun to be read need not be. Never blocks."""
        self._cancelled.update(fetch_ids)

    def links(self) -> Mapping[tuple[str, str], Link]:
        """By node and kind, for metrics."""
        with self._lock:
            return {(node_id, kind): link for (node_id, _, kind), link in self._links.items()}

    def stop(self, deadline_s: float) -> None:
        """Fetches that have not begun end with STOPPED; those under way are waited for."""
        self._stopping = True
        for _ in self._threads:
            self._fetches.put(None)
        until_s = time.monotonic() + deadline_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            controls, self._controls = list(self._controls.values()), {}
        for control in controls:
            control.close()

    # --- worker threads -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (fetch := self._fetches.get()) is not None:
            try:
                self._carry_out(fetch)
            except Exception:  # outermost frame of a fetch: whatever it was, its blocks must be reported
                logger.exception("fetch crashed node=%s", fetch.node_id)
                self._fail(fetch, range(len(fetch.arena_offsets)), LoanProblem.BROKEN)

    def _carry_out(self, fetch: Fetch) -> None:
        until_s = time.monotonic() + fetch.deadline_s
        everything = range(len(fetch.arena_offsets))
        if self._stopping or fetch.fetch_id in self._cancelled:
            self._cancelled.discard(fetch.fetch_id)
            self._fail(fetch, everything, LoanProblem.STOPPED if self._stopping else LoanProblem.CANCELLED)
            return
        node = next((node for node in self._directory.nodes() if node.node_id == fetch.node_id), None)
        if node is None:
            self._fail(fetch, everything, LoanProblem.UNREACHABLE)
            return
        control = self._control(node.control_address)
        reply = self._lend(fetch, control)
        if isinstance(reply, LoanProblem):
            self._fail(fetch, everything, reply)
            return
        num_lent = max(0, min(reply.num_blocks - fetch.first, len(everything)))
        self._fail(fetch, everything[num_lent:], LoanProblem.ABSENT)
        if not reply.lease_id:
            return
        settled = self._read(fetch, node, reply, num_lent, until_s)
        if settled:
            self._release(control, reply.lease_id)
        # else: something may still be read there; the owner keeps the slots until the loan's time is over

    def _lend(self, fetch: Fetch, control: PeerControl) -> "pb.LendReply | LoanProblem":
        deadline_s = fetch.deadline_s * _LEND_FRACTION
        request = pb.LendRequest(
            namespace=fetch.namespace,
            keys=b"".join(fetch.keys),
            first_needed=fetch.first,
            deadline_s=deadline_s * _LEND_FRACTION,
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
        return reply if _is_sound(reply, fetch) else LoanProblem.BROKEN

    def _read(self, fetch: Fetch, node: Node, reply: pb.LendReply, num_lent: int, until_s: float) -> bool:
        """Read what was lent, over one link after the other; whether nothing of it is in flight any more."""
        offsets, generations, checksums = (
            np.frombuffer(column, "<u8").tolist() for column in (reply.offsets, reply.generations, reply.checksums)
        )
        state = _Read(fetch, set(range(num_lent)))
        for link in self._usable_links(node):
            left_s = until_s - time.monotonic()
            if not state.open or left_s <= 0:
                break
            batch = [
                ReadExtent(i, offsets[i], fetch.arena_offsets[i], fetch.nbytes, generations[i], checksums[i])
                for i in sorted(state.open)
            ]
            state.failed.clear()
            link.read(batch, lease=reply.loan, deadline_s=left_s, on_done=lambda done: self._on_done(state, done))
            self._await(state, left_s + _STOP_DEADLINE_S)
            if not any(problem in _TRY_ANOTHER for problem in state.failed.values()):
                break
        with state.changed:
            left = {i: state.failed.get(i, LoanProblem.UNREACHABLE) for i in state.open}
            state.open.clear()
        for problem in set(left.values()):
            self._fail(fetch, [i for i, each in left.items() if each is problem], problem)
        return not state.unsettled

    def _on_done(self, state: _Read, done: list[ReadDone]) -> None:
        """On a link's thread. Failures are held back, since another link may do better, but for what is not settled."""
        reports: list[FetchDone] = []
        fetch_id = state.fetch.fetch_id
        with state.changed:
            for each in done:
                i = each.read_id
                if i in state.unsettled:
                    state.unsettled.discard(i)
                    reports.append(FetchDone(fetch_id, i, LoanProblem(each.problem or LinkProblem.TIMEOUT)))
                elif each.problem is None:
                    state.open.discard(i)
                    reports.append(FetchDone(fetch_id, i))
                elif each.settled:
                    state.failed[i] = LoanProblem(each.problem)
                else:
                    state.open.discard(i)
                    state.unsettled.add(i)
                    reports.append(FetchDone(fetch_id, i, LoanProblem(each.problem), settled=False))
            state.changed.notify_all()
        if reports:
            self._report(reports)

    @staticmethod
    def _await(state: _Read, deadline_s: float) -> None:
        """Until every block of the batch has ended on this link; links keep their deadlines."""
        until_s = time.monotonic() + deadline_s
        with state.changed:
            while state.open - state.failed.keys() and (left_s := until_s - time.monotonic()) > 0:
                state.changed.wait(left_s)

    def _release(self, control: PeerControl, lease_id: int) -> None:
        try:
            control.release(pb.ReleaseRequest(lease_id=lease_id, outcome=pb.LOADED), _RELEASE_DEADLINE_S)
        except KVStoreError as err:  # it ends by itself
            logger.debug("loan not given back address=%s reason=%s", control.address, err.message)

    def _fail(self, fetch: Fetch, indices: Sequence[int], problem: LoanProblem) -> None:
        if len(indices):
            self._report([FetchDone(fetch.fetch_id, i, problem) for i in indices])

    # --- connections ----------------------------------------------------------------------------------------------------

    def _control(self, address: str) -> PeerControl:
        with self._lock:
            return self._controls.setdefault(address, PeerControl(address, self._identity))

    def _usable_links(self, node: Node) -> list[Link]:
        """Links that both speak, ours first in preference, those that fail now last."""
        links = []
        for kind, endpoint in self._endpoints.items():
            payload = next((link.payload for link in node.links if link.kind == kind), None)
            if payload is not None:
                links.append(self._link(node, kind, endpoint, payload))
        return sorted(links, key=lambda link: link.health().state == "failing")

    def _link(self, node: Node, kind: str, endpoint: Endpoint, payload: bytes) -> Link:
        key = (node.node_id, node.epoch, kind)
        with self._lock:
            if key not in self._links:
                for old in [k for k in self._links if k[0] == node.node_id and k[2] == kind]:
                    self._close_later(self._links.pop(old))
                self._links[key] = endpoint.connect(node.node_id, payload)
            return self._links[key]

    @staticmethod
    def _close_later(link: Link) -> None:
        """Of a node's earlier life. Waiting for it is nobody's job here."""
        threading.Thread(target=link.close, args=(_STOP_DEADLINE_S,), name="kvstore-link-close", daemon=True).start()


_TRY_ANOTHER = frozenset(LoanProblem(problem) for problem in PEER_AT_FAULT)


def _is_sound(reply: pb.LendReply, fetch: Fetch) -> bool:
    """Whether the columns are as long as it says."""
    count = reply.num_blocks - fetch.first if reply.lease_id else 0
    if reply.lease_id and not 0 < count <= len(fetch.arena_offsets):
        return False
    return all(len(column) == 8 * count for column in (reply.offsets, reply.generations, reply.checksums))
