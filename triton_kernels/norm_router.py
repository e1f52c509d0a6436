"""The norm before a mixture of experts, and its router.

    s[t]          = round(x[t] + residual[t])
    y[t]          = round(weight * s[t] / sqrt(mean(s[t]^2) + eps))
    logits[t, e]  = sum over m of y[t, m] * router[e, m] (+ bias[e]);   -inf for a token without a slot, which
                    is padding

T tokens, M model width, E experts. Float32 inside, `round` being that to x's dtype, as in rms_norm.py; the
kernels leave the logits in float32. Rows of x and of the residual may be strided, M is any, T may be 0.

Up to FEW_LOGITS logits it is one launch: each program normalises a whole row, which is cheap, and multiplies
it with one to four rows of the router, which it loads before the previous kernel has ended. Up to ROUTER_ROWS
rows a norm comes first, then a product whose programs have 16 tokens and 8 experts, and sum over parts of m
apart. Beyond, add_rms_norm, linear and a mask run one after the other.

Cost: E * M elements of the router, 4 * T * M elements besides; in two launches, each part of the router once
for 16 rows, and each row once for 8 experts, from L2.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.early_start import (
    after_predecessor,
    between_kernels,
    can_start_early,
    fetch_into_l2,
    let_next_start,
)
from triton_kernels.gpu import gpu_of
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear import linear, linear_reference
from triton_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, add_rms_norm_triton

FEW_LOGITS = 2048
"""T * E; measured on an H200 with 32 to 272 experts."""
MANY_LOGITS = 1024
"""Beyond, four experts share a program's norm instead of two; measured with 32 experts."""
ROUTER_ROWS = 512
"""Beyond, torch's product serves the router."""
_NUM_WARPS = 4
_ROWS, _EXPERTS, _BLOCK_M, _SPLITS = 16, 8, 512, 4


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


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    y_ptr,
    router_ptr,
    bias_ptr,
    slot_mapping_ptr,
    logits_ptr,
    num_rows,
    y_stride,
    M: tl.constexpr,
    E: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products are [splits, rows, part of m] x [splits, part of m, experts]."""
    PART: tl.constexpr = BLOCK_M // SPLITS
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    lanes = tl.arange(0, SPLITS)[:, None] * PART + tl.arange(0, PART)[None, :]
    router_ptrs = router_ptr + tl.minimum(experts, E - 1)[None, None, :] * M + lanes[:, :, None]
    if EARLY:
        LINE: tl.constexpr = 1024 // router_ptr.dtype.element_ty.primitive_bitwidth  # of L2, in elements
        lines = tl.arange(0, BLOCK_M // LINE)[:, None] * LINE
        for m0 in range(0, M, BLOCK_M):
            row = tl.minimum(m0 + lines, M - 1)
            fetch_into_l2(router_ptr + tl.minimum(experts, E - 1)[None, :] * M + row)
    num_rows = between_kernels(num_rows, EARLY)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = rows < num_rows
    y_ptrs = y_ptr + rows[None, :, None].to(tl.int64) * y_stride + lanes[:, None, :]
    acc = tl.zeros([SPLITS, ROWS, EXPERTS], tl.float32)
    for m0 in range(0, M, BLOCK_M):
        if M % BLOCK_M == 0:
            router = tl.load(router_ptrs + m0)
            y = tl.load(y_ptrs + m0, there[None, :, None], other=0.0)
        else:
            inside = lanes < M - m0
            router = tl.load(router_ptrs + m0, inside[:, :, None], other=0.0)
            y = tl.load(y_ptrs + m0, inside[:, None, :] & there[None, :, None], other=0.0)
        acc = tl.dot(y, router, acc, input_precision="ieee")
    logits = tl.sum(acc, 0)
    if BIAS:
        logits += tl.load(bias_ptr + experts, experts < E, other=0.0).to(tl.float32)[None, :]
    slot = tl.load(slot_mapping_ptr + rows, there, other=-1)
    logits = tl.where((slot < 0)[:, None], float("-inf"), logits)
    places = rows[:, None].to(tl.int64) * E + experts[None, :]
    tl.store(logits_ptr + places, logits, there[:, None] & (experts < E)[None, :])


def _launch_together(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = x.shape
    num_experts = router.shape[0]
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    new_residual = torch.empty_like(y)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x.device)
    # Experts share a program's norm, unless the GPU has room for a program for each logit.
    num_logits = num_rows * num_experts
    block_e = 2 if num_logits <= MANY_LOGITS else 4
    if num_logits <= gpu_of(x.device).multiprocessors:
        block_e = 1
    _norm_router_kernel[(ceil_div(num_experts, block_e), num_rows)](
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
        block_e,
        can_start_early(x.device),
        num_warps=_NUM_WARPS,
    )
    return y, new_residual, logits


def router_logits_triton(
    y: Tensor, router: Tensor, slot_mapping: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Launch the kernel on any device; y [T, M] is normalised, T at least 1."""
    num_rows, width = y.shape
    num_experts = router.shape[0]
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=y.device)
    stage_bytes = y.element_size() * _BLOCK_M * (_ROWS + _EXPERTS)
    _router_kernel[(ceil_div(num_experts, _EXPERTS), ceil_div(num_rows, _ROWS))](
        y,
        router,
        router if bias is None else bias,
        slot_mapping,
        logits,
        num_rows,
        y.stride(0),
        width,
        num_experts,
        bias is not None,
        _ROWS,
        _EXPERTS,
        _BLOCK_M,
        _SPLITS,
        can_start_early(y.device),
        num_warps=_NUM_WARPS,
        num_stages=gpu_of(y.device).stages_that_fit(4, stage_bytes),
    )
    return logits


