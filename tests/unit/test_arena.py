"""The arena: sealed, shared, sized by what the machine has; its generation table cannot be written by clients."""

import errno
import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.errors import ConfigError, TierIOError
from kvstore.tiers.arena import Arena
from kvstore.tiers.host_memory import available_memory_bytes

SEGMENT = 1 << 20


def num_open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_opening_the_arena_takes_no_memory_and_faulting_a_segment_takes_exactly_one():
    with Arena(4 * SEGMENT, segment_bytes=SEGMENT) as arena:
        assert os.fstat(arena.fd).st_blocks == 0

        arena.fault_segment(0)
        arena.fault_segment(1)

        assert arena.faulted_nbytes == 2 * SEGMENT
        assert os.fstat(arena.fd).st_blocks * 512 == 2 * SEGMENT


def test_a_segment_out_of_order_is_a_bug():
    with Arena(4 * SEGMENT, segment_bytes=SEGMENT) as arena, pytest.raises(AssertionError):
        arena.fault_segment(1)


def test_what_one_mapping_writes_another_reads():
    with Arena(SEGMENT, segment_bytes=SEGMENT) as arena:
        client = mmap.mmap(arena.fd, arena.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        client[4096:4100] = b"KEEP"

        assert arena.memory[4096:4100].tobytes() == b"KEEP"
        client.close()


@pytest.mark.parametrize("size", [0, SEGMENT, 8 * SEGMENT])
def test_nobody_can_change_the_size(size: int):
    with Arena(4 * SEGMENT, segment_bytes=SEGMENT) as arena:
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_clients_read_generations_and_cannot_write_them():
    with Arena(SEGMENT, segment_bytes=SEGMENT) as arena:
        nbytes = os.fstat(arena.generations_fd).st_size
        client = mmap.mmap(arena.generations_fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)

        arena.generations[3] += np.uint64(7)

        assert nbytes == SEGMENT // 4096 * 8
        assert np.frombuffer(client, np.uint64)[3] == 7
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(arena.generations_fd, b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(arena.generations_fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_reopening_the_generation_table_for_writing_does_not_help():
    with Arena(SEGMENT, segment_bytes=SEGMENT) as arena:
        fd = os.open(f"/proc/self/fd/{arena.generations_fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.write(fd, b"x")
            with pytest.raises(PermissionError):
                mmap.mmap(fd, SEGMENT // 4096 * 8, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)


def test_descriptors_do_not_leak_into_child_processes():
    with Arena(SEGMENT, segment_bytes=SEGMENT) as arena:
        for fd in (arena.fd, arena.generations_fd):
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_close_gives_back_every_descriptor_and_may_be_called_twice():
    before = num_open_descriptors()
    arena = Arena(SEGMENT, segment_bytes=SEGMENT).open()
    arena.close()
    arena.close()
    assert num_open_descriptors() == before


def test_a_view_outlives_close():
    arena = Arena(SEGMENT, segment_bytes=SEGMENT).open()
    view = arena.memory[:4]
    arena.close()
    view[:] = 9
    assert view.tolist() == [9, 9, 9, 9]


def test_the_size_is_rounded_down_to_whole_segments():
    assert Arena(3 * SEGMENT + 5, segment_bytes=SEGMENT).nbytes == 3 * SEGMENT


def test_less_than_a_segment_is_refused():
    with pytest.raises(ConfigError) as caught:
        Arena(SEGMENT - 1, segment_bytes=SEGMENT)
    assert caught.value.fields == {"field": "arena", "value": SEGMENT - 1}


def test_more_than_the_machine_has_is_refused_and_says_what_there_is():
    before = num_open_descriptors()
    with pytest.raises(ConfigError) as caught:
        Arena(4 * SEGMENT, segment_bytes=SEGMENT, available_bytes=lambda: 3 * SEGMENT).open()
    assert caught.value.fields == {"field": "arena", "value": 4 * SEGMENT, "available": 3 * SEGMENT}
    assert str(3 * SEGMENT) in caught.value.message
    assert num_open_descriptors() == before


def test_an_exabyte_is_refused_on_this_machine():
    with pytest.raises(ConfigError, match="available"):
        Arena(1 << 60).open()


def test_memory_that_runs_out_while_faulting_is_a_tier_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Arena(2 * SEGMENT, segment_bytes=SEGMENT) as arena:
        arena.fault_segment(0)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(TierIOError) as caught:
            arena.fault_segment(1)
        assert caught.value.fields == {"tier": "pinned", "errno": errno.ENOSPC}
        assert arena.faulted_nbytes == SEGMENT


def machine(
    root: Path, *, available_kib: int, cgroup: str, limits: dict[str, tuple[str, int, int]]
) -> tuple[Path, Path]:
    """Files as the kernel shows them; `limits`: cgroup path -> (memory.max, memory.current, inactive_file)."""
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n")
    (proc / "self/cgroup").write_text(f"0::{cgroup}\n")
    for path, (limit, current, inactive) in limits.items():
        folder = groups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("/", {}, 1000 * 1024),
        ("/pod/box", {"pod/box": ("max", 0, 0)}, 1000 * 1024),
        ("/pod/box", {"pod/box": ("5000", 1000, 300)}, 4300),
        ("/pod/box", {"pod/box": ("5000", 1000, 0), "pod": ("4500", 2000, 0)}, 2500),
        ("/pod/box", {"pod/box": ("5000", 9000, 0)}, 0),
        ("/", {".": ("6000", 1000, 0)}, 5000),
    ],
    ids=["no_cgroup", "unlimited", "limited", "limited_by_its_parent", "over_its_limit", "limited_at_the_root"],
)
def test_available_memory_respects_the_cgroup(
    tmp_path: Path, cgroup: str, limits: dict[str, tuple[str, int, int]], expected: int
):
    proc, groups = machine(tmp_path, available_kib=1000, cgroup=cgroup, limits=limits)
    assert available_memory_bytes(proc, groups) == expected


def test_available_memory_of_this_machine_is_plausible():
    assert 1 << 20 < available_memory_bytes() < 1 << 50
