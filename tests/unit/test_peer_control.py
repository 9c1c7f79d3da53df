"""Control calls to another node: within their deadline, whatever it answers or does not."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvstore.core.errors import KVStoreError, LeaseRefused, PeerUnavailable, RemoteProtocolError
from kvstore.peer_control import PeerControl
from kvstore.peer_identity import Identity, proof
from kvstore.proto import kvstore_pb2 as pb

IDENTITY = Identity("n1", b"i" * 16, b"a secret of the tests", None)
SOON_S = 5.0
SHORT_S = 0.2
SLACK_S = 1.0  # of a busy machine


class Node:
    """A gRPC server that says `token` to a Hello, and answers other calls that show it by `answer`."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.tokens = [b"one"]
        self.hellos: list[pb.HelloRequest] = []
        self.hello_pause = threading.Event()
        self.hello_pause.set()
        self.answer: Callable[[bytes, Any], bytes] = lambda body, _context: body
        self._server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        methods = {
            verb: grpc.unary_unary_rpc_method_handler(self._hello if verb == "Hello" else self._call)
            for verb in ("Hello", "Digest", "Lend", "Release")
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.v1.KVStore", methods),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port(address)}"
        self._server.start()

    def _hello(self, body: bytes, _context: Any) -> bytes:
        self.hello_pause.wait(SOON_S)
        self.hellos.append(pb.HelloRequest.FromString(body))
        return pb.HelloReply(session_token=self.tokens[-1]).SerializeToString()

    def _call(self, body: bytes, context: Any) -> bytes:
        shown = dict(context.invocation_metadata()).get("kvstore-session", "")
        if shown.encode() != self.tokens[-1]:
            refuse(context, RemoteProtocolError("kvstore-session: not open"), field="kvstore-session")
            return b""
        return self.answer(body, context)

    def close(self) -> None:
        self._server.stop(0).wait(SOON_S)


def refuse(context: Any, error: KVStoreError, **fields: str) -> None:
    reply = pb.ErrorReply(code=error.code, message=error.message, fields=fields)
    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
    context.set_details(error.message)
    context.set_trailing_metadata((("kvstore-error-bin", reply.SerializeToString()),))


@pytest.fixture
def node() -> Iterator[Node]:
    with contextlib.closing(Node()) as made:
        yield made


@pytest.fixture
def control(node: Node) -> Iterator[PeerControl]:
    with contextlib.closing(PeerControl(node.address, IDENTITY)) as made:
        yield made


def test_it_introduces_itself_once_and_again_when_it_was_forgotten(node: Node, control: PeerControl) -> None:
    assert control.digest(b"a", SOON_S) == b"a"
    assert control.digest(b"b", SOON_S) == b"b"
    (hello,) = node.hellos
    assert (hello.role, hello.node_id, hello.instance) == (pb.PEER, "n1", b"i" * 16)
    assert hello.proof == proof(IDENTITY.secret, "n1", b"i" * 16) != b""

    node.tokens.append(b"two")
    assert control.digest(b"c", SOON_S) == b"c"
    assert len(node.hellos) == 2


def test_without_a_secret_there_is_no_proof() -> None:
    assert proof(b"", "n1", b"i" * 16) == b""


@pytest.mark.parametrize("token", [b"", b"two words", b"line\n", "ü".encode(), bytes(3), b"x" * 257])
def test_a_token_that_could_not_be_shown_is_refused_by_name(node: Node, control: PeerControl, token: bytes) -> None:
    node.tokens.append(token)
    with pytest.raises(RemoteProtocolError, match=r"^session_token: "):
        control.digest(b"", SOON_S)


def test_the_nodes_error_is_raised_here(node: Node, control: PeerControl) -> None:
    def answer(_body: bytes, context: Any) -> bytes:
        refuse(context, LeaseRefused("too many"), limit="MAX", message="m", self="s")
        return b""

    node.answer = answer
    with pytest.raises(LeaseRefused, match="too many") as refused:
        control.lend(pb.LendRequest(), SOON_S)
    assert refused.value.fields["limit"] == "MAX"


def test_an_error_of_the_protocol_opens_no_second_session(node: Node, control: PeerControl) -> None:
    """Each is kept for a minute by a node that allows a thousand."""

    def answer(_body: bytes, context: Any) -> bytes:
        refuse(context, RemoteProtocolError("digest: this node tells a directory server"))
        return b""

    node.answer = answer
    for _ in range(5):
        with pytest.raises(RemoteProtocolError, match=r"^digest: "):
            control.digest(b"", SOON_S)
    node.answer = lambda _body, _context: b"\xff\xff"
    for _ in range(5):
        with pytest.raises(RemoteProtocolError, match=r"^body: "):
            control.lend(pb.LendRequest(), SOON_S)
    assert len(node.hellos) == 1


def test_what_is_no_message_is_an_error_of_the_protocol(node: Node, control: PeerControl) -> None:
    node.answer = lambda _body, _context: b"\xff\xff"
    with pytest.raises(RemoteProtocolError, match=r"^body: no LendReply"):
        control.lend(pb.LendRequest(), SOON_S)


def test_a_node_that_does_not_answer_costs_the_deadline_of_all_that_the_call_needs(
    node: Node, control: PeerControl
) -> None:
    node.hello_pause.clear()
    started_s = time.monotonic()
    threads = [threading.Thread(target=_expect_away, args=(control,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started_s < SHORT_S + SLACK_S
    node.hello_pause.set()
    assert control.digest(b"a", SOON_S) == b"a"


def _expect_away(control: PeerControl) -> None:
    with pytest.raises(PeerUnavailable):
        control.digest(b"", SHORT_S)


def test_a_node_that_is_gone_is_told_at_once_and_found_again_soon(node: Node, control: PeerControl) -> None:
    control.digest(b"a", SOON_S)
    node.close()
    started_s = time.monotonic()
    for _ in range(20):
        with pytest.raises(PeerUnavailable):
            control.digest(b"a", SOON_S)
    assert time.monotonic() - started_s < SOON_S

    with contextlib.closing(Node(node.address)):
        back_s = time.monotonic()
        while True:
            try:
                assert control.digest(b"a", SOON_S) == b"a"
                break
            except PeerUnavailable:
                assert time.monotonic() - back_s < 1.0 + SLACK_S
                time.sleep(0.02)


def test_a_closed_one_begins_anew(control: PeerControl) -> None:
    control.digest(b"a", SOON_S)
    control.close()
    control.close()
    assert control.digest(b"a", SOON_S) == b"a"
