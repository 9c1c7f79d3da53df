"""Reads in flight on a drive of any speed, simulated: none waits long behind our own, and no speed is given away."""

import heapq
import random

import pytest

from kvstore.core.limits import DRIVE_THREADS, MAX_IO_BYTES
from kvstore.tiers.nvme.read_window import ReadWindow

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 360 * KIB


class SlowDrive:
    """A queue that never runs dry on a link: bytes pass one read after the other, and each takes `latency_s` besides."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, *, jitter: float = 0.0, block: int = BLOCK) -> None:
        self.window = ReadWindow(max_bytes=DRIVE_THREADS * MAX_IO_BYTES)
        self.bytes_per_s, self.latency_s, self.jitter, self.block = bytes_per_s, latency_s, jitter, block
        self.now_s = self._free_s = 1.0
        self._in_flight: list[tuple[float, float, int, int]] = []  # (ends, begun, bytes, in flight when it began)
        self._flying = 0
        self._rng = random.Random(5)

    def run(self, seconds: float) -> tuple[float, float]:
        """Bytes per second, and the longest that a read took, of the last half."""
        began_s = self.now_s
        nbytes, longest_s = 0, 0.0
        while self.now_s < began_s + seconds:
            self._fill()
            self.now_s, begun_s, size, in_flight = heapq.heappop(self._in_flight)
            self._flying -= size
            self.window.ended(size, in_flight_bytes=in_flight, begun_s=begun_s, now_s=self.now_s)
            if self.now_s > began_s + seconds / 2:
                nbytes += size
                longest_s = max(longest_s, self.now_s - begun_s)
        return nbytes / (self.now_s - began_s - seconds / 2), longest_s

    def _fill(self) -> None:
        while len(self._in_flight) < DRIVE_THREADS and self._flying < self.window.nbytes:
            size = max(self.block, min(self.window.nbytes // 2, MAX_IO_BYTES) // self.block * self.block)
            self._flying += size
            slower = 1 + self._rng.expovariate(1 / self.jitter) if self.jitter else 1.0
            self._free_s = max(self.now_s, self._free_s) + size / self.bytes_per_s * slower
            heapq.heappush(self._in_flight, (self._free_s + self.latency_s, self.now_s, size, self._flying))


@pytest.mark.parametrize("bytes_per_s", [1e6, 3e6, 10e6, 30e6, 100e6, 500e6, 3e9])
def test_no_read_waits_long_behind_ours_and_the_drive_is_never_idle(bytes_per_s: float) -> None:
    drive = SlowDrive(bytes_per_s)

    found_bytes_per_s, longest_s = drive.run(max(4.0, 30 * BLOCK / bytes_per_s))

    assert found_bytes_per_s > 0.9 * bytes_per_s
    assert longest_s < max(0.6, 3.1 * BLOCK / bytes_per_s)


def test_a_fast_drive_has_all_of_it_within_a_few_milliseconds() -> None:
    drive = SlowDrive(3e9)

    drive.run(0.03)

    assert drive.window.nbytes == DRIVE_THREADS * MAX_IO_BYTES


@pytest.mark.parametrize("latency_s", [0.02, 0.15, 0.3, 1.0])
def test_distance_is_not_taken_for_a_queue_of_ours(latency_s: float) -> None:
    """A share behind a network: so much in flight as there may be is the only way to be fast there."""
    drive = SlowDrive(2e9, latency_s)

    found_bytes_per_s, _ = drive.run(60 * latency_s)

    assert found_bytes_per_s > 0.7 * min(2e9, DRIVE_THREADS * MAX_IO_BYTES / latency_s)


def test_a_speed_that_changes_is_followed() -> None:
    drive = SlowDrive(100e6)
    for bytes_per_s in (100e6, 10e6, 1e9, 3e6, 300e6):
        drive.bytes_per_s = bytes_per_s
        found_bytes_per_s, longest_s = drive.run(30.0)
        assert found_bytes_per_s > 0.9 * bytes_per_s
        assert longest_s < 0.6


@pytest.mark.parametrize("bytes_per_s", [3e6, 30e6, 1e9])
def test_a_noisy_drive_keeps_its_speed(bytes_per_s: float) -> None:
    """Each read takes twice its time on average, now and then five times."""
    drive = SlowDrive(bytes_per_s, jitter=1.0)

    found_bytes_per_s, _ = drive.run(30.0)

    assert found_bytes_per_s > 0.35 * bytes_per_s


def test_large_blocks_go_one_by_one_on_a_slow_drive() -> None:
    drive = SlowDrive(10e6, block=8 * MIB)

    found_bytes_per_s, longest_s = drive.run(60.0)

    assert found_bytes_per_s > 0.9 * 10e6
    assert longest_s < 1.1 * 8 * MIB / 10e6


def test_reads_that_had_room_beside_them_change_nothing() -> None:
    """One small read at a time says nothing of what more would do."""
    window = ReadWindow(max_bytes=32 * MIB)
    before = window.nbytes

    for number in range(1000):
        window.ended(64 * KIB, in_flight_bytes=64 * KIB, begun_s=number, now_s=number + 0.001)

    assert window.nbytes == before


def test_a_drive_of_few_threads_has_no_more_than_they_can_read() -> None:
    window = ReadWindow(max_bytes=64 * KIB)

    for number in range(100):
        window.ended(64 * KIB, in_flight_bytes=64 * KIB, begun_s=number, now_s=number + (0.9 if number % 2 else 0.0))

    assert window.nbytes == 64 * KIB
