"""RMSNorm rounded to FP8: the norms of rms_norm.py, with the rounding of quantize_fp8.py in their launch.

    rms_norm_fp8(x, w)         quantize_fp8(rms_norm(x, w))
    add_rms_norm_fp8(x, r, w)  quantize_fp8 of the norm; and x + r, as add_rms_norm

T rows, M width, G scales of a row. The norm is rounded to the dtype of x before it is quantized, so the
numbers are those of the two ops one after the other. Any M up to 65,536 (with groups: a multiple of 128), T
may be 0, rows may be strided.

Cost: 3*T*M bytes moved for rms_norm_fp8 of 16-bit x, 7*T*M for add_rms_norm_fp8: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_fp8 import empty_fp8, quantize_fp8_reference, store_quantized
from triton_kernels.rms_norm import (
    NormConfig,
    add_rms_norm_reference,
    default_norm_config,
    rms_norm_reference,
)


def rms_norm_fp8_reference(
    x: Tensor, weight: Tensor, eps: float, group: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same as rms_norm_fp8, in plain torch."""
    return quantize_fp8_reference(rms_norm_reference(x, weight, eps), group)


def add_rms_norm_fp8_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as add_rms_norm_fp8, in plain torch."""
    normed, new_residual = add_rms_norm_reference(x, residual, weight, eps)
    return (*quantize_fp8_reference(normed, group), new_residual)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_fp8_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    q_ptr,
    scales_ptr,
    new_residual_ptr,
    num_rows,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    eps: tl.constexpr,
    ADD: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_M)
    weight = tl.load(weight_ptr + columns, columns < width, other=0.0)  # no kernel writes it
    num_rows = between_kernels(num_rows, EARLY)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    if ADD:
        r = tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask, other=0.0)
        total = (x + r.to(tl.float32)).to(dtype)
        tl.store(new_residual_ptr + rows[:, None] * width + columns[None, :], total, mask)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / width
    y = x * tl.rsqrt(mean_square + eps)[:, None] * weight.to(tl.float32)[None, :]
    y = y.to(dtype).to(tl.float32)
    store_quantized(q_ptr, scales_ptr, y, rows, columns, num_rows, width, GROUP)


def rms_norm_fp8_triton(
    x: Tensor, weight: Tensor, eps: float, group: int | None = None, config: NormConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device."""
    return _launch(x, None, weight, eps, group, config)[:2]


def add_rms_norm_fp8_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    group: int | None = None,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel on any device."""
    return _launch(x, residual, weight, eps, group, config)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    group: int | None,
    config: NormConfig | None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = x.shape
    config = config or default_norm_config(width)
    rounded, scales = empty_fp8(x, width, group)
    new_residual = x
    if residual is not None:
        new_residual = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block_m = next_power_of_2(width)
    _rms_norm_fp8_kernel[(ceil_div(num_rows, config.block_t),)](
        x,
        x if residual is None else residual,
        weight,
        rounded,
        scales,
        new_residual,
        num_rows,
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        width,
        eps,
        residual is not None,
        group or block_m,
        config.block_t,
        block_m,
        can_start_early(x.device),
        num_warps=config.num_warps,
    )
    return rounded, scales, new_residual


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, group: int | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of x [T, M] with weight [M] -> e4m3 [T, M] and float32 scales [M / group or 1, T], contiguous.

    Raises:
        ValueError: `group` does not divide M.
    """
    if x.device.type == "cpu":
        return rms_norm_fp8_reference(x, weight, eps, group)
    return rms_norm_fp8_triton(x, weight, eps, group)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """rms_norm_fp8 of x + residual, both [T, M]; returns (e4m3, scales, x + residual).

    Raises:
        ValueError: `group` does not divide M.
    """
    if x.device.type == "cpu":
        return add_rms_norm_fp8_reference(x, residual, weight, eps, group)
    return add_rms_norm_fp8_triton(x, residual, weight, eps, group)
