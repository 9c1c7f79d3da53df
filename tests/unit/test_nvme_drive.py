"""A drive's threads: bytes there and back, neighbours together, reads first, bad blocks alone, and how a sick drive is spared."""

import errno
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty_file import PAGE, FaultyFile
from xxhash import xxh3_64_intdigest

from kvstore.core.limits import DRIVE_RETRY_S, MAX_DRIVE_ERRORS
from kvstore.core.moves import DRIVE_SHIFT, BlockRecord, Move, MoveDone, MoveProblem, Urgency
from kvstore.tiers.nvme.drive import Drive
from kvstore.tiers.nvme.file import BlockFile, DirectFile, page_aligned

READ, PREFETCH, WRITE = Urgency
DEADLINE_S = 20.0
FILE_BYTES = 256 * PAGE


class HeldFile(FaultyFile):
    """Calls for pages that are held wait until they are let go."""

    def __init__(self, inner: BlockFile | None = None) -> None:
        super().__init__(inner)
        self.held: set[int] = set()
        self.inside: list[int] = []
        self.most_writing = 0
        self._num_writing = 0
        self._changed = threading.Condition()

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        self._wait(offset)
        return super().read_into(offset, views)

    def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
        with self._changed:
            self._num_writing += 1
            self.most_writing = max(self.most_writing, self._num_writing)
        self._wait(offset)
        try:
            return super().write_from(offset, views)
        finally:
            with self._changed:
                self._num_writing -= 1

    def wait_until_inside(self, *pages: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(pages) <= set(self.inside), DEADLINE_S)

    def let_go(self) -> None:
        with self._changed:
            self.held.clear()
            self._changed.notify_all()

    def _wait(self, offset: int) -> None:
        page = offset // PAGE
        with self._changed:
            self.inside.append(page)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: page not in self.held, DEADLINE_S)


