"""A real sidecar process for a benchmark, gone when the block ends."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.client import Client
from kvstore.core.errors import PeerUnavailable
from kvstore.demo.processes import Process, Sidecar
from kvstore.proto.kvstore_pb2 import TOOL

_START_DEADLINE_S = 60.0
_POLL_S = 0.05


@contextlib.contextmanager
def running_sidecar(arena_nbytes: int, *options: str) -> Iterator[Path]:
    """The path of its socket; its whole arena has been faulted in by then."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", ignore_cleanup_errors=True) as folder:
        socket = Path(folder) / "kvstore.sock"
        sidecar = Sidecar(Path(folder), socket, str(arena_nbytes), Path(folder) / "sidecar.log", *options)
        sidecar.start()
        try:
            until_faulted(sidecar, socket, arena_nbytes)
            yield socket
        finally:
            sidecar.stop()


def until_faulted(sidecar: Process, socket: Path, arena_nbytes: int) -> None:
    """Wait until the whole arena of a sidecar that has been started may be given out. Raises ProcessFailed."""
    until_s = time.monotonic() + _START_DEADLINE_S
    with contextlib.closing(Client(str(socket), role=TOOL)) as client:
        while _capacity_bytes(client) < arena_nbytes:
            if not sidecar.running:
                raise sidecar.failure("ended at start")
            if time.monotonic() > until_s:
                raise sidecar.failure(f"not ready within {_START_DEADLINE_S:.0f} s")
            time.sleep(_POLL_S)


def _capacity_bytes(client: Client) -> int:
    """Bytes that may be given out so far; 0 while nobody answers."""
    try:
        if not client.connected:
            client.connect()
        return client.stats().tiers[0].capacity_bytes
    except PeerUnavailable:
        return 0
