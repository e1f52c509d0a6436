"""The matrix products of a mixture of FP8 experts, over (token, expert) pairs sorted by expert.

    gate and up:  y[i] = silu(x[t] @ gate[e].T) * (x[t] @ up[e].T)    i-th pair of the sort: token t, expert e
    down:         y[p] = weight[p] * x[i] @ down[e].T                 p: its place before the sort

P pairs, E experts, N outputs of a matrix, K inputs, a multiple of 16, or of 128 with scales of blocks. Tiles
and their experts are found as in moe_gemm.py; experts without rows are never read. Scales of rows and of
output features are applied at the end, scales of blocks to the sums over 128 inputs. For few rows, BLOCK_N
outputs are the tensor cores' tall operand and the rows the narrow one.

With CONVERT the numbers become float16, exactly, for GPUs that have no FP8.

Cost: N * K bytes for every expert with rows (decode: memory bound); 2 * P * N * K FLOP (prefill: arithmetic).
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.e4m3 import LARGEST, as_fp8
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gemm import _find_tile, _most_tiles
from triton_kernels.moe_route import Routing, expert_lanes
from triton_kernels.quantize_fp8 import GROUP

_GROUP = tl.constexpr(GROUP)
_LARGEST = tl.constexpr(LARGEST)
_ROW, _GROUPS, _GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What the rows' scales are for: a row, 128 columns of a row, or all rows (of an expert, for down)."""
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Fp8GemmConfig(NamedTuple):
    """A launch configuration of one of the two products."""

    block_m: int  # pairs
    block_n: int  # columns of the result, each a gate and an up column or one of down; divides 128
    block_k: int  # 128 if scales are for blocks
    num_warps: int
    num_stages: int
    group_m: int = 8
    tma: bool = True  # weights by tensor descriptors
    rows_tall: bool = False  # pairs are the tall operand: from 64 on


class Fp8Rows(NamedTuple):
    """Rows of FP8 numbers."""

    values: Tensor  # e4m3 [R, K], contiguous
    scales: Tensor  # float32 [1, R], of 128 columns [K / 128, R], or given: [1] of all rows, [E] of experts


def fp8_gemm_that_fits(config: Fp8GemmConfig, gpu: Gpu, *, gated: bool) -> Fp8GemmConfig:
    """The configuration as this GPU can run it: without TMA, with smaller tiles or fewer stages."""
    tiles = 2 if gated else 1
    if not gpu.multiplies_from_shared:
        # More than 64 accumulators a thread leave too few registers for the operands.
        most = 64 * 32 * config.num_warps // (config.block_m * tiles)
        config = config._replace(block_n=max(16, min(config.block_n, most)))
    stage_bytes = config.block_k * (config.block_m + config.block_n * tiles)
    if not gpu.has_fp8:
        stage_bytes *= 3  # beside the numbers as loaded, those of 16 bits
    stages = gpu.stages_that_fit(config.num_stages, stage_bytes)
    return config._replace(num_stages=stages, tma=config.tma and gpu.has_tma)


@triton.jit
def _as_float16(values):
    """The bits of e4m3 as float16 of 2^-8 of their value, exactly."""
    bits = values.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _product(x, w, ROWS_TALL: tl.constexpr, CONVERT: tl.constexpr):
    """Of x [rows, k] and w [outputs, k]: [rows, outputs] if ROWS_TALL, else transposed."""
    if CONVERT:
        x = _as_float16(x)
        w = _as_float16(w)
    product = tl.dot(x, w.T) if ROWS_TALL else tl.dot(w, x.T)
    return product * 65536.0 if CONVERT else product


