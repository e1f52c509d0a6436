"""The matrix products of a mixture of experts, over (token, expert) pairs sorted by expert.

    hidden[i]    = silu(x[t] @ gate[e].T) * (x[t] @ up[e].T)    i-th pair in sorted order: token t, expert e
    partial[p]   = weight[p] * hidden[i] @ down[e].T            p = t * top_k + s, its place before the sort
                   both products with a bias of the expert, if there is one; moe_gate.py has other activations
    out[t]       = sum over s of partial[t, s], s ascending, and at last a shared expert's times its weight

P pairs, E experts, M model width, F expert width; gate[e] and up[e] are the upper and lower F rows of
gate_up[e]. Float32 inside; hidden, partial and out are each rounded once to x's dtype. Any M and F that are
multiples of 16.

An expert's rows are cut into tiles of BLOCK_M, and a program finds its tile by a prefix sum over `expert_end`
(one vector load). The grid is an upper bound for every routing; programs without a tile exit at once. Tile
rows past the expert's last row are not stored, and experts without rows are never read. Tiles run in groups
of GROUP_M along M, so that concurrent programs share weights and tokens in L2.

Cost: weights of the experts hit, once (decode: memory bound); 6 * P * M * F FLOP (prefill: arithmetic).
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

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.gpu import Gpu
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.moe_gate import SILU, Gate, bent_gate, bent_up
from triton_kernels.moe_route import Routing, expert_lanes


class GemmConfig(NamedTuple):
    """A launch configuration of one of the two products."""

    block_m: int  # pairs; from 64 on, Hopper's matrix instructions
    block_n: int  # columns of hidden (each a gate and an up column) or of out
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    tma: bool = True  # weights by tensor descriptors


def gemm_that_fits(config: GemmConfig, gpu: Gpu, element_size: int, *, gated: bool) -> GemmConfig:
    """The configuration as this GPU can run it: without TMA, with smaller tiles or fewer stages.

    Args:
        gated: the product is the one of gate and up, which has two tiles of weights and two of sums.
    """
    if not gpu.multiplies_from_shared:
        tiles = 2 if gated else 1
        # More than 64 accumulators a thread leave too few registers for the operands.
        most = 64 * 32 * config.num_warps // (config.block_m * tiles)
        config = config._replace(block_n=min(config.block_n, most))
    stages = gpu.stages_that_fit(config.num_stages, gemm_stage_bytes(config, element_size, gated=gated))
    return config._replace(num_stages=stages, tma=config.tma and gpu.has_tma)


def gemm_stage_bytes(config: GemmConfig, element_size: int, *, gated: bool) -> int:
    """Shared memory of one pipeline stage."""
    weight_rows = config.block_n * (2 if gated else 1)
    return element_size * config.block_k * (config.block_m + weight_rows)


@triton.jit
def _find_tile(
    starts, ends, experts, tile, NUM_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr
):
    """(expert, first row, end of the expert's rows, column block) of a tile; expert -1 past the last tile."""
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, 0)
    num_m = tl.sum(tiles, 0)
    group = tile // (GROUP_M * NUM_N)
    group_size = tl.maximum(tl.minimum(num_m - group * GROUP_M, GROUP_M), 1)
    within = tile % (GROUP_M * NUM_N)
    m = group * GROUP_M + within % group_size
    n = within // group_size
    expert = tl.sum((tile_ends <= m).to(tl.int32), 0)
    mine = experts == expert
    row_start = tl.sum(tl.where(mine, starts, 0), 0)
    row_end = tl.sum(tl.where(mine, ends, 0), 0)
    first_tile = tl.sum(tl.where(mine, tile_ends - tiles, 0), 0)
    expert = tl.where(tile < num_m * NUM_N, expert, -1)
    return expert, row_start + (m - first_tile) * BLOCK_M, row_end, n


