"""Who may join the queue: a limit, and for those it turns away an estimate of when to come back."""

import math
from collections import deque

from kvstore.core.errors import Overloaded

MIN_RETRY_AFTER_S = 1.0
"""HTTP's Retry-After counts whole seconds; also the answer while nothing is known of the rate."""

MAX_RETRY_AFTER_S = 60.0
"""A longer estimate says more of a hiccup than of the queue. Those for whom it would be longer are spread over the last half
of it."""

FIRST_SECONDS_EACH = 0.1
"""Between two departures, for an engine whose queue has never moved: ten of those turned away come back in each second."""

_GOLDEN = (math.sqrt(5) - 1) / 2
"""Its multiples, without their whole parts, spread evenly, however many there are."""

_WINDOW_S = 60.0
"""Departures older than this say nothing about now."""


class QueueFull(Overloaded):
    """The queue has no room for another request. Fields: limit, value, retry_after_s."""

    code = "QueueFull"


class Admission:
    """Counts what leaves the queue while there is one; a brain: the caller tells it the time.

    Those turned away are told different times, as far apart as requests have left the queue lately, or in the last queue when
    this one has not moved yet: if all were told when the next place is free, they would all come at once, and all but one be
    turned away again.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_refused = 0
        self._queued_since_s: float | None = None  # None: the queue was empty when last seen
        self._departures_s: deque[float] = deque(maxlen=max_waiting)
        self._usual_s = FIRST_SECONDS_EACH  # between two departures of the last queue
        self._promised_s = 0.0  # when the last one turned away may come back

    def observe(self, num_waiting: int, num_departed: int, now_s: float) -> None:
        """After each step: how many wait, and how many left the queue since the last call."""
        if num_waiting == 0:
            if self._departures_s:
                self._usual_s = self._seconds_each(now_s)
            self._queued_since_s = None
            self._departures_s.clear()
            self._promised_s = 0.0
            return
        if self._queued_since_s is None:
            self._queued_since_s = now_s
        self._departures_s.extend([now_s] * num_departed)

    def check(self, num_waiting: int, now_s: float) -> None:
        """Raises QueueFull when `num_waiting` requests are as many as may wait."""
        if num_waiting < self.max_waiting:
            return
        self.num_refused += 1
        self._promised_s = max(self._promised_s, now_s) + self._seconds_each(now_s)
        self._promised_s = max(self._promised_s, now_s + MIN_RETRY_AFTER_S)
        retry_after_s = self._promised_s - now_s
        if retry_after_s > MAX_RETRY_AFTER_S:
            self._promised_s = now_s + MAX_RETRY_AFTER_S
            retry_after_s = MAX_RETRY_AFTER_S / 2 * (1 + self.num_refused * _GOLDEN % 1)
        raise QueueFull(
            f"max_waiting: {num_waiting} requests wait already; try again in {retry_after_s:.0f} s",
            limit="max_waiting",
            value=self.max_waiting,
            retry_after_s=retry_after_s,
        )

    def _seconds_each(self, now_s: float) -> float:
        """Time between two departures, lately; it grows while nothing leaves."""
        if self._queued_since_s is None:
            return self._usual_s
        while self._departures_s and now_s - self._departures_s[0] > _WINDOW_S:
            self._departures_s.popleft()
        since_s = max(self._queued_since_s, now_s - _WINDOW_S)
        if len(self._departures_s) == self._departures_s.maxlen:
            since_s = max(since_s, self._departures_s[0])
        if not self._departures_s:
            return max(now_s - since_s, self._usual_s)
        return (now_s - since_s) / len(self._departures_s)
