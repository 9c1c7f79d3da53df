"""A directory on a Redis or Valkey server, single or a cluster: heartbeats with a time to live, and each node's log of blocks.

    kvstore:{<cluster>}:alive, nodes, heads, ...       who is alive, where its log stands       redis_beat.py
    kvstore:<cluster>:log:<node>:<epoch>:<generation>  its log, a string that only it appends to    block_log.py

Every node keeps the logs of all others as its snapshot, and reads of each what was appended since: 8 bytes a change. The reply
to APPEND and STRLEN says how long the log is; another length than ours means that the server lost something (killed,
failed over, expired), and the log is written again as the next generation. Whoever had followed it to its end goes on
from there. benchmarks/directory_scale.py has formulas and figures for 10, 100 and 1,000 nodes.
"""

import logging
import random
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from kvstore.core.clock import Clock, MonotonicClock
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.transport.block_log import RECORD_NBYTES, Cursor, Head, LogChunk
from kvstore.transport.directory import CLOSE_DEADLINE_S, DirectoryFigures, Holding, Node
from kvstore.transport.own_blocks import OwnBlocks
from kvstore.transport.redis_beat import Beat, BeatAnswer
from kvstore.transport.snapshot import Snapshot

_log = logging.getLogger(__name__)

MAX_APPEND_BYTES = 256 << 10
"""Of one APPEND; a server serves others between two."""

MAX_APPENDS_PER_TURN = 64
"""16 MiB, two million blocks. The rest of a large base follows in the next turn, before a word of it is published."""

MAX_FETCH_BYTES = 1 << 20
"""Of one node's log in a turn."""

MAX_TURN_BYTES = 8 << 20
"""Of all logs in a turn. What is left is read in the next; the node that comes first moves on each time."""

LOG_TTL_S = 60.0
"""A log that its node has not touched for so long goes. One that was replaced stays so long for those that are behind."""

INTERVAL_PER_NODE_S = 0.005
"""A turn in a large cluster is as long as this times its nodes: the server's work grows with their square."""

TTL_TURNS = 4
"""A node may miss so many turns and is alive still."""

BACKOFF_S = (0.1, 2.0)
"""First and longest pause after a call that failed; doubles in between, with jitter."""

Client = redis.Redis | redis.cluster.RedisCluster
Connect = Callable[[], Client]
_FAILURES = (RedisError, RedisClusterException, OSError)


def connector(*urls: str, is_cluster: bool = False, deadline_s: float = 0.5) -> Connect:
    """What makes a client for `redis://`, `rediss://` or `unix://`; of a cluster, for any of its servers that answers. Each call
    of the client ends when nothing has come for `deadline_s`. Raises ConfigError for a URL that is none; connects only when
    called."""
    for url in urls:
        _check_url(url, ("redis", "rediss") if is_cluster else ("redis", "rediss", "unix"))
    if not urls or (len(urls) > 1 and not is_cluster):
        raise ConfigError(
            f"directory: {len(urls)} given; use one, or several of a cluster", field="directory", value=len(urls)
        )
    options: dict[str, Any] = {
        "socket_timeout": deadline_s,
        "socket_connect_timeout": deadline_s,
        "retry": Retry(NoBackoff(), 0),  # a failure is ours to see: it may mean a restarted server
    }
    if not is_cluster:
        return lambda: redis.Redis.from_url(urls[0], **options)
    servers = [(place.hostname or "localhost", place.port or 6379) for place in map(urlsplit, urls)]
    return lambda: redis.cluster.RedisCluster(
        url=urls[0],
        startup_nodes=[redis.cluster.ClusterNode(*server) for server in servers],  # type: ignore[no-untyped-call]
        **options,
    )


def _check_url(url: str, schemes: Sequence[str]) -> None:
    """Raises ConfigError, in which there is nothing that may be a password."""
    scheme, is_url, _ = url.partition("://")
    right = f"{'://, '.join(schemes)}://"
    if is_url and scheme in schemes:
        try:
            redis.ConnectionPool.from_url(url).make_connection()  # which does not connect
        except (ValueError, TypeError):
            right = "a number as port, options that the client knows, and %XX for what is odd in a password"
        else:
            return
    place = url.rpartition("@")[2].partition("?")[0] if "@" in url else f"{scheme}://..." if is_url else "no URL"
    raise ConfigError(f"directory: {place!r} is not right; use {right}", field="directory", value=place) from None


