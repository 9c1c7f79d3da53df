"""One question to the calculator, put together from names, numbers and measurements."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvstore.calculator.fit import FittedPrefill, Point, fit_load, fit_prefill, fit_prefill_alone, needs, unfitted
from kvstore.calculator.hf_config import read_config
from kvstore.calculator.prefill_shape import PrefillShape, shape_of_row
from kvstore.calculator.priors import Prior, Setup, from_efficiencies, prior
from kvstore.calculator.tier import Tier, default_tiers
from kvstore.core.errors import ConfigError
from kvstore.tables import rows

_PLAIN_INTENSITY = 295.0
"""FLOPs for a byte of memory of a GPU of which only the FLOPs are given: an H100's."""


class Numbers(NamedTuple):
    """Of a model or GPU, given beside a name or instead of it; 0 means "not given"."""

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    kv_bytes_per_token: float = 0.0
    prefill_params: float = 0.0
    attn_flops_per_pair: float = 0.0
    flops_per_s: float = 0.0  # of one GPU


class Model(NamedTuple):
    """A shape, and where each number of it is from."""

    shape: PrefillShape
    kv_formula: str
    kv_substituted: str


class Case(NamedTuple):
    """A model on GPUs, a prefix, and the tiers that hold it."""

    model: Model
    setup: Setup | None  # None: nothing is known of the GPUs
    fitted: FittedPrefill
    expected: Prior | None  # what was expected of the prefill before any point; None with efficiencies given
    prefill_source: str
    tiers: Sequence[Tier]
    num_tokens: int
    gpus_usd_per_s: float  # 0: not known
    efficiency: tuple[float, float] | None = None
    points: Sequence[Point] = ()
    load_points: Sequence[Point] = ()
    warnings: Sequence[str] = ()

    @property
    def kv_bytes_per_token(self) -> float:
        """Of the whole replica."""
        return self.model.shape.kv_bytes_per_token


def make_model(
    *, name: str | None, config: Path | None, numbers: Numbers, fp8_kv: bool = False, kv_copies: float = 1.0
) -> Model:
    """From a name, a config.json or numbers; numbers go before the others. Raises ConfigError for what is missing."""
    if name is not None or config is not None:
        row = rows.model(name) if config is None and name is not None else read_config(config or Path())
        shape = shape_of_row(row)
        if config is not None and name is not None:
            shape = shape._replace(
                warnings=(*shape.warnings, *_differences(row, rows.model(name))), name=rows.model(name).name
            )
        if row.mla_rank:
            formula, substituted = (
                "layers*(kv_lora_rank + rope_dim)*2 B",
                f"{row.layers}*({row.mla_rank} + {row.rope_dim})*2",
            )
        else:
            formula = "layers*2*kv_heads*head_dim*2 B"
            substituted = f"{row.attending_layers}*2*{row.kv_heads}*{row.qk_dim}*2"
    else:
        shape, formula, substituted = _shape_of_numbers(numbers)
    if numbers.kv_bytes_per_token:
        formula, substituted = "given", ""
    shape = shape._replace(
        kv_bytes_per_token=numbers.kv_bytes_per_token or shape.kv_bytes_per_token,
        prefill_params=numbers.prefill_params or shape.prefill_params,
    )
    if numbers.attn_flops_per_pair:
        shape = shape._replace(
            attn_flops_per_pair=numbers.attn_flops_per_pair, window_flops_per_pair=0.0, window_tokens=0
        )
    factor = (0.5 if fp8_kv else 1.0) * kv_copies
    if factor != 1.0:
        formula += (" / 2 (8-bit KV)" if fp8_kv else "") + (" * copies" if kv_copies != 1.0 else "")
        substituted += ("/2" if fp8_kv else "") + (f"*{kv_copies:g}" if kv_copies != 1.0 else "")
    return Model(shape._replace(kv_bytes_per_token=shape.kv_bytes_per_token * factor), formula, substituted)


def make_gpu(name: str | None, flops_per_s: float) -> rows.GpuRow | None:
    """A row of the table, with other FLOPs if they are given; of FLOPs alone, a GPU that is otherwise like an H100."""
    if name is not None:
        row = rows.gpu(name)
        return row._replace(bf16_flops_per_s=flops_per_s, fp8_flops_per_s=2 * flops_per_s) if flops_per_s else row
    if not flops_per_s:
        return None
    like = rows.gpu("H100")
    return like._replace(
        name=f"a GPU of {flops_per_s / 1e12:g} TFLOP/s",
        bf16_flops_per_s=flops_per_s,
        fp8_flops_per_s=2 * flops_per_s,
        mem_bytes_per_s=flops_per_s / _PLAIN_INTENSITY,
        measured_host_bytes_per_s=0.0,
        usd_per_h=0.0,
    )


