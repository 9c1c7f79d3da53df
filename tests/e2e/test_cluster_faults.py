"""Nodes that answer garbage, hang, refuse, flip bits or are not what they say: misses counted by reason, never a wrong byte."""

import contextlib
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
import numpy as np
import pytest
from block_client import content, keys_of
from cluster_nodes import SECRET, ClusterNode, cluster_in
from fake_peer import (
    FakePeer,
    changed,
    garbage,
    hang,
    hang_up,
    random_bytes,
    say_garbage,
    say_nothing,
)
from sidecar_process import BLOCK_NBYTES, tool, wait_until

from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import KVStoreError, LeaseRefused, RemoteProtocolError, UnknownLease
from kvstore.core.limits import MAX_LOANS_PER_PEER, PEER_FIRST_PATIENCE_S, PEER_LEASE_TTL_S
from kvstore.peer_control import PeerControl
from kvstore.peer_identity import Identity
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.arena import Arena
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.link import Link, LinkProblem, ReadDone, ReadExtent
from kvstore.transport.static_directory import PeerAnswer
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 4
GIVEN_UP_WITHIN_S = PEER_FIRST_PATIENCE_S + 0.5  # none of these was ever well

LIES = {
    "lend garbage": ({"lend": garbage}, {"broken"}),
    "lend random bytes": ({"lend": random_bytes}, {"broken"}),
    "lend nothing": ({"lend": changed(pb.LendReply, lease_id=0)}, {"broken"}),
    "lend too much": ({"lend": changed(pb.LendReply, num_blocks=1 << 31)}, {"broken"}),
    "lend without a loan": ({"lend": changed(pb.LendReply, loan=b"")}, {"broken"}),
    "lend what is not there": ({"lend": changed(pb.LendReply, offsets=b"\xf0" * 32)}, {"refused"}),
    "wrong loan": ({"lend": changed(pb.LendReply, loan=bytes(16))}, {"refused"}),
    "wrong checksums": ({"lend": changed(pb.LendReply, checksums=bytes(32))}, {"corrupt"}),
    "lend too late": ({"lend": hang}, {"unreachable"}),
    "link says garbage": ({"link": say_garbage}, {"broken", "refused"}),
    "link says nothing": ({"link": say_nothing}, {"timeout"}),
    "link hangs up": ({"link": hang_up}, {"gone"}),
    "link is closed": ({"link": "closed"}, {"gone"}),
    "link of another secret": ({"link_secret": b"not the secret it should be"}, {"refused"}),
    "a bit is flipped": ({}, {"corrupt"}),
}
"""What a fake does, and the reasons by which its blocks may be counted; a busy machine may add that it was too late."""
LATE = {"timeout", "unreachable"}


@pytest.fixture(scope="module")
def fakes() -> Iterator[dict[str, FakePeer]]:
    with contextlib.ExitStack() as stack:
        made = {}
        for seed, (name, (ways, _)) in enumerate(LIES.items(), 500):
            made[name] = FakePeer(seed, NUM_BLOCKS, **ways)
            stack.callback(made[name].close)
        made["a bit is flipped"].block(NUM_BLOCKS - 1)[1234] ^= 4
        yield made


@pytest.fixture(scope="module")
def mutes() -> Iterator[list[FakePeer]]:
    """Those whose first words are wrong: nobody learns what they hold."""
    ways = [
        {"hello": garbage},
        {"hello": hang},
        {"hello": changed(pb.HelloReply, session_token="ü\n".encode())},
        {"digest": garbage},
        {"digest": random_bytes},
        {"digest": changed(pb.DigestReply, body=b"\x92\xc0\xc0")},
        {"digest": hang},
    ]
    with contextlib.ExitStack() as stack:
        made = [FakePeer(600 + i, NUM_BLOCKS, **each) for i, each in enumerate(ways)]
        for fake in made:
            stack.callback(fake.close)
        yield made


@pytest.fixture(scope="module")
def nodes(
    tmp_path_factory: pytest.TempPathFactory, fakes: dict[str, FakePeer], mutes: list[FakePeer]
) -> Iterator[list[ClusterNode]]:
    """Two that are well, among all those."""
    with cluster_in(tmp_path_factory.mktemp("faults")) as cluster:
        yield cluster.start("n1", "n2", peers=[fake.address for fake in (*fakes.values(), *mutes)])


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_costs_a_miss_with_its_reason(
    nodes: list[ClusterNode], fakes: dict[str, FakePeer], lie: str
) -> None:
    node, fake = nodes[0], fakes[lie]
    node.wait_until_found(fake.seed, NUM_BLOCKS, fake.name)
    before = node.failed()
    started_s = time.monotonic()

    came = node.get(fake.seed, NUM_BLOCKS)

    assert time.monotonic() - started_s < GIVEN_UP_WITHIN_S
    assert "Lend" in fake.calls
    assert came == [lie == "a bit is flipped"] * (NUM_BLOCKS - 1) + [False] or came == [False] * NUM_BLOCKS
    reasons = {name: count - before.get(name, 0) for name, count in node.failed().items()}
    reasons = {name: count for name, count in reasons.items() if count}
    assert sum(reasons.values()) == came.count(False)
    assert reasons.keys() <= LIES[lie][1] | LATE
    node.expect_nothing_held()


