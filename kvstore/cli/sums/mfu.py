"""`kvstore break-even mfu`: the shares of arithmetic and of memory bandwidth that a throughput makes use of."""

import click

from kvstore.calculator.utilisation import utilisation
from kvstore.cli.output import (
    Figure,
    Form,
    Report,
    Work,
    as_count,
    as_number,
    as_percent,
    as_term,
    output_options,
    write,
)
from kvstore.cli.sums.amounts import COUNT, POSITIVE
from kvstore.cli.sums.inputs import GpuNumbers, ModelNumbers, gpu_options, model_options, need_shape
from kvstore.cli.sums.machine import need_machine, precision_options, storage_of
from kvstore.cli.sums.phase_work import Step, phase_work


@click.command(short_help="MFU and MBU of a throughput.")
@model_options
@gpu_options
@precision_options
@click.option("--tokens-per-s", type=POSITIVE, required=True, help="All GPUs and requests together.")
@click.option("--phase", type=click.Choice(["prefill", "decode"]), default="decode", show_default=True)
@click.option(
    "--context", "num_tokens", type=COUNT, default=1024, show_default=True, help="Of a prompt, or of a sequence."
)
@click.option(
    "--batch", type=COUNT, default=1, show_default=True, help="Prompts in a prefill, sequences in a decode step."
)
@output_options
def mfu(
    *,
    model: ModelNumbers,
    gpu: GpuNumbers,
    precision: str,
    weight_bits: int,
    kv_bits: int,
    tokens_per_s: float,
    phase: str,
    num_tokens: int,
    batch: int,
    form: Form,
) -> None:
    """Model FLOP utilisation (MFU) and memory bandwidth utilisation (MBU) of a measured throughput.

    \b
    Example:
      kvstore break-even mfu --model Llama-3.1-8B --gpu H100 --tokens-per-s 150
    """
    shape, machine = need_shape(model), need_machine(gpu, precision)
    storage = storage_of(weight_bits, kv_bits)
    step = Step(phase, batch, num_tokens)
    one = step.of(shape, storage)
    found = utilisation(one, machine, tokens_per_s)
    figures = [
        Figure("phase", "phase", phase),
        Figure("tokens_per_s", "tokens/s", tokens_per_s, as_number),
        Figure("mfu", "MFU", found.mfu, as_percent),
        Figure("mbu", "MBU", found.mbu, as_percent),
        Figure("bound", "bound by", one.bound(machine)),
        Figure("attainable_tokens_per_s", "tokens/s at best", found.ceiling_tokens_per_s, as_count),
        Figure("flops_per_token", "FLOP a token", one.flops / one.num_tokens, as_term),
        Figure("bytes_per_token", "bytes a token", one.nbytes / one.num_tokens, as_term),
    ]
    steps = as_term(tokens_per_s / one.num_tokens)
    per_token, peak = as_term(one.flops / one.num_tokens), as_term(machine.flops_per_s)
    moved = f"{as_term(one.nbytes)} * {steps} / {as_term(machine.bytes_per_s)}"
    work = [
        *phase_work(step, shape, storage),
        Work(
            "peak FLOP/s", "GPUs * peak of one", f"{gpu.num_gpus} * {as_term(machine.flops_per_s / gpu.num_gpus)}", peak
        ),
        Work("steps/s", "tokens/s / tokens of a step", f"{as_term(tokens_per_s)} / {as_term(one.num_tokens)}", steps),
        Work(
            "MFU",
            "tokens/s * FLOP a token / peak FLOP/s",
            f"{as_term(tokens_per_s)} * {per_token} / {peak}",
            as_percent(found.mfu),
        ),
        Work("MBU", "bytes of a step * steps/s / memory bytes/s", moved, as_percent(found.mbu)),
    ]
    notes = []
    if max(found.mfu, found.mbu) > 1:
        notes.append(
            "above 100 %: so many tokens a second cannot be; check model, GPU, --num-gpus, --batch and --context"
        )
    head = f"{model.name} on {gpu.num_gpus} x {gpu.name}, {phase}, batch {batch:,}, {num_tokens:,} tokens"
    write(Report(figures, work=work, notes=notes, head=head), form)