def make_prefill(
    model: Model, setup: Setup | None, efficiency: tuple[float, float] | None, points: Sequence[Point]
) -> tuple[FittedPrefill, Prior | None, str]:
    """The prefill's constants, what was expected of them, and where they are from in words."""
    if efficiency is not None and points:
        raise ConfigError("--efficiency: given with --measured; use one of the two", field="--efficiency")
    if setup is None:
        if efficiency is not None or not points:
            raise ConfigError(
                "--gpu: missing: give --gpu NAME, or --tflops, or two --measured points", field="--gpu", value=""
            )
        return fit_prefill_alone(points), None, f"a and b of {len(points)} measured points"
    for field, value in (
        ("--prefill-params-b", model.shape.prefill_params),
        ("--attn-flops-per-pair", _attention(model)),
    ):
        if not value:
            raise ConfigError(f"{field}: missing: needed for a model that has no name", field=field, value="")
    if efficiency is not None:
        cost = from_efficiencies(setup, *efficiency)
        return FittedPrefill(cost, None), None, "the efficiencies given; no t0, no overhead of an engine"
    expected = prior(setup)
    if points:
        needs(points, 2, "--measured")
        return (
            fit_prefill(points, expected),
            expected,
            f"{len(points)} measured points, and what was expected: {expected.source}",
        )
    return unfitted(expected), expected, f"expected: {expected.source}"


def make_tiers(
    given: Sequence[Tier],
    load_points: Sequence[Point],
    *,
    fitted: FittedPrefill,
    kv_bytes_per_token: float,
    gpu: rows.GpuRow | None,
    num_gpus: int,
    transfer_bytes: float,
) -> list[Tier]:
    """Those given, or the usual ones; measured loads give the constants of the only tier, or a tier of their own."""
    tiers = list(given)
    if load_points:
        load = fit_load(load_points, kv_bytes_per_token, fitted)
        source = f"latency and bandwidth of {len(load_points)} measured loads"
        if len(tiers) == 1:
            return [tiers[0]._replace(load=load, source=source)]
        return [Tier("measured", load, 0.0, source), *tiers]
    if tiers:
        return tiers
    return default_tiers(gpu or rows.gpu("H100"), num_gpus, transfer_bytes)


def parse_points(text: str | None, field: str, *, loads: bool = False) -> list[Point]:
    """n:ms,n:ms,... Of loads n tokens were loaded; n/prompt:ms is a TTFT of a prompt of which n tokens were."""
    points = []
    for part in (text or "").split(",") if text else ():
        hit = re.fullmatch(r"\s*(\d+)(?:/(\d+))?:([0-9.]+(?:e[+-]?\d+)?)\s*", part, re.IGNORECASE)
        right = "n:ms,n:ms, for example 1000:80,8000:700" + (", or n/prompt:ms" if loads else "")
        if hit is None or (hit[2] and not loads):
            raise ConfigError(f"{field}: {part!r}; use {right}", field=field, value=part)
        try:
            tokens, prompt, seconds = int(hit[1]), int(hit[2] or hit[1]), float(hit[3]) / 1e3
        except ValueError as err:
            raise ConfigError(f"{field}: {part!r}; use {right}", field=field, value=part) from err
        if tokens < 1 or seconds <= 0 or prompt < tokens:
            raise ConfigError(
                f"{field}: {part!r}; tokens and milliseconds are above 0, and a prompt holds what is loaded",
                field=field,
                value=part,
            )
        points.append(Point(prompt, seconds, tokens if loads else 0))
    return points


def _attention(model: Model) -> float:
    return model.shape.attn_flops_per_pair + model.shape.window_flops_per_pair


def _shape_of_numbers(numbers: Numbers) -> tuple[PrefillShape, str, str]:
    """A dense model with GQA, as far as the numbers say."""
    kv_bytes, formula, substituted = numbers.kv_bytes_per_token, "given", ""
    if not kv_bytes:
        for field in ("layers", "kv_heads", "head_dim"):
            if not getattr(numbers, field):
                option = f"--{field.replace('_', '-')}"
                raise ConfigError(
                    f"{option}: missing: give --model, --config, --kv-bytes-per-token, or --layers, --kv-heads and --head-dim",
                    field=option,
                    value="",
                )
        kv_bytes = numbers.layers * 2 * numbers.kv_heads * numbers.head_dim * 2
        formula = "layers*2*kv_heads*head_dim*2 B"
        substituted = f"{numbers.layers}*2*{numbers.kv_heads}*{numbers.head_dim}*2"
    shape = PrefillShape(
        name="the model given",
        kv_bytes_per_token=kv_bytes,
        prefill_params=numbers.prefill_params,
        attn_flops_per_pair=4.0 * numbers.layers * numbers.heads * numbers.head_dim,
        layers=numbers.layers,
        hidden=numbers.hidden or numbers.heads * numbers.head_dim,
        kv_heads=numbers.kv_heads,
        total_params=numbers.prefill_params,
    )
    return shape, formula, substituted


def _differences(found: rows.ModelRow, known: rows.ModelRow) -> list[str]:
    """What a config.json says otherwise than the table."""
    fields = ("layers", "hidden", "heads", "kv_heads", "qk_dim", "kv_bytes_per_token", "window_tokens")
    wrong = [
        f"config.json has {name} {getattr(found, name)}, the table's {known.name} has {getattr(known, name)}"
        for name in fields
        if getattr(found, name) != getattr(known, name)
    ]
    if abs(found.total_params / known.total_params - 1) > 0.05:
        wrong.append(
            f"config.json makes {found.total_params / 1e9:.2f} B parameters, the table's {known.name} has "
            f"{known.total_params / 1e9:.2f} B"
        )
    return wrong
