"""Which block of a load is whose, when the engine computes at the front while the worker copies at the back."""

import threading

_IN_TIME_FROM, _IN_TIME_UNTIL = 0.5, 1.5
"""Between these multiples of the expected time the back is to get from its first block to the last one that the front leaves to
it. Looser than expected, since blocks come in bursts and behind others' reads; yet a drive that stalls is found out early."""

_FORECAST_WEIGHT = 0.25
"""The forecast of where they meet counts as if so much of the load had gone that way, beside what both have done."""


class FillCursors:
    """The cursors of one load of `num_blocks` blocks. Any thread; the engine claims, the load thread copies.

        [ front | nobody's yet | being copied | copied ]
        0     front           back - 1       back     num_blocks

    A block is the front's or the back's from the moment when either claims it, and nothing takes it from them, but a block
    whose copy failed, which then is the front's.

    How much of what is nobody's the front gets: where others wait for the engine, `front_blocks` as long as the load is in
    time, and no limit after that. Else its share by what both sides have done so far, so that a chunk ends when the back
    gets there: whole chunks would end late by half of one.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        front_blocks: int | None = None,
        meet_block: int | None = None,
        expected_s: float = 0.0,
    ) -> None:
        self._lock = threading.Lock()
        self._num_blocks = num_blocks
        self._front_blocks = num_blocks if front_blocks is None else min(front_blocks, num_blocks)
        self._meet_block = num_blocks if meet_block is None else min(meet_block, num_blocks)
        self._expected_s = expected_s
        self._front = 0
        self._back = num_blocks
        self._copying = False
        self._ended = False

    @property
    def front(self) -> int:
        """How many blocks the front has claimed."""
        return self._front

    @property
    def back(self) -> int:
        """First of the blocks that are copied; grows smaller."""
        return self._back

    @property
    def num_copied(self) -> int:
        """Blocks that are in their pages."""
        return self._num_blocks - self._back

    @property
    def met(self) -> bool:
        """Whether the front has all that is not copied."""
        with self._lock:
            return self._front == self._back

    def claim_front(self, num_blocks: int, elapsed_s: float = 0.0) -> int:
        """How many of the first `num_blocks` blocks are the front's, `elapsed_s` after the load began."""
        with self._lock:
            limit = min(self._back - self._copying, self._front_limit(elapsed_s))
            self._front = max(self._front, min(num_blocks, limit))
            return min(num_blocks, self._front)

    def claim_back(self) -> bool:
        """Whether block `back - 1` is now the back's, to be copied. It says with `copied` how that went."""
        with self._lock:
            assert not self._copying
            self._copying = not self._ended and self._front < self._back
            return self._copying

    def copied(self, *, good: bool) -> None:
        """The claimed block is in its page; or it never will be, and the back gives up."""
        with self._lock:
            assert self._copying
            self._copying = False
            self._back -= good
            self._ended = self._ended or not good

    def end(self) -> None:
        """The back gives up: what is not copied is the front's. From the back's own thread, between copies."""
        with self._lock:
            assert not self._copying
            self._ended = True

    def check(self) -> None:
        """Each block is one side's or nobody's."""
        with self._lock:
            assert 0 <= self._front <= self._back - self._copying <= self._back <= self._num_blocks

    def _front_limit(self, elapsed_s: float) -> int:
        if self._ended:
            return self._back
        if self._front_blocks < self._num_blocks:
            return self._front_blocks if self._in_time(elapsed_s) else self._back
        front = self._front + _FORECAST_WEIGHT * self._meet_block
        back = self.num_copied + _FORECAST_WEIGHT * (self._num_blocks - self._meet_block)
        return self._front + max(1, round((self._back - self._front) * front / (front + back)))

    def _in_time(self, elapsed_s: float) -> bool:
        if elapsed_s >= _IN_TIME_UNTIL * self._expected_s:
            return False
        due = (elapsed_s / self._expected_s - _IN_TIME_FROM) / (_IN_TIME_UNTIL - _IN_TIME_FROM)
        return self.num_copied >= int(due * (self._num_blocks - self._front_blocks))
