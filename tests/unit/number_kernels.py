"""A kernel that converts numbers each way. By itself, since what a kernel calls must be imported in its module: triton."""

import triton
import triton.language as tl

from kvstore.kernels.triton_numbers import from_fp8_e4m3, from_int8, rounded, to_fp8_e4m3, to_int8

# ruff: noqa: N803 (Triton's convention)


@triton.jit
def convert(x, as_fp8, of_fp8, as_int8, of_int8, as_bfloat, SIZE: tl.constexpr):
    """`x` to each format, and the bytes 0 to 255, again and again, to what they stand for."""
    at = tl.arange(0, SIZE)
    number = tl.load(x + at)
    code = (at & 0xFF).to(tl.uint8)
    tl.store(as_fp8 + at, to_fp8_e4m3(number))
    tl.store(of_fp8 + at, from_fp8_e4m3(code))
    tl.store(as_int8 + at, to_int8(tl.minimum(tl.maximum(number, -127.0), 127.0)))
    tl.store(of_int8 + at, from_int8(code))
    tl.store(as_bfloat + at, rounded(number, tl.bfloat16))