@triton.jit
def _experts_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    weight,
    w_scale_ptr,
    y_ptr,
    y_scale_ptr,
    order_ptr,
    pair_weight_ptr,
    expert_end_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    SCALES: tl.constexpr,
    TO_FP8: tl.constexpr,
    ROUNDED_AS: tl.constexpr,
    CONVERT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ROWS_TALL: tl.constexpr,
):
    """N: columns of the result. A gated weight has 2 * N rows, and y may be wider then, with zeros."""
    WRITTEN: tl.constexpr = Y_STRIDE if GATED else N
    NUM_N: tl.constexpr = (WRITTEN + BLOCK_N - 1) // BLOCK_N
    ROWS_OF_EXPERT: tl.constexpr = 2 * N if GATED else N
    TALL: tl.constexpr = BLOCK_M if ROWS_TALL else BLOCK_N
    NARROW: tl.constexpr = BLOCK_N if ROWS_TALL else BLOCK_M
    BLOCKS: tl.constexpr = SCALES == _GROUPS
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(expert_end_ptr + experts, experts < E, other=0)
    starts = tl.load(expert_end_ptr + experts - 1, (experts > 0) & (experts < E), other=0)
    expert, row, row_end, n = _find_tile(starts, ends, experts, tl.program_id(0), NUM_N, BLOCK_M, GROUP_M)
    if expert >= 0:
        rows = row + tl.arange(0, BLOCK_M)
        # Rows past the expert's last row read the last row instead, which is loaded anyway.
        read = tl.minimum(rows, row_end - 1)
        if GATED:
            read = tl.load(order_ptr + read) // TOP_K
        lanes = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + read.to(tl.int64)[:, None] * K + lanes[None, :]
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        first_row = expert * ROWS_OF_EXPERT + n * BLOCK_N
        if not TMA:
            weight_rows = expert.to(tl.int64) * ROWS_OF_EXPERT + tl.minimum(columns, N - 1)
            w_ptrs = weight + weight_rows[:, None] * K + lanes[None, :]
        if BLOCKS:
            GROUPS: tl.constexpr = K // _GROUP
            SCALE_ROWS: tl.constexpr = (N + _GROUP - 1) // _GROUP
            scale_row = expert * (SCALE_ROWS * (2 if GATED else 1))
            scale_row += tl.minimum(n * BLOCK_N // _GROUP, SCALE_ROWS - 1)
            w_scales = w_scale_ptr + scale_row * GROUPS
            x_scales = x_scale_ptr + read
            # Scales come one turn ahead, because the compiler does not fetch them with the tiles.
            x_scale = tl.load(x_scales)
            w_scale = tl.load(w_scales)
            if GATED:
                up_scale = tl.load(w_scales + SCALE_ROWS * GROUPS)
        acc = tl.zeros([TALL, NARROW], tl.float32)
        up_acc = tl.zeros([TALL, NARROW], tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                x = tl.load(x_ptrs + k0)
            else:
                x = tl.load(x_ptrs + k0, (k0 + lanes < K)[None, :], other=0.0)
            if TMA:
                w = weight.load([first_row, k0])
            elif K % BLOCK_K == 0:
                w = tl.load(w_ptrs + k0)
            else:
                w = tl.load(w_ptrs + k0, (k0 + lanes < K)[None, :], other=0.0)
            product = _product(x, w, ROWS_TALL, CONVERT)
            if BLOCKS:
                scale = tl.expand_dims(x_scale, 1 if ROWS_TALL else 0)
                ahead = tl.minimum(k0 // _GROUP + 1, GROUPS - 1)
                x_scale = tl.load(x_scales + ahead * num_rows)
                acc += product * (scale * w_scale)
                w_scale = tl.load(w_scales + ahead)
            else:
                acc += product
            if GATED:
                if TMA:
                    w = weight.load([first_row + N, k0])
                elif K % BLOCK_K == 0:
                    w = tl.load(w_ptrs + (N * K + k0))
                else:
                    w = tl.load(w_ptrs + (N * K + k0), (k0 + lanes < K)[None, :], other=0.0)
                product = _product(x, w, ROWS_TALL, CONVERT)
                if BLOCKS:
                    up_acc += product * (scale * up_scale)
                    up_scale = tl.load(w_scales + SCALE_ROWS * GROUPS + ahead)
                else:
                    up_acc += product
        wide_rows = tl.expand_dims(rows, 1 if ROWS_TALL else 0)
        outputs = tl.expand_dims(columns, 0 if ROWS_TALL else 1)
        if not BLOCKS:
            if SCALES == _ROW:
                scale = tl.expand_dims(tl.load(x_scale_ptr + read), 1 if ROWS_TALL else 0)
            else:
                scale = tl.load(x_scale_ptr + (0 if GATED else expert))
            w_scale_ptrs = w_scale_ptr + expert * ROWS_OF_EXPERT + tl.minimum(outputs, N - 1)
            acc *= scale * tl.load(w_scale_ptrs)
            if GATED:
                up_acc *= scale * tl.load(w_scale_ptrs + N)
        there = wide_rows < row_end
        if GATED:
            y = acc * tl.sigmoid(acc) * up_acc
            y = tl.where(outputs < N, y, 0.0)
            places = wide_rows.to(tl.int64) * Y_STRIDE + outputs
            if TO_FP8:
                y = y.to(ROUNDED_AS).to(tl.float32) / tl.load(y_scale_ptr + expert)
                y = tl.minimum(tl.maximum(y, -_LARGEST, tl.PropagateNan.ALL), _LARGEST, tl.PropagateNan.ALL)
                y = _as_bits(y) if CONVERT else as_fp8(y)
            tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), there & (outputs < WRITTEN))
        else:
            pairs = tl.load(order_ptr + wide_rows, there, other=0)
            y = acc * tl.load(pair_weight_ptr + pairs, there, other=0.0)
            places = pairs.to(tl.int64) * Y_STRIDE + outputs
            tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), there & (outputs < N))


