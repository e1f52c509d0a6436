"""A linear layer of 4-bit weights, plain and gated, over up to 16 rows of bfloat16: warps, not shared memory.

    int4_linear_warp:        as int4_linear.int4_linear
    int4_gated_linear_warp:  as int4_linear.int4_gated_linear

M rows, N outputs (gated: N / 2), a multiple of 16, K inputs. x's rows are contiguous in 16 bytes; the weight
is as quantize_int4.py says.

Each warp multiplies tiles of 16 outputs from registers (warp_tiles.py): a lane's two words next to each other
are its two neighbours in each quarter of a block. The warps of a program sum over other blocks of 128 inputs,
and their loads are one step of UNROLL blocks ahead. Scales of groups of 64 and 128 are applied to the sums in
float32, those of groups of 32 to the weights, which rounds them to bfloat16.

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
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES, QUARTER
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_int4 import Int4Weight
from triton_kernels.warp_tiles import (
    ROWS,
    TILE,
    load_rows,
    load_weights,
    multiply_bf16,
    place_in_tile,
    sum_of_warps,
)

MOST_ROWS = 2 * ROWS
_BLOCK = tl.constexpr(BLOCK)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
_QUARTER = tl.constexpr(QUARTER)
_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)


class Int4WarpConfig(NamedTuple):
    """A launch configuration."""

    tiles: int  # of 16 outputs, for each warp; a gated layer has as many of gate and up each
    num_warps: int
    unroll: int  # blocks of 128 inputs that a warp loads at a time


def default_int4_warp_config(weight: Int4Weight, gated: bool) -> Int4WarpConfig:
    """The configuration if none is given; measured on an H200, groups of 128 without zero points."""
    if gated:
        return Int4WarpConfig(1, 2, 2)
    return Int4WarpConfig(1, 4, 4) if weight.width <= 8192 else Int4WarpConfig(1, 8, 2)


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


# A 4-bit number in the low bits of 128.0 is added to it; adding -128 less the zero point leaves the number.
_PAIRS = tl.constexpr(
    "{ .reg .b32 a, b, c, d, one; "
    "mov.b32 one, 0x3f803f80; "
    "shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12; "
    "lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, a, one, $5; fma.rn.bf16x2 $1, b, one, $6; "
    "fma.rn.bf16x2 $2, c, one, $7; fma.rn.bf16x2 $3, d, one, $8; }"
)


@triton.jit
def _numbers(words, bases):
    """Two words -> the two inputs of each quarter of a block, bfloat16 in int32."""
    return tl.inline_asm_elementwise(
        _PAIRS,
        "=r,=r,=r,=r,r,r,r,r,r",
        [words, bases[0], bases[1], bases[2], bases[3]],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _twice(values):
    """bfloat16 -> int32 with the number twice."""
    bits = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def _times(pairs, scale):
    """bfloat16 products of pairs in int32."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [pairs, scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _group_values(pointers, block, N, GROUP: tl.constexpr):
    """Scales or zero points of one output in the quarters of a block."""
    row = block * (_BLOCK // GROUP)
    first = tl.load(pointers + row * N)
    if GROUP == _BLOCK:
        return first, first, first, first
    elif GROUP == 2 * _QUARTER:
        third = tl.load(pointers + (row + 1) * N)
        return first, first, third, third
    else:
        second = tl.load(pointers + (row + 1) * N)
        return first, second, tl.load(pointers + (row + 2) * N), tl.load(pointers + (row + 3) * N)


@triton.jit
def _fetch(w_address, scales, zeros, block, N, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """What a warp needs of one tile and block: words, scales and zero points of its two outputs."""
    start = w_address + block.to(tl.int64) * (N * _BLOCK_BYTES)
    first = load_weights(start)
    second = load_weights(start + 8 * _BLOCK_BYTES)
    scale = _group_values(scales, block, N, GROUP)
    more_scale = _group_values(scales + 8, block, N, GROUP)
    zero = scale
    more_zero = more_scale
    if HAS_ZEROS:
        zero = _group_values(zeros, block, N, GROUP)
        more_zero = _group_values(zeros + 8, block, N, GROUP)
    return first, second, scale, more_scale, zero, more_zero


@triton.jit
def _base(zero, HAS_ZEROS: tl.constexpr):
    if HAS_ZEROS:
        return _twice((-128.0 - zero.to(tl.float32)).to(tl.bfloat16))
    else:
        return tl.full(zero.shape, -0x3CF73CF8, tl.int32)  # -136 twice: 0xc308c308


@triton.jit
def _bases(zeros, HAS_ZEROS: tl.constexpr):
    return (
        _base(zeros[0], HAS_ZEROS),
        _base(zeros[1], HAS_ZEROS),
        _base(zeros[2], HAS_ZEROS),
        _base(zeros[3], HAS_ZEROS),
    )


@triton.jit
def _all_times(pairs, scales):
    return (
        _times(pairs[0], _twice(scales[0])),
        _times(pairs[1], _twice(scales[1])),
        _times(pairs[2], _twice(scales[2])),
        _times(pairs[3], _twice(scales[3])),
    )


@triton.jit
def _add_block(acc, x, fetched, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """acc (4 float32) plus the products of a tile and a block; x is 4 int32 of pairs for each quarter."""
    x0, x1, x2, x3 = x
    first, second, scale, more_scale, zero, more_zero = fetched
    bases = _bases(zero, HAS_ZEROS)
    more_bases = _bases(more_zero, HAS_ZEROS)
    nothing = tl.zeros(scale[0].shape, tl.float32)
    low = (nothing, nothing, nothing, nothing)
    high = low
    if GROUP == _QUARTER:
        low = acc
    for u in tl.static_range(4):
        a = _numbers(first[u], bases)
        b = _numbers(second[u], more_bases)
        if GROUP == _QUARTER:
            a = _all_times(a, scale)
            b = _all_times(b, more_scale)
        low = multiply_bf16((a[0], b[0], a[1], b[1]), (x0[u], x1[u]), low)
        if GROUP == 2 * _QUARTER:
            high = multiply_bf16((a[2], b[2], a[3], b[3]), (x2[u], x3[u]), high)
        else:
            low = multiply_bf16((a[2], b[2], a[3], b[3]), (x2[u], x3[u]), low)
    if GROUP == _QUARTER:
        return low
    s = scale[0].to(tl.float32)
    t = more_scale[0].to(tl.float32)
    acc = (acc[0] + low[0] * s, acc[1] + low[1] * s, acc[2] + low[2] * t, acc[3] + low[3] * t)
    if GROUP == 2 * _QUARTER:
        s = scale[2].to(tl.float32)
        t = more_scale[2].to(tl.float32)
        acc = (acc[0] + high[0] * s, acc[1] + high[1] * s, acc[2] + high[2] * t, acc[3] + high[3] * t)
    return acc


@triton.jit
def _fetch_step(
    w_address,
    scales,
    zeros,
    first_block,
    N,
    OUT,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    UNROLL: tl.constexpr,
    WARPS: tl.constexpr,
):
    """All that a warp loads of the weight in one step: UNROLL blocks, WARPS blocks apart."""
    all_of_it = ()
    for u in tl.static_range(UNROLL):
        block = tl.minimum(first_block + u * WARPS, BLOCKS - 1)
        for tile in tl.static_range(TILES):
            for half in tl.static_range(HALVES):
                output = half * OUT + tile * _TILE
                fetched = _fetch(
                    w_address + tl.cast(output, tl.int64) * _BLOCK_BYTES, scales + output, zeros + output,
                    block, N, GROUP, HAS_ZEROS,
                )  # fmt: skip
                all_of_it = all_of_it + (fetched,)  # noqa: RUF005 (no unpacking in kernels)
    return all_of_it


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
    BLOCKS: tl.constexpr = K // _BLOCK
    STEPS: tl.constexpr = (BLOCKS + UNROLL * WARPS - 1) // (UNROLL * WARPS)
    EVEN: tl.constexpr = BLOCKS % (UNROLL * WARPS) == 0
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    warp = thread // 32
    # The last program may have fewer tiles: it computes earlier ones again, to the same numbers.
    start = tl.minimum(tl.program_id(0) * (TILES * _TILE), OUT - TILES * _TILE)
    output = start + lane // 4
    w_address = w_ptr.to(tl.int64) + output.to(tl.int64) * _BLOCK_BYTES + lane % 4 * 16
    scales = scale_ptr + output
    zeros = zero_ptr + output
    weight = _fetch_step(
        w_address, scales, zeros, warp, N, OUT, BLOCKS, GROUP, HAS_ZEROS, TILES, HALVES, UNROLL, WARPS
    )
    num_rows = after_predecessor(num_rows, EARLY)
    x_address = x_ptr.to(tl.int64) + lane % 4 * 16
    nothing = tl.zeros([32 * WARPS], tl.float32)
    acc = ()
    for _ in tl.static_range(ROW_TILES * TILES * HALVES):
        acc = acc + ((nothing, nothing, nothing, nothing),)  # noqa: RUF005
    for step in range(STEPS):
        first_block = warp + step * (UNROLL * WARPS)
        if STEPS > 1:
            ahead = _fetch_step(
                w_address, scales, zeros, first_block + UNROLL * WARPS, N, OUT, BLOCKS, GROUP, HAS_ZEROS,
                TILES, HALVES, UNROLL, WARPS,
            )  # fmt: skip
        for u in tl.static_range(UNROLL):
            block = first_block + u * WARPS
            inside = block < BLOCKS
            for row_tile in tl.static_range(ROW_TILES):
                row = tl.minimum(row_tile * _ROWS + lane // 4, num_rows - 1).to(tl.int64)
                from_row = x_address + row * x_stride * 2 + tl.minimum(block, BLOCKS - 1) * (2 * _BLOCK)
                x = (
                    load_rows(from_row),
                    load_rows(from_row + 2 * _QUARTER),
                    load_rows(from_row + 4 * _QUARTER),
                    load_rows(from_row + 6 * _QUARTER),
                )
                new = ()
                for place in tl.static_range(ROW_TILES * TILES * HALVES):
                    if place // (TILES * HALVES) == row_tile:
                        fetched = weight[u * TILES * HALVES + place % (TILES * HALVES)]
                        added = _add_block(acc[place], x, fetched, GROUP, HAS_ZEROS)
                        if not EVEN:
                            added = (
                                tl.where(inside, added[0], acc[place][0]),
                                tl.where(inside, added[1], acc[place][1]),
                                tl.where(inside, added[2], acc[place][2]),
                                tl.where(inside, added[3], acc[place][3]),
                            )
                        new = new + (added,)  # noqa: RUF005
                    else:
                        new = new + (acc[place],)  # noqa: RUF005
                acc = new
        if STEPS > 1:
            weight = ahead
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
    return _launch(x, weight, bias, False, config or default_int4_warp_config(weight, gated=False))


def int4_gated_linear_warp(x: Tensor, weight: Int4Weight, config: Int4WarpConfig | None = None) -> Tensor:
    """x [M, K], weight [2F, K] -> silu(gate) * up, [M, F]; see `suits_warps`."""
    return _launch(x, weight, None, True, config or default_int4_warp_config(weight, gated=True))


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
