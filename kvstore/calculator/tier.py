"""A tier to fetch from: what a user says of it, or what the table of hardware does."""

from typing import NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.costs import LoadCost
from kvstore.tables.names import find
from kvstore.tables.rows import DeviceRow, GpuRow, devices

_HOST_LATENCY_S = 0.0102
"""Intercept of TTFT against loaded length, host memory to an H100 (vLLM blog, 2026-01-08)."""

_HOST_SHARE, _C2C_SHARE = 0.69, 0.9
"""Of the host link's line rate, where no GPU of its kind was measured: 44.3 of 64 GB/s."""

_HOST_MEMORY_BYTES_PER_S = 2 * 282e9
"""Two sockets of DDR5-5600: measured 282 GB/s each."""

_HALF_RATE_BYTES = 175e3
"""Copies of this size get half of the link's rate: 4 KB 1 GB/s, 64 KB 14, 512 KB 39.5, 16 MB 51 (vLLM blog, figure 4)."""


class Tier(NamedTuple):
    """Where KV lies, as fast as one replica gets it from there."""

    name: str
    load: LoadCost
    queued_bytes: float
    source: str  # for people


class _Default(NamedTuple):
    name: str
    device: str  # in the table of hardware
    latency_s: float  # of a request, not of the device


_DEFAULTS = (
    _Default("nvme", "PCIe4 x4 (Samsung PM1733)", 0.002),
    _Default("rdma-100g", "100 GbE/EDR RDMA", 0.001),
    _Default("s3-class", "Ceph RGW / S3", 0.098),
)


def default_tiers(gpu: GpuRow, num_gpus: int, transfer_bytes: float = 0.0) -> list[Tier]:
    """Host memory as the GPUs see it, an NVMe drive, 100G RDMA, an object store."""
    return [host_memory(gpu, num_gpus, transfer_bytes), *(_default(entry) for entry in _DEFAULTS)]


def host_memory(gpu: GpuRow, num_gpus: int, transfer_bytes: float = 0.0) -> Tier:
    """Host memory over the GPUs' own links, in copies of `transfer_bytes` (0: large ones)."""
    c2c = "C2C" in gpu.host_link
    per_gpu = gpu.measured_host_bytes_per_s or gpu.host_link_bytes_per_s * (_C2C_SHARE if c2c else _HOST_SHARE)
    rate = min(per_gpu * num_gpus, _HOST_MEMORY_BYTES_PER_S)
    source = f"{num_gpus} x {gpu.host_link or 'host link'}, {per_gpu / 1e9:.3g} GB/s each as the GPU sees it"
    if transfer_bytes:
        rate *= transfer_bytes / (transfer_bytes + _HALF_RATE_BYTES)
        source += f", in copies of {transfer_bytes / 1e3:.4g} kB"
    return Tier("host-memory", LoadCost(_HOST_LATENCY_S, rate), 0.0, source)


def parse_tier(text: str, gpu: GpuRow, num_gpus: int) -> Tier:
    """NAME=GB/s,ms[,queued GB], or the name of a default or of hardware in the table."""
    name, given, numbers = text.partition("=")
    if not given:
        return _named(text, gpu, num_gpus)
    parts = numbers.split(",")
    if not name.strip() or len(parts) not in (2, 3):
        raise _wrong(text, "NAME=GB/s,ms or NAME=GB/s,ms,queued GB, for example nvme=6.5,2")
    rate, latency_ms, queued = (_number(text, part) for part in (*parts, "0")[:3])
    if rate <= 0:
        raise _wrong(text, "a bandwidth above 0 GB/s")
    return Tier(name.strip(), LoadCost(latency_ms / 1e3, rate * 1e9), queued * 1e9, "given")


def _number(text: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise _wrong(text, f"numbers from 0 up; {part.strip()!r} is none")
    return value


def _wrong(text: str, right: str) -> ConfigError:
    return ConfigError(f"--tier: {text!r}; use {right}", field="--tier", value=text)


def _named(text: str, gpu: GpuRow, num_gpus: int) -> Tier:
    rows: dict[str, Tier | DeviceRow] = dict(devices())
    rows |= {tier.name: tier for tier in default_tiers(gpu, num_gpus)}
    found = find(rows, text, {}, field="--tier")
    if isinstance(found, Tier):
        return found
    return Tier(found.name, LoadCost(found.latency_s, found.bytes_per_s), 0.0, f"{found.kind} of the table of hardware")


def _default(entry: _Default) -> Tier:
    device = devices()[entry.device]
    return Tier(entry.name, LoadCost(entry.latency_s, device.bytes_per_s), 0.0, device.name)
