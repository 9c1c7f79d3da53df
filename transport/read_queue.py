"""The reads of one link from `read` to their end: queue, deadlines, counts. What every kind of link has in common."""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.core.limits import MAX_LINK_EXTENTS
from kvstore.transport.link import LEASE_NBYTES, LinkHealth, LinkProblem, LinkStats, OnDone, ReadDone, ReadExtent

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Batch:
    """What the extents of one `read` share."""

    lease: bytes
    ends_s: float  # deadline, by the queue's clock
    on_done: OnDone
    num_open: int


class Pending(NamedTuple):
    """An extent that was asked for and has not ended. It is in the queue, or belongs to the thread that took it."""

    extent: ReadExtent
    batch: Batch
    retried: bool = False


Ended = tuple[Pending, LinkProblem | None]
_Group = tuple[OnDone, list[ReadDone]]


class ReadQueue:
    """Extents in the order they were asked for; whoever carries them takes some and ends them.

        read -> submit -> | queue | -> take -> (in flight, the taker's) -> end -> on_done
                              |   <- put_back -|
                              +-> expire, fail, close -> on_done

    Any thread may call anything. `changed` is notified when there is something to take, and when the queue closes; its lock
    guards all state here, may be taken around several calls, and is never held over a callback.
    """

    def __init__(self, *, arena_nbytes: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.closed = False
        self._arena_nbytes = arena_nbytes
        self._monotonic = monotonic
        self._queue: deque[Pending] = deque()
        self._queue_nbytes = 0
        self._batches: set[Batch] = set()
        self._num_open = 0
        self._open_nbytes = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._nbytes = 0
        self._num_extents = 0
        self._problems: Counter[str] = Counter()
        self._last_problem: LinkProblem | None = None
        self._given_up = False

    @property
    def queued_nbytes(self) -> int:
        """Bytes that wait to be taken."""
        return self._queue_nbytes

    @property
    def has_queued(self) -> bool:
        """Whether anything waits to be taken."""
        return bool(self._queue)

    def submit(self, batch: Sequence[ReadExtent], *, lease: bytes, deadline_s: float, on_done: OnDone) -> None:
        """Link.read: queue them, or end them here with STOPPED, OVERLOADED or TIMEOUT."""
        assert len(lease) == LEASE_NBYTES
        for extent in batch:
            assert extent.nbytes > 0
            assert 0 <= extent.local_offset <= self._arena_nbytes - extent.nbytes
            assert extent.remote_offset >= 0
        if not batch:
            return
        now_s = self._monotonic()
        with self.changed:
            refused = self._refusal(len(batch), deadline_s)
            if refused is None:
                self._open(Batch(lease, now_s + deadline_s, on_done, len(batch)), batch, now_s)
                self.changed.notify()
        if refused is not None:
            self._report([(on_done, [ReadDone(extent.read_id, refused) for extent in batch])])

    def take(self, max_nbytes: int, max_extents: int) -> list[Pending]:
        """The next extents of one lease, which now are the caller's to end: at least one if there is any, and no more than
        the limits otherwise."""
        taken: list[Pending] = []
        with self.changed:
            while self._queue and len(taken) < max_extents:
                pending = self._queue[0]
                if taken and (pending.batch.lease != taken[0].batch.lease or pending.extent.nbytes > max_nbytes):
                    break
                self._queue.popleft()
                self._queue_nbytes -= pending.extent.nbytes
                max_nbytes -= pending.extent.nbytes
                taken.append(pending)
        return taken

    def put_back(self, pendings: Sequence[Pending], *, retried: bool) -> None:
        """What was taken goes to the front again. `retried`: it was asked for, so it is not tried a third time."""
        with self.changed:
            for pending in reversed(pendings):
                self._queue.appendleft(pending._replace(retried=retried or pending.retried))
                self._queue_nbytes += pending.extent.nbytes
            self.changed.notify()
            closed = self.closed
        if closed:
            self.fail(LinkProblem.STOPPED)

    def end(self, ended: Iterable[Ended], *, settled: bool = True) -> None:
        """Extents that the caller took have ended. `settled`: nobody touches their local bytes any more; otherwise `settle`
        follows."""
        self._report(self._close_books(ended, settled=settled))

    def settle(self, ended: Iterable[Ended]) -> None:
        """Extents that ended unsettled are settled now."""
        with self.changed:
            given_up = self._given_up
        if not given_up:
            self._report([(p.batch.on_done, [ReadDone(p.extent.read_id, problem)]) for p, problem in ended])

    def next_deadline_s(self) -> float:
        """Of all that is open; infinity when nothing is."""
        with self.changed:
            return min((batch.ends_s for batch in self._batches), default=math.inf)

    def expire(self) -> None:
        """What waits beyond its deadline ends with TIMEOUT. What is in flight is its taker's to look after."""
        now_s = self._monotonic()
        with self.changed:
            late = [pending for pending in self._queue if pending.batch.ends_s <= now_s]
            if not late:
                return
            self._queue = deque(pending for pending in self._queue if pending.batch.ends_s > now_s)
            self._queue_nbytes = sum(pending.extent.nbytes for pending in self._queue)
            groups = self._close_books((pending, LinkProblem.TIMEOUT) for pending in late)
        self._report(groups)

    def fail(self, problem: LinkProblem) -> None:
        """Everything that waits ends with this."""
        with self.changed:
            pendings = list(self._queue)
            self._queue.clear()
            self._queue_nbytes = 0
            groups = self._close_books((pending, problem) for pending in pendings)
        self._report(groups)

    def close(self) -> None:
        """What waits ends with STOPPED, and so does what comes later. Idempotent."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.fail(LinkProblem.STOPPED)

    def give_up(self) -> None:
        """No end is reported from here on."""
        with self.changed:
            self._given_up = True

    def stats(self) -> LinkStats:
        """Link.stats."""
        with self.changed:
            busy_s = self._busy_s + (self._monotonic() - self._busy_since_s if self._num_open else 0.0)
            problems = {name: count for name, count in self._problems.items() if count}
            return LinkStats(self._nbytes, self._num_extents, busy_s, self._open_nbytes, problems)

    def health(self, *, connected: bool) -> LinkHealth:
        """Link.health."""
        with self.changed:
            if self.closed:
                return LinkHealth("closed", "")
            if self._last_problem is not None:
                return LinkHealth("failing", f"the last read that ended: {self._last_problem}")
            return LinkHealth("ready" if connected else "idle", "")

    def check(self) -> None:
        """Every extent is counted once: waiting, or taken and open."""
        with self.changed:
            assert self._queue_nbytes == sum(pending.extent.nbytes for pending in self._queue)
            assert self._num_open == sum(batch.num_open for batch in self._batches)
            assert all(batch.num_open > 0 for batch in self._batches)
            assert len(self._queue) <= self._num_open <= MAX_LINK_EXTENTS
            assert self._queue_nbytes <= self._open_nbytes

    def _close_books(self, ended: Iterable[Ended], *, settled: bool = True) -> list[_Group]:
        """Count them, and say what to report once no lock is held."""
        groups: dict[OnDone, list[ReadDone]] = {}
        with self.changed:
            for pending, problem in ended:
                self._count(pending, problem)
                groups.setdefault(pending.batch.on_done, []).append(ReadDone(pending.extent.read_id, problem, settled))
            if not self._num_open:
                self._busy_s += self._monotonic() - self._busy_since_s if groups else 0.0
            return [] if self._given_up else list(groups.items())

    def _report(self, groups: Iterable[_Group]) -> None:
        for on_done, done in groups:
            try:
                on_done(done)
            except Exception:  # noqa: BLE001 - somebody else's bug, which must not end the thread that reads for others
                _log.exception("link: on_done crashed")

    def _refusal(self, num_extents: int, deadline_s: float) -> LinkProblem | None:
        if self.closed:
            return LinkProblem.STOPPED
        problem = LinkProblem.TIMEOUT if deadline_s <= 0 else None
        if self._num_open + num_extents > MAX_LINK_EXTENTS:
            problem = LinkProblem.OVERLOADED
        if problem is not None:
            self._problems[problem] += num_extents
        return problem

    def _open(self, batch: Batch, extents: Sequence[ReadExtent], now_s: float) -> None:
        if not self._num_open:
            self._busy_since_s = now_s
        self._batches.add(batch)
        self._queue.extend(Pending(extent, batch) for extent in extents)
        nbytes = sum(extent.nbytes for extent in extents)
        self._queue_nbytes += nbytes
        self._open_nbytes += nbytes
        self._num_open += len(extents)

    def _count(self, pending: Pending, problem: LinkProblem | None) -> None:
        batch = pending.batch
        batch.num_open -= 1
        if not batch.num_open:
            self._batches.remove(batch)
        self._num_open -= 1
        self._open_nbytes -= pending.extent.nbytes
        if problem is None:
            self._nbytes += pending.extent.nbytes
            self._num_extents += 1
        elif problem is not LinkProblem.STOPPED:
            self._problems[problem] += 1
        if problem is not LinkProblem.STOPPED:
            self._last_problem = problem


def is_right(extent: ReadExtent, arena: memoryview) -> bool:
    """Whether the local bytes are those of the checksum, if there is one. Releases the GIL for what is large."""
    if extent.checksum is None:
        return True
    return xxh3_64_intdigest(arena[extent.local_offset : extent.local_offset + extent.nbytes]) == extent.checksum
