"""A real `kvstore serve` for tests, and what it takes to look at it from outside."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from kvstore.client import Client
from kvstore.core.keys import KVSpec
from kvstore.proto import kvstore_pb2 as pb

ROOT = Path(__file__).parent.parent.parent
START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0
WAIT_DEADLINE_S = 10.0

SPEC = KVSpec(weights="tests", num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16")
"""Blocks of 16 KiB."""
BLOCK_NBYTES = SPEC.block_nbytes


class SidecarProcess:
    """`kvstore serve` on `socket`, with a small arena of 1 MiB segments."""

    def __init__(self, socket: Path, *flags: str, arena: str = "16MiB") -> None:
        self.socket = socket
        self._command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--socket", str(socket)]
        self._command += ["--arena", arena, "--segment", "1MiB", *flags]
        self._log = socket.with_suffix(".log")
        self._child: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def spawn(self) -> None:
        """Start without waiting."""
        with self._log.open("a") as log:
            self._child = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )

    def start(self) -> "SidecarProcess":
        """Start and wait for the line that says it is ready."""
        self.spawn()
        return self.wait_until_ready()

    def wait_until_ready(self) -> "SidecarProcess":
        """After `spawn`."""
        line = read_line(self._child, START_DEADLINE_S)
        assert line.startswith("kvstore ready"), line + self.log
        return self

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()
        self._child.communicate(timeout=STOP_DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM; the exit status. Idempotent."""
        assert self._child is not None
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
        try:
            status = self._child.wait(STOP_DEADLINE_S)
        finally:
            self._child.kill()
            assert self._child.stdout is not None
            self._child.stdout.close()
        return status

    def alive(self) -> bool:
        assert self._child is not None
        return self._child.poll() is None


def read_line(child: subprocess.Popen[str] | None, deadline_s: float) -> str:
    """One line of the child's standard output. The children print a line at a time, so nothing stays in a buffer."""
    assert child is not None
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], deadline_s)
    assert ready, f"no line within {deadline_s} s"
    return child.stdout.readline().strip()


@contextlib.contextmanager
def running_sidecar(folder: Path, *flags: str, arena: str = "16MiB") -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(folder / "kvstore.sock", *flags, arena=arena)
    try:
        yield sidecar.start()
    finally:
        sidecar.stop()


@contextlib.contextmanager
def connected(
    sidecar: SidecarProcess,
    *,
    spec: KVSpec = SPEC,
    instance: bytes | None = None,
    role: int = pb.BOTH,
    call_deadline_s: float = 5.0,
) -> Iterator[Client]:
    """An engine's client in this process, with deadlines for a busy machine."""
    client = Client(
        str(sidecar.socket),
        instance=uuid.uuid4().bytes if instance is None else instance,
        role=role,
        specs=[spec],
        connect_deadline_s=5.0,
        call_deadline_s=call_deadline_s,
    )
    with client:
        yield client


@contextlib.contextmanager
def tool(sidecar: SidecarProcess) -> Iterator[Client]:
    with Client(str(sidecar.socket), role=pb.TOOL, connect_deadline_s=5.0, call_deadline_s=5.0) as client:
        yield client


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = WAIT_DEADLINE_S) -> None:
    """Poll, since the other side is a process of its own."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.01)


def wait_until_faulted(client: Client) -> int:
    """Wait until the whole arena is given out; its size."""
    assert client.arena is not None
    nbytes = len(client.arena.array)
    wait_until(lambda: client.stats().tiers[0].capacity_bytes == nbytes, "arena faulted")
    return nbytes
