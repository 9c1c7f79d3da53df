"""The directory's server is killed, hangs, comes back empty or with an old copy, or holds rubbish: sharing heals by itself."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, running_redis, running_redis_cluster, wait_for

from kvstore.core.errors import ConfigError
from kvstore.transport.directory import Holding, Node

pytest.importorskip("redis", reason="the `cluster` extra is not installed")
from kvstore.transport.redis_directory import RedisDirectory, connector

pytestmark = pytest.mark.crash
NAMESPACE = bytes(16)
SOON_S = 15.0
HASHES = [random.Random(number).randbytes(16) for number in range(3000)]
Join = Callable[..., RedisDirectory]


def node(name: str, epoch: int = 1) -> Node:
    return Node(name, epoch, f"{name}:7000", ())


@contextlib.contextmanager
def joining(*urls: str, is_cluster: bool = False, cluster: str = "test") -> Iterator[Join]:
    """Makes nodes, which leave when the test is over."""
    directories: list[RedisDirectory] = []

    def join(who: Node, *, ttl_s: float = 1.0) -> RedisDirectory:
        connect = connector(*urls, is_cluster=is_cluster, deadline_s=0.3)
        directory = RedisDirectory(who, connect, cluster=cluster, interval_s=0.02, ttl_s=ttl_s)
        directory.start()
        directories.append(directory)
        return directory

    try:
        yield join
    finally:
        for directory in directories:
            directory.close()
        for directory in directories:
            directory.check()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as running:
        yield running


@pytest.fixture
def join(server: RedisServer) -> Iterator[Join]:
    with joining(server.url) as made:
        yield made


def knows(directory: RedisDirectory, who: Node, num_blocks: int, hashes: list[bytes] = HASHES) -> None:
    wanted = (Holding(who, num_blocks),) if num_blocks else ()
    wait_for(
        lambda: directory.locate(NAMESPACE, hashes) == wanted,
        f"{wanted}; it says {directory.locate(NAMESPACE, hashes)}",
        SOON_S,
    )


def attempts(directory: RedisDirectory, count: int) -> None:
    """That many more calls fail."""
    until = directory.figures().failures + count
    wait_for(lambda: directory.figures().failures >= until, f"{count} attempts", SOON_S)


def test_a_killed_server_is_survived_and_filled_again(server: RedisServer, join: Join) -> None:
    """Kill -9 with the loss of everything: the last known is served meanwhile, what changed meanwhile is told afterwards,
    and nobody who had followed reads a base again. Later than its time to live, since nobody could have been heard of."""
    first, second = join(node("a"), ttl_s=0.5), join(node("b"), ttl_s=0.5)
    first.publish(NAMESPACE, HASHES[:2000])
    knows(second, node("a"), 2000)

    server.kill()
    attempts(second, 3)
    first.withdraw(NAMESPACE, HASHES[1000:2000])
    first.publish(NAMESPACE, HASHES[2000:2500])
    time.sleep(0.6)  # longer than a time to live
    during = second.locate(NAMESPACE, HASHES)
    server.start()

    assert during == (Holding(node("a"), 2000),)
    knows(second, node("a"), 2500)
    knows(second, node("a"), 0, HASHES[1000:2000])
    assert second.figures().num_entries == 1500
    late = join(node("c"))
    knows(late, node("a"), 2500)
    assert late.figures().num_entries == 1500
    assert second._snapshot.num_resyncs == 0
    assert first.figures().resyncs == 1


def test_who_died_while_the_server_was_away_is_let_go(server: RedisServer, join: Join) -> None:
    first, second = join(node("a"), ttl_s=0.3), join(node("b"), ttl_s=0.3)
    first.publish(NAMESPACE, HASHES[:10])
    knows(second, node("a"), 10)

    server.kill()
    first.close()
    server.start()

    knows(second, node("a"), 0)


def test_a_hung_server_stops_nobody(server: RedisServer, join: Join) -> None:
    """Stopped, it takes connections and answers nothing. Each call of ours returns within milliseconds all the same."""
    first, second = join(node("a")), join(node("b"))
    first.publish(NAMESPACE, HASHES[:100])
    knows(second, node("a"), 100)

    server.signal(signal.SIGSTOP)
    attempts(first, 1)
    slowest_s = 0.0
    for number in range(200):
        began_s = time.monotonic()
        first.publish(NAMESPACE, HASHES[number : number + 1])
        found = second.locate(NAMESPACE, HASHES[:100])
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert found == (Holding(node("a"), 100),)
    attempts(second, 1)
    server.signal(signal.SIGCONT)

    assert slowest_s < 0.15, "a call waited for the server, whose deadline is 0.3 s"
    knows(second, node("a"), 200)


def test_an_old_copy_on_the_servers_disk_is_noticed(tmp_path: Path) -> None:
    """It comes back with logs that are shorter than what was told: they are written anew, and everybody agrees again."""
    with running_redis(tmp_path / "redis", "--dbfilename", "old.rdb") as server, joining(server.url) as join:
        first, second = join(node("a")), join(node("b"))
        first.publish(NAMESPACE, HASHES[:100])
        knows(second, node("a"), 100)
        server.cli("save")
        first.publish(NAMESPACE, HASHES[100:200])
        first.withdraw(NAMESPACE, HASHES[:50])
        knows(second, node("a"), 200)
        knows(second, node("a"), 0, HASHES[:50])

        server.kill()
        server.start()
        assert server.cli("dbsize").strip() != "0"

        late = join(node("c"))
        knows(late, node("a"), 200)
        knows(late, node("a"), 0, HASHES[:50])
        first.publish(NAMESPACE, HASHES[200:210])
        knows(second, node("a"), 210)
        knows(late, node("a"), 210)
        assert late.figures().num_entries == 160
        assert second.figures().num_entries == 160


def test_an_emptied_server_is_filled_again(server: RedisServer, join: Join) -> None:
    """Same process, no data: FLUSHALL, or a server that evicts what it should keep."""
    first, second = join(node("a")), join(node("b"))
    first.publish(NAMESPACE, HASHES[:100])
    knows(second, node("a"), 100)

    server.cli("flushall")

    late = join(node("c"))
    knows(late, node("a"), 100)
    first.publish(NAMESPACE, HASHES[100:101])
    knows(second, node("a"), 101)


def test_one_server_of_a_cluster_is_killed_and_comes_back(tmp_path: Path) -> None:
    """The one with the members; the others have logs. The first URL given is the dead one's."""
    with running_redis_cluster(tmp_path) as servers:
        place = servers[0].cli("cluster", "keyslot", "kvstore:{members}:alive").strip()
        (owner,) = [server for server in servers if owns(server, int(place))]
        servers.sort(key=lambda server: server is not owner)
        with joining(*[server.url for server in servers], is_cluster=True, cluster="members") as join:
            first, second = join(node("a")), join(node("b"))
            first.publish(NAMESPACE, HASHES[:100])
            knows(second, node("a"), 100)

            owner.kill()
            attempts(second, 2)
            assert second.locate(NAMESPACE, HASHES) == (Holding(node("a"), 100),)
            first.publish(NAMESPACE, HASHES[100:200])
            owner.start()

            knows(second, node("a"), 200)


