"""A process that serves a small arena over TCP to whoever shows LEASE; prints its descriptor and blocks until its input ends."""

import sys

from link_nodes import DEADLINE_S, LEASE, SECRET, SEGMENT, SLOT, Node

from kvstore.core.blocks import Extent
from kvstore.transport.tcp import TcpEndpoint, TcpSecurity

NUM_SEGMENTS = 4


def main() -> None:
    node = Node(
        lambda node: TcpEndpoint(
            memory=node.memory,
            generations=node.arena.generations,
            gatekeeper=node.gate,
            security=TcpSecurity(secret=SECRET),
            fd=node.arena.fd,
        ),
        seed=1,
        num_segments=NUM_SEGMENTS,
    )
    node.arena.generations[:] = 1
    node.gate.grant(LEASE, [Extent(offset, SLOT, 1) for offset in range(0, NUM_SEGMENTS * SEGMENT, SLOT)])
    sys.stdout.write(node.endpoint.describe().hex() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    node.endpoint.close(DEADLINE_S)


if __name__ == "__main__":
    main()
