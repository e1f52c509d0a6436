"""A linear layer, plain and gated, over few rows: 1 to FEW_ROWS.

    linear_triton:        as linear.linear
    gated_linear_triton:  as linear.gated_linear

M rows, N outputs, K inputs. x's rows may be strided, w is [N, K], contiguous.

With so few rows, reading the weights dominates. BLOCK_N rows of w are the tall operand of the tensor cores,
the M rows of x the narrow one. A program computes its outputs over all of k, so there are no partial sums to
merge, and small tiles keep enough loads in flight. With few outputs, a program's chain of dependent products
dominates instead: then the weight is the narrow operand (8 or 16 outputs per program), and the warps sum over
different parts of k.

A row's result is the same to the last bit in all batches of up to MAX_ROWS rows, and the same in all larger
batches, which may sum in another order.

Cost: N*K elements read: memory bound. 2*M*N*K FLOP.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, can_start_early, let_next_start, start_next_and_wait
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.silu_mul import bent
from triton_kernels.tuning import tuned

MAX_ROWS = 16
FEW_ROWS = 32
"""Kernels are compiled for MAX_ROWS rows, and for FEW_ROWS if there are more rows."""


class LinearConfig(NamedTuple):
    """A launch configuration; the same for all M up to MAX_ROWS, because it decides the order of sums."""

    block_n: int  # outputs per program
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # parts of block_k that are summed separately, by one or more warps each; 1 if gated


def default_linear_config(num_outputs: int, width: int, gated: bool, gpu: Gpu) -> LinearConfig:
    """The configuration if none is given or tuned; measured on an H200.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
        width: K.
    """
    if num_outputs > 4096:
        config = LinearConfig(64, 128, 4, 4 if gated or num_outputs > 32768 else 6)
    elif gated:
        config = LinearConfig(32, 128, 2, 8) if width <= 1024 else LinearConfig(32, 256, 2, 4)
    elif num_outputs <= 1024:
        config = LinearConfig(8, 256, 4, 8, splits=4)
    elif num_outputs <= 2048:
        config = LinearConfig(8, 512, 2, 5, splits=2)
    elif width <= 1024:
        config = LinearConfig(16, 128, 2, 8)
    elif num_outputs < 4096:
        config = LinearConfig(16, 512, 2, 4, splits=2)
    else:
        config = LinearConfig(16, 512, 2, 3)
    return linear_that_fits(config, MAX_ROWS, gated, gpu)


def more_rows_config(num_outputs: int, gated: bool, gpu: Gpu) -> LinearConfig:
    """The configuration for more than MAX_ROWS rows, as `default_linear_config`."""
    if num_outputs <= 1024 and not gated:
        config = LinearConfig(8, 256, 4, 6, splits=4)
    else:
        config = LinearConfig(64, 128, 4, 4 if gated or num_outputs > 32768 else 6)
    return linear_that_fits(config, FEW_ROWS, gated, gpu)


def linear_that_fits(config: LinearConfig, rows: int, gated: bool, gpu: Gpu) -> LinearConfig:
    """The configuration with as many stages as fit this GPU, in programs for `rows` rows."""
    stage_bytes = linear_stage_bytes(config, rows, gated)
    return config._replace(num_stages=gpu.stages_that_fit(config.num_stages, stage_bytes))


def _config(x: Tensor, weight: Tensor, op: str) -> LinearConfig:
    """The tuned configuration of the op of this name, or its default."""
    gated = op == "gated_linear"
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    shape = (num_outputs, weight.shape[1], gated)
    if x.shape[0] > MAX_ROWS:
        return LinearConfig(*_default(x.device, *shape, False))
    default = LinearConfig(*_default(x.device, *shape, True))
    return tuned(default, op, x.device, x.dtype, exact=(weight.shape[0], weight.shape[1]), near=())


@torch.compiler.assume_constant_result
def _default(device: torch.device, num_outputs: int, width: int, gated: bool, few: bool) -> tuple[int, ...]:
    gpu = gpu_of(device)
    if few:
        return tuple(default_linear_config(num_outputs, width, gated, gpu))
    return tuple(more_rows_config(num_outputs, gated, gpu))


def linear_stage_bytes(config: LinearConfig, rows: int, gated: bool) -> int:
    """Shared memory that one pipeline stage takes in programs for `rows` rows, for elements of two bytes."""
    return 2 * config.block_k * (config.block_n * (2 if gated else 1) + rows)


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    OUT: tl.constexpr = N // 2 if GATED else N
    EVEN: tl.constexpr = (K % BLOCK_K == 0) and (OUT % BLOCK_N == 0)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    # After a gated layer comes a linear one, whose programs would be distributed unevenly if they started
    # beside this kernel's. After other layers comes a norm or a sum over ranks, which are small, or
    # attention, which loads much before it waits.
    num_rows = after_predecessor(num_rows, EARLY) if GATED else start_next_and_wait(num_rows, EARLY)
    there = rows < num_rows
    x_ptrs = x_ptr + rows[None, :].to(tl.int64) * x_stride + lanes[:, None]
    w_ptrs = w_ptr + outputs[:, None].to(tl.int64) * K + lanes[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if EVEN:
            w = tl.load(w_ptrs + k0)
            x = tl.load(x_ptrs + k0, there[None, :], other=0.0)
        else:
            inside = (outputs < OUT)[:, None] & (lanes < K - k0)[None, :]
            w = tl.load(w_ptrs + k0, inside, other=0.0)
            x = tl.load(x_ptrs + k0, there[None, :] & (lanes < K - k0)[:, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            if EVEN:
                w = tl.load(w_ptrs + (OUT * K + k0))
            else:
                w = tl.load(w_ptrs + (OUT * K + k0), inside, other=0.0)
            up = tl.dot(w, x, up, input_precision="ieee")
    if GATED:
        acc = let_next_start(acc, EARLY)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, outputs < OUT, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        acc = bent(gate, GELU) * up.to(y_ptr.dtype.element_ty).to(tl.float32)
    y_ptrs = y_ptr + rows[None, :].to(tl.int64) * OUT + outputs[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), there[None, :] & (outputs < OUT)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _split_linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products are [splits, rows, part of k] x [splits, part of k, outputs]."""
    PART: tl.constexpr = BLOCK_K // SPLITS
    EVEN: tl.constexpr = (K % BLOCK_K == 0) and (N % BLOCK_N == 0)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, SPLITS)[:, None] * PART + tl.arange(0, PART)[None, :]
    rows = tl.arange(0, BLOCK_M)
    num_rows = start_next_and_wait(num_rows, EARLY)
    there = rows < num_rows
    x_ptrs = x_ptr + rows[None, :, None].to(tl.int64) * x_stride + lanes[:, None, :]
    w_ptrs = w_ptr + outputs[None, None, :].to(tl.int64) * K + lanes[:, :, None]
    acc = tl.zeros([SPLITS, BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if EVEN:
            w = tl.load(w_ptrs + k0)
            x = tl.load(x_ptrs + k0, there[None, :, None], other=0.0)
        else:
            inside = lanes < K - k0
            w = tl.load(w_ptrs + k0, inside[:, :, None] & (outputs < N)[None, None, :], other=0.0)
            x = tl.load(x_ptrs + k0, inside[:, None, :] & there[None, :, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    y = tl.sum(acc, 0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, outputs < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), there[:, None] & (outputs < N)[None, :])


def linear_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, config: LinearConfig | None = None
) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows."""
    return _launch(x, weight, bias, False, config or _config(x, weight, "linear"))


def gated_linear_triton(
    x: Tensor, weight: Tensor, config: LinearConfig | None = None, *, gelu: bool = False
) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows. With `gelu`, the gate's activation is GELU."""
    return _launch(x, weight, None, True, config or _config(x, weight, "gated_linear"), gelu)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, config: LinearConfig, gelu: bool = False
) -> Tensor:
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if config.splits > 1:
        kernel, kind = _split_linear_kernel, {"SPLITS": config.splits}
    else:
        kernel, kind = _linear_kernel, {"GATED": gated, "GELU": gelu}
    kernel[(ceil_div(num_outputs, config.block_n),)](
        x,
        weight,
        x if bias is None else bias,
        y,
        num_rows,
        x.stride(0),
        N=weight.shape[0],
        K=width,
        HAS_BIAS=bias is not None,
        BLOCK_M=MAX_ROWS if num_rows <= MAX_ROWS else FEW_ROWS,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **kind,
    )
    return y
