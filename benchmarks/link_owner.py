"""A process whose arena others read: over the TCP link, and over plain sockets that send the same bytes.

`python -m benchmarks.link_owner POOL_MIB BLOCK_BYTES` prints one line of JSON and serves until its standard input ends. A
plain connection sends a count (u32) and so many block numbers (u32), and gets those blocks back to back.
"""

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from benchmarks.open_gate import OpenGate
from kvstore.tiers.arena import Arena
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

SECRET = b"a secret of the benchmark"
BUFFER_BYTES = 4 << 20
_CLOSE_S = 5.0


class Owner(NamedTuple):
    """A running owner process."""

    pid: int
    descriptor: bytes
    raw_port: int
    checksums: list[int]  # of each block

    def cpu_s(self) -> float:
        """Processor time it has used: the clock of another process, as clock_getcpuclockid(3) names it."""
        return time.clock_gettime((~self.pid << 3) | 2)


@contextlib.contextmanager
def running_owner(pool_mib: int, block_nbytes: int) -> Iterator[Owner]:
    command = [sys.executable, "-m", "benchmarks.link_owner", str(pool_mib), str(block_nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        try:
            yield Owner(process.pid, bytes.fromhex(told["descriptor"]), told["raw_port"], told["checksums"])
        finally:
            process.stdin.close()


def tuned(sock: socket.socket) -> socket.socket:
    """Buffers as the link's; measured to be best or near it for plain sockets too."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return sock


def _serve_raw(listener: socket.socket, arena: memoryview, block_nbytes: int) -> None:
    while True:
        sock = tuned(listener.accept()[0])
        threading.Thread(target=_send_blocks, args=(sock, arena, block_nbytes), daemon=True).start()


def _send_blocks(sock: socket.socket, arena: memoryview, block_nbytes: int) -> None:
    while count_raw := sock.recv(4, socket.MSG_WAITALL):
        (count,) = struct.unpack("<I", count_raw)
        for (number,) in struct.iter_unpack("<I", sock.recv(4 * count, socket.MSG_WAITALL)):
            rest = arena[number * block_nbytes : (number + 1) * block_nbytes]
            while rest:
                rest = rest[sock.sendmsg([rest]) :]


def _main(pool_mib: int, block_nbytes: int) -> None:
    with Arena(pool_mib << 20, segment_bytes=1 << 20) as arena:
        for segment in range(arena.num_segments):
            arena.fault_segment(segment)
        arena.memory[:] = np.random.default_rng(1).integers(0, 256, arena.nbytes, np.uint8)
        endpoint = TcpEndpoint(
            memory=arena.memory,
            generations=arena.generations,
            gatekeeper=OpenGate(),
            security=TcpSecurity(secret=SECRET),
            fd=arena.fd,
        ).open()
        view = arena.memory.data
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_serve_raw, args=(listener, view, block_nbytes), daemon=True).start()
        blocks = [view[start : start + block_nbytes] for start in range(0, arena.nbytes, block_nbytes)]
        told = {
            "descriptor": endpoint.describe().hex(),
            "raw_port": listener.getsockname()[1],
            "checksums": [xxh3_64_intdigest(block) for block in blocks],
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        endpoint.close(_CLOSE_S)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
