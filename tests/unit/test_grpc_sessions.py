"""Sessions over gRPC, which anybody who reaches the port may open: they leave room for engines on the local socket."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import Config
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Overloaded
from kvstore.core.limits import MAX_GRPC_SESSIONS, MAX_SESSIONS, MAX_UNPROVEN_SESSIONS
from kvstore.grpc_server import GrpcServer
from kvstore.proto import kvstore_pb2 as pb


def hello(role: int, **fields: Any) -> bytes:
    return pb.HelloRequest(protocol_version=1, role=role, **fields).SerializeToString()


class OpensAll:
    """A Dispatcher that refuses nobody, and Sessions that know nobody."""

    def __init__(self) -> None:
        self.num_ended = 0

    def parse(self, _verb: object, body: bytes) -> pb.HelloRequest:
        return pb.HelloRequest.FromString(body)

    def hello(self, request: pb.HelloRequest, _peer: object) -> tuple[SimpleNamespace, pb.HelloReply]:
        return SimpleNamespace(role=request.role, session_id=1), pb.HelloReply()

    def end(self, _session: object) -> None:
        self.num_ended += 1


def test_strangers_leave_room_for_peers_and_both_for_engines() -> None:
    async def run() -> None:
        everybody: Any = OpensAll()
        loop = asyncio.get_running_loop()
        server = GrpcServer(
            "", Config(), dispatcher=everybody, sessions=everybody, loop=loop, clock=MonotonicClock(), idle_s=0.05
        )
        for _ in range(MAX_UNPROVEN_SESSIONS):
            server._hello(hello(pb.TOOL), "ipv4:10.0.0.9:4711")
        with pytest.raises(Overloaded) as refused:
            server._hello(hello(pb.BOTH), "ipv4:10.0.0.9:4711")
        assert refused.value.fields["limit"] == "MAX_UNPROVEN_SESSIONS"

        for _ in range(MAX_GRPC_SESSIONS - MAX_UNPROVEN_SESSIONS):
            server._hello(hello(pb.PEER), "ipv4:10.0.0.1:4711")
        with pytest.raises(Overloaded) as refused:
            server._hello(hello(pb.PEER), "ipv4:10.0.0.1:4711")
        assert refused.value.fields["limit"] == "MAX_GRPC_SESSIONS"

        await asyncio.sleep(0.2)  # idle: they end
        assert everybody.num_ended == MAX_GRPC_SESSIONS
        server._hello(hello(pb.TOOL), "unix:")

    asyncio.run(run())
    assert MAX_UNPROVEN_SESSIONS < MAX_GRPC_SESSIONS <= MAX_SESSIONS // 2
