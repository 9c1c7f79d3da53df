"""The rows of the tables, typed, and their loaders. The files are read once and only when asked for."""

import csv
import functools
import re
from collections.abc import Iterator
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from kvstore.core.errors import ConfigError
from kvstore.tables.names import GPU_ALIASES, MODEL_ALIASES, find


class ModelRow(NamedTuple):
    """A model: its shape, and what follows from it. Sizes in bf16; 0 stands for "none", None for "not known"."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    qk_dim: int  # of a head's queries and keys
    v_dim: int  # of its values; differs with MLA only
    mla_rank: int
    rope_dim: int
    window_tokens: int
    full_layers: int  # layers that attend to everything
    total_params: float
    active_params: float
    prefill_params: float | None
    check_params: float | None  # total, rebuilt from the shape
    kv_bytes_per_token: int
    attn_flops_per_pair: float | None
    attn_flops_per_pair_full: float | None  # of full_layers
    source: str
    note: str

    @property
    def attending_layers(self) -> int:
        """Layers that keep K and V; the others of a hybrid model keep a state of fixed size."""
        return self.layers if self.window_tokens else self.full_layers


class GpuRow(NamedTuple):
    """A GPU. Rates of one; peaks are dense FLOP/s; 0 stands for "not known"."""

    name: str
    mem_bytes: float
    mem_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    host_link: str
    host_link_bytes_per_s: float  # line rate, one direction
    measured_host_bytes_per_s: float
    gpu_link_bytes_per_s: float
    usd_per_h: float


class DeviceRow(NamedTuple):
    """A NIC, a memory or a drive: what a tier is made of. `bytes_per_s` is the measured rate where there is one."""

    kind: str
    name: str
    bytes_per_s: float
    latency_s: float
    note: str


class EfficiencyRow(NamedTuple):
    """Prefill of one set-up, kernels alone: t0, and the parts of the peak that GEMMs and attention reach."""

    model: str
    gpu: str
    num_gpus: int
    peak_flops_per_s: float  # of one GPU
    t0_s: float
    linear: float
    attention: float
    fit_max_error: float


def model(name: str) -> ModelRow:
    """Raises ConfigError with the nearest names."""
    return find(models(), name, MODEL_ALIASES, field="--model")


def gpu(name: str) -> GpuRow:
    """Raises ConfigError with the nearest names."""
    return find(gpus(), name, GPU_ALIASES, field="--gpu")


@functools.cache
def models() -> MappingProxyType[str, ModelRow]:
    """All models by name."""
    return MappingProxyType({row["name"]: _model(row) for row in _rows("models.csv")})


@functools.cache
def gpus() -> MappingProxyType[str, GpuRow]:
    """All GPUs by name."""
    return MappingProxyType({row["name"]: _gpu(row) for row in _rows("hardware.csv") if row["kind"] == "gpu"})


@functools.cache
def devices() -> MappingProxyType[str, DeviceRow]:
    """All other hardware by name; those without any rate are left out."""
    found = (_device(row) for row in _rows("hardware.csv") if row["kind"] != "gpu")
    return MappingProxyType({row.name: row for row in found if row.bytes_per_s})


@functools.cache
def efficiencies() -> tuple[EfficiencyRow, ...]:
    """All measured set-ups."""
    return tuple(
        EfficiencyRow(
            model=model(row["model"]).name,
            gpu=gpu(row["gpu"]).name,
            num_gpus=int(row["n_gpu"]),
            peak_flops_per_s=float(row["peak_TFLOPS_each"]) * 1e12,
            t0_s=float(row["t0_ms"]) / 1e3,
            linear=float(row["eta_linear"]),
            attention=float(row["eta_attn"]),
            fit_max_error=float(row["fit_max_err"]),
        )
        for row in _rows("prefill_eta.csv")
    )


def first_rate(text: str) -> float:
    """The first number of a text such as "44-51 H2D DMA" or "~24-27"; a range by its middle; 0 of no number."""
    hit = re.search(r"(\d+(?:\.\d+)?)(?:-(\d+(?:\.\d+)?))?", text)
    if hit is None:
        return 0.0
    low = float(hit[1])
    return (low + float(hit[2] or low)) / 2


def _rows(name: str) -> Iterator[dict[str, str]]:
    with resources.files("kvstore.tables").joinpath(name).open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{name}: line {reader.line_num} has not as many cells as the head", field=name)
            yield row


def _model(row: dict[str, str]) -> ModelRow:
    qk_dim, _, v_dim = row["head_dim"].partition("/")
    return ModelRow(
        name=row["name"],
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        qk_dim=int(qk_dim),
        v_dim=int(v_dim or qk_dim),
        mla_rank=int(row["mla_rank"] or 0),
        rope_dim=int(row["rope_dim"] or 0),
        window_tokens=int(row["sliding_window"] or 0),
        full_layers=int(row["full_layers"]),
        total_params=float(row["params_B"]) * 1e9,
        active_params=float(row["active_B"]) * 1e9,
        prefill_params=_maybe(row["prefill_params_B"], 1e9),
        check_params=_maybe(row["check_total_B"], 1e9),
        kv_bytes_per_token=int(row["kv_bytes_per_token_bf16"]),
        attn_flops_per_pair=_maybe(row["attn_flops_per_pair"]),
        attn_flops_per_pair_full=_maybe(row["attn_flops_per_pair_full"]),
        source=row["source"],
        note=row["note"],
    )


def _gpu(row: dict[str, str]) -> GpuRow:
    return GpuRow(
        name=row["name"],
        mem_bytes=_rate(row["mem_GB"], 1e9),
        mem_bytes_per_s=_rate(row["mem_bw_GBps"], 1e9),
        bf16_flops_per_s=_rate(row["bf16_dense_TFLOPS"], 1e12),
        fp8_flops_per_s=_rate(row["fp8_dense_TFLOPS"], 1e12),
        host_link=row["host_link"],
        host_link_bytes_per_s=_rate(row["host_link_GBps_per_dir"], 1e9),
        measured_host_bytes_per_s=_low_rate(row["measured_link_GBps"]) * 1e9,
        gpu_link_bytes_per_s=_rate(row["gpu_link_GBps_per_dir"], 1e9),
        usd_per_h=_rate(row["price_usd_per_h"], 1.0),
    )


def _device(row: dict[str, str]) -> DeviceRow:
    rate = (
        first_rate(row["measured_link_GBps"])
        or _rate(row["host_link_GBps_per_dir"], 1.0)
        or _rate(row["mem_bw_GBps"], 1.0)
    )
    return DeviceRow(row["kind"], row["name"], rate * 1e9, _rate(row["latency_us"], 1e-6), row["note"])


def _low_rate(text: str) -> float:
    """The lower end: what a GPU gets of its host link with blocks of the size that stores use."""
    hit = re.search(r"\d+(?:\.\d+)?", text)
    return float(hit[0]) if hit else 0.0


def _maybe(text: str, unit: float = 1.0) -> float | None:
    return float(text) * unit if text else None


def _rate(text: str, unit: float) -> float:
    return float(text) * unit if text else 0.0
