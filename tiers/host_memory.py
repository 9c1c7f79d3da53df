"""How much memory this process may still take."""

from pathlib import Path


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the kernel says can be had without swapping, or less where a cgroup (v2) limits this process.

    A cgroup's use is counted as its `memory.current` without `inactive_file`, which the kernel gives up first.
    """
    available = _field_bytes(proc / "meminfo", "MemAvailable:", unit=1024)
    group = _own_cgroup(proc)
    while group is not None:
        limit = _cgroup_available(cgroups / group.relative_to("/"))
        available = available if limit is None else min(available, limit)
        group = group.parent if group != group.parent else None
    return max(available, 0)


def _own_cgroup(proc: Path) -> Path | None:
    for line in (proc / "self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            return Path(line[3:])
    return None


def _cgroup_available(folder: Path) -> int | None:
    limit = folder / "memory.max"
    if not limit.exists() or limit.read_text().strip() == "max":
        return None
    used = int((folder / "memory.current").read_text()) - _field_bytes(folder / "memory.stat", "inactive_file")
    return int(limit.read_text()) - used


def _field_bytes(path: Path, name: str, *, unit: int = 1) -> int:
    for line in path.read_text().splitlines():
        words = line.split()
        if words[0] == name:
            return int(words[1]) * unit
    raise LookupError(f"{path} has no line {name}")
