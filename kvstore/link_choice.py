"""Which of the links to a node carries the next blocks: of those that go well, the one that would be done first.

A link is one kind of transport to one network interface of the node. Its speed is what it has carried while it had something to
do; one that was never used counts as fast as the fastest known, so that it is tried when that is busy, and our preference
decides between equals. A link that failed is the last resort for RETRY_S; then it may show whether it is well again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.transport.link import Link

RETRY_S = 5.0

_MIN_WINDOW_S = 0.2  # of busy time, for a bandwidth
_UNKNOWN_BYTES_PER_S = 1e9
_CLOSE_CALL = 1.25  # a link must be so much faster than one that is preferred


@dataclass(slots=True, eq=False)
class KnownLink:
    """A link and what is known of it. `epoch` is the life of the node that it belongs to."""

    name: str  # its kind; with a number where a node has several of the kind
    epoch: int
    link: Link
    bytes_per_s: float | None = None
    _nbytes: int = 0  # carried when it was last measured
    _busy_s: float = 0.0
    _failing_since_s: float | None = None

    def measure(self) -> None:
        """Take in what it has carried since."""
        stats = self.link.stats()
        nbytes, busy_s = stats.nbytes - self._nbytes, stats.busy_s - self._busy_s
        if busy_s >= _MIN_WINDOW_S:
            self.bytes_per_s = max(nbytes / busy_s, 1.0)
            self._nbytes, self._busy_s = stats.nbytes, stats.busy_s

    def is_out(self, now_s: float) -> bool:
        """Whether it failed, and not so long ago that it is worth another try."""
        if self.link.health().state != "failing":
            self._failing_since_s = None
            return False
        if self._failing_since_s is None or now_s - self._failing_since_s > 2 * RETRY_S:
            self._failing_since_s = now_s  # it has just failed, or failed the try that it was given
        return now_s - self._failing_since_s < RETRY_S


def best_first(links: Sequence[KnownLink], nbytes: int, now_s: float) -> list[KnownLink]:
    """In the order in which they are to be asked to carry `nbytes`. `links` in the order of preference."""
    for known in links:
        known.measure()
    fastest = max((known.bytes_per_s or 0.0 for known in links), default=0.0) or _UNKNOWN_BYTES_PER_S

    def order(item: tuple[int, KnownLink]) -> tuple[bool, float]:
        rank, known = item
        done_s = (known.link.stats().queued_nbytes + nbytes) / (known.bytes_per_s or fastest)
        return known.is_out(now_s), done_s * _CLOSE_CALL ** min(rank, 1)

    return [known for _, known in sorted(enumerate(links), key=order)]
