"""The client against sidecars that are slow, gone, or talk nonsense; a scripted one in a thread stands in for them."""

import os
import select
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.core.errors import ConfigError, LeaseExpired, PeerUnavailable, SpecMismatch
from kvstore.proto import kvstore_pb2 as pb
from kvstore.transport.frames import FROM_CLIENT, Frame, FrameDecoder, Kind, Verb, encode_frame

BOOT = b"b" * 16
HELLO = pb.HelloReply(protocol_version=1, boot_id=BOOT, session_id=1)
Script = Callable[[Frame], bytes | None]  # the bytes to answer a request with; None: close


class ScriptedSidecar:
    """Answers each request as the script says."""

    def __init__(self, path: Path) -> None:
        self.script: Script = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            with sock:
                self._converse(sock)

    def _converse(self, sock: socket.socket) -> None:
        decoder = FrameDecoder(FROM_CLIENT)
        while chunk := sock.recv(1 << 16):
            decoder.feed(chunk)
            while (frame := decoder.next_frame()) is not None:
                if (reply := self.script(frame)) is None:
                    return
                sock.sendall(reply)


def reply(frame: Frame, message: object, kind: Kind = Kind.REPLY) -> bytes:
    return encode_frame(frame.verb, kind, frame.call_id, message.SerializeToString())  # type: ignore[attr-defined]


def answer(frame: Frame) -> bytes:
    return reply(frame, HELLO if frame.verb is Verb.HELLO else pb.MatchReply(num_blocks=3, boot_id=BOOT))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[ScriptedSidecar]:
    scripted = ScriptedSidecar(tmp_path / "s")
    yield scripted
    scripted.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    made = Client(
        str(tmp_path / "s"),
        instance=uuid.uuid4().bytes,
        role=pb.BOTH,
        want_arena=False,
        connect_deadline_s=0.5,
        call_deadline_s=0.2,
    )
    yield made
    made.close()


def then(script: Script) -> Script:
    """Answer Hello well, everything else by `script`."""
    return lambda frame: answer(frame) if frame.verb is Verb.HELLO else script(frame)


def test_a_call_is_answered(sidecar: ScriptedSidecar, client: Client) -> None:
    client.connect()

    assert client.match(bytes(16), []).num_blocks == 3
    assert client.boot_id == BOOT
    assert client.connected


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_process_that_uses_a_gpu_says_so_so_that_its_end_is_drained(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    """It may have begun to since the client was made, or since the last connection."""
    said: list[bool] = []

    def refuse(frame: Frame) -> None:
        said.append(pb.HelloRequest.FromString(frame.body).cuda_registered)

    sidecar.script = refuse
    engine = Client(str(tmp_path / "s"), instance=uuid.uuid4().bytes, role=pb.BOTH, connect_deadline_s=0.5)
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)

    with pytest.raises(PeerUnavailable):
        engine.connect()

    assert said == [on_gpu]


def test_an_unconnected_client_says_so_at_once(client: Client) -> None:
    with pytest.raises(PeerUnavailable, match="not connected"):
        client.match(bytes(16), [])