def owns(server: RedisServer, slot: int) -> bool:
    """Whether the hash slot lies on it."""
    (mine,) = [line for line in server.cli("cluster", "nodes").splitlines() if "myself" in line]
    first, last = mine.split()[-1].split("-")
    return int(first) <= slot <= int(last)


def test_an_earlier_life_that_still_runs_is_heard_no_more(join: Join) -> None:
    """Two processes with one node id: the later one counts, and the other learns of it."""
    early, other = join(node("a", epoch=1)), join(node("b"))
    early.publish(NAMESPACE, HASHES[:10])
    knows(other, node("a", 1), 10)

    late = join(node("a", epoch=2))
    late.publish(NAMESPACE, HASHES[:3])

    knows(other, node("a", 2), 3)
    wait_for(lambda: early.is_superseded, "the earlier one notices", SOON_S)
    early.publish(NAMESPACE, HASHES[:20])
    late.publish(NAMESPACE, HASHES[3:4])
    knows(other, node("a", 2), 4)


@pytest.mark.parametrize("rubbish", ["head", "node", "log", "type", "log_type"])
def test_rubbish_on_the_server_is_counted_and_costs_nobody_else(server: RedisServer, join: Join, rubbish: str) -> None:
    """A node's head or description that is none, a log that somebody else wrote to, a key of another type."""
    first, second = join(node("a")), join(node("b"))
    first.publish(NAMESPACE, HASHES[:10])
    knows(second, node("a"), 10)
    tag = f"kvstore:{{{first._cluster}}}"
    log = f"kvstore:{first._cluster}:log:a:1:1"

    before = second.figures().failures
    if rubbish == "head":
        server.cli("hset", f"{tag}:heads", "z", "1 2 3")
        server.cli("zadd", f"{tag}:changed", "1000", "z")
        server.cli("zadd", f"{tag}:described", "1000", "z")
    elif rubbish == "node":
        server.cli("hset", f"{tag}:nodes", "z", "0" * 20 + "rubbish")
        server.cli("hset", f"{tag}:heads", "z", "1 1 -1 0 0")
        server.cli("zadd", f"{tag}:changed", "1000", "z")
        server.cli("zadd", f"{tag}:described", "1000", "z")
    elif rubbish == "type":
        server.cli("del", f"{tag}:nodes")
        server.cli("set", f"{tag}:nodes", "a string")
    elif rubbish == "log_type":
        server.cli("del", log)
        server.cli("lpush", log, "a list")
    else:
        server.cli("append", log, "half a record")
        first.publish(NAMESPACE, HASHES[10:11])
    if rubbish in ("log", "log_type"):
        wait_for(lambda: first.figures().resyncs, "the log is written anew", SOON_S)
    else:
        wait_for(lambda: second.figures().failures > before, "it is noticed", SOON_S)
    if rubbish == "type":
        server.cli("flushall")

    first.publish(NAMESPACE, HASHES[:20])
    knows(second, node("a"), 20)


