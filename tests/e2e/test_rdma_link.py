"""One-sided reads between processes: owners that are killed, stopped, closed, or replaced. Over CMA where there is no device."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from rdma_owner import PAGE, SLOT, OwnerProcess, arena_of, running_owner

from kvstore.transport.link import Link, LinkProblem, ReadDone, ReadExtent
from kvstore.transport.nixl import is_installed
from kvstore.transport.rdma import RdmaEndpoint

pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(not is_installed(), reason="NIXL is not installed: pip install --no-deps nixl-cu12"),
]
NBYTES = 16 << 20
DEADLINE_S = 20.0
LEASE = bytes(16)
STEADY_SEED = 2


class Ends:
    """Collects ends."""

    def __init__(self) -> None:
        self.done: list[ReadDone] = []
        self._changed = threading.Condition()

    def __call__(self, done: list[ReadDone]) -> None:
        with self._changed:
            self.done += done
            self._changed.notify_all()

    def wait(self, count: int) -> list[ReadDone]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, DEADLINE_S), self.done
            return list(self.done)


@pytest.fixture
def reader() -> Iterator[RdmaEndpoint]:
    endpoint = RdmaEndpoint(memory=np.zeros(NBYTES, np.uint8), generations=np.zeros(NBYTES // PAGE, np.uint64)).open()
    yield endpoint
    assert endpoint.close(DEADLINE_S)


@pytest.fixture(scope="module")
def steady_of_module() -> Iterator[OwnerProcess]:
    with running_owner(NBYTES, STEADY_SEED) as owner:
        yield owner


@pytest.fixture
def steady(steady_of_module: OwnerProcess) -> Iterator[OwnerProcess]:
    """One that outlives the tests, which may stop it. No reader has reached it before."""
    yield steady_of_module
    steady_of_module.signal(signal.SIGCONT)


def slots(first: int, count: int) -> list[ReadExtent]:
    return [ReadExtent(n, n * SLOT, n * SLOT, SLOT, n + 1) for n in range(first, first + count)]


def read(link: Link, batch: Sequence[ReadExtent], deadline_s: float = DEADLINE_S) -> Ends:
    ends = Ends()
    link.read(batch, lease=LEASE, deadline_s=deadline_s, on_done=ends)
    return ends


def problems(ends: Ends, count: int) -> set[LinkProblem | None]:
    return {each.problem for each in ends.wait(count)}


def test_a_killed_owner_is_gone_at_once_and_for_all_that_waits(reader: RdmaEndpoint) -> None:
    with running_owner(NBYTES) as owner:
        link = reader.connect("owner", owner.descriptor)
        assert problems(read(link, slots(0, 256)), 256) == {None}
        assert np.array_equal(reader.memory, arena_of(NBYTES, 1)[0])
        owner.kill()

        began_s = time.monotonic()
        ends = read(link, slots(0, 256))

        assert problems(ends, 256) == {LinkProblem.GONE}
        assert time.monotonic() - began_s < 2.0
        assert link.health().state == "failing"
        assert problems(read(link, slots(0, 1)), 1) == {LinkProblem.GONE}  # and is tried anew


def test_an_owner_that_is_killed_during_reads_ends_them_all(reader: RdmaEndpoint) -> None:
    """Whatever is said to be well is well."""
    with running_owner(NBYTES) as owner:
        link = reader.connect("owner", owner.descriptor)
        assert problems(read(link, slots(0, 1)), 1) == {None}
        ends = read(link, slots(0, 256))
        owner.kill()
        done = ends.wait(256)

        expected = arena_of(NBYTES, 1)[0]
        assert {each.problem for each in done} <= {None, LinkProblem.GONE}
        for each in done:
            if each.problem is None:
                place = slice(each.read_id * SLOT, (each.read_id + 1) * SLOT)
                assert np.array_equal(reader.memory[place], expected[place])


def test_a_stopped_owner_is_read_all_the_same(reader: RdmaEndpoint, steady: OwnerProcess) -> None:
    """Its processor takes no part. That its process hangs is for the control calls to find out."""
    link = reader.connect("owner", steady.descriptor)
    assert problems(read(link, slots(0, 1)), 1) == {None}

    steady.signal(signal.SIGSTOP)

    assert problems(read(link, slots(0, 64)), 64) == {None}


def test_an_owner_that_hangs_before_it_was_reached_is_a_timeout(reader: RdmaEndpoint, steady: OwnerProcess) -> None:
    """Settled, since nothing was begun; another peer's reads go on meanwhile; when it goes on, so does the link."""
    with running_owner(NBYTES) as other:
        steady.signal(signal.SIGSTOP)
        link, well = reader.connect("owner", steady.descriptor), reader.connect("other", other.descriptor)

        began_s = time.monotonic()
        ends = read(link, slots(0, 4), deadline_s=0.5)
        assert problems(read(well, slots(8, 8)), 8) == {None}
        done = ends.wait(4)

        assert 0.45 < time.monotonic() - began_s < 2.0
        assert set(done) == {ReadDone(n, LinkProblem.TIMEOUT, settled=True) for n in range(4)}
        steady.signal(signal.SIGCONT)
        assert problems(read(link, slots(0, 4)), 4) == {None}


def test_a_link_to_a_hung_owner_closes(reader: RdmaEndpoint, steady: OwnerProcess) -> None:
    steady.signal(signal.SIGSTOP)
    link = reader.connect("owner", steady.descriptor)
    ends = read(link, slots(0, 4))

    assert link.close(5.0)

    assert problems(ends, 4) == {LinkProblem.STOPPED}


def test_a_closed_owner_is_gone_and_its_successor_another(reader: RdmaEndpoint, steady: OwnerProcess) -> None:
    with running_owner(NBYTES) as owner:
        link = reader.connect("owner", owner.descriptor)
        assert problems(read(link, slots(0, 8)), 8) == {None}

        owner.close()

        assert problems(read(link, slots(0, 8)), 8) == {LinkProblem.GONE}
    again = reader.connect("owner", steady.descriptor)
    assert problems(read(again, slots(0, 8)), 8) == {None}
    assert np.array_equal(reader.memory[: 8 * SLOT], arena_of(NBYTES, STEADY_SEED)[0][: 8 * SLOT])


def test_an_idle_endpoint_costs_next_to_nothing(reader: RdmaEndpoint, steady: OwnerProcess) -> None:
    """The library's own threads would take a third of a core and more."""
    link = reader.connect("owner", steady.descriptor)
    assert problems(read(link, slots(0, 1)), 1) == {None}

    used_s = time.process_time()
    time.sleep(0.5)
    used_s = time.process_time() - used_s

    assert used_s < 0.05


def test_a_crash_of_the_thread_leaves_nobody_waiting(
    reader: RdmaEndpoint, steady: OwnerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the library raises: reads end, later ones too, and close says that it cannot know."""
    link = reader.connect("owner", steady.descriptor)
    assert problems(read(link, slots(0, 1)), 1) == {None}

    def crash(transfer: object) -> bool:
        raise RuntimeError("as told")

    monkeypatch.setattr(reader.agent, "is_done", crash)
    done = read(link, slots(0, 256)).wait(256)

    assert {each.problem for each in done} <= {LinkProblem.GONE, LinkProblem.STOPPED}
    assert ReadDone(0, LinkProblem.GONE, settled=False) in done
    assert problems(read(link, slots(0, 1)), 1) == {LinkProblem.STOPPED}
    assert not link.close(0.1)
    assert "as told" in caplog.text
    link._groups.clear()  # for the fixture: the process that holds the memory ends
