"""The assembly in this process: what a drive that hangs holds up, which is nothing."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.config import Config
from kvstore.core.errors import ConfigError, TierIOError
from kvstore.proto import kvstore_pb2 as pb
from kvstore.sidecar import Sidecar
from kvstore.tiers.nvme.tier import NvmeTier

DEADLINE_S = 10.0
MIB = 1 << 20


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Opening the drives hangs until this is set."""
    event = threading.Event()
    monkeypatch.setattr(NvmeTier, "open", lambda _: event.wait(2 * DEADLINE_S))
    yield event
    event.set()


def config(tmp_path: Path) -> Config:
    return Config(
        socket=str(tmp_path / "s"),
        arena_bytes=4 * MIB,
        segment_bytes=MIB,
        nvme=(str(tmp_path / "drive"),),
        nvme_bytes=4 * MIB,
        grpc=False,
    )


async def answer(path: Path) -> pb.StatsReply:
    """Hello and Stats, as soon as there is somebody."""

    def ask() -> pb.StatsReply:
        until_s = time.monotonic() + DEADLINE_S
        while not path.exists():
            assert time.monotonic() < until_s
            time.sleep(0.001)
        with Client(str(path), role=pb.TOOL, connect_deadline_s=DEADLINE_S, call_deadline_s=DEADLINE_S) as client:
            return client.stats()

    return await asyncio.to_thread(ask)


def run(scenario: Callable[[asyncio.Task[None]], "asyncio.Future[None]"], config: Config) -> None:
    async def both() -> None:
        serving = asyncio.create_task(Sidecar(config).run())
        await asyncio.wait_for(scenario(serving), 3 * DEADLINE_S)

    asyncio.run(both())


def test_engines_are_answered_and_sigterm_is_heard_while_a_drive_hangs(
    tmp_path: Path, release: threading.Event
) -> None:
    async def scenario(serving: asyncio.Task[None]) -> None:
        stats = await answer(tmp_path / "s")
        started_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving

        assert time.monotonic() - started_s < 3.0 + 1.0
        (drive,) = stats.tiers[1].drives
        assert (drive.state, drive.reason) == ("recovering", "being opened")
        assert not (tmp_path / "s").exists()

    run(scenario, config(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [ConfigError("nvme: in use", field="nvme", value="x"), TierIOError("nvme: sick", tier="nvme", errno=5)]
)
def test_only_what_the_operator_must_decide_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    def refuse(_: NvmeTier) -> None:
        raise wrong

    monkeypatch.setattr(NvmeTier, "open", refuse)

    async def scenario(serving: asyncio.Task[None]) -> None:
        if isinstance(wrong, ConfigError):
            with pytest.raises(ConfigError, match="in use"):
                await serving
            return
        stats = await answer(tmp_path / "s")
        while stats.tiers[1].drives[0].state != "off":
            stats = await answer(tmp_path / "s")
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert "sick" in stats.tiers[1].drives[0].reason

    run(scenario, config(tmp_path))  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
