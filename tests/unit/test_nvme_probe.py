"""What the drives are found to read at the start: the pace of a link that has one, nothing where nothing was written."""

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty_file import PAGE, FaultyFile, MemoryFile
from small_drive import Ends

from kvstore.core.limits import MAX_IO_BYTES, MAX_PROBE_BYTES
from kvstore.core.moves import BlockRecord, Move, Urgency
from kvstore.tiers.nvme.file import DirectFile, page_aligned
from kvstore.tiers.nvme.probe import ReadProbe, Used, used_runs
from kvstore.tiers.nvme.tier import NvmeTier

DEADLINE_S = 20.0
MIB = 1 << 20


class Link:
    """One after the other passes its bytes, at a pace, on a clock that stands still but for that."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.now_s = 100.0
        self.num_bytes = 0
        self.largest = 0
        self.lock = threading.Lock()

    def monotonic(self) -> float:
        with self.lock:
            return self.now_s


class LinkedFile(MemoryFile):
    def __init__(self, link: Link, nbytes: int) -> None:
        super().__init__(nbytes)
        self.link = link
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
        nbytes = sum(view.nbytes for view in views)
        with self.link.lock:
            self.ranges.append((offset, nbytes))
            self.link.num_bytes += nbytes
            self.link.largest = max(self.link.largest, nbytes)
            self.link.now_s += nbytes / self.link.bytes_per_s + (self.link.latency_s if nbytes == PAGE else 0.0)
        return super().read_into(offset, views)


def slots(*pages: int, nbytes: int = PAGE) -> Used:
    return Used(np.array(pages, np.int64) * PAGE, nbytes)


def whole(nbytes: int) -> list[Used]:
    return [Used(np.arange(0, nbytes, MIB), MIB)]


@pytest.mark.parametrize("bytes_per_s", [3e6, 30e6, 1e9, 20e9])
def test_a_link_of_any_speed_is_told_within_a_second(bytes_per_s: float) -> None:
    link = Link(bytes_per_s)
    file = LinkedFile(link, 64 * MIB)

    speed = ReadProbe({file: whole(64 * MIB)}, monotonic=link.monotonic).run()

    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(bytes_per_s, rel=0.02)
    assert speed.latency_s == pytest.approx(PAGE / bytes_per_s, rel=0.01)
    assert link.now_s - 100.0 < 1.0
    assert link.num_bytes <= MAX_PROBE_BYTES
    assert link.largest <= MAX_IO_BYTES
    assert link.num_bytes > 0.9 * MAX_PROBE_BYTES or bytes_per_s < 1e8


def test_what_a_page_takes_is_the_latency_and_not_counted_as_bytes() -> None:
    link = Link(100e6, latency_s=0.002)

    speed = ReadProbe({LinkedFile(link, 64 * MIB): whole(64 * MIB)}, monotonic=link.monotonic).run()

    assert speed is not None
    assert speed.latency_s == pytest.approx(0.002, rel=0.05)
    assert speed.bytes_per_s == pytest.approx(100e6, rel=0.05)


def test_drives_are_read_together_the_same_from_each() -> None:
    link = Link(1e9)
    files = [LinkedFile(link, 64 * MIB) for _ in range(3)]

    assert ReadProbe({file: whole(64 * MIB) for file in files}, monotonic=link.monotonic).run() is not None

    read = [sum(nbytes for _, nbytes in file.ranges) for file in files]
    assert max(read) <= 1.2 * min(read)


def test_only_what_was_written_is_read_and_nothing_twice() -> None:
    link = Link(1e9)
    file = LinkedFile(link, 64 * MIB)
    used = np.random.default_rng(3).permutation(64 * MIB // PAGE)[:9000].astype(np.int64)

    assert ReadProbe({file: [Used(used * PAGE, PAGE)]}, monotonic=link.monotonic).run() is not None

    read = [page for offset, nbytes in file.ranges for page in range(offset // PAGE, (offset + nbytes) // PAGE)]
    assert len(read) == len(set(read))
    assert set(read) <= set(used.tolist())


@pytest.mark.parametrize("num_pages", [0, 2, 66])
def test_too_little_says_nothing(num_pages: int) -> None:
    """A latency alone would let the tier look better than anything that was measured."""
    link = Link(1e9)

    assert ReadProbe({LinkedFile(link, MIB): [slots(*range(num_pages))]}, monotonic=link.monotonic).run() is None


def test_without_drives_there_is_nothing_to_say() -> None:
    assert ReadProbe({}).run() is None


def test_a_failing_read_says_nothing_and_an_earlier_round_still_counts() -> None:
    broken = FaultyFile(MemoryFile(64 * MIB))
    broken.fail("read", errno.EIO)
    assert ReadProbe({broken: whole(64 * MIB)}).run() is None

    later = FaultyFile(MemoryFile(64 * MIB))
    later.fail("read", errno.EIO, after=20)
    assert ReadProbe({later: whole(64 * MIB)}).run() is not None

    short = FaultyFile(MemoryFile(64 * MIB))
    short.shorten("read", 100)
    assert ReadProbe({short: whole(64 * MIB)}).run() is None


def test_a_read_that_hangs_costs_the_deadline_and_keeps_the_file_open() -> None:
    go_on = threading.Event()

    class Hanging(MemoryFile):
        def read_into(self, offset: int, views: Sequence[memoryview]) -> int:
            assert go_on.wait(DEADLINE_S)
            return super().read_into(offset, views)

    probe = ReadProbe({Hanging(64 * MIB): whole(64 * MIB)})
    began_s = time.monotonic()

    assert probe.run(0.05) is None

    assert time.monotonic() - began_s < 5.0
    assert not probe.close(0.01)
    go_on.set()
    assert probe.close(DEADLINE_S)


def test_a_closed_probe_reads_nothing() -> None:
    file = LinkedFile(Link(1e9), 64 * MIB)
    probe = ReadProbe({file: whole(64 * MIB)})

    assert probe.close(0.0)

    assert probe.run() is None
    assert not file.ranges


# --- where ------------------------------------------------------------------------------------------------------------


def test_neighbouring_slots_are_read_together_up_to_an_io() -> None:
    used = [slots(4, 7, 5), slots(6, nbytes=PAGE), Used(np.array([100 * PAGE]), 3 * PAGE)]

    assert sorted(used_runs(used, MIB)) == [(4 * PAGE, 4 * PAGE), (100 * PAGE, 3 * PAGE)]


def test_a_long_run_is_read_in_places_apart() -> None:
    runs = used_runs(whole(1024 * MIB), 16 * MIB)

    assert [nbytes for _, nbytes in runs] == [MAX_IO_BYTES] * 4
    assert max(offset for offset, _ in runs) - min(offset for offset, _ in runs) > 256 * MIB


def test_no_more_is_chosen_than_is_wanted() -> None:
    assert sum(nbytes for _, nbytes in used_runs(whole(64 * MIB), 6 * MIB)) == 6 * MIB
    assert used_runs([], MIB) == []


def test_a_million_slots_are_chosen_from_quickly() -> None:
    """It runs beside the first requests."""
    used = [Used(np.random.default_rng(1).permutation(1_000_000).astype(np.int64) * 2 * PAGE, PAGE)]
    began_s = time.process_time()

    runs = used_runs(used, MAX_PROBE_BYTES)

    assert len(runs) == MAX_PROBE_BYTES // PAGE
    assert time.process_time() - began_s < 2.0


# --- the tier ---------------------------------------------------------------------------------------------------------


SEGMENT = 4 * MIB


@pytest.fixture
def ends() -> Ends:
    return Ends()


@pytest.fixture
def tier(tmp_path: Path, ends: Ends) -> Iterator[NvmeTier]:
    tier = make_tier(tmp_path, ends)
    yield tier
    tier.close(DEADLINE_S)


def make_tier(tmp_path: Path, ends: Ends) -> NvmeTier:
    return NvmeTier(
        [tmp_path / "a", tmp_path / "b"],
        4 * SEGMENT,
        segment_bytes=SEGMENT,
        arena=page_aligned(SEGMENT),
        on_moved=ends.moved,
        on_forgotten=ends.forgot,
        open_file=DirectFile.open,
    )


def test_an_empty_tier_has_no_speed(tier: NvmeTier) -> None:
    """Its files have all their space, and a file system that knows that none of it was written answers at memory's speed."""
    tier.open()
    tier.recover()

    assert tier.probe() is None


def test_a_tier_that_comes_back_with_blocks_reads_them(tier: NvmeTier, tmp_path: Path, ends: Ends) -> None:
    from small_drive import key, spec

    wide = spec(pages=64)
    namespace = wide.namespace("tenant")
    tier.open()
    tier.recover()
    tier.add_namespace(namespace, "tenant", wide.canonical())
    records = [
        BlockRecord(namespace, key(i), b"", i % 2 << 48 | i // 2 * 64 * PAGE, wide.block_nbytes, i + 1, 0, i, 0)
        for i in range(16)
    ]
    tier.submit(Move(i, Urgency.WRITE, i * 64 * PAGE, record) for i, record in enumerate(records))
    ends.wait(*range(16))
    assert tier.close(DEADLINE_S)

    again = make_tier(tmp_path, Ends())
    again.open()
    again.recover()
    speed = again.probe()
    assert again.close(DEADLINE_S)

    assert speed is not None
    assert 0 < speed.latency_s < 1.0
    assert 1e6 < speed.bytes_per_s < 1e12
