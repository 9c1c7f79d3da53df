"""How fast a tier is, learned from reads that overlap."""

import math

from kvstore.calibration import MIN_SAMPLE_BYTES, Smoothed
from kvstore.core.limits import DRIVE_THREADS
from kvstore.costs import LoadCost, TierQuote

WINDOW_S = 0.05
"""Bandwidth is taken over at least so much time in which the tier was busy, or until it is idle again."""

STALL_S = 0.2
"""Reads are outstanding and none has come for so long, or for 10 times as long as the next one should take: stalled."""

PROBE_INTERVAL_S = 2.0
"""An estimate that is older may be wrong; a tier that is out of use is tried so often."""

MAX_TRIES = 3
"""So often something is ordered of a tier that is stalled, and then no probe until something comes: each keeps room in RAM that
may never be filled."""

_STALL_FACTOR = 10.0


class TierSpeed:
    """Latency and bandwidth of one tier, and what is queued on it, from the times at which reads are ordered and end.

    Several reads are in flight, and how they share the tier is unknown: one after the other, or all at once and then all of
    them there at once. So no read is timed. Bytes that came are divided by the time in which there were reads to do, without
    the latency where the tier was idle before:

        ordered    8 reads                       8 more
        ended                 1 2 3 4 5  6 7 8              9 ...
        windows    |--latency--|----------------|-----------------

    A window ends before a gap that is no shorter than usual, so that what comes in bursts is not cut within one. Latency is
    seen at the first arrival after idleness, as an interval: the tier may have worked on that read alone before, or on as
    many as it does at once; the estimate moves to the nearer end if it lies outside.

    A read may hang while others come: one bad place of a drive, or one drive of several. Those that were outstanding when the
    tier fell silent are set aside as soon as something new is ordered, which then tells whether it still works.
    """

    def __init__(self, prior: LoadCost | None = None) -> None:
        self._byte_s = Smoothed()
        self._latency_s = Smoothed()
        self.queued_bytes = 0  # ordered, and neither there nor cancelled
        self._num_outstanding = 0
        self._num_hung = 0  # set aside
        self._is_silent = False  # they were, and nothing has come since
        self._num_tries = 0  # of what was ordered meanwhile
        self._num_ordered_idle = 0  # since the tier was idle, until the first one came
        self._is_first = False  # none has come since the tier was idle
        self._window = _Window(0.0)
        self._news_s = 0.0  # when the last read came, or the first was ordered
        self._measured_s = -math.inf
        self._probed_s = -math.inf
        if prior is not None:
            self.set_prior(prior)

    def set_prior(self, prior: LoadCost) -> None:
        """What to believe until there are samples: of a probe, or from a table."""
        assert prior.bytes_per_s > 0
        self._byte_s.set_prior(1 / prior.bytes_per_s)
        self._latency_s.set_prior(max(prior.latency_s, _LEAST_LATENCY_S))

    @property
    def cost(self) -> LoadCost | None:
        """None while nothing is known."""
        byte_s = self._byte_s.value
        if byte_s is None:
            return None
        return LoadCost(self._latency_s.value or 0.0, 1 / byte_s)

    @property
    def num_samples(self) -> int:
        """Windows of which the bandwidth was taken."""
        return self._byte_s.num_samples

    def ordered(self, nbytes: int, now_s: float) -> None:
        """A read of `nbytes` was handed to the tier."""
        if self._is_late(now_s):
            self._set_aside()
        if self._num_outstanding == 0:
            self._window = _Window(now_s)
            self._is_first = True
            self._num_ordered_idle = 0
            self._news_s = now_s
        self._num_outstanding += 1
        self._num_ordered_idle += 1
        self.queued_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, ok: bool) -> None:
        """A read ended; its bytes came if `ok`."""
        was_set_aside = self._num_outstanding == 0
        self._take_out(nbytes)
        if ok:
            self._end_silence()
        if ok and not was_set_aside:
            if self._window.ends_before(now_s):
                self._close_window()
            if self._is_first:
                self._see_latency(nbytes, now_s)
            self._window.add(nbytes, now_s)
        self._news_s = now_s
        if self._num_outstanding == 0:
            self._close_window()

    def cancelled(self, nbytes: int, now_s: float) -> None:  # noqa: ARG002 (every event has its time)
        """A read was called off before it had begun."""
        self._take_out(nbytes)
        if self._num_outstanding == 0:
            self._close_window()

    def quote(self, now_s: float) -> TierQuote | None:
        """What a load that is ordered now would need. None: nothing is known, or the tier is stalled."""
        cost = self.cost
        return None if cost is None or self.is_stalled(now_s) else TierQuote(cost, self.queued_bytes)

    def is_stalled(self, now_s: float) -> bool:
        """Reads are outstanding, and none has come for far too long."""
        return self._is_silent or self._is_late(now_s)

    def _is_late(self, now_s: float) -> bool:
        if self._num_outstanding == 0:
            return False
        cost = self.cost
        next_s = cost.load_s(self.queued_bytes / (self._num_outstanding + self._num_hung)) if cost is not None else 0.0
        return now_s - self._news_s > max(STALL_S, _STALL_FACTOR * next_s)

    def wants_probe(self, now_s: float) -> bool:
        """The tier is idle or stalled, and what is known of it is old: read something, even if it seems not worth it."""
        known_s = max(self._measured_s, self._probed_s)
        if now_s - known_s <= PROBE_INTERVAL_S:
            return False
        return self._num_tries < MAX_TRIES if self.is_stalled(now_s) else self._num_outstanding == 0

    def probing(self, now_s: float) -> None:
        """A probe is under way; another one is not wanted for a while, whatever becomes of this one."""
        self._probed_s = now_s

    def check(self) -> None:
        """Assert that counts are of reads."""
        assert min(self._num_outstanding, self._num_hung) >= 0
        assert self.queued_bytes >= 0
        assert self._num_outstanding + self._num_hung > 0 or self.queued_bytes == 0

    def _take_out(self, nbytes: int) -> None:
        assert self._num_outstanding + self._num_hung > 0, "a read ends once"
        self.queued_bytes -= nbytes
        if self._num_outstanding:
            self._num_outstanding -= 1
        else:
            self._num_hung -= 1
        if self._num_outstanding + self._num_hung == 0:
            self._end_silence()

    def _end_silence(self) -> None:
        self._is_silent = False
        self._num_tries = 0

    def _set_aside(self) -> None:
        self._close_window()
        self._num_hung += self._num_outstanding
        self._num_outstanding = 0
        self._is_silent = True
        self._num_tries += 1

    def _see_latency(self, nbytes: int, now_s: float) -> None:
        self._is_first = False
        taken_s = now_s - self._window.since_s
        read_s = nbytes * (self._byte_s.value or 0.0)
        longest_s = max(taken_s - read_s, _LEAST_LATENCY_S)
        shortest_s = max(taken_s - read_s * min(self._num_ordered_idle, DRIVE_THREADS), _LEAST_LATENCY_S)
        believed_s = self._latency_s.value
        if believed_s is not None:
            self._latency_s.observe(min(max(believed_s, shortest_s), longest_s))
        elif self._byte_s.value is not None:
            self._latency_s.observe(shortest_s)
        self._window.latency_s = self._latency_s.value or 0.0

    def _close_window(self) -> None:
        window = self._window
        self._window = _Window(window.last_s)
        if window.busy_s < _LEAST_BUSY_S:
            return
        if window.nbytes >= MIN_SAMPLE_BYTES or (window.nbytes and self._byte_s.value is None):
            self._byte_s.observe(window.busy_s / window.nbytes)
            self._measured_s = window.last_s


class _Window:
    """Bytes that came in a time in which there always was a read to do."""

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.last_s = since_s
        self.latency_s = 0.0  # in which nothing could come
        self.num_reads = 0
        self.nbytes = 0

    def add(self, nbytes: int, now_s: float) -> None:
        self.num_reads += 1
        self.nbytes += nbytes
        self.last_s = now_s

    def ends_before(self, now_s: float) -> bool:
        """Whether it is long enough, and the gap before `now_s` is one between two bursts."""
        if self.last_s - self.since_s < WINDOW_S or self.nbytes < MIN_SAMPLE_BYTES:
            return False
        usual_s = (now_s - self.since_s) / (self.num_reads + 1)
        return now_s - self.last_s >= usual_s / 2

    @property
    def busy_s(self) -> float:
        """Without the latency; of a window that was shorter than that, a tenth."""
        taken_s = self.last_s - self.since_s
        return max(taken_s - self.latency_s, taken_s / 10)


_LEAST_LATENCY_S = 1e-6
_LEAST_BUSY_S = 1e-5  # below it the clock has not moved, or not by more than it is wrong
