"""The matrix products of a mixture of experts of 4-bit weights, over (token, expert) pairs sorted by expert.

    gate and up:  y[i] = act(x[t] @ gate[e].T, x[t] @ up[e].T)    i-th pair of the sort: token t, expert e
    down:         y[p] = weight[p] * x[i] @ down[e].T             p: its place before the sort

P pairs, E experts, N outputs of a matrix, K inputs. Weights are packed as int4_packing.py says, in
ceil(K / 128) blocks; numbers are those of quantize_int4.py or mxfp4.py. Both products may have biases;
moe_gate.py has the activations. Tiles and their experts are found as in moe_gemm.py; experts without rows are
never read.

Packed weights become 16-bit numbers in registers, the tall operand of the tensor cores; rows are the narrow
one. Scales are applied to each group's sum in float32.

Cost: N * K / 2 bytes for every expert with rows, and as many numbers to make; 2 * P * N * K FLOP.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportArgumentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.e2m1_packing import e2m1_quarters, place_of_scale, scales_as_f32
from triton_kernels.gpu import Gpu
from triton_kernels.int4_packing import (
    BLOCK,
    BLOCK_BYTES,
    QUARTER,
    block_values,
    int4_divisor,
    int4_quarters,
)
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate, bent_gate, bent_up
from triton_kernels.moe_gemm import _find_tile, _most_tiles
from triton_kernels.moe_route import Routing, expert_lanes

_BLOCK = tl.constexpr(BLOCK)
_QUARTER = tl.constexpr(QUARTER)


class Int4GemmConfig(NamedTuple):
    """A launch configuration of one of the two products."""

    block_m: int  # pairs
    block_n: int  # columns of the result, each a gate and an up column or one of down
    num_warps: int
    num_stages: int
    group_m: int = 8
    tma: bool = True  # weights by tensor descriptors


class PackedExperts(NamedTuple):
    """All experts' matrices of one kind, [N, K] each; contiguous."""

    packed: Tensor  # uint8 [E, ceil(K / 128), N, 64]
    scales: Tensor
    """[E, ceil(K / 128) * 128 / group, N] of any floating type; of MXFP4, whose groups have 32 inputs, int32
    [E, ceil(K / 128), N], as e2m1_packing.pack_scales makes them."""
    zeros: Tensor | None = None  # like scales, as Int4Weight's
    bias: Tensor | None = None  # [E, N]

    @property
    def is_mxfp4(self) -> bool:
        """The numbers are e2m1, the scales e8m0."""
        return self.scales.dtype == torch.int32

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return QUARTER if self.is_mxfp4 else self.packed.shape[1] * BLOCK // self.scales.shape[1]


def int4_gemm_that_fits(config: Int4GemmConfig, gpu: Gpu, *, gated: bool) -> Int4GemmConfig:
    """The configuration as this GPU can run it: without TMA, with smaller tiles or fewer stages."""
    tiles = 2 if gated else 1
    if not gpu.multiplies_from_shared:
        # More than 32 accumulators a thread leave too few registers for the numbers made of weights.
        block_m = min(config.block_m, 64)
        most = 32 * 32 * config.num_warps // (block_m * tiles)
        config = config._replace(block_m=block_m, block_n=max(16, min(config.block_n, most)))
    stage_bytes = BLOCK_BYTES * config.block_n * tiles + 2 * BLOCK * config.block_m
    # Packed weights go through registers; numbers made of them may go through shared memory once more.
    others = BLOCK_BYTES * config.block_n * (tiles if gpu.multiplies_from_shared else 4)
    stages = gpu.stages_that_fit(config.num_stages, stage_bytes, others)
    return config._replace(num_stages=stages, tma=config.tma and gpu.has_tma)


@triton.jit
def _product(numbers, x, acc):
    return tl.dot(numbers, x.T, acc, input_precision="ieee")


