"""A process whose arena others read by one-sided reads: `python -m benchmarks.rdma_owner POOL_MIB BLOCK_BYTES` prints one line of
JSON and serves until its standard input ends. It does nothing else: that is the point."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvstore.transport.rdma import RdmaEndpoint

PAGE = 4096
_CLOSE_S = 5.0


class Owner(NamedTuple):
    """A running owner process."""

    pid: int
    descriptor: bytes
    checksums: list[int]  # of each block

    def cpu_s(self) -> float:
        """Processor time it has used: the clock of another process, as clock_getcpuclockid(3) names it."""
        return time.clock_gettime((~self.pid << 3) | 2)


@contextlib.contextmanager
def running_owner(pool_mib: int, block_nbytes: int) -> Iterator[Owner]:
    command = [sys.executable, "-m", "benchmarks.rdma_owner", str(pool_mib), str(block_nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield Owner(process.pid, bytes.fromhex(told["descriptor"]), told["checksums"])
        finally:
            process.stdin.close()


def _main(pool_mib: int, block_nbytes: int) -> None:
    memory = np.random.default_rng(1).integers(0, 256, pool_mib << 20, np.uint8)
    endpoint = RdmaEndpoint(memory=memory, generations=np.zeros(memory.nbytes // PAGE, np.uint64)).open()
    told = {
        "descriptor": endpoint.describe().hex(),
        "checksums": [xxh3_64_intdigest(block) for block in memory.reshape(-1, block_nbytes)],
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    endpoint.close(_CLOSE_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
