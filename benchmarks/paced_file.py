"""A drive as slow as a benchmark wants it: a BlockFile whose bytes pass a link of a given bandwidth, which may change at any
time, from another process too, and may be nothing.

    pace = Pace.create(path)          # a file of eight bytes
    pace.set(30e6)                    # bytes per second; math.inf: as fast as the drive is; 0: nothing passes
    file = PacedFile(DirectFile.open(...), PacedLink(Pace.open(path)))
"""

import math
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from kvstore.tiers.nvme.file import BlockFile

_NBYTES = 8
_LOOK_S = 0.005
"""How often who waits looks whether the pace has changed."""


class Pace:
    """Bytes per second, in a file that processes share. A value is read and written in one piece."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._bytes_per_s = np.frombuffer(mapped, np.float64)

    @classmethod
    def create(cls, path: Path, bytes_per_s: float = math.inf) -> Self:
        """A new file at `path`, or the one there with another pace."""
        path.write_bytes(bytes(_NBYTES))
        pace = cls.open(path)
        pace.set(bytes_per_s)
        return pace

    @classmethod
    def open(cls, path: Path) -> Self:
        """The file that another process made. Raises OSError or ValueError when there is none, or it is something else."""
        with path.open("r+b") as file:
            return cls(mmap.mmap(file.fileno(), _NBYTES))

    def get(self) -> float:
        """Now."""
        return float(self._bytes_per_s[0])

    def set(self, bytes_per_s: float) -> None:
        """From now on, also for bytes that wait already."""
        assert bytes_per_s >= 0
        self._bytes_per_s[0] = bytes_per_s


class PacedLink:
    """What all files on it share: whoever comes first has its bytes through first, as on a wire. Any thread.

    passed   -----------|                        grows with time, at the pace of that time
    claimed  --- A ---|- B -|------ C ------|    `pass_through` of B returns when `passed` has reached its end
    """

    def __init__(
        self,
        pace: Pace,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pace = pace
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._passed = 0.0
        self._claimed = 0.0
        self._now_s = monotonic()

    def pass_through(self, nbytes: int) -> None:
        """Returns when so many bytes have passed behind those before them. Never, while nothing passes."""
        with self._lock:
            self._go_on()
            self._claimed += nbytes
            end = self._claimed
        while (wait_s := self._wait_s(end)) > 0:
            self._sleep(min(wait_s, _LOOK_S))

    def _wait_s(self, end: float) -> float:
        """At the present pace."""
        with self._lock:
            bytes_per_s = self._go_on()
            left = end - self._passed
            if left < 1:  # what is less than a byte is an error of the sums
                return 0.0
            return left / bytes_per_s if bytes_per_s else math.inf

    def _go_on(self) -> float:
        """What has passed since the last look; an idle link saves nothing up. The pace."""
        now_s, bytes_per_s = self._monotonic(), self._pace.get()
        if math.isinf(bytes_per_s):
            self._passed = self._claimed
        else:
            self._passed = min(self._claimed, self._passed + bytes_per_s * (now_s - self._now_s))
        self._now_s = now_s
        return bytes_per_s


class PacedFile:
    """`inner` behind `link`: what is read passes it, what is written only if `writes` says so."""

    def __init__(self, inner: BlockFile, link: PacedLink, *, writes: bool = False) -> None:
        self._inner = inner
        self._link = link
        self._writes = writes

    @property
    def nbytes(self) -> int:
        """Size now."""
        return self._inner.nbytes

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        """The bytes are in `views` when they have passed."""
        done = self._inner.read_into(offset, views)
        self._link.pass_through(done)
        return done

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        """They are written when they have passed."""
        if self._writes:
            self._link.pass_through(sum(view.nbytes for view in views))
        return self._inner.write_from(offset, views)

    def sync(self) -> None:
        """Of the inner file."""
        self._inner.sync()

    def resize(self, nbytes: int) -> None:
        """Of the inner file."""
        self._inner.resize(nbytes)

    def is_linked(self) -> bool:
        """Of the inner file."""
        return self._inner.is_linked()

    def close(self) -> None:
        """Of the inner file."""
        self._inner.close()