def test_those_whose_first_words_are_wrong_hold_nothing_and_spoil_nothing(
    nodes: list[ClusterNode], mutes: list[FakePeer]
) -> None:
    first, second = nodes
    wait_until(lambda: all(fake.calls for fake in mutes), "all were asked")
    for fake in mutes:
        assert first.locate(fake.seed, NUM_BLOCKS) == {}
    first.put(1, NUM_BLOCKS)
    second.wait_until_found(1, NUM_BLOCKS, "n1")
    wait_until(lambda: second.get(1, NUM_BLOCKS) == [True] * NUM_BLOCKS, "those that are well share")


# --- borrowers ------------------------------------------------------------------------------------------------------------


class Borrowed(NamedTuple):
    """A loan as a reader has it."""

    reply: pb.LendReply
    extents: list[ReadExtent]


class Borrower:
    """A node in this process: it borrows, and reads over a link of its own."""

    def __init__(self, owner: ClusterNode, *, secret: bytes = SECRET) -> None:
        self._owner = owner
        self.control = PeerControl(owner.address, Identity("borrower", uuid.uuid4().bytes, secret, None))
        self.arena = Arena(1 << 20, segment_bytes=1 << 20).open()
        self.arena.fault_segment(0)
        self._endpoint = TcpEndpoint(
            memory=self.arena.memory,
            generations=self.arena.generations,
            gatekeeper=LeaseGate(MonotonicClock()),
            security=TcpSecurity(secret=secret),
        ).open()
        self._link: Link | None = None

    def lend(self, seed: int, num_blocks: int) -> Borrowed:
        request = pb.LendRequest(
            namespace=self._owner.namespace, keys=b"".join(keys_of(seed, num_blocks)), deadline_s=1.0
        )
        reply = self.control.lend(request, 5.0)
        columns = (np.frombuffer(each, "<u8").tolist() for each in (reply.offsets, reply.generations, reply.checksums))
        extents = [
            ReadExtent(i, offset, i * BLOCK_NBYTES, BLOCK_NBYTES, generation, checksum)
            for i, (offset, generation, checksum) in enumerate(zip(*columns, strict=True))
        ]
        return Borrowed(reply, extents)

    def read(self, borrowed: Borrowed) -> set[LinkProblem | None]:
        done: list[ReadDone] = []
        if self._link is None:
            self._link = self._endpoint.connect("owner", self._descriptor())
        self._link.read(borrowed.extents, lease=borrowed.reply.loan, deadline_s=5.0, on_done=done.extend)
        wait_until(lambda: len(done) == len(borrowed.extents), "the read ends")
        return {each.problem for each in done}

    def _descriptor(self) -> bytes:
        body = self.control.digest(msgspec.msgpack.encode(((0, 0, 0), 4096)), 5.0)
        (link,) = msgspec.msgpack.decode(body, type=PeerAnswer).node.links
        return link.payload

    def close(self) -> None:
        self.control.close()
        assert self._endpoint.close(5.0)


@pytest.fixture
def borrower(nodes: list[ClusterNode]) -> Iterator[Borrower]:
    with contextlib.closing(Borrower(nodes[0])) as made:
        yield made


def test_a_loan_ends_with_release(nodes: list[ClusterNode], borrower: Borrower) -> None:
    owner = nodes[0]
    owner.put(10, 8)
    borrowed = borrower.lend(10, 8)
    assert borrowed.reply.num_blocks == 8
    assert 0 < borrowed.reply.expires_in_s <= PEER_LEASE_TTL_S
    assert owner.stats().num_leases == 1
    assert borrower.read(borrowed) == {None}
    for i, key in enumerate(keys_of(10, 8)):
        assert (borrower.arena.memory[i * BLOCK_NBYTES : (i + 1) * BLOCK_NBYTES] == content(key)).all()

    borrower.control.release(pb.ReleaseRequest(lease_id=borrowed.reply.lease_id, outcome=pb.LOADED), 5.0)
    assert borrower.read(borrowed) == {LinkProblem.REFUSED}
    owner.expect_nothing_held()


