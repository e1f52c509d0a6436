"""Weights of 4-bit numbers in groups that share a scale: packing, quantizing, and back.

    w[n, k] = (q[n, k] - z[g, n]) * s[g, n],   g = k // group,   q in 0..15,   z = 8 without zero points

N outputs, K inputs (a multiple of 128), G = K / group; a group is 32, 64 or 128 inputs. `packed` is uint8
[K / 128, N, 64]: byte j of a block holds input j in its low and input 64 + j in its high bits, so that a
kernel reads a tile of outputs in one piece and its two halves are two products. s and z are [G, N].

Cost of dequantize_int4: N*K/2 bytes read, 2*N*K written: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; a constexpr is a
# plain value inside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.launch import ceil_div

BLOCK = 128
"""Inputs of a packed block."""
HALF = BLOCK // 2
GROUPS = (32, 64, 128)
MIDDLE = 8
"""Stands for 0 in weights without zero points."""
DEQUANTIZED_OUTPUTS = 32
"""Outputs of a program of dequantize_int4."""
_HALF = tl.constexpr(HALF)
_MIDDLE = tl.constexpr(MIDDLE)
_INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


class Int4Weight(NamedTuple):
    """A weight [N, K] as the kernels read it."""

    packed: Tensor  # uint8 [K / 128, N, 64]
    scales: Tensor  # [G, N], any floating type
    zeros: Tensor | None = None  # [G, N], whole numbers 0 to 16 of any floating type; None = 8

    @property
    def outputs(self) -> int:
        """N."""
        return self.packed.shape[1]

    @property
    def width(self) -> int:
        """K."""
        return self.packed.shape[0] * BLOCK

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.width // self.scales.shape[0]


def pack_int4(numbers: Tensor) -> Tensor:
    """Numbers 0..15 [N, K] of any integer type -> uint8 [K / 128, N, 64].

    Raises:
        ValueError: K is no multiple of 128.
    """
    if numbers.shape[1] % BLOCK:
        raise ValueError(f"4-bit weights need a multiple of {BLOCK} inputs, got {numbers.shape[1]}")
    low, high = numbers.to(torch.uint8).unflatten(1, (-1, 2, HALF)).unbind(2)
    return (low | high << 4).transpose(0, 1).contiguous()


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4: uint8 [N, K]."""
    return torch.stack([packed & 15, packed >> 4], 2).permute(1, 0, 2, 3).flatten(1)


class RoundedWeight(NamedTuple):
    """A weight [N, K] as 4-bit numbers that are not packed."""

    numbers: Tensor  # uint8 [N, K], 0..15
    scales: Tensor  # [N, G]
    zeros: Tensor | None  # float32 [N, G], whole numbers; None = 8


def round_weight_int4(
    weight: Tensor, group: int, zero_points: bool = False, dtype: torch.dtype | None = None
) -> RoundedWeight:
    """A weight [N, K] rounded to 4 bits, from each group's extremes, with scales of `dtype` (its own)."""
    parts = weight.float().unflatten(1, (-1, group))
    kind = dtype or weight.dtype
    if zero_points:
        low, high = parts.amin(-1).clamp(max=0.0), parts.amax(-1).clamp(min=0.0)
        scales = ((high - low) / 15).clamp(min=1e-7).to(kind)
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (parts.abs().amax(-1) / 7.5).clamp(min=1e-7).to(kind)
        zeros = torch.full_like(scales, MIDDLE, dtype=torch.float32)
    numbers = (parts / scales.float().unsqueeze(-1)).add_(zeros.unsqueeze(-1)).round_().clamp_(0, 15)
    return RoundedWeight(numbers.to(torch.uint8).flatten(1), scales, zeros if zero_points else None)


def quantize_weight_int4(weight: Tensor, group: int, zero_points: bool = False) -> Int4Weight:
    """A weight [N, K] rounded to 4 bits, with scales of its dtype; from each group's extremes."""
    numbers, scales, zeros = round_weight_int4(weight, group, zero_points)
    kept = None if zeros is None else zeros.to(weight.dtype).t().contiguous()
    return Int4Weight(pack_int4(numbers), scales.t().contiguous(), kept)


