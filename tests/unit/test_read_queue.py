"""The queue that every link's reads go through: each extent ends once, whatever happens to it on the way."""

import math
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "contract"))

from link_nodes import LEASE, Ends

from kvstore.core.clock import ManualClock
from kvstore.transport.link import LinkProblem, ReadExtent
from kvstore.transport.read_queue import Pending, ReadQueue

OTHER = bytes(16)


def extents(count: int, *, first: int = 0, nbytes: int = 10) -> list[ReadExtent]:
    return [ReadExtent(first + n, 0, 0, nbytes, 1) for n in range(count)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(clock: ManualClock) -> ReadQueue:
    return ReadQueue(arena_nbytes=1000, monotonic=clock.now_s)


def ids(pendings: list[Pending]) -> list[int]:
    return [pending.extent.read_id for pending in pendings]


def test_what_is_taken_together_is_of_one_lease_and_within_the_limits(queue: ReadQueue) -> None:
    queue.submit(extents(4), lease=LEASE, deadline_s=1, on_done=Ends())
    queue.submit(extents(2, first=4), lease=OTHER, deadline_s=1, on_done=Ends())
    queue.submit(extents(1, first=6, nbytes=500), lease=OTHER, deadline_s=1, on_done=Ends())

    taken = [ids(queue.take(25, 100)), ids(queue.take(1000, 1)), ids(queue.take(1000, 100)), ids(queue.take(25, 100))]

    assert taken == [[0, 1], [2], [3], [4, 5]]
    assert ids(queue.take(25, 100)) == [6], "one is taken however large it is"
    assert ids(queue.take(25, 100)) == []


def test_only_what_waits_expires(queue: ReadQueue, clock: ManualClock) -> None:
    early, late = Ends(), Ends()
    queue.submit(extents(3), lease=LEASE, deadline_s=1, on_done=early)
    queue.submit(extents(1, first=3), lease=LEASE, deadline_s=2, on_done=late)
    taken = queue.take(10, 1)

    clock.advance(1.5)
    queue.expire()

    assert early.wait(2) == {1: LinkProblem.TIMEOUT, 2: LinkProblem.TIMEOUT}
    assert late.done == []
    assert queue.next_deadline_s() == 1.0, "what is in flight is late, and still open"
    queue.end([(taken[0], None)])
    assert queue.next_deadline_s() == 2.0
    queue.check()


def test_busy_time_counts_while_anything_is_open(queue: ReadQueue, clock: ManualClock) -> None:
    for busy_s, idle_s in ((2.0, 5.0), (1.0, 7.0)):
        queue.submit(extents(2), lease=LEASE, deadline_s=100, on_done=Ends())
        taken = queue.take(1000, 100)
        clock.advance(busy_s / 2)
        queue.end([(taken[0], None)])
        clock.advance(busy_s / 2)
        queue.end([(taken[1], LinkProblem.CORRUPT)])
        clock.advance(idle_s)

    stats = queue.stats()
    assert (stats.busy_s, stats.nbytes, stats.num_extents, stats.queued_nbytes) == (3.0, 20, 2, 0)
    assert stats.problems == {"corrupt": 2}
    assert queue.next_deadline_s() == math.inf


def test_what_comes_back_after_the_close_is_stopped(queue: ReadQueue) -> None:
    ends = Ends()
    queue.submit(extents(3), lease=LEASE, deadline_s=1, on_done=ends)
    taken = queue.take(20, 2)

    queue.close()
    queue.put_back(taken, retried=True)

    assert ends.wait(3) == dict.fromkeys(range(3), LinkProblem.STOPPED)
    queue.check()


@pytest.mark.parametrize("seed", range(20))
def test_each_extent_ends_once(seed: int, queue: ReadQueue, clock: ManualClock) -> None:
    rng = random.Random(seed)
    ends, taken, asked = Ends(), [], 0
    for _ in range(300):
        match rng.randrange(7):
            case 0:
                count = rng.randrange(1, 6)
                queue.submit(
                    extents(count, first=asked), lease=rng.choice((LEASE, OTHER)), deadline_s=rng.random(), on_done=ends
                )
                asked += count
            case 1 | 2:
                taken += queue.take(rng.randrange(60), rng.randrange(1, 6))
            case 3 if taken:
                queue.end([(taken.pop(rng.randrange(len(taken))), rng.choice((None, LinkProblem.STALE)))])
            case 4 if taken:
                queue.put_back([taken.pop()], retried=True)
            case 5:
                clock.advance(rng.random() / 4)
                queue.expire()
            case 6 if rng.random() < 0.1:
                queue.fail(LinkProblem.GONE)
        queue.check()

    queue.end([(pending, None) for pending in taken])
    queue.close()

    assert sorted(ends.wait(asked)) == list(range(asked)), f"seed {seed}"
    queue.check()
    assert queue.stats().queued_nbytes == 0