def add_rms_norm_router_triton(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels on any device; for T of at least 1."""
    if x.shape[0] * router.shape[0] <= FEW_LOGITS:
        return _launch_together(x, residual, weight, eps, router, slot_mapping, bias)
    y, new_residual = add_rms_norm_triton(x, residual, weight, eps)
    return y, new_residual, router_logits_triton(y, router, slot_mapping, bias)


# Opaque to torch.compile, whose code serves any number of rows: the ops choose when they run, which is once
# for each recorded graph.


@torch.library.custom_op("triton_kernels::router_logits", mutates_args=())
def router_logits(
    y: Tensor,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
    in_float32: bool = False,
) -> Tensor:
    """Logits, float32 [T, E], of normalised rows y [T, M].

    router [E, M], slot_mapping int32 [T], -1 = padding, bias [E], added to the logits. Beyond ROUTER_ROWS
    rows, and on CPUs, the logits are rounded to y's dtype first unless in_float32.
    """
    if y.device.type == "cuda" and 1 <= y.shape[0] <= ROUTER_ROWS:
        return router_logits_triton(y, router, slot_mapping, bias)
    if in_float32:
        logits = F.linear(y.float(), router.float(), None if bias is None else bias.float())
    else:
        logits = linear(y, router, bias).float()
    return masked_logits(logits, slot_mapping)


@router_logits.register_fake
def _(y: Tensor, router: Tensor, *_: object) -> Tensor:
    return y.new_empty((y.shape[0], router.shape[0]), dtype=torch.float32)


@torch.library.custom_op("triton_kernels::add_rms_norm_router", mutates_args=())
def add_rms_norm_router(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    router: Tensor,
    slot_mapping: Tensor,
    bias: Tensor | None = None,
    in_float32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed [T, M], x + residual [T, M], logits float32 [T, E]); no input is written.

    x and residual [T, M], weight [M]; the other arguments, and how the logits are rounded, as router_logits.
    """
    if x.device.type == "cuda" and 1 <= x.shape[0] <= ROUTER_ROWS:
        return add_rms_norm_router_triton(x, residual, weight, eps, router, slot_mapping, bias)
    y, new_residual = add_rms_norm(x, residual, weight, eps)
    return y, new_residual, router_logits(y, router, slot_mapping, bias, in_float32)


@add_rms_norm_router.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, router: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    return y, torch.empty_like(y), x.new_empty((x.shape[0], router.shape[0]), dtype=torch.float32)
