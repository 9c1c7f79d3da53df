"""What every Directory (kvstore/transport/directory.py) promises. A new one joins by adding a network to NETWORKS."""

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import running_redis, running_redis_cluster, wait_for

from kvstore.core.errors import PeerUnavailable
from kvstore.transport.block_log import Cursor
from kvstore.transport.directory import Directory, Holding, LinkDescriptor, Node
from kvstore.transport.static_directory import PeerAnswer, StaticDirectory

NAMESPACE = bytes(range(16))
SOON_S = 10.0  # these take a tenth of a second; a busy machine takes longer


def hashes(*numbers: int, nbytes: int = 16) -> list[bytes]:
    return [random.Random(number).randbytes(nbytes) for number in numbers]


def node(name: str, epoch: int = 1, sample_every: int = 1) -> Node:
    return Node(name, epoch, f"{name}:7000", (LinkDescriptor("tcp", name.encode()),), sample_every)


class StaticNetwork:
    """Peers that call one another's `serve` directly; a dead one does not answer."""

    def __init__(self) -> None:
        self.directories: dict[str, StaticDirectory] = {}
        self.dead: list[StaticDirectory] = []

    def fetch(self, address: str, cursor: Cursor, max_bytes: int, deadline_s: float) -> PeerAnswer:
        if address not in self.directories:
            raise PeerUnavailable(f"{address} does not answer", peer=address)
        return self.directories[address].serve(cursor, max_bytes)

    def join(self, who: Node) -> Directory:
        peers = [f"{name}:7000" for name in ("a", "b", "c")]  # everybody has the same list, itself in it
        directory = StaticDirectory(who, peers, self.fetch, interval_s=0.02, deadline_s=0.2, ttl_s=0.5)
        self.directories[who.control_address] = directory
        directory.start()
        return directory

    def die(self, directory: Directory) -> None:
        """As kill -9: it does not say so."""
        (address,) = [name for name, known in self.directories.items() if known is directory]
        self.dead.append(self.directories.pop(address))

    def close(self) -> None:
        for directory in (*self.directories.values(), *self.dead):
            directory.close()


class RedisNetwork:
    """Nodes that share a server."""

    def __init__(self, url: str, *, is_cluster: bool) -> None:
        self.url, self.is_cluster = url, is_cluster
        self.cluster = os.urandom(4).hex()  # tests share the server
        self.directories: list[Directory] = []

    def join(self, who: Node) -> Directory:
        from kvstore.transport.redis_directory import RedisDirectory, connector

        connect = connector(self.url, is_cluster=self.is_cluster, deadline_s=2.0)
        directory = RedisDirectory(who, connect, cluster=self.cluster, interval_s=0.02, ttl_s=0.5)
        directory.start()
        self.directories.append(directory)
        return directory

    def die(self, directory: Directory) -> None:
        directory._leave = lambda: None  # type: ignore[attr-defined]
        directory.close()

    def close(self) -> None:
        for directory in self.directories:
            directory.close()


Network = StaticNetwork | RedisNetwork


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis", reason="the `cluster` extra is not installed")
    with running_redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def redis_cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("redis", reason="the `cluster` extra is not installed")
    with running_redis_cluster(tmp_path_factory.mktemp("redis-cluster")) as servers:
        yield servers[0].url


NETWORKS = ["static", "redis", "redis-cluster"]


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with contextlib.closing(make_network(request)) as made:
        yield made


def make_network(request: pytest.FixtureRequest) -> Network:
    if request.param == "static":
        return StaticNetwork()
    if request.param == "redis":
        return RedisNetwork(request.getfixturevalue("redis_url"), is_cluster=False)
    return RedisNetwork(request.getfixturevalue("redis_cluster_url"), is_cluster=True)


def eventually(directory: Directory, wanted: tuple[Holding, ...], prefix: list[bytes]) -> None:
    wait_for(
        lambda: directory.locate(NAMESPACE, prefix) == wanted,
        f"{wanted}; it says {directory.locate(NAMESPACE, prefix)}",
        SOON_S,
    )


def test_a_block_that_a_node_published_is_found_by_the_others(network: Network) -> None:
    """With how far the node goes; what is withdrawn is not found any more; other namespaces are other blocks."""
    first, second = network.join(node("a")), network.join(node("b"))
    prefix = hashes(*range(8))

    first.publish(NAMESPACE, prefix[:5])
    eventually(second, (Holding(node("a"), 5),), prefix)
    first.withdraw(NAMESPACE, prefix[3:5])
    eventually(second, (Holding(node("a"), 3),), prefix)

    assert first.locate(NAMESPACE, prefix) == ()
    assert second.locate(bytes(16), prefix) == ()
    assert second.locate(NAMESPACE, []) == ()
    assert second.nodes() == (node("a"),)