def test_a_loan_ends_with_its_time_and_no_question_extends_it(nodes: list[ClusterNode], borrower: Borrower) -> None:
    owner = nodes[0]
    owner.put(11, 8)
    borrowed = borrower.lend(11, 8)
    ends_s = time.monotonic() + PEER_LEASE_TTL_S
    stranger = Borrower(owner)
    with contextlib.closing(stranger), pytest.raises(UnknownLease):
        stranger.control.release(pb.ReleaseRequest(lease_id=borrowed.reply.lease_id, outcome=pb.LOADED), 5.0)
    while time.monotonic() < ends_s - 0.5:
        assert borrower.read(borrowed) == {None}
        owner.locate(11, 8)
        owner.match(11, 8)
        borrower._descriptor()
        time.sleep(0.2)
    wait_until(lambda: borrower.read(borrowed) == {LinkProblem.REFUSED}, "the loan ends", 2.0)
    owner.expect_nothing_held()  # nobody gave it back, and nothing is in limbo
    with pytest.raises(UnknownLease):
        borrower.control.release(pb.ReleaseRequest(lease_id=borrowed.reply.lease_id, outcome=pb.LOADED), 5.0)


def test_a_node_has_so_many_loans_at_once_and_no_more(nodes: list[ClusterNode], borrower: Borrower) -> None:
    nodes[0].put(13, 1)
    loans = [borrower.lend(13, 1).reply.lease_id for _ in range(MAX_LOANS_PER_PEER)]
    with pytest.raises(LeaseRefused, match="MAX_LOANS_PER_PEER"):
        borrower.lend(13, 1)
    borrower.control.release(pb.ReleaseRequest(lease_id=loans[0], outcome=pb.LOADED), 5.0)
    again = borrower.lend(13, 1).reply.lease_id
    assert again not in {0, *loans}
    for loan in (*loans[1:], again):
        borrower.control.release(pb.ReleaseRequest(lease_id=loan, outcome=pb.LOADED), 5.0)


def test_nothing_of_what_nobody_has_is_lent(nodes: list[ClusterNode], borrower: Borrower) -> None:
    assert borrower.lend(12, 8).reply == pb.LendReply()
    unknown = pb.LendRequest(namespace=bytes(16), keys=bytes(16), deadline_s=0.1)
    assert borrower.control.lend(unknown, 5.0) == pb.LendReply()
    nodes[0].expect_nothing_held()


@pytest.mark.parametrize("secret", [b"", b"not the secret it should be"])
def test_who_does_not_know_the_secret_is_refused_by_name(nodes: list[ClusterNode], secret: bytes) -> None:
    control = PeerControl(nodes[0].address, Identity("stranger", uuid.uuid4().bytes, secret, None))
    with contextlib.closing(control), pytest.raises(RemoteProtocolError, match=r"^proof: "):
        control.digest(b"", 5.0)


def test_a_tool_borrows_nothing(nodes: list[ClusterNode]) -> None:
    owner = nodes[0]
    with grpc.insecure_channel(f"unix:{owner.socket}.grpc") as channel:
        hello = channel.unary_unary("/kvstore.v1.KVStore/Hello")
        reply = pb.HelloReply.FromString(
            hello(pb.HelloRequest(protocol_version=1, role=pb.TOOL).SerializeToString(), timeout=5.0)
        )
        metadata = (("kvstore-session", reply.session_token.decode()),)
        for verb in ("Lend", "Digest"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/kvstore.v1.KVStore/{verb}")(b"", timeout=5.0, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details().startswith("role: ")
    with tool(owner) as client, pytest.raises(KVStoreError):
        client.acquire("r", owner.namespace, keys_of(10, 8))


# --- TLS ------------------------------------------------------------------------------------------------------------------


def make_certificate(folder: Path, name: str, authority: str) -> None:
    """A key and a certificate for 127.0.0.1: NAME.key, NAME.pem; and `authority`.pem when there is none."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    if not (folder / f"{authority}.pem").exists():
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        openssl("req", "-x509", *new_key, *files, "-days", "2", "-subj", f"/CN={authority}")
    openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    signed = (
        "-CA",
        f"{authority}.pem",
        "-CAkey",
        f"{authority}.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "san",
    )
    openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_nodes_with_certificates_share_and_strangers_learn_nothing(tmp_path: Path) -> None:
    own = {}
    for name, authority in (("n1", "ours"), ("n2", "ours"), ("stranger", "theirs")):
        make_certificate(tmp_path, name, authority)
        files = {"cert": f"{name}.pem", "key": f"{name}.key", "client-ca": f"{authority}.pem"}
        own[name] = [word for flag, file in files.items() for word in (f"--grpc-tls-{flag}", str(tmp_path / file))]
    with cluster_in(tmp_path) as cluster:
        first, second, stranger = cluster.start("n1", "n2", "stranger", own=own, secret=b"")
        first.put(1, 8)
        second.wait_until_found(1, 8, "n1")
        wait_until(lambda: second.get(1, 8) == [True] * 8, "it is fetched")
        assert stranger.locate(1, 8) == {}
        assert not stranger.stats().peers
        plain = PeerControl(first.address, Identity("plain", uuid.uuid4().bytes, SECRET, None))
        with contextlib.closing(plain), pytest.raises(KVStoreError):
            plain.digest(b"", 2.0)
