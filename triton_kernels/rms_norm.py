"""RMSNorm, alone and with the residual add in front of it; one read and one write of every element.

    rms_norm(x, w)         y = round(w * x / sqrt(mean(x^2) + eps))
    add_rms_norm(x, r, w)  s = round(x + r);  y = round(w * s / sqrt(mean(s^2) + eps));  returns (y, s)

T rows (tokens, or tokens times heads for q/k norm), M width. The arithmetic is float32; `round` is the
rounding to the dtype of x. (Hugging Face's Llama rounds before it multiplies with w, too: half as precise.
Its Gemma does not.) w may be of another dtype than x. Any M up to 65,536, T may be 0, rows may be strided (a
slice of a wider tensor), elements of a row lie next to each other.

Cost: 2*T*M elements moved for rms_norm, 4*T*M for add_rms_norm, about 4 FLOP an element: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.on_cpu import add_rms_norm_cpu, rms_norm_cpu
from triton_kernels.tuning import tuned


class NormConfig(NamedTuple):
    """A launch configuration of both norms; one for all T, because num_warps changes the last bits."""

    block_t: int  # rows per program
    num_warps: int


def default_norm_config(width: int) -> NormConfig:
    """The configuration if none is given or tuned."""
    block_m = next_power_of_2(width)
    return NormConfig(max(1, 1024 // block_m), min(16, max(4, block_m // 1024)))


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same as rms_norm, in plain torch."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same as add_rms_norm, in plain torch."""
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps), new_residual


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    x_stride,
    width: tl.constexpr,
    eps: tl.constexpr,
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
    mean_square = tl.sum(x * x, axis=1) / width
    y = x * tl.rsqrt(mean_square + eps)[:, None] * weight.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * width + columns[None, :], y.to(y_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    new_residual_ptr,
    num_rows,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    eps: tl.constexpr,
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
    r = tl.load(residual_ptr + rows[:, None] * residual_stride + columns[None, :], mask, other=0.0)
    dtype = y_ptr.dtype.element_ty
    total = (x + r.to(tl.float32)).to(dtype)
    tl.store(new_residual_ptr + rows[:, None] * width + columns[None, :], total, mask)
    total = total.to(tl.float32)
    mean_square = tl.sum(total * total, axis=1) / width
    y = total * tl.rsqrt(mean_square + eps)[:, None] * weight.to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * width + columns[None, :], y.to(dtype), mask)


def _config(op: str, x: Tensor) -> NormConfig:
    width = x.shape[1]
    return tuned(
        default_norm_config(width), op, x.device, x.dtype, exact=(next_power_of_2(width),), near=(width,)
    )


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, config: NormConfig | None = None) -> Tensor:
    """Launch the kernel on any device."""
    config = config or _config("rms_norm", x)
    num_rows, width = x.shape
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    grid = (ceil_div(num_rows, config.block_t),)
    _rms_norm_kernel[grid](
        x,
        weight,
        y,
        num_rows,
        x.stride(0),
        width,
        eps,
        config.block_t,
        next_power_of_2(width),
        can_start_early(x.device),
        num_warps=config.num_warps,
    )
    return y


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, config: NormConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel on any device."""
    config = config or _config("add_rms_norm", x)
    num_rows, width = x.shape
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(y)
    grid = (ceil_div(num_rows, config.block_t),)
    _add_rms_norm_kernel[grid](
        x,
        residual,
        weight,
        y,
        new_residual,
        num_rows,
        x.stride(0),
        residual.stride(0),
        width,
        eps,
        config.block_t,
        next_power_of_2(width),
        can_start_early(x.device),
        num_warps=config.num_warps,
    )
    return y, new_residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, M] (rows may be strided) with weight [M]; returns a contiguous [T, M] of x's dtype."""
    if x.device.type == "cpu":
        return rms_norm_cpu(x, weight, eps)
    return rms_norm_triton(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + residual, both [T, M]; returns (normed, x + residual), neither input is written."""
    if x.device.type == "cpu":
        return add_rms_norm_cpu(x, residual, weight, eps)
    return add_rms_norm_triton(x, residual, weight, eps)
