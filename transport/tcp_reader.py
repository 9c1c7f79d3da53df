"""The reader's side of the TCP link: several connections that take extents from one queue and fill the arena."""

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import LINK_IDLE_S, LINK_REQUEST_BYTES, LINK_WINDOW_REQUESTS, MAX_LINK_REQUEST_EXTENTS
from kvstore.transport import link_frames as frames
from kvstore.transport.link import LinkHealth, LinkProblem, LinkStats, OnDone, ReadExtent
from kvstore.transport.read_queue import Pending, ReadQueue, is_right
from kvstore.transport.tcp_socket import LinkFailure, LinkSocket

_log = logging.getLogger(__name__)

_STREAM_BYTES = 4 << 20
"""Queued bytes for which another connection is worth its handshake."""
_STREAM_RETRY_S = 1.0
"""Pause after another connection could not be made while there are some."""
_TEND_AGAIN_S = 0.002
_WHOLE_PEER = frozenset({LinkProblem.GONE, LinkProblem.BROKEN, LinkProblem.SHORT})
"""Problems of one connection after which nothing that waits is asked of that peer."""


class TcpLink:
    """A Link (transport/link.py). Its connections are made by `tend`, which somebody must call when `poke` is called, and
    when the time comes that the last `tend` named: it also ends what is overdue."""

    def __init__(
        self,
        peer: str,
        connect: Callable[[], LinkSocket],
        *,
        arena: memoryview,
        poke: Callable[[float], None],
        max_streams: int,
    ) -> None:
        assert max_streams > 0
        self.peer = peer
        self._connect = connect
        self._arena = arena
        self._poke = poke
        self._max_streams = max_streams
        self._reads = ReadQueue(arena_nbytes=arena.nbytes)
        self._streams: list[_Stream] = []  # guarded by the queue's lock
        self._no_stream_before_s = 0.0

    def read(self, batch: Sequence[ReadExtent], *, lease: bytes, deadline_s: float, on_done: OnDone) -> None:
        """Link.read."""
        self._reads.submit(batch, lease=lease, deadline_s=deadline_s, on_done=on_done)
        if self._missing_streams() and not self._reads.closed:
            self._poke(-math.inf)
        else:
            self._poke(time.monotonic() + deadline_s)

    def health(self) -> LinkHealth:
        """Link.health."""
        with self._reads.changed:
            connected = any(stream.connected for stream in self._streams)
        return self._reads.health(connected=connected)

    def stats(self) -> LinkStats:
        """Link.stats."""
        return self._reads.stats()

    @property
    def gone(self) -> bool:
        """Closed, and its threads have ended."""
        with self._reads.changed:
            return self._reads.closed and not self._streams

    def check(self) -> None:
        """Nothing is counted twice or lost."""
        self._reads.check()
        with self._reads.changed:
            assert len(self._streams) <= self._max_streams

    def close(self, deadline_s: float) -> bool:
        """Link.close."""
        ends_s = time.monotonic() + deadline_s
        self._reads.close()
        with self._reads.changed:
            streams = list(self._streams)
            for stream in streams:
                stream.stop(LinkProblem.STOPPED)
        reading = [stream for stream in streams if stream.connected]  # who still connects will touch no arena
        for stream in reading:
            stream.join(max(0.0, ends_s - time.monotonic()))
        gone = not any(stream.is_alive() for stream in reading)
        if not gone:
            self._reads.give_up()
        return gone

    def tend(self) -> float:
        """Make connections that are wanted, end what is overdue; when to come again. One thread calls."""
        self._reads.expire()
        now_s = time.monotonic()
        with self._reads.changed:
            for stream in self._streams:
                if stream.is_overdue(now_s):
                    stream.stop(LinkProblem.TIMEOUT)
            self._begin_streams(now_s)
            again_s = self._no_stream_before_s if self._reads.has_queued else 0.0
        soon_s = now_s + _TEND_AGAIN_S  # a thread that was told to stop may still be on its way
        return min(max(self._reads.next_deadline_s(), soon_s), again_s if again_s > now_s else math.inf)

    def _begin_streams(self, now_s: float) -> None:
        for _ in range(self._missing_streams()):
            stream = _Stream(self, self._reads)
            try:
                stream.start()
            except RuntimeError as err:
                _log.warning("link to %s: no thread for another connection: %s", self.peer, err)
                self._no_stream_before_s = now_s + _STREAM_RETRY_S
                return
            self._streams.append(stream)

    def _missing_streams(self) -> int:
        with self._reads.changed:
            if not self._reads.has_queued or self._reads.closed or time.monotonic() < self._no_stream_before_s:
                return 0
            wanted = min(self._max_streams, 1 + self._reads.queued_nbytes // _STREAM_BYTES)
            return max(0, wanted - len(self._streams))

    # --- what streams need --------------------------------------------------------------------------------------------

    def _ended(self, stream: "_Stream", failure: LinkFailure | None) -> None:
        """A stream is over. Whether what waits can still be read is decided here."""
        with self._reads.changed:
            self._streams.remove(stream)
            if failure is None or failure.problem is LinkProblem.STOPPED:
                hopeless = False
            elif stream.connected:
                hopeless = failure.problem in _WHOLE_PEER
            else:
                hopeless = not any(other.connected for other in self._streams)
                if not hopeless:
                    self._no_stream_before_s = time.monotonic() + _STREAM_RETRY_S
        if failure is not None and hopeless:
            _log.info("link to %s: %s: %s", self.peer, failure.problem, failure)
            self._reads.fail(failure.problem)
        if self._reads.has_queued:
            self._poke(-math.inf)


class _Request(NamedTuple):
    """Extents in flight that are answered together."""

    request_id: int
    pendings: list[Pending]
    ends_s: float  # the earliest deadline of them


class _Stream(threading.Thread):
    """One connection and its thread: asks for extents, a window ahead, and receives them in order."""

    def __init__(self, link: TcpLink, reads: ReadQueue) -> None:
        super().__init__(name=f"kvstore-tcp-{link.peer}", daemon=True)
        self.connected = False
        self._link = link
        self._reads = reads
        self._arena = link._arena  # noqa: SLF001 - a part of the link, in a thread of its own
        self._request_ids = itertools.cycle(range(frames.MAX_REQUEST_ID + 1))
        self._marks = memoryview(bytearray(frames.head_nbytes(MAX_LINK_REQUEST_EXTENTS)))
        self._was_idle = False  # nothing has come since the connection was last idle: it may have ended meanwhile

        # Guarded by the queue's lock.
        self._sock: LinkSocket | None = None
        self._in_flight: deque[_Request] = deque()
        self._verdict: LinkProblem | None = None

    def stop(self, problem: LinkProblem) -> None:
        """With the queue's lock held: end, and end what is in flight with this."""
        if self._verdict is None:
            self._verdict = problem
        if self._sock is not None:
            self._sock.interrupt()
        self._reads.changed.notify_all()

    def is_overdue(self, now_s: float) -> bool:
        """With the queue's lock held: is the deadline of anything in flight over?"""
        return any(request.ends_s <= now_s for request in self._in_flight)

    def run(self) -> None:
        """Until the connection fails, is idle for long, or is stopped."""
        failure: LinkFailure | None = None
        try:
            self._work()
        except LinkFailure as err:
            failure = err
        except RemoteProtocolError as err:
            failure = LinkFailure(LinkProblem.BROKEN, err.message)
        except Exception:  # noqa: BLE001 - outermost frame of a connection: logged, its reads end as if the peer were gone
            _log.exception("link to %s: a connection's thread crashed", self._link.peer)
            failure = LinkFailure(LinkProblem.GONE, "a connection's thread crashed")
        finally:
            self._finish(failure)

    def _work(self) -> None:
        sock = self._link._connect()  # noqa: SLF001 - as above
        with self._reads.changed:
            self._sock = sock
            self.connected = self._verdict is None
        while self._ask(sock):
            self._receive(sock)

    def _finish(self, failure: LinkFailure | None) -> None:
        with self._reads.changed:
            sock, self._sock = self._sock, None
            left = [pending for request in self._in_flight for pending in request.pendings]
            self._in_flight.clear()
            if self._verdict is not None:
                failure = LinkFailure(self._verdict, "stopped by this side")
        if sock is not None:
            sock.close()
        problem = failure.problem if failure else None
        stale = problem is LinkProblem.GONE and self._was_idle and self.connected
        if stale:
            failure = None  # the connection had ended while it was idle, which says nothing of the peer
        now_s = time.monotonic()
        late = problem is LinkProblem.TIMEOUT
        again = [p for p in left if not p.retried and (stale or (late and p.batch.ends_s > now_s))]
        again_ids = set(map(id, again))
        self._reads.put_back(again, retried=True)
        self._reads.end([(p, problem or LinkProblem.GONE) for p in left if id(p) not in again_ids])
        self._link._ended(self, failure)  # noqa: SLF001 - as above

    # --- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, sock: LinkSocket) -> bool:
        """Ask ahead, and wait when there is nothing to ask. False: idle for long."""
        while True:
            with self._reads.changed:
                if self._verdict is not None:
                    raise LinkFailure(self._verdict, "stopped by this side")
                request = self._take()
                if request is None and self._in_flight:
                    return True
                if request is None:
                    self._was_idle = True
                    if not self._reads.changed.wait(LINK_IDLE_S) and not self._reads.has_queued:
                        return False
                    continue
                if self._reads.has_queued:
                    self._reads.changed.notify()  # so as many wake as have something to do
            if self._was_idle and len(self._in_flight) == 1 and not sock.is_quiet():
                self._forget(request)
                raise LinkFailure(LinkProblem.GONE, "the connection ended while it was idle")
            self._send(sock, request)

    def _take(self) -> _Request | None:
        if len(self._in_flight) >= LINK_WINDOW_REQUESTS:
            return None
        share = self._reads.queued_nbytes // len(self._link._streams)  # noqa: SLF001 - as above
        pendings = self._reads.take(min(LINK_REQUEST_BYTES, share), MAX_LINK_REQUEST_EXTENTS)
        if not pendings:
            return None
        request = _Request(next(self._request_ids), pendings, min(pending.batch.ends_s for pending in pendings))
        self._in_flight.append(request)
        return request

    def _forget(self, request: _Request) -> None:
        """It is all that is in flight, and was not sent."""
        with self._reads.changed:
            self._in_flight.clear()
        self._reads.put_back(request.pendings, retried=False)

    def _send(self, sock: LinkSocket, request: _Request) -> None:
        extents = [pending.extent for pending in request.pendings]
        checked = all(extent.checksum is not None for extent in extents)
        lease = request.pendings[0].batch.lease
        asked = [extent.remote for extent in extents]
        sock.send([frames.encode_request(request.request_id, lease, asked, checked=checked)])

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive(self, sock: LinkSocket) -> None:
        """The reply to the oldest request in flight."""
        request = self._in_flight[0]
        num_extents = len(request.pendings)
        head_raw = self._marks[: frames.head_nbytes(num_extents)]
        sock.recv_exactly(head_raw)
        self._was_idle = False
        head = frames.decode_head(head_raw, request.request_id)
        granted = [p.extent for p, problem in zip(request.pendings, head.problems, strict=True) if problem is None]
        _require_size(head.nbytes, sum(extent.nbytes for extent in granted))
        tail_raw = self._marks[: frames.tail_nbytes(num_extents)]
        into = [self._arena[extent.local_offset : extent.local_offset + extent.nbytes] for extent in granted]
        if sock.recv([*into, tail_raw]) < head.nbytes + tail_raw.nbytes:
            raise LinkFailure(LinkProblem.GONE, "the connection ended within a reply")
        tail = frames.decode_tail(tail_raw, request.request_id)
        ended = [
            (pending, self._verify(pending, before or after))
            for pending, before, after in zip(request.pendings, head.problems, tail.problems, strict=True)
        ]
        with self._reads.changed:
            self._in_flight.popleft()
        self._reads.end(ended)

    def _verify(self, pending: Pending, problem: LinkProblem | None) -> LinkProblem | None:
        if problem is None and not is_right(pending.extent, self._arena):
            return LinkProblem.CORRUPT
        return problem


def _require_size(nbytes: int, expected_nbytes: int) -> None:
    if nbytes != expected_nbytes:
        problem = LinkProblem.SHORT if nbytes < expected_nbytes else LinkProblem.BROKEN
        raise LinkFailure(problem, f"head size: {nbytes} is not right; expected {expected_nbytes}")
