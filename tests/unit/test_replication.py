"""Which prefixes another node is invited to have too."""

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.replication import HOT_READS, INVITE_AGAIN_S, MAX_WATCHED, WINDOW_S, Replication

NAMESPACE = b"n" * 16
KEYS = [b"a" * 16, b"b" * 16]


class Node(NamedTuple):
    node_id: str


class Holding(NamedTuple):
    node: Node
    num_blocks: int


class Nodes:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.held: dict[str, int] = {}

    def nodes(self) -> list[Node]:
        return [Node(name) for name in self.names]

    def locate(self, namespace: bytes, hashes: Sequence[bytes]) -> list[Holding]:
        return [Holding(Node(name), count) for name, count in self.held.items()]


def read(replication: Replication, times: int, now_s: float = 0.0, keys: Sequence[bytes] = KEYS) -> list[str]:
    for _ in range(times):
        replication.on_read(NAMESPACE, keys, 100, now_s)
    return [invitation.node_id for invitation in replication.take_invitations()]


def test_what_is_read_again_is_offered_to_one_node_that_has_not_all_of_it():
    nodes = Nodes(["n1", "n2"])
    nodes.held = {"n1": 2, "n2": 1}
    assert read(Replication(nodes, copies=2, bytes_per_s=0), HOT_READS) == []  # n1 has it
    replication = Replication(nodes, copies=3, bytes_per_s=0)
    assert read(replication, HOT_READS - 1) == []
    assert read(replication, 1) == ["n2"]


def test_without_copies_nobody_is_invited():
    assert read(Replication(Nodes(["n1"]), copies=1, bytes_per_s=0), 10) == []


def test_who_was_invited_has_time_and_then_another_is():
    replication = Replication(Nodes(["n1", "n2"]), copies=2, bytes_per_s=0)
    assert len(read(replication, HOT_READS)) == 1
    assert read(replication, 5, INVITE_AGAIN_S - 1) == []
    assert len(read(replication, 1, INVITE_AGAIN_S)) == 1


def test_who_did_not_come_is_not_invited_again_before_all_others_were():
    """It may never have served that model."""
    replication = Replication(Nodes(["n1", "n2", "n3"]), copies=2, bytes_per_s=0)
    first = read(replication, HOT_READS)
    others = [read(replication, 1, number * INVITE_AGAIN_S)[0] for number in (1, 2)]
    assert sorted(first + others) == ["n1", "n2", "n3"]
    assert read(replication, 1, 3 * INVITE_AGAIN_S) == first


def test_reads_of_long_ago_do_not_count():
    replication = Replication(Nodes(["n1"]), copies=2, bytes_per_s=0)
    assert read(replication, HOT_READS - 1) == []
    assert read(replication, HOT_READS - 1, WINDOW_S + 1) == []


def test_the_budget_limits_bytes_a_second():
    replication = Replication(Nodes(["n1"]), copies=2, bytes_per_s=100)
    prefixes = [[bytes([i]) * 16] for i in range(10)]
    invited = [read(replication, HOT_READS, 0.0, prefix) for prefix in prefixes]
    assert sum(map(len, invited)) == 1
    assert read(replication, 1, 1.0, prefixes[5]) == ["n1"]


def test_different_prefixes_go_to_different_nodes_and_one_always_to_the_same():
    nodes = Nodes([f"n{i}" for i in range(4)])
    chosen = [
        read(Replication(nodes, copies=2, bytes_per_s=0), HOT_READS, 0.0, [bytes([i]) * 16])[0] for i in range(64)
    ]
    again = [read(Replication(nodes, copies=2, bytes_per_s=0), HOT_READS, 0.0, [bytes([i]) * 16])[0] for i in range(64)]
    assert chosen == again
    assert min(chosen.count(f"n{i}") for i in range(4)) >= 8


def test_no_more_prefixes_are_watched_than_are_allowed():
    replication = Replication(Nodes([]), copies=2, bytes_per_s=0)
    for i in range(MAX_WATCHED + 100):
        replication.on_read(NAMESPACE, [i.to_bytes(16, "little")], 1, 0.0)
    assert len(replication._watched) == MAX_WATCHED
