"""The data file: direct I/O at offsets, space taken ahead, errors sorted by whose fault they are; and the fault layer."""

import errno
import logging
import os
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_file import PAGE, Call, FaultyFile, MemoryFile

from kvstore.core.errors import ConfigError
from kvstore.core.moves import BAD_SLOT, MoveProblem
from kvstore.tiers.nvme.file import BlockFile, DirectFile, no_room, page_aligned, problem_of


def page(fill: int, num: int = 1) -> memoryview:
    buffer = page_aligned(num * PAGE)
    buffer[:] = fill
    return memoryview(buffer)


def read(file: BlockFile, offset: int, nbytes: int = PAGE) -> bytes:
    target = page(0xEE, nbytes // PAGE)
    return bytes(target[: file.read_into(offset, [target])])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], BlockFile]]:
    opened: list[BlockFile] = []

    def _make(kind: str) -> BlockFile:
        match kind:
            case "direct":
                file: BlockFile = DirectFile.open(tmp_path / "blocks.kv")
            case "memory":
                file = MemoryFile()
            case _:
                file = FaultyFile(DirectFile.open(tmp_path / "inner.kv"))
        opened.append(file)
        return file

    yield _make
    for file in opened:
        file.close()


@pytest.fixture
def direct(tmp_path: Path) -> Iterator[DirectFile]:
    file = DirectFile.open(tmp_path / "blocks.kv")
    yield file
    file.close()


# --- any BlockFile ----------------------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("kind", ["direct", "memory", "faulty"])


@KINDS
def test_what_was_written_is_read_also_in_other_pieces(kind: str, make: Callable[[str], BlockFile]):
    file = make(kind)
    assert file.nbytes == 0
    file.resize(16 * PAGE)

    assert file.write_from(2 * PAGE, [page(1), page(2, 2), page(3)]) == 4 * PAGE
    file.sync()

    first, second = page(0, 3), page(0)
    assert file.read_into(2 * PAGE, [first, second]) == 4 * PAGE
    assert (bytes(first), bytes(second)) == (bytes([1]) * PAGE + bytes([2]) * 2 * PAGE, bytes([3]) * PAGE)
    assert read(file, PAGE) == bytes(PAGE)


@KINDS
def test_a_read_across_the_end_is_short(kind: str, make: Callable[[str], BlockFile]):
    file = make(kind)
    file.resize(4 * PAGE)

    assert len(read(file, 3 * PAGE, 2 * PAGE)) == PAGE
    assert len(read(file, 4 * PAGE)) == 0


@KINDS
def test_a_cut_loses_the_tail_and_growing_again_gives_zeros(kind: str, make: Callable[[str], BlockFile]):
    file = make(kind)
    file.resize(4 * PAGE)
    file.write_from(0, [page(7, 4)])

    file.resize(2 * PAGE)
    assert file.nbytes == 2 * PAGE
    file.resize(4 * PAGE)

    assert read(file, 0, 4 * PAGE) == bytes([7]) * 2 * PAGE + bytes(2 * PAGE)


# --- DirectFile -------------------------------------------------------------------------------------------------------


def test_space_is_taken_when_the_file_grows_and_contents_stay(direct: DirectFile, tmp_path: Path):
    direct.resize(PAGE)
    direct.write_from(0, [page(5)])

    direct.resize(1 << 20)

    assert (tmp_path / "blocks.kv").stat().st_blocks * 512 >= 1 << 20
    assert read(direct, 0) == bytes([5]) * PAGE
    assert (tmp_path / "blocks.kv").stat().st_mode & 0o777 == 0o600


def test_a_file_opened_again_is_as_it_was(direct: DirectFile, tmp_path: Path):
    direct.resize(2 * PAGE)
    direct.write_from(PAGE, [page(9)])
    direct.sync()

    again = DirectFile.open(tmp_path / "blocks.kv")

    assert again.nbytes == 2 * PAGE
    assert read(again, PAGE) == bytes([9]) * PAGE
    again.close()


