"""The TCP link against peers that hang, lie, break off or have no business here. What every link does is a contract's matter."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "contract"))

from link_nodes import (
    DEADLINE_S,
    LEASE,
    SECRET,
    SLOT,
    Ends,
    Node,
    make_certificates,
    read,
    read_all,
)

from kvstore.core.errors import ConfigError, PeerUnavailable, RemoteProtocolError
from kvstore.transport import link_frames as frames
from kvstore.transport import tcp_owner, tcp_socket
from kvstore.transport.link import Link, LinkProblem, ReadExtent
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

CONTRACT = Path(__file__).parent.parent / "contract"
SECURITY = TcpSecurity(secret=SECRET)
ENDPOINT_ID = bytes(range(16))
SHORT_S = 0.15  # a deadline that is meant to pass


def tcp_node(seed: int, *, security: TcpSecurity = SECURITY, **options: object) -> Node:
    def make(node: Node) -> TcpEndpoint:
        return TcpEndpoint(
            memory=node.memory,
            generations=node.arena.generations,
            gatekeeper=node.gate,
            security=security,
            fd=node.arena.fd,
            **options,
        )

    return Node(make, seed=seed)


@pytest.fixture
def owner() -> Iterator[Node]:
    with contextlib.closing(tcp_node(1)) as node:
        yield node


@pytest.fixture
def reader() -> Iterator[Node]:
    with contextlib.closing(tcp_node(2)) as node:
        yield node


Script = Callable[[socket.socket], None]
"""What a false owner does with each connection."""


class FalseOwner:
    """Listens, and runs a script for each connection, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.num_accepted = 0
        self._scripts = scripts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def describe(self) -> bytes:
        port = self._listener.getsockname()[1]
        return frames.encode_descriptor(frames.Descriptor("127.0.0.1", port, ENDPOINT_ID, 1 << 30, tls=False))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._listener.close()
        for sock in self._socks:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._socks.append(sock)
            script = self._scripts[min(self.num_accepted, len(self._scripts) - 1)]
            self.num_accepted += 1
            with contextlib.suppress(OSError, tcp_socket.LinkFailure):
                script(sock)


@contextlib.contextmanager
def linked(reader: Node, *scripts: Script) -> Iterator[tuple[Link, FalseOwner]]:
    with contextlib.closing(FalseOwner(*scripts)) as false:
        link = reader.endpoint.connect("false", false.describe())
        yield link, false
        assert link.close(DEADLINE_S)
        link.check()


def shake(sock: socket.socket) -> tcp_socket.LinkSocket:
    return tcp_socket.accept(sock, endpoint_id=ENDPOINT_ID, security=SECURITY, context=None, problem=None)


def hang(sock: socket.socket) -> None:
    """Keep the connection and say nothing."""


def hang_after_the_handshake(sock: socket.socket) -> None:
    shake(sock)


def hear_request(link: tcp_socket.LinkSocket) -> frames.RequestHeader:
    header = memoryview(bytearray(frames.REQUEST_NBYTES))
    link.recv_exactly(header)
    request = frames.decode_request_header(header)
    link.recv_exactly(memoryview(bytearray(frames.EXTENT_NBYTES * request.num_extents)))
    return request


def answer(link: tcp_socket.LinkSocket, payload: bytes, *, wrong_id: int = 0, sent: int | None = None) -> None:
    """Answer one request with `payload`, of which only `sent` bytes are sent."""
    request = hear_request(link)
    statuses = (None,) * request.num_extents
    head = frames.Statuses(request.request_id + wrong_id, statuses, len(payload))
    tail = frames.Statuses(request.request_id + wrong_id, statuses)
    whole = frames.encode_head(head) + payload + frames.encode_tail(tail)
    link.send([whole if sent is None else whole[:sent]])


@contextlib.contextmanager
def timed(at_most_s: float) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    assert time.monotonic() - started_s < at_most_s


@pytest.mark.parametrize("script", [hang, hang_after_the_handshake])
def test_a_peer_that_hangs_costs_the_deadline_and_no_more(owner: Node, reader: Node, script: Script) -> None:
    with linked(reader, script) as (link, _), timed(SHORT_S + 1.0):
        problems = read_all(link, owner.slots(64), deadline_s=SHORT_S)

        assert problems == dict.fromkeys(range(64), LinkProblem.TIMEOUT)


