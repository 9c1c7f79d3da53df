"""A directory without a server: a fixed list of peers, each of which tells the others what it holds when it is asked."""

import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError, KVStoreError, PeerUnavailable, RemoteProtocolError
from kvstore.transport.block_log import Cursor, LogChunk
from kvstore.transport.directory import CLOSE_DEADLINE_S, DirectoryFigures, Holding, Node
from kvstore.transport.own_blocks import OwnBlocks
from kvstore.transport.snapshot import Snapshot

_log = logging.getLogger(__name__)

MAX_STATIC_PEERS = 64
"""Each asks each: 64 nodes make 4,032 questions an interval. More nodes want a server (redis_directory.py)."""

MAX_CHUNK_BYTES = 1 << 20
"""Of one answer, some 130,000 blocks; what is left is asked for at once."""

FETCH_THREADS = 8
"""Peers asked at once. One that hangs keeps its thread for a deadline in every pause of its backoff."""

BACKOFF_S = (0.2, 2.0)
"""First and longest pause before a peer that failed is asked again; doubles in between, with jitter."""


class PeerAnswer(NamedTuple):
    """What a peer says of itself, and its log from where we were."""

    node: Node
    chunk: LogChunk


Fetch = Callable[[str, Cursor, int, float], PeerAnswer]
"""(control address, cursor, max_bytes, deadline_s) -> what that peer's `StaticDirectory.serve(cursor, max_bytes)` answers.
Runs on the directory's threads, several at once; ends within the deadline; raises KVStoreError when there is no answer."""


@dataclass(slots=True)
class _Peer:
    """One of the list, and how it goes with it."""

    address: str
    node_id: str = ""  # "" until it has answered
    cursor: Cursor = Cursor()  # noqa: RUF009 - immutable
    due_s: float = 0.0
    heard_s: float = 0.0
    pause_s: float = 0.0
    is_ourselves: bool = False


