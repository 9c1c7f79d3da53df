"""How long things take and how large they are: histograms of fixed buckets, plain lists on the loop."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

RPC_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.5, 2.0)
TRANSFER_S = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TRANSFER_BYTES = tuple(float(4096 << 2 * i) for i in range(12))  # 4 KiB to 16 GiB
LAG_S = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Upper bounds of buckets, inclusive."""

LAG_WINDOW_S = 10.0
"""The loop's lag that is shown is the largest of so long."""


class Histogram:
    """Counts by bucket. An observation is one bisection."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """It was `value`, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Reading(NamedTuple):
    """A histogram as it was. `labels` are the values of its labels in metrics.py."""

    name: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Meters:
    """What is measured on the loop's thread. `transfer`: from order to end, queues included; a load of an engine is one transfer
    out of pinned, what a commit publishes one into it; a drive's and another node's are a block each."""

    def __init__(self) -> None:
        self._rpc: dict[str, Histogram] = {}
        self._transfers: dict[tuple[str, str], tuple[Histogram, Histogram]] = {}
        self._lag = Histogram(LAG_S)
        self._lags: deque[tuple[float, float]] = deque()  # when, how much; falling: the first is the largest

    def rpc(self, verb: str, seconds: float) -> None:
        """A request was served, or refused, in so long."""
        histogram = self._rpc.get(verb)
        if histogram is None:
            histogram = self._rpc[verb] = Histogram(RPC_S)
        histogram.observe(seconds)

    def transfer(self, tier: str, direction: str, nbytes: int, seconds: float | None) -> None:
        """Bytes came from a tier (read) or went there (write). Seconds: None where nobody can tell."""
        pair = self._transfers.get((tier, direction))
        if pair is None:
            pair = self._transfers[tier, direction] = Histogram(TRANSFER_BYTES), Histogram(TRANSFER_S)
        pair[0].observe(nbytes)
        if seconds is not None:
            pair[1].observe(seconds)

    def lag(self, seconds: float, now_s: float) -> None:
        """The loop came to something so late."""
        self._lag.observe(seconds)
        while self._lags and self._lags[-1][1] <= seconds:
            self._lags.pop()
        self._lags.append((now_s, seconds))

    def largest_lag_s(self, now_s: float) -> float:
        """Of the last LAG_WINDOW_S."""
        while self._lags and self._lags[0][0] < now_s - LAG_WINDOW_S:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0

    def readings(self) -> Iterator[Reading]:
        """All histograms now."""
        for verb, histogram in self._rpc.items():
            yield _reading("rpc_seconds", (verb,), histogram)
        for labels, (nbytes, seconds) in self._transfers.items():
            yield _reading("transfer_bytes", labels, nbytes)
            yield _reading("transfer_seconds", labels, seconds)
        yield _reading("loop_lag_seconds", (), self._lag)


def _reading(name: str, labels: tuple[str, ...], histogram: Histogram) -> Reading:
    return Reading(name, labels, histogram.bounds, tuple(histogram.counts), histogram.sum)
