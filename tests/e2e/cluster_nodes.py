"""Several sidecars that share blocks, for tests."""

import contextlib
import signal
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from block_client import content, keys_of
from redis_servers import RedisServer
from sidecar_process import SPEC, SidecarProcess, tool, wait_until

from kvstore.client import Client
from kvstore.core.blocks import KeyStatus
from kvstore.proto import kvstore_pb2 as pb

SECRET = b"a secret of the tests"
SOON_S = 10.0


class ClusterNode(SidecarProcess):
    """A node with a name, an address that stays the same through restarts, and a client as an engine's."""

    def __init__(self, folder: Path, name: str, port: int, flags: Sequence[str], arena: str) -> None:
        self.name, self.address = name, f"127.0.0.1:{port}"
        own = ("--node-id", name, "--grpc-tcp", self.address)
        super().__init__(folder / f"{name}.sock", *own, *flags, arena=arena)
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None or not self._client.connected:
            self._client = Client(
                str(self.socket),
                instance=uuid.uuid4().bytes,
                role=pb.BOTH,
                specs=[SPEC],
                connect_deadline_s=5.0,
                call_deadline_s=5.0,
            )
            self._client.connect()
        return self._client

    @property
    def namespace(self) -> bytes:
        return self.client.namespaces[0].namespace

    def put(self, seed: int, num_blocks: int) -> None:
        keys = keys_of(seed, num_blocks)
        client = self.client
        grant = client.reserve(uuid.uuid4().hex, self.namespace, keys)
        assert set(grant.statuses) == {KeyStatus.GRANTED}
        assert client.arena is not None
        for key, offset in zip(keys, grant.offsets.tolist(), strict=True):
            block = content(key)
            client.arena.array[offset : offset + len(block)] = block
        assert client.commit(grant.lease_id) == num_blocks

    def match(self, seed: int, num_blocks: int) -> bytes:
        """The tier of each block found."""
        return self.client.match(self.namespace, keys_of(seed, num_blocks)).tiers

    def get(self, seed: int, num_blocks: int, *, deadline_s: float = SOON_S) -> list[bool]:
        """Load what can be had of a prefix as an engine does: which blocks came. Asserts that none came wrong."""
        keys, client = keys_of(seed, num_blocks), self.client
        arena = client.arena
        assert arena is not None
        grant = client.acquire(uuid.uuid4().hex, self.namespace, keys)
        came = []
        until_s = time.monotonic() + deadline_s
        for key, offset, generation in zip(keys, grant.offsets.tolist(), grant.generations.tolist(), strict=False):
            while (found := int(arena.generations[offset // 4096])) == generation - 1:
                assert time.monotonic() < until_s, "a block is neither there nor given up"
                time.sleep(0.0005)
            came.append(found == generation)
            if came[-1]:
                right = content(key)
                assert (arena.array[offset : offset + len(right)] == right).all(), "a wrong block is READY"
        if any(came):
            client.release(grant.lease_id, pb.LOADED)
        return came

    def locate(self, seed: int, num_blocks: int) -> dict[str, int]:
        """How much each node has of a prefix; "" is the node itself."""
        return {each.node_id: each.num_blocks for each in self.client.locate(self.namespace, keys_of(seed, num_blocks))}

    def wait_until_found(self, seed: int, num_blocks: int, at: str, deadline_s: float = SOON_S) -> None:
        wait_until(
            lambda: self.locate(seed, num_blocks).get(at) == num_blocks, f"{self.name} knows of {at}", deadline_s
        )

    def stats(self) -> pb.StatsReply:
        with tool(self) as client:
            return client.stats()

    def counter(self, name: str) -> int:
        return self.stats().counters[name]

    def failed(self) -> dict[str, int]:
        """Blocks that did not come, by reason."""
        names = {name: value for name, value in self.stats().counters.items() if name.startswith("failed_fetches_")}
        return {
            name.removeprefix("failed_fetches_").removesuffix("_total"): value for name, value in names.items() if value
        }

    def expect_nothing_held(self) -> None:
        """No lease, nothing in limbo, nothing on its way."""

        def is_so() -> bool:
            stats = self.stats()
            pinned = stats.tiers[0]
            held = (pinned.limbo_bytes, pinned.writing_bytes, pinned.leaving_bytes)
            everything = pinned.ready_bytes + pinned.free_bytes + pinned.quarantined_bytes
            return stats.num_leases == 0 and held == (0, 0, 0) and everything == pinned.capacity_bytes

        wait_until(is_so, f"{self.name} holds nothing", SOON_S)

    def pause(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._child is not None:
            if self.alive():
                self.resume()
            self.stop()


class ClusterOfNodes:
    """Makes nodes, which find each other by a list or by a directory server."""

    def __init__(self, folder: Path, directory: RedisServer | None = None) -> None:
        self._folder = folder
        self._directory = directory
        self.nodes: list[ClusterNode] = []

    def make(
        self,
        *names: str,
        flags: Sequence[str] = (),
        own: Mapping[str, Sequence[str]] = MappingProxyType({}),
        arena: str = "16MiB",
        peers: Sequence[str] = (),
        secret: bytes = SECRET,
    ) -> list[ClusterNode]:
        """Not started. `own`: flags of one; `peers`: addresses on their list besides each other."""
        ports = free_ports(len(names))
        if self._directory is not None:
            shared = ["--directory", self._directory.url]
        else:
            addresses = [*(f"127.0.0.1:{port}" for port in ports), *peers]
            shared = [word for address in addresses for word in ("--peers", address)]
        if secret:
            file = self._folder / f"secret-{secret.hex()}"
            file.write_bytes(secret)
            shared += ["--peer-secret-file", str(file)]
        made = [
            ClusterNode(self._folder, name, port, [*shared, *flags, *own.get(name, ())], arena)
            for name, port in zip(names, ports, strict=True)
        ]
        self.nodes += made
        return made

    def start(self, *names: str, **kwargs: Any) -> list[ClusterNode]:
        """Started, and known to each other."""
        made = self.make(*names, **kwargs)
        for node in made:
            node.spawn()
        for node in made:
            node.wait_until_ready()
        return made

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.close)


@contextlib.contextmanager
def cluster_in(folder: Path, directory: RedisServer | None = None) -> Iterator[ClusterOfNodes]:
    with contextlib.closing(ClusterOfNodes(folder, directory)) as cluster:
        yield cluster


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