@pytest.mark.parametrize("script", [hang, hang_after_the_handshake])
def test_a_link_to_a_peer_that_hangs_can_be_closed(owner: Node, reader: Node, script: Script) -> None:
    with linked(reader, script) as (link, _):
        ends = read(link, owner.slots(8))

        with timed(0.5):
            assert link.close(DEADLINE_S)

        assert ends.wait(8) == dict.fromkeys(range(8), LinkProblem.STOPPED)


def test_a_later_deadline_outlives_a_connection_that_hangs(owner: Node, reader: Node) -> None:
    """What was asked for behind the one that timed out is asked for again, on another connection."""
    payload = owner.memory[:SLOT].tobytes()

    def serve(sock: socket.socket) -> None:
        answer(shake(sock), payload)

    with linked(reader, hang_after_the_handshake, serve) as (link, false):
        first = read(link, owner.slots(1), deadline_s=SHORT_S)
        second = read(link, owner.slots(1))

        assert first.wait(1) == {0: LinkProblem.TIMEOUT}
        assert second.wait(1) == {0: None}
        assert false.num_accepted == 2


def garbage(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)


def garbage_after_the_handshake(sock: socket.socket) -> None:
    link = shake(sock)
    hear_request(link)
    link.send([b"\x00" * 4096])


def answer_to_nothing(sock: socket.socket) -> None:
    answer(shake(sock), bytes(SLOT), wrong_id=1)


def too_much(sock: socket.socket) -> None:
    answer(shake(sock), bytes(SLOT + 1))


def too_little(sock: socket.socket) -> None:
    answer(shake(sock), bytes(SLOT - 1))


def break_off(sock: socket.socket) -> None:
    answer(shake(sock), bytes(SLOT), sent=SLOT // 2)
    sock.shutdown(socket.SHUT_RDWR)


def end_at_once(sock: socket.socket) -> None:
    sock.close()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (garbage, LinkProblem.BROKEN),
        (garbage_after_the_handshake, LinkProblem.BROKEN),
        (answer_to_nothing, LinkProblem.BROKEN),
        (too_much, LinkProblem.BROKEN),
        (too_little, LinkProblem.SHORT),
        (break_off, LinkProblem.GONE),
        (end_at_once, LinkProblem.GONE),
    ],
)
def test_a_peer_that_lies_or_breaks_off(owner: Node, reader: Node, script: Script, problem: LinkProblem) -> None:
    before = reader.memory.copy()
    with linked(reader, script) as (link, _), timed(2.0):
        problems = read_all(link, owner.slots(1))

        assert problems == {0: problem}
        assert link.health().state == "failing"
        assert link.stats().problems == {problem: 1}
        assert np.array_equal(reader.memory[SLOT:], before[SLOT:])