@triton.jit
def _as_bits(values):
    """Float32 of at most 448 as the bits of e4m3, to the nearest, ties to even; for GPUs without FP8."""
    bits = values.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = ((bits & 0x7FFFFFFF) >> 20) - (120 << 3)
    small = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
    code = tl.where(tl.abs(values) < 0.015625, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(values == values, code, 0x7F).to(tl.uint8)


def multiply_experts_fp8(
    rows: Fp8Rows,
    weight: Tensor,
    scales: Tensor,
    routing: Routing,
    y: Tensor,
    config: Fp8GemmConfig,
    *,
    gated: bool,
    rounded_as: torch.dtype,
    given_scale: Tensor | None = None,
    convert: bool | None = None,
) -> None:
    """Fill y with the products of rows and each pair's expert, on any device.

    Args:
        rows: of tokens if `gated`; else of pairs, in sorted order.
        weight: e4m3 [E, N, K], or [E, 2N, K] if `gated`; scales as Fp8ExpertWeights says.
        y: [P, N] in the order before the sort; if `gated`, [P, at least N] in sorted order.
        rounded_as: the dtype of activations, to which a gated product is rounded.
        given_scale: float32 [E], by which a gated product is divided before it is rounded to FP8.
        convert: multiply as float16; None = where the GPU has no FP8.
    """
    num_experts, outputs, width = weight.shape
    results = outputs // 2 if gated else outputs
    values = rows.values
    if convert is None:
        convert = not gpu_of(values.device).has_fp8
    if convert:
        values, weight = values.view(torch.uint8), weight.view(torch.uint8)
        y = y.view(torch.uint8) if given_scale is not None else y
    kind = _ROW
    if scales.dim() > 2:
        kind = _GROUPS
    elif rows.scales.dim() == 1:
        kind = _GIVEN
    stride = y.shape[1]
    tiles = _most_tiles(routing.order.shape[0], num_experts, config.block_m)
    weight_rows: Tensor | TensorDescriptor = weight
    if config.tma:
        block = [config.block_n, config.block_k]
        weight_rows = TensorDescriptor.from_tensor(weight.view(-1, width), block)
    _experts_fp8_kernel[(tiles * ceil_div(stride if gated else results, config.block_n),)](
        values,
        rows.scales,
        weight_rows,
        scales,
        y,
        rows.scales if given_scale is None else given_scale,
        routing.order,
        routing.weights,
        routing.expert_end,
        values.shape[0],
        N=results,
        K=width,
        E=num_experts,
        TOP_K=routing.experts.shape[1],
        Y_STRIDE=stride,
        GATED=gated,
        SCALES=kind.value,
        TO_FP8=given_scale is not None,
        ROUNDED_AS=TRITON_TYPES[rounded_as],
        CONVERT=convert,
        TMA=config.tma,
        BLOCK_E=expert_lanes(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        ROWS_TALL=config.rows_tall,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