@triton.jit
def _added(acc, words, x, values, GROUP: tl.constexpr, MXFP4: tl.constexpr):
    """acc [outputs, rows] and one block's products; x [rows, 32] of each quarter."""
    x0, x1, x2, x3 = x
    dtype: tl.constexpr = x0.dtype
    s0, s1, s2, s3, z0, z1, z2, z3 = values
    if MXFP4:
        w0, w1, w2, w3 = e2m1_quarters(words, dtype)
        s0, s1, s2, s3 = scales_as_f32(s0)
    else:
        w0, w1, w2, w3 = int4_quarters(words, z0, z1, z2, z3, dtype)
    none = tl.zeros_like(acc)
    if GROUP == _QUARTER:
        acc += _product(w0, x0, none) * s0.to(tl.float32)
        acc += _product(w1, x1, none) * s1.to(tl.float32)
        acc += _product(w2, x2, none) * s2.to(tl.float32)
        return acc + _product(w3, x3, none) * s3.to(tl.float32)
    half = _product(w1, x1, _product(w0, x0, none))
    if GROUP == _BLOCK:
        return acc + _product(w3, x3, _product(w2, x2, half)) * s0.to(tl.float32)
    acc += half * s0.to(tl.float32)
    return acc + _product(w3, x3, _product(w2, x2, none)) * s2.to(tl.float32)


@triton.jit
def _place_of_scale(outputs, N: tl.constexpr, MXFP4: tl.constexpr):
    return place_of_scale(outputs, N) if MXFP4 else outputs


@triton.jit
def _x_quarters(pointers, start, lanes, K: tl.constexpr, EVEN: tl.constexpr):
    """The columns of x that meet a block's quarters, [rows, 32] each."""
    if EVEN:
        return (
            tl.load(pointers + start),
            tl.load(pointers + (start + _QUARTER)),
            tl.load(pointers + (start + 2 * _QUARTER)),
            tl.load(pointers + (start + 3 * _QUARTER)),
        )
    else:
        # One answer for a quarter that is there as a whole, or the compiler copies number by number.
        inside = (lanes + start)[None, :] if (K + _QUARTER) % _QUARTER else start
        return (
            tl.load(pointers + start, inside < K, other=0.0),
            tl.load(pointers + (start + _QUARTER), inside + _QUARTER < K, other=0.0),
            tl.load(pointers + (start + 2 * _QUARTER), inside + 2 * _QUARTER < K, other=0.0),
            tl.load(pointers + (start + 3 * _QUARTER), inside + 3 * _QUARTER < K, other=0.0),
        )


