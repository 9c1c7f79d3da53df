"""A model and GPUs, by name from the tables or by numbers; a number given goes before the table's."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from kvstore.calculator.flops import ModelShape
from kvstore.calculator.hf_config import read_config
from kvstore.cli.sums.amounts import COUNT, POSITIVE, refuse
from kvstore.tables.rows import GpuRow, ModelRow
from kvstore.tables.rows import gpu as gpu_row
from kvstore.tables.rows import model as model_row

Known = TypeVar("Known", int, float)


class ModelNumbers(NamedTuple):
    """What is known of the model; None: neither the table nor the caller says."""

    name: str
    total_params: float | None
    active_params: float | None
    prefill_params: float | None
    kv_bytes_per_token: float | None
    attn_flops_per_pair: float | None
    window_flops_per_pair: float
    window_tokens: float
    layers: int | None
    kv_heads: int | None
    head_elements: int | None  # of K or V of a head; of MLA's latent, which is one head
    row: ModelRow | None = None  # the table's or the config's, without the numbers given


class GpuNumbers(NamedTuple):
    """Of one GPU, but `num_gpus`; None as above."""

    name: str
    num_gpus: int
    bf16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    mem_bytes_per_s: float | None
    mem_bytes: float | None
    usd_per_h: float | None
    row: GpuRow | None = None  # as above


_MODEL_OPTIONS = (
    click.option("--model", "model_name", metavar="NAME", help="A model of the table, such as Llama-3.1-8B."),
    click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Or the model's config.json, or the folder that has it.",
    ),
    click.option("--params-b", type=POSITIVE, help="Its parameters, in 10^9."),
    click.option("--active-params-b", type=POSITIVE, help="Those a token passes.  [default: all]"),
    click.option("--prefill-params-b", type=POSITIVE, help="Of those, all but embedding and LM head.  [default: all]"),
    click.option("--kv-bytes-per-token", type=POSITIVE, help="In bf16, all layers: 4 x layers x KV heads x head dim."),
    click.option(
        "--attn-flops-per-pair", type=POSITIVE, help="Of a query and a key: 4 x layers x query heads x head dim."
    ),
    click.option("--layers", type=COUNT, help="Or these, from which the two above follow:"),
    click.option("--heads", type=COUNT, help="Of queries."),
    click.option("--kv-heads", type=COUNT),
    click.option("--head-dim", type=COUNT),
)
_GPU_OPTIONS = (
    click.option("--gpu", "gpu_name", metavar="NAME", help="A GPU of the table, such as H100."),
    click.option("--num-gpus", type=COUNT, default=1, show_default=True, help="That hold the model together."),
    click.option("--tflops", type=POSITIVE, help="Of a GPU: dense, of the precision in use."),
    click.option("--memory-gb-per-s", type=POSITIVE, help="Bandwidth of a GPU's memory."),
    click.option("--gpu-memory-gb", type=POSITIVE, help="A GPU's memory, in 10^9 bytes."),
    click.option("--gpu-usd-per-h", type=POSITIVE, help="Price of a GPU."),
)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a model; it is called with them as `model`."""

    @functools.wraps(command)
    def with_model(*args: Any, **options: Any) -> None:
        names = ("params_b", "active_params_b", "prefill_params_b", "kv_bytes_per_token", "attn_flops_per_pair")
        given = {name: options.pop(name) for name in (*names, "layers", "heads", "kv_heads", "head_dim")}
        command(*args, model=_model(_row(options.pop("model_name"), options.pop("config")), given), **options)

    return _with_options(with_model, _MODEL_OPTIONS)


