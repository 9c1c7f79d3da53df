"""KV events and Locate of a real sidecar: a router follows what its tiers hold, over a restart too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from sidecar_process import connected, running_sidecar, tool, wait_until, wait_until_faulted

from kvstore.core.keys import NAMESPACE_NBYTES
from kvstore.proto import kvstore_pb2 as pb

pytestmark = pytest.mark.e2e
WAIT_S = 30.0  # the drive may be busy with others
WAIT_MS = 30_000
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
NUMBERS = [int.from_bytes(key[8:], "big") for key in KEYS]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def addresses(folder: Path) -> tuple[str, ...]:
    return (
        *("--events", f"ipc://{folder}/events"),
        *("--events-replay", f"ipc://{folder}/replay"),
        *("--events-topic", "kv@node@model"),
    )


def replayed(context: zmq.Context, folder: Path) -> list[dict[str, Any]]:
    """Every event so far, by way of the replay socket; numbers and topic are checked."""
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/replay")
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    events: list[dict[str, Any]] = []
    for number in range(1000):
        assert socket.poll(WAIT_MS), "no answer"
        _, topic, sequence, payload = socket.recv_multipart()
        if sequence == b"\xff" * 8:
            socket.close(linger=0)
            return events
        assert (topic, int.from_bytes(sequence, "big")) == (b"kv@node@model", number)
        events += msgspec.msgpack.decode(payload)[1]
    raise AssertionError("the replay has no end")


def test_events_name_what_each_tier_holds_and_locate_says_the_same(tmp_path: Path, context: zmq.Context) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    flags = (*addresses(tmp_path), "--no-grpc", "--nvme", str(drive), "--nvme-bytes", "16MiB")
    live = context.socket(zmq.SUB)
    live.subscribe("kv@")
    live.connect(f"ipc://{tmp_path}/events")
    with running_sidecar(tmp_path, *flags) as sidecar, connected(sidecar) as client:
        wait_until_faulted(client)
        live.poll(500)  # it was connected before there was anybody, and subscribes again only when it is looked at
        namespace = client.namespaces[0].namespace
        lease = client.reserve("one", namespace, KEYS)
        client.commit(lease.lease_id)
        both = {(medium, number) for medium in ("CPU", "STORAGE") for number in NUMBERS}
        wait_until(lambda: index_of(replayed(context, tmp_path)) == both, "both tiers are told", WAIT_S)

        here = client.locate(namespace, [*KEYS, b"?" * 16])
        nowhere = client.locate(namespace, [b"?" * 16])
        with tool(sidecar) as operator:
            seen_by_operator = operator.locate(namespace, KEYS[:3])
        for key in reversed(KEYS[4:]):
            assert client.drop(namespace, [key]) == 1
        assert live.poll(WAIT_MS), "nothing came"
        wait_until(lambda: len(index_of(replayed(context, tmp_path))) == 8, "the drops are told", WAIT_S)
        events = replayed(context, tmp_path)

    assert here == [pb.NodeHolding(num_blocks=8, here=True)]
    assert nowhere == []
    assert seen_by_operator == [pb.NodeHolding(num_blocks=3, here=True)]
    assert events[0] == {"type": "AllBlocksCleared"}
    owner = f"kvstore:{namespace.hex()}"
    assert {event["ownership"] for event in events if event["type"] != "AllBlocksCleared"} == {owner}
    assert len(owner) == len("kvstore:") + 2 * NAMESPACE_NBYTES
    assert index_of(events) == {(medium, number) for medium in ("CPU", "STORAGE") for number in NUMBERS[:4]}

    with running_sidecar(tmp_path, *flags):
        kept = {("STORAGE", number) for number in NUMBERS[:4]}
        wait_until(lambda: index_of(replayed(context, tmp_path)) == kept, "what is on the drive is told", WAIT_S)
    live.close(linger=0)


def index_of(events: list[dict[str, Any]]) -> set[tuple[str, int]]:
    """What a router believes after them."""
    blocks: set[tuple[str, int]] = set()
    for event in events:
        named = {(event["medium"], number) for number in event.get("block_hashes", ())} if "medium" in event else set()
        match event["type"]:
            case "AllBlocksCleared":
                blocks.clear()
            case "BlockStored":
                blocks |= named
            case "BlockRemoved":
                blocks -= named
    return blocks


def test_a_sidecar_whose_events_cannot_be_bound_says_so(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from kvstore.cli.main import cli
    from kvstore.core.errors import ConfigError

    flags = ["--socket", str(tmp_path / "s"), "--no-grpc", "--arena", "64MiB", "--events", "ipc:///nowhere/at/all"]
    result = CliRunner().invoke(cli, ["serve", *flags])

    assert isinstance(result.exception, ConfigError)
    assert result.exception.fields["field"] == "events"
