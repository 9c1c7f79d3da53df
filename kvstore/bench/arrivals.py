"""When conversations start: offsets in seconds from the start of a run, ascending.

poisson   gaps drawn from an exponential distribution of mean 1 / rate; the first arrives after a gap too
burst     `burst` at once, then the next so many, at the same mean rate; no rate: all at once
closed    no offsets: `concurrency` conversations are kept going, and the next starts when one ends
trace     the file's own times
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.bench.prompts import generator

KINDS = ("poisson", "burst", "closed", "trace")


class Arrivals(NamedTuple):
    """How a run's conversations start: by `offsets_s`, or, when there are none, so many at a time."""

    kind: str
    offsets_s: tuple[float, ...] = ()
    concurrency: int = 0

    def part(self, first: int, count: int) -> "Arrivals":
        """For conversations `first` to `first + count`: their offsets, the part before them left out."""
        if not self.offsets_s:
            return self
        start_s = self.offsets_s[first - 1] if first else 0.0
        return self._replace(offsets_s=tuple(at - start_s for at in self.offsets_s[first : first + count]))


def poisson(seed: int, count: int, rate_per_s: float) -> Arrivals:
    """A Poisson process of `rate_per_s`."""
    assert rate_per_s > 0
    draws = generator(seed, "arrivals")
    at_s, offsets = 0.0, []
    for _ in range(count):
        at_s -= math.log1p(-float(draws.random())) / rate_per_s
        offsets.append(at_s)
    return Arrivals("poisson", tuple(offsets))


def burst(count: int, *, size: int = 0, rate_per_s: float = 0.0) -> Arrivals:
    """`size` together, every size / rate_per_s seconds; size 0: all of them at 0."""
    assert (size > 0) == (rate_per_s > 0)
    return Arrivals("burst", tuple(index // size * size / rate_per_s if size else 0.0 for index in range(count)))


def closed(concurrency: int) -> Arrivals:
    """`concurrency` conversations at any time."""
    assert concurrency > 0
    return Arrivals("closed", concurrency=concurrency)


def from_trace(offsets_s: Sequence[float]) -> Arrivals:
    """As recorded."""
    return Arrivals("trace", tuple(offsets_s))