def test_events_are_let_pass(sidecar: ScriptedSidecar, client: Client) -> None:
    event = encode_frame(Verb.ACQUIRE, Kind.EVENT, 0, b"news")
    sidecar.script = then(lambda frame: event + answer(frame) + event)
    client.connect()

    assert [client.match(bytes(16), []).num_blocks for _ in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    "script",
    [
        lambda _: None,  # end of file
        lambda _: b"",  # silence
        lambda _: b"\x05\x00\x00",  # half a header and silence
        lambda frame: answer(frame)[:-1],  # half a frame
        lambda _: b"\xff" * 64,  # garbage
        lambda frame: answer(frame._replace(call_id=frame.call_id + 1)),
        lambda frame: answer(frame._replace(verb=Verb.STATS)),
        lambda frame: encode_frame(frame.verb, Kind.REPLY, frame.call_id, b"\xff\xff"),  # does not parse
        lambda frame: reply(frame, pb.MatchReply(boot_id=b"another")),
    ],
)
def test_whatever_goes_wrong_is_unavailable_within_the_deadline_and_stays_so_until_connect(
    sidecar: ScriptedSidecar, client: Client, script: Script
) -> None:
    client.connect()
    sidecar.script = then(script)
    started_s = time.monotonic()

    with pytest.raises(PeerUnavailable) as error:
        client.match(bytes(16), [])

    assert time.monotonic() - started_s < 0.2 + 0.5  # a busy machine
    assert error.value.fields["deadline_s"] == 0.2
    assert not client.connected
    with pytest.raises(PeerUnavailable, match="not connected"):
        client.match(bytes(16), [])
    sidecar.script = answer
    client.connect()
    assert client.match(bytes(16), []).num_blocks == 3


def test_a_reply_that_trickles_in_does_not_stretch_the_deadline(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    """The deadline is over the whole call, not over each read: those would take 0.9 s and 1 s more."""
    pieces = threading.Event()

    def trickle(frame: Frame) -> bytes:
        pieces.wait(0.9)
        return answer(frame)[:4]

    sidecar.script = then(trickle)
    with Client(str(tmp_path / "s"), role=pb.TOOL, connect_deadline_s=5.0, call_deadline_s=1.0) as client:
        started_s = time.monotonic()

        with pytest.raises(PeerUnavailable):
            client.match(bytes(16), [])

        assert time.monotonic() - started_s < 1.75


NOBODY = 65534


def listen_as_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[socket.socket, int, int]:
    """A listening socket whose owner is not who we are, its owner's uid and ours. Root gives up its rights for the call of
    listen(), which is what SO_PEERCRED tells of; another user can only pretend to be somebody else afterwards."""
    own_uid = os.geteuid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    if own_uid:
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: own_uid + 1)
        return listener, own_uid, own_uid + 1
    os.seteuid(NOBODY)
    try:
        listener.listen()
    finally:
        os.seteuid(0)
    return listener, NOBODY, 0


