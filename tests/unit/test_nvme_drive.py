"""A drive's threads: bytes there and back, neighbours together, reads first, bad blocks alone."""

import errno
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from drive_bench import DEADLINE_S, PREFETCH, READ, WRITE, Bench, benches, closing, ranges
from faulty_file import PAGE, FaultyFile
from xxhash import xxh3_64_intdigest

from kvstore.core.limits import MAX_DRIVE_ERRORS
from kvstore.core.moves import DRIVE_SHIFT, Move, MoveProblem, Urgency
from kvstore.tiers.nvme import slot_io
from kvstore.tiers.nvme.file import DirectFile, page_aligned


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    with benches() as make:
        yield make


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


def test_all_threads_may_read_and_no_more_is_in_flight_than_they_are(bench):
    b = bench(threads=2)
    pages = [0, 2, 4, 6, 8, 10]
    b.file.held = set(pages)
    reads = [b.move(READ, page, arena_page=page, checksum=xxh3_64_intdigest(bytes(PAGE))) for page in pages]
    write = b.move(WRITE, 20, arena_page=20)
    b.drive.submit([write, *reads])
    b.start()

    for page, later in itertools.pairwise(pages):
        b.file.wait_until_inside(page, later)
        b.wait_until_idle(2)  # those that only compute checksums, and have nothing to do
        b.file.let_go(page)
    b.file.let_go()

    assert b.wait([write, *reads]) == [None] * 7
    assert b.file.most_at_once == 2


def test_a_large_block_is_checked_while_the_next_is_read(bench):
    b = bench()
    nbytes = 64 * PAGE
    reads = [
        b.move(READ, page, arena_page=page, nbytes=nbytes, checksum=xxh3_64_intdigest(bytes(nbytes)))
        for page in (0, 64, 128)
    ]
    b.file.held = {64}
    b.file.flip(0)

    b.drive.submit(reads)
    b.start()
    b.file.wait_until_inside(64)

    assert b.wait(reads[:1]) == [MoveProblem.CHECKSUM]
    b.file.let_go()
    assert b.wait(reads) == [MoveProblem.CHECKSUM, None, None]


def test_checksums_are_computed_two_ios_ahead_and_no_further(bench, monkeypatch: pytest.MonkeyPatch):
    computed: list[int] = []

    def counted(view: memoryview) -> int:
        computed.append(view[0])
        return xxh3_64_intdigest(view)

    monkeypatch.setattr(slot_io, "xxh3_64_intdigest", counted)
    b = bench()
    b.file.held = {10}
    b.arena[:] = np.arange(256).repeat(PAGE)
    writes = [b.move(WRITE, page, arena_page=page) for page in range(10, 30, 2)]
    b.drive.submit(writes)
    b.start()
    b.file.wait_until_inside(10)
    b.wait_until_idle(2)

    assert sorted(computed) == [10, 12, 14]
    b.file.let_go()
    assert b.wait(writes) == [None] * 10
    assert len(computed) == 10


# --- second thoughts --------------------------------------------------------------------------------------------------


def zeros(b: Bench, urgency: Urgency, *pages: int) -> list[Move]:
    return [b.move(urgency, page, arena_page=page, checksum=xxh3_64_intdigest(bytes(PAGE))) for page in pages]


def test_reads_that_nobody_waits_for_end_at_once_and_those_begun_go_on(bench):
    b = bench(threads=2)
    b.file.held = {0}
    begun, queued, kept = zeros(b, READ, 0, 2, 4)
    (prefetch,) = zeros(b, PREFETCH, 6)
    write = b.move(WRITE, 8, arena_page=8)
    b.file.held = {0, 100}
    b.drive.submit([begun, *zeros(b, READ, 100)])
    b.start()
    b.file.wait_until_inside(0, 100)
    b.drive.submit([queued, kept, prefetch, write])

    b.drive.cancel(page * PAGE for page in (6, 0, 2, 8, 50))

    cancelled = [b.done.pop(move.move_id).problem for move in (queued, prefetch)]  # they may be ordered again
    assert cancelled == [MoveProblem.CANCELLED] * 2
    assert not b.done
    b.drive.submit([queued])
    b.file.let_go()
    assert b.wait([begun, queued, kept, write]) == [None] * 4
    assert 6 not in b.file.inside
    assert b.drive.health() == ("ready", "", {})
    b.wait_until_free()


