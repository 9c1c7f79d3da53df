"""Invitations to other nodes: sent from a thread, which a slow node may hold up without harm to anybody."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.cluster import MAX_WAITING_INVITATIONS, Cluster
from kvstore.core.errors import PeerUnavailable
from kvstore.proto import kvstore_pb2 as pb
from kvstore.replication import Invitation
from kvstore.transport.directory import Node

SOON_S = 5.0


class FakeControl:
    """Answers when it may."""

    def __init__(self, address: str, may_answer: threading.Event) -> None:
        self.address, self.closed, self.num_asked = address, False, 0
        self._may_answer = may_answer

    def prefetch(self, request: pb.PrefetchRequest, deadline_s: float) -> pb.PrefetchReply:
        self.num_asked += 1
        if not self._may_answer.wait(SOON_S):
            raise PeerUnavailable("no answer", peer=self.address)
        return pb.PrefetchReply()

    def close(self) -> None:
        self.closed = True


class Inviting:
    """As much of a Cluster as invites."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)
        self.may_answer = threading.Event()
        self.controls: list[FakeControl] = []
        self.invitations: list[Invitation] = []
        cluster: Any = Cluster.__new__(Cluster)
        cluster._store = SimpleNamespace(take_fetches=lambda: SimpleNamespace(fetches=(), cancels=()))
        cluster._mover, cluster._announcer = SimpleNamespace(), SimpleNamespace(tell=lambda: None)
        cluster._directory = SimpleNamespace(nodes=lambda: self.nodes, resync_needed=False)
        cluster._replication = SimpleNamespace(take_invitations=self._take)
        cluster._hosts = {}
        cluster._inviting = ThreadPoolExecutor(1)
        cluster._may_invite = threading.BoundedSemaphore(MAX_WAITING_INVITATIONS)
        cluster._control = self._control
        self.cluster = cluster

    def invite(self, *names: str) -> None:
        self.invitations = [Invitation(name, bytes(16), (bytes(16),)) for name in names]
        self.cluster.pump()

    def wait_sent(self) -> None:
        self.cluster._inviting.submit(lambda: None).result(SOON_S)

    def _take(self) -> list[Invitation]:
        taken, self.invitations = self.invitations, []
        return taken

    def _control(self, address: str) -> FakeControl:
        self.controls.append(FakeControl(address, self.may_answer))
        return self.controls[-1]


def node(name: str, port: int = 1) -> Node:
    return Node(name, 1, f"{name}:{port}")


@pytest.fixture
def inviting() -> Iterator[Inviting]:
    made = Inviting(node("a"))
    yield made
    made.may_answer.set()
    made.cluster._inviting.shutdown()


def test_behind_a_node_that_is_slow_so_many_wait_and_no_more(inviting: Inviting) -> None:
    started_s = time.monotonic()
    for _ in range(20):
        inviting.invite(*["a"] * 10)
    assert time.monotonic() - started_s < SOON_S / 2  # the loop waits for nothing
    inviting.may_answer.set()
    inviting.wait_sent()
    assert inviting.controls[0].num_asked == MAX_WAITING_INVITATIONS

    inviting.invite("a")
    inviting.wait_sent()
    assert inviting.controls[0].num_asked == MAX_WAITING_INVITATIONS + 1


def test_nodes_that_have_gone_keep_no_connection(inviting: Inviting) -> None:
    inviting.may_answer.set()
    for port in range(1, 6):  # a pod that comes back with another address each time
        inviting.nodes = [node("a", port)]
        inviting.invite("a")
        inviting.wait_sent()
    assert [control.address for control in inviting.controls] == [f"a:{port}" for port in range(1, 6)]
    assert [control.closed for control in inviting.controls] == [True] * 4 + [False]