def test_a_sidecar_of_another_user_is_refused(tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was first to put its socket at the path; nothing is said to it."""
    listener, their_uid, our_uid = listen_as_another_user(tmp_path / "s", monkeypatch)
    with listener:
        with pytest.raises(ConfigError, match=f"served by user {their_uid}, we are user {our_uid}") as error:
            client.connect()

        sock, _ = listener.accept()
        with sock:
            assert sock.recv(1) == b"", "we hung up without a word"
    assert error.value.fields["field"] == "path"
    assert error.value.fields["value"] == str(tmp_path / "s")
    assert not client.connected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can serve as root")
def test_a_sidecar_of_root_serves_everybody(
    sidecar: ScriptedSidecar, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)

    client.connect()

    assert client.connected


@pytest.mark.parametrize(
    "hello",
    [pb.HelloReply(protocol_version=2, boot_id=BOOT), pb.HelloReply()],
)
def test_another_protocol_version_is_unavailable(
    sidecar: ScriptedSidecar, client: Client, hello: pb.HelloReply
) -> None:
    sidecar.script = lambda frame: reply(frame, hello)

    with pytest.raises(PeerUnavailable, match="protocol_version"):
        client.connect()


def test_an_error_in_hello_is_raised_as_its_class(sidecar: ScriptedSidecar, client: Client) -> None:
    error = pb.ErrorReply(code="SpecMismatch", message="dtype: no", fields={"field": "dtype"}, boot_id=BOOT)
    sidecar.script = lambda frame: reply(frame, error, Kind.ERROR)

    with pytest.raises(SpecMismatch, match="dtype") as raised:
        client.connect()

    assert raised.value.fields == {"field": "dtype"}
    assert not client.connected


def test_an_error_in_a_call_is_raised_and_the_connection_stays(sidecar: ScriptedSidecar, client: Client) -> None:
    error = pb.ErrorReply(code="LeaseExpired", message="gone", fields={"lease_id": "7"}, boot_id=BOOT)
    client.connect()
    sidecar.script = then(lambda frame: reply(frame, error, Kind.ERROR))

    with pytest.raises(LeaseExpired):
        client.commit(7)

    assert client.connected
    sidecar.script = answer
    assert client.match(bytes(16), []).num_blocks == 3


FORK = """
import os, sys
from kvstore.client import Client
from kvstore.core.errors import LocalProtocolError
from kvstore.proto import kvstore_pb2 as pb
client = Client(sys.argv[1], instance=bytes(16), role=pb.BOTH, want_arena=False, connect_deadline_s=5, call_deadline_s=5)
client.connect()
child = os.fork()
if child == 0:
    try:
        client.match(bytes(16), [])
    except LocalProtocolError as err:
        client.close()
        print("child refused", err.fields["field"], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("parent served", client.match(bytes(16), []).num_blocks)
client.close()
"""


def test_a_forked_child_is_refused_and_does_not_disturb_the_parent(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    """In a process of its own, since this one has threads."""
    outcome = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "s")], capture_output=True, text=True, timeout=30, check=True
    )

    assert outcome.stdout.splitlines() == ["child refused pid", "parent served 3"]


def test_calls_of_many_threads_do_not_mix(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    def echo_length(frame: Frame) -> bytes:
        return reply(frame, pb.MatchReply(num_blocks=len(pb.MatchRequest.FromString(frame.body).keys), boot_id=BOOT))

    sidecar.script = then(echo_length)
    client = Client(str(tmp_path / "s"), instance=bytes(16), role=pb.BOTH, want_arena=False, call_deadline_s=5)
    wrong: list[int] = []

    def ask(length: int) -> None:
        wrong.extend(length for _ in range(50) if client.match(bytes(16), bytes(length)).num_blocks != length)

    with client:
        threads = [threading.Thread(target=ask, args=(length,)) for length in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)

    assert wrong == []


def test_the_end_of_the_sidecar_is_seen_without_a_call_and_behind_unread_bytes(
    sidecar: ScriptedSidecar, client: Client
) -> None:
    assert not client.alive
    client.connect()
    assert client.alive

    sidecar.script = lambda _: encode_frame(Verb.ACQUIRE, Kind.EVENT, 0, b"news")
    client._socket.sendall(encode_frame(Verb.MATCH, Kind.REQUEST, 7, b""))
    wait_until(lambda: select.select([client._socket], [], [], 0)[0])
    assert client.alive
    sidecar.script = lambda _: None
    client._socket.sendall(encode_frame(Verb.MATCH, Kind.REQUEST, 8, b""))

    wait_until(lambda: not client.alive)
    client.close()
    assert not client.alive


def test_alive_waits_for_no_call_under_way(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer_late(frame: Frame) -> bytes:
        asked.set()
        assert go_on.wait(5)
        return answer(frame)

    sidecar.script = then(answer_late)
    found: list[int] = []
    with Client(str(tmp_path / "s"), instance=bytes(16), role=pb.BOTH, want_arena=False, call_deadline_s=5) as client:
        call = threading.Thread(target=lambda: found.append(client.match(bytes(16), []).num_blocks))
        call.start()
        assert asked.wait(5)

        alive = client.alive
        assert not found

        go_on.set()
        call.join(5)
    assert (alive, found) == (True, [3]), "and it took no byte of the answer"


def wait_until(condition: Callable[[], object]) -> None:
    until_s = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"path": "/" + "x" * 108, "role": pb.BOTH, "instance": bytes(16)}, "path"),
        ({"path": "/s", "role": pb.BOTH, "instance": b""}, "instance"),
        ({"path": "/s", "role": pb.TOOL, "instance": bytes(16)}, "instance"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Client(**arguments)  # type: ignore[arg-type]

    assert error.value.fields["field"] == field
