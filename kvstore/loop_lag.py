"""How late the brain loop comes to things."""

import asyncio
from collections.abc import Callable

from kvstore.core.clock import Clock
from kvstore.core.limits import LAG_INTERVAL_S


class LagTimer:
    """Wakes every LAG_INTERVAL_S from `start` to `stop`, and tells how many seconds late that was, and the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, tell: Callable[[float, float], None]) -> None:
        self._loop = loop
        self._clock = clock
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Begin. Loop thread."""
        self._due_s = self._clock.now_s() + LAG_INTERVAL_S
        self._timer = self._loop.call_later(LAG_INTERVAL_S, self._fire)

    def stop(self) -> None:
        """End. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        now_s = self._clock.now_s()
        self._tell(max(0.0, now_s - self._due_s), now_s)
        self.start()
