"""The local server in this process, with short deadlines and a store that can be made to fail."""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from kvstore import server as server_module
from kvstore.client import Client
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import KVStoreError, Overloaded, PeerUnavailable
from kvstore.core.keys import KVSpec
from kvstore.dispatcher import Dispatcher
from kvstore.proto import kvstore_pb2 as pb
from kvstore.server import LocalServer
from kvstore.sessions import Sessions
from kvstore.socket_path import SocketPath
from kvstore.store import Store
from kvstore.tiers.arena import Arena
from kvstore.tiers.slots import SegmentedSlots, SharedGenerations
from kvstore.transport.frames import Kind, Verb, encode_frame

SPEC = KVSpec(weights="tests", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
KEYS = SPEC.hash.hash_blocks(range(64))
SEGMENT_BYTES = 1 << 20
DEADLINE_S = 5.0


class House:
    """Everything between the socket and the arena."""

    def __init__(self, path: Path, arena: Arena, *, unverified_drain_s: float = 60.0) -> None:
        loop, clock = asyncio.get_running_loop(), MonotonicClock()
        slots = SegmentedSlots(
            arena.nbytes, segment_bytes=SEGMENT_BYTES, generations=SharedGenerations(arena.generations)
        )
        slots.add_segments(arena.num_segments)
        self.path = SocketPath(str(path))
        self.store = Store(pinned=slots)
        self.sessions = Sessions(self.store, loop=loop, clock=clock, unverified_drain_s=unverified_drain_s)
        self.dispatcher = Dispatcher(
            store=self.store, sessions=self.sessions, arena=arena, boot_id=bytes(16), clock=clock
        )
        self.server = LocalServer(
            self.path,
            dispatcher=self.dispatcher,
            sessions=self.sessions,
            descriptors=(arena.fd, arena.generations_fd),
            hello_deadline_s=0.2,
            frame_deadline_s=0.2,
        )

    def client(self) -> Client:
        return Client(
            self.path.path, instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC], connect_deadline_s=DEADLINE_S,
            call_deadline_s=DEADLINE_S,
        )  # fmt: skip

    def check(self) -> None:
        self.store.check()
        self.sessions.check()


def serve(tmp_path: Path, talk: Callable[[House], None], **options: float) -> None:
    """Run the blocking `talk` in a thread beside a server."""

    async def scenario() -> None:
        with Arena(SEGMENT_BYTES, segment_bytes=SEGMENT_BYTES) as arena:
            house = House(tmp_path / "s", arena, **options)
            house.path.claim()
            await house.server.start()
            try:
                await asyncio.to_thread(talk, house)
                house.check()
            finally:
                await house.server.close()
                house.sessions.close()
                house.path.release()

    uvloop.run(scenario())


def raw(house: House) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(DEADLINE_S)
    sock.connect(house.path.path)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


