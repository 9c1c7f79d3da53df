"""Rotary positions: the frequency of each pair of dimensions, and the tables of cosines and sines made from them.

    angle(position, i) = position * theta ** (-2 i / head_dim) / divisor[i]        i = 0 .. head_dim / 2 - 1

Every variant that we run is a choice of divisors: none (plain), one number for all (linear), or a ramp from 1 for the high
frequencies to `factor` for the low ones (Llama 3). Variants that also scale the attention or depend on a sequence's length
(yarn, dynamic, longrope) are not of this form and are refused where a model is loaded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash


@dataclass(frozen=True, slots=True)
class Rope:
    """The base of the frequencies and what divides them. `scaling` says it in words, for the KVSpec."""

    theta: float
    divisors: tuple[float, ...] = ()  # [head_dim / 2]; empty: 1 for all
    scaling: str = ""

    @classmethod
    def linear(cls, theta: float, head_dim: int, factor: float) -> "Rope":
        """All positions divided by `factor`."""
        return cls(theta, (factor,) * (head_dim // 2), f"linear:factor={factor!r}")

    @classmethod
    def llama3(
        cls, theta: float, head_dim: int, *, factor: float, low: float, high: float, original_context: int
    ) -> "Rope":
        """Llama 3.1's: waves shorter than original_context / high stay, those longer than original_context / low are
        stretched by `factor`, and between the two the frequency is blended."""
        divisors = []
        for frequency in _frequencies(theta, head_dim).tolist():
            waves = original_context * frequency / (2 * math.pi)  # how many fit in the original context
            kept = min(1.0, max(0.0, (waves - low) / (high - low)))
            divisors.append(1 / (kept + (1 - kept) / factor))
        said = f"llama3:factor={factor!r}:low={low!r}:high={high!r}:original={original_context}"
        return cls(theta, tuple(divisors), said)

    @classmethod
    def divided(cls, theta: float, divisors: Sequence[float]) -> "Rope":
        """The divisors as a file lists them."""
        digest = xxhash.xxh3_64_hexdigest(",".join(repr(d) for d in divisors).encode())
        return cls(theta, tuple(divisors), f"divisors:{digest}")

    def describe(self, head_dim: int) -> str:
        """One line that is equal for equal rotations (KVSpec.rope)."""
        return f"half:base={self.theta!r}:dim={head_dim}" + (f":{self.scaling}" if self.scaling else "")

    def tables(self, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[num_positions, head_dim / 2]` fp32; angles in float64, since position x frequency reaches thousands."""
        frequencies = _frequencies(self.theta, head_dim)
        if self.divisors:
            assert len(self.divisors) == head_dim // 2
            frequencies = frequencies / torch.tensor(self.divisors, dtype=torch.float64)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
        return angles.cos().float(), angles.sin().float()


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float64, falling from 1."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    return torch.as_tensor(theta, dtype=torch.float64) ** -exponents