class StaticDirectory:
    """See Directory. No shared state: a node is alive when it answered within `ttl_s`.

    Every `interval_s` each peer is asked for what it stored and removed since: 8 bytes a change and some 100 bytes a question.
    A peer that is new, or was restarted, is asked for all it holds: 8 bytes a block, in chunks. The list may be the same on
    all nodes; who finds itself in it passes itself over.
    """

    def __init__(
        self,
        node: Node,
        peers: Sequence[str],
        fetch: Fetch,
        *,
        interval_s: float = 0.25,
        deadline_s: float = 0.5,
        ttl_s: float = 3.0,
        clock: Clock | None = None,
    ) -> None:
        if len(peers) > MAX_STATIC_PEERS:
            raise ConfigError(
                f"peers: {len(peers)} given; use at most {MAX_STATIC_PEERS}, or a directory server",
                field="peers",
                value=len(peers),
            )
        if len(set(peers)) != len(peers):
            raise ConfigError("peers: an address is given twice", field="peers", value=",".join(peers))
        if not 0 < interval_s < ttl_s or deadline_s <= 0:
            raise ConfigError(
                f"ttl_s: {ttl_s} given with interval_s {interval_s}, deadline_s {deadline_s}; use a multiple of the interval",
                field="ttl_s",
                value=ttl_s,
            )
        self._node = node
        self._fetch = fetch
        self._interval_s, self._deadline_s, self._ttl_s = interval_s, deadline_s, ttl_s
        self._clock = clock or MonotonicClock()
        self._own = OwnBlocks(node.epoch, sample_every=node.sample_every)
        self._snapshot = Snapshot(node.node_id)
        self._peers = [_Peer(address) for address in peers]
        self._in_flight: dict[Future[PeerAnswer], _Peer] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-directory", daemon=True)
        self._sent_bytes = self._received_bytes = self._failures = 0
        self._last_refresh_s = 0.0

    def start(self) -> None:
        """See Directory."""
        self._thread.start()

    def close(self) -> None:
        """See Directory. Peers notice when the node does not answer any more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_DEADLINE_S)

    def nodes(self) -> tuple[Node, ...]:
        """See Directory."""
        return self._snapshot.nodes()

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> tuple[Holding, ...]:
        """See Directory."""
        return self._snapshot.locate(namespace, hashes)

    def publish(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See Directory."""
        self._own.publish(namespace, hashes)

    def withdraw(self, namespace: bytes, hashes: Sequence[bytes]) -> None:
        """See Directory."""
        self._own.withdraw(namespace, hashes)

    @property
    def resync_needed(self) -> bool:
        """See Directory."""
        return self._own.resync_needed

    def resync(self) -> None:
        """See Directory."""
        self._own.resync()

    def serve(self, cursor: Cursor, max_bytes: int) -> PeerAnswer:
        """What a peer that has our log up to `cursor` is to be told. Any thread; never waits."""
        chunk = self._own.log.read(cursor, min(max(max_bytes, 4096), MAX_CHUNK_BYTES))
        self._sent_bytes += len(chunk.records)
        return PeerAnswer(self._node, chunk)

    def figures(self) -> DirectoryFigures:
        """See Directory."""
        return DirectoryFigures(
            num_nodes=len(self._snapshot.nodes()),
            num_entries=self._snapshot.num_entries,
            table_nbytes=self._snapshot.nbytes,
            own_blocks=self._own.log.num_blocks(),
            sent_bytes=self._sent_bytes,
            received_bytes=self._received_bytes,
            failures=self._failures,
            resyncs=self._snapshot.num_resyncs,
            dropped_updates=self._own.dropped,
            last_refresh_s=self._last_refresh_s,
        )

    def check(self) -> None:
        """Of the parts; only while the thread is not running."""
        self._own.check()
        self._snapshot.check()

    def _run(self) -> None:
        pool = ThreadPoolExecutor(FETCH_THREADS, "kvstore-directory-fetch")
        try:
            while not self._stopping.is_set():
                self._own.take()
                if self._own.log.is_long():
                    self._own.log.compact()
                self._ask(pool)
                self._hear()
                self._let_go()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, pool: ThreadPoolExecutor) -> None:
        """Ask each peer that is due and has no question under way."""
        now_s = self._clock.now_s()
        waiting = {peer.address for peer in self._in_flight.values()}
        for peer in self._peers:
            if peer.due_s <= now_s and peer.address not in waiting and not peer.is_ourselves:
                future = pool.submit(self._fetch, peer.address, peer.cursor, MAX_CHUNK_BYTES, self._deadline_s)
                self._in_flight[future] = peer

    def _hear(self) -> None:
        """Take the answers that have come, or wait until something is due."""
        if not self._in_flight:
            self._stopping.wait(min(0.05, self._interval_s))
            return
        done, _ = wait(self._in_flight, timeout=min(0.05, self._interval_s), return_when=FIRST_COMPLETED)
        for future in done:
            peer = self._in_flight.pop(future)
            try:
                self._take_in(peer, future.result())
            except KVStoreError as err:
                self._failures += 1
                news = logging.INFO if isinstance(err, PeerUnavailable) else logging.WARNING
                level = logging.DEBUG if peer.pause_s else news
                peer.pause_s = min(max(2 * peer.pause_s, BACKOFF_S[0]), BACKOFF_S[1])
                peer.due_s = self._clock.now_s() + peer.pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
                _log.log(level, "directory: peer=%s error=%s", peer.address, err)

    def _take_in(self, peer: _Peer, answer: PeerAnswer) -> None:
        node, chunk = answer
        now_s = self._clock.now_s()
        self._received_bytes += len(chunk.records)
        if node.node_id == self._node.node_id:
            if node.epoch != self._node.epoch:
                raise ConfigError(
                    f"node_id: {peer.address} calls itself {node.node_id}, as we do; give each node a node_id of its own",
                    field="node_id",
                    value=node.node_id,
                )
            peer.is_ourselves = True
            return
        if any(other.node_id == node.node_id for other in self._peers if other is not peer):
            raise ConfigError(
                f"peers: {peer.address} says it is {node.node_id}, as another of the list does",
                field="peers",
                value=peer.address,
            )
        if self._snapshot.see(node) is None:
            raise RemoteProtocolError(
                f"node: {node.node_id} has the epoch {node.epoch}, smaller than that of its life before; it is taken up when "
                f"that has not answered for {self._ttl_s:g} s",
                field="node",
                value=node.node_id,
            )
        self._snapshot.apply(node.node_id, chunk)
        peer.node_id, peer.heard_s, peer.pause_s = node.node_id, now_s, 0.0
        peer.cursor = self._snapshot.cursor(node.node_id) or Cursor()
        is_full = not chunk.is_last and len(chunk.records) >= MAX_CHUNK_BYTES
        peer.due_s = now_s if is_full else now_s + self._interval_s
        self._last_refresh_s = now_s

    def _let_go(self) -> None:
        """Hide who has not answered for long."""
        now_s = self._clock.now_s()
        for peer in self._peers:
            if peer.node_id and now_s - peer.heard_s > self._ttl_s:
                self._snapshot.hide(peer.node_id, now_s)
                peer.node_id = ""
        self._snapshot.tidy(now_s)
