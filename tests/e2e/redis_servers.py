"""Real Redis servers (Debian's package) for tests: one on a Unix socket, or a cluster of three."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

START_DEADLINE_S = 15.0
CLUSTER_BUS_OFFSET = 10_000


def require_redis() -> None:
    """Skip where there is no server. `sh tests/setup_debian.sh` installs it."""
    if shutil.which("redis-server") is None or shutil.which("redis-cli") is None:
        pytest.skip("redis-server is not installed: sh tests/setup_debian.sh")


class RedisServer:
    """One server. What it holds is in memory only, so that a kill loses it, unless `keeps` says to write it down."""

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port
        self.socket = folder / "redis.sock"
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket}"

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder), *self._options]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(lambda: self.cli("ping").strip() == "PONG", "the server answers", START_DEADLINE_S)

    def cli(self, *words: str) -> str:
        command = ["redis-cli", "-s", str(self.socket), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
            self.socket.unlink(missing_ok=True)


@contextlib.contextmanager
def running_redis(folder: Path, *options: str) -> Iterator[RedisServer]:
    """One server on a Unix socket."""
    require_redis()
    server = RedisServer(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_redis_cluster(folder: Path) -> Iterator[list[RedisServer]]:
    """Three servers that share the key space, on free ports of 127.0.0.1."""
    require_redis()
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no")
    servers = [RedisServer(folder / str(port), *options, port=port) for port in free_ports(3)]
    try:
        for server in servers:
            server.start()
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert made.returncode == 0, made.stdout + made.stderr
        wait_for(
            lambda: all("cluster_state:ok" in server.cli("cluster", "info") for server in servers),
            "the cluster agrees",
            START_DEADLINE_S,
        )
        yield servers
    finally:
        for server in servers:
            server.kill()


def free_ports(count: int) -> list[int]:
    """Ports that are free with their cluster bus ports."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port + CLUSTER_BUS_OFFSET > 65535:
                continue
            with contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + CLUSTER_BUS_OFFSET))
                found.append(port)
    return found


def wait_for(condition: Callable[[], object], what: str, deadline_s: float) -> None:
    """Poll: the other side is another process or thread."""
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"not within {deadline_s} s: {what}"
        time.sleep(0.005)
