"""A matrix product with one of the model's matrices, whose rows come out with the same bits at every height.

Below 16 rows the CPU's library sums in another order (5e-5 in fp32) and from there on rows are bit-equal, on the machines we
measured. A decode step then computes 16 rows for one, and spends a quarter of its time on rearranging matrices. Where MKL can
keep a rearranged copy of the matrix, it is made once, and products with it have those same bits from 2 rows on. The copy is
used only if that is found to be so, and costs the matrix's memory again: a large model goes without.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)

MIN_ROWS = 16
"""From this height on rows have the same bits; heights are multiples of it, or one of LOW_HEIGHTS."""

LOW_HEIGHTS = (2, 8)
"""Heights of small decode steps, where a rearranged copy gives the same bits; elsewhere they are padded to MIN_ROWS."""

PACKED_LIMIT_BYTES = 2 << 30
"""No model doubles more than this."""


class Product:
    """x -> x W^T + b for one matrix `[out, in]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._packed = _packed(weight, bias) if pack else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, out]` of `x [rows, in]`, rows as pad_rows leaves them."""
        rows = x.shape[0]
        if self._packed is not None and rows <= MIN_ROWS:
            return _packed_linear(x, self._packed, self._weight, self._bias)
        if rows < MIN_ROWS:
            x = torch.cat([x, x.new_zeros(MIN_ROWS - rows, x.shape[1])])
        return F.linear(x, self._weight, self._bias)[:rows]


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [rows, ...]` with zero rows appended up to one of LOW_HEIGHTS or a multiple of MIN_ROWS."""
    rows = x.shape[0]
    height = next((low for low in LOW_HEIGHTS if rows <= low), rows + -rows % MIN_ROWS)
    return torch.cat([x, x.new_zeros(height - rows, *x.shape[1:])]) if height > rows else x


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The matrix rearranged for products of few rows, or None where that is impossible or changes a bit."""
    probe = torch.linspace(-1, 1, MIN_ROWS * weight.shape[1]).mul(100).sin().view(MIN_ROWS, -1)
    expected = F.linear(probe, weight, bias)
    try:
        packed: torch.Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, MIN_ROWS)  # noqa: SLF001 (no public name)
        same = all(
            torch.equal(_packed_linear(probe[:height].clone(), packed, weight, bias), expected[:height])
            for height in (*LOW_HEIGHTS, MIN_ROWS)
        )
    except (AttributeError, NotImplementedError, RuntimeError):  # another build or version of torch has them otherwise
        return None
    return packed if same else None


def _packed_linear(
    x: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, weight, bias, x.shape[0])  # noqa: SLF001 (as above)
    return result