class Bench:
    """A drive over a file, its arena of 256 pages, and what it reported."""

    def __init__(self, file: BlockFile, *, threads: int = 1, max_io_bytes: int = 4 * PAGE, first_slot: int = 0) -> None:
        self.file = file
        self.now_s = 0.0
        self.arena = page_aligned(256 * PAGE)
        self.done: dict[int, MoveDone] = {}
        self.order: list[int] = []
        self.written: dict[int, BlockRecord] = {}
        self.drive = Drive(
            file,
            name="0",
            arena=self.arena,
            on_done=self._on_done,
            on_written=self._on_written,
            first_slot=first_slot,
            threads=threads,
            max_io_bytes=max_io_bytes,
            monotonic=lambda: self.now_s,
        )
        self._changed = threading.Condition()
        self._num_moves = 0
        self._started = False

    def move(self, urgency: Urgency, page: int, *, arena_page: int, nbytes: int = PAGE, checksum: int = 0) -> Move:
        self._num_moves += 1
        record = BlockRecord(b"n" * 16, b"k" * 16, b"", page * PAGE, nbytes, 1, checksum, 0, 0)
        return Move(self._num_moves, urgency, arena_page * PAGE, record)

    def run(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        """Submit, start if need be, wait for all of them."""
        self.drive.submit(moves)
        self.start()
        return self.wait(moves)

    def start(self) -> None:
        if not self._started:
            self._started = True
            self.drive.start()

    def wait(self, moves: Sequence[Move]) -> list[MoveProblem | None]:
        ids = [move.move_id for move in moves]
        with self._changed:
            assert self._changed.wait_for(lambda: self.done.keys() >= set(ids), DEADLINE_S)
            return [self.done[each].problem for each in ids]

    def write(self, pages: Sequence[int]) -> list[MoveProblem | None]:
        """A page each, all bytes alike: its number, out of the arena's page of that number."""
        for page in pages:
            self.arena[page * PAGE : (page + 1) * PAGE] = page
        return self.run([self.move(WRITE, page, arena_page=page) for page in pages])

    def read(self, pages: Sequence[int]) -> list[MoveProblem | None]:
        """A page each; what arrives without a problem is what `write` wrote."""
        moves = [
            self.move(READ, page, arena_page=128 + j, checksum=xxh3_64_intdigest(bytes([page]) * PAGE))
            for j, page in enumerate(pages)
        ]
        self.arena[128 * PAGE :] = 0xEE
        problems = self.run(moves)
        for move, page, problem in zip(moves, pages, problems, strict=True):
            if problem is None:
                assert (self.arena[move.arena_offset : move.arena_offset + PAGE] == page).all()
        return problems

    def _on_done(self, ends: list[MoveDone]) -> None:
        with self._changed:
            for end in ends:
                assert end.move_id not in self.done, "a move ends once"
                self.done[end.move_id] = end
                self.order.append(end.move_id)
            self._changed.notify_all()

    def _on_written(self, records: list[BlockRecord]) -> None:
        with self._changed:
            for record in records:
                self.written[record.offset] = record


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def _make(file: BlockFile | None = None, **settings: int) -> Bench:
        file = HeldFile() if file is None else file
        file.resize(FILE_BYTES)
        made.append(Bench(file, **settings))
        return made[-1]

    yield _make
    for each in made:
        if isinstance(each.file, HeldFile):
            each.file.let_go()
        assert each.drive.close(DEADLINE_S)
        each.file.close()


def ranges(bench: Bench, verb: str) -> list[tuple[int, int]]:
    """(first page, number of pages) of each call."""
    assert isinstance(bench.file, FaultyFile)
    return [(call.offset // PAGE, call.nbytes // PAGE) for call in bench.file.calls if call.verb == verb]


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_a_block_comes_back_as_it_went_and_its_record_carries_its_checksum(bench, tmp_path: Path):
    file = DirectFile.open(tmp_path / "blocks.kv")
    b = bench(file, first_slot=PAGE)
    nbytes = 2 * PAGE + 100
    content = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    b.arena[3 * PAGE : 3 * PAGE + nbytes] = content
    write = b.move(WRITE, 5, arena_page=3, nbytes=nbytes)
    write = write._replace(record=write.record._replace(offset=7 << DRIVE_SHIFT | 5 * PAGE))

    assert b.run([write]) == [None]

    record = b.written[write.record.offset]
    assert record == write.record._replace(checksum=xxh3_64_intdigest(content))
    assert b.done[write.move_id].checksum == record.checksum
    raw = page_aligned(3 * PAGE)
    file.read_into(6 * PAGE, [raw.data])
    assert (raw[:nbytes] == content).all()
    assert b.run([Move(99, READ, 20 * PAGE, record)]) == [None]
    assert (b.arena[20 * PAGE : 20 * PAGE + nbytes] == content).all()


def test_a_block_is_in_the_index_queue_before_its_move_ends(bench):
    b = bench()
    seen: list[str] = []
    b.drive._on_written = lambda records: seen.append("written")
    on_done = b.drive._on_done
    b.drive._on_done = lambda ends: (seen.append("done"), on_done(ends))

    b.write([1])

    assert seen == ["written", "done"]


def test_neighbours_go_together_up_to_the_largest_io_and_others_alone(bench):
    b = bench()

    assert b.write([10, 11, 12, 13, 14, 40, 41, 9]) == [None] * 8
    assert b.read([10, 40, 11, 12, 41, 13]) == [None] * 6

    assert ranges(b, "write") == [(10, 4), (14, 1), (40, 2), (9, 1)]
    assert ranges(b, "read") == [(10, 4), (40, 2)]
    assert b.drive.health() == ("ready", "", {})


def test_neighbours_on_the_drive_may_lie_anywhere_in_the_arena(bench):
    b = bench()
    places = {10: 50, 11: 51, 12: 3, 13: 90}
    for page, place in places.items():
        b.arena[place * PAGE : (place + 1) * PAGE] = page

    b.run([b.move(WRITE, page, arena_page=place) for page, place in places.items()])

    assert b.read(list(places)) == [None] * 4
    assert ranges(b, "write") == [(10, 4)]


def test_bytes_that_change_while_they_are_written_are_noticed_when_read(bench):
    class Scribbled(FaultyFile):
        def write_from(self, offset: int, views: Sequence[memoryview]) -> int:
            views[0][5] ^= 1
            return super().write_from(offset, views)

    b = bench(Scribbled())

    b.write([4])

    assert b.run([Move(99, READ, 0, b.written[4 * PAGE])]) == [MoveProblem.CHECKSUM]


def test_many_moves_at_once_keep_their_bytes_apart(bench, tmp_path: Path):
    """128 blocks in random places, rewritten and read back in random order by eight threads, against a dict."""
    b = bench(DirectFile.open(tmp_path / "blocks.kv"), threads=8)
    rng = random.Random(7)
    content: dict[int, tuple[int, int]] = {}  # page -> (fill, checksum)
    for _ in range(20):
        pages = rng.sample(range(256), 128)
        writes = []
        for place, page in enumerate(pages):
            fill = rng.randrange(256)
            b.arena[place * PAGE : (place + 1) * PAGE] = fill
            content[page] = fill, xxh3_64_intdigest(bytes([fill]) * PAGE)
            writes.append(b.move(WRITE, page, arena_page=place))
        assert set(b.run(writes)) == {None}

        wanted = rng.sample(sorted(content), 128)
        reads = [
            b.move(rng.choice((READ, PREFETCH)), page, arena_page=128 + j, checksum=content[page][1])
            for j, page in enumerate(wanted)
        ]
        assert set(b.run(reads)) == {None}
        for move, page in zip(reads, wanted, strict=True):
            assert (b.arena[move.arena_offset : move.arena_offset + PAGE] == content[page][0]).all()


# --- order ------------------------------------------------------------------------------------------------------------


def test_reads_come_before_prefetches_before_writes_each_in_their_order(bench):
    b = bench()
    urgencies = [WRITE, PREFETCH, READ, WRITE, READ, PREFETCH]
    moves = [
        b.move(urgency, 2 * j, arena_page=j, checksum=xxh3_64_intdigest(bytes(PAGE)))
        for j, urgency in enumerate(urgencies)
    ]

    b.run(moves)

    assert [b.order.index(move.move_id) for move in moves] == [4, 2, 0, 5, 1, 3]


def test_at_most_half_of_the_threads_write_so_a_read_gets_through(bench):
    b = bench(threads=4)
    b.file.held = {0, 2, 4, 6, 8, 10}
    b.start()
    writes = [b.move(WRITE, page, arena_page=page) for page in (0, 2, 4, 6, 8, 10)]
    b.drive.submit(writes)
    b.file.wait_until_inside(0, 2)

    read = b.move(READ, 20, arena_page=20, checksum=xxh3_64_intdigest(bytes(PAGE)))
    assert b.run([read]) == [None]

    assert b.drive.busy()
    b.file.let_go()
    assert b.wait(writes) == [None] * 6
    assert b.file.most_writing == 2


def test_all_threads_may_read(bench):
    b = bench(threads=4)
    b.file.held = {0, 2, 4, 6}
    b.start()
    reads = [b.move(READ, page, arena_page=page, checksum=xxh3_64_intdigest(bytes(PAGE))) for page in (0, 2, 4, 6)]

    b.drive.submit(reads)

    b.file.wait_until_inside(0, 2, 4, 6)
    b.file.let_go()
    assert b.wait(reads) == [None] * 4


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_fails_its_block_alone(bench):
    b = bench()
    b.write([10, 11, 12])
    b.file.flip(11 * PAGE + 77)

    assert b.read([10, 11, 12]) == [None, MoveProblem.CHECKSUM, None]

    assert ranges(b, "read") == [(10, 3)]
    assert b.drive.health() == ("ready", "", {"checksum": 1})


@pytest.mark.parametrize("verb", ["read", "write"])
def test_an_error_in_a_joined_io_fails_its_block_alone(bench, verb: str):
    b = bench()
    b.write([10, 11, 12, 13])
    b.file.fail(verb, errno.EIO, offset=12 * PAGE, nbytes=PAGE)

    problems = getattr(b, verb)([10, 11, 12, 13])

    assert problems == [None, None, MoveProblem.EIO, None]
    assert ranges(b, verb)[-5:] == [(10, 4), (10, 1), (11, 1), (12, 1), (13, 1)]
    assert b.drive.health() == ("ready", "", {"eio": 1})


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_call_that_was_short_once_is_made_good(bench, verb: str):
    b = bench()
    b.write([10, 11])
    b.file.shorten(verb, PAGE + 512, times=1)

    assert getattr(b, verb)([10, 11]) == [None, None]
    assert b.drive.health().problems == {}


def test_what_lies_beyond_the_end_of_a_cut_file_is_short(bench):
    b = bench()
    b.write([10, 11, 12])
    b.file.resize(12 * PAGE)

    assert b.read([10, 11, 12]) == [None, None, MoveProblem.SHORT]


def test_a_block_that_stays_short_is_bad(bench):
    b = bench()
    b.write([10, 11])
    b.file.shorten("read", 100, offset=11 * PAGE)

    assert b.read([10, 11]) == [None, MoveProblem.SHORT]


# --- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "found", "refused"),
    [
        (errno.ENOSPC, MoveProblem.NO_SPACE, MoveProblem.NO_SPACE),
        (errno.EROFS, MoveProblem.READ_ONLY, MoveProblem.READ_ONLY),
        (errno.EIO, MoveProblem.EIO, MoveProblem.GONE),  # no slot is blamed that was not tried
        (errno.ENODEV, MoveProblem.GONE, MoveProblem.GONE),
    ],
)
def test_a_drive_that_refuses_a_write_is_spared_until_a_try_succeeds(bench, number, found, refused):
    b = bench()
    b.write([1])
    b.file.fail("write", number)

    assert b.write([2]) == [found]
    assert b.drive.health()[:2] == ("degraded", f"writes fail: {found}")
    num_calls = len(b.file.calls)
    assert b.write([3, 5, 7]) == [refused] * 3
    assert len(b.file.calls) == num_calls
    assert b.read([1]) == [None]

    first = DRIVE_RETRY_S[0]
    b.now_s += first
    assert b.write([3]) == [refused]  # the probe, which fails
    assert len(ranges(b, "write")) == 3
    b.file.heal()
    b.now_s += first
    assert b.write([3]) == [refused]  # the pause is twice as long now
    b.now_s += first
    assert b.write([3]) == [None]
    assert b.write([4]) == [None]
    assert b.drive.health()[:2] == ("ready", "")
    assert b.written.keys() == {page * PAGE for page in (1, 3, 4)}


def test_a_full_drive_fails_the_rest_of_a_joined_write_without_trying(bench):
    b = bench()
    b.file.fail("write", errno.ENOSPC, offset=11 * PAGE)

    assert b.write([10, 11, 12, 13]) == [None, *[MoveProblem.NO_SPACE] * 3]

    assert ranges(b, "write") == [(10, 4), (10, 1), (11, 1)]
    assert b.written.keys() == {10 * PAGE}
    assert b.drive.health() == ("degraded", "writes fail: no_space", {"no_space": 3})


def test_a_drive_that_fails_read_after_read_is_spared_and_its_slots_are_not_blamed(bench):
    b = bench()
    pages = list(range(0, 4 * MAX_DRIVE_ERRORS, 2))
    b.write(pages)
    b.file.fail("read", errno.EIO)

    assert b.read(pages) == [MoveProblem.EIO] * MAX_DRIVE_ERRORS + [MoveProblem.GONE] * MAX_DRIVE_ERRORS

    assert len(ranges(b, "read")) == MAX_DRIVE_ERRORS
    assert b.drive.health()[:2] == ("degraded", "reads fail: eio")
    assert b.write([1]) == [None]
    b.now_s += DRIVE_RETRY_S[0]
    assert b.read([0, 2]) == [MoveProblem.GONE] * 2
    assert len(ranges(b, "read")) == MAX_DRIVE_ERRORS + 1
    b.file.heal()
    b.now_s += 2 * DRIVE_RETRY_S[0]
    assert b.read([0, 2]) == [None, None]
    assert b.drive.health()[0] == "ready"


def test_a_good_read_in_between_forgives_the_bad_ones(bench):
    b = bench()
    b.write(list(range(0, 64, 2)))
    b.file.fail("read", errno.EIO, offset=2 * PAGE)

    for _ in range(3):
        assert b.read(list(range(2, 2 * MAX_DRIVE_ERRORS, 2))) == [MoveProblem.EIO] * (MAX_DRIVE_ERRORS - 1)
        assert b.read([0]) == [None]


def test_a_dead_drive_is_not_asked_for_every_block_of_a_joined_read(bench):
    b = bench(max_io_bytes=32 * PAGE)
    b.write(list(range(32)))
    b.file.fail("read", errno.EIO)

    problems = b.read(list(range(32)))

    assert problems == [MoveProblem.EIO] * MAX_DRIVE_ERRORS + [MoveProblem.GONE] * (32 - MAX_DRIVE_ERRORS)
    assert len(ranges(b, "read")) == 1 + MAX_DRIVE_ERRORS
    assert b.drive.health()[:2] == ("degraded", "reads fail: eio")


def test_a_probe_that_arrives_damaged_shows_that_the_drive_answers(bench):
    b = bench()
    b.write(list(range(0, 32, 2)))
    b.file.fail("read", errno.EIO)
    b.read(list(range(0, 32, 2)))
    b.file.heal()
    b.file.flip(0)
    b.now_s += DRIVE_RETRY_S[0]

    assert b.read([0]) == [MoveProblem.CHECKSUM]

    assert b.read([2]) == [None]
    assert b.drive.health()[0] == "ready"


def test_a_deleted_file_is_read_on_but_not_written(bench, tmp_path: Path):
    b = bench(DirectFile.open(tmp_path / "blocks.kv"))
    b.write([1])

    (tmp_path / "blocks.kv").unlink()

    assert b.drive.health() == ("degraded", "the data file was deleted", {"deleted": 1})
    assert b.write([2, 3]) == [MoveProblem.GONE] * 2
    assert b.read([1]) == [None]
    assert b.drive.health() == ("degraded", "the data file was deleted", {"deleted": 1, "gone": 2})


# --- the end ----------------------------------------------------------------------------------------------------------


def test_close_stops_what_waits_and_finishes_what_runs(bench):
    b = bench()
    b.file.held = {0}
    b.start()
    running = b.move(WRITE, 0, arena_page=0)
    b.drive.submit([running])
    b.file.wait_until_inside(0)
    waiting = [b.move(WRITE, page, arena_page=page) for page in (2, 3)]
    b.drive.submit(waiting)

    closer = threading.Thread(target=b.drive.close, args=(DEADLINE_S,))
    closer.start()
    assert b.wait(waiting) == [MoveProblem.STOPPED] * 2
    b.file.let_go()
    closer.join(DEADLINE_S)

    assert b.wait([running]) == [None]
    assert b.written.keys() == {0}
    late = b.move(READ, 4, arena_page=4)
    b.drive.submit([late])
    assert b.done[late.move_id].problem is MoveProblem.STOPPED
    assert b.drive.health() == ("ready", "", {})
    assert not b.drive.busy()


def test_an_io_that_hangs_does_not_hold_up_the_end_and_reports_nothing_afterwards(bench):
    b = bench()
    b.file.held = {0}
    hanging = b.move(WRITE, 0, arena_page=0)
    b.drive.submit([hanging])
    b.start()
    b.file.wait_until_inside(0)

    assert not b.drive.close(0.05)

    b.file.let_go()
    assert b.drive.close(DEADLINE_S)
    assert hanging.move_id not in b.done
    assert not b.written


def test_close_of_a_drive_that_never_started_ends_what_was_submitted(bench):
    b = bench()
    moves = [b.move(WRITE, 0, arena_page=0)]
    b.drive.submit(moves)

    assert b.drive.close(0.0)

    assert b.wait(moves) == [MoveProblem.STOPPED]


def test_moves_that_would_touch_others_bytes_are_our_bug(bench):
    b = bench()
    for wrong in (
        b.move(READ, 0, arena_page=256),
        b.move(READ, 0, arena_page=255, nbytes=PAGE + 1),
        b.move(READ, 0, arena_page=-1),
        b.move(READ, 0, arena_page=0, nbytes=0),
        b.move(READ, 0, arena_page=0)._replace(arena_offset=512),
    ):
        with pytest.raises(AssertionError):
            b.drive.submit([wrong])