def test_a_large_base_comes_in_turns(join: Join) -> None:
    """300,000 blocks, more than one turn's bytes of a log: told only when the server has them all."""
    hashes = [number.to_bytes(16, "big") for number in range(300_000)]
    first = join(node("a"))
    for start in range(0, len(hashes), 50_000):
        first.publish(NAMESPACE, hashes[start : start + 50_000])

    late = join(node("b"))

    wait_for(lambda: late.figures().num_entries == 300_000, "all are known", SOON_S)
    assert late.locate(NAMESPACE, hashes[-512:]) == (Holding(node("a"), 512),)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("node_id", {"node": Node("a{b}", 1, "", ())}),
        ("cluster", {"cluster": ""}),
        ("ttl_s", {"ttl_s": 0.3}),
        ("sample_every", {"node": Node("a", 1, "", (), 3)}),
    ],
)
def test_wrong_options_are_named(field: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        RedisDirectory(**{"node": node("a"), "connect": connector("unix:///nowhere")} | options)  # type: ignore[arg-type]

    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("is_cluster", [False, True])
@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@host:1",
        "http://secret",
        "redis://:secret@host:port",
        "redis://:secret/more@host:1",
        "redis://:secret@host:1/0?colour=red",
        "redis://:secret@host:1/0?socket_timeout=secret",
        "redis://:secret@[host:1",
    ],
)
def test_a_wrong_url_is_named_at_once_without_its_password(url: str, is_cluster: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        connector(url, is_cluster=is_cluster)

    assert caught.value.fields["field"] == "directory"
    assert "secret" not in f"{caught.value} {caught.value.message} {caught.value.fields}"
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_urls_that_are_right_are_taken() -> None:
    connector("redis://host")
    connector("rediss://user:a%2Fb@host:1/3?ssl_cert_reqs=none")
    connector("unix:///run/redis.sock?db=2")
    connector("redis://[::1]:7", "redis://b:7", is_cluster=True)
