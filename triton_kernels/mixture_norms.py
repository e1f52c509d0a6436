"""The norms of a block whose MLP and experts run side by side (Gemma 4), in two launches for few rows.

    enter_mixture    n[t]          = norm(x[t], inner)
                     s[t]          = round(n[t] + residual[t])
                     logits[t, e]  = factor * (norm(s[t], route) . router[e]);   -inf for padding
                     returns norm(s, mlp), norm(s, experts), s and the logits
    leave_mixture    z[t]          = round(norm(a[t], mlp) + norm(round(factors[t] * b[t]), experts))
                     returns round(scalar * norm(z, outer)) and round(scalar * residual)
    norm(v, w)       round(w * v / sqrt(mean(v^2) + eps))

T tokens, M model width, E experts. a is the MLP's output, b that of the experts. Float32 inside, `round`
being that to x's dtype, as in rms_norm.py; the logits are left in float32. A token without a slot is padding.
Rows may be strided, M is any, T at least 1.

Each program of enter_mixture normalises a whole row, which is cheap and saves launches, and multiplies it
with a few rows of the router, which it loads before the previous kernel has ended.

Cost: enter_mixture moves E * M elements of the router and 5 * T * M besides, leave_mixture 5 * T * M.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear import MAX_ROWS
from triton_kernels.norm_router import load_router, masked_logits, store_logits
from triton_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference

_BLOCK_E = 2
_NUM_WARPS = 4


class EntryNorms(NamedTuple):
    """Weights [M] of the norms before MLP, experts and router, and of the one before them all."""

    inner: Tensor
    mlp: Tensor
    experts: Tensor
    route: Tensor


class ExitNorms(NamedTuple):
    """Weights [M] of the norms behind MLP and experts, and of the one behind their sum."""

    mlp: Tensor
    experts: Tensor
    outer: Tensor


def suits_mixture_norms(x: Tensor) -> bool:
    """Whether the kernels are for x [T, M]: on a GPU, and few rows."""
    return x.device.type == "cuda" and 1 <= x.shape[0] <= MAX_ROWS


def enter_mixture_reference(
    x: Tensor,
    residual: Tensor,
    norms: EntryNorms,
    eps: float,
    router: Tensor,
    factor: float,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same as enter_mixture, in plain torch."""
    normed = rms_norm_reference(x, norms.inner, eps)
    for_mlp, stream = add_rms_norm_reference(normed, residual, norms.mlp, eps)
    for_router = rms_norm_reference(stream, norms.route, eps)
    wide = for_router if x.dtype == torch.float64 else for_router.float()
    logits = masked_logits(wide @ router.to(wide.dtype).T * factor, slot_mapping)
    return for_mlp, rms_norm_reference(stream, norms.experts, eps), stream, logits


