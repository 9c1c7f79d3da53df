"""This node among others: what it lends over which links, where its blocks are announced, and what it fetches.

open (a thread)   links listen -> the node is described -> the directory starts
loop              store events -> Announcer -> directory.publish, withdraw
                  store.take_fetches -> PeerMover -> store.finish_fetches
gRPC threads      Lend -> Lender;  Digest -> StaticDirectory.serve
"""

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvstore.config import Config
from kvstore.core.clock import Clock
from kvstore.core.errors import ConfigError, KVStoreError, RemoteProtocolError
from kvstore.core.events import BlockRemoved, BlockStored, Event
from kvstore.core.loans import Fetch, FetchDone
from kvstore.lending import Lender
from kvstore.mover import Mailbox
from kvstore.peer_identity import Identity
from kvstore.presence import HBM
from kvstore.proto import kvstore_pb2 as pb
from kvstore.replication import Invitation, Replication
from kvstore.request_traces import RequestTraces
from kvstore.store import Store
from kvstore.tiers.arena import Arena
from kvstore.transport.block_log import Cursor
from kvstore.transport.directory import Directory, DirectoryFigures, Holding, LinkDescriptor, Node
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.link import Endpoint
from kvstore.transport.static_directory import PeerAnswer, StaticDirectory

if TYPE_CHECKING:
    from kvstore.peer_control import PeerControl
    from kvstore.peer_mover import PeerMover
    from kvstore.transport.tcp_socket import TcpSecurity

logger = logging.getLogger(__name__)

_RESYNC_SLICE_BLOCKS = 4096
_RESYNC_PAUSE_S = 0.002  # others' requests go between, and the directory's thread takes what is queued
_CLOSE_FRACTION = 0.5
_INVITE_DEADLINE_S = 2.0
MAX_WAITING_INVITATIONS = 32
"""Behind a node that is slow to answer. More are not sent; who reads the prefix again invites again."""


class _Question(NamedTuple):
    """DigestRequest.body."""

    cursor: Cursor
    max_bytes: int


