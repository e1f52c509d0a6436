"""The norm before a mixture of experts and its router, in one launch for the few rows of a decode step.

    s[t]          = round(x[t] + residual[t])
    y[t]          = round(weight * s[t] / sqrt(mean(s[t]^2) + eps))
    logits[t, e]  = sum over m of y[t, m] * router[e, m] (+ bias[e]);   -inf for a token without a slot, which
                    is padding

T tokens, M model width, E experts. Float32 inside, `round` being that to x's dtype, as in rms_norm.py; the
kernel leaves the logits in float32. Rows of x and of the residual may be strided, M is any, T may be 0.

Each program normalises a whole row, which is cheap and saves a launch, and multiplies it with a few rows of
the router, which it loads before the previous kernel has ended. With more than MAX_ROWS rows, add_rms_norm,
linear and a mask run one after the other.

Cost: E * M elements of the router, 4 * T * M elements besides; a launch, for few rows.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, can_start_early, let_next_start
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear import MAX_ROWS, linear, linear_reference
from triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference

_BLOCK_E = 2
_NUM_WARPS = 4


def suits_norm_router(x: Tensor) -> bool:
    """Whether the kernel is for x [T, M]: on a GPU, and few rows."""
    return x.device.type == "cuda" and x.shape[0] <= MAX_ROWS


def add_rms_norm_router_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as add_rms_norm_router, in plain torch."""
    y, new_residual = add_rms_norm_reference(x, residual, weight, eps)
    return y, new_residual, masked_logits(linear_reference(y, router, bias), slot_mapping)


def masked_logits(logits: Tensor, slot_mapping: Tensor) -> Tensor:
    """The logits [T, E], -inf for tokens without a slot (int32 [T], -1)."""
    return logits.masked_fill((slot_mapping < 0).unsqueeze(1), float("-inf"))


@triton.jit
def load_router(router_ptr, experts, columns, width: tl.constexpr, E: tl.constexpr):
    """The router's rows of these experts; zeros beyond it."""
    inside = (experts < E)[:, None] & (columns < width)[None, :]
    return tl.load(router_ptr + experts[:, None] * width + columns[None, :], inside, other=0.0)


@triton.jit
def store_logits(
    logits_ptr,
    row,
    experts,
    router,
    bias,
    y,
    slot,
    E: tl.constexpr,
    factor: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Store a row's logits of these experts, y @ router.T * factor + bias, and let the next kernel start."""
    logits = tl.sum(router.to(tl.float32) * y.to(tl.float32)[None, :], axis=1) * factor + bias
    # No earlier: programs of the next kernel that start beside this one are distributed unevenly.
    logits = let_next_start(logits, EARLY)
    logits = tl.where(slot < 0, float("-inf"), logits)
    tl.store(logits_ptr + row * E + experts, logits, experts < E)


@triton.jit
def _norm_router_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    router_ptr,
    bias_ptr,
    slot_mapping_ptr,
    y_ptr,
    new_residual_ptr,
    logits_ptr,
    x_stride,
    residual_stride,
    width: tl.constexpr,
    E: tl.constexpr,
    eps: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_M)
    inside = columns < width
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    # Loaded before the wait, because no kernel writes them.
    router = load_router(router_ptr, experts, columns, width, E)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + experts, experts < E, other=0.0).to(tl.float32)
    row = after_predecessor(tl.program_id(1), EARLY).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    r = tl.load(residual_ptr + row * residual_stride + columns, inside, other=0.0).to(tl.float32)
    slot = tl.load(slot_mapping_ptr + row)
    dtype = y_ptr.dtype.element_ty
    total = (x + r).to(dtype)
    wide = total.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=0) / width
    y = (wide * tl.rsqrt(mean_square + eps) * weight.to(tl.float32)).to(dtype)
    store_logits(logits_ptr, row, experts, router, bias, y, slot, E, 1.0, EARLY)
    if tl.program_id(0) == 0:
        tl.store(y_ptr + row * width + columns, y, inside)
        tl.store(new_residual_ptr + row * width + columns, total, inside)


def add_rms_norm_router_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel on any device; for T of at least 1."""
    num_rows, width = x.shape
    num_experts = router.shape[0]
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(y)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
    _norm_router_kernel[(ceil_div(num_experts, _BLOCK_E), num_rows)](
        x,
        residual,
        weight,
        router,
        router if bias is None else bias,
        slot_mapping,
        y,
        new_residual,
        logits,
        x.stride(0),
        residual.stride(0),
        width,
        num_experts,
        eps,
        bias is not None,
        next_power_of_2(width),
        _BLOCK_E,
        can_start_early(x.device),
        num_warps=_NUM_WARPS,
    )
    return y, new_residual, logits


def add_rms_norm_router(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed [T, M], x + residual [T, M], logits [T, E]).

    x and residual [T, M], weight [M], router [E, M], slot_mapping int32 [T], -1 = padding, bias [E], added to
    the logits. No input is written. The logits are float32 where the kernel computes them, of x's dtype
    elsewhere.
    """
    if suits_norm_router(x):
        return add_rms_norm_router_triton(x, residual, weight, eps, router, slot_mapping, bias)
    y, new_residual = add_rms_norm(x, residual, weight, eps)
    return y, new_residual, masked_logits(linear(y, router, bias), slot_mapping)
