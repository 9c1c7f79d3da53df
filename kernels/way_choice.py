"""Which way blocks go between a device and the host, and how many bytes at a time, by what was measured on it at the start."""

from collections.abc import Sequence
from typing import NamedTuple

DIRECT_MUST_BE_FASTER = 1.25
"""A kernel that writes host memory keeps multiprocessors waiting for PCIe that could compute; copy engines do not."""

GOOD_ENOUGH = 0.9
"""Of the best bandwidth, from which on a copy is large enough: smaller ones are there sooner."""


class Measured(NamedTuple):
    """One move of `nbytes` in all, one direction."""

    way: str
    nbytes: int
    seconds: float


class Choice:
    """Of one direction. `measured` has every way at every size."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        assert measured
        best: dict[int, Measured] = {}
        for one in measured:
            if one.nbytes not in best or _cost(one) < _cost(best[one.nbytes]):
                best[one.nbytes] = one
        self._best = [best[nbytes] for nbytes in sorted(best)]

    def way(self, nbytes: int) -> str:
        """The quickest at the measured size that is nearest."""
        return min(self._best, key=lambda one: max(one.nbytes, nbytes) / max(1, min(one.nbytes, nbytes))).way

    @property
    def enough_nbytes(self) -> int:
        """From this size on a move reaches nearly the best bandwidth."""
        fastest = max(one.nbytes / one.seconds for one in self._best)
        return next(one.nbytes for one in self._best if one.nbytes / one.seconds >= GOOD_ENOUGH * fastest)


def _cost(one: Measured) -> float:
    return one.seconds * (DIRECT_MUST_BE_FASTER if one.way == "direct" else 1.0)