@triton.jit
def _gate_up_kernel(
    x_ptr,
    weight,
    hidden_ptr,
    order_ptr,
    expert_end_ptr,
    bias_ptr,
    x_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    NUM_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(expert_end_ptr + experts, experts < E, other=0)
    starts = tl.load(expert_end_ptr + experts - 1, (experts > 0) & (experts < E), other=0)
    expert, row, row_end, n = _find_tile(starts, ends, experts, tl.program_id(0), NUM_N, BLOCK_M, GROUP_M)
    if expert >= 0:
        rows = row + tl.arange(0, BLOCK_M)
        # Rows past the expert's last row read the last row instead, which is loaded anyway.
        pairs = tl.load(order_ptr + tl.minimum(rows, row_end - 1))
        lanes = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + (pairs // TOP_K).to(tl.int64)[:, None] * x_stride + lanes[None, :]
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_row = expert * (2 * F) + n * BLOCK_N
        if not TMA:
            weight_rows = expert.to(tl.int64) * (2 * F) + columns
            gate_ptrs = weight + weight_rows[:, None] * M + lanes[None, :]
        gate_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, M, BLOCK_K):
            if M % BLOCK_K == 0:
                x = tl.load(x_ptrs + k0)
            else:
                x = tl.load(x_ptrs + k0, (k0 + lanes < M)[None, :], other=0.0)
            if TMA:
                gate = weight.load([gate_row, k0])
                up = weight.load([gate_row + F, k0])
            elif M % BLOCK_K == 0 and F % BLOCK_N == 0:
                gate = tl.load(gate_ptrs + k0)
                up = tl.load(gate_ptrs + F * M + k0)
            else:
                mask = (columns < F)[:, None] & (k0 + lanes < M)[None, :]
                gate = tl.load(gate_ptrs + k0, mask, other=0.0)
                up = tl.load(gate_ptrs + F * M + k0, mask, other=0.0)
            gate_acc = tl.dot(x, tl.trans(gate), gate_acc, input_precision="ieee")
            up_acc = tl.dot(x, tl.trans(up), up_acc, input_precision="ieee")
        if BIAS:
            bias_ptrs = bias_ptr + expert * (2 * F) + columns
            gate_acc += tl.load(bias_ptrs, columns < F, other=0.0).to(tl.float32)[None, :]
            up_acc += tl.load(bias_ptrs + F, columns < F, other=0.0).to(tl.float32)[None, :]
        hidden = bent_gate(gate_acc, GATE, ALPHA, LIMIT) * bent_up(up_acc, GATE, LIMIT)
        hidden = hidden.to(hidden_ptr.dtype.element_ty)
        mask = (rows < row_end)[:, None] & (columns < F)[None, :]
        tl.store(hidden_ptr + rows.to(tl.int64)[:, None] * F + columns[None, :], hidden, mask)


@triton.jit
def _down_kernel(
    hidden,
    weight,
    partial_ptr,
    order_ptr,
    pair_weight_ptr,
    expert_end_ptr,
    bias_ptr,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    NUM_N: tl.constexpr = (M + BLOCK_N - 1) // BLOCK_N
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(expert_end_ptr + experts, experts < E, other=0)
    starts = tl.load(expert_end_ptr + experts - 1, (experts > 0) & (experts < E), other=0)
    expert, row, row_end, n = _find_tile(starts, ends, experts, tl.program_id(0), NUM_N, BLOCK_M, GROUP_M)
    if expert >= 0:
        rows = row + tl.arange(0, BLOCK_M)
        lanes = tl.arange(0, BLOCK_K)
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
        if not TMA:
            there = tl.minimum(rows, row_end - 1).to(tl.int64)
            hidden_ptrs = hidden + there[:, None] * F + lanes[None, :]
            weight_rows = expert.to(tl.int64) * M + columns
            weight_ptrs = weight + weight_rows[:, None] * F + lanes[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, F, BLOCK_K):
            if TMA:
                h = hidden.load([row, k0])
                w = weight.load([expert * M + n * BLOCK_N, k0])
            elif F % BLOCK_K == 0 and M % BLOCK_N == 0:
                h = tl.load(hidden_ptrs + k0)
                w = tl.load(weight_ptrs + k0)
            else:
                h = tl.load(hidden_ptrs + k0, (k0 + lanes < F)[None, :], other=0.0)
                mask = (columns < M)[:, None] & (k0 + lanes < F)[None, :]
                w = tl.load(weight_ptrs + k0, mask, other=0.0)
            acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
        if BIAS:
            bias = tl.load(bias_ptr + expert * M + columns, columns < M, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        there = rows < row_end
        pairs = tl.load(order_ptr + rows, there, other=0)
        acc = acc * tl.load(pair_weight_ptr + pairs, there, other=0.0)[:, None]
        out_ptrs = partial_ptr + pairs.to(tl.int64)[:, None] * M + columns[None, :]
        tl.store(out_ptrs, acc.to(partial_ptr.dtype.element_ty), there[:, None] & (columns < M)[None, :])


@triton.jit
def _sum_slots_kernel(
    partial_ptr,
    experts_ptr,
    shared_ptr,
    logits_ptr,
    out_ptr,
    logits_stride,
    M: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = between_kernels(tl.program_id(0), EARLY).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        routed = tl.load(experts_ptr + pair) < E
        # Loaded even if nobody wrote it, so that this does not wait for what says so.
        y = tl.load(partial_ptr + pair * M + columns, columns < M, other=0.0)
        acc += tl.where(routed, y.to(tl.float32), 0.0)
    if SHARED:
        # Padding has no experts either, and may hold anything.
        somewhere = tl.load(experts_ptr + token * TOP_K) < E
        logit = tl.load(logits_ptr + token * logits_stride + E, somewhere, other=0.0).to(tl.float32)
        y = tl.load(shared_ptr + token * M + columns, (columns < M) & somewhere, other=0.0)
        acc += tl.sigmoid(logit) * y.to(tl.float32)
    tl.store(out_ptr + token * M + columns, acc.to(out_ptr.dtype.element_ty), columns < M)


def _most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most tiles that the pairs need: the last tile of every expert may be nearly empty."""
    hit = min(num_pairs, num_experts)
    return min(num_pairs, (num_pairs + hit * (block_m - 1)) // block_m)


def _rows_of(matrices: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A descriptor of the last dimension's rows, all of them in one column."""
    return TensorDescriptor.from_tensor(matrices.view(-1, matrices.shape[-1]), [block_rows, block_columns])


def gate_up_triton(
    x: Tensor,
    gate_up: Tensor,
    routing: Routing,
    config: GemmConfig,
    bias: Tensor | None = None,
    gate: Gate = SILU,
) -> Tensor:
    """hidden [P, F], in sorted order, of x [T, M], gate_up [E, 2F, M] and bias [E, 2F]; rows past the last
    are unset."""
    num_experts, double_width, width = gate_up.shape
    expert_width = double_width // 2
    num_pairs = routing.order.shape[0]
    hidden = torch.empty((num_pairs, expert_width), dtype=x.dtype, device=x.device)
    tiles = _most_tiles(num_pairs, num_experts, config.block_m)
    _gate_up_kernel[(tiles * ceil_div(expert_width, config.block_n),)](
        x,
        _rows_of(gate_up, config.block_n, config.block_k) if config.tma else gate_up,
        hidden,
        routing.order,
        routing.expert_end,
        x if bias is None else bias,
        x.stride(0),
        width,
        expert_width,
        num_experts,
        routing.experts.shape[1],
        bias is not None,
        int(gate.kind),
        gate.alpha,
        gate.limit,
        config.tma,
        expert_lanes(num_experts),
        config.block_m,
        config.block_n,
        config.block_k,
        config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return hidden


def down_triton(
    hidden: Tensor, down: Tensor, routing: Routing, config: GemmConfig, bias: Tensor | None = None
) -> Tensor:
    """partial [P, M], by token and slot, of hidden [P, F], down [E, M, F] and bias [E, M]."""
    num_experts, width, expert_width = down.shape
    num_pairs = routing.order.shape[0]
    partial = torch.empty((num_pairs, width), dtype=hidden.dtype, device=hidden.device)
    tiles = _most_tiles(num_pairs, num_experts, config.block_m)
    _down_kernel[(tiles * ceil_div(width, config.block_n),)](
        _rows_of(hidden, config.block_m, config.block_k) if config.tma else hidden,
        _rows_of(down, config.block_n, config.block_k) if config.tma else down,
        partial,
        routing.order,
        routing.weights,
        routing.expert_end,
        hidden if bias is None else bias,
        width,
        expert_width,
        num_experts,
        bias is not None,
        config.tma,
        expert_lanes(num_experts),
        config.block_m,
        config.block_n,
        config.block_k,
        config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return partial


def sum_slots_triton(
    partial: Tensor, routing: Routing, num_experts: int, shared: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """out [T, M] of partial [T * top_k, M].

    shared: what a shared expert makes of the tokens, [T, M] and contiguous, and the logits, whose column E
    is its gate's.
    """
    num_tokens, top_k = routing.experts.shape
    width = partial.shape[1]
    out = torch.empty((num_tokens, width), dtype=partial.dtype, device=partial.device)
    block_n = min(1024, next_power_of_2(width))
    of_shared, logits = shared or (partial, partial)
    _sum_slots_kernel[(num_tokens, ceil_div(width, block_n))](
        partial,
        routing.experts,
        of_shared,
        logits,
        out,
        logits.stride(0),
        width,
        num_experts,
        top_k,
        shared is not None,
        block_n,
        can_start_early(partial.device),
        num_warps=4,
    )
    return out
