"""Threads that ask the brain loop: what they are told when it is busy, slow, hung or gone."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from small_store import SmallStore

from kvstore import grpc_server, loop_calls
from kvstore.config import Config
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import PeerUnavailable
from kvstore.dispatcher import Dispatcher
from kvstore.grpc_server import GrpcServer
from kvstore.loop_calls import call_on_loop
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Sessions


class Size:
    """As much of an arena as a dispatcher wants to know."""

    nbytes = segment_bytes = faulted_nbytes = 1 << 20


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Runs in a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


def block(loop: asyncio.AbstractEventLoop) -> threading.Event:
    """Keep the loop busy until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go_on.wait(10)

    loop.call_soon_threadsafe(busy)
    assert begun.wait(10)
    return go_on


def test_what_the_function_returns_and_raises_comes_back(loop: asyncio.AbstractEventLoop) -> None:
    def late() -> None:
        raise TimeoutError("its own")

    assert call_on_loop(loop, 5.0, divmod, 7, 2) == (3, 1)
    with pytest.raises(TimeoutError, match="its own"):
        call_on_loop(loop, 5.0, late)


def test_a_call_that_the_loop_does_not_come_to_is_never_run(loop: asyncio.AbstractEventLoop) -> None:
    runs: list[int] = []
    go_on = block(loop)

    with pytest.raises(PeerUnavailable, match="too busy"):
        call_on_loop(loop, 0.05, runs.append, 1)

    go_on.set()
    call_on_loop(loop, 5.0, runs.append, 2)
    assert runs == [2]


def test_a_call_that_runs_past_the_deadline_is_answered(loop: asyncio.AbstractEventLoop) -> None:
    """It has had its effect; 'unavailable' would be untrue."""
    past_deadline = threading.Event()

    def slow() -> str:
        past_deadline.wait(0.5)
        return "served"

    assert call_on_loop(loop, 0.1, slow) == "served"


def test_a_call_that_hangs_is_given_up_and_said_to_be_unknown(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_calls, "GRPC_CALL_DEADLINE_S", 0.1)
    go_on = threading.Event()

    with pytest.raises(PeerUnavailable, match="may or may not have been served"):
        call_on_loop(loop, 0.1, go_on.wait, 10)

    go_on.set()


def hanging() -> asyncio.AbstractEventLoop:
    """Nobody runs it."""
    return asyncio.new_event_loop()


def closed() -> asyncio.AbstractEventLoop:
    made = asyncio.new_event_loop()
    made.close()
    return made


@pytest.mark.parametrize("make_loop", [hanging, closed])
def test_grpc_answers_unavailable_when_the_loop_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The loop cannot count the error either."""
    for module in (grpc_server, loop_calls):
        monkeypatch.setattr(module, "GRPC_CALL_DEADLINE_S", 0.1)
    loop, clock, store = make_loop(), MonotonicClock(), SmallStore().store
    sessions = Sessions(store, loop=loop, clock=clock)
    dispatcher = Dispatcher(store=store, sessions=sessions, arena=Size(), boot_id=bytes(16), clock=clock)
    server = GrpcServer(f"{tmp_path}/g", Config(), dispatcher=dispatcher, sessions=sessions, loop=loop, clock=clock)
    server.start()
    try:
        with grpc.insecure_channel(f"unix:{tmp_path}/g") as channel:
            stats = channel.unary_unary("/kvstore.v1.KVStore/Stats")
            with pytest.raises(grpc.RpcError) as error:
                stats(b"")
    finally:
        server.stop(5.0)
        loop.close()

    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    sent = dict(error.value.trailing_metadata())["kvstore-error-bin"]
    assert pb.ErrorReply.FromString(sent).code == "PeerUnavailable"
