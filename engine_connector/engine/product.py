"""A matrix product with one of the model's matrices, whose rows come out with the same bits at every height.

Below 16 rows the CPU's library sums in another order (5e-5 in fp32), so heights are multiples of MIN_ROWS; from there on rows
are bit-equal on the machines we measured. A decode step has that height, and then the library spends a quarter of its time
on rearranging the matrix: where MKL can keep a rearranged copy, it is made once. The copy is used only if it gives the same
bits, and costs the matrix's memory again, so a large model goes without.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

MIN_ROWS = 16
"""Heights of matrix products are multiples of this; a decode step of up to 16 sequences always has this height."""

PACKED_LIMIT_BYTES = 2 << 30
"""No model doubles more than this."""


class Product:
    """x -> x W^T + b for one matrix `[out, in]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._packed = _packed(weight, bias) if pack else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, out]` of `x [rows, in]`, rows a multiple of MIN_ROWS."""
        if self._packed is not None and x.shape[0] == MIN_ROWS:
            return _packed_linear(x, self._packed, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [rows, ...]` with zero rows appended up to a multiple of MIN_ROWS."""
    missing = -x.shape[0] % MIN_ROWS
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The matrix rearranged for products of MIN_ROWS rows, or None where that is impossible or changes a bit."""
    probe = torch.linspace(-1, 1, MIN_ROWS * weight.shape[1]).sin().view(MIN_ROWS, -1)
    try:
        packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, MIN_ROWS)  # noqa: SLF001 (no public name)
        same = torch.equal(_packed_linear(probe, packed, weight, bias), F.linear(probe, weight, bias))
    except (AttributeError, NotImplementedError, RuntimeError):  # another build or version of torch has them otherwise
        return None
    return packed if same else None


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, bias, MIN_ROWS)  # noqa: SLF001 (as above)
    return result
