"""A process whose arena others read with one-sided reads, and which takes no part: python rdma_owner.py NBYTES SEED.

It writes its descriptor in hex, then closes when its standard input ends. Slot n of 64 KiB has generation n + 1.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore.transport.rdma import RdmaEndpoint

ROOT = Path(__file__).parent.parent.parent
SLOT = 64 << 10
PAGE = 4096


def arena_of(nbytes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes and their generations, as both sides know them."""
    memory = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    generations = (np.arange(nbytes // PAGE, dtype=np.uint64) * np.uint64(PAGE)) // np.uint64(SLOT) + np.uint64(1)
    return memory, generations


class OwnerProcess:
    """`serve` in a process of its own."""

    def __init__(self, nbytes: int, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(nbytes), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        self.descriptor = bytes.fromhex(self._process.stdout.readline())
        self.pid = self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        """As it should: the endpoint is closed first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(20) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(20)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def running_owner(nbytes: int, seed: int = 1) -> Iterator[OwnerProcess]:
    owner = OwnerProcess(nbytes, seed)
    try:
        yield owner
    finally:
        owner.kill()


def serve(nbytes: int, seed: int) -> None:
    memory, generations = arena_of(nbytes, seed)
    endpoint = RdmaEndpoint(memory=memory, generations=generations).open()
    print(endpoint.describe().hex(), flush=True)
    sys.stdin.read()
    assert endpoint.close(10.0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
