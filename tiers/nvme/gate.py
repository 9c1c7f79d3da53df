"""Whether a drive is tried at all: a circuit breaker for its reads, another for its writes."""

from kvstore.core.limits import DRIVE_RETRY_S
from kvstore.core.moves import MoveProblem

WHOLE_DRIVE = frozenset({MoveProblem.NO_SPACE, MoveProblem.READ_ONLY, MoveProblem.GONE})
"""Problems that the next block would meet too."""


class Gate:
    """Open while tries go well; closed after `max_failures` of them in a row, or after one that concerns the whole drive.

    Once closed, one try is let through when the pause is over: it opens the gate again, or the next pause is twice as long.
    A try gets a ticket, and gives it back with its outcome: one that began before the gate last changed says nothing about
    how things are now, and of several that fail together the first alone counts. Not thread-safe: its drive has a lock.
    """

    def __init__(self, *, max_failures: int, pauses_s: tuple[float, float] = DRIVE_RETRY_S) -> None:
        assert max_failures > 0
        self.problem: MoveProblem | None = None  # None: open; otherwise why it closed
        self._max_failures = max_failures
        self._first_pause_s, self._longest_pause_s = pauses_s
        self._pause_s = 0.0
        self._retry_at_s = 0.0
        self._failures = 0
        self._ticket = 0
        self._probing = False

    def enter(self, now_s: float) -> int | None:
        """A ticket, or None: not now."""
        if self.problem is not None:
            if self._probing or now_s < self._retry_at_s:
                return None
            self._probing = True
        return self._ticket

    def succeeded(self, ticket: int) -> bool:
        """The try of `ticket` went well. True when that opened the gate."""
        if ticket != self._ticket:
            return False
        self._failures = 0
        if self.problem is None:
            return False
        self.problem = None
        self._pause_s = 0.0
        self._turn()
        return True

    def failed(self, ticket: int, problem: MoveProblem, now_s: float, *, count: int = 1) -> bool:
        """The try of `ticket` ended with `problem`, `count` blocks in a row. True when that closed the gate anew."""
        if ticket != self._ticket:
            return False
        self._failures += count
        if self.problem is None and problem not in WHOLE_DRIVE and self._failures < self._max_failures:
            return False
        newly = self.problem is None
        self.problem = problem
        self._pause_s = min(max(self._first_pause_s, 2 * self._pause_s), self._longest_pause_s)
        self._retry_at_s = now_s + self._pause_s
        self._turn()
        return newly

    def _turn(self) -> None:
        self._ticket += 1
        self._failures = 0
        self._probing = False
