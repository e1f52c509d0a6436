"""A linear layer of FP8 numbers, plain and gated, over few rows: 1 to FEW_ROWS.

    fp8_linear_few:        as fp8_linear.fp8_linear
    fp8_gated_linear_few:  as fp8_linear.fp8_gated_linear

M rows, N outputs, K inputs. x's rows may be strided, w is [N, K], contiguous.

As linear_few.py: reading the weights dominates, BLOCK_N rows of w are the tensor cores' tall operand and the
rows of x the narrow one. With few outputs per program the weight is the narrow operand, and the warps sum
over different parts of k. The products of BLOCK_K inputs are summed by the tensor cores, which keep 14 bits,
and these sums are added up in float32. Scales of channels and rows are applied at the end, scales of blocks
to the sums over 128 inputs.

A row's result is the same to the last bit in all batches with the same number of rows a program.

Cost: N*K bytes read: memory bound. 2*M*N*K FLOP.
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
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_fp8 import GROUP
from triton_kernels.tuning import tuned

FEWEST_ROWS = 16
"""Rows of the smallest program; a batch of fewer has the same program."""
FEW_ROWS = 64
_GROUP = tl.constexpr(GROUP)


class Fp8Config(NamedTuple):
    """A launch configuration."""

    block_n: int  # outputs per program
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # parts of block_k that are summed separately, by one or more warps each; 1 if gated


def default_fp8_config(num_outputs: int, rows: int, blocks: bool, gated: bool, gpu: Gpu) -> Fp8Config:
    """The configuration if none is given or tuned; measured on an H200.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
    """
    if blocks:
        config = Fp8Config(64, GROUP, 4, 4 if num_outputs > 8192 else 8)
    elif gated and num_outputs > 8192:
        # Two programs share a multiprocessor.
        config = Fp8Config(64, 256, 4, 3) if rows <= FEWEST_ROWS else Fp8Config(64, 128, 4, 4)
    elif rows <= FEWEST_ROWS or num_outputs > 8192:
        config = Fp8Config(64, 256, 4, 4 if gated else 6)
    elif rows <= 32 and not gated:
        config = Fp8Config(64, 512, 4, 4)
    else:
        config = Fp8Config(64, 128, 4, 8)
    return fp8_that_fits(config, rows, gated, gpu)


def fp8_that_fits(config: Fp8Config, rows: int, gated: bool, gpu: Gpu) -> Fp8Config:
    """The configuration with as many stages as fit this GPU, in programs for `rows` rows."""
    stage_bytes = config.block_k * (config.block_n * (2 if gated else 1) + rows_of_a_program(rows))
    return config._replace(num_stages=gpu.stages_that_fit(config.num_stages, stage_bytes))


def rows_of_a_program(rows: int) -> int:
    """The rows for which a program is compiled."""
    return max(FEWEST_ROWS, next_power_of_2(rows))


def _config(x: Tensor, weight: Tensor, blocks: bool, gated: bool) -> Fp8Config:
    """The tuned configuration, or the default."""
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    rows = FEWEST_ROWS
    if x.shape[0] > FEWEST_ROWS:
        rows = 32 if x.shape[0] <= 32 else FEW_ROWS
    default = Fp8Config(*_default(x.device, num_outputs, rows, blocks, gated))
    op = ("fp8_gated_linear" if gated else "fp8_linear") + ("_blocks" if blocks else "")
    return tuned(default, op, x.device, torch.bfloat16, exact=(*weight.shape, rows), near=())


@torch.compiler.assume_constant_result
def _default(device: torch.device, num_outputs: int, rows: int, blocks: bool, gated: bool) -> tuple[int, ...]:
    return tuple(default_fp8_config(num_outputs, rows, blocks, gated, gpu_of(device)))


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    peaks_ptr,
    num_rows,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    PEAKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    OUT: tl.constexpr = N // 2 if GATED else N
    EVEN: tl.constexpr = (K % BLOCK_K == 0) and (OUT % BLOCK_N == 0)
    GROUPS: tl.constexpr = (K + _GROUP - 1) // _GROUP
    UP_SCALES: tl.constexpr = (OUT + _GROUP - 1) // _GROUP * GROUPS if BLOCKS else OUT
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    rows = tl.arange(0, BLOCK_M)
    # Which kernel follows, and when it should start: as in linear_few.py.
    num_rows = after_predecessor(num_rows, EARLY) if GATED else start_next_and_wait(num_rows, EARLY)
    there = rows < num_rows
    written = outputs < OUT
    x_ptrs = x_ptr + rows[None, :].to(tl.int64) * x_stride + lanes[:, None]
    w_ptrs = w_ptr + outputs[:, None].to(tl.int64) * K + lanes[None, :]
    w_scale_ptrs = w_scale_ptr + (tl.minimum(outputs, OUT - 1) // _GROUP * GROUPS if BLOCKS else outputs)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        if EVEN:
            w = tl.load(w_ptrs + k0)
            x = tl.load(x_ptrs + k0, there[None, :], other=0.0)
        else:
            inside = written[:, None] & (lanes < K - k0)[None, :]
            w = tl.load(w_ptrs + k0, inside, other=0.0)
            x = tl.load(x_ptrs + k0, there[None, :] & (lanes < K - k0)[:, None], other=0.0)
        product = tl.dot(w, x)
        if BLOCKS:
            x_scale = tl.load(x_scale_ptr + k0 // _GROUP * num_rows + rows, there, other=0.0)
            product *= x_scale[None, :] * tl.load(w_scale_ptrs + k0 // _GROUP)[:, None]
        acc += product
        if GATED:
            if EVEN:
                w = tl.load(w_ptrs + (OUT * K + k0))
            else:
                w = tl.load(w_ptrs + (OUT * K + k0), inside, other=0.0)
            product = tl.dot(w, x)
            if BLOCKS:
                product *= x_scale[None, :] * tl.load(w_scale_ptrs + UP_SCALES + k0 // _GROUP)[:, None]
            up += product
    if GATED:
        acc = let_next_start(acc, EARLY)
    if not BLOCKS:
        x_scale = tl.load(x_scale_ptr + rows, there, other=0.0)[None, :]
        acc *= x_scale * tl.load(w_scale_ptrs, written, other=0.0)[:, None]
        if GATED:
            up *= x_scale * tl.load(w_scale_ptrs + UP_SCALES, written, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, written, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = acc.to(y_ptr.dtype.element_ty)
    y_ptrs = y_ptr + rows[None, :].to(tl.int64) * OUT + outputs[:, None]
    tl.store(y_ptrs, y, there[None, :] & written[:, None])
    if PEAKS:
        peaks = tl.max(tl.where(written[:, None], tl.abs(y.to(tl.float32)), 0.0), 0)
        tl.store(peaks_ptr + rows * tl.num_programs(0) + tl.program_id(0), peaks, there)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_split_linear_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
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
        acc = tl.dot(x, w, acc)
    y = tl.sum(acc, 0) * tl.load(x_scale_ptr + rows, there, other=0.0)[:, None]
    y *= tl.load(w_scale_ptr + outputs, outputs < N, other=0.0)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + outputs, outputs < N, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None].to(tl.int64) * N + outputs[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), there[:, None] & (outputs < N)[None, :])


def fp8_linear_few(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config | None = None,
) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows."""
    config = config or _config(x, weight, weight_scale.dim() == 2, gated=False)
    return _launch(x, x_scale, weight, weight_scale, bias, False, dtype, config)[0]


