"""Which blocks of the arena each lease of a peer covers, as the threads that serve peers see it."""

from collections.abc import Iterable, Sequence

from kvstore.core.blocks import Extent


class LeaseGate:
    """A Gatekeeper (transport/link.py). The brain loop grants and releases; serving threads ask.

    A grant is put in place and taken away in one step of the interpreter, so there is no lock. Whole blocks are granted and
    whole blocks are read. A read that has begun goes on after `release`: its slot's generation changes when the slot is
    given out again, and the reader is told.
    """

    def __init__(self) -> None:
        self._granted: dict[bytes, frozenset[Extent]] = {}

    def __len__(self) -> int:
        return len(self._granted)

    def grant(self, lease: bytes, extents: Iterable[Extent]) -> None:
        """Until `release`, whoever shows `lease` may read these. Replaces what it covered before."""
        self._granted[lease] = frozenset(extents)

    def release(self, lease: bytes) -> None:
        """The lease has ended. Idempotent."""
        self._granted.pop(lease, None)

    def may_read(self, lease: bytes, extents: Sequence[Extent]) -> bool:
        """Gatekeeper.may_read."""
        return self._granted.get(lease, frozenset()).issuperset(extents)
