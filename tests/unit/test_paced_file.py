"""The file that benchmarks slow down: total bytes over time are those of one link, whatever is set meanwhile."""

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_file import PAGE, MemoryFile

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.paced_file import Pace, PacedFile, PacedLink

MB = 1_000_000
DEADLINE_S = 20.0


class Clock:
    """Sleeping makes time go on; `then` may do something at a given time."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.then: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds
        while self.then and self.then[0][0] <= self.now_s - 50.0:
            self.then.pop(0)[1]()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace.create(tmp_path / "pace", 10.0 * MB)


@pytest.fixture
def link(pace: Pace, clock: Clock) -> PacedLink:
    return PacedLink(pace, monotonic=clock.monotonic, sleep=clock.sleep)


def took_s(clock: Clock, link: PacedLink, nbytes: int) -> float:
    began_s = clock.now_s
    link.pass_through(nbytes)
    return clock.now_s - began_s


def test_bytes_take_their_time(link: PacedLink, clock: Clock) -> None:
    assert [took_s(clock, link, n * MB) for n in (1, 5, 2)] == pytest.approx([0.1, 0.5, 0.2])


def test_an_idle_link_saves_nothing_up(link: PacedLink, clock: Clock) -> None:
    link.pass_through(MB)
    clock.now_s += 100.0

    assert took_s(clock, link, MB) == pytest.approx(0.1)


def test_a_pace_that_changes_meanwhile_counts_from_then_on(link: PacedLink, clock: Clock, pace: Pace) -> None:
    clock.then = [(0.5, lambda: pace.set(1.0 * MB)), (2.5, lambda: pace.set(100.0 * MB))]

    assert took_s(clock, link, 10 * MB) == pytest.approx(0.5 + 2.0 + 0.03, abs=0.02)


def test_nothing_passes_at_zero_until_something_does(link: PacedLink, clock: Clock, pace: Pace) -> None:
    pace.set(0.0)
    clock.then = [(7.0, lambda: pace.set(10.0 * MB))]

    assert took_s(clock, link, MB) == pytest.approx(7.1, abs=0.02)


def test_without_a_limit_nothing_waits(link: PacedLink, clock: Clock, pace: Pace) -> None:
    pace.set(math.inf)

    assert took_s(clock, link, 1000 * MB) == 0.0

    pace.set(10.0 * MB)
    assert took_s(clock, link, MB) == pytest.approx(0.1)


def test_another_process_sets_the_pace(tmp_path: Path, pace: Pace) -> None:
    other = Pace.open(tmp_path / "pace")
    assert other.get() == 10.0 * MB

    pace.set(math.inf)

    assert other.get() == math.inf
    with pytest.raises(FileNotFoundError):
        Pace.open(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="length"):
        Pace.open(tmp_path / "short")


def test_threads_share_the_link_and_the_first_is_through_first(tmp_path: Path) -> None:
    """On the real clock: time cannot be too short on any machine, and each waits for those before it."""
    pace = Pace.create(tmp_path / "pace", 0.0)
    link = PacedLink(pace)
    order: list[int] = []
    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=lambda number=number: (link.pass_through(MB), order.append(number))))
        threads[-1].start()
        while link._claimed < (number + 1) * MB:
            assert threads[-1].is_alive()

    pace.set(20.0 * MB)
    for thread in threads:
        thread.join(DEADLINE_S)

    assert order == [0, 1, 2, 3]
    assert link._passed == pytest.approx(4 * MB, abs=1)


def test_reads_wait_and_writes_only_where_it_is_wanted(link: PacedLink, clock: Clock) -> None:
    inner = MemoryFile(MB)
    reads, both = PacedFile(inner, link), PacedFile(inner, link, writes=True)
    page = memoryview(bytearray(b"x" * PAGE))

    assert reads.write_from(PAGE, [page]) == PAGE
    assert clock.now_s == 50.0
    assert both.write_from(2 * PAGE, [page]) == PAGE
    assert clock.now_s == pytest.approx(50.0 + PAGE / (10 * MB))
    got = memoryview(bytearray(PAGE))
    assert reads.read_into(PAGE, [got]) == PAGE
    assert got == page
    assert clock.now_s == pytest.approx(50.0 + 2 * PAGE / (10 * MB))
    assert reads.read_into(MB, [got]) == 0, "what did not come takes no time"
    assert (reads.nbytes, reads.is_linked()) == (MB, True)