def leave_mixture_reference(
    a: Tensor,
    b: Tensor,
    factors: Tensor | None,
    residual: Tensor,
    norms: ExitNorms,
    eps: float,
    scalar: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same as leave_mixture, in plain torch."""
    if factors is not None:
        b = (b * factors).to(a.dtype)
    both = rms_norm_reference(a, norms.mlp, eps) + rms_norm_reference(b, norms.experts, eps)
    return rms_norm_reference(both, norms.outer, eps) * scalar, residual * scalar


@triton.jit
def _unit(wide, width: tl.constexpr, eps: tl.constexpr):
    """A row divided by the root of its mean square; float32."""
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)


@triton.jit
def _enter_mixture_kernel(
    x_ptr,
    residual_ptr,
    inner_ptr,
    mlp_ptr,
    experts_ptr,
    route_ptr,
    router_ptr,
    slot_mapping_ptr,
    for_mlp_ptr,
    for_experts_ptr,
    stream_ptr,
    logits_ptr,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    E: tl.constexpr,
    eps: tl.constexpr,
    factor: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_M)
    inside = columns < width
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    # Loaded before the wait, because no kernel writes them.
    router = load_router(router_ptr, experts, columns, width, E)
    inner = tl.load(inner_ptr + columns, inside, other=0.0).to(tl.float32)
    route = tl.load(route_ptr + columns, inside, other=0.0).to(tl.float32)
    row = after_predecessor(tl.program_id(1), EARLY).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, inside, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + row)
    dtype = stream_ptr.dtype.element_ty
    normed = (_unit(x, width, eps) * inner).to(dtype)
    stream = (normed.to(tl.float32) + residual).to(dtype)
    unit = _unit(stream.to(tl.float32), width, eps)
    store_logits(logits_ptr, row, experts, router, 0.0, (unit * route).to(dtype), slot, E, factor, EARLY)
    if tl.program_id(0) == 0:
        offsets = row * width + columns
        mlp = tl.load(mlp_ptr + columns, inside, other=0.0).to(tl.float32)
        tl.store(for_mlp_ptr + offsets, (unit * mlp).to(dtype), inside)
        tl.store(stream_ptr + offsets, stream, inside)
        of_experts = tl.load(experts_ptr + columns, inside, other=0.0).to(tl.float32)
        tl.store(for_experts_ptr + offsets, (unit * of_experts).to(dtype), inside)


@triton.jit
def _leave_mixture_kernel(
    a_ptr,
    b_ptr,
    factors_ptr,
    residual_ptr,
    mlp_ptr,
    experts_ptr,
    outer_ptr,
    scalar_ptr,
    y_ptr,
    new_residual_ptr,
    a_stride,
    b_stride,
    residual_stride,
    width: tl.constexpr,
    eps: tl.constexpr,
    FACTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EARLY: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_M)
    inside = columns < width
    mlp = tl.load(mlp_ptr + columns, inside, other=0.0).to(tl.float32)  # no kernel writes these
    of_experts = tl.load(experts_ptr + columns, inside, other=0.0).to(tl.float32)
    outer = tl.load(outer_ptr + columns, inside, other=0.0).to(tl.float32)
    scalar = tl.load(scalar_ptr).to(tl.float32)
    row = between_kernels(tl.program_id(0), EARLY).to(tl.int64)
    a = tl.load(a_ptr + row * a_stride + columns, inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + row * b_stride + columns, inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + columns, inside, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    if FACTORS:
        b = (b * tl.load(factors_ptr + row)).to(dtype).to(tl.float32)
    a = (_unit(a, width, eps) * mlp).to(dtype).to(tl.float32)
    b = (_unit(b, width, eps) * of_experts).to(dtype).to(tl.float32)
    both = (a + b).to(dtype).to(tl.float32)
    y = (_unit(both, width, eps) * outer).to(dtype).to(tl.float32)
    offsets = row * width + columns
    tl.store(y_ptr + offsets, (y * scalar).to(dtype), inside)
    tl.store(new_residual_ptr + offsets, (residual * scalar).to(dtype), inside)


def enter_mixture(
    x: Tensor,
    residual: Tensor,
    norms: EntryNorms,
    eps: float,
    router: Tensor,
    factor: float,
    slot_mapping: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(for the MLP [T, M], for the experts [T, M], the stream [T, M], logits float32 [T, E]).

    x and residual [T, M], router [E, M], slot_mapping int32 [T], -1 = padding. No input is written. Launches
    the kernel on any device.
    """
    num_rows, width = x.shape
    num_experts = router.shape[0]
    for_mlp, for_experts, stream = (
        torch.empty((num_rows, width), dtype=x.dtype, device=x.device) for _ in range(3)
    )
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
    _enter_mixture_kernel[(ceil_div(num_experts, _BLOCK_E), num_rows)](
        x,
        residual,
        *norms,
        router,
        slot_mapping,
        for_mlp,
        for_experts,
        stream,
        logits,
        x.stride(0),
        residual.stride(0),
        width,
        num_experts,
        eps,
        factor,
        next_power_of_2(width),
        _BLOCK_E,
        can_start_early(x.device),
        num_warps=_NUM_WARPS,
    )
    return for_mlp, for_experts, stream, logits


def leave_mixture(
    a: Tensor,
    b: Tensor,
    factors: Tensor | None,
    residual: Tensor,
    norms: ExitNorms,
    eps: float,
    scalar: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the block's output [T, M], its residual [T, M]), both times the scalar.

    a, b and residual [T, M], factors float32 [T, 1] or None for 1, scalar [1]. No input is written. Launches
    the kernel on any device.
    """
    num_rows, width = a.shape
    y, new_residual = (torch.empty((num_rows, width), dtype=a.dtype, device=a.device) for _ in range(2))
    _leave_mixture_kernel[(num_rows,)](
        a,
        b,
        scalar if factors is None else factors,
        residual,
        *norms,
        scalar,
        y,
        new_residual,
        a.stride(0),
        b.stride(0),
        residual.stride(0),
        width,
        eps,
        factors is not None,
        next_power_of_2(width),
        can_start_early(a.device),
        num_warps=_NUM_WARPS,
    )
    return y, new_residual
