"""What every Link and Endpoint (transport/link.py) promise. A new kind joins by adding a LinkKind to KINDS.

A kind whose owner's processor takes no part in a read cannot ask the gatekeeper (`gated=False`): what is refused there is
tested with the kind itself.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from link_nodes import (
    DEADLINE_S,
    LEASE,
    PAGE,
    SECRET,
    SLOT,
    Node,
    make_certificates,
    read,
    read_all,
)

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import MAX_DESCRIPTOR_BYTES, MAX_LINK_EXTENTS
from kvstore.transport.link import PEER_AT_FAULT, Endpoint, Link, LinkProblem, ReadExtent
from kvstore.transport.loopback import LoopbackEndpoint, LoopbackNetwork
from kvstore.transport.nixl import is_installed
from kvstore.transport.rdma import RdmaEndpoint
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

MakeEndpoint = Callable[[Node], Endpoint]


@dataclass(frozen=True)
class LinkKind:
    name: str
    maker: Callable[[Path], MakeEndpoint]  # of a test's own folder; its endpoints can reach one another
    gated: bool = True


def tcp_maker(folder: Path) -> MakeEndpoint:
    return lambda node: TcpEndpoint(
        memory=node.memory,
        generations=node.arena.generations,
        gatekeeper=node.gate,
        security=TcpSecurity(secret=SECRET),
        fd=node.arena.fd,
    )


def copying_tcp_maker(folder: Path) -> MakeEndpoint:
    """One stream, and no file to send pages of."""
    return lambda node: TcpEndpoint(
        memory=node.memory,
        generations=node.arena.generations,
        gatekeeper=node.gate,
        security=TcpSecurity(secret=SECRET),
        max_streams=1,
    )


def tls_maker(folder: Path) -> MakeEndpoint:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with the openssl command, which is not installed")
    make_certificates(folder, "node")
    security = TcpSecurity(cert=folder / "node.pem", key=folder / "node.key", ca=folder / "ca.pem")
    return lambda node: TcpEndpoint(
        memory=node.memory,
        generations=node.arena.generations,
        gatekeeper=node.gate,
        security=security,
        fd=node.arena.fd,
    )


def loopback_maker(folder: Path) -> MakeEndpoint:
    network = LoopbackNetwork()
    return lambda node: LoopbackEndpoint(
        network, memory=node.memory, generations=node.arena.generations, gatekeeper=node.gate
    )


def rdma_maker(folder: Path) -> MakeEndpoint:
    if not is_installed():
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu12")
    return lambda node: RdmaEndpoint(memory=node.memory, generations=node.arena.generations)


KINDS = [
    LinkKind("tcp", tcp_maker),
    LinkKind("tcp-copying", copying_tcp_maker),
    LinkKind("tls", tls_maker),
    LinkKind("loopback", loopback_maker),
    LinkKind("rdma", rdma_maker, gated=False),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> LinkKind:
    return request.param


@pytest.fixture
def make(kind: LinkKind, tmp_path: Path) -> MakeEndpoint:
    return kind.maker(tmp_path)


@contextmanager
def node_of(make: MakeEndpoint, seed: int) -> Iterator[Node]:
    node = Node(make, seed=seed)
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def owner(make: MakeEndpoint) -> Iterator[Node]:
    with node_of(make, seed=1) as node:
        yield node


@pytest.fixture
def reader(make: MakeEndpoint) -> Iterator[Node]:
    with node_of(make, seed=2) as node:
        yield node


@pytest.fixture
def link(owner: Node, reader: Node) -> Link:
    return reader.endpoint.connect("owner", owner.endpoint.describe())


def gated_only(kind: LinkKind) -> None:
    if not kind.gated:
        pytest.skip("the owner's processor takes no part, so it can refuse nothing")


@pytest.mark.parametrize("checked", [False, True])
def test_bytes_arrive_and_nothing_else_changes(owner: Node, reader: Node, link: Link, checked: bool) -> None:
    before = reader.memory.copy()
    places = [(0, 1, 8), (PAGE, PAGE, 5000), (10 * PAGE, 100_003, SLOT + 1), (1 << 20, 1 << 20, 2 << 20)]
    batch = [owner.read_of(n, offset, nbytes, into, checked=checked) for n, (offset, nbytes, into) in enumerate(places)]

    problems = read_all(link, batch)

    assert set(problems.values()) == {None}
    for offset, nbytes, into in places:
        before[into : into + nbytes] = owner.memory[offset : offset + nbytes]
    assert np.array_equal(reader.memory, before)
    assert link.stats().nbytes == sum(nbytes for _, nbytes, _ in places)
    assert link.peer == "owner"


def test_a_long_batch_ends_extent_by_extent(owner: Node, reader: Node, link: Link) -> None:
    batch = owner.slots(1000, nbytes=PAGE, checked=True)

    problems = read_all(link, batch)

    assert problems == dict.fromkeys(range(1000))
    assert np.array_equal(reader.memory[: 1000 * PAGE], owner.memory[: 1000 * PAGE])
    stats = link.stats()
    assert (stats.num_extents, stats.queued_nbytes, stats.problems) == (1000, 0, {})
    assert 0 < stats.busy_s < DEADLINE_S


def test_an_empty_batch_is_nothing(link: Link) -> None:
    ends = read(link, [])

    assert ends.done == []


def test_wrong_bytes_are_corrupt_and_the_rest_is_well(owner: Node, reader: Node, link: Link) -> None:
    batch = owner.slots(8, checked=True)
    owner.memory[3 * SLOT + 17] ^= 4

    problems = read_all(link, batch)

    assert problems == dict.fromkeys(range(8)) | {3: LinkProblem.CORRUPT}
    assert link.stats().problems == {"corrupt": 1}


@pytest.mark.parametrize("checked", [False, True])
def test_a_reused_slot_is_stale_and_the_rest_is_well(owner: Node, reader: Node, link: Link, checked: bool) -> None:
    batch = owner.slots(8, checked=checked)
    owner.arena.generations[5 * SLOT // PAGE] += np.uint64(1)
    owner.memory[5 * SLOT] ^= 1

    problems = read_all(link, batch)

    assert problems == dict.fromkeys(range(8)) | {5: LinkProblem.STALE}


def test_what_the_lease_does_not_grant_is_refused(kind: LinkKind, owner: Node, reader: Node, link: Link) -> None:
    gated_only(kind)
    batch = owner.slots(4)
    before = reader.memory.copy()

    strangers = read_all(link, batch, lease=bytes(16))
    owner.gate.release(LEASE)
    released = read_all(link, batch)

    assert set(strangers.values()) == set(released.values()) == {LinkProblem.REFUSED}
    assert np.array_equal(reader.memory, before)
    assert link.health().state == "failing"


def test_what_lies_beyond_the_arena_is_refused(owner: Node, reader: Node, link: Link) -> None:
    beyond = owner.memory.nbytes - PAGE
    batch = [ReadExtent(1, beyond, 0, 2 * PAGE, owner.generation(beyond))]
    owner.gate.grant(LEASE, [batch[0].remote])

    assert read_all(link, batch) == {1: LinkProblem.REFUSED}
    assert read_all(link, owner.slots(2)) == {0: None, 1: None}


def test_a_batch_beyond_the_limit_ends_at_once(owner: Node, link: Link) -> None:
    batch = [ReadExtent(n, 0, 0, 1, 1) for n in range(MAX_LINK_EXTENTS + 1)]

    ends = read(link, batch)

    assert {each.problem for each in ends.done} == {LinkProblem.OVERLOADED}
    assert len(ends.done) == len(batch)
    assert LinkProblem.OVERLOADED not in PEER_AT_FAULT


def test_many_threads_read_at_once(owner: Node, reader: Node, link: Link) -> None:
    batches = [owner.slots(8, checked=True, first=8 * part) for part in range(8)]
    problems: dict[int, LinkProblem | None] = {}
    threads = [threading.Thread(target=lambda b=b: problems.update(read_all(link, b))) for b in batches]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)

    assert problems == dict.fromkeys(range(64))
    assert np.array_equal(reader.memory, owner.memory)
    link.check()


def test_both_directions_at_once(owner: Node, reader: Node, link: Link) -> None:
    back = owner.endpoint.connect("reader", reader.endpoint.describe())
    first, second = owner.slots(16, checked=True), reader.slots(16, checked=True, first=32)
    expected = owner.memory[: 16 * SLOT].copy(), reader.memory[32 * SLOT : 48 * SLOT].copy()

    ends = read(link, first), read(back, second)

    assert ends[0].wait(16) == dict.fromkeys(range(16))
    assert ends[1].wait(16) == dict.fromkeys(range(32, 48))
    assert np.array_equal(reader.memory[: 16 * SLOT], expected[0])
    assert np.array_equal(owner.memory[32 * SLOT : 48 * SLOT], expected[1])


def test_a_closed_link_stops_and_another_goes_on(owner: Node, reader: Node, link: Link) -> None:
    other = reader.endpoint.connect("owner", owner.endpoint.describe())

    assert link.close(DEADLINE_S)
    assert link.close(DEADLINE_S)
    ends = read(link, owner.slots(2))

    assert [each.problem for each in ends.done] == [LinkProblem.STOPPED] * 2
    assert link.health().state == "closed"
    assert link.stats().problems == {}
    assert read_all(other, owner.slots(2)) == {0: None, 1: None}


def test_a_close_under_way_ends_everything_once(owner: Node, reader: Node, link: Link) -> None:
    ends = read(link, owner.slots(64, checked=True))

    closed = link.close(DEADLINE_S)

    problems = ends.wait(64)
    assert closed
    assert set(problems.values()) <= {None, LinkProblem.STOPPED}
    for read_id, problem in problems.items():
        if problem is None:
            place = slice(read_id * SLOT, (read_id + 1) * SLOT)
            assert np.array_equal(reader.memory[place], owner.memory[place])


def test_a_deadline_that_is_over_is_a_timeout(owner: Node, link: Link) -> None:
    assert read_all(link, owner.slots(2), deadline_s=0.0) == dict.fromkeys(range(2), LinkProblem.TIMEOUT)


def test_an_owner_that_is_closed_is_gone(make: MakeEndpoint, reader: Node) -> None:
    with node_of(make, seed=3) as owner:
        link = reader.endpoint.connect("owner", owner.endpoint.describe())
        batch = owner.slots(4, checked=True)
        assert set(read_all(link, batch).values()) == {None}

    problems = read_all(link, batch)

    assert set(problems.values()) == {LinkProblem.GONE}
    assert link.health().state == "failing"
    assert "gone" in link.health().reason


def test_an_owner_that_never_was_connected_and_is_closed_is_gone(make: MakeEndpoint, reader: Node) -> None:
    with node_of(make, seed=3) as owner:
        link = reader.endpoint.connect("owner", owner.endpoint.describe())
        batch = owner.slots(4, checked=True)

    assert set(read_all(link, batch).values()) == {LinkProblem.GONE}


def test_health_says_how_it_goes(owner: Node, link: Link) -> None:
    batch = owner.slots(1, checked=True)

    states = [link.health().state]
    read_all(link, batch)
    states.append(link.health().state)
    read_all(link, [batch[0]._replace(checksum=1)])
    states.append(link.health().state)
    read_all(link, batch)
    states.append(link.health().state)

    assert states == ["idle", "ready", "failing", "ready"]


def test_a_descriptor_is_short_and_checked(owner: Node, reader: Node) -> None:
    descriptor = owner.endpoint.describe()

    assert len(descriptor) <= MAX_DESCRIPTOR_BYTES
    assert owner.endpoint.describe() == descriptor
    for broken in [*[descriptor[:n] for n in range(min(len(descriptor), 64))], b"\xff" + descriptor[1:]]:
        with pytest.raises(RemoteProtocolError):
            reader.endpoint.connect("owner", broken)


def test_two_peers_do_not_mix(make: MakeEndpoint, owner: Node, reader: Node, link: Link) -> None:
    with ExitStack() as stack:
        third = stack.enter_context(node_of(make, seed=4))
        other = reader.endpoint.connect("third", third.endpoint.describe())

        ends = read(link, owner.slots(8, checked=True)), read(other, third.slots(8, checked=True, first=8))

        assert ends[0].wait(8) == dict.fromkeys(range(8))
        assert ends[1].wait(8) == dict.fromkeys(range(8, 16))
        assert np.array_equal(reader.memory[8 * SLOT : 16 * SLOT], third.memory[8 * SLOT : 16 * SLOT])
        other.close(DEADLINE_S)
