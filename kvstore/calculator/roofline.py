"""Roofline: is a phase bound by the GPU's arithmetic or by its memory, and what rate does that allow at best?

    arithmetic intensity I = FLOP / bytes moved        ridge point = peak FLOP/s / memory bytes/s
    attainable FLOP/s = min(peak, I * memory bytes/s)  (Williams et al., "Roofline")
A prefill of b prompts of n tokens reads the weights once and writes its KV; a decode step of b sequences reads the weights
and all of their KV. Activations are left out: they are small, and kernels keep most of them on the chip.
"""

import math
from typing import NamedTuple

from kvstore.calculator.flops import ModelShape


class Machine(NamedTuple):
    """All GPUs that hold the model together."""

    flops_per_s: float  # dense peak, of the precision in use
    bytes_per_s: float  # of memory

    @property
    def ridge_flops_per_byte(self) -> float:
        """Below it memory is the limit, above it arithmetic."""
        return self.flops_per_s / self.bytes_per_s


class Storage(NamedTuple):
    """Bytes of a parameter, and KV bytes as a share of those in bf16."""

    bytes_per_param: float = 2.0
    kv_share: float = 1.0


class Phase(NamedTuple):
    """One prefill of a batch, or one decode step of it."""

    num_tokens: float  # that it makes
    flops: float
    weight_bytes: float
    kv_bytes: float

    @property
    def nbytes(self) -> float:
        """That it moves."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.nbytes

    def seconds(self, machine: Machine) -> float:
        """At best: the slower of its arithmetic and its traffic."""
        return max(self.flops / machine.flops_per_s, self.nbytes / machine.bytes_per_s)

    def tokens_per_s(self, machine: Machine) -> float:
        """At best."""
        return self.num_tokens / self.seconds(machine)

    def bound(self, machine: Machine) -> str:
        """`compute` or `memory`."""
        return "compute" if self.intensity >= machine.ridge_flops_per_byte else "memory"


def prefill(shape: ModelShape, storage: Storage, batch: float, prompt_tokens: float) -> Phase:
    """Of `batch` prompts."""
    num_tokens = batch * prompt_tokens
    return Phase(
        num_tokens=num_tokens,
        flops=batch * shape.prefill_flops(prompt_tokens),
        weight_bytes=shape.weights_read_bytes(num_tokens, storage.bytes_per_param),
        kv_bytes=num_tokens * shape.kv_bytes_per_token * storage.kv_share,
    )


def decode(shape: ModelShape, storage: Storage, batch: float, context_tokens: float) -> Phase:
    """One token for each of `batch` sequences."""
    return Phase(
        num_tokens=batch,
        flops=batch * shape.decode_flops(context_tokens),
        weight_bytes=shape.weights_read_bytes(batch, storage.bytes_per_param),
        kv_bytes=batch * shape.kv_read_bytes(context_tokens) * storage.kv_share,
    )


def compute_bound_batch(shape: ModelShape, storage: Storage, machine: Machine, context_tokens: float) -> float:
    """The batch from which a decode step is bound by arithmetic: b with b F = R (W + b V), of F FLOP a
    token, all weights W being read and KV of V bytes; math.inf where a further sequence brings fewer FLOP than its KV allows:
    R V >= F."""
    ridge = machine.ridge_flops_per_byte
    kv_bytes = shape.kv_read_bytes(context_tokens) * storage.kv_share
    gain = shape.decode_flops(context_tokens) - ridge * kv_bytes
    return ridge * shape.total_params * storage.bytes_per_param / gain if gain > 0 else math.inf
