"""A node that is on another's list and misbehaves: its control calls and its data link answer as a test says."""

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import numpy as np
from block_client import content, keys_of
from cluster_nodes import SECRET
from sidecar_process import BLOCK_NBYTES, SPEC
from xxhash import xxh3_64_intdigest

from kvstore.core.blocks import Extent
from kvstore.core.clock import MonotonicClock
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.arena import Arena
from kvstore.transport import link_frames
from kvstore.transport.block_log import Cursor
from kvstore.transport.directory import LinkDescriptor, Node
from kvstore.transport.lease_gate import LeaseGate
from kvstore.transport.static_directory import StaticDirectory
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

SEGMENT = 1 << 20
GENERATION = 7
LOAN = bytes(range(16))
Spoil = Callable[[bytes], bytes]
"""The right answer of a control call -> what is answered."""
Connected = Callable[[socket.socket], None]
"""Talks to who connected to the data link."""


class FakePeer:
    """Says that it holds the first `num_blocks` of the prefix of `seed`, and lends them, but for `spoil` (by verb) and `link`,
    which takes the place of its data link: None is a right one, "closed" a port where nobody listens."""

    def __init__(
        self,
        seed: int,
        num_blocks: int = 4,
        *,
        link: Connected | str | None = None,
        link_secret: bytes = SECRET,
        **spoil: Spoil,
    ) -> None:
        self.name, self.seed = f"fake-{seed}", seed
        self.calls: list[str] = []
        self._spoil = spoil
        self._arena = Arena(SEGMENT, segment_bytes=SEGMENT).open()
        self._arena.fault_segment(0)
        keys = keys_of(seed, num_blocks)
        for i, key in enumerate(keys):
            self.block(i)[:] = content(key)
            self._arena.generations[i * BLOCK_NBYTES // 4096] = GENERATION
        self._checksums = [xxh3_64_intdigest(self.block(i)) for i in range(num_blocks)]
        gate = LeaseGate(MonotonicClock())
        gate.grant(LOAN, [Extent(i * BLOCK_NBYTES, BLOCK_NBYTES, GENERATION) for i in range(num_blocks)])
        self._endpoint = TcpEndpoint(
            memory=self._arena.memory,
            generations=self._arena.generations,
            gatekeeper=gate,
            security=TcpSecurity(secret=link_secret),
        ).open()
        self._listener = socket.create_server(("127.0.0.1", 0))
        descriptor = link_frames.decode_descriptor(self._endpoint.describe())
        if link is not None:
            descriptor = descriptor._replace(port=self._listener.getsockname()[1])
        if callable(link):
            threading.Thread(target=self._accept, args=(link,), daemon=True).start()
        else:
            self._listener.close()
        self._server = grpc.server(ThreadPoolExecutor(8))
        methods = {
            verb: grpc.unary_unary_rpc_method_handler(self._method(verb))
            for verb in ("Hello", "Digest", "Lend", "Release")
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.v1.KVStore", methods),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        links = (LinkDescriptor("tcp", link_frames.encode_descriptor(descriptor)),)
        self._directory = StaticDirectory(Node(self.name, 1, self.address, links), (), _nobody)
        self._directory.publish(SPEC.namespace(), keys)
        self._directory.start()
        self._server.start()

    def block(self, number: int) -> np.ndarray:
        """In the arena that is read over the link."""
        return self._arena.memory[number * BLOCK_NBYTES : (number + 1) * BLOCK_NBYTES]

    def close(self) -> None:
        self._server.stop(0).wait(5)
        self._directory.close()
        self._listener.close()
        assert self._endpoint.close(5.0)

    def _method(self, verb: str) -> Callable[[bytes, Any], bytes]:
        right = {"Hello": self._hello, "Digest": self._digest, "Lend": self._lend, "Release": lambda _: b""}[verb]
        spoil = self._spoil.get(verb.lower(), lambda answer: answer)

        def answer(body: bytes, _context: Any) -> bytes:
            self.calls.append(verb)
            return spoil(right(body))

        return answer

    def _hello(self, _body: bytes) -> bytes:
        return pb.HelloReply(protocol_version=1, session_token=b"token").SerializeToString()

    def _digest(self, body: bytes) -> bytes:
        cursor, max_bytes = msgspec.msgpack.decode(pb.DigestRequest.FromString(body).body, type=tuple[Cursor, int])
        answer = self._directory.serve(cursor, max_bytes)
        return pb.DigestReply(body=msgspec.msgpack.encode(answer)).SerializeToString()

    def _lend(self, body: bytes) -> bytes:
        request = pb.LendRequest.FromString(body)
        numbers = range(request.first_needed, len(request.keys) // 16)
        return pb.LendReply(
            lease_id=1,
            loan=LOAN,
            num_blocks=numbers.stop,
            offsets=np.array([i * BLOCK_NBYTES for i in numbers], "<u8").tobytes(),
            generations=np.array([GENERATION for _ in numbers], "<u8").tobytes(),
            checksums=np.array([self._checksums[i] for i in numbers], "<u8").tobytes(),
            expires_in_s=5.0,
        ).SerializeToString()

    def _accept(self, link: Connected) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_talk, args=(link, sock), daemon=True).start()


def _talk(link: Connected, sock: socket.socket) -> None:
    with sock:
        try:
            link(sock)
        except OSError:  # the other side has had enough
            return


def _nobody(*_question: object) -> Any:
    raise AssertionError("it has no peers to ask")


# --- ways to misbehave ----------------------------------------------------------------------------------------------------


def garbage(_right: bytes) -> bytes:
    """Not a message."""
    return b"\xff" * 100


def random_bytes(_right: bytes) -> bytes:
    return os.urandom(300)


def hang(right: bytes) -> bytes:
    """Answer when nobody waits any more."""
    time.sleep(1.5)
    return right


def changed(message: type, **fields: Any) -> Spoil:
    """The right answer with other fields."""

    def spoil(right: bytes) -> bytes:
        reply = message.FromString(right)
        for name, value in fields.items():
            setattr(reply, name, value)
        return reply.SerializeToString()

    return spoil


def say_garbage(sock: socket.socket) -> None:
    while True:
        sock.sendall(os.urandom(4096))


def say_nothing(sock: socket.socket) -> None:
    sock.settimeout(10.0)
    while sock.recv(4096):
        pass


def hang_up(_sock: socket.socket) -> None:
    pass
