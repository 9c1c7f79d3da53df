"""What a group of one-sided reads makes of an owner that changes under it; the device is a fake that copies when it is told."""

import ctypes
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.core.errors import RemoteProtocolError
from kvstore.core.limits import MAX_DESCRIPTOR_BYTES, SEGMENT_BYTES
from kvstore.transport.link import LinkProblem, ReadExtent
from kvstore.transport.nixl import TransferFailed
from kvstore.transport.rdma_reads import SCRATCH_WORDS, Group, Phase, Scratch
from kvstore.transport.rdma_remote import ArenaPlace, Grid, PreparedGrids, Remote
from kvstore.transport.read_queue import Batch, Pending

PAGE = 4096
NBYTES = 64 * PAGE


class CopyingAgent:
    """Copies at `is_done` unless it is held; everything is in this process."""

    def __init__(self) -> None:
        self.held = False
        self.fails = False
        self.posted: list[str] = []
        self.released: list[Any] = []
        self._before_copy: Callable[[str], None] = lambda what: None

    def before_copy(self, hook: Callable[[str], None]) -> None:
        self._before_copy = hook

    def prepare(self, name: str, rows: np.ndarray) -> np.ndarray:
        places = [(at + n * stride, nbytes) for at, nbytes, _, stride, count in rows.tolist() for n in range(count)]
        return np.array(places, np.uint64)

    def read(self, name: str, local: Any, remote: Any) -> Any:
        kind = "generations" if len(self.posted) % 3 != 1 else "data"
        self.posted.append(kind)
        return (kind, np.array(local)[:, :2].tolist(), np.array(remote)[:, :2].tolist())

    def read_prepared(self, local: np.ndarray, local_at: np.ndarray, remote: np.ndarray, remote_at: np.ndarray) -> Any:
        self.posted.append("prepared")
        return ("data", local[local_at].tolist(), remote[remote_at].tolist())

    def is_done(self, transfer: Any) -> bool:
        if self.fails:
            raise TransferFailed("as told")
        if self.held:
            return False
        kind, local, remote = transfer
        self._before_copy(kind)
        for (to, nbytes), (source, _) in zip(local, remote, strict=True):
            ctypes.memmove(to, source, nbytes)
        return True

    def release(self, transfer: Any) -> bool:
        self.released.append(transfer)
        return True


