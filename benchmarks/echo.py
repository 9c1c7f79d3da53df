"""A process that sends back what it gets, on a Unix socket, on the loop that the sidecar uses: the limit for its calls.

`python -m benchmarks.echo PATH` serves until its standard input ends.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import uvloop

_START_DEADLINE_S = 30.0
_CALL_DEADLINE_S = 10.0


class EchoClient:
    """A blocking connection to an echo process."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_CALL_DEADLINE_S)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def call(self, payload: bytes) -> None:
        self._socket.sendall(payload)
        missing = len(payload)
        while missing:
            missing -= len(self._socket.recv(missing))

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def running_echo(path: Path) -> Iterator[EchoClient]:
    """An echo process at `path`, and a connection to it; both end with the block."""
    command = [sys.executable, "-m", "benchmarks.echo", str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        client = _connect(path)
        try:
            yield client
        finally:
            client.close()
            assert server.stdin is not None
            server.stdin.close()


def _connect(path: Path) -> EchoClient:
    until_s = time.monotonic() + _START_DEADLINE_S
    while True:
        try:
            return EchoClient(path)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < until_s, "the echo process did not start"
            time.sleep(0.02)


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, of that interface

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _serve(path: str) -> None:
    loop = asyncio.get_running_loop()
    stdin_ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), stdin_ended.set)
    server = await loop.create_unix_server(_Echo, path)
    async with server:
        await stdin_ended.wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
