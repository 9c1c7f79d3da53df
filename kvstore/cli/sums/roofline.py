"""`kvstore break-even roofline`: what bounds prefill and decode, and what the hardware allows at best."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import click

from kvstore.calculator.flops import ModelShape
from kvstore.calculator.plots import Series, check_plot, plot_lines
from kvstore.calculator.roofline import Machine, Storage, compute_bound_batch
from kvstore.cli.output import (
    Column,
    Figure,
    Form,
    Report,
    Rows,
    Work,
    as_bandwidth,
    as_count,
    as_number,
    as_seconds,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import counts
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, gpu_options, model_options, need_shape
from kvstore.cli.sums.machine import need_machine, precision_options, storage_of
from kvstore.cli.sums.phase_work import Step, phase_work

_MEMORY_SHARE = 0.9  # what engines give to weights and KV, by default
_COLUMNS = (
    Column("phase", "phase"),
    Column("batch", "batch", as_count),
    Column("context_tokens", "context", as_count),
    Column("intensity_flops_per_byte", "FLOP/B", as_number),
    Column("bound", "bound by"),
    Column("seconds", "a step", as_seconds),
    Column("tokens_per_s", "tokens/s", as_count),
    Column("attainable_flops_per_s", "TFLOP/s", lambda flops: as_number(flops / 1e12)),
    Column("fits", "fits", lambda fits: "yes" if fits else "no"),
    Column("flops", ""),
    Column("nbytes", ""),
)


class _Case(NamedTuple):
    shape: ModelShape
    machine: Machine
    storage: Storage


@click.command(short_help="What bounds prefill and decode.")
@model_options
@gpu_options
@precision_options
@click.option("--batch", "batches", type=counts, default="1,8,32,128", show_default=True, help="Sequences.")
@click.option("--context", "contexts", type=counts, default="8192", show_default=True, help="Tokens, also a list.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png|.html",
    help="Draw attainable FLOP/s against arithmetic intensity.",
)
@output_options
def roofline(
    *,
    model: ModelNumbers,
    gpu: GpuNumbers,
    precision: str,
    weight_bits: int,
    kv_bits: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    plot: Path | None,
    form: Form,
) -> None:
    """Arithmetic intensity of prefill (one prompt) and decode (each batch), the ridge point, and tokens/s at best.

    \b
    Example:
      kvstore break-even roofline --model Llama-3.1-8B --gpu H100 --plot roof.html
    """
    if plot:
        check_plot(plot)
    shape, machine, storage = need_shape(model), need_machine(gpu, precision), storage_of(weight_bits, kv_bits)
    steps = [Step("prefill", 1, n) for n in contexts] + [Step("decode", b, n) for n in contexts for b in batches]
    case = _Case(shape, machine, storage)
    crossings = {n: compute_bound_batch(shape, storage, machine, n) for n in contexts}
    memory = gpu.mem_bytes * gpu.num_gpus * _MEMORY_SHARE if gpu.mem_bytes else None
    figures = [
        Figure("peak_flops_per_s", "peak, TFLOP/s", machine.flops_per_s, lambda flops: as_number(flops / 1e12)),
        Figure("memory_bytes_per_s", "memory", machine.bytes_per_s, as_bandwidth),
        Figure("ridge_flops_per_byte", "ridge point, FLOP/B", machine.ridge_flops_per_byte, as_number),
        *(_crossing_figure(n, batch, alone=len(contexts) == 1) for n, batch in crossings.items()),
    ]
    rows = [_row(step, case, memory) for step in steps]
    head = f"{model.name} on {gpu.num_gpus} x {gpu.name}, {precision}"
    notes = []
    if any(row["fits"] is False for row in rows):
        notes.append("fits no: weights and KV need more memory than there is")
    work = _work(case, gpu.num_gpus, crossings) + [line for step in steps for line in _step_work(step, case)]
    if plot:
        _draw(plot, steps, case, head)
        notes.append(f"drawn: {plot}")
    write(Report(figures, [Rows("points", _COLUMNS, rows)], work, notes, head=head), form)


def _crossing_figure(num_tokens: int, batch: float, *, alone: bool) -> Figure:
    name = "compute_bound_batch" if alone else f"compute_bound_batch_at_{num_tokens}"
    title = f"decode bound by compute from batch ({num_tokens:,})"
    return Figure(name, title, batch, lambda found: as_count(found) if math.isfinite(found) else "never")


def _row(step: Step, case: _Case, memory: float | None) -> dict[str, Any]:
    shape, machine, storage = case
    found = step.of(shape, storage)
    seconds = found.seconds(machine)
    kv_bytes = step.batch * step.num_tokens * shape.kv_bytes_per_token * storage.kv_share
    held = shape.total_params * storage.bytes_per_param + kv_bytes
    return {
        "phase": step.phase,
        "batch": step.batch,
        "context_tokens": step.num_tokens,
        "intensity_flops_per_byte": found.intensity,
        "bound": found.bound(machine),
        "seconds": seconds,
        "tokens_per_s": found.tokens_per_s(machine),
        "attainable_flops_per_s": found.flops / seconds,
        "flops": found.flops,
        "nbytes": found.nbytes,
        "fits": None if memory is None else held <= memory,
    }


def _work(case: _Case, num_gpus: int, crossings: dict[int, float]) -> list[Work]:
    shape, machine, storage = case
    peak, memory = as_term(machine.flops_per_s), as_term(machine.bytes_per_s)
    one_peak, one_memory = as_term(machine.flops_per_s / num_gpus), as_term(machine.bytes_per_s / num_gpus)
    ridge = as_term(machine.ridge_flops_per_byte)
    work = [
        Work("peak", "GPUs * FLOP/s of one", f"{num_gpus} * {one_peak}", f"{peak} FLOP/s"),
        Work("memory", "GPUs * bytes/s of one", f"{num_gpus} * {one_memory}", f"{memory} B/s"),
        Work("ridge R", "peak / memory", f"{peak} / {memory}", f"{ridge} FLOP/B"),
    ]
    weights = as_term(shape.total_params * storage.bytes_per_param)
    for num_tokens, batch in crossings.items():
        flops = as_term(shape.decode_flops(num_tokens))
        kv_bytes = as_term(shape.kv_read_bytes(num_tokens) * storage.kv_share)
        formula = "R * weight bytes / (FLOP of a token - R * KV bytes of a sequence); never if that is not above 0"
        values = f"{ridge} * {weights} / ({flops} - {ridge} * {kv_bytes})"
        result = as_term(batch) if math.isfinite(batch) else "never"
        work.append(Work(f"compute-bound batch at {num_tokens}", formula, values, result))
    return work


def _step_work(step: Step, case: _Case) -> list[Work]:
    found, machine = step.of(case.shape, case.storage), case.machine
    label = f"{step.phase} {step.batch} x {step.num_tokens}: "
    flops, nbytes, seconds = as_term(found.flops), as_term(found.nbytes), as_term(found.seconds(machine))
    limits = f"max({flops} / {as_term(machine.flops_per_s)}, {nbytes} / {as_term(machine.bytes_per_s)})"
    rate = f"{as_term(found.num_tokens)} / {seconds}"
    return [
        *phase_work(step, case.shape, case.storage, label),
        Work(f"{label}a step", "max(FLOP / peak, bytes / memory)", limits, f"{seconds} s"),
        Work(f"{label}tokens/s", "tokens / step", rate, as_term(found.tokens_per_s(machine))),
        Work(f"{label}FLOP/s", "FLOP / step", f"{flops} / {seconds}", as_term(found.flops / found.seconds(machine))),
    ]


def _draw(path: Path, steps: list[Step], case: _Case, title: str) -> None:
    machine = case.machine
    ridge = machine.ridge_flops_per_byte
    found = {step: step.of(case.shape, case.storage) for step in steps}
    intensities = [phase.intensity for phase in found.values()]
    low, high = min(*intensities, ridge / 10) / 2, max(*intensities, ridge * 10) * 2
    roof = [(x, min(machine.flops_per_s, x * machine.bytes_per_s) / 1e12) for x in (low, ridge, high)]
    dots: dict[str, list[tuple[float, float]]] = {}
    for step, phase in found.items():
        label = f"{step.phase}, {step.num_tokens:,} tokens"
        dots.setdefault(label, []).append((phase.intensity, phase.flops / phase.seconds(machine) / 1e12))
    series = [Series("roof", roof), *(Series(label, points, marks=True, line=False) for label, points in dots.items())]
    plot_lines(
        path,
        series,
        title=f"Roofline: {title}",
        x_label="arithmetic intensity, FLOP per byte",
        y_label="attainable TFLOP/s",
        log_x=True,
        log_y=True,
    )
