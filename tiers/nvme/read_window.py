"""How many bytes of reads a drive has in flight: enough for all of its speed, few enough that none waits long."""

from typing import NamedTuple

_FIRST_BYTES = 2 << 20
_LEAST_BYTES = 512 << 10
_SHORT_S = 0.1
_LONG_S = 0.25
"""What is in flight can be neither cancelled nor overtaken: it may take so long. Fast drives are far from it: 32 MiB take them
10 to 100 ms."""
_SHRINK_AT_ONCE = 1 / 16
_HOLD_ROUNDS = 64
"""After a smaller window has cost speed, or a larger one brought none, that is not tried again for so many rounds."""


class _Before(NamedTuple):
    """What was, on average, before the window changed."""

    in_flight_bytes: float
    bytes_per_s: float
    grows: bool


class ReadWindow:
    """Starts small, and may change after each round, in which as many bytes were read as it has.

        a read takes     < _SHORT_S    twice as many
                         > _LONG_S     as many as take so long; twice as many again when that costs speed
        in between                     now and then twice as many; and more as long as that brings speed

    Bytes per second are those in flight by the time that a read takes (Little's law), which a queue of our own making leaves
    as they are. The idea is TCP's slow start with the gradient of Vegas and BBR. Not thread-safe: its drive has a lock.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.nbytes = min(_FIRST_BYTES, max_bytes)
        self._max_bytes = max_bytes
        self._least_bytes = min(_LEAST_BYTES, max_bytes)
        self._before: _Before | None = None
        self._no_growth = self._no_shrinking = 0  # rounds
        self._begin_round(0.0)

    def ended(self, nbytes: int, *, in_flight_bytes: int, begun_s: float, now_s: float) -> None:
        """A read went well. `in_flight_bytes`: when it began, itself included. One that had room beside it for others says
        nothing, nor does one from before the last change, unless it took very long."""
        took_s = max(now_s - begun_s, 1e-9)
        tells = begun_s >= self._since_s and 2 * in_flight_bytes >= self.nbytes
        if took_s > 2 * _LONG_S and not self._no_shrinking and not (tells and self._has_shrunk):
            wanted = max(in_flight_bytes * _LONG_S / took_s, self.nbytes * _SHRINK_AT_ONCE)
            if wanted < 0.7 * self.nbytes and self.nbytes > self._least_bytes:
                self._change(wanted, in_flight_bytes, in_flight_bytes / took_s, now_s)
                return
        if tells:
            self._read_bytes += nbytes
            self._num_reads += 1
            self._in_flight_bytes += in_flight_bytes
            self._took_s += took_s
            if self._read_bytes >= self.nbytes:
                self._end_round(now_s)

    @property
    def _has_shrunk(self) -> bool:
        """And the round that tells what that cost has not ended."""
        return self._before is not None and not self._before.grows

    def _end_round(self, now_s: float) -> None:
        took_s, in_flight_bytes = self._took_s / self._num_reads, self._in_flight_bytes / self._num_reads
        bytes_per_s = in_flight_bytes / took_s
        self._no_growth, self._no_shrinking = max(0, self._no_growth - 1), max(0, self._no_shrinking - 1)
        before, self._before = self._before, None
        self._begin_round(now_s)
        wanted = self._wanted(before, in_flight_bytes, bytes_per_s, took_s)
        self._change(wanted, in_flight_bytes, bytes_per_s, now_s)

    def _wanted(self, before: _Before | None, in_flight_bytes: float, bytes_per_s: float, took_s: float) -> float:
        if took_s < _SHORT_S:
            return 2 * self.nbytes
        if before is not None:
            ratio = (in_flight_bytes / before.in_flight_bytes) ** 0.5
            if before.grows and bytes_per_s > ratio * before.bytes_per_s and ratio > 1:
                return 2 * self.nbytes
            if before.grows:
                self._no_growth, self._no_shrinking = _HOLD_ROUNDS, 0
            elif bytes_per_s < ratio * before.bytes_per_s and ratio < 1:
                self._no_shrinking = _HOLD_ROUNDS
                return 2 * self.nbytes
        if took_s > _LONG_S and self.nbytes > self._least_bytes and not self._no_shrinking:
            return self.nbytes * max(_LONG_S / took_s, _SHRINK_AT_ONCE)
        return self.nbytes if self._no_growth else 2 * self.nbytes

    def _change(self, wanted: float, in_flight_bytes: float, bytes_per_s: float, now_s: float) -> None:
        nbytes = int(min(max(wanted, self._least_bytes), self._max_bytes))
        if nbytes != self.nbytes:
            self._before = _Before(in_flight_bytes, bytes_per_s, grows=nbytes > self.nbytes)
            self.nbytes = nbytes
            self._begin_round(now_s)

    def _begin_round(self, now_s: float) -> None:
        self._since_s = now_s
        self._read_bytes = self._num_reads = self._in_flight_bytes = 0
        self._took_s = 0.0