class Cluster:
    """Peers, links and directory of one sidecar. Made and opened before the store, which it is told of by `join`."""

    def __init__(
        self,
        config: Config,
        arena: Arena,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        traces: RequestTraces | None = None,
    ) -> None:
        self._traces = traces
        self._config = config
        self._arena = arena
        self._loop = loop
        self._clock = clock
        self.secret = read_secret(config.peer_secret_file)
        self.identity = Identity(
            config.node_id or socket.gethostname(), secrets.token_bytes(16), self.secret, _credentials(config)
        )
        self._gate = LeaseGate(clock)
        self.opened_s = clock.now_s()
        self.lender = Lender(arena.memory, arena.generations, self._gate, clock)
        self._endpoints: list[Endpoint] = []
        self._hosts: dict[str, PeerControl] = {}  # by address: nodes that were invited; the inviting thread only
        self._questions: dict[str, PeerControl] = {}  # to peers of a static list; directory threads only
        self._fetched: Mailbox[FetchDone] = Mailbox(loop)
        self._directory: Directory | None = None
        self._mover: PeerMover | None = None
        self._store: Store | None = None
        self._announcer: Announcer | None = None
        self._replication: Replication | None = None
        self._inviting = ThreadPoolExecutor(1, thread_name_prefix="kvstore-invite")
        self._may_invite = threading.BoundedSemaphore(MAX_WAITING_INVITATIONS)
        self._resyncing: asyncio.Task[None] | None = None
        self._resync_again = False
        self._pump_due = False

    @property
    def directory(self) -> Directory:
        """After `open`."""
        assert self._directory is not None
        return self._directory

    def open(self) -> None:
        """Listen, and let the others know. Blocks shortly. Raises ConfigError, and PeerUnavailable when no link can be had."""
        from kvstore.peer_mover import PeerMover

        for kind in self._config.links:
            self._endpoints += self._open_endpoints(kind)
        links = tuple(LinkDescriptor(endpoint.kind, endpoint.describe()) for endpoint in self._endpoints)
        config = self._config
        node = Node(
            node_id=self.identity.node_id,
            epoch=time.time_ns() // 1000,
            control_address=config.advertise or config.grpc_tcp,
            links=links,
        )
        self._directory = self._make_directory(node)
        self._mover = PeerMover(self._directory, self._endpoints, self.identity, self._fetched.put)

    def join(self, store: Store) -> None:
        """Begin to fetch for `store`, and to tell what it holds. Loop thread."""
        assert self._mover is not None
        self._store = store
        self._announcer = Announcer(self.directory, store.holds)
        self._replication = Replication(
            self.directory, copies=self._config.copies, bytes_per_s=self._config.copy_bytes_per_s
        )
        self._fetched.open(self._take_fetched)
        self.directory.start()

    def on_event(self, event: Event) -> None:
        """What happened to blocks of the store."""
        if self._announcer is not None:
            self._announcer.on_event(event)
            if not self._pump_due:  # whatever turn of the loop it was, verb or not
                self._pump_due = True
                self._loop.call_soon(self.pump)

    def on_read(self, namespace: bytes, keys: Sequence[bytes], block_nbytes: int) -> None:
        """An engine here read a prefix that we have."""
        if self._replication is not None:
            self._replication.on_read(namespace, keys, block_nbytes, self._clock.now_s())

    def pump(self) -> None:
        """Hand out what the store has decided, and tell what has changed. After every verb; cheap when that is nothing."""
        if self._store is None or self._mover is None or self._announcer is None:
            return
        self._pump_due = False
        orders = self._store.take_fetches()
        if orders.fetches:
            fetches: Sequence[Fetch] = orders.fetches
            if self._traces is not None:
                fetches = self._traces.fetching(fetches, self._clock.now_s())
            self._mover.submit(fetches)
        if orders.cancels:
            self._mover.cancel(orders.cancels)
        self._announcer.tell()
        if self._replication is not None:
            for invitation in self._replication.take_invitations():
                if self._may_invite.acquire(blocking=False):
                    sent = self._inviting.submit(self._invite, invitation)
                    sent.add_done_callback(lambda _: self._may_invite.release())
        if self.directory.resync_needed:
            self.announce_all()

    def announce_all(self) -> None:
        """Tell everything that is held anew, in slices: at the start, and when updates were lost. Once more if it is asked for
        meanwhile: what was held when it began may not be all."""
        self._resync_again = True
        if self._resyncing is None or self._resyncing.done():
            self._resyncing = self._loop.create_task(self._resync())

    def nodes(self) -> Sequence[tuple[Node, list[str]]]:
        """The others, and the kinds of links that we have in common, the preferred one first."""
        ours = list(dict.fromkeys(endpoint.kind for endpoint in self._endpoints))
        return [
            (node, [kind for kind in ours if kind in {link.kind for link in node.links}])
            for node in self.directory.nodes()
        ]

    def locate(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[Holding]:
        """Who else has how much of a prefix, farthest first."""
        return self.directory.locate(namespace, keys)

    def figures(self) -> DirectoryFigures | None:
        """Of the directory; None before it is open."""
        return None if self._directory is None else self._directory.figures()

    def digest(self, body: bytes) -> bytes:
        """Answer a peer's question of what we hold (Digest). Any thread. Raises RemoteProtocolError."""
        directory = self._directory
        if not isinstance(directory, StaticDirectory):
            raise RemoteProtocolError("digest: this node tells what it holds to a directory server", field="digest")
        try:
            question = msgspec.msgpack.decode(body, type=_Question)
        except msgspec.DecodeError as err:
            raise RemoteProtocolError(f"body: {err}", field="body", value=len(body)) from err
        return msgspec.msgpack.encode(directory.serve(question.cursor, question.max_bytes))

    def close(self, deadline_s: float) -> bool:
        """End all of it. False: something still writes to the arena; it must stay mapped. Blocks; not the loop's thread."""
        until_s = time.monotonic() + deadline_s
        self._inviting.shutdown(wait=False, cancel_futures=True)
        if self._directory is not None:
            self._directory.close()
        if self._mover is not None:
            self._mover.stop(deadline_s * _CLOSE_FRACTION)
        for control in (*self._questions.values(), *self._hosts.values()):
            control.close()
        closed = [endpoint.close(max(0.1, until_s - time.monotonic())) for endpoint in self._endpoints]
        return all(closed)

    def _invite(self, invitation: Invitation) -> None:
        """In a thread of its own; that nobody comes costs nothing."""
        nodes = self.directory.nodes()
        for address in self._hosts.keys() - {node.control_address for node in nodes}:
            self._hosts.pop(address).close()
        node = next((node for node in nodes if node.node_id == invitation.node_id), None)
        if node is None:
            return
        control = self._hosts.setdefault(node.control_address, self._control(node.control_address))
        request = pb.PrefetchRequest(namespace=invitation.namespace, keys=b"".join(invitation.keys))
        try:
            answer = control.prefetch(request, _INVITE_DEADLINE_S)
        except KVStoreError as err:
            logger.info("invitation declined node=%s reason=%s", node.node_id, err.message)
        else:
            logger.debug("invited node=%s blocks=%d", node.node_id, answer.num_started)

    # --- loop thread ----------------------------------------------------------------------------------------------------

    def _take_fetched(self, done: list[FetchDone]) -> None:
        assert self._store is not None
        if self._traces is not None:
            self._traces.fetched(done, self._clock.now_s())
        self._store.finish_fetches(done, self._clock.now_s())
        self.pump()

    async def _resync(self) -> None:
        assert self._store is not None
        while self._resync_again:
            self._resync_again = False
            self.directory.resync()
            for namespace, keys in self._store.held_blocks():
                for first in range(0, len(keys), _RESYNC_SLICE_BLOCKS):
                    some = keys[first : first + _RESYNC_SLICE_BLOCKS]
                    self.directory.publish(namespace, [key for key in some if self._store.holds(namespace, key)])
                    await asyncio.sleep(_RESYNC_PAUSE_S)

    # --- opening --------------------------------------------------------------------------------------------------------

    def _open_endpoints(self, kind: str) -> list[Endpoint]:
        arena = self._arena
        if kind == "rdma":
            from kvstore.transport.rdma import RdmaEndpoint

            return [RdmaEndpoint(memory=arena.memory, generations=arena.generations).open()]
        from kvstore.transport.tcp import TcpEndpoint

        config = self._config
        ours = config.grpc_tcp.rpartition(":")[0].strip("[]")
        advertised = (config.advertise or config.grpc_tcp).rpartition(":")[0].strip("[]")
        interfaces = [(host, host) for host in config.link_hosts] or [(ours, advertised)]
        return [
            TcpEndpoint(
                memory=arena.memory,
                generations=arena.generations,
                gatekeeper=self._gate,
                security=_tcp_security(config, self.secret),
                host=host,
                port=config.link_port,
                advertise=advertise,
                fd=arena.fd,
            ).open()
            for host, advertise in interfaces
        ]

    def _make_directory(self, node: Node) -> Directory:
        config = self._config
        if config.peers:
            return StaticDirectory(node, config.peers, self._ask, clock=self._clock)
        try:
            from kvstore.transport.redis_directory import RedisDirectory, connector
        except ImportError as err:
            raise ConfigError(
                "directory: a directory server needs the extra `cluster` (redis)",
                field="directory",
                value=str(err.name),
            ) from err
        connect = connector(*config.directory, is_cluster=config.directory_is_cluster)
        return RedisDirectory(node, connect, cluster=config.cluster, clock=self._clock)

    def _control(self, address: str) -> "PeerControl":
        from kvstore.peer_control import PeerControl

        return PeerControl(address, self.identity)

    def _ask(self, address: str, cursor: Cursor, max_bytes: int, deadline_s: float) -> PeerAnswer:
        """StaticDirectory's Fetch."""
        control = self._questions.setdefault(address, self._control(address))
        body = control.digest(msgspec.msgpack.encode(_Question(cursor, max_bytes)), deadline_s)
        try:
            return msgspec.msgpack.decode(body, type=PeerAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError) as err:
            raise RemoteProtocolError(f"digest of {address}: {err}", field="digest", value=len(body)) from err


class NoCluster:
    """A node on its own."""

    def figures(self) -> DirectoryFigures | None:
        """No directory."""
        return None

    def on_read(self, namespace: bytes, keys: Sequence[bytes], block_nbytes: int) -> None:
        """No other node could have it too."""

    secret = b""
    opened_s = 0.0

    def on_event(self, event: Event) -> None:
        """Nobody to tell."""

    def pump(self) -> None:
        """Nothing to fetch."""

    def announce_all(self) -> None:
        """Nobody to tell."""

    def nodes(self) -> Sequence[tuple[Node, list[str]]]:
        """Nobody."""
        return ()

    def locate(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[Holding]:  # noqa: ARG002
        """Nobody."""
        return ()


class Announcer:
    """Tells the directory what came and went. A block is there as long as any tier has it, so a removal is looked at when the
    verb that removed it is over."""

    def __init__(self, directory: Directory, holds: Callable[[bytes, bytes], bool]) -> None:
        self._directory = directory
        self._holds = holds
        self._stored: list[tuple[bytes, Sequence[bytes]]] = []
        self._removed: list[tuple[bytes, Sequence[bytes]]] = []

    def on_event(self, event: Event) -> None:
        """Take it down. What engines have in their own pools, this node cannot give."""
        if event.tier == HBM:
            return
        if isinstance(event, BlockStored):
            self._stored.append((event.namespace, event.hashes))
        elif isinstance(event, BlockRemoved):
            self._removed.append((event.namespace, event.hashes))

    def tell(self) -> None:
        """What is there now and was not, and the other way round."""
        stored, self._stored = self._stored, []
        removed, self._removed = self._removed, []
        for namespace, hashes in stored:
            self._directory.publish(namespace, [key for key in hashes if self._holds(namespace, key)])
        for namespace, hashes in removed:
            self._directory.withdraw(namespace, [key for key in hashes if not self._holds(namespace, key)])


def _tcp_security(config: Config, secret: bytes) -> "TcpSecurity":
    from kvstore.transport.tcp_socket import TcpSecurity

    if config.grpc_tls_cert:
        return TcpSecurity(
            secret=secret,
            cert=Path(config.grpc_tls_cert),
            key=Path(config.grpc_tls_key),
            ca=Path(config.grpc_tls_client_ca),
        )
    return TcpSecurity(secret=secret)


def _credentials(config: Config) -> Callable[[], Any] | None:
    """Of a gRPC client that shows the node's own certificate."""
    if not config.grpc_tls_cert:
        return None

    def make() -> Any:
        import grpc

        key, cert, authority = (
            Path(path).read_bytes() for path in (config.grpc_tls_key, config.grpc_tls_cert, config.grpc_tls_client_ca)
        )
        return grpc.ssl_channel_credentials(authority, key, cert)

    return make


def read_secret(file: str) -> bytes:
    """What all nodes know and nobody else; b"" for no file. Raises ConfigError."""
    from kvstore.transport.tcp_socket import MIN_SECRET_NBYTES

    if not file:
        return b""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as err:
        raise ConfigError(
            f"peer_secret_file: cannot read {file}: {err.strerror}", field="peer_secret_file", value=file
        ) from err
    if len(secret) < MIN_SECRET_NBYTES:
        raise ConfigError(
            f"peer_secret_file: {len(secret)} bytes in {file} are too few; use {MIN_SECRET_NBYTES} random ones or more",
            field="peer_secret_file",
            value=file,
        )
    return secret
