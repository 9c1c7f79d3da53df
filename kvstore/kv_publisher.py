"""The thread behind the KV events: numbers batches, sends them to whoever subscribed, and repeats those of late.

    loop   put(batch) ──> queue ──> thread   PUB      [topic, sequence, payload]
                                             buffer   the last payloads
                                             ROUTER   [first sequence] asked -> the buffer from there on, then -1

Frames and replay are vLLM's (vllm/distributed/kv_events.py, ZmqEventPublisher), so that its subscribers need no change. We
differ where it loses messages silently: the replay socket queues as much as the buffer holds, and who asks for what is
no longer there is heard (`on_forgotten`). A subscriber that does not read loses messages, as PUB sockets have it, and
sees a gap in the sequence numbers.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from kvstore.core.errors import ConfigError
from kvstore.core.limits import MAX_QUEUED_EVENT_BLOCKS, MAX_REPLAY_BATCHES, MAX_REPLAY_BYTES

logger = logging.getLogger(__name__)

END = b"\xff" * 8
"""The sequence number -1 behind the last batch of a replay."""

_SEQUENCE_NBYTES = 8
_SENDS_PER_LOOK = 64  # at the replay socket
_POLL_MS = 1000
_MAX_UNSENT_BATCHES = 100_000  # of a subscriber that is slow; vLLM's default


class Batch(NamedTuple):
    """What is sent as one message. `encode` runs on the thread."""

    num_blocks: int
    encode: Callable[[], bytes]


class Publisher:
    """`open` binds, `put` never blocks, `stop` ends. `on_forgotten` is called on the thread."""

    def __init__(
        self,
        address: str,
        replay_address: str = "",
        *,
        topic: str = "",
        on_forgotten: Callable[[], None] = lambda: None,
        max_queued_blocks: int = MAX_QUEUED_EVENT_BLOCKS,
        max_replay_batches: int = MAX_REPLAY_BATCHES,
        max_replay_bytes: int = MAX_REPLAY_BYTES,
    ) -> None:
        self._addresses = address, replay_address
        self._topic = topic.encode()
        self._on_forgotten = on_forgotten
        self._max_queued_blocks = max_queued_blocks
        self._buffer = _ReplayBuffer(max_replay_batches, max_replay_bytes)
        self._lock = threading.Lock()  # of the queue
        self._queue: deque[Batch] = deque()
        self._num_queued_blocks = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvstore-events", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether what is put will be sent."""
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether all that was put has been taken."""
        return not self._queue

    def open(self) -> None:
        """Bind and start. Raises ConfigError."""
        address, replay_address = self._addresses
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, "events", address, _MAX_UNSENT_BATCHES)
            self._replay = None
            if replay_address:
                queued = 2 * (self._buffer.max_batches + 1)
                self._replay = self._bind(zmq.ROUTER, "events_replay", replay_address, queued)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread.start()

    def bound(self) -> tuple[str, str]:
        """Both addresses as they were bound; "" for no replay. After `open`."""
        return _address_of(self._pub), "" if self._replay is None else _address_of(self._replay)

    def put(self, batch: Batch) -> bool:
        """Send it soon. False: there was no room for it, and what had not been sent is gone as well. An empty queue takes a
        batch of any size."""
        with self._lock:
            if self._queue and self._num_queued_blocks + batch.num_blocks > self._max_queued_blocks:
                self._queue.clear()
                self._num_queued_blocks = 0
                return False
            self._queue.append(batch)
            self._num_queued_blocks += batch.num_blocks
        os.eventfd_write(self._wake_fd, 1)
        return True

    def stop(self, deadline_s: float) -> None:
        """Send what is left, and end. Blocks; a thread that does not end keeps its sockets."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.warning("the events' thread did not end within %g s", deadline_s)
            return
        self._context.destroy(linger=0)
        os.close(self._wake_fd)

    def _bind(self, kind: int, field: str, address: str, max_unsent: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(max_unsent)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(address)
        except zmq.ZMQError as err:
            raise ConfigError(f"{field}: cannot bind {address!r}: {err.strerror}", field=field, value=address) from err
        return socket

    # --- its thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # the thread's outermost frame: `alive` tells that nothing is published any more
            logger.exception("no more events are published")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready: dict[Any, int] = dict(poller.poll(0 if self._queue else _POLL_MS))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            stopping = self._stopping  # looked at before the queue: what was put before the stop is sent
            for _ in range(_SENDS_PER_LOOK):
                if not self._send_next():
                    break
            if self._replay is not None and self._replay in ready:
                self._repeat(self._replay)
            if stopping and not self._queue:
                return

    def _send_next(self) -> bool:
        with self._lock:
            if not self._queue:
                return False
            batch = self._queue.popleft()
            self._num_queued_blocks -= batch.num_blocks
        payload = batch.encode()
        sequence = self._buffer.add(payload)
        self._pub.send_multipart((self._topic, sequence, payload))
        return True

    def _repeat(self, replay: "zmq.Socket[bytes]") -> None:
        """Answer one request: [client, "", first sequence number]."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != _SEQUENCE_NBYTES:
            logger.warning("a replay request is not understood frames=%s", [len(frame) for frame in frames])
            return
        client, _, asked = frames
        first = int.from_bytes(asked, "big")
        for sequence, payload in self._buffer.since(first):
            replay.send_multipart((client, b"", self._topic, sequence, payload))
        replay.send_multipart((client, b"", b"", END, b""))
        if first < self._buffer.first:
            self._on_forgotten()


def _address_of(socket: "zmq.Socket[bytes]") -> str:
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.decode().rstrip("\0")


class _ReplayBuffer:
    """The last payloads, by their numbers; as many as both bounds allow."""

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.max_batches = max_batches
        self._max_bytes = max_bytes
        self._payloads: deque[bytes] = deque()
        self._num_bytes = 0
        self._next = 0

    @property
    def first(self) -> int:
        """The oldest that is there."""
        return self._next - len(self._payloads)

    def add(self, payload: bytes) -> bytes:
        """Its sequence number, as it travels."""
        self._payloads.append(payload)
        self._num_bytes += len(payload)
        self._next += 1
        while len(self._payloads) > self.max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._payloads.popleft())
        return (self._next - 1).to_bytes(_SEQUENCE_NBYTES, "big")

    def since(self, first: int) -> list[tuple[bytes, bytes]]:
        """Numbers and payloads from `first` on."""
        start = self.first
        return [
            ((start + i).to_bytes(_SEQUENCE_NBYTES, "big"), payload)
            for i, payload in enumerate(self._payloads)
            if start + i >= first
        ]