def test_flipped_bits_are_corrupt_and_the_connection_goes_on(owner: Node, reader: Node) -> None:
    payload = bytearray(owner.memory[:SLOT].tobytes())
    flipped = bytearray(payload)
    flipped[SLOT // 2] ^= 1

    def serve(sock: socket.socket) -> None:
        link = shake(sock)
        answer(link, flipped)
        answer(link, payload)

    with linked(reader, serve) as (link, false):
        problems = [read_all(link, owner.slots(1, checked=True)) for _ in range(2)]

        assert problems == [{0: LinkProblem.CORRUPT}, {0: None}]
        assert false.num_accepted == 1


STREAM_NBYTES = frames.CHALLENGE_NBYTES + frames.READY_NBYTES + frames.head_nbytes(2) + 2 * SLOT + frames.tail_nbytes(2)


def relay(owner: Node, change: Callable[[bytes, int], bytes]) -> Script:
    """Between a reader and a true owner; `change` gets what the owner says, and where in its stream that begins."""

    def to_owner(sock: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while said := sock.recv(1 << 16):
                upstream.sendall(said)
        with contextlib.suppress(OSError):
            upstream.shutdown(socket.SHUT_RDWR)

    def run(sock: socket.socket) -> None:
        target = frames.decode_descriptor(owner.endpoint.describe())
        with socket.create_connection((target.host, target.port), DEADLINE_S) as upstream:
            asking = threading.Thread(target=to_owner, args=(sock, upstream))
            asking.start()
            offset = 0
            with contextlib.suppress(OSError):
                while said := upstream.recv(1 << 16):
                    changed = change(said, offset)
                    sock.sendall(changed)
                    offset += len(said)
                    if len(changed) < len(said):
                        break
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            asking.join(DEADLINE_S)

    return run


def read_through(reader: Node, owner: Node, script: Script) -> dict[int, LinkProblem | None]:
    with contextlib.closing(FalseOwner(script)) as false:
        described = frames.decode_descriptor(owner.endpoint.describe())
        port = frames.decode_descriptor(false.describe()).port
        link = reader.endpoint.connect("relayed", frames.encode_descriptor(described._replace(port=port)))
        problems = read_all(link, owner.slots(2, checked=True), deadline_s=2.0)
        assert link.close(DEADLINE_S)
        link.check()
    for read_id, problem in problems.items():
        place = slice(read_id * SLOT, (read_id + 1) * SLOT)
        assert problem is not None or np.array_equal(reader.memory[place], owner.memory[place])
    return problems


FRAMES_AT = [*range(80 + 18), *range(STREAM_NBYTES - 10, STREAM_NBYTES)]


def test_no_flipped_byte_of_the_owner_gets_through(owner: Node, reader: Node) -> None:
    """Each byte of the handshake, the head and the tail, and some of the blocks."""
    rng = random.Random(5)
    for position in [*FRAMES_AT, *rng.sample(range(98, STREAM_NBYTES - 10), 20)]:

        def flip(said: bytes, offset: int, position: int = position) -> bytes:
            changed = bytearray(said)
            if offset <= position < offset + len(said):
                changed[position - offset] ^= 1 << rng.randrange(8)
            return bytes(changed)

        problems = read_through(reader, owner, relay(owner, flip))

        assert any(problems.values()), f"byte {position} was flipped and nobody noticed"


def test_no_truncation_of_the_owner_gets_through(owner: Node, reader: Node) -> None:
    rng = random.Random(6)
    for size in [*rng.sample(FRAMES_AT, 20), *rng.sample(range(98, STREAM_NBYTES), 10)]:

        def cut(said: bytes, offset: int, size: int = size) -> bytes:
            return said[: max(0, size - offset)]

        problems = read_through(reader, owner, relay(owner, cut))

        assert set(problems.values()) == {LinkProblem.GONE}, f"cut behind {size} bytes"


def test_a_connection_that_ended_while_idle_costs_nothing(owner: Node, reader: Node) -> None:
    payload = owner.memory[:SLOT].tobytes()

    def serve_once(sock: socket.socket) -> None:
        answer(shake(sock), payload)
        sock.shutdown(socket.SHUT_RDWR)

    with linked(reader, serve_once) as (link, false):
        for round_number in range(1, 4):
            assert read_all(link, owner.slots(1, checked=True)) == {0: None}
            assert false.num_accepted == round_number


def test_who_does_not_know_the_secret_reads_nothing(owner: Node) -> None:
    with contextlib.closing(tcp_node(3, security=TcpSecurity(secret=b"another secret of the same tests"))) as stranger:
        link = stranger.endpoint.connect("owner", owner.endpoint.describe())

        assert read_all(link, owner.slots(2)) == dict.fromkeys(range(2), LinkProblem.REFUSED)


def test_an_impostor_is_found_out(owner: Node, reader: Node) -> None:
    """It knows the descriptor, and answers every proof with yes."""

    def pretend(sock: socket.socket) -> None:
        sock.recv(frames.HELLO_NBYTES, socket.MSG_WAITALL)
        sock.sendall(frames.encode_challenge(frames.Challenge(None, bytes(32))))
        sock.recv(frames.MAC_NBYTES, socket.MSG_WAITALL)
        sock.sendall(frames.encode_ready(frames.Ready(None, bytes(32))))

    with linked(reader, pretend) as (link, _):
        assert read_all(link, owner.slots(1)) == {0: LinkProblem.REFUSED}


def test_certificates_of_another_ca_are_refused(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates with the openssl command, which is not installed")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        make_certificates(folder, "node")
    secured = [TcpSecurity(cert=f / "node.pem", key=f / "node.key", ca=f / "ca.pem") for f in (ours, theirs)]
    half = TcpSecurity(cert=theirs / "node.pem", key=theirs / "node.key", ca=ours / "ca.pem")
    with contextlib.ExitStack() as stack:
        owner, stranger, half_stranger = (
            stack.enter_context(contextlib.closing(tcp_node(seed, security=security)))
            for seed, security in enumerate((*secured, half), start=1)
        )
        for node in (stranger, half_stranger):  # who trusts another CA; who is of another CA
            link = node.endpoint.connect("owner", owner.endpoint.describe())
            assert read_all(link, owner.slots(1)) == {0: LinkProblem.REFUSED}
        with contextlib.closing(tcp_node(4)) as plain, pytest.raises(RemoteProtocolError, match="tls"):
            plain.endpoint.connect("owner", owner.endpoint.describe())


def test_readers_beyond_the_limit_are_turned_away(reader: Node) -> None:
    with contextlib.closing(tcp_node(1, max_connections=1, max_streams=1)) as owner:
        links = [reader.endpoint.connect("owner", owner.endpoint.describe()) for _ in range(2)]

        problems = [read_all(link, owner.slots(1)) for link in links]

        assert problems == [{0: None}, {0: LinkProblem.OVERLOADED}]


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 8, b"KVL1"])
def test_an_owner_outlives_strangers(owner: Node, reader: Node, words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_socket, "LINK_CONNECT_DEADLINE_S", SHORT_S)
    target = frames.decode_descriptor(owner.endpoint.describe())
    with socket.create_connection((target.host, target.port), DEADLINE_S) as stranger:
        stranger.sendall(words)

        assert has_ended(stranger)

    link = reader.endpoint.connect("owner", owner.endpoint.describe())
    assert read_all(link, owner.slots(2)) == dict.fromkeys(range(2))


def has_ended(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # it had not read all that was said
        return True


def test_a_reader_that_sends_a_broken_request_is_closed(owner: Node, reader: Node) -> None:
    with contextlib.closing(known_reader(owner)) as sock:
        sock.send([b"\xff" * 4096])

        assert sock.recv([memoryview(bytearray(1))]) == 0


def test_a_reader_that_takes_nothing_is_closed(owner: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_owner, "LINK_STALL_S", SHORT_S)
    batch = [owner.read_of(0, 0, 1 << 20, 0)] * 64
    with contextlib.closing(known_reader(owner)) as sock:
        sock.send([frames.encode_request(1, LEASE, [extent.remote for extent in batch], checked=True)])

        wait_until_alone(owner)


def known_reader(owner: Node) -> tcp_socket.LinkSocket:
    """A connection after a right handshake, without a link behind it."""
    return tcp_socket.connect(frames.decode_descriptor(owner.endpoint.describe()), SECURITY, None)


def wait_until_alone(owner: Node) -> None:
    ends_s = time.monotonic() + DEADLINE_S
    while owner.endpoint._owner.num_connections and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not owner.endpoint._owner.num_connections


class ChangingGenerations:
    """A generation table in which a slot is given to another block as soon as somebody has looked."""

    def __init__(self, size: int) -> None:
        self.seen = np.zeros(size, np.uint64)

    def __getitem__(self, page: int) -> int:
        self.seen[page] += np.uint64(1)
        return int(self.seen[page])


def test_a_slot_that_is_reused_while_it_is_sent_is_stale(reader: Node) -> None:
    generations: list[ChangingGenerations] = []

    def make(node: Node) -> TcpEndpoint:
        generations.append(ChangingGenerations(node.arena.generations.size))
        return TcpEndpoint(
            memory=node.memory, generations=generations[0], gatekeeper=node.gate, security=SECURITY, fd=node.arena.fd
        )

    with contextlib.closing(Node(make, seed=1)) as owner:
        owner.arena.generations[:] = 1
        link = reader.endpoint.connect("owner", owner.endpoint.describe())

        problems = read_all(link, owner.slots(2))

        assert problems == dict.fromkeys(range(2), LinkProblem.STALE)
        assert generations[0].seen[0] == 2


def test_a_callback_that_raises_ends_no_thread(owner: Node, reader: Node, caplog: pytest.LogCaptureFixture) -> None:
    link = reader.endpoint.connect("owner", owner.endpoint.describe())

    def raising(done: object) -> None:
        raise ValueError("a bug of the caller")

    link.read(owner.slots(1), lease=LEASE, deadline_s=DEADLINE_S, on_done=raising)

    assert read_all(link, owner.slots(4)) == dict.fromkeys(range(4))
    assert "on_done crashed" in caplog.text


def test_a_closed_endpoint_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with contextlib.closing(tcp_node(1)) as owner, contextlib.closing(tcp_node(2)) as reader:
        link = reader.endpoint.connect("owner", owner.endpoint.describe())
        read_all(link, owner.slots(64))
        begun = {thread.name for thread in set(threading.enumerate()) - before}

        assert all(name.startswith("kvstore-tcp-") for name in begun), begun
        assert "kvstore-tcp-owner" in begun

    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "secret"),
        ({"secret": b"too short"}, "secret"),
        ({"cert": Path("node.pem")}, "key"),
        ({"cert": Path("node.pem"), "key": Path("node.key")}, "ca"),
    ],
)
def test_security_is_not_left_out_by_mistake(options: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TcpSecurity(**options)

    assert caught.value.fields["field"] == field


def test_what_the_machine_has_not_is_said(owner: Node, tmp_path: Path) -> None:
    port = frames.decode_descriptor(owner.endpoint.describe()).port

    with pytest.raises(PeerUnavailable, match=f"port {port}"):
        tcp_node(1, port=port)
    with pytest.raises(ConfigError, match=r"node\.pem"):
        tcp_node(
            1,
            security=TcpSecurity(cert=tmp_path / "node.pem", key=tmp_path / "node.key", ca=tmp_path / "ca.pem"),
        )


@contextlib.contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """An owner in a process of its own, and its descriptor."""
    command = [sys.executable, str(CONTRACT / "tcp_owner_process.py")]
    environment = os.environ | {"PYTHONPATH": str(CONTRACT.parent.parent)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process, bytes.fromhex(process.stdout.readline())
        finally:
            process.kill()


def wait_for_some(ends: Ends) -> None:
    with ends._changed:
        assert ends._changed.wait_for(lambda: ends.done, DEADLINE_S)


@pytest.mark.crash
def test_an_owner_that_is_killed_is_gone_at_once(reader: Node) -> None:
    """Reads are under way all the time; those that meet the kill end with GONE long before their deadline, and none is lost."""
    with owner_process() as (process, descriptor):
        link = reader.endpoint.connect("owner", descriptor)
        batch = [ReadExtent(n, n * SLOT, n * SLOT, SLOT, 1) for n in range(64)]
        reads = [read(link, batch) for _ in range(8)]
        wait_for_some(reads[0])

        process.kill()
        with timed(1.0):
            last = read_all(link, batch)

        assert set(last.values()) == {LinkProblem.GONE}
        problems = [ends.wait(64) for ends in reads]
        assert {problem for each in problems for problem in each.values()} <= {None, LinkProblem.GONE}
        link.check()


@pytest.mark.crash
def test_an_owner_that_is_stopped_is_a_timeout_and_can_go_on(reader: Node) -> None:
    with owner_process() as (process, descriptor):
        link = reader.endpoint.connect("owner", descriptor)
        batch = [ReadExtent(n, n * SLOT, n * SLOT, SLOT, 1) for n in range(64)]
        assert set(read_all(link, batch).values()) == {None}

        process.send_signal(signal.SIGSTOP)
        with timed(SHORT_S + 1.0):
            stopped = read_all(link, batch, deadline_s=SHORT_S)
        process.send_signal(signal.SIGCONT)

        assert LinkProblem.TIMEOUT in stopped.values()
        assert set(stopped.values()) <= {None, LinkProblem.TIMEOUT}
        assert set(read_all(link, batch).values()) == {None}


def test_a_read_does_not_wait_for_the_connection(owner: Node, reader: Node) -> None:
    with linked(reader, hang) as (link, _):
        ends = Ends()
        with timed(0.5):
            link.read(owner.slots(4), lease=LEASE, deadline_s=SHORT_S, on_done=ends)
        assert set(ends.wait(4).values()) == {LinkProblem.TIMEOUT}
