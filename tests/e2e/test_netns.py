"""Nodes in two network namespaces, and a cable between them that is cut, narrow, long, or loses packets.

Whatever the network does: what is fetched comes right or is a miss by its reason, soon; the planner sees what a slow peer is
worth; and sharing heals by itself, in the same processes. `ClusterNode.get` fails on a wrong byte.
"""

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
from block_client import keys_of
from cluster_nodes import ClusterNode
from namespaces import FarNode, Network, network, nodes_in
from sidecar_process import BLOCK_NBYTES, SPEC, wait_until

from kvstore.core.plans import MatchWish

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 32
NBYTES = NUM_BLOCKS * BLOCK_NBYTES  # 512 KiB
ENDS_WITHIN_S = (
    1.5  # a fetch that the network holds up; told 0.1 s and what it was expected to take, the rest is for busy machines
)
HEALS_WITHIN_S = 20.0  # a peer that failed a few times is left alone for some seconds
KNOWN_WITHIN_S = 30.0
REASONS = {
    "timeout",
    "unreachable",
    "refused",
}  # "corrupt", "broken", "absent" would be the sidecar's fault, not the network's

Pair = tuple[Network, FarNode, FarNode]
_seeds = itertools.count(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Owner and reader, joined by a veth pair."""
    with network("kvv") as net, nodes_in(net, tmp_path_factory.mktemp("veth")) as (owner, reader):
        yield net, owner, reader


@pytest.fixture(scope="module")
def disturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Joined by a cable that can delay and lose."""
    with (
        network("kvd", disturbed=True) as net,
        nodes_in(net, tmp_path_factory.mktemp("cable")) as (owner, reader),
    ):
        yield net, owner, reader


def offer(owner: ClusterNode, reader: ClusterNode) -> int:
    """A prefix that the owner has, and of which the reader knows."""
    seed = next(_seeds)
    owner.put(seed, NUM_BLOCKS)
    reader.wait_until_found(seed, NUM_BLOCKS, owner.name, KNOWN_WITHIN_S)
    return seed


def fetch(reader: ClusterNode, seed: int) -> bool:
    """Whether all came; what did not is counted by its reason, and nothing takes long."""
    before, started_s = reader.failed(), time.monotonic()
    came = reader.get(seed, NUM_BLOCKS)
    took_s = time.monotonic() - started_s
    failed = {name: count - before.get(name, 0) for name, count in reader.failed().items()}

    assert took_s < ENDS_WITHIN_S, failed
    assert sum(failed.values()) == came.count(False)
    assert {name for name, count in failed.items() if count} <= REASONS
    return came == [True] * NUM_BLOCKS


def wait_until_shared(owner: ClusterNode, reader: ClusterNode) -> None:
    """A new prefix comes as a whole: the peer is not suspect any more."""
    wait_until(lambda: fetch(reader, offer(owner, reader)), "all of a new prefix comes", HEALS_WITHIN_S)


def expected_s(owner: ClusterNode, reader: ClusterNode) -> float:
    """How long the planner expects the peer to take for NBYTES, as Explain tells."""
    seed = offer(owner, reader)
    wish = MatchWish(f"request {seed}", NUM_BLOCKS * SPEC.block_tokens + 1)
    reader.client.match(reader.namespace, keys_of(seed, NUM_BLOCKS), wish)
    (plan,) = reader.client.explain(request_id=wish.request_id)
    peer = next((tier for tier in plan.tiers if tier.tier == "peer" and tier.usable), None)
    return 0.0 if peer is None else peer.latency_s + NBYTES / peer.bytes_per_s


def fetch_until(condition: Callable[[], bool], owner: ClusterNode, reader: ClusterNode, what: str) -> None:
    def is_so() -> bool:
        fetch(reader, offer(owner, reader))
        return condition()

    wait_until(is_so, what, HEALS_WITHIN_S)


@pytest.mark.timeout(180)
def test_a_partition_costs_a_miss_and_heals(pair: Pair) -> None:
    net, owner, reader = pair
    wait_until_shared(owner, reader)
    seed, pids = offer(owner, reader), (owner.pid, reader.pid)

    net.cut()
    came = fetch(reader, seed)
    reader.put(own := next(_seeds), NUM_BLOCKS)
    goes_on = reader.get(own, NUM_BLOCKS)
    net.heal()

    assert not came
    assert all(goes_on)
    assert reader.counter("suspected_peers_total") >= 1
    wait_until_shared(owner, reader)
    wait_until_shared(reader, owner)
    assert (owner.pid, reader.pid) == pids
    assert owner.alive()
    assert reader.alive()


@pytest.mark.timeout(180)
def test_the_planner_sees_a_narrow_link_and_when_it_is_wide_again(pair: Pair) -> None:
    net, owner, reader = pair
    wait_until_shared(owner, reader)
    narrow_bytes_per_s = 4 << 20
    on_it_s = NBYTES / narrow_bytes_per_s  # an eighth of a second; otherwise some milliseconds

    net.limit(narrow_bytes_per_s)
    fetch_until(
        lambda: expected_s(owner, reader) > on_it_s / 2, owner, reader, "the planner expects what the link can do"
    )
    wait_until_shared(owner, reader)  # with that expectation it is given the time
    net.limit(0)

    fetch_until(lambda: 0 < expected_s(owner, reader) < on_it_s / 2, owner, reader, "the planner sees that it is wide")


@pytest.mark.timeout(180)
def test_a_long_way_is_a_miss_or_is_taken_and_seen(disturbed_pair: Pair) -> None:
    net, owner, reader = disturbed_pair
    wait_until_shared(owner, reader)

    net.disturb(delay_s=0.05)
    for _ in range(2):
        fetch(reader, offer(owner, reader))
    net.disturb(delay_s=0.005)
    wait_until_shared(owner, reader)

    fetch_until(lambda: expected_s(owner, reader) > 0.01, owner, reader, "the planner expects two ways' time at least")
    net.disturb()
    wait_until_shared(owner, reader)


@pytest.mark.timeout(180)
def test_lost_packets_cost_misses_and_never_a_wrong_byte(disturbed_pair: Pair) -> None:
    net, owner, reader = disturbed_pair
    wait_until_shared(owner, reader)

    net.disturb(loss=0.2)
    for _ in range(3):
        fetch(reader, offer(owner, reader))
    net.disturb()
    wait_until_shared(owner, reader)
    seed = offer(owner, reader)
    net.disturb(loss=1.0)
    came = fetch(reader, seed)
    net.disturb()

    assert not came
    wait_until_shared(owner, reader)
