"""A mixture of 4-bit experts over few rows of bfloat16 an expert: warps, not shared memory.

    multiply_experts_warp:  as moe_int4_gemm.multiply_experts_int4, over pairs sorted by expert

P pairs, E experts, N outputs of a matrix (gated: 2 * N), K inputs; N is a multiple of 16, x's rows lie in
pieces of 16 bytes. int4_warp_tiles.py says how warps multiply. A tile is up to 16 rows of one expert and
TILES * 16 outputs for each of BESIDE groups of warps; the second eight rows are multiplied only if they are
there. As many programs as fit the GPU take tiles in turn, and load the next tile's first weights while they
multiply the last of one. If few tiles are left for the last turn, they are cut into tiles of 16 outputs for
each group. The second product starts during the first; its first weights are on their way before it waits.

Cost: N * K / 2 bytes for every expert with rows, memory bound; the tensor cores multiply eight rows at once.
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

from triton_kernels.early_start import (
    after_predecessor_here,
    between_kernels,
    can_start_early,
    fetch_into_l2,
)
from triton_kernels.gpu import gpu_of
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.int4_warp_tiles import add_steps, fetch_step, lanes_of_matrix, no_sums, unscaled
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate, bent_gate, bent_up
from triton_kernels.moe_gemm import _most_tiles
from triton_kernels.moe_int4_gemm import PackedExperts
from triton_kernels.moe_route import Routing, expert_lanes
from triton_kernels.warp_tiles import ROWS, TILE, place_in_tile, sum_of_warps

TILE_ROWS = 2 * ROWS
"""Pairs of a tile, at most."""
FEW_ROWS = 3
"""Of an expert, on average: nearly all then have rows for one instruction only."""
_BLOCK = tl.constexpr(BLOCK)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
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
    beside: int = 1  # groups of num_warps warps in a program, each of other outputs; not for separate pairs


def default_sorted_config(weight: PackedExperts, num_pairs: int, gated: bool) -> ExpertsWarpConfig:
    """The configuration of sorted pairs if none is given; measured on an H200."""
    per_expert = num_pairs / weight.packed.shape[0]
    if not weight.is_mxfp4 and weight.group < BLOCK:
        return ExpertsWarpConfig(1, 1, 1, 8)  # not measured; with more, ptxas takes a minute
    if weight.is_mxfp4 and per_expert <= FEW_ROWS:
        return ExpertsWarpConfig(1, 1, 1 if gated else 2, 20, 96)
    if gated:
        return ExpertsWarpConfig(1, 1, 1, 4, 128, beside=4)
    if weight.is_mxfp4:
        return ExpertsWarpConfig(3, 1, 1, 8, 128, beside=2)
    return ExpertsWarpConfig(2, 1, 1, 16, 128)


def suits_warps(x: Tensor, gate_up: PackedExperts, down: PackedExperts) -> bool:
    """Whether these kernels, and moe_int4_pairs.py's, can compute the mixture, however many rows it has."""
    return (
        x.dtype == torch.bfloat16
        and all(one.is_mxfp4 or one.scales.dtype == torch.bfloat16 for one in (gate_up, down))
        and gate_up.packed.shape[2] % (2 * TILE) == 0
        and down.packed.shape[2] % TILE == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and all(not one.is_mxfp4 or one.scales.data_ptr() % 8 == 0 for one in (gate_up, down))
        and not knobs.runtime.interpret
    )