class Pair:
    """An owner's arena and a reader's, and a group of `extents` between them."""

    def __init__(self, extents: list[ReadExtent]) -> None:
        rng = np.random.default_rng(1)
        self.agent = CopyingAgent()
        self.theirs, self.ours = rng.integers(0, 256, NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
        self.generations = np.arange(100, 100 + NBYTES // PAGE, dtype=np.uint64)
        self.scratch = np.zeros(SCRATCH_WORDS, np.uint64)
        self.beacon = np.arange(1, 3, dtype=np.uint64)
        self.remote = Remote(
            ArenaPlace(
                self.beacon.tobytes(),
                self.beacon.ctypes.data,
                self.theirs.ctypes.data,
                NBYTES,
                self.generations.ctypes.data,
                b"",
            ),
            name="owner",
        )
        agent: Any = self.agent
        self.remote.grids = PreparedGrids(agent, "owner", self.theirs.ctypes.data, NBYTES)
        batch = Batch(bytes(16), 1.0, lambda done: None, len(extents))
        self.group = Group(
            agent,
            self.remote,
            [Pending(extent, batch) for extent in extents],
            scratch=Scratch(self.scratch, self.scratch.ctypes.data),
            arena=self.ours.ctypes.data,
            grids=PreparedGrids(agent, "", self.ours.ctypes.data, NBYTES),
        )

    def run(self, *, stops: bool = False) -> dict[int, LinkProblem | None]:
        self.group.begin()
        self.group.advance(stops=stops)
        return self.problems()

    def problems(self) -> dict[int, LinkProblem | None]:
        return {pending.extent.read_id: problem for pending, problem in self.group.ended}


def slot(number: int, *, into: int | None = None, nbytes: int = 2 * PAGE) -> ReadExtent:
    to = number if into is None else into
    return ReadExtent(number, number * 2 * PAGE, to * 2 * PAGE, nbytes, 100 + 2 * number)


def test_slots_of_one_size_are_read_by_index() -> None:
    pair = Pair([slot(3, into=0), slot(7), slot(1, into=2)])

    assert pair.run() == {1: None, 3: None, 7: None}
    assert pair.agent.posted == ["generations", "prepared", "generations"]
    assert np.array_equal(pair.ours[: 2 * PAGE], pair.theirs[6 * PAGE : 8 * PAGE])
    assert pair.remote.is_connected
    assert pair.remote.num_groups == 0
    assert len(pair.agent.released) == 3


@pytest.mark.parametrize(
    "extents",
    [
        [slot(0), slot(2, nbytes=100)],
        [ReadExtent(0, 5 * PAGE, 8, 2 * PAGE, 105), slot(2)],
    ],
)
def test_others_are_read_by_address(extents: list[ReadExtent]) -> None:
    pair = Pair(extents)

    assert set(pair.run().values()) == {None}
    assert pair.agent.posted == ["generations", "data", "generations"]
    for each in extents:
        ours = pair.ours[each.local_offset : each.local_offset + each.nbytes]
        assert np.array_equal(ours, pair.theirs[each.remote_offset : each.remote_offset + each.nbytes])


def test_a_slot_that_is_reused_before_is_not_read() -> None:
    pair = Pair([slot(0), slot(1)])
    pair.generations[2] += np.uint64(1)

    assert pair.run() == {0: None, 1: LinkProblem.STALE}
    assert not pair.ours[2 * PAGE :].any()


def test_nothing_is_read_when_all_are_stale() -> None:
    pair = Pair([slot(0)])
    pair.generations[:] = 0

    assert pair.run() == {0: LinkProblem.STALE}
    assert pair.agent.posted == ["generations"]
    assert pair.group.phase is Phase.OVER


def test_a_slot_that_is_reused_while_it_is_read_is_stale() -> None:
    pair = Pair([slot(0), slot(1), slot(2)])

    def reuse(kind: str) -> None:
        if kind == "data":
            pair.generations[2] += np.uint64(1)

    pair.agent.before_copy(reuse)

    assert pair.run() == {0: None, 1: LinkProblem.STALE, 2: None}


@pytest.mark.parametrize("when", ["generations", "data"])
def test_an_owner_that_closes_meanwhile_is_gone(when: str) -> None:
    """Its memory may be another's by now; generations that happen to agree say nothing."""
    pair = Pair([slot(0), slot(1)])

    def close(kind: str) -> None:
        if kind == when:
            pair.beacon[:] = 0

    pair.agent.before_copy(close)

    with pytest.raises(TransferFailed):
        pair.run()
    pair.group.fail()
    assert pair.problems() == dict.fromkeys(range(2), LinkProblem.GONE)
    assert pair.remote.num_groups == 0


def test_a_failed_transfer_ends_all() -> None:
    pair = Pair([slot(0), slot(1)])
    pair.agent.held = True
    pair.group.begin()
    assert not pair.group.advance(stops=False)

    pair.agent.fails = True
    with pytest.raises(TransferFailed):
        pair.group.advance(stops=False)
    pair.group.fail()

    assert pair.problems() == dict.fromkeys(range(2), LinkProblem.GONE)
    assert len(pair.agent.released) == 1


def test_what_is_late_is_not_ended_again() -> None:
    pair = Pair([slot(0), slot(1)])
    pair.agent.held = True
    pair.group.begin()

    pair.group.lose(pair.group.pendings[:1])
    pair.agent.held = False
    pair.group.advance(stops=False)

    assert pair.problems() == {1: None}
    assert [pending.extent.read_id for pending in pair.group.late] == [0]
    assert pair.group.phase is Phase.OVER


def test_a_link_that_closes_posts_nothing_more() -> None:
    pair = Pair([slot(0)])

    assert pair.run(stops=True) == {0: LinkProblem.STOPPED}
    assert pair.agent.posted == ["generations"]


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 5, SEGMENT_BYTES // 3, SEGMENT_BYTES])
@pytest.mark.parametrize("arena_nbytes", [SEGMENT_BYTES, 3 * SEGMENT_BYTES, SEGMENT_BYTES + 10 * PAGE])
def test_a_grid_is_the_list_of_all_slots(nbytes: int, arena_nbytes: int) -> None:
    grid = Grid(1 << 40, arena_nbytes, nbytes)
    places = [at + n * stride for at, _, _, stride, count in grid.rows.tolist() for n in range(count)]
    offsets = np.array(places[:: max(1, len(places) // 50)], np.int64) - (1 << 40)

    indexes = grid.indexes(offsets)

    assert grid.size == len(places)
    assert indexes is not None
    assert [places[index] for index in indexes] == (offsets + (1 << 40)).tolist()
    assert (offsets % SEGMENT_BYTES + nbytes <= SEGMENT_BYTES).all()
    assert (offsets + nbytes <= arena_nbytes).all()
    assert grid.indexes(offsets + 1) is None
    assert grid.indexes(np.array([arena_nbytes], np.int64)) is None


def test_a_descriptor_is_read_back_and_any_cut_is_refused() -> None:
    place = ArenaPlace(bytes(range(16)), 1, 2, 3, 4, b"metadata")
    encoded = place.encode()
    far = (1 << 64) - PAGE

    assert ArenaPlace.decode(encoded) == place
    wrong = [encoded[:n] for n in range(len(encoded))] + [encoded + b"x", b"KVR2" + encoded[4:]]
    wrong.append(encoded[:52] + struct.pack("<I", 1 << 31) + encoded[56:])
    wrong.append(place._replace(metadata=bytes(MAX_DESCRIPTOR_BYTES - 56)).encode() + b"x")
    numbers = ("beacon_at", "memory_at", "memory_nbytes", "generations_at")
    wrong += [place._replace(**{name: far}).encode() for name in numbers]  # sums would not fit into 64 bits
    for broken in wrong:
        with pytest.raises(RemoteProtocolError):
            ArenaPlace.decode(broken)


def test_a_list_that_would_be_too_long_is_not_even_begun() -> None:
    """Of an arena as large as a descriptor may say; its segments alone would be a million."""

    class Never:
        def prepare(self, name: str, rows: np.ndarray) -> Any:
            raise AssertionError(f"{len(rows)} rows")

    agent: Any = Never()
    started_s = time.monotonic()
    assert PreparedGrids(agent, "liar", 0, 1 << 46).get(NBYTES) is None
    assert time.monotonic() - started_s < 0.1
