"""How much may be written to the drives: a rate, and a day's worth, since a drive wears out by writing."""

from collections.abc import Mapping

_HOUR_S = 3600
_HOURS = 24


class WriteBudget:
    """Bytes a second and bytes in any 24 hours (the hour that has begun and the 24 before it); 0 means no limit.

    The rate is a bucket that holds one second's worth and may be overdrawn by one write, so that a block larger than that
    passes too. Time comes in as `now_s`, monotonic; `start` says how far the wall clock is from it.
    """

    def __init__(self, *, bytes_per_s: int = 0, bytes_per_day: int = 0) -> None:
        self._bytes_per_s = bytes_per_s
        self._bytes_per_day = bytes_per_day
        self._tokens = float(bytes_per_s)
        self._filled_s: float | None = None
        self._wall_offset_s = 0.0
        self._written: dict[int, int] = {}  # by hour since the epoch
        self.written_bytes = 0  # since our start

    def start(self, written: Mapping[int, int], wall_offset_s: float) -> None:
        """What was written in which hour (since the epoch) before a restart; `now_s + wall_offset_s` is the time of day."""
        self._written = dict(written)
        self._wall_offset_s = wall_offset_s

    def allows(self, nbytes: int, now_s: float) -> bool:
        """Whether a write of `nbytes` may begin now."""
        if self._bytes_per_day:
            self._settle(self._hour(now_s))
            if sum(self._written.values()) + nbytes > self._bytes_per_day:
                return False
        if not self._bytes_per_s:
            return True
        if self._filled_s is not None:
            self._tokens = min(self._bytes_per_s, self._tokens + (now_s - self._filled_s) * self._bytes_per_s)
        self._filled_s = now_s
        return self._tokens > 0

    def spend(self, nbytes: int, now_s: float) -> None:
        """A write of `nbytes` begins."""
        self.written_bytes += nbytes
        self._tokens -= nbytes
        if self._bytes_per_day:
            hour = self._hour(now_s)
            self._written[hour] = self._written.get(hour, 0) + nbytes

    def day_bytes(self, now_s: float) -> int:
        """What counts against a day's worth now; 0 where there is no such limit."""
        self._settle(self._hour(now_s))
        return sum(self._written.values())

    def _settle(self, hour: int) -> None:
        """Leave out what is older than a day. What a clock that was ahead then put into hours to come counts as written now:
        those hours may be years away."""
        written: dict[int, int] = {}
        for then, count in self._written.items():
            if then >= hour - _HOURS:
                written[min(then, hour)] = written.get(min(then, hour), 0) + count
        self._written = written

    def _hour(self, now_s: float) -> int:
        return int((now_s + self._wall_offset_s) // _HOUR_S)
