"""A tier whose speed is known, run on a clock that only it moves, to see what TierSpeed makes of it."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.core.limits import DRIVE_THREADS
from kvstore.tier_speed import TierSpeed


@dataclass
class _Read:
    nbytes: int
    left: float  # bytes, times jitter
    starts_s: float


class SmallTier:
    """Reads wait for `latency_s`; then they share `bytes_per_s`, up to `depth` of them at once (1: one after the other).
    `jitter()` is by how much a read takes longer. Whatever happens is told to `speed`."""

    def __init__(
        self,
        speed: TierSpeed,
        *,
        bytes_per_s: float,
        latency_s: float = 0.0,
        depth: int = DRIVE_THREADS,
        jitter: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.speed = speed
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.depth = depth
        self.jitter = jitter
        self.now_s = 0.0
        self.queue: deque[_Read] = deque()
        self.begun: list[_Read] = []

    def order(self, num_reads: int, nbytes: int) -> None:
        for _ in range(num_reads):
            self.queue.append(_Read(nbytes, nbytes * self.jitter(), 0.0))
            self.speed.ordered(nbytes, self.now_s)

    def cancel_queued(self) -> None:
        while self.queue:
            self.speed.cancelled(self.queue.pop().nbytes, self.now_s)

    def run(self, *, until_s: float = float("inf"), most: int = 1 << 30) -> None:
        """Go on until nothing is left, or `most` reads have ended, or the time has come."""
        ended = 0
        while ended < most and (self.queue or self.begun):
            while self.queue and len(self.begun) < self.depth:
                read = self.queue.popleft()
                read.starts_s = self.now_s + self.latency_s
                self.begun.append(read)
            moving = [read for read in self.begun if read.starts_s <= self.now_s + 1e-12]
            share = self.bytes_per_s / len(moving) if moving else 0.0
            steps = [read.left / share for read in moving if share] + [
                read.starts_s - self.now_s for read in self.begun if read not in moving
            ]
            step_s = min([*steps, until_s - self.now_s])
            self.now_s += step_s
            for read in moving:
                read.left -= share * step_s
            for read in [read for read in moving if read.left <= 1e-6]:
                self.begun.remove(read)
                self.speed.ended(read.nbytes, self.now_s, ok=True)
                ended += 1
            self.speed.check()
            if self.now_s >= until_s:
                return
        self.now_s = max(self.now_s, until_s) if until_s < float("inf") else self.now_s

    def rest(self, seconds: float) -> None:
        self.now_s += seconds


def log_normal(rng: random.Random, sigma: float) -> Callable[[], float]:
    """Heavy-tailed, and 1 on average."""
    return lambda: rng.lognormvariate(-sigma * sigma / 2, sigma)
