"""A mixture of 4-bit experts over few rows of bfloat16 an expert: warps, not shared memory.

    multiply_experts_warp:  as moe_int4_gemm.multiply_experts_int4, over pairs sorted by expert
    int4_pairs:             the whole mixture for one to a few tokens, each pair separately: no sort, two
                            launches, as moe_pairs.py

P pairs, E experts, N outputs of a matrix (gated: 2 * N), K inputs; N is a multiple of 16, x's rows lie in
pieces of 16 bytes. int4_warp_tiles.py says how warps multiply. A tile is TILES * 16 outputs of up to 16 rows
of one expert; the second eight rows are multiplied only if they are there. As many programs as fit the GPU
take tiles in turn, and load the next tile's first weights while they multiply the last of one.

int4_pairs: each program finds the experts itself. The second launch starts during the first, and its first
weights are on their way before it waits.

Cost: N * K / 2 bytes for every expert with rows (int4_pairs: for every pair), memory bound; the tensor cores
multiply eight rows at a time.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportOperatorIssue=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.early_start import after_predecessor, between_kernels, can_start_early
from triton_kernels.gpu import gpu_of
from triton_kernels.int4_packing import BLOCK
from triton_kernels.int4_warp_tiles import add_steps, fetch_step, lanes_of_matrix, no_sums, unscaled
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate, bent_gate, bent_up
from triton_kernels.moe_gemm import _most_tiles
from triton_kernels.moe_int4_gemm import PackedExperts
from triton_kernels.moe_route import Routing, expert_lanes, key_logits, load_keys, pick_expert
from triton_kernels.warp_tiles import ROWS, TILE, place_in_tile, sum_of_warps

TILE_ROWS = 2 * ROWS
"""Pairs of a program."""
FEW_ROWS = 4
"""Of an expert, on average: nearly all then have rows for one instruction only."""
_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)
_TILE_ROWS = tl.constexpr(TILE_ROWS)


class ExpertsWarpConfig(NamedTuple):
    """A launch configuration of one product."""

    tiles: int  # of 16 outputs, for each warp; of gate and of up each
    num_warps: int
    unroll: int  # blocks of 128 inputs that a warp loads at a time
    programs: int = 0  # of a multiprocessor, which take tiles in turn; not for separate pairs
    registers: int | None = None  # of a thread at most, so that all programs fit


class Int4WarpsConfig(NamedTuple):
    """A launch configuration of both products."""

    gate_up: ExpertsWarpConfig
    down: ExpertsWarpConfig


def default_sorted_config(weight: PackedExperts, num_pairs: int, gated: bool) -> ExpertsWarpConfig:
    """The configuration of sorted pairs if none is given; measured on an H200."""
    num_experts = weight.packed.shape[0]
    if weight.is_mxfp4 and num_pairs <= FEW_ROWS * num_experts:
        return ExpertsWarpConfig(1, 1, 1 if gated else 2, 20, 96)
    if weight.is_mxfp4:
        return ExpertsWarpConfig(1 if gated else 2, 1, 1, 16, 128)
    if weight.group < BLOCK:
        return ExpertsWarpConfig(1, 1, 1, 8)  # not measured; with more, ptxas takes a minute
    return ExpertsWarpConfig(1, 1, 1, 16, 128) if gated else ExpertsWarpConfig(1, 1, 2, 12, 168)


def default_pairs_config(expert_width: int) -> Int4WarpsConfig:
    """The configuration of separate pairs if none is given; measured on an H200."""
    steps = ceil_div(expert_width, 8 * BLOCK)
    return Int4WarpsConfig(ExpertsWarpConfig(1, 4, 1), ExpertsWarpConfig(1, 8, min(3, steps)))


def suits_warps(x: Tensor, gate_up: PackedExperts, down: PackedExperts) -> bool:
    """Whether these kernels can compute the mixture, however many rows it has."""
    return (
        x.dtype == torch.bfloat16
        and all(one.is_mxfp4 or one.scales.dtype == torch.bfloat16 for one in (gate_up, down))
        and gate_up.packed.shape[2] % (2 * TILE) == 0
        and down.packed.shape[2] % TILE == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and not knobs.runtime.interpret
    )


@triton.jit
def _gated(gate, up, bias, F: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
           LIMIT: tl.constexpr):  # fmt: skip
    if HAS_BIAS:
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + F).to(tl.float32)
    return bent_gate(gate, GATE, ALPHA, LIMIT) * bent_up(up, GATE, LIMIT)


@triton.jit
def _tile(tile, starts, ends, first_tiles, tile_ends, experts, N: tl.constexpr, TILES: tl.constexpr):
    """(expert, first row, end of the expert's rows, first output) of a tile; outputs change first."""
    NUM_N: tl.constexpr = (N + TILES * _TILE - 1) // (TILES * _TILE)
    place = tile // NUM_N
    expert = tl.minimum(tl.sum((tile_ends <= place).to(tl.int32), 0), experts.shape[0] - 1)
    mine = experts == expert
    row = tl.sum(tl.where(mine, starts - first_tiles * _TILE_ROWS, 0), 0) + place * _TILE_ROWS
    row_end = tl.sum(tl.where(mine, ends, 0), 0)
    # An expert's last tile may compute outputs again, to the same numbers.
    return expert, row, row_end, tl.minimum(tile % NUM_N * (TILES * _TILE), N - TILES * _TILE)


@triton.jit
def _rows_of_tile(order_ptr, row, row_end, TOP_K: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr):
    """Which rows of x are each lane's: of the first and of the second eight."""
    lane = tl.arange(0, 32 * WARPS) % 32
    # Rows past the expert's last row read the last row instead, which is loaded anyway.
    first = tl.maximum(tl.minimum(row + lane // 4, row_end - 1), 0)
    second = tl.maximum(tl.minimum(row + _ROWS + lane // 4, row_end - 1), 0)
    if GATED:
        first = tl.load(order_ptr + first) // TOP_K
        second = tl.load(order_ptr + second) // TOP_K
    return first, second


@triton.jit
def _multiply_tile(
    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
    expert, row, row_end, start, read,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    MXFP4: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROW_TILES: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Store a tile's results; returns the first step of the following one."""
    HALVES: tl.constexpr = 2 if GATED else 1
    lane = tl.arange(0, 32 * WARPS) % 32
    rows_of_x = ()
    for row_tile in tl.static_range(ROW_TILES):
        address = x_ptr.to(tl.int64) + read[row_tile].to(tl.int64) * x_stride * 2 + lane % 4 * 16
        rows_of_x = rows_of_x + (address,)  # noqa: RUF005 (no unpacking in kernels)
    acc, ahead = add_steps(
        no_sums(ROW_TILES, TILES, HALVES, WARPS), weight, rows_of_x, matrix, following, N * HALVES, N, K,
        GROUP, HAS_ZEROS, MXFP4, ROW_TILES, TILES, HALVES, UNROLL, WARPS, True, True,
    )  # fmt: skip
    outputs, rows = place_in_tile()
    for row_tile in tl.static_range(ROW_TILES):
        places = row + row_tile * _ROWS + rows
        there = places < row_end
        for tile in tl.static_range(TILES):
            columns = start + tile * _TILE + outputs
            y = unscaled(sum_of_warps(acc[(row_tile * TILES + tile) * HALVES], WARPS), MXFP4)
            bias = bias_ptr + expert * (N * HALVES) + columns
            if GATED:
                up = unscaled(sum_of_warps(acc[(row_tile * TILES + tile) * HALVES + 1], WARPS), MXFP4)
                y = _gated(y, up, bias, N, HAS_BIAS, GATE, ALPHA, LIMIT)
                y_ptrs = y_ptr + places.to(tl.int64) * N + columns
            else:
                if HAS_BIAS:
                    y += tl.load(bias).to(tl.float32)
                pairs = tl.load(order_ptr + places, there, other=0)
                y *= tl.load(pair_weight_ptr + pairs, there, other=0.0)
                y_ptrs = y_ptr + pairs.to(tl.int64) * N + columns
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), there)
    return ahead


@triton.jit
def _experts_warp_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, expert_end_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, GATED: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """N: columns of the result. A gated weight has 2 * N outputs."""
    HALVES: tl.constexpr = 2 if GATED else 1
    NUM_N: tl.constexpr = (N + TILES * _TILE - 1) // (TILES * _TILE)
    program = after_predecessor(tl.program_id(0), EARLY)
    warp = tl.arange(0, 32 * WARPS) // 32
    experts = tl.arange(0, BLOCK_E)
    there = (experts < E) & (program >= 0)
    ends = tl.load(expert_end_ptr + experts, there, other=0)
    starts = tl.load(expert_end_ptr + experts - 1, there & (experts > 0), other=0)
    tiles = (ends - starts + _TILE_ROWS - 1) // _TILE_ROWS
    tile_ends = tl.cumsum(tiles, 0)
    first_tiles = tile_ends - tiles
    num_tiles = tl.sum(tiles, 0) * NUM_N
    if program < num_tiles:
        expert, row, row_end, start = _tile(program, starts, ends, first_tiles, tile_ends, experts, N, TILES)
        matrix = lanes_of_matrix(
            w_ptr, scale_ptr, zero_ptr, expert, start, N * HALVES, K, GROUP, MXFP4, WARPS
        )
        weight = fetch_step(
            matrix, warp, N * HALVES, N, K, GROUP, HAS_ZEROS, MXFP4, TILES, HALVES, UNROLL, WARPS
        )
        read = _rows_of_tile(order_ptr, row, row_end, TOP_K, GATED, WARPS)
        for tile in range(program, num_tiles, tl.num_programs(0)):
            next_tile = tl.minimum(tile + tl.num_programs(0), num_tiles - 1)
            next_expert, next_row, next_end, next_start = _tile(
                next_tile, starts, ends, first_tiles, tile_ends, experts, N, TILES
            )
            following = lanes_of_matrix(
                w_ptr, scale_ptr, zero_ptr, next_expert, next_start, N * HALVES, K, GROUP, MXFP4, WARPS
            )
            next_read = _rows_of_tile(order_ptr, next_row, next_end, TOP_K, GATED, WARPS)
            if row_end - row > _ROWS:
                weight = _multiply_tile(
                    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
                    expert, row, row_end, start, read, N, K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, GATED, GATE,
                    ALPHA, LIMIT, 2, TILES, UNROLL, WARPS,
                )  # fmt: skip
            else:
                weight = _multiply_tile(
                    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
                    expert, row, row_end, start, read, N, K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, GATED, GATE,
                    ALPHA, LIMIT, 1, TILES, UNROLL, WARPS,
                )  # fmt: skip
            expert, row, row_end, start = next_expert, next_row, next_end, next_start
            matrix = following
            read = next_read


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
            y = _gated(gate, up, bias_ptr + expert * (2 * F) + columns, F, HAS_BIAS, GATE, ALPHA, LIMIT)
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


def _kind(weight: PackedExperts) -> dict[str, Any]:
    """What kernels are compiled for of a weight's kind."""
    return {
        "GROUP": weight.group,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_BIAS": weight.bias is not None,
        "MXFP4": weight.is_mxfp4,
    }


def _tensors(weight: PackedExperts, instead: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What kernels read of a weight, `instead` for a bias that is not there."""
    return (
        weight.packed,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        instead if weight.bias is None else weight.bias,
    )


def multiply_experts_warp(
    x: Tensor,
    weight: PackedExperts,
    routing: Routing,
    config: ExpertsWarpConfig | None = None,
    *,
    gated: bool,
    gate: Gate = SILU,
) -> Tensor:
    """The products of rows and each pair's expert; see moe_int4_gemm.multiply_experts_int4, `suits_warps`."""
    num_experts, _, outputs, _ = weight.packed.shape
    results = outputs // 2 if gated else outputs
    num_pairs = routing.order.shape[0]
    config = config or default_sorted_config(weight, num_pairs, gated)
    y = torch.empty((num_pairs, results), dtype=x.dtype, device=x.device)
    tiles = min(config.tiles, results // TILE)
    programs = _most_tiles(num_pairs, num_experts, TILE_ROWS) * ceil_div(results, tiles * TILE)
    programs = min(programs, config.programs * gpu_of(x.device).multiprocessors)
    _experts_warp_kernel[(programs,)](
        x,
        *_tensors(weight, x),
        y,
        routing.order,
        routing.weights,
        routing.expert_end,
        x.stride(0),
        N=results,
        K=x.shape[1],
        E=num_experts,
        TOP_K=routing.experts.shape[1],
        **_kind(weight),
        GATED=gated,
        GATE=int(gate.kind),
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        BLOCK_E=expert_lanes(num_experts),
        TILES=tiles,
        UNROLL=config.unroll,
        WARPS=config.num_warps,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps,
        maxnreg=config.registers,
    )
    return y


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
    config = config or default_pairs_config(half)
    hidden = torch.empty((num_tokens * top_k, half), dtype=x.dtype, device=x.device)
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    early = can_start_early(x.device)
    up_tiles, down_tiles = min(config.gate_up.tiles, half // TILE), min(config.down.tiles, width // TILE)
    shared = {"E": num_experts, "TOP_K": top_k, "BLOCK_E": expert_lanes(num_experts), "EARLY": early}
    _pairs_up_int4_kernel[(ceil_div(half, up_tiles * TILE), top_k, num_tokens)](
        x,
        logits,
        *_tensors(gate_up, x),
        hidden,
        x.stride(0),
        logits.stride(0),
        F=half,
        K=width,
        **_kind(gate_up),
        GATE=int(gate.kind),
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        TILES=up_tiles,
        UNROLL=config.gate_up.unroll,
        WARPS=config.gate_up.num_warps,
        **shared,
        num_warps=config.gate_up.num_warps,
    )
    _pairs_down_int4_kernel[(ceil_div(width, down_tiles * TILE), num_tokens)](
        hidden,
        logits,
        *_tensors(down, x),
        out,
        logits.stride(0),
        N=width,
        F=half,
        RENORMALIZE=renormalize,
        **_kind(down),
        TILES=down_tiles,
        UNROLL=config.down.unroll,
        WARPS=config.down.num_warps,
        **shared,
        num_warps=config.down.num_warps,
        launch_pdl=early,
    )
    return out
