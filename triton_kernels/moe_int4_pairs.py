"""A mixture of 4-bit experts over one to a few tokens of bfloat16: each pair separately, by warps.

    int4_pairs:  the whole mixture in two launches, without a sort, as moe_pairs.py

T tokens, E experts, N outputs of a matrix (gated: 2 * N), K inputs; N is a multiple of 16, x's rows lie in
pieces of 16 bytes. int4_warp_tiles.py says how warps multiply.

Each program finds the experts itself. The second launch starts during the first; before it waits, its first
weights and those of a token's second expert are on their way.

Cost: N * K / 2 bytes for every pair, memory bound; the tensor cores multiply eight equal rows.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, between_kernels, can_start_early
from triton_kernels.int4_packing import BLOCK
from triton_kernels.int4_warp_tiles import add_steps, fetch_step, lanes_of_matrix, no_sums, unscaled
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate
from triton_kernels.moe_int4_gemm import PackedExperts
from triton_kernels.moe_int4_warp import (
    ExpertsWarpConfig,
    first_blocks_into_l2,
    gate_and_up,
    kind_of,
    tensors_of,
)
from triton_kernels.moe_route import expert_lanes, key_logits, load_keys, pick_expert
from triton_kernels.warp_tiles import TILE, place_in_tile, sum_of_warps

_BLOCK = tl.constexpr(BLOCK)
_TILE = tl.constexpr(TILE)


class Int4WarpsConfig(NamedTuple):
    """A launch configuration of both products."""

    gate_up: ExpertsWarpConfig
    down: ExpertsWarpConfig


def default_pairs_config(weight: PackedExperts, expert_width: int) -> Int4WarpsConfig:
    """The configuration of separate pairs if none is given; measured on an H200."""
    up, down = (80, 128) if weight.is_mxfp4 else (None, None)
    unroll = min(3, ceil_div(expert_width, 8 * BLOCK))
    return Int4WarpsConfig(
        ExpertsWarpConfig(1, 4, 1, registers=up), ExpertsWarpConfig(1, 8, unroll, registers=down)
    )


@triton.jit
def _pairs_up_int4_kernel(
    x_ptr, logits_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, hidden_ptr, x_stride, logits_stride,
    F: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    ids = tl.arange(0, BLOCK_E)
    lane = tl.arange(0, 32 * WARPS) % 32
    warp = tl.arange(0, 32 * WARPS) // 32
    slot = tl.program_id(1)
    start = tl.minimum(tl.program_id(0) * (TILES * _TILE), F - TILES * _TILE)
    token = between_kernels(tl.program_id(2), EARLY)
    keys = load_keys(logits_ptr + token.to(tl.int64) * logits_stride, ids, E)
    expert, key, keys = pick_expert(keys, ids, BLOCK_E)
    if key_logits(key) > float("-inf"):
        for _ in range(slot):
            expert, key, keys = pick_expert(keys, ids, BLOCK_E)
        matrix = lanes_of_matrix(w_ptr, scale_ptr, zero_ptr, expert, start, 2 * F, K, GROUP, MXFP4, WARPS)
        weight = fetch_step(matrix, warp, 2 * F, F, K, GROUP, HAS_ZEROS, MXFP4, TILES, 2, UNROLL, WARPS)
        # All eight rows of a tile are the token's.
        row = x_ptr.to(tl.int64) + token.to(tl.int64) * x_stride * 2 + lane % 4 * 16
        acc, weight = add_steps(
            no_sums(1, TILES, 2, WARPS), weight, (row,), matrix, matrix, 2 * F, F, K, GROUP, HAS_ZEROS, MXFP4,
            1, TILES, 2, UNROLL, WARPS, False, True,
        )  # fmt: skip
        outputs, rows = place_in_tile()
        for tile in tl.static_range(TILES):
            columns = start + tile * _TILE + outputs
            gate = unscaled(sum_of_warps(acc[2 * tile], WARPS), MXFP4)
            up = unscaled(sum_of_warps(acc[2 * tile + 1], WARPS), MXFP4)
            y = gate_and_up(gate, up, bias_ptr + expert * (2 * F) + columns, F, HAS_BIAS, GATE, ALPHA, LIMIT)
            y_ptrs = hidden_ptr + (token * TOP_K + slot) * F + columns + rows * 0
            tl.store(y_ptrs, y.to(hidden_ptr.dtype.element_ty), rows == 0)


@triton.jit
def _chosen(values, slot, TOP_K: tl.constexpr):
    """values[slot]."""
    one = values[0]
    for other in tl.static_range(1, TOP_K):
        one = tl.where(slot == other, values[other], one)
    return one


@triton.jit
def _pairs_down_int4_kernel(
    hidden_ptr, logits_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, logits_stride,
    N: tl.constexpr, F: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr,
    BLOCK_E: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    ids = tl.arange(0, BLOCK_E)
    lane = tl.arange(0, 32 * WARPS) % 32
    warp = tl.arange(0, 32 * WARPS) // 32
    start = tl.minimum(tl.program_id(0) * (TILES * _TILE), N - TILES * _TILE)
    token = tl.program_id(1)
    # The kernel that wrote the logits has ended: the first kernel waits for it before it lets this one begin.
    keys = load_keys(logits_ptr + token.to(tl.int64) * logits_stride, ids, E)
    top = key_logits(tl.max(keys, 0))
    somewhere = top > float("-inf")
    all_masses = tl.where(ids < E, tl.exp(key_logits(keys) - top), 0.0)
    total = 0.0 if RENORMALIZE else tl.sum(all_masses, 0)
    experts = ()
    masses = ()
    for _ in tl.static_range(TOP_K):
        expert, key, keys = pick_expert(keys, ids, BLOCK_E)
        mass = tl.exp(key_logits(key) - top)
        if RENORMALIZE:
            total += mass
        experts = experts + (expert,)  # noqa: RUF005
        masses = masses + (mass,)  # noqa: RUF005
    outputs, rows = place_in_tile()
    # As many zeros as a tile's sums.
    out = ()
    for _ in tl.static_range(TILES):
        out = out + ((rows + outputs).to(tl.float32) * 0.0,)  # noqa: RUF005
    # A token without experts loads some, too, and does not use them.
    matrix = lanes_of_matrix(w_ptr, scale_ptr, zero_ptr, experts[0], start, N, F, GROUP, MXFP4, WARPS)
    weight = fetch_step(matrix, warp, N, N, F, GROUP, HAS_ZEROS, MXFP4, TILES, 1, UNROLL, WARPS)
    if EARLY and TOP_K > 1:
        BLOCKS: tl.constexpr = (F + _BLOCK - 1) // _BLOCK
        first_blocks_into_l2(w_ptr, experts[1], start, N, F, TILES * _TILE, BLOCKS, 32 * WARPS)
    token = after_predecessor(token, EARLY)
    if somewhere:
        row = hidden_ptr.to(tl.int64) + token.to(tl.int64) * (TOP_K * F * 2) + lane % 4 * 16
        acc = no_sums(1, TILES, 1, WARPS)
        for slot in range(TOP_K):
            expert = _chosen(experts, tl.minimum(slot + 1, TOP_K - 1), TOP_K)
            following = lanes_of_matrix(w_ptr, scale_ptr, zero_ptr, expert, start, N, F, GROUP, MXFP4, WARPS)
            sums, weight = add_steps(
                no_sums(1, TILES, 1, WARPS), weight, (row + slot * (F * 2),), matrix, following, N, N, F,
                GROUP, HAS_ZEROS, MXFP4, 1, TILES, 1, UNROLL, WARPS, True, True,
            )  # fmt: skip
            matrix = following
            mass = _chosen(masses, slot, TOP_K)
            new = ()
            for tile in tl.static_range(TILES):
                a = acc[tile]
                b = sums[tile]
                new = new + (  # noqa: RUF005
                    (a[0] + mass * b[0], a[1] + mass * b[1], a[2] + mass * b[2], a[3] + mass * b[3]),
                )
            acc = new
        out = ()
        for tile in tl.static_range(TILES):
            y = unscaled(sum_of_warps(acc[tile], WARPS), MXFP4)
            if HAS_BIAS:
                for slot in tl.static_range(TOP_K):
                    bias = tl.load(bias_ptr + experts[slot] * N + start + tile * _TILE + outputs)
                    y += masses[slot] * bias.to(tl.float32)
            out = out + (y / total,)  # noqa: RUF005
    for tile in tl.static_range(TILES):
        y_ptrs = out_ptr + token.to(tl.int64) * N + start + tile * _TILE + outputs + rows * 0
        tl.store(y_ptrs, out[tile].to(out_ptr.dtype.element_ty), rows == 0)


def int4_pairs(
    x: Tensor,
    logits: Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    top_k: int,
    renormalize: bool,
    gate: Gate = SILU,
    config: Int4WarpsConfig | None = None,
) -> Tensor:
    """The whole mixture, [T, M] of x [T, M], logits [T, E]; see `suits_warps`."""
    num_tokens, width = x.shape
    num_experts, _, double, _ = gate_up.packed.shape
    half = double // 2
    config = config or default_pairs_config(gate_up, half)
    hidden = torch.empty((num_tokens * top_k, half), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    early = can_start_early(x.device)
    up_tiles, down_tiles = min(config.gate_up.tiles, half // TILE), min(config.down.tiles, width // TILE)
    shared = {"E": num_experts, "TOP_K": top_k, "BLOCK_E": expert_lanes(num_experts), "EARLY": early}
    _pairs_up_int4_kernel[(ceil_div(half, up_tiles * TILE), top_k, num_tokens)](
        x,
        logits,
        *tensors_of(gate_up, x),
        hidden,
        x.stride(0),
        logits.stride(0),
        F=half,
        K=width,
        **kind_of(gate_up),
        GATE=int(gate.kind),
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        TILES=up_tiles,
        UNROLL=config.gate_up.unroll,
        WARPS=config.gate_up.num_warps,
        **shared,
        num_warps=config.gate_up.num_warps,
        maxnreg=config.gate_up.registers,
    )
    _pairs_down_int4_kernel[(ceil_div(width, down_tiles * TILE), num_tokens)](
        hidden,
        logits,
        *tensors_of(down, x),
        out,
        logits.stride(0),
        N=width,
        F=half,
        RENORMALIZE=renormalize,
        **kind_of(down),
        TILES=down_tiles,
        UNROLL=config.down.unroll,
        WARPS=config.down.num_warps,
        **shared,
        num_warps=config.down.num_warps,
        launch_pdl=early,
        maxnreg=config.down.registers,
    )
    return out
