"""Time as an argument: brains take `now_s`, hands read it from a Clock, tests turn a ManualClock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds since boot or so."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The time set by construction and `advance`."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` >= 0."""
        assert seconds >= 0
        self._now_s += seconds