@triton.jit
def gate_and_up(
    gate, up, bias, F: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Both sums with their biases, those of `up` F places behind, as an activation bends them; multiplied."""
    if HAS_BIAS:
        gate += tl.load(bias).to(tl.float32)
        up += tl.load(bias + F).to(tl.float32)
    return bent_gate(gate, GATE, ALPHA, LIMIT) * bent_up(up, GATE, LIMIT)


@triton.jit
def _tile(tile, starts, ends, first_tiles, tile_ends, experts, N: tl.constexpr, WIDTH: tl.constexpr):
    """(expert, first row, end of the expert's rows, first output) of a tile; outputs change first."""
    NUM_N: tl.constexpr = (N + WIDTH - 1) // WIDTH
    place = tile // NUM_N
    expert = tl.minimum(tl.sum((tile_ends <= place).to(tl.int32), 0), experts.shape[0] - 1)
    mine = experts == expert
    row = tl.sum(tl.where(mine, starts - first_tiles * _TILE_ROWS, 0), 0) + place * _TILE_ROWS
    row_end = tl.sum(tl.where(mine, ends, 0), 0)
    # An expert's last tile may compute outputs again, to the same numbers.
    return expert, row, row_end, tl.minimum(tile % NUM_N * WIDTH, N - WIDTH)


@triton.jit
def _rows_of_tile(order_ptr, row, row_end, TOP_K: tl.constexpr, GATED: tl.constexpr, THREADS: tl.constexpr):
    """Which rows of x are each lane's: of the first and of the second eight."""
    lane = tl.arange(0, THREADS) % 32
    # Rows past the expert's last row read the last row instead, which is loaded anyway.
    first = tl.maximum(tl.minimum(row + lane // 4, row_end - 1), 0)
    second = tl.maximum(tl.minimum(row + _ROWS + lane // 4, row_end - 1), 0)
    if GATED:
        first = tl.load(order_ptr + first) // TOP_K
        second = tl.load(order_ptr + second) // TOP_K
    return first, second


@triton.jit
def first_blocks_into_l2(
    w_ptr, expert, start, N: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first COUNT blocks of WIDTH outputs of an expert's matrix [N, K] by THREADS threads."""
    BLOCKS: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    LINES: tl.constexpr = WIDTH * _BLOCK_BYTES // 128
    for turn in tl.static_range((COUNT * LINES + THREADS - 1) // THREADS):
        line = turn * THREADS + tl.arange(0, THREADS)
        block = expert * BLOCKS + tl.minimum(line // LINES, BLOCKS - 1)
        row = block.to(tl.int64) * N + start
        fetch_into_l2(w_ptr + row * _BLOCK_BYTES + line % LINES * 128)


@triton.jit
def _multiply_tile(
    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
    expert, row, row_end, start, read,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    MXFP4: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    ROW_TILES: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, WARPS: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Store a tile's results; returns the first step of the following one."""
    HALVES: tl.constexpr = 2 if GATED else 1
    lane = tl.arange(0, 32 * WARPS * BESIDE) % 32
    rows_of_x = ()
    for row_tile in tl.static_range(ROW_TILES):
        address = x_ptr.to(tl.int64) + read[row_tile].to(tl.int64) * x_stride * 2 + lane % 4 * 16
        rows_of_x = rows_of_x + (address,)  # noqa: RUF005 (no unpacking in kernels)
    acc, ahead = add_steps(
        no_sums(ROW_TILES, TILES, HALVES, WARPS * BESIDE), weight, rows_of_x, matrix, following, N * HALVES,
        N, K, GROUP, HAS_ZEROS, MXFP4, ROW_TILES, TILES, HALVES, UNROLL, WARPS, True, True, BESIDE,
    )  # fmt: skip
    outputs, rows = place_in_tile(TILES * _TILE, BESIDE)
    for row_tile in tl.static_range(ROW_TILES):
        places = row + row_tile * _ROWS + rows
        there = places < row_end
        for tile in tl.static_range(TILES):
            columns = start + tile * _TILE + outputs
            y = unscaled(sum_of_warps(acc[(row_tile * TILES + tile) * HALVES], WARPS, BESIDE), MXFP4)
            bias = bias_ptr + expert * (N * HALVES) + columns
            if GATED:
                up = unscaled(sum_of_warps(acc[(row_tile * TILES + tile) * HALVES + 1], WARPS, BESIDE), MXFP4)
                y = gate_and_up(y, up, bias, N, HAS_BIAS, GATE, ALPHA, LIMIT)
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
def _take_tiles(
    first, end, tile_rows, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr,
    x_stride,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, GATED: tl.constexpr, GATE: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, TILES: tl.constexpr, UNROLL: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Multiply a program's tiles: `first` and those that follow it in steps of all programs, up to `end`.

    Args:
        tile_rows: of each expert, as `_tile` wants them: starts, ends, first tiles, tile ends and experts.
        WAIT: for the kernel before, when the first weights are on their way.
    """
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = TILES * _TILE * BESIDE
    THREADS: tl.constexpr = 32 * WARPS * BESIDE
    starts, ends, first_tiles, tile_ends, experts = tile_rows
    warp = tl.arange(0, THREADS) // 32 % WARPS
    beside = tl.arange(0, THREADS) // (32 * WARPS) * (TILES * _TILE)
    if first < end:
        expert, row, row_end, start = _tile(first, starts, ends, first_tiles, tile_ends, experts, N, WIDTH)
        matrix = lanes_of_matrix(
            w_ptr, scale_ptr, zero_ptr, expert, start + beside, N * HALVES, K, GROUP, MXFP4, WARPS * BESIDE
        )
        weight = fetch_step(
            matrix, warp, N * HALVES, N, K, GROUP, HAS_ZEROS, MXFP4, TILES, HALVES, UNROLL, WARPS
        )
        read = _rows_of_tile(order_ptr, row, row_end, TOP_K, GATED, THREADS)
        if WAIT:
            # For the loop's first turns. And ptxas would move the loads above to behind the wait, but not to
            # behind a prefetch.
            first_blocks_into_l2(w_ptr, expert, start, N * HALVES, K, WIDTH, 2, THREADS)
        x_stride = after_predecessor_here(x_stride, WAIT)
        for tile in range(first, end, tl.num_programs(0)):
            next_tile = tl.minimum(tile + tl.num_programs(0), end - 1)
            next_expert, next_row, next_end, next_start = _tile(
                next_tile, starts, ends, first_tiles, tile_ends, experts, N, WIDTH
            )
            following = lanes_of_matrix(
                w_ptr, scale_ptr, zero_ptr, next_expert, next_start + beside, N * HALVES, K, GROUP, MXFP4,
                WARPS * BESIDE,
            )  # fmt: skip
            next_read = _rows_of_tile(order_ptr, next_row, next_end, TOP_K, GATED, THREADS)
            if row_end - row > _ROWS:
                weight = _multiply_tile(
                    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
                    expert, row, row_end, start, read, N, K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, GATED, GATE,
                    ALPHA, LIMIT, 2, TILES, UNROLL, WARPS, BESIDE,
                )  # fmt: skip
            else:
                weight = _multiply_tile(
                    weight, matrix, following, x_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, x_stride,
                    expert, row, row_end, start, read, N, K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, GATED, GATE,
                    ALPHA, LIMIT, 1, TILES, UNROLL, WARPS, BESIDE,
                )  # fmt: skip
            expert, row, row_end, start = next_expert, next_row, next_end, next_start
            matrix = following
            read = next_read


@triton.jit
def _take_all_tiles(
    program, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, expert_end_ptr,
    x_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, GATED: tl.constexpr,
    GATE: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """What a program does. N: columns of the result; a gated weight has 2 * N outputs."""
    WIDTH: tl.constexpr = TILES * _TILE * BESIDE
    NUM_N: tl.constexpr = (N + WIDTH - 1) // WIDTH
    experts = tl.arange(0, BLOCK_E)
    there = (experts < E) & (program >= 0)
    ends = tl.load(expert_end_ptr + experts, there, other=0)
    starts = tl.load(expert_end_ptr + experts - 1, there & (experts > 0), other=0)
    tiles = (ends - starts + _TILE_ROWS - 1) // _TILE_ROWS
    tile_ends = tl.cumsum(tiles, 0)
    tile_rows = (starts, ends, tile_ends - tiles, tile_ends, experts)
    end = tl.sum(tiles, 0) * NUM_N
    whole = end
    if TILES > 1 and N % WIDTH == 0:
        # A last turn of few programs takes nearly as long as one of all, so it has smaller tiles then.
        rest = end % tl.num_programs(0)
        if rest * TILES <= tl.num_programs(0):
            whole = end - rest
    _take_tiles(
        program, whole, tile_rows, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr,
        pair_weight_ptr, x_stride, N, K, TOP_K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, GATED, GATE, ALPHA, LIMIT,
        TILES, UNROLL, WARPS, BESIDE, WAIT,
    )  # fmt: skip
    if TILES > 1 and N % WIDTH == 0:
        _take_tiles(
            whole * TILES + program, end * TILES, tile_rows, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr,
            y_ptr, order_ptr, pair_weight_ptr, x_stride, N, K, TOP_K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4,
            GATED, GATE, ALPHA, LIMIT, 1, UNROLL, WARPS, BESIDE, WAIT,
        )  # fmt: skip
    # So that programs without tiles wait, too: this kernel is not to end before the one before it.
    after_predecessor_here(program, WAIT)


@triton.jit
def _experts_up_warp_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, expert_end_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_E: tl.constexpr, TILES: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    program = between_kernels(tl.program_id(0), EARLY)
    _take_all_tiles(
        program, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr,
        expert_end_ptr, x_stride, N, K, E, TOP_K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, True, GATE, ALPHA, LIMIT,
        BLOCK_E, TILES, UNROLL, WARPS, BESIDE, False,
    )  # fmt: skip


@triton.jit
def _experts_down_warp_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr, expert_end_ptr, x_stride,
    N: tl.constexpr, K: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, BLOCK_E: tl.constexpr,
    TILES: tl.constexpr, UNROLL: tl.constexpr, WARPS: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The kernel that sorted the pairs has ended: the first product waits for it, then lets this one begin.
    # There is no gate.
    _take_all_tiles(
        tl.program_id(0), x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, order_ptr, pair_weight_ptr,
        expert_end_ptr, x_stride, N, K, E, TOP_K, GROUP, HAS_ZEROS, HAS_BIAS, MXFP4, False, 0, 0.0, 0.0,
        BLOCK_E, TILES, UNROLL, WARPS, BESIDE, EARLY,
    )  # fmt: skip


def kind_of(weight: PackedExperts) -> dict[str, Any]:
    """What kernels are compiled for of a weight's kind."""
    return {
        "GROUP": weight.group,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_BIAS": weight.bias is not None,
        "MXFP4": weight.is_mxfp4,
    }


def tensors_of(weight: PackedExperts, instead: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    beside = config.beside if results >= tiles * TILE * config.beside else 1
    programs = _most_tiles(num_pairs, num_experts, TILE_ROWS) * ceil_div(results, tiles * TILE * beside)
    at_once = config.programs * config.beside // beside * gpu_of(x.device).multiprocessors
    programs = min(programs, at_once)
    of_gate = {"GATE": int(gate.kind), "ALPHA": gate.alpha, "LIMIT": gate.limit} if gated else {}
    kernel = _experts_up_warp_kernel if gated else _experts_down_warp_kernel
    kernel[(programs,)](
        x,
        *tensors_of(weight, x),
        y,
        routing.order,
        routing.weights,
        routing.expert_end,
        x.stride(0),
        N=results,
        K=x.shape[1],
        E=num_experts,
        TOP_K=routing.experts.shape[1],
        **kind_of(weight),
        **of_gate,
        BLOCK_E=expert_lanes(num_experts),
        TILES=tiles,
        UNROLL=config.unroll,
        WARPS=config.num_warps,
        BESIDE=beside,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps * beside,
        maxnreg=config.registers,
    )
    return y