def test_namespaces_of_sessions_that_ended_make_room_and_those_of_open_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine here has two specs of its own, and there is room for four."""
    monkeypatch.setattr("kvstore.store.MAX_NAMESPACES", 4)

    def engine(house: House, name: str) -> Client:
        specs = [dataclasses.replace(SPEC, weights=f"{name}{i}") for i in range(2)]
        return Client(
            house.path.path, instance=uuid.uuid4().bytes, role=pb.BOTH, specs=specs, connect_deadline_s=DEADLINE_S,
            call_deadline_s=DEADLINE_S,
        )  # fmt: skip

    def talk(house: House) -> None:
        with engine(house, "lasting") as lasting:
            for number in range(6):
                with engine(house, f"passing {number}") as passing:
                    for client in (lasting, passing):
                        for space in client.namespaces:
                            assert client.match(space.namespace, KEYS).num_blocks == 0
                    if number == 5:
                        with pytest.raises(Overloaded), engine(house, "one too many"):
                            pass
                until_s = time.monotonic() + DEADLINE_S
                while lasting.stats().num_sessions > 1 and time.monotonic() < until_s:
                    time.sleep(0.01)
            assert lasting.stats().num_namespaces <= 4

    serve(tmp_path, talk)


def hello() -> bytes:
    request = pb.HelloRequest(protocol_version=1, instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC.canonical()])
    return encode_frame(Verb.HELLO, Kind.REQUEST, 1, request.SerializeToString())


@pytest.mark.parametrize("before", [b"", b"\0", hello()[:-1]])
def test_a_connection_without_a_whole_hello_is_closed_at_its_deadline(tmp_path: Path, before: bytes) -> None:
    def talk(house: House) -> None:
        with raw(house) as silent:
            silent.sendall(before)

            assert is_closed(silent)

    serve(tmp_path, talk)


def test_half_a_frame_and_silence_is_closed_at_its_deadline(tmp_path: Path) -> None:
    def talk(house: House) -> None:
        with house.client() as other, raw(house) as half:
            half.sendall(hello())
            assert half.recv(1 << 16)
            half.sendall(encode_frame(Verb.STATS, Kind.REQUEST, 2, b"")[:-3])

            assert is_closed(half)
            assert other.stats().num_sessions == 1

    serve(tmp_path, talk)


def test_frames_that_come_in_pieces_each_have_their_own_deadline(tmp_path: Path) -> None:
    """Three times the deadline in all, while some frame is always half there."""

    def talk(house: House) -> None:
        frame = encode_frame(Verb.STATS, Kind.REQUEST, 2, b"")
        with raw(house) as slow:
            slow.sendall(hello())
            assert slow.recv(1 << 16)
            slow.sendall(frame[:5])
            pause = socket.socketpair()
            for end in pause:
                end.settimeout(0.1)
            for _ in range(6):
                with pytest.raises(TimeoutError):
                    pause[0].recv(1)
                slow.sendall(frame[5:] + frame[:5])
                assert slow.recv(1 << 16)
            for end in pause:
                end.close()

    serve(tmp_path, talk)


def test_a_bug_in_a_handler_costs_its_connection_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talk(house: House) -> None:
        with house.client() as unlucky, house.client() as other:
            with monkeypatch.context() as patched:
                patched.setattr(Store, "match", lambda *_: 1 // 0)
                with pytest.raises(KVStoreError, match="bug") as error:
                    unlucky.match(SPEC.namespace(), KEYS)
            assert error.value.code == "KVStoreError"

            with pytest.raises(PeerUnavailable):
                unlucky.stats()

            assert other.match(SPEC.namespace(), KEYS).num_blocks == 0
            assert other.stats().counters["crashes_total"] == 1
            unlucky.connect()
            assert unlucky.match(SPEC.namespace(), KEYS).num_blocks == 0

    serve(tmp_path, talk)


def test_a_bug_in_hello_is_answered_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(house: House) -> None:
        client = house.client()
        with monkeypatch.context() as patched:
            patched.setattr(Store, "open_namespace", lambda *_: 1 // 0)
            with pytest.raises(KVStoreError, match="bug"):
                client.connect()

        client.connect()
        assert client.stats().counters["crashes_total"] == 1
        client.close()

    serve(tmp_path, talk)


def test_the_process_behind_a_connection_is_watched_also_without_the_kernels_newest_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a kernel before 6.5: an unknown socket option, and then the pidfd by number."""
    monkeypatch.setattr(server_module, "_SO_PEERPIDFD", 0x7FFF)
    killed_in_limbo(tmp_path, drain_s=60.0)


def test_a_process_that_cannot_be_watched_keeps_its_limbo_for_the_drain_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> int:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(server_module, "_SO_PEERPIDFD", 0x7FFF)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    killed_in_limbo(tmp_path, drain_s=0.3)


HOLD = """
import sys, uuid
from kvstore.client import Client
from kvstore.core.keys import KVSpec
from kvstore.proto import kvstore_pb2 as pb
spec = KVSpec(weights="tests", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
client = Client(sys.argv[1], instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[spec], connect_deadline_s=5, call_deadline_s=5)
client.connect()
client.reserve("w", spec.namespace(), [bytes(16)])
print("holding", flush=True)
sys.stdin.readline()
"""


def killed_in_limbo(tmp_path: Path, *, drain_s: float) -> None:
    """An engine that holds a lease is killed; within the deadline its memory is free."""

    def talk(house: House) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, house.path.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"holding\n"
            with house.client() as watcher:
                assert watcher.stats().tiers[0].writing_bytes == SPEC.block_nbytes
                engine.kill()
                until_s = MonotonicClock().now_s() + DEADLINE_S
                while (tier := watcher.stats().tiers[0]).free_bytes < tier.capacity_bytes:
                    assert MonotonicClock().now_s() < until_s

    serve(tmp_path, talk, unverified_drain_s=drain_s)
