"""The numbers of FP8 (e4m3, with NaN, without infinity), and rounding to them."""

# One kernel function that calls another looks like the call that raises outside of a kernel; a constexpr is a
# plain value inside of one.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from triton import knobs

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
_PACK = tl.constexpr(
    "{.reg .b16 low, high; .reg .b32 a, b; "
    "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "cvt.u32.u16 a, low; cvt.u32.u16 b, high; prmt.b32 $0, a, b, 0x5410; }"
)
"""Rounds four numbers. Triton's `to` leaves it to ptxas to join the two pairs, and the one of CUDA 12 errs
where it sees that they are equal (lanes behind a row's end): then one is what a register happens to hold.
"""
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def as_fp8(values):
    """Float32 of at most 448 rounded to e4m3, to the nearest, ties to even."""
    if _INTERPRETED:
        return _as_fp8_interpreted(values)
    return tl.inline_asm_elementwise(_PACK, "=r,f,f,f,f", [values], dtype=tl.float8e4nv, is_pure=True, pack=4)


@triton.jit
def _as_fp8_interpreted(values):
    """as_fp8 where the conversion loses NaN and carries into the exponent: here it has nothing to round."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (values + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(values) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    coded = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(values == values, coded, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