def fp8_gated_linear_few(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config | None = None,
) -> Tensor:
    """Launch the kernel on any device; up to FEW_ROWS rows."""
    config = config or _config(x, weight, weight_scale.dim() == 2, gated=True)
    return _launch(x, x_scale, weight, weight_scale, None, True, dtype, config)[0]


def fp8_gated_linear_few_with_peaks(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config | None = None,
) -> tuple[Tensor, Tensor]:
    """fp8_gated_linear_few, and float32 [M, P]: each row's largest magnitude in each of P programs."""
    config = config or _config(x, weight, weight_scale.dim() == 2, gated=True)
    return _launch(x, x_scale, weight, weight_scale, None, True, dtype, config, peaks=True)


def _launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gated: bool,
    dtype: torch.dtype,
    config: Fp8Config,
    peaks: bool = False,
) -> tuple[Tensor, Tensor]:
    """The layer's rows, and with `peaks` those of each program (else a tensor that does not count)."""
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    y = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    programs = ceil_div(num_outputs, config.block_n)
    largest = x_scale
    outputs: tuple[Tensor, ...] = (y,)
    if config.splits > 1:
        kernel, kind = _fp8_split_linear_kernel, {"SPLITS": config.splits}
    else:
        if peaks:
            largest = torch.empty((num_rows, programs), dtype=torch.float32, device=x.device)
        outputs = (y, largest)
        kernel = _fp8_linear_kernel
        kind = {"GATED": gated, "PEAKS": peaks, "BLOCKS": weight_scale.dim() == 2}
    block_m = FEWEST_ROWS
    if num_rows > FEWEST_ROWS:
        block_m = 32 if num_rows <= 32 else FEW_ROWS
    kernel[(programs,)](
        x,
        x_scale,
        weight,
        weight_scale,
        x_scale if bias is None else bias,
        *outputs,
        num_rows,
        x.stride(0),
        N=weight.shape[0],
        K=width,
        HAS_BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **kind,
    )
    return y, largest