def dequantize_int4_reference(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight as numbers of `dtype`, [N, K], in plain torch."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = unpack_int4(weight.packed).to(wide).unflatten(1, (-1, weight.group))
    zeros = MIDDLE if weight.zeros is None else weight.zeros.to(wide).t().unsqueeze(-1)
    return ((numbers - zeros) * weight.scales.to(wide).t().unsqueeze(-1)).flatten(1).to(dtype)


def check_int4(weight: Int4Weight) -> None:
    """Whether the tensors fit each other.

    Raises:
        ValueError: they do not.
    """
    groups, outputs = weight.scales.shape
    fits = (
        weight.packed.dtype == torch.uint8
        and weight.packed.shape[1:] == (outputs, HALF)
        and weight.width % groups == 0
        and weight.group in GROUPS
        and (weight.zeros is None or weight.zeros.shape == weight.scales.shape)
    )
    if not fits:
        zeros = None if weight.zeros is None else tuple(weight.zeros.shape)
        raise ValueError(
            f"packed 4-bit weights are uint8 [K / {BLOCK}, N, {HALF}] with scales (and zeros) [K / group, N],"
            f" group one of {GROUPS}; got {tuple(weight.packed.shape)} of {weight.packed.dtype}, scales"
            f" {(groups, outputs)}, zeros {zeros}"
        )


# Four bytes to four numbers: a 4-bit number in the low bits of 128.0 (bfloat16) or 1024.0 (float16) is added
# to it; subtracting both gives the number itself, exactly, two at a time. In one line, because torch.compile
# copies a constant into code of its own, where a line break would end the string.
_TO_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, one; "
    "mov.b32 one, 0x3f803f80; "
    "prmt.b32 a, $2, 0, 0x4140; "
    "prmt.b32 b, $2, 0, 0x4342; "
    "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, a, one, $3; "
    "fma.rn.bf16x2 $1, b, one, $4; }"
)
_HIGH_TO_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, one; "
    "mov.b32 one, 0x3f803f80; "
    "shr.u32 b, $2, 4; "
    "prmt.b32 a, b, 0, 0x4140; "
    "prmt.b32 b, b, 0, 0x4342; "
    "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, a, one, $3; "
    "fma.rn.bf16x2 $1, b, one, $4; }"
)


@triton.jit
def int4_halves(packed, low_base, high_base, dtype: tl.constexpr):
    """Packed bytes -> the numbers of their low bits and of their high bits, less their zero points.

    Args:
        packed: uint8, any shape.
        low_base: `int4_base` of the zero points of the low bits, of `dtype`; high_base of the high bits.
        dtype: bfloat16, or another, more slowly.
    """
    if dtype == tl.bfloat16 and not _INTERPRETED:
        low = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,r,r,r", [packed, low_base], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            _HIGH_TO_BF16, "=r,=r,r,r,r", [packed, high_base], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        low = (packed & 15).to(dtype) + low_base
        high = (packed >> 4).to(dtype) + high_base
    return low, high


@triton.jit
def int4_base(zeros, dtype: tl.constexpr):
    """What int4_halves adds for these zero points: of `dtype`, exact."""
    if dtype == tl.bfloat16 and not _INTERPRETED:
        return (-128.0 - zeros.to(tl.float32)).to(dtype)
    else:
        return (-zeros.to(tl.float32)).to(dtype)


@triton.jit
def int4_values(pointers, block, N, HIGH: tl.constexpr, GROUP: tl.constexpr):
    """Scales or zero points of half of a packed block: [..., 1], or [..., 64] of groups of 32.

    Args:
        pointers: to the outputs' values of the first group, of any shape.
        block: of the same shape, or a number.
    """
    row = block * (2 * _HALF // GROUP) + (_HALF // GROUP if HIGH else 0)
    values = tl.expand_dims(tl.load(pointers + row * N), -1)
    if GROUP < _HALF:
        more = tl.expand_dims(tl.load(pointers + (row + 1) * N), -1)
        values = tl.where(tl.arange(0, _HALF) < GROUP, values, more)
    return values


@triton.jit
def _dequantize_int4_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    y_ptr,
    N,
    K,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = (outputs < N)[:, None]
    read = tl.minimum(outputs, N - 1)
    lanes = tl.arange(0, _HALF)
    packed = tl.load(w_ptr + (block.to(tl.int64) * N + read)[:, None] * _HALF + lanes[None, :])
    places = y_ptr + outputs[:, None].to(tl.int64) * K + block * 2 * _HALF + lanes[None, :]
    for high in tl.static_range(2):
        numbers = (packed >> (4 * high) & 15).to(tl.float32)
        if HAS_ZEROS:
            numbers -= int4_values(zero_ptr + read, block, N, high, GROUP).to(tl.float32)
        else:
            numbers -= _MIDDLE
        numbers *= int4_values(scale_ptr + read, block, N, high, GROUP).to(tl.float32)
        tl.store(places + high * _HALF, numbers.to(y_ptr.dtype.element_ty), there)


def dequantize_int4_triton(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Launch the kernel on any device."""
    outputs, width = weight.outputs, weight.width
    y = torch.empty((outputs, width), dtype=dtype, device=weight.packed.device)
    _dequantize_int4_kernel[(width // BLOCK, ceil_div(outputs, DEQUANTIZED_OUTPUTS))](
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        y,
        outputs,
        width,
        weight.group,
        weight.zeros is not None,
        DEQUANTIZED_OUTPUTS,
        num_warps=4,
    )
    return y


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight as numbers of `dtype`, [N, K], each rounded once from float32."""
    if weight.packed.device.type == "cpu":
        return dequantize_int4_reference(weight, dtype)
    return dequantize_int4_triton(weight, dtype)
