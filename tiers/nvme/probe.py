"""How fast the drives read, measured when the process starts: one page alone, then more and more at once.

    round     4 KiB x 3    256 KiB     1 MiB     4 MiB     10.7 MiB       until the time is up, or there is no more to read
    says      latency      <- - - - bytes per second, by the last round that ended in time - - - ->

No round is begun that the last one's speed would not let end in time, so a drive of 3 MB/s is told from one of 3 GB/s within
the same second. What was never written is not read: a file system answers for it without asking the drive.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.limits import DRIVE_THREADS, MAX_IO_BYTES, MAX_PROBE_BYTES, PROBE_DEADLINE_S, SLOT_ALIGN_BYTES
from kvstore.tiers.nvme.file import BlockFile, page_aligned

_PAGES_ALONE = 3  # the fastest of them is the latency: whatever else a start does can only slow one down
_FIRST_ROUND_BYTES = 256 << 10
_GROWTH = 4  # of a round over the one before
_MIN_IO_BYTES = 64 << 10
_SEED = 1


class DriveSpeed(NamedTuple):
    """What a read takes: `latency_s + nbytes / bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


class Used(NamedTuple):
    """Slots of a data file that hold blocks."""

    offsets: NDArray[np.int64]  # in the file
    nbytes: int  # of each


class _IO(NamedTuple):
    file: BlockFile
    offset: int
    nbytes: int


class ReadProbe:
    """Reads up to MAX_PROBE_BYTES of what is used in `files`, as many I/Os at once as a drive has threads. `run` once, on any
    thread; `close` on another ends it early.

    Its reads run on daemon threads: one that hangs keeps its file open, not the process.
    """

    def __init__(
        self, files: Mapping[BlockFile, Sequence[Used]], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._files = files
        self._monotonic = monotonic
        self._todo: deque[_IO] = deque()
        self._buffer = memoryview(b"")
        self._starting = threading.Lock()  # of threads, which `close` must see all or see none of
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, deadline_s: float = PROBE_DEADLINE_S) -> DriveSpeed | None:
        """Blocks, until the deadline at most. None: less is used than the first round wants, a read failed, or took too long."""
        until_s = self._monotonic() + deadline_s
        self._todo = _spread(self._files)
        self._files = {}
        buffer = page_aligned(MAX_IO_BYTES)
        buffer.fill(1)  # its pages are there before a clock runs
        self._buffer = buffer.data
        alone = [self._round(SLOT_ALIGN_BYTES, until_s) for _ in range(_PAGES_ALONE)]
        if None in alone:
            return None
        latency_s = min(took_s for took_s in alone if took_s is not None)
        speed: DriveSpeed | None = None
        nbytes = _FIRST_ROUND_BYTES
        while (nbytes := min(nbytes, self._left())) >= _FIRST_ROUND_BYTES:
            if speed is not None and nbytes / speed.bytes_per_s > until_s - self._monotonic():
                break
            took_s = self._round(nbytes, until_s)
            if took_s is None:
                break
            # Of a round that took hardly longer than a page, half at least counts as bytes passing.
            speed = DriveSpeed(latency_s, nbytes / max(took_s - latency_s, took_s / 2))
            nbytes *= _GROWTH
        return speed

    def close(self, deadline_s: float) -> bool:
        """Begin no more reads, and wait for those under way. False: one hangs, and its file must stay open. Idempotent."""
        until_s = self._monotonic() + deadline_s
        with self._starting:
            self._closed = True
        return self._join(until_s)

    def _left(self) -> int:
        return sum(io.nbytes for io in self._todo)

    def _round(self, nbytes: int, until_s: float) -> float | None:
        """Read so much at once: the seconds it took. None: not by then, or not all of it."""
        ios = self._take(nbytes)
        if sum(io.nbytes for io in ios) < nbytes:
            return None
        num_read: list[int] = []
        shares = [ios[first::DRIVE_THREADS] for first in range(min(DRIVE_THREADS, len(ios)))]
        threads = [
            threading.Thread(target=_read, args=(share, self._buffer, num_read), name="kvstore-nvme-probe", daemon=True)
            for share in shares
        ]
        began_s = self._monotonic()
        with self._starting:
            if self._closed:
                return None
            self._threads = threads
            for thread in threads:
                thread.start()
        in_time = self._join(until_s)
        took_s = self._monotonic() - began_s
        return took_s if in_time and sum(num_read) == nbytes else None

    def _join(self, until_s: float) -> bool:
        for thread in self._threads:
            thread.join(max(0.0, until_s - self._monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self, nbytes: int) -> list[_IO]:
        """The next I/Os of a round of so many bytes; fewer when there are no more."""
        most = min(max(nbytes // DRIVE_THREADS // SLOT_ALIGN_BYTES * SLOT_ALIGN_BYTES, _MIN_IO_BYTES), MAX_IO_BYTES)
        ios: list[_IO] = []
        while nbytes and self._todo:
            file, offset, length = self._todo.popleft()
            taken = min(length, most, nbytes)
            ios.append(_IO(file, offset, taken))
            nbytes -= taken
            if taken < length:  # the rest of it comes after those of other places
                self._todo.append(_IO(file, offset + taken, length - taken))
        return ios


def _read(ios: Sequence[_IO], buffer: memoryview, num_read: list[int]) -> None:
    """Thread. All reads of a round go to the same place: nobody looks at what comes."""
    for io in ios:
        try:
            num_read.append(io.file.read_into(io.offset, [buffer[: io.nbytes]]))
        except OSError:
            return  # its bytes are missed here; whoever wants the block meets the error again, and it is counted then


def _spread(files: Mapping[BlockFile, Sequence[Used]]) -> deque[_IO]:
    """What is to be read, the same from each file, in turns."""
    share = MAX_PROBE_BYTES // max(1, len(files))
    each = [[_IO(file, *run) for run in used_runs(used, share)] for file, used in files.items()]
    longest = max(map(len, each), default=0)
    return deque(ios[i] for i in range(longest) for ios in each if i < len(ios))


def used_runs(used: Sequence[Used], max_bytes: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of ranges that used slots fill without a gap, none longer than MAX_IO_BYTES, anywhere in the file; in
    all `max_bytes`, or fewer when fewer are used."""
    starts = np.concatenate([np.empty(0, np.int64), *(offsets for offsets, _ in used)])
    ends = np.concatenate([np.empty(0, np.int64), *(offsets + nbytes for offsets, nbytes in used)])
    if not len(starts):
        return []
    starts.sort()
    ends.sort()  # slots do not overlap, so both are in the same order
    gaps = np.flatnonzero(starts[1:] != ends[:-1])
    starts, ends = starts[np.append(0, gaps + 1)], ends[np.append(gaps, len(ends) - 1)]
    counts = -((starts - ends) // MAX_IO_BYTES)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)  # of a piece in its run
    offsets = np.repeat(starts, counts) + number * MAX_IO_BYTES
    lengths = np.minimum(np.repeat(ends, counts) - offsets, MAX_IO_BYTES)
    runs: list[tuple[int, int]] = []
    for i in np.random.default_rng(_SEED).permutation(len(offsets)).tolist():
        if not max_bytes:
            break
        runs.append((int(offsets[i]), min(int(lengths[i]), max_bytes)))
        max_bytes -= runs[-1][1]
    return runs
