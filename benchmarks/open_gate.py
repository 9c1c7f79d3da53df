"""A gatekeeper that lets everybody read, for benchmarks: leases are not what they measure."""

from collections.abc import Sequence

from kvstore.core.blocks import Extent


class OpenGate:
    def may_read(self, lease: bytes, extents: Sequence[Extent]) -> bool:
        del lease, extents
        return True
