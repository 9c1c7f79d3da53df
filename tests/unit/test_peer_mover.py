"""Fetches from other nodes: each block ends once, right or with its reason, whatever the nodes and the links do."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from small_cluster import NUM_BLOCKS, SmallCluster, hanging, refusing, small_cluster, wait_until

from kvstore import peer_mover
from kvstore.core.errors import KVStoreError, LeaseRefused, Overloaded, PeerUnavailable, RemoteProtocolError
from kvstore.core.loans import LoanProblem
from kvstore.peer_mover import FETCHES_PER_NODE
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.loopback import HEALTHY, Faults

SHORT_S = 0.2  # a deadline that is meant to pass


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallCluster]:
    with small_cluster(monkeypatch, "n1", "n2") as made:
        yield made


def both(cluster: SmallCluster, faults: Faults) -> None:
    for network in cluster.networks:
        network.faults = faults


def test_blocks_come_byte_for_byte_and_the_loan_goes_back(cluster: SmallCluster) -> None:
    fetches = [cluster.fetch("n1", 8), cluster.fetch("n1", 3, first=40), cluster.fetch("n2", 1)]

    assert cluster.wait(*fetches) == {None: 12}
    wait_until(lambda: cluster.num_loans() == 0)
    assert set(cluster.mover.links()) == {("n1", "loopback"), ("n1", "second"), ("n2", "loopback"), ("n2", "second")}


@pytest.mark.parametrize(
    ("faults", "problem"),
    [
        (Faults(drop=1.0), LoanProblem.TIMEOUT),
        (Faults(cut=1.0), LoanProblem.GONE),
        (Faults(corrupt=1.0), LoanProblem.CORRUPT),
    ],
)
def test_what_no_link_brings_fails_with_the_links_reason(
    cluster: SmallCluster, faults: Faults, problem: LoanProblem
) -> None:
    both(cluster, faults)

    assert cluster.wait(cluster.fetch("n1", 4, deadline_s=SHORT_S)) == {problem: 4}
    wait_until(lambda: cluster.num_loans() == 0)


@pytest.mark.parametrize("faults", [Faults(cut=1.0), Faults(corrupt=1.0), Faults(corrupt=0.5)])
def test_what_a_link_fails_to_bring_another_kind_brings(cluster: SmallCluster, faults: Faults) -> None:
    cluster.networks[0].faults = faults

    assert cluster.wait(cluster.fetch("n1", 8)) == {None: 8}
    assert cluster.owners["n1"].num_asked == 1


def test_what_the_owner_has_no_longer_is_not_asked_of_another_link(cluster: SmallCluster) -> None:
    owner = cluster.owners["n1"]

    def changed(_request: pb.LendRequest, reply: pb.LendReply) -> pb.LendReply:
        owner.generations[2] += 1
        return reply

    owner.answer = changed
    assert cluster.wait(cluster.fetch("n1", 4)) == {None: 3, LoanProblem.STALE: 1}
    assert cluster.mover.links()["n1", "second"].stats().num_extents == 0


def test_a_block_that_may_still_be_written_to_ends_twice_and_its_loan_is_not_given_back(cluster: SmallCluster) -> None:
    both(cluster, Faults(unsettled=1.0, late_s=SHORT_S))
    fetch = cluster.fetch("n1", 1, deadline_s=SHORT_S)

    assert cluster.wait(fetch) == {LoanProblem.TIMEOUT: 1}
    assert not any(ends[0].settled for ends in cluster.ends.values())
    cluster.wait(fetch, settled=True)
    assert cluster.num_loans() == 1


def test_a_link_that_says_nothing_at_all_leaves_its_blocks_unsettled(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_mover, "_LINK_GRACE_S", 0.05)
    late = []

    class MuteLink:
        def __init__(self, link: object) -> None:
            self.health = link.health  # type: ignore[attr-defined]
            self.stats = link.stats  # type: ignore[attr-defined]
            self.close = lambda _deadline_s: True

        def read(self, batch, *, lease, deadline_s, on_done) -> None:
            late.append((batch, on_done))

    connect = cluster.endpoints[0].connect
    monkeypatch.setattr(cluster.endpoints[0], "connect", lambda *given: MuteLink(connect(*given)))
    fetch = cluster.fetch("n1", 2, deadline_s=SHORT_S)
    assert cluster.wait(fetch) == {LoanProblem.TIMEOUT: 2}
    assert cluster.num_loans() == 1

    ((batch, on_done),) = late
    on_done([peer_mover.ReadDone(each.read_id) for each in batch])
    cluster.wait(fetch, settled=True)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (PeerUnavailable("away"), LoanProblem.UNREACHABLE),
        (LeaseRefused("too many"), LoanProblem.REFUSED),
        (Overloaded("too much"), LoanProblem.REFUSED),
        (RemoteProtocolError("proof: not right"), LoanProblem.BROKEN),
        (KVStoreError("a bug"), LoanProblem.BROKEN),
    ],
)
def test_a_node_that_does_not_lend_is_told_by_its_reason(
    cluster: SmallCluster, error: KVStoreError, problem: LoanProblem
) -> None:
    cluster.owners["n1"].answer = refusing(error)

    assert cluster.wait(cluster.fetch("n1", 4)) == {problem: 4}
    assert cluster.wait(cluster.fetch("n2", 4)) == {None: 4}


def _spoil(**fields: object) -> Callable[[pb.LendRequest, pb.LendReply], pb.LendReply]:
    def answer(_request: pb.LendRequest, reply: pb.LendReply) -> pb.LendReply:
        for name, value in fields.items():
            setattr(reply, name, value)
        return reply

    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"loan": b""},
        {"loan": b"x" * 17},
        {"num_blocks": 0},
        {"num_blocks": 3},
        {"num_blocks": 5},
        {"num_blocks": 1 << 31},
        {"offsets": b"x"},
        {"generations": b""},
        {"checksums": bytes(80)},
        {"lease_id": 0},
    ],
    ids=str,
)
def test_a_reply_that_makes_no_sense_is_none(cluster: SmallCluster, fields: dict[str, object]) -> None:
    cluster.owners["n1"].answer = _spoil(**fields)

    assert cluster.wait(cluster.fetch("n1", 4)) == {LoanProblem.BROKEN: 4}
    cluster.owners["n1"].answer = _spoil()
    assert cluster.wait(cluster.fetch("n1", 4)) == {None: 4}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"offsets": b"\xff" * 32}, LoanProblem.REFUSED),
        ({"loan": b"?" * 16}, LoanProblem.REFUSED),
        ({"generations": bytes(32)}, LoanProblem.REFUSED),
        ({"checksums": bytes(32)}, LoanProblem.CORRUPT),
        ({"lease_id": 0, "num_blocks": 9, "offsets": b"", "generations": b"", "checksums": b""}, LoanProblem.ABSENT),
    ],
    ids=str,
)
def test_what_makes_sense_and_is_false_never_gives_a_wrong_byte(
    cluster: SmallCluster, fields: dict[str, object], problem: LoanProblem
) -> None:
    cluster.owners["n1"].answer = _spoil(**fields)

    assert cluster.wait(cluster.fetch("n1", 4)) == {problem: 4}


def test_a_part_of_what_was_wanted_is_lent(cluster: SmallCluster) -> None:
    cluster.owners["n1"].answer = lambda _, reply: pb.LendReply(
        lease_id=reply.lease_id,
        loan=reply.loan,
        num_blocks=12,
        offsets=reply.offsets[:16],
        generations=reply.generations[:16],
        checksums=reply.checksums[:16],
    )
    assert cluster.wait(cluster.fetch("n1", 5, first=10)) == {None: 2, LoanProblem.ABSENT: 3}


def test_a_node_that_hangs_holds_up_nobody_elses_blocks(cluster: SmallCluster) -> None:
    until = threading.Event()
    cluster.owners["n1"].answer = hanging(until)
    stuck = [cluster.fetch("n1", 1) for _ in range(20)]

    assert cluster.wait(*[cluster.fetch("n2", 2) for _ in range(20)]) == {None: 40}
    assert not cluster.ends.keys() & {(fetch.fetch_id, 0) for fetch in stuck}
    until.set()
    assert cluster.wait(*stuck) == {LoanProblem.UNREACHABLE: 20}


def test_what_waits_for_a_node_that_cannot_be_reached_fails_with_the_first(cluster: SmallCluster) -> None:
    until = threading.Event()
    cluster.owners["n1"].answer = hanging(until)
    fetches = [cluster.fetch("n1", 1) for _ in range(30)]
    wait_until(lambda: cluster.owners["n1"].num_asked == FETCHES_PER_NODE)
    until.set()

    assert cluster.wait(*fetches) == {LoanProblem.UNREACHABLE: 30}
    assert cluster.owners["n1"].num_asked == FETCHES_PER_NODE


def test_what_waited_beyond_its_deadline_is_not_begun(cluster: SmallCluster) -> None:
    both(cluster, Faults(delay_s=(SHORT_S, SHORT_S)))
    slow = [cluster.fetch("n1", 1) for _ in range(FETCHES_PER_NODE)]
    late = cluster.fetch("n1", 1, deadline_s=SHORT_S / 2)

    assert cluster.wait(*slow, late) == {None: FETCHES_PER_NODE, LoanProblem.OVERLOADED: 1}
    assert cluster.owners["n1"].num_asked == FETCHES_PER_NODE


def test_a_node_that_the_directory_does_not_know_is_out_of_reach(cluster: SmallCluster) -> None:
    cluster.absent.add("n1")

    assert cluster.wait(cluster.fetch("n1", 2)) == {LoanProblem.UNREACHABLE: 2}
    assert cluster.owners["n1"].num_asked == 0


def test_a_fetch_that_is_called_off_before_it_began_ends_at_once(cluster: SmallCluster) -> None:
    until = threading.Event()
    cluster.owners["n1"].answer = hanging(until)
    fetches = [cluster.fetch("n1", 1) for _ in range(FETCHES_PER_NODE + 1)]
    cluster.mover.cancel([fetches[-1].fetch_id])

    assert cluster.wait(fetches[-1]) == {LoanProblem.CANCELLED: 1}
    until.set()
    cluster.wait()


def test_a_fetch_that_is_called_off_while_it_asks_gives_back_what_it_is_lent(cluster: SmallCluster) -> None:
    asked, until = threading.Event(), threading.Event()

    def slow(_request: pb.LendRequest, reply: pb.LendReply) -> pb.LendReply:
        asked.set()
        assert until.wait(5.0)
        return reply

    cluster.owners["n1"].answer = slow
    fetch = cluster.fetch("n1", 3)
    assert asked.wait(5.0)
    cluster.mover.cancel([fetch.fetch_id, 12345])
    until.set()

    assert cluster.wait(fetch) == {LoanProblem.CANCELLED: 3}
    wait_until(lambda: cluster.num_loans() == 0)
    assert not cluster.mover.links()
    cluster.mover.cancel([fetch.fetch_id])  # it has ended: nothing to remember
    cluster.mover.check()


def test_a_node_that_was_restarted_is_read_over_a_new_link(cluster: SmallCluster) -> None:
    cluster.wait(cluster.fetch("n1", 1))
    old = cluster.mover.links()["n1", "loopback"]
    for endpoint in cluster.owners["n1"].endpoints:
        endpoint.close(1.0)
    cluster.owners["n1"].restart()

    assert cluster.wait(cluster.fetch("n1", 4)) == {None: 4}
    assert cluster.mover.links()["n1", "loopback"] is not old
    wait_until(lambda: old.health().state == "closed")


def test_connections_of_a_node_of_which_nothing_is_wanted_close_and_come_back(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_mover, "IDLE_S", 0.05)
    cluster.wait(cluster.fetch("n1", 1))
    links = cluster.mover.links().values()
    wait_until(lambda: not cluster.mover.links())
    wait_until(lambda: all(link.health().state == "closed" for link in links))
    wait_until(lambda: all(control.closed for control in cluster.controls))

    assert cluster.wait(cluster.fetch("n1", 4)) == {None: 4}


def test_a_descriptor_that_makes_no_sense_costs_its_link_only(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(cluster.owners["n1"].endpoints[0]), "describe", lambda _: b"garbage")
    cluster.owners["n1"].endpoints[1].describe = lambda: b"KVLL" + cluster.owners["n1"].endpoints[1]._id  # type: ignore[method-assign]

    assert cluster.wait(cluster.fetch("n1", 2)) == {None: 2}
    assert cluster.wait(cluster.fetch("n2", 2)) == {LoanProblem.UNREACHABLE: 2}  # it has no other


def test_a_bug_in_a_link_leaves_no_block_untold(cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_given: object, **_named: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cluster.endpoints[0], "connect", crash)
    assert cluster.wait(cluster.fetch("n1", 2)) == {LoanProblem.BROKEN: 2}
    monkeypatch.undo()


def test_a_stop_ends_what_waits_and_what_comes_later(cluster: SmallCluster) -> None:
    until = threading.Event()
    cluster.owners["n1"].answer = hanging(until)
    fetches = [cluster.fetch("n1", 1) for _ in range(FETCHES_PER_NODE + 3)]
    wait_until(lambda: cluster.owners["n1"].num_asked == FETCHES_PER_NODE)
    threading.Timer(0.05, until.set).start()
    cluster.mover.stop(5.0)

    ends = cluster.wait(*fetches, cluster.fetch("n2", 2))
    assert ends == {LoanProblem.UNREACHABLE: FETCHES_PER_NODE, LoanProblem.STOPPED: 5}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-peer-")]


def test_random_faults_never_bring_a_wrong_byte_and_every_block_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[LoanProblem | None] = Counter()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        with small_cluster(monkeypatch, "n1", "n2", "n3", seed=seed, num_slots=4096) as cluster:
            answers = [
                lambda _, reply: reply,
                refusing(PeerUnavailable("away")),
                _spoil(checksums=bytes(8)),
                hanging(threading.Event()),
            ]
            for _ in range(60):
                for network in cluster.networks:
                    drop, cut, corrupt, unsettled = rng.uniform(0, 0.1, 4)
                    network.faults = (
                        HEALTHY
                        if rng.random() < 0.5
                        else Faults(drop=drop, cut=cut, corrupt=corrupt, unsettled=unsettled, late_s=0.02)
                    )
                name = f"n{rng.integers(1, 4)}"
                cluster.owners[name].answer = answers[int(rng.choice(4, p=(0.7, 0.1, 0.1, 0.1)))]
                first, count = int(rng.integers(20)), int(rng.integers(1, 20))
                assert first + count < NUM_BLOCKS
                fetch = cluster.fetch(name, count, first=first, deadline_s=float(rng.uniform(0.02, 0.2)))
                if rng.random() < 0.1:
                    cluster.mover.cancel([fetch.fetch_id])
                if rng.random() < 0.1:
                    cluster.owners[name].restart()
                time.sleep(float(rng.uniform(0, 0.01)))
            seen += cluster.wait(settled=True)
    assert {None, LoanProblem.BROKEN, LoanProblem.UNREACHABLE} <= set(seen)
    assert len(seen) >= 5  # which of the others is a matter of time