def test_growth_that_fails_leaves_the_size_as_it_was_and_names_the_setting(direct: DirectFile, tmp_path: Path):
    """A limit on file sizes stands in for a full file system: posix_fallocate takes a part, then raises."""
    direct.resize(1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(OSError) as raised:  # noqa: PT011 (its errno is what is looked at)
            direct.resize(8 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert problem_of(raised.value) is MoveProblem.NO_SPACE
    assert direct.nbytes == 1 << 20
    told = no_room(tmp_path / "blocks.kv", 8 << 20, raised.value)
    assert isinstance(told, ConfigError)
    assert (told.fields["field"], told.fields["value"]) == ("nvme_bytes", 8 << 20)
    assert str(told.fields["free"]) in told.message


def test_a_deleted_or_replaced_file_is_noticed(direct: DirectFile, tmp_path: Path):
    assert direct.is_linked()

    (tmp_path / "other").write_bytes(b"")
    (tmp_path / "other").rename(tmp_path / "blocks.kv")

    assert not direct.is_linked()


def test_a_file_system_without_direct_io_is_used_through_its_cache_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    real_open = os.open

    def refuse_direct(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse_direct)
    with caplog.at_level(logging.WARNING):
        file = DirectFile.open(tmp_path / "blocks.kv")

    assert not file.direct
    assert [record.args for record in caplog.records] == [(tmp_path / "blocks.kv",)]
    file.resize(PAGE)
    file.write_from(0, [page(3)])
    assert read(file, 0) == bytes([3]) * PAGE
    file.close()


def test_direct_io_is_used_where_it_can_be(direct: DirectFile):
    """With O_DIRECT, memory at an odd address is refused."""
    if not direct.direct:
        pytest.skip("no direct I/O on this file system")
    direct.resize(2 * PAGE)

    with pytest.raises(OSError, match="Invalid argument"):
        direct.write_from(0, [page(1, 2)[8 : 8 + PAGE]])


def test_opening_what_cannot_be_opened_raises_what_the_system_says(tmp_path: Path):
    with pytest.raises(IsADirectoryError):
        DirectFile.open(tmp_path)
    with pytest.raises(FileNotFoundError):
        DirectFile.open(tmp_path / "no" / "blocks.kv")


def test_a_closed_file_refuses_instead_of_touching_another_that_got_its_number(direct: DirectFile):
    direct.close()
    direct.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        direct.write_from(0, [page(1)])


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (errno.EIO, MoveProblem.EIO),
        (errno.ENODATA, MoveProblem.EIO),  # a medium error
        (errno.EILSEQ, MoveProblem.EIO),  # a protection error
        (errno.ENOSPC, MoveProblem.NO_SPACE),
        (errno.EDQUOT, MoveProblem.NO_SPACE),
        (errno.EFBIG, MoveProblem.NO_SPACE),
        (errno.EROFS, MoveProblem.READ_ONLY),
        (errno.EPERM, MoveProblem.READ_ONLY),
        (errno.ENODEV, MoveProblem.GONE),
        (errno.ENOMEM, MoveProblem.GONE),
        (errno.EBADF, MoveProblem.GONE),
    ],
)
def test_errors_are_sorted_by_whose_fault_they_are(number: int, problem: MoveProblem):
    assert problem_of(OSError(number, "")) is problem
    assert (problem in BAD_SLOT) == (problem is MoveProblem.EIO)


# --- the fault layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "faulty"])
def test_a_power_cut_takes_back_what_was_not_synced(kind: str, make: Callable[[str], BlockFile]):
    file = FaultyFile(make("memory")) if kind == "memory" else make(kind)
    assert isinstance(file, FaultyFile)
    file.resize(4 * PAGE)
    file.write_from(0, [page(1, 2)])
    file.sync()
    file.write_from(PAGE, [page(2, 2)])

    after = file.crash()

    assert after.nbytes == 4 * PAGE
    assert read(after, 0, 4 * PAGE) == bytes([1]) * 2 * PAGE + bytes(2 * PAGE)
    with pytest.raises(OSError, match="gone"):
        file.write_from(0, [page(3)])


def test_a_power_cut_may_tear_a_block_at_a_page():
    file = FaultyFile()
    file.write_from(0, [page(1, 64)])
    file.sync()
    file.write_from(0, [page(2, 64)])

    after = file.crash(survive=0.5, rng=random.Random(1))

    found = [read(after, number * PAGE) for number in range(64)]
    assert set(found) == {bytes([1]) * PAGE, bytes([2]) * PAGE}


def test_a_kill_loses_nothing_until_the_power_goes_too():
    file = FaultyFile()
    file.write_from(0, [page(1)])

    after = file.kill()

    assert read(after, 0) == bytes([1]) * PAGE
    assert read(after.crash(), 0) == bytes(PAGE)
    with pytest.raises(OSError, match="gone"):
        file.sync()


def test_failures_strike_the_range_the_count_and_the_verb_they_were_ordered_for():
    file = FaultyFile()
    file.resize(4 * PAGE)
    file.fail("read", errno.EIO, offset=2 * PAGE, nbytes=PAGE)
    file.fail("write", errno.ENOSPC, after=1, times=1)

    read(file, 0, 2 * PAGE)
    read(file, 3 * PAGE)
    with pytest.raises(OSError, match="Input/output"):
        read(file, PAGE, 2 * PAGE)
    file.write_from(2 * PAGE, [page(1)])
    with pytest.raises(OSError, match="No space"):
        file.write_from(0, [page(1)])
    file.write_from(0, [page(1)])

    assert [call.verb for call in file.calls] == ["resize", "read", "read", "read", "write", "write", "write"]
    assert file.calls[3] == Call("read", PAGE, 2 * PAGE)
    file.heal()
    assert read(file, 2 * PAGE) == bytes([1]) * PAGE


def test_short_calls_move_what_they_say_and_flips_change_one_bit():
    file = FaultyFile()
    file.resize(4 * PAGE)
    file.shorten("write", PAGE, times=1)

    assert file.write_from(0, [page(1), page(2)]) == PAGE
    assert read(file, 0, 2 * PAGE) == bytes([1]) * PAGE + bytes(PAGE)
    file.flip(10, bit=7)

    found = read(file, 0)
    assert found[10] == 1 ^ 0x80
    assert found.count(1) == PAGE - 1
    assert file.is_linked()
    file.unlink()
    assert not file.is_linked()