def test_cancelling_says_nothing_of_the_drive(bench, caplog: pytest.LogCaptureFixture):
    """Neither good, so that a gate would open or forget failures, nor bad."""
    b = bench()
    b.file.fail("read", errno.EIO, times=MAX_DRIVE_ERRORS)
    *failed, last = zeros(b, READ, *range(0, 2 * MAX_DRIVE_ERRORS, 2))
    b.run(failed)
    caplog.clear()
    b.file.held = {last.record.offset // PAGE}
    b.drive.submit([last])
    b.file.wait_until_inside(*b.file.held)
    queued = zeros(b, READ, *range(30, 60, 2))
    b.drive.submit(queued)
    b.drive.cancel(move.record.offset for move in queued)

    assert b.wait(queued) == [MoveProblem.CANCELLED] * 15
    assert b.drive.health() == ("ready", "", {"eio": MAX_DRIVE_ERRORS - 1})
    assert not caplog.records
    b.file.let_go()
    assert b.wait([last]) == [MoveProblem.EIO]
    assert b.drive.health().reason == "reads fail: eio", "the eighth in a row"


def test_a_callback_of_a_cancel_has_returned_when_the_drive_is_closed(bench):
    b = bench()
    entered, go_on = threading.Event(), threading.Event()
    b.drive._on_done = lambda _: (entered.set(), go_on.wait(DEADLINE_S))
    (queued,) = zeros(b, READ, 2)
    b.drive.submit([queued])
    canceller = threading.Thread(target=b.drive.cancel, args=([2 * PAGE],))
    canceller.start()
    assert entered.wait(DEADLINE_S)

    with closing(b) as closed:
        assert not closed.wait(0.05)
        go_on.set()
        canceller.join(DEADLINE_S)


def test_a_slow_drive_has_fewer_reads_in_flight_so_that_more_can_be_cancelled(bench):
    b = bench(threads=4, max_io_bytes=64 * PAGE)
    pages = {0, 64, 128, 192}
    b.file.held = set(pages)
    reads = zeros(b, READ, *range(256))
    b.drive.submit(reads)
    b.start()
    b.file.wait_until_inside(*pages)
    b.now_s += 2.0
    b.file.let_go()
    assert b.wait(reads) == [None] * 256

    b.file.inside.clear()
    b.file.held = set(pages)
    again = zeros(b, READ, *range(256))
    b.drive.submit(again)
    b.file.wait_until_inside(0, 64)
    b.wait_until_idle(4)
    assert sorted(b.file.inside) == [0, 64]
    b.drive.cancel(move.record.offset for move in again)
    b.file.let_go()

    assert b.wait(again) == [None] * 128 + [MoveProblem.CANCELLED] * 128


def test_a_hastened_prefetch_does_not_wait_for_the_others(bench):
    b = bench()
    b.file.held = {0}
    (running,) = zeros(b, READ, 0)
    prefetches = zeros(b, PREFETCH, 10, 12, 14, 16)
    (read,) = zeros(b, READ, 20)
    b.drive.submit([running, *prefetches, read])
    b.start()
    b.file.wait_until_inside(0)

    b.drive.hasten([16 * PAGE, 12 * PAGE, 0, 99 * PAGE])
    b.file.let_go()

    assert b.wait([running, *prefetches, read]) == [None] * 6
    assert [page for page, _ in ranges(b, "read")] == [0, 20, 16, 12, 10, 14]


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
