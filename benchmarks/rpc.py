"""How long does the engine wait for the sidecar's word on 512 blocks (8,192 tokens)?

Match (owns nothing), Acquire (matches and leases, in one call) and Release, through the local socket and through gRPC,
beside an echo of the Match's bytes to another process over a Unix socket on the same event loop. They take turns; an
Acquire's lease is released by the next Release. An engine asks Match and then Acquire, since it needs pages in between:
what stands between a request and its load is the sum of both.
"""

import contextlib
import itertools
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.message import Message

from benchmarks.echo import running_echo
from benchmarks.harness import Report, Row, at_most, interleave, machine_card, millis, show
from benchmarks.sidecar import running_sidecar
from kvstore.client import Client
from kvstore.core.keys import KVSpec, pack_keys
from kvstore.proto import kvstore_pb2 as pb

QUESTION = "Match and lease through the local socket and through gRPC"
GOAL_P50_MS, GOAL_P99_MS = 0.3, 1.0
ARENA_BYTES = 128 << 20
_GRPC_START_DEADLINE_S = 30.0  # it is served a little later than the local socket

SPEC = KVSpec(weights="benchmark:rpc", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16")
"""Blocks of 4 KiB: only keys travel, so the size of a block does not matter."""


def run(*, num_keys: int = 512, rounds: int = 2000, warm_up: int = 50) -> Report:
    keys = [uuid.uuid4().bytes for _ in range(num_keys)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
        echo = stack.enter_context(running_echo(Path(folder) / "echo.sock"))
        socket = stack.enter_context(running_sidecar(ARENA_BYTES))
        local = stack.enter_context(_connected(socket))
        _fill(local.client, keys)
        remote = stack.enter_context(_grpc_session(socket))
        for session in (local, remote):  # one lease ahead, since every other round begins with the Release
            session.acquire(keys)
        request = pb.MatchRequest(namespace=local.namespace, keys=pack_keys(keys)).SerializeToString()
        samples = interleave(
            {
                "echo of the Match's bytes": lambda: echo.call(request),
                "Match": lambda: local.match(keys),
                "Acquire": lambda: local.acquire(keys),
                "Release": local.release,
                "gRPC Match": lambda: remote.match(keys),
                "gRPC Acquire": lambda: remote.acquire(keys),
                "gRPC Release": remote.release,
            },
            rounds=rounds,
            warm_up=warm_up,
        )
    rows: list[Row] = [
        {
            "case": name,
            "keys": num_keys,
            "p50_ms": millis(taken.median_s),
            "p99_ms": millis(taken.p99_s),
            "n": len(taken),
        }
        for name, taken in samples.items()
    ]
    goals = [
        goal
        for name in ("Match", "Acquire")
        for goal in (
            at_most(f"{name}, p50 in ms", millis(samples[name].median_s), GOAL_P50_MS),
            at_most(f"{name}, p99 in ms", millis(samples[name].p99_s), GOAL_P99_MS),
        )
    ]
    both_ms = millis(samples["Match"].median_s + samples["Acquire"].median_s)
    goals.append(at_most("Match and then Acquire, sum of p50 in ms", both_ms, GOAL_P50_MS))
    return Report(question=QUESTION, command="python -m benchmarks.rpc", rows=rows, goals=goals)


class _Local:
    """The verbs over the local socket, by the client that engines use."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.namespace = client.namespaces[0].namespace
        self._requests = itertools.count()
        self._lease_ids: deque[int] = deque()

    def match(self, keys: list[bytes]) -> None:
        assert self.client.match(self.namespace, keys).num_blocks == len(keys)

    def acquire(self, keys: list[bytes]) -> None:
        grant = self.client.acquire(f"request-{next(self._requests)}", self.namespace, keys)
        assert len(grant.offsets) == len(keys)
        self._lease_ids.append(grant.lease_id)

    def release(self) -> None:
        self.client.release(self._lease_ids.popleft(), pb.LOADED)


class _Grpc:
    """The same verbs over gRPC."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        hello = pb.HelloRequest(protocol_version=1, instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC.canonical()])
        reply = self._verb("Hello", pb.HelloReply)(hello, wait_for_ready=True, timeout=_GRPC_START_DEADLINE_S)
        self._namespace = reply.namespaces[0].namespace
        self._metadata = (("kvstore-session", reply.session_token.decode("latin-1")),)
        self._match = self._verb("Match", pb.MatchReply)
        self._acquire = self._verb("Acquire", pb.AcquireReply)
        self._release = self._verb("Release", pb.ReleaseReply)
        self._requests = itertools.count()
        self._lease_ids: deque[int] = deque()

    def match(self, keys: list[bytes]) -> None:
        request = pb.MatchRequest(namespace=self._namespace, keys=pack_keys(keys))
        assert self._match(request, metadata=self._metadata).num_blocks == len(keys)

    def acquire(self, keys: list[bytes]) -> None:
        request_id = f"request-{next(self._requests)}"
        acquire = pb.AcquireRequest(request_id=request_id, namespace=self._namespace, keys=pack_keys(keys))
        grant = self._acquire(acquire, metadata=self._metadata)
        assert grant.num_blocks == len(keys)
        self._lease_ids.append(grant.lease_id)

    def release(self) -> None:
        request = pb.ReleaseRequest(lease_id=self._lease_ids.popleft(), outcome=pb.LOADED)
        self._release(request, metadata=self._metadata)

    def _verb(self, name: str, reply: type[Message]) -> Any:  # grpc has no types
        return self._channel.unary_unary(
            f"/kvstore.v1.KVStore/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )


def _fill(client: Client, keys: list[bytes]) -> None:
    """Make `keys` a READY prefix."""
    grant = client.reserve("fill", client.namespaces[0].namespace, keys)
    assert len(grant.offsets) == len(keys), grant.declined_reason
    client.commit(grant.lease_id, keys)


@contextlib.contextmanager
def _connected(socket: Path) -> Iterator[_Local]:
    client = Client(str(socket), instance=uuid.uuid4().bytes, role=pb.BOTH, specs=[SPEC], call_deadline_s=5.0)
    client.connect()
    with contextlib.closing(client):
        yield _Local(client)


@contextlib.contextmanager
def _grpc_session(socket: Path) -> Iterator[_Grpc]:
    with grpc.insecure_channel(f"unix:{socket}.grpc") as channel:
        yield _Grpc(channel)


@click.command()
@click.option("--keys", default=512, show_default=True)
@click.option("--rounds", default=2000, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(*, keys: int, rounds: int, as_json: bool) -> None:
    card = machine_card()
    show(run(num_keys=keys, rounds=rounds), card, as_json=as_json)


if __name__ == "__main__":
    main()
