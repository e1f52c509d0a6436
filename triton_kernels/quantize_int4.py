"""Weights of 4-bit numbers in groups that share a scale: quantizing, and back.

    w[n, k] = (q[n, k] - z[g, n]) * s[g, n],   g = k // group,   q in 0..15,   z = 8 without zero points

N outputs, K inputs (a multiple of 128), G = K / group; a group is 32, 64 or 128 inputs. `packed` is uint8
[K / 128, N, 64] as int4_packing.py says, so that a kernel reads a tile of outputs in one piece. s and z are
[G, N].

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

from triton_kernels.int4_packing import (
    BLOCK,
    BLOCK_BYTES,
    MIDDLE,
    QUARTER,
    pack_int4,
    quarter_values,
    unpack_int4,
)
from triton_kernels.launch import ceil_div

GROUPS = (32, 64, 128)
DEQUANTIZED_OUTPUTS = 32
"""Outputs of a program of dequantize_int4."""
_BLOCK = tl.constexpr(BLOCK)
_QUARTER = tl.constexpr(QUARTER)
_MIDDLE = tl.constexpr(MIDDLE)


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
        and weight.packed.shape[1:] == (outputs, BLOCK_BYTES)
        and weight.width % groups == 0
        and weight.group in GROUPS
        and (weight.zeros is None or weight.zeros.shape == weight.scales.shape)
    )
    if not fits:
        zeros = None if weight.zeros is None else tuple(weight.zeros.shape)
        raise ValueError(
            f"packed 4-bit weights are uint8 [K / {BLOCK}, N, {BLOCK_BYTES}] with scales (and zeros)"
            f" [K / group, N], group one of {GROUPS}; got {tuple(weight.packed.shape)} of"
            f" {weight.packed.dtype}, scales {(groups, outputs)}, zeros {zeros}"
        )


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
    lanes = tl.arange(0, _QUARTER)
    words = tl.load(w_ptr + (block.to(tl.int64) * N + read)[:, None] * _QUARTER + lanes[None, :])
    places = y_ptr + outputs[:, None].to(tl.int64) * K + block * _BLOCK + lanes[None, :]
    scales = quarter_values(scale_ptr + read, block, N, GROUP)
    if HAS_ZEROS:
        zeros = quarter_values(zero_ptr + read, block, N, GROUP)
    for quarter in tl.static_range(4):
        numbers = (words >> (4 * quarter) & 15).to(tl.float32)
        numbers -= zeros[quarter].to(tl.float32) if HAS_ZEROS else _MIDDLE
        numbers *= scales[quarter].to(tl.float32)
        tl.store(places + quarter * _QUARTER, numbers.to(y_ptr.dtype.element_ty), there)


def dequantize_int4_triton(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Launch the kernel on any device."""
    outputs, width = weight.outputs, weight.width
    y = torch.empty((outputs, width), dtype=dtype, device=weight.packed.device)
    _dequantize_int4_kernel[(width // BLOCK, ceil_div(outputs, DEQUANTIZED_OUTPUTS))](
        weight.packed.view(torch.int16),
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
