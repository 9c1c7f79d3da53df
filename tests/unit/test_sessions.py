"""When an engine's memory comes back: real processes and pidfds, and a store that only notes what it is told."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.core.blocks import Holder
from kvstore.core.clock import MonotonicClock
from kvstore.core.errors import Overloaded, RemoteProtocolError
from kvstore.core.limits import MAX_PROCESSES_PER_INSTANCE, MAX_SESSIONS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sessions import Peer, Session, Sessions

DEADLINE_S = 5.0
ENGINE, OTHER = b"engine".ljust(16), b"other".ljust(16)


class NotingStore:
    """Every instance is in limbo until its end, unless said otherwise."""

    def __init__(self) -> None:
        self.ended_sessions: list[Holder] = []
        self.ended_instances: list[bytes] = []
        self.in_limbo = True

    def end_session(self, holder: Holder, now_s: float) -> None:
        self.ended_sessions.append(holder)

    def end_instance(self, instance: bytes, now_s: float) -> None:
        self.ended_instances.append(instance)

    def instance_in_limbo(self, instance: bytes) -> bool:
        return self.in_limbo and instance not in self.ended_instances


class House:
    """Sessions, the store behind them, and the connections they closed."""

    def __init__(self, *, unverified_drain_s: float = 0.0, cuda_drain_s: float = 0.0) -> None:
        self.store = NotingStore()
        self.closed: list[str] = []
        self.sessions = Sessions(
            self.store,
            loop=asyncio.get_running_loop(),
            clock=MonotonicClock(),
            unverified_drain_s=unverified_drain_s,
            cuda_drain_s=cuda_drain_s,
        )

    def open(
        self,
        process: subprocess.Popen[bytes] | None,
        *,
        instance: bytes = ENGINE,
        tenant: str = "",
        cuda: bool = False,
        hidden_pid: bool = False,
        arena: bool = True,
    ) -> Session:
        pidfd = os.pidfd_open(process.pid) if process else None
        pid = 0 if process is None or hidden_pid else process.pid
        session = self.sessions.open(
            instance=instance,
            tenant=tenant,
            role=pb.BOTH if instance else pb.TOOL,
            rank=0,
            namespaces=frozenset(),
            has_arena=arena,
            cuda_registered=cuda,
            peer=Peer(pid, pidfd, local=True, trusted=True, close=self.closed.append),
        )
        self.sessions.check()
        return session

    def end(self, session: Session) -> None:
        self.sessions.end(session)
        self.sessions.check()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)
        self.sessions.check()


@contextmanager
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    gc.collect()  # mappings of earlier tests hold descriptors until they are collected
    before = num_fds()
    asyncio.run(scenario())
    assert num_fds() == before, "a pidfd was not closed"


def test_a_closed_connection_ends_the_session_and_a_dead_process_the_instance() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            session = house.open(engine)

            house.end(session)
            await asyncio.sleep(0)
            assert house.store.ended_sessions == [session.holder]
            assert house.store.ended_instances == []

            engine.kill()
            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])
            assert house.sessions.num_instances == 0

    run(scenario)


def test_a_dead_process_ends_its_session_even_if_a_child_keeps_the_socket() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            session = house.open(engine)

            engine.kill()

            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])
            assert house.store.ended_sessions == [session.holder]
            assert house.closed == ["its process ended"]
            assert len(house.sessions) == 0

    run(scenario)


def test_an_instance_ends_with_its_last_process() -> None:
    async def scenario() -> None:
        house = House()
        with process() as scheduler, process() as worker:
            first, second = house.open(scheduler, arena=False), house.open(worker)
            worker.kill()
            await house.wait_for(lambda: house.store.ended_sessions == [second.holder])
            house.end(first)
            assert house.store.ended_instances == []

            scheduler.kill()

            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])

    run(scenario)


def test_a_stopped_process_is_not_dead() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine, process() as marker:
            house.open(marker, instance=OTHER)
            house.end(house.open(engine))
            engine.send_signal(signal.SIGSTOP)
            marker.kill()
            await house.wait_for(lambda: OTHER in house.store.ended_instances)

            assert ENGINE not in house.store.ended_instances
            engine.kill()
            await house.wait_for(lambda: ENGINE in house.store.ended_instances)

    run(scenario)


def test_an_engine_that_confirmed_everything_is_forgotten_alive() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            session = house.open(engine)
            house.store.in_limbo = False

            house.end(session)

            assert house.sessions.num_instances == 0
            assert house.store.ended_instances == []

    run(scenario)


def test_an_engine_that_comes_back_is_watched_once_and_keeps_its_limbo() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            before = num_fds()
            house.end(house.open(engine))
            second, third = house.open(engine), house.open(engine)
            assert num_fds() == before + 1

            house.end(second)
            house.end(third)
            engine.kill()
            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])

    run(scenario)


def test_processes_whose_number_is_hidden_are_told_apart() -> None:
    """Two containers of one engine: both have pid 0 here, and the first's end is not the second's."""

    async def scenario() -> None:
        house = House()
        with process() as first, process() as second:
            house.end(house.open(first, hidden_pid=True))
            house.end(house.open(second, hidden_pid=True))
            first.kill()
            await asyncio.to_thread(first.wait, DEADLINE_S)
            await asyncio.sleep(0.02)
            assert house.store.ended_instances == []

            second.kill()
            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])

    run(scenario)


def test_processes_that_cannot_be_watched_drain_from_their_last_connection_on() -> None:
    async def scenario() -> None:
        house = House(unverified_drain_s=0.1)
        first = house.open(None)
        house.end(first)
        assert house.store.ended_instances == []
        second = house.open(None)  # back within the drain
        await asyncio.sleep(0.15)
        assert house.store.ended_instances == []

        house.end(second)
        started_s = asyncio.get_running_loop().time()
        await house.wait_for(lambda: house.store.ended_instances == [ENGINE])
        assert asyncio.get_running_loop().time() - started_s >= 0.09

    run(scenario)


def test_a_process_that_registered_cuda_drains_after_its_death() -> None:
    async def scenario() -> None:
        house = House(cuda_drain_s=0.1)
        with process() as engine:
            session = house.open(engine, cuda=True)
            engine.kill()
            await house.wait_for(lambda: house.store.ended_sessions == [session.holder])
            assert house.store.ended_instances == []
            await house.wait_for(lambda: house.store.ended_instances == [ENGINE])

    run(scenario)


def test_who_may_write() -> None:
    async def scenario() -> None:
        house = House()
        scheduler = house.open(None, arena=False)
        assert not house.sessions.may_write(scheduler)

        worker = house.open(None)
        assert house.sessions.may_write(worker)
        assert house.sessions.may_write(scheduler)
        assert not house.sessions.may_write(house.open(None, instance=OTHER, arena=False))

        house.end(worker)
        assert not house.sessions.may_write(scheduler)

    run(scenario)


def test_limits_are_named() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            for _ in range(MAX_PROCESSES_PER_INSTANCE):
                house.open(engine, hidden_pid=True)
            with pytest.raises(Overloaded, match="processes"):
                house.open(None)
        with pytest.raises(RemoteProtocolError, match="tenant"):
            house.open(None, tenant="another")
        for _ in range(MAX_SESSIONS - len(house.sessions)):
            house.sessions.open(
                instance=b"",
                tenant="",
                role=pb.TOOL,
                rank=0,
                namespaces=frozenset(),
                has_arena=False,
                cuda_registered=False,
                peer=Peer(0, None, local=True, trusted=True, close=house.closed.append),
            )
        with pytest.raises(Overloaded, match="sessions"):
            house.open(None, instance=OTHER)
        house.sessions.close()

    run(scenario)


def test_closing_closes_every_connection_and_descriptor() -> None:
    async def scenario() -> None:
        house = House()
        with process() as engine:
            house.open(engine)
            house.open(engine, instance=OTHER)

            house.sessions.close()

            assert house.closed == ["the sidecar stops"] * 2
            assert house.sessions.num_instances == 0

    run(scenario)
