"""A sick drive is spared, and a drive that closes leaves nothing behind."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drive_bench import DEADLINE_S, READ, WRITE, Bench, benches, closing, ranges
from faulty_file import PAGE
from xxhash import xxh3_64_intdigest

from kvstore.core.limits import DRIVE_RETRY_S, MAX_DRIVE_ERRORS
from kvstore.core.moves import MoveProblem
from kvstore.tiers.nvme import slot_io
from kvstore.tiers.nvme.file import DirectFile


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    with benches() as make:
        yield make


# --- hanging ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("urgency", [READ, WRITE])
def test_an_io_that_does_not_come_back_is_told_until_it_does(bench, urgency):
    b = bench(threads=2)
    b.write([1, 2])
    checksum = b.written[PAGE].checksum
    b.file.inside.clear()
    b.file.held = {1}
    held = b.move(urgency, 1, arena_page=1, checksum=checksum)
    b.drive.submit([held])
    b.file.wait_until_inside(1)

    b.now_s += 9.0
    assert b.drive.health()[:2] == ("ready", "")
    b.now_s += 2.0
    assert b.drive.health()[:2] == ("degraded", "hangs: an I/O has not come back for 11 s")
    assert b.read([2]) == [None], "others come through"

    b.file.let_go()
    assert b.wait([held]) == [None]
    assert b.drive.health()[:2] == ("ready", "")


# --- bugs of ours -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urgency", "step"), [(READ, "read"), (READ, "checksum"), (WRITE, "write"), (WRITE, "checksum")]
)
def test_a_step_that_crashes_ends_its_moves_and_the_thread_goes_on(bench, monkeypatch, caplog, urgency, step):
    """As often as there are threads and counters to lose."""
    b = bench(threads=1)
    b.write([1, 2])
    checksum = b.written[PAGE].checksum
    right = getattr(slot_io.SlotIO, step)

    def crash(*_: object) -> None:
        raise RuntimeError("a bug")

    for _ in range(6):
        monkeypatch.setattr(slot_io.SlotIO, step, crash)
        assert b.run([b.move(urgency, 1, arena_page=1, checksum=checksum)]) == [MoveProblem.GONE]
        monkeypatch.setattr(slot_io.SlotIO, step, right)
        b.now_s += DRIVE_RETRY_S[1]
        assert b.write([2]) == [None]
        assert b.read([2]) == [None]
    assert "a step crashed" in caplog.text
    b.wait_until_free()


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


def test_bad_blocks_that_are_not_in_a_row_do_not_make_a_bad_drive(bench):
    b = bench(max_io_bytes=32 * PAGE)
    b.write(list(range(32)))
    for page in range(0, 32, 2):
        b.file.fail("read", errno.EIO, offset=page * PAGE, nbytes=PAGE)

    assert b.read(list(range(32))) == [MoveProblem.EIO, None] * 16
    assert b.drive.health()[0] == "ready"


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
    running, *waiting = [b.move(WRITE, page, arena_page=page) for page in (0, 2, 4, 6, 8)]
    b.drive.submit([running, *waiting])
    b.start()
    b.file.wait_until_inside(0)
    b.wait_until_idle(2)  # 2 and 4 have their checksums, 6 and 8 have not

    with closing(b):
        assert b.wait(waiting) == [MoveProblem.STOPPED] * 4
        b.file.let_go()

    assert b.wait([running]) == [None]
    assert b.written.keys() == {0}
    late = b.move(READ, 4, arena_page=4)
    b.drive.submit([late])
    assert b.done[late.move_id].problem is MoveProblem.STOPPED
    assert b.drive.health() == ("ready", "", {})
    b.wait_until_free()


def test_a_write_whose_checksum_is_being_computed_at_the_end_is_not_begun(bench, monkeypatch: pytest.MonkeyPatch):
    computing, go_on = threading.Event(), threading.Event()

    def slow(view: memoryview) -> int:
        computing.set()
        assert go_on.wait(DEADLINE_S)
        return xxh3_64_intdigest(view)

    monkeypatch.setattr(slot_io, "xxh3_64_intdigest", slow)
    b = bench()
    summed = b.move(WRITE, 0, arena_page=0)
    running, queued = (b.move(READ, page, arena_page=page) for page in (2, 4))
    b.drive.submit([summed])
    b.start()
    assert computing.wait(DEADLINE_S)
    b.file.held = {2}
    b.drive.submit([running, queued])
    b.file.wait_until_inside(2)

    with closing(b):
        assert b.wait([queued]) == [MoveProblem.STOPPED]
        go_on.set()
        b.file.let_go()

    assert b.wait([summed]) == [MoveProblem.STOPPED]
    assert ranges(b, "write") == []


def test_close_ends_trying_block_by_block_too(bench):
    b = bench()
    b.write([10, 11, 12, 13])
    b.file.fail("read", errno.EIO, times=1)
    b.file.held = {11}
    checksums = [xxh3_64_intdigest(bytes([page]) * PAGE) for page in (10, 11, 12, 13)]
    reads = [b.move(READ, 10 + j, arena_page=40 + j, checksum=checksums[j]) for j in range(4)]
    queued = b.move(READ, 30, arena_page=60)
    b.drive.submit([*reads, queued])
    b.file.wait_until_inside(11)

    with closing(b):
        assert b.wait([queued]) == [MoveProblem.STOPPED]
        b.file.let_go()

    assert b.wait(reads) == [None, None, MoveProblem.STOPPED, MoveProblem.STOPPED]
    assert b.drive.health() == ("ready", "", {})


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