class RedisDirectory:
    """See Directory. `node.node_id` and `cluster` are made of letters, digits and `. _ -`.

    A turn: queue -> log -> server; "alive" and what has changed <- server; others' logs <- server. Turns are `interval_s`
    apart, in a large cluster more. Without the server the others stay as last known; after it is back, those that are not
    yet there again have `ttl_s` to come.
    """

    def __init__(
        self,
        node: Node,
        connect: Connect,
        *,
        cluster: str = "default",
        interval_s: float = 0.2,
        ttl_s: float = 3.0,
        clock: Clock | None = None,
    ) -> None:
        for field, value in (("node_id", node.node_id), ("cluster", cluster)):
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", value):
                raise ConfigError(
                    f"{field}: {value!r} given; use 1 to 128 of letters, digits and . _ -", field=field, value=value
                )
        if not 0 < TTL_TURNS * interval_s <= ttl_s:
            raise ConfigError(
                f"ttl_s: {ttl_s} given; use at least {TTL_TURNS} times interval_s ({interval_s})",
                field="ttl_s",
                value=ttl_s,
            )
        self._node = node
        self._connect = connect
        self._cluster = cluster
        self._interval_s, self._ttl_s = interval_s, ttl_s
        self._clock = clock or MonotonicClock()
        self._own = OwnBlocks(node.epoch, sample_every=node.sample_every)
        self._snapshot = Snapshot(node.node_id)
        self._beat = Beat(cluster, node)
        self._client: Client | None = None
        self._sent = Cursor(node.epoch)  # how much of our log the server has for certain
        self._told = Head(node.epoch, 0, -1, 0, 0)  # where our log stands as the others are told
        self._heads: dict[str, Head] = {}
        self._descriptions: dict[str, Node] = {}
        self._unconfirmed: dict[
            str, float
        ] = {}  # node id -> until when it counts as alive, after a whole list without it
        self._from_start: set[str] = set()  # followers that found less of an old generation than there should be
        self._turn = 0
        self._pause_s = 0.0
        self._retry_at_s = 0.0
        self._is_superseded = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-directory", daemon=True)
        self._sent_bytes = self._received_bytes = self._failures = self._rewrites = 0
        self._last_refresh_s = 0.0

    @property
    def is_superseded(self) -> bool:
        """A later life of the same node id is there: ours is told to nobody any more."""
        return self._is_superseded

    def start(self) -> None:
        """See Directory."""
        self._thread.start()

    def close(self) -> None:
        """See Directory."""
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
            resyncs=self._snapshot.num_resyncs + self._rewrites,
            dropped_updates=self._own.dropped,
            last_refresh_s=self._last_refresh_s,
        )

    def check(self) -> None:
        """Of the parts; only while the thread is not running."""
        self._own.check()
        self._snapshot.check()
        assert self._told.end <= self._sent.offset or self._told.generation < self._sent.generation

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._own.take()
            if self._clock.now_s() >= self._retry_at_s:
                try:
                    self._refresh()
                    self._pause_s = 0.0
                except (*_FAILURES, KVStoreError) as err:
                    self._fail(err)
                except Exception as err:  # noqa: BLE001 - outermost frame; a bug must not end sharing for good
                    _log.exception("directory: a turn crashed")
                    self._fail(err)
            self._snapshot.tidy(self._clock.now_s())
            self._stopping.wait(self._turn_s())
        self._leave()

    def _turn_s(self) -> float:
        return max(self._interval_s, INTERVAL_PER_NODE_S * len(self._heads))

    def _fail(self, err: Exception) -> None:
        """Whatever it was: the next attempt has a new connection and trusts nothing that the server had."""
        self._failures += 1
        self._pause_s = min(max(2 * self._pause_s, BACKOFF_S[0]), BACKOFF_S[1])
        self._retry_at_s = self._clock.now_s() + self._pause_s * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
        if self._failures == 1 or self._pause_s == BACKOFF_S[0]:
            _log.warning("directory: error=%s; others stay as last known, next attempt in %.1f s", err, self._pause_s)
        self._beat.forget()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _refresh(self) -> None:
        client = self._client = self._client or self._connect()
        if not self._is_superseded:
            self._send(client)
        ttl_s = max(self._ttl_s, TTL_TURNS * self._turn_s())
        answer = self._beat.say(client.eval, self._told, ttl_s)
        if answer.is_superseded and not self._is_superseded:
            _log.error(
                "directory: node=%s epoch=%d has a later life; publishing stops", self._node.node_id, self._node.epoch
            )
        self._is_superseded = answer.is_superseded
        self._hear(answer, ttl_s)
        self._follow(client)
        self._last_refresh_s = self._clock.now_s()

    def _send(self, client: Client) -> None:
        """Bring the server's copy of our log to where ours is, or begin a new one."""
        log = self._own.log
        key = self._key(self._node.node_id, self._sent)
        if (
            self._sent.generation == log.head.generation
            and self._length(client, key) != self._sent.offset * RECORD_NBYTES
        ):
            self._rewrites += 1
            log.compact(at=min(self._sent.offset, log.head.end))
        elif log.is_long():
            log.compact(at=self._sent.offset if self._sent.generation == log.head.generation else None)
        if self._sent.generation != log.head.generation:
            self._sent = log.head.start()
            client.delete(self._key(self._node.node_id, self._sent))
        for _ in range(MAX_APPENDS_PER_TURN):
            chunk = log.read(self._sent, MAX_APPEND_BYTES)
            if not chunk.records:
                break
            self._append(client, chunk)
        if self._sent.offset >= log.head.base:
            self._told = log.head._replace(end=self._sent.offset)

    def _append(self, client: Client, chunk: LogChunk) -> None:
        length: Any = client.append(self._key(self._node.node_id, chunk.at), chunk.records)
        self._sent_bytes += len(chunk.records)
        if length != chunk.after.offset * RECORD_NBYTES:
            raise KVStoreError(f"directory: our log is {length} bytes long, not {chunk.after.offset * RECORD_NBYTES}")
        self._sent = chunk.after

    def _length(self, client: Client, key: str) -> int:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.strlen(key)
            pipeline.pexpire(key, int(LOG_TTL_S * 1000))
            length: int | Exception = pipeline.execute(raise_on_error=False)[0]
        if isinstance(length, ResponseError):
            return -1  # somebody made it a list: as good as lost
        if isinstance(length, Exception):
            raise length
        return length

    def _hear(self, answer: BeatAnswer, ttl_s: float) -> None:
        """Who is there, who has gone. A list without somebody we know, from a server that was restarted, is no proof."""
        now_s = self._clock.now_s()
        self._received_bytes += answer.nbytes
        self._failures += len(answer.rubbish)
        for wrong in answer.rubbish:
            _log.warning("directory: passed over %s", wrong)
        for node_id, head, node in answer.changes:
            if node is not None:
                self._descriptions[node_id] = node
            if node_id in self._descriptions:
                self._heads[node_id] = head
                self._snapshot.see(self._descriptions[node_id])
            self._unconfirmed.pop(node_id, None)
        if answer.is_whole:
            missing = self._heads.keys() - {change.node_id for change in answer.changes}
            self._unconfirmed = {node_id: self._unconfirmed.get(node_id, now_s + ttl_s) for node_id in missing}
        late = [node_id for node_id, until_s in self._unconfirmed.items() if until_s < now_s]
        for node_id in (*late, *(() if answer.is_whole else answer.gone)):
            self._unconfirmed.pop(node_id, None)
            self._heads.pop(node_id, None)
            self._descriptions.pop(node_id, None)
            self._snapshot.hide(node_id, now_s)

    def _follow(self, client: Client) -> None:
        """Read what the others appended, all in one round trip for each server, at most MAX_TURN_BYTES of it."""
        wanted = self._wanted()
        if not wanted:
            return
        with client.pipeline(transaction=False) as pipeline:
            for node_id, at, length in wanted:
                start = at.offset * RECORD_NBYTES
                pipeline.getrange(self._key(node_id, at), start, start + length - 1)
            parts: list[bytes | Exception] = pipeline.execute(raise_on_error=False)
        for (node_id, at, length), records in zip(wanted, parts, strict=True):
            if isinstance(records, Exception):
                self._pass_over(node_id, records)
                continue
            self._received_bytes += len(records)
            if len(records) < length and at.generation != self._heads[node_id].generation:
                self._from_start.add(node_id)
            if records:
                self._apply(node_id, LogChunk(self._heads[node_id], at, records))

    def _wanted(self) -> list[tuple[str, Cursor, int]]:
        """(node, from where, bytes) of what is to be read now. Who goes on in another generation without a byte does so."""
        wanted: list[tuple[str, Cursor, int]] = []
        left = MAX_TURN_BYTES
        self._turn += 1
        names = list(self._heads)
        first = self._turn % len(names) if names else 0
        for node_id in (*names[first:], *names[:first]):
            head, cursor = self._heads[node_id], self._snapshot.cursor(node_id)
            if cursor is None or left < RECORD_NBYTES:
                continue
            at = head.start() if node_id in self._from_start else head.next_for(cursor)
            end = head.end if at.generation == head.generation else head.previous_end
            length = min((end - at.offset) * RECORD_NBYTES, MAX_FETCH_BYTES, left // RECORD_NBYTES * RECORD_NBYTES)
            if length > 0:
                wanted.append((node_id, at, length))
                left -= length
            elif at != cursor:
                self._apply(node_id, LogChunk(head, at, b""))
        return wanted

    def _apply(self, node_id: str, chunk: LogChunk) -> None:
        try:
            self._snapshot.apply(node_id, chunk)
        except KVStoreError as err:
            self._pass_over(node_id, err)
        else:
            self._from_start.discard(node_id)

    def _pass_over(self, node_id: str, err: Exception) -> None:
        """What is wrong with one node's log costs no other's. Tried again in the next turn."""
        self._failures += 1
        _log.warning("directory: peer=%s error=%s", node_id, err)

    def _leave(self) -> None:
        if self._client is None:
            return
        try:
            self._beat.leave(self._client.eval)
        except _FAILURES as err:
            _log.debug("directory: error=%s while leaving; the time to live does it", err)
        self._client.close()

    def _key(self, node_id: str, cursor: Cursor) -> str:
        return f"kvstore:{self._cluster}:log:{node_id}:{cursor.epoch}:{cursor.generation}"
