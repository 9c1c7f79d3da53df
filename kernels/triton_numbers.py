"""Numbers in kernels: rounding and conversion on the bits, so that every GPU and Triton's interpreter give the same.

The interpreter cuts bfloat16's last bits off and loses fp8's carry; GPUs before compute capability 8.9 have no fp8 at all. In
memory-bound kernels a few operations on integers cost nothing. Import this only where triton is.
"""

import triton
import triton.language as tl

# ruff: noqa: PLR0124 (x == x is False for NaN)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 to nearest, ties to even, in any float type."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)  # NaN: the sum above could run over
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def to_fp8_e4m3(x):
    """The byte that torch's conversion to float8_e4m3fn gives for fp32: 1 sign, 4 exponent (bias 7), 3 mantissa bits; to nearest,
    ties to even. What is above 448, infinity too, is 448 (versions of torch differ about that); NaN is 0x7F."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 on: round to 3 of 23 mantissa bits; a carry goes into the exponent, as it should. 120 = 127 - 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2^-9. Next to 2^14 that is the last bit of fp32, so the addition rounds.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_fp8_e4m3(code):
    """The fp32 number of a byte."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    small = magnitude.to(tl.float32) * 0.001953125  # 2^-9
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, small, tl.where(magnitude == 0x7F, float("nan"), normal))
    return (number.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def to_int8(x):
    """fp32 of at most 127 to nearest, ties to even. Next to 1.5 * 2^23 the last bit of fp32 is 1, so the addition rounds."""
    return ((x + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def from_int8(code):
    """The fp32 number of a byte."""
    return code.to(tl.int8, bitcast=True).to(tl.float32)
