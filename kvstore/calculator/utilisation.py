"""Of what a GPU could do, how much an engine makes use of.

    MFU = tokens/s * FLOP per token / peak FLOP/s           (Chowdhery et al., PaLM, appendix B; no recomputation counted)
    MBU = bytes per step * steps/s / memory bytes/s         (weights once a step, KV once for each sequence of the batch)
A share above 1 is no achievement but a wrong input.
"""

from typing import NamedTuple

from kvstore.calculator.roofline import Machine, Phase


class Utilisation(NamedTuple):
    """Shares of the peaks."""

    mfu: float
    mbu: float
    ceiling_tokens_per_s: float  # what the nearer of the two roofs allows


def utilisation(phase: Phase, machine: Machine, tokens_per_s: float) -> Utilisation:
    """Of a machine that does this phase over and over and so makes `tokens_per_s`."""
    phases_per_s = tokens_per_s / phase.num_tokens
    return Utilisation(
        mfu=phases_per_s * phase.flops / machine.flops_per_s,
        mbu=phases_per_s * phase.nbytes / machine.bytes_per_s,
        ceiling_tokens_per_s=phase.tokens_per_s(machine),
    )
