"""Keys and values in FP8 (e4m3): how they are stored in a pool, and how attention reads them.

    stored = e4m3(x / s), values beyond 448 as 448, NaN as NaN        read as stored * s

s is the layer's scale of keys or of values: `kv_scales` is float32 [2], the key's and the value's. Attention
multiplies by the scales where they cost nothing: s of the keys goes into the factor of the scores, s of the
values into the output. Pools of other types have no scales.
"""

# One kernel function that calls another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.e4m3 import FP8, LARGEST, as_fp8

_LARGEST = tl.constexpr(LARGEST)
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


def to_pool(x: Tensor, pool: Tensor, scale: Tensor | None) -> Tensor:
    """x as the type of `pool`, ready to be stored; `scale` is a number in a tensor, and only for FP8."""
    if pool.dtype != FP8:
        return x.to(pool.dtype)
    wide = x.double() if x.dtype == torch.float64 else x.float()
    if scale is not None:
        wide = wide / scale.to(wide.dtype)
    return wide.clamp(-LARGEST, LARGEST).to(FP8)


def scales_of(kv_scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The scale of the keys and that of the values."""
    return (None, None) if kv_scales is None else (kv_scales[0], kv_scales[1])


def from_pool(stored: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The numbers that `stored`, a part of a pool, stands for, in `dtype`."""
    wide = stored.to(dtype)
    return wide if scale is None or stored.dtype != FP8 else wide * scale.to(dtype)


@triton.jit
def stored(values, scale, dtype: tl.constexpr):
    """`values` as a pool of `dtype` stores them; `scale` is used for FP8 only."""
    if dtype == tl.float8e4nv:
        wide = values.to(tl.float32) / scale
        wide = tl.where(wide > _LARGEST, _LARGEST, tl.where(wide < -_LARGEST, -_LARGEST, wide))
        return as_fp8(wide)
    else:
        return values.to(dtype)


# torch.compile copies a constant into code of its own, where a line break would end the string: one line.
_PAIRS_TO_FP16 = tl.constexpr(
    "{ .reg .b32 both; .reg .b16 low, high; "
    "prmt.b32 both, $2, 0, 0x3120; "
    "mov.b32 {low, high}, both; "
    "cvt.rn.f16x2.e4m3x2 $0, low; "
    "cvt.rn.f16x2.e4m3x2 $1, high; }"
)


@triton.jit
def unpacked_pairs(pairs, dtype: tl.constexpr):
    """int16 values, each two neighbouring e4m3 -> (the first ones, the second ones), of `dtype`.

    The matrix units' loads can transpose 16-bit values, but not bytes. So a tile of bytes that must be
    transposed is loaded as pairs, which are taken apart in registers.
    """
    if dtype == tl.float16 and not _INTERPRETED:
        return tl.inline_asm_elementwise(
            _PAIRS_TO_FP16, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return low.to(dtype), high.to(dtype)