def gpu_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of GPUs; it is called with them as `gpu`."""

    @functools.wraps(command)
    def with_gpu(*args: Any, **options: Any) -> None:
        names = ("num_gpus", "tflops", "memory_gb_per_s", "gpu_memory_gb", "gpu_usd_per_h")
        given = {name: options.pop(name) for name in names}
        command(*args, gpu=_gpu(options.pop("gpu_name"), given), **options)

    return _with_options(with_gpu, _GPU_OPTIONS)


def need(value: Known | None, what: str, option: str, *, by_name: str = "") -> Known:
    """The value, or a UsageError that says which option has it."""
    if value is None:
        refuse(option, f"absent ({what})", f"{option} N" + (f", or {by_name} NAME of the table" if by_name else ""))
    return value


def _with_options(
    command: Callable[..., None], options: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...]
) -> Callable[..., None]:
    for option in reversed(options):
        command = option(command)
    return command


def _row(name: str | None, config: Path | None) -> ModelRow | None:
    if name is not None and config is not None:
        refuse("--config", "given with --model", "one of the two")
    if config is not None:
        return read_config(config)
    return model_row(name) if name is not None else None


def _model(row: ModelRow | None, given: dict[str, Any]) -> ModelNumbers:
    """`row` with what is given in its stead."""
    known = _of_row(row) if row else _of_heads(given)
    total, active, prefill = (
        given[key] * 1e9 if given[key] else None for key in ("params_b", "active_params_b", "prefill_params_b")
    )
    total = total or known.total_params
    active = active or known.active_params or total
    prefill = prefill or known.prefill_params or active
    if total and active and active > total:
        refuse("--active-params-b", f"{active / 1e9:g} of {total / 1e9:g}", "no more than all parameters")
    known = known._replace(total_params=total, active_params=active, prefill_params=prefill)
    if given["attn_flops_per_pair"]:
        known = known._replace(
            attn_flops_per_pair=given["attn_flops_per_pair"], window_flops_per_pair=0.0, window_tokens=0.0
        )
    return known._replace(
        kv_bytes_per_token=given["kv_bytes_per_token"] or known.kv_bytes_per_token,
        layers=given["layers"] or known.layers,
        kv_heads=given["kv_heads"] or known.kv_heads,
        head_elements=given["head_dim"] or known.head_elements,
    )


def _of_row(row: ModelRow) -> ModelNumbers:
    return ModelNumbers(
        name=row.name,
        **ModelShape.from_row(row)._asdict(),
        layers=row.layers,
        kv_heads=1 if row.mla_rank else row.kv_heads,
        head_elements=row.mla_rank + row.rope_dim if row.mla_rank else row.qk_dim,
        row=row,
    )


def _of_heads(given: dict[str, Any]) -> ModelNumbers:
    """KV: 2 planes x 2 bytes x layers x KV heads x head dim. FLOP: QK^T and PV x 2 x layers x query heads x head dim."""
    layers, heads, kv_heads, head_dim = (given[name] for name in ("layers", "heads", "kv_heads", "head_dim"))
    return ModelNumbers(
        name="the model",
        total_params=None,
        active_params=None,
        prefill_params=None,
        kv_bytes_per_token=4 * layers * kv_heads * head_dim if layers and kv_heads and head_dim else None,
        attn_flops_per_pair=4 * layers * heads * head_dim if layers and heads and head_dim else None,
        window_flops_per_pair=0.0,
        window_tokens=0.0,
        layers=layers,
        kv_heads=kv_heads,
        head_elements=head_dim,
    )


def _gpu(name: str | None, given: dict[str, Any]) -> GpuNumbers:
    row = gpu_row(name) if name is not None else None

    def chosen(option: str, scale: float, of_row: float | None) -> float | None:
        return given[option] * scale if given[option] is not None else (of_row or None)

    return GpuNumbers(
        name=row.name if row else "GPU",
        num_gpus=given["num_gpus"],
        bf16_flops_per_s=chosen("tflops", 1e12, row.bf16_flops_per_s if row else None),
        fp8_flops_per_s=chosen("tflops", 1e12, row.fp8_flops_per_s if row else None),
        mem_bytes_per_s=chosen("memory_gb_per_s", 1e9, row.mem_bytes_per_s if row else None),
        mem_bytes=chosen("gpu_memory_gb", 1e9, row.mem_bytes if row else None),
        usd_per_h=chosen("gpu_usd_per_h", 1.0, row.usd_per_h if row else None),
        row=row,
    )


def need_shape(model: ModelNumbers) -> ModelShape:
    """All that FLOP and bytes need; UsageError where something is absent."""
    total = need(model.total_params, "parameters", "--params-b", by_name="--model")
    active, prefill = model.active_params, model.prefill_params
    assert active is not None, "it defaults to all"
    assert prefill is not None, "it defaults to the active ones"
    kv_bytes = need(model.kv_bytes_per_token, "KV of a token", "--kv-bytes-per-token", by_name="--model")
    pair = need(model.attn_flops_per_pair, "FLOP of attention", "--attn-flops-per-pair", by_name="--model")
    return ModelShape(total, active, prefill, kv_bytes, pair, model.window_flops_per_pair, model.window_tokens)
