"""The options of a roofline: which peak, how many bits; and what is made of them."""

from collections.abc import Callable

import click

from kvstore.calculator.roofline import Machine, Storage
from kvstore.cli.sums.inputs import GpuNumbers, need


def precision_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `precision`, `weight_bits` and `kv_bits`."""
    kv_bits = click.option(
        "--kv-bits", type=click.IntRange(min=1, max=32), default=16, show_default=True, help="Of an element of KV."
    )
    weight_bits = click.option(
        "--weight-bits", type=click.IntRange(min=1, max=32), default=16, show_default=True, help="Of a parameter."
    )
    precision = click.option(
        "--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True, help="Of the arithmetic."
    )
    return precision(weight_bits(kv_bits(command)))


def need_machine(gpu: GpuNumbers, precision: str) -> Machine:
    """All the GPUs; UsageError where their peaks are not known."""
    peak = gpu.fp8_flops_per_s if precision == "fp8" else gpu.bf16_flops_per_s
    flops = need(peak, f"dense {precision} FLOP/s of {gpu.name}", "--tflops", by_name="--gpu")
    bandwidth = need(gpu.mem_bytes_per_s, "bandwidth of a GPU's memory", "--memory-gb-per-s", by_name="--gpu")
    return Machine(flops * gpu.num_gpus, bandwidth * gpu.num_gpus)


def storage_of(weight_bits: int, kv_bits: int) -> Storage:
    """Bits to bytes."""
    return Storage(weight_bits / 8, kv_bits / 16)
