"""A linear layer of 4-bit weights, plain and gated, over few rows: 1 to FEW_ROWS.

    int4_linear_few:        as int4_linear.int4_linear
    int4_gated_linear_few:  as int4_linear.int4_gated_linear

M rows, N outputs, K inputs. x's rows may be strided; the weight is as quantize_int4.py says.

Reading the weights dominates, and behind it the arithmetic that makes numbers of them. Outputs are the tensor
cores' tall operand, rows the narrow one. Each warp of a program sums over other blocks of 128 inputs. Scales
are applied to each group's sum in float32.

A row's result is the same to the last bit in all batches with the same number of rows a program.

Cost: N*K/2 bytes read: memory bound. 2*M*N*K FLOP.
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
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES, QUARTER, block_values, int4_divisor, int4_quarters
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_int4 import Int4Weight
from triton_kernels.tuning import tuned

ROWS_OF_PROGRAMS = (8, 16, 32)
"""The rows for which kernels are compiled."""
FEW_ROWS = ROWS_OF_PROGRAMS[-1]
_BLOCK = tl.constexpr(BLOCK)
_QUARTER = tl.constexpr(QUARTER)


class Int4Config(NamedTuple):
    """A launch configuration."""

    block_n: int  # outputs per program
    num_warps: int
    num_stages: int


def default_int4_config(rows: int, gated: bool, gpu: Gpu) -> Int4Config:
    """The configuration if none is given or tuned: the best of those tried on an H200."""
    config = Int4Config(32 if gated else 16, 4, 3)
    return int4_that_fits(config, rows, gated, gpu)


def int4_that_fits(config: Int4Config, rows: int, gated: bool, gpu: Gpu) -> Int4Config:
    """The configuration with as many stages as fit this GPU, in programs for `rows` rows."""
    tile = config.block_n * BLOCK_BYTES * (2 if gated else 1) + rows_of_a_program(rows) * BLOCK * 2
    stages = gpu.stages_that_fit(config.num_stages, config.num_warps * tile)
    return config._replace(num_stages=stages)


def rows_of_a_program(rows: int) -> int:
    """The rows for which a program is compiled; `rows` are 1 to FEW_ROWS."""
    return next(most for most in ROWS_OF_PROGRAMS if rows <= most)


def _config(x: Tensor, weight: Int4Weight, gated: bool) -> Int4Config:
    """The tuned configuration, or the default."""
    rows = FEW_ROWS
    if x.shape[0] <= 16:
        rows = 8 if x.shape[0] <= 8 else 16
    default = Int4Config(*_default(x.device, rows, gated))
    op = "int4_gated_linear" if gated else "int4_linear"
    exact = (weight.outputs, weight.width, weight.group, int(weight.zeros is not None), rows)
    return tuned(default, op, x.device, x.dtype, exact=exact, near=())


@torch.compiler.assume_constant_result
def _default(device: torch.device, rows: int, gated: bool) -> tuple[int, ...]:
    return tuple(default_int4_config(rows, gated, gpu_of(device)))


@triton.jit
def _products(words, x0, x1, x2, x3, values, GROUP: tl.constexpr):
    """Of one block: words [splits, outputs, 32] times the quarters of x [splits, 32, rows], in float32."""
    s0, s1, s2, s3, z0, z1, z2, z3 = values
    w0, w1, w2, w3 = int4_quarters(words, z0, z1, z2, z3, x0.dtype)
    product = tl.dot(w0, x0, input_precision="ieee")
    if GROUP == _QUARTER:
        product *= s0.to(tl.float32)
        product += tl.dot(w1, x1, input_precision="ieee") * s1.to(tl.float32)
        product += tl.dot(w2, x2, input_precision="ieee") * s2.to(tl.float32)
        return product + tl.dot(w3, x3, input_precision="ieee") * s3.to(tl.float32)
    product = tl.dot(w1, x1, product, input_precision="ieee")
    if GROUP == _BLOCK:
        product = tl.dot(w3, x3, tl.dot(w2, x2, product, input_precision="ieee"), input_precision="ieee")
        return product * s0.to(tl.float32)
    second = tl.dot(w3, x3, tl.dot(w2, x2, input_precision="ieee"), input_precision="ieee")
    return product * s0.to(tl.float32) + second * s2.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _int4_linear_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    OUT: tl.constexpr = N // 2 if GATED else N
    BLOCKS: tl.constexpr = K // _BLOCK
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(outputs, OUT - 1)[None, :].to(tl.int64)
    parts = tl.arange(0, SPLITS)
    lanes = tl.arange(0, _QUARTER)
    rows = tl.arange(0, BLOCK_M)
    # Which kernel follows, and when it should start: as in linear_few.py.
    num_rows = after_predecessor(num_rows, EARLY) if GATED else start_next_and_wait(num_rows, EARLY)
    there = (rows < num_rows)[None, None, :]
    x_ptrs = x_ptr + rows[None, None, :].to(tl.int64) * x_stride + lanes[None, :, None]
    w_ptrs = w_ptr + read[:, :, None] * _QUARTER + lanes[None, None, :]
    scales, zeros = scale_ptr + read, zero_ptr + read
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([SPLITS, BLOCK_N, BLOCK_M], tl.float32)
    block = tl.minimum(parts, BLOCKS - 1)
    values = block_values(scales, zeros, block[:, None], N, dtype, GROUP, HAS_ZEROS)
    if GATED:
        up_values = block_values(scales + OUT, zeros + OUT, block[:, None], N, dtype, GROUP, HAS_ZEROS)
    for first in range(0, BLOCKS, SPLITS):
        block = first + parts
        inside = there
        if BLOCKS % SPLITS:  # a part without a block multiplies the last one by zeros
            inside = there & (block < BLOCKS)[:, None, None]
            block = tl.minimum(block, BLOCKS - 1)
        x_first = x_ptrs + block[:, None, None] * _BLOCK
        x0 = tl.load(x_first, inside, other=0.0)
        x1 = tl.load(x_first + _QUARTER, inside, other=0.0)
        x2 = tl.load(x_first + 2 * _QUARTER, inside, other=0.0)
        x3 = tl.load(x_first + 3 * _QUARTER, inside, other=0.0)
        start = block[:, None, None].to(tl.int64) * (N * _QUARTER)
        # Scales come one turn ahead, because the compiler does not fetch them with the weights.
        ahead = tl.minimum(first + SPLITS + parts, BLOCKS - 1)[:, None]
        words = tl.load(w_ptrs + start)
        next_values = block_values(scales, zeros, ahead, N, dtype, GROUP, HAS_ZEROS)
        acc += _products(words, x0, x1, x2, x3, values, GROUP)
        values = next_values
        if GATED:
            words = tl.load(w_ptrs + (start + OUT * _QUARTER))
            next_values = block_values(scales + OUT, zeros + OUT, ahead, N, dtype, GROUP, HAS_ZEROS)
            up += _products(words, x0, x1, x2, x3, up_values, GROUP)
            up_values = next_values
    if GATED:
        acc = let_next_start(acc, EARLY)
    y = tl.sum(acc, 0) * int4_divisor(dtype)
    written = outputs < OUT
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, written, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = y.to(y_ptr.dtype.element_ty).to(tl.float32)
        up_sum = tl.sum(up, 0) * int4_divisor(dtype)
        y = gate * tl.sigmoid(gate) * up_sum.to(y_ptr.dtype.element_ty).to(tl.float32)
    y_ptrs = y_ptr + rows[None, :].to(tl.int64) * OUT + outputs[:, None]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), (rows < num_rows)[None, :] & written[:, None])


def int4_linear_few(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, config: Int4Config | None = None
) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows."""
    return _launch(x, weight, bias, False, config or _config(x, weight, gated=False))


def int4_gated_linear_few(x: Tensor, weight: Int4Weight, config: Int4Config | None = None) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows."""
    return _launch(x, weight, None, True, config or _config(x, weight, gated=True))


def _launch(x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, config: Int4Config) -> Tensor:
    num_rows = x.shape[0]
    num_outputs = weight.outputs // 2 if gated else weight.outputs
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    block_m = ROWS_OF_PROGRAMS[2]
    if num_rows <= ROWS_OF_PROGRAMS[1]:
        block_m = ROWS_OF_PROGRAMS[0] if num_rows <= ROWS_OF_PROGRAMS[0] else ROWS_OF_PROGRAMS[1]
    _int4_linear_kernel[(ceil_div(num_outputs, config.block_n),)](
        x,
        weight.packed.view(torch.int16),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        y,
        num_rows,
        x.stride(0),
        N=weight.outputs,
        K=weight.width,
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        SPLITS=config.num_warps,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y
