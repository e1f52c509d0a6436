"""A linear layer of 4-bit weights, plain and gated, over up to 16 rows of bfloat16: warps, not shared memory.

    int4_linear_warp:        as int4_linear.int4_linear
    int4_gated_linear_warp:  as int4_linear.int4_gated_linear

M rows, N outputs (gated: N / 2), a multiple of 16, K inputs. x's rows are contiguous in 16 bytes; the weight
is as quantize_int4.py says.

int4_warp_tiles.py says how warps multiply. Their loads are a whole step ahead.

A row's result is the same to the last bit in all batches of up to 16 rows.

Cost: N*K/2 bytes read: memory bound. 2*M*N*K FLOP.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from triton_kernels.early_start import after_predecessor, can_start_early, let_next_start_here
from triton_kernels.int4_warp_tiles import add_steps, fetch_step, lanes_of_matrix, no_sums
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_int4 import Int4Weight
from triton_kernels.warp_tiles import ROWS, TILE, place_in_tile, sum_of_warps

MOST_ROWS = 2 * ROWS
_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)


class Int4WarpConfig(NamedTuple):
    """A launch configuration."""

    tiles: int  # of 16 outputs, for each warp; a gated layer has as many of gate and up each
    num_warps: int
    unroll: int  # blocks of 128 inputs that a warp loads at a time


def default_int4_warp_config(weight: Int4Weight, rows: int, gated: bool) -> Int4WarpConfig:
    """The configuration if none is given; measured on an H200, groups of 128 without zero points.

    All configurations of a layer have the same number of warps, so a row's result does not depend on how many
    rows there are.
    """
    if gated:
        return Int4WarpConfig(1, 2, 2)
    return Int4WarpConfig(1, 4, 2 if rows <= 2 else 4) if weight.width <= 8192 else Int4WarpConfig(1, 8, 2)


def suits_warps(x: Tensor, weight: Int4Weight, gated: bool) -> bool:
    """Whether these kernels can compute the layer: few rows of bfloat16 in 16-byte pieces, whole tiles."""
    outputs = weight.outputs // 2 if gated else weight.outputs
    return (
        x.shape[0] <= MOST_ROWS
        and x.dtype == weight.scales.dtype == torch.bfloat16
        and outputs % TILE == 0
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and not knobs.runtime.interpret
    )


@triton.jit(do_not_specialize=["num_rows"])
def _int4_warp_kernel(
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
    ROW_TILES: tl.constexpr,
    TILES: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    OUT: tl.constexpr = N // 2 if GATED else N
    HALVES: tl.constexpr = 2 if GATED else 1
    lane = tl.arange(0, 32 * WARPS) % 32
    warp = tl.arange(0, 32 * WARPS) // 32
    # The last program may have fewer tiles: it computes earlier ones again, to the same numbers.
    start = tl.minimum(tl.program_id(0) * (TILES * _TILE), OUT - TILES * _TILE)
    matrix = lanes_of_matrix(w_ptr, scale_ptr, zero_ptr, 0, start, N, K, GROUP, False, WARPS)
    weight = fetch_step(matrix, warp, N, OUT, K, GROUP, HAS_ZEROS, False, TILES, HALVES, UNROLL, WARPS)
    num_rows = after_predecessor(num_rows, EARLY)
    rows_of_x = ()
    for row_tile in tl.static_range(ROW_TILES):
        row = tl.minimum(row_tile * _ROWS + lane // 4, num_rows - 1).to(tl.int64)
        rows_of_x = rows_of_x + (x_ptr.to(tl.int64) + row * x_stride * 2 + lane % 4 * 16,)  # noqa: RUF005
    acc, weight = add_steps(
        no_sums(ROW_TILES, TILES, HALVES, WARPS), weight, rows_of_x, matrix, matrix, N, OUT, K, GROUP,
        HAS_ZEROS, False, ROW_TILES, TILES, HALVES, UNROLL, WARPS, False, False,
    )  # fmt: skip
    start = let_next_start_here(start, EARLY)
    outputs, rows = place_in_tile()
    for row_tile in tl.static_range(ROW_TILES):
        there = row_tile * _ROWS + rows < num_rows
        for tile in tl.static_range(TILES):
            y = sum_of_warps(acc[(row_tile * TILES + tile) * HALVES], WARPS)
            columns = start + tile * _TILE + outputs
            if HAS_BIAS:
                y += tl.load(bias_ptr + columns).to(tl.float32)
            if GATED:
                gate = y.to(tl.bfloat16).to(tl.float32)
                up = sum_of_warps(acc[(row_tile * TILES + tile) * HALVES + 1], WARPS)
                y = gate * tl.sigmoid(gate) * up.to(tl.bfloat16).to(tl.float32)
            y_ptrs = y_ptr + (row_tile * _ROWS + rows).to(tl.int64) * OUT + columns
            tl.store(y_ptrs, y.to(tl.bfloat16), there)


def int4_linear_warp(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, config: Int4WarpConfig | None = None
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N]; see `suits_warps`."""
    return _launch(
        x, weight, bias, False, config or default_int4_warp_config(weight, x.shape[0], gated=False)
    )


def int4_gated_linear_warp(x: Tensor, weight: Int4Weight, config: Int4WarpConfig | None = None) -> Tensor:
    """x [M, K], weight [2F, K] -> silu(gate) * up, [M, F]; see `suits_warps`."""
    return _launch(x, weight, None, True, config or default_int4_warp_config(weight, x.shape[0], gated=True))


def _launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, config: Int4WarpConfig
) -> Tensor:
    num_rows = x.shape[0]
    num_outputs = weight.outputs // 2 if gated else weight.outputs
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    config = config._replace(tiles=min(config.tiles, num_outputs // TILE))
    programs = ceil_div(num_outputs, TILE * config.tiles)
    _int4_warp_kernel[(programs,)](
        x,
        weight.packed,
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
        ROW_TILES=ceil_div(num_rows, ROWS),
        TILES=config.tiles,
        UNROLL=config.unroll,
        WARPS=config.num_warps,
        EARLY=can_start_early(x.device),
        num_warps=config.num_warps,
    )
    return y
