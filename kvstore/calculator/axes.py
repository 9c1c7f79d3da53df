"""An axis of a plot: which values it spans, where on it a value lies, and where its ticks are."""

import math
from collections.abc import Iterable
from typing import NamedTuple

_TICKS = 6  # about so many
_ROOM = 1.05  # between a line and the frame
_STEPS = (1.0, 2.0, 5.0, 10.0)


class Axis(NamedTuple):
    """From `low` to `high`, which differ; on a logarithmic one both are above 0."""

    low: float
    high: float
    log: bool

    def position(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high, at = (self._bent(number) for number in (self.low, self.high, value))
        return (at - low) / (high - low)

    def can_show(self, value: float) -> bool:
        """A logarithm of 0 has no place, nor has infinity."""
        return math.isfinite(value) and (value > 0 or not self.log)

    def ticks(self) -> list[float]:
        """Round values within, in order."""
        if not self.log or self.high / self.low < 5:
            return _round_steps(self.low, self.high)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        stride = max(1, (last - first) // (2 * _TICKS) + 1)
        factors = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
        found = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
        return [tick for tick in found if self._within(tick)]

    def _bent(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _within(self, value: float) -> bool:
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)


def axis_over(values: Iterable[float], *, log: bool) -> Axis | None:
    """The axis that shows all of these that can be shown, with round ends; None when there are none.

    A linear one begins at 0 unless values are below it: a line's height then says how much, not only how it changes.
    """
    shown = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    if not shown:
        return None
    low, high = min(shown), max(shown)
    if log:
        return Axis(_round_down(low / _ROOM), _round_up(high * _ROOM), log=True)
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = 1.0
    step = _step(low, high)
    return Axis(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, log=False)


def tick_label(value: float) -> str:
    """Short: 0.05, 200, 1k, 32k, 1.5M."""
    for divisor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor * 0.9999999:
            return f"{value / divisor:.4g}{suffix}"
    return f"{value:.4g}"


def _round_steps(low: float, high: float) -> list[float]:
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _step(low: float, high: float) -> float:
    """1, 2 or 5 times a power of ten."""
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in _STEPS if factor * power >= rough * (1 - 1e-9))


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max((factor * power for factor in _STEPS if factor * power <= value), default=value)


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min((factor * power for factor in _STEPS if factor * power >= value), default=value)
