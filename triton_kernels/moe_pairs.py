"""A mixture of experts for one to a few tokens: every (token, expert) pair by itself, no sort, two launches.

    hidden[t, s] = silu(gate[e] @ x[t]) * (up[e] @ x[t])          e = the s-th expert of token t
    out[t]       = sum over s of weight[t, s] * down[e] @ hidden[t, s]

T tokens, E experts, M model width, F expert width; gate[e] and up[e] are the upper and lower F rows of
gate_up[e]. Routing as in moe_route.py, found anew by each program of the first launch: comparing all pairs
of logits ranks them without a chain of reductions, and costs less than a launch. Float32 inside; hidden and
out are rounded once each.

Cost: the weights of each pair's expert: where tokens share an expert, once more from L2. Memory bound; matrix
and vector are multiplied on the ordinary cores, straight from registers.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare; range yields no int
# in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.moe_route import expert_lanes


class PairsConfig(NamedTuple):
    """A launch configuration of moe_pairs; weights in flight are block_n * block_k of each matrix."""

    up_block_n: int = 16
    up_block_k: int = 512
    up_warps: int = 4
    down_block_n: int = 8
    down_block_k: int = 256
    down_warps: int = 8
    overlap: bool = True  # start the second launch during the first


@triton.jit
def _rank_experts(logits_ptr, ids, other_ids, E: tl.constexpr):
    """(place of each expert by logit, the lowest id first among equals, softmax numerators, top logit)."""
    logits = tl.load(logits_ptr + ids, ids < E, other=float("-inf")).to(tl.float32)
    other = tl.load(logits_ptr + other_ids, other_ids < E, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    other = tl.where(other == other, other, float("-inf"))
    ahead = other[:, None] > logits[None, :]
    ahead = ahead | ((other[:, None] == logits[None, :]) & (other_ids[:, None] < ids[None, :]))
    top = tl.max(logits, 0)
    mass = tl.exp(logits - tl.where(top > float("-inf"), top, 0.0))
    return tl.sum(ahead.to(tl.int32), 0), mass, top


@triton.jit
def _pairs_up_kernel(
    x_ptr,
    logits_ptr,
    gate_up_ptr,
    hidden_ptr,
    x_stride,
    logits_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    pair = tl.program_id(1)
    token = (pair // TOP_K).to(tl.int64)
    ids = tl.arange(0, BLOCK_E)
    rank, _, top = _rank_experts(logits_ptr + token * logits_stride, ids, tl.arange(0, BLOCK_E), E)
    if top > float("-inf"):
        expert = tl.sum(tl.where(rank == pair % TOP_K, ids, 0), 0)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        lanes = tl.arange(0, BLOCK_K)
        gate_ptrs = gate_up_ptr + expert.to(tl.int64) * (2 * F * M) + columns[:, None] * M + lanes[None, :]
        gate_sum = tl.zeros([BLOCK_N], tl.float32)
        up_sum = tl.zeros([BLOCK_N], tl.float32)
        for k0 in range(0, M, BLOCK_K):
            if M % BLOCK_K == 0 and F % BLOCK_N == 0:
                gate = tl.load(gate_ptrs + k0)
                up = tl.load(gate_ptrs + F * M + k0)
                x = tl.load(x_ptr + token * x_stride + k0 + lanes)
            else:
                mask = (columns < F)[:, None] & (k0 + lanes < M)[None, :]
                gate = tl.load(gate_ptrs + k0, mask, other=0.0)
                up = tl.load(gate_ptrs + F * M + k0, mask, other=0.0)
                x = tl.load(x_ptr + token * x_stride + k0 + lanes, k0 + lanes < M, other=0.0)
            x = x.to(tl.float32)[None, :]
            gate_sum += tl.sum(gate.to(tl.float32) * x, 1)
            up_sum += tl.sum(up.to(tl.float32) * x, 1)
        hidden = gate_sum * tl.sigmoid(gate_sum) * up_sum
        hidden_ptrs = hidden_ptr + pair.to(tl.int64) * F + columns
        tl.store(hidden_ptrs, hidden.to(hidden_ptr.dtype.element_ty), columns < F)


@triton.jit
def _pairs_down_kernel(
    hidden_ptr,
    logits_ptr,
    down_ptr,
    out_ptr,
    logits_stride,
    M: tl.constexpr,
    F: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    ids = tl.arange(0, BLOCK_E)
    rank, mass, top = _rank_experts(logits_ptr + token * logits_stride, ids, tl.arange(0, BLOCK_E), E)
    total = tl.sum(tl.where(rank < TOP_K, mass, 0.0), 0) if RENORMALIZE else tl.sum(mass, 0)
    slots = tl.arange(0, BLOCK_S)
    mine = slots[:, None] == rank[None, :]
    expert = tl.sum(tl.where(mine, ids[None, :], 0), 1)
    weights = tl.sum(tl.where(mine, mass[None, :], 0.0), 1) / total
    routed = slots < tl.where(top > float("-inf"), TOP_K, 0)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, BLOCK_K)
    rows = expert.to(tl.int64)[:, None] * M + columns[None, :]
    down_ptrs = down_ptr + rows[:, :, None] * F + lanes[None, None, :]
    hidden_ptrs = hidden_ptr + (token * TOP_K + slots)[:, None] * F + lanes[None, :]
    row_mask = (routed[:, None] & (columns < M)[None, :])[:, :, None]
    # The first weights are on their way while the other kernel still computes what they are multiplied with.
    down = tl.load(down_ptrs, row_mask & (lanes < F)[None, None, :], other=0.0)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK_S, BLOCK_N, BLOCK_K], tl.float32)
    for k0 in tl.static_range(0, F, BLOCK_K):
        in_row = k0 + lanes < F
        if k0 > 0:
            down = tl.load(down_ptrs + k0, row_mask & in_row[None, None, :], other=0.0)
        hidden = tl.load(hidden_ptrs + k0, routed[:, None] & in_row[None, :], other=0.0)
        acc += down.to(tl.float32) * hidden.to(tl.float32)[:, None, :]
    out = tl.sum(tl.where(routed[:, None], tl.sum(acc, 2) * weights[:, None], 0.0), 0)
    tl.store(out_ptr + token * M + columns, out.to(out_ptr.dtype.element_ty), columns < M)


def _can_overlap(device: torch.device) -> bool:
    """Whether a kernel can start before the one it depends on has ended (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def moe_pairs_triton(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    renormalize: bool,
    config: PairsConfig,
) -> Tensor:
    """The whole mixture, [T, M] of x [T, M], logits [T, E], gate_up [E, 2F, M], down [E, M, F]."""
    num_tokens, width = x.shape
    num_experts, _, expert_width = down.shape
    num_pairs = num_tokens * top_k
    hidden = torch.empty((num_pairs, expert_width), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    overlap = config.overlap and _can_overlap(x.device)
    _pairs_up_kernel[(ceil_div(expert_width, config.up_block_n), num_pairs)](
        x,
        logits,
        gate_up,
        hidden,
        x.stride(0),
        logits.stride(0),
        width,
        expert_width,
        num_experts,
        top_k,
        overlap,
        expert_lanes(num_experts),
        config.up_block_n,
        min(config.up_block_k, next_power_of_2(width)),
        num_warps=config.up_warps,
    )
    _pairs_down_kernel[(ceil_div(width, config.down_block_n), num_tokens)](
        hidden,
        logits,
        down,
        out,
        logits.stride(0),
        width,
        expert_width,
        num_experts,
        top_k,
        renormalize,
        overlap,
        expert_lanes(num_experts),
        next_power_of_2(top_k),
        config.down_block_n,
        min(config.down_block_k, next_power_of_2(expert_width)),
        num_warps=config.down_warps,
        launch_pdl=overlap,
    )
    return out