@triton.jit
def _experts_int4_kernel(
    x_ptr,
    weight,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    order_ptr,
    pair_weight_ptr,
    expert_end_ptr,
    x_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MXFP4: tl.constexpr,
    GATED: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """N: columns of the result. A gated weight has 2 * N outputs."""
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    OUTPUTS: tl.constexpr = 2 * N if GATED else N
    BLOCKS: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    EVEN: tl.constexpr = BLOCKS * _BLOCK == K
    dtype: tl.constexpr = x_ptr.dtype.element_ty
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
        lanes = tl.arange(0, _QUARTER)
        x_ptrs = x_ptr + read.to(tl.int64)[:, None] * x_stride + lanes[None, :]
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        there_columns = tl.minimum(columns, N - 1)
        first = expert * BLOCKS  # of the expert's packed blocks
        if not TMA:
            places = (first.to(tl.int64) * OUTPUTS + there_columns)[:, None] * _QUARTER + lanes[None, :]
            w_ptrs = weight + places
        VALUES: tl.constexpr = _BLOCK if MXFP4 else GROUP  # MXFP4's scales of a block are one word
        of_expert = expert.to(tl.int64) * (BLOCKS * _BLOCK // VALUES * OUTPUTS)
        scales = scale_ptr + of_expert + _place_of_scale(there_columns, OUTPUTS, MXFP4)
        zeros = zero_ptr + of_expert + there_columns
        values = block_values(scales, zeros, 0, OUTPUTS, dtype, VALUES, HAS_ZEROS)
        up_values = values
        up_scales = scales
        if GATED:
            up_scales = scale_ptr + of_expert + _place_of_scale(there_columns + N, OUTPUTS, MXFP4)
            up_values = block_values(up_scales, zeros + N, 0, OUTPUTS, dtype, VALUES, HAS_ZEROS)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for block in range(0, BLOCKS):
            x = _x_quarters(x_ptrs, block * _BLOCK, lanes, K, EVEN)
            if TMA:
                words = weight.load([(first + block) * OUTPUTS + n * BLOCK_N, 0])
            else:
                words = tl.load(w_ptrs + block * (OUTPUTS * _QUARTER))
            # Scales come one turn ahead, because the compiler does not fetch them with the tiles.
            ahead = tl.minimum(block + 1, BLOCKS - 1)
            next_values = block_values(scales, zeros, ahead, OUTPUTS, dtype, VALUES, HAS_ZEROS)
            acc = _added(acc, words, x, values, GROUP, MXFP4)
            values = next_values
            if GATED:
                if TMA:
                    words = weight.load([(first + block) * OUTPUTS + N + n * BLOCK_N, 0])
                else:
                    words = tl.load(w_ptrs + (block * OUTPUTS + N) * _QUARTER)
                next_values = block_values(up_scales, zeros + N, ahead, OUTPUTS, dtype, VALUES, HAS_ZEROS)
                up = _added(up, words, x, up_values, GROUP, MXFP4)
                up_values = next_values
        if not MXFP4:
            acc *= int4_divisor(dtype)
            up *= int4_divisor(dtype)
        if HAS_BIAS:
            bias = bias_ptr + expert * OUTPUTS + there_columns
            acc += tl.load(bias).to(tl.float32)[:, None]
            if GATED:
                up += tl.load(bias + N).to(tl.float32)[:, None]
        written = (rows < row_end)[None, :] & (columns < N)[:, None]
        if GATED:
            y = bent_gate(acc, GATE, ALPHA, LIMIT) * bent_up(up, GATE, LIMIT)
            y_ptrs = y_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        else:
            pairs = tl.load(order_ptr + rows, rows < row_end, other=0)
            y = acc * tl.load(pair_weight_ptr + pairs, rows < row_end, other=0.0)[None, :]
            y_ptrs = y_ptr + pairs.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), written)


def multiply_experts_int4(
    x: Tensor,
    weight: PackedExperts,
    routing: Routing,
    config: Int4GemmConfig,
    *,
    gated: bool,
    gate: Gate = SILU,
) -> Tensor:
    """The products of rows and each pair's expert, [P, N] of x's dtype, on any device.

    Args:
        x: rows of tokens if `gated`, else of pairs in sorted order; they may be strided.
        weight: of N outputs, or of 2 * N if `gated`; then y is in sorted order, else in that before.
        gate: the activation, if `gated`.
    """
    num_experts, _, outputs, _ = weight.packed.shape
    results = outputs // 2 if gated else outputs
    num_pairs = routing.order.shape[0]
    y = torch.empty((num_pairs, results), dtype=x.dtype, device=x.device)
    tiles = _most_tiles(num_pairs, num_experts, config.block_m)
    words = weight.packed.view(torch.int16)
    packed: Tensor | TensorDescriptor = words
    if config.tma:
        packed = TensorDescriptor.from_tensor(words.view(-1, QUARTER), [config.block_n, QUARTER])
    _experts_int4_kernel[(tiles * ceil_div(results, config.block_n),)](
        x,
        packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if weight.bias is None else weight.bias,
        y,
        routing.order,
        routing.weights,
        routing.expert_end,
        x.stride(0),
        N=results,
        K=x.shape[1],
        E=num_experts,
        TOP_K=routing.experts.shape[1],
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=weight.bias is not None,
        MXFP4=weight.is_mxfp4,
        GATED=gated,
        GATE=int(gate.kind),
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        TMA=config.tma,
        BLOCK_E=expert_lanes(num_experts),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y