def test_holders_come_longest_first(network: Network) -> None:
    first, second, third = (network.join(node(name)) for name in "abc")
    prefix = hashes(*range(100, 140), nbytes=32)

    first.publish(NAMESPACE, prefix[:7])
    second.publish(NAMESPACE, prefix[:20])

    eventually(third, (Holding(node("b"), 20), Holding(node("a"), 7)), prefix)


def test_a_restarted_node_voids_what_it_published_before(network: Network) -> None:
    first, second = network.join(node("a", epoch=1)), network.join(node("b"))
    prefix = hashes(*range(200, 210))
    first.publish(NAMESPACE, prefix)
    eventually(second, (Holding(node("a", 1), 10),), prefix)

    network.die(first)
    again = network.join(node("a", epoch=2))
    wait_for(lambda: second.nodes() == (node("a", 2),), "the later life is known", SOON_S)

    assert second.locate(NAMESPACE, prefix) == ()
    again.publish(NAMESPACE, prefix[:4])
    eventually(second, (Holding(node("a", 2), 4),), prefix)


def test_a_dead_node_is_in_no_answer(network: Network) -> None:
    first, second = network.join(node("a")), network.join(node("b"))
    prefix = hashes(*range(300, 310))
    first.publish(NAMESPACE, prefix)
    eventually(second, (Holding(node("a"), 10),), prefix)

    network.die(first)

    eventually(second, (), prefix)
    assert second.nodes() == ()


def test_a_late_comer_learns_all(network: Network) -> None:
    first = network.join(node("a"))
    numbers = iter(range(1000, 100_000))
    batches = [hashes(*itertools.islice(numbers, 500)) for _ in range(20)]
    for batch in batches:
        first.publish(NAMESPACE, batch)
    for batch in batches[::2]:
        first.withdraw(NAMESPACE, batch)

    late = network.join(node("b"))

    eventually(late, (Holding(node("a"), 500),), batches[-1])
    assert all(not late.locate(NAMESPACE, batch) for batch in batches[::2])
    assert all(late.locate(NAMESPACE, batch)[0].num_blocks == 500 for batch in batches[1::2])
    assert late.figures().num_entries == 5000


def test_resync_replaces_what_was_published(network: Network) -> None:
    first, second = network.join(node("a")), network.join(node("b"))
    old, new = hashes(*range(400, 410)), hashes(*range(500, 510))
    first.publish(NAMESPACE, old)
    eventually(second, (Holding(node("a"), 10),), old)

    first.resync()
    first.publish(NAMESPACE, new)

    eventually(second, (Holding(node("a"), 10),), new)
    assert second.locate(NAMESPACE, old) == ()


def test_sampled_nodes_and_others_understand_one_another(network: Network) -> None:
    """One in four blocks is published; the answer is short by a few, never long."""
    sparse, full = network.join(node("a", sample_every=4)), network.join(node("b"))
    prefix = hashes(*range(600, 800))

    sparse.publish(NAMESPACE, prefix)
    full.publish(NAMESPACE, prefix[:150])

    wait_for(lambda: len(full.locate(NAMESPACE, prefix)) == 1, "the sparse one is found", SOON_S)
    (holding,) = full.locate(NAMESPACE, prefix)
    assert 170 <= holding.num_blocks <= 200
    assert 20 <= full.figures().num_entries <= 80
    eventually(sparse, (Holding(node("b"), 150),), prefix)


def test_calls_of_the_loop_do_not_wait(network: Network) -> None:
    """A thousand calls in less time than one round trip to a hung server would take, all threads' work included."""
    first = network.join(node("a"))
    prefix = hashes(*range(512))
    done = threading.Event()

    def use() -> None:
        for _ in range(300):
            first.publish(NAMESPACE, prefix)
            first.locate(NAMESPACE, prefix)
            first.withdraw(NAMESPACE, prefix)
        done.set()

    threading.Thread(target=use, daemon=True).start()

    assert done.wait(SOON_S)
    assert not first.resync_needed


def test_closing_is_idempotent_and_ends_the_thread(network: Network) -> None:
    first = network.join(node("a"))

    first.close()
    first.close()

    assert not first._thread.is_alive()  # type: ignore[attr-defined]
    first.check()  # type: ignore[attr-defined]


def test_the_network_is_not_needed_to_start(tmp_path: Path) -> None:
    """No peer answers, no server is there: nothing fails, nothing is known."""
    pytest.importorskip("redis", reason="the `cluster` extra is not installed")
    from kvstore.transport.redis_directory import RedisDirectory, connector

    alone = StaticNetwork().join(node("a"))
    lost = RedisDirectory(node("a"), connector(f"unix://{tmp_path}/none"), interval_s=0.02)
    lost.start()

    wait_for(lambda: alone.figures().failures and lost.figures().failures, "an attempt", SOON_S)
    for directory in (alone, lost):
        directory.publish(NAMESPACE, hashes(1))
        assert directory.nodes() == ()
        assert directory.locate(NAMESPACE, hashes(1)) == ()
        directory.close()
