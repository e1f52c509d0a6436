"""A linear layer of 4-bit weights, plain and gated, over up to 16 rows of bfloat16: warps, not shared memory.

    int4_linear_warp:        as int4_linear.int4_linear
    int4_gated_linear_warp:  as int4_linear.int4_gated_linear

M rows, N outputs (gated: N / 2), a multiple of 16, K inputs. x's rows are contiguous in 16 bytes; the weight
is as quantize_int4.py says.

Each warp multiplies tiles of 16 outputs from registers (warp_tiles.py). The warps of a program sum over other
blocks of 128 inputs, and their loads are one step of UNROLL blocks ahead. Scales of groups of 64 and 128 are
applied to the sums in float32, those of groups of 32 to the weights, which rounds them to bfloat16.

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
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_int4 import BLOCK, HALF, Int4Weight
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
_HALF = tl.constexpr(HALF)
_TILE = tl.constexpr(TILE)
_ROWS = tl.constexpr(ROWS)


class Int4WarpConfig(NamedTuple):
    """A launch configuration."""

    tiles: int  # of 16 outputs, for each warp; a gated layer has as many of gate and up each
    num_warps: int
    unroll: int  # blocks of 128 inputs that a warp loads at a time


def default_int4_warp_config(weight: Int4Weight, gated: bool) -> Int4WarpConfig:
    """The configuration if none is given; measured on an H100, groups of 128 without zero points."""
    if gated:  # more scales and zero points take more registers
        return Int4WarpConfig(1, 1, 4 if weight.group == BLOCK and weight.zeros is None else 2)
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
    "shr.u32 b, $4, 8; shr.u32 c, $4, 4; shr.u32 d, $4, 12; "
    "lop3.b32 a, $4, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea; "
    "lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea; "
    "fma.rn.bf16x2 $0, a, one, $5; fma.rn.bf16x2 $1, b, one, $5; "
    "fma.rn.bf16x2 $2, c, one, $6; fma.rn.bf16x2 $3, d, one, $6; }"
)


@triton.jit
def _numbers(word, low_base, high_base):
    """Four packed bytes -> inputs (0, 2) and (1, 3) of a block's first half, then of its second: bfloat16."""
    return tl.inline_asm_elementwise(
        _PAIRS,
        "=r,=r,=r,=r,r,r,r",
        [word, low_base, high_base],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _as_pairs(words):
    """Four int32 of eight consecutive bfloat16 -> (0, 2), (1, 3), (4, 6), (5, 7)."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $4, $5, 0x5410; prmt.b32 $1, $4, $5, 0x7632; "
        "prmt.b32 $2, $6, $7, 0x5410; prmt.b32 $3, $6, $7, 0x7632;",
        "=r,=r,=r,=r,r,r,r,r",
        [words[0], words[1], words[2], words[3]],
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
def _group_values(pointers, block, lane, N, GROUP: tl.constexpr):
    """Scales or zero points of one output in both halves of a block; of groups of 32, those of the lane."""
    first = block * (2 * _HALF // GROUP)
    if GROUP == 2 * _HALF:
        low = tl.load(pointers + first * N)
        return low, low
    elif GROUP == _HALF:
        return tl.load(pointers + first * N), tl.load(pointers + (first + 1) * N)
    else:  # a lane's 16 inputs of a half lie in one group
        group = first + lane % 4 // 2
        return tl.load(pointers + group * N), tl.load(pointers + (group + 2) * N)


@triton.jit
def _fetch(w_address, scales, zeros, block, lane, N, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """What a warp needs of one tile and block: words, scales and zero points of its two outputs."""
    start = w_address + block.to(tl.int64) * (N * _HALF)
    first = load_weights(start)
    second = load_weights(start + 8 * _HALF)
    scale = _group_values(scales, block, lane, N, GROUP)
    more_scale = _group_values(scales + 8, block, lane, N, GROUP)
    zero = scale
    more_zero = more_scale
    if HAS_ZEROS:
        zero = _group_values(zeros, block, lane, N, GROUP)
        more_zero = _group_values(zeros + 8, block, lane, N, GROUP)
    return first, second, scale, more_scale, zero, more_zero


@triton.jit
def _base(zero, HAS_ZEROS: tl.constexpr):
    if HAS_ZEROS:
        return _twice((-128.0 - zero.to(tl.float32)).to(tl.bfloat16))
    else:
        return tl.full(zero.shape, -0x3CF73CF8, tl.int32)  # -136 twice: 0xc308c308


@triton.jit
def _add_block(acc, x_low, x_high, fetched, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """acc (4 float32) plus the products of a tile and a block; x_* are 8 int32 of pairs."""
    first, second, scale, more_scale, zero, more_zero = fetched
    low_base = _base(zero[0], HAS_ZEROS)
    high_base = _base(zero[1], HAS_ZEROS)
    more_low_base = _base(more_zero[0], HAS_ZEROS)
    more_high_base = _base(more_zero[1], HAS_ZEROS)
    nothing = tl.zeros(scale[0].shape, tl.float32)
    low = (nothing, nothing, nothing, nothing)
    high = low
    if GROUP < _HALF:
        low = acc
        scale_twice = (_twice(scale[0]), _twice(scale[1]))
        more_twice = (_twice(more_scale[0]), _twice(more_scale[1]))
    for u in tl.static_range(4):
        a = _numbers(first[u], low_base, high_base)
        b = _numbers(second[u], more_low_base, more_high_base)
        x = (x_low[2 * u], x_low[2 * u + 1])
        y = (x_high[2 * u], x_high[2 * u + 1])
        if GROUP < _HALF:
            a = (
                _times(a[0], scale_twice[0]),
                _times(a[1], scale_twice[0]),
                _times(a[2], scale_twice[1]),
                _times(a[3], scale_twice[1]),
            )
            b = (
                _times(b[0], more_twice[0]),
                _times(b[1], more_twice[0]),
                _times(b[2], more_twice[1]),
                _times(b[3], more_twice[1]),
            )
        low = multiply_bf16((a[0], b[0], a[1], b[1]), x, low)
        if GROUP == _HALF:
            high = multiply_bf16((a[2], b[2], a[3], b[3]), y, high)
        else:
            low = multiply_bf16((a[2], b[2], a[3], b[3]), y, low)
    if GROUP < _HALF:
        return low
    s = scale[0].to(tl.float32)
    t = more_scale[0].to(tl.float32)
    acc = (acc[0] + low[0] * s, acc[1] + low[1] * s, acc[2] + low[2] * t, acc[3] + low[3] * t)
    if GROUP == _HALF:
        s = scale[1].to(tl.float32)
        t = more_scale[1].to(tl.float32)
        acc = (acc[0] + high[0] * s, acc[1] + high[1] * s, acc[2] + high[2] * t, acc[3] + high[3] * t)
    return acc


@triton.jit
def _fetch_step(
    w_address,
    scales,
    zeros,
    first_block,
    lane,
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
                    w_address + tl.cast(output, tl.int64) * _HALF, scales + output, zeros + output, block,
                    lane, N, GROUP, HAS_ZEROS,
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
    BLOCKS: tl.constexpr = K // (2 * _HALF)
    STEPS: tl.constexpr = (BLOCKS + UNROLL * WARPS - 1) // (UNROLL * WARPS)
    EVEN: tl.constexpr = BLOCKS % (UNROLL * WARPS) == 0
    thread = tl.arange(0, 32 * WARPS)
    lane = thread % 32
    warp = thread // 32
    # The last program may have fewer tiles: it computes earlier ones again, to the same numbers.
    start = tl.minimum(tl.program_id(0) * (TILES * _TILE), OUT - TILES * _TILE)
    output = start + lane // 4
    w_address = w_ptr.to(tl.int64) + output.to(tl.int64) * _HALF + lane % 4 * 16
    scales = scale_ptr + output
    zeros = zero_ptr + output
    weight = _fetch_step(
        w_address, scales, zeros, warp, lane, N, OUT, BLOCKS, GROUP, HAS_ZEROS, TILES, HALVES, UNROLL, WARPS
    )
    num_rows = after_predecessor(num_rows, EARLY)
    x_address = x_ptr.to(tl.int64) + lane % 4 * 32
    nothing = tl.zeros([32 * WARPS], tl.float32)
    acc = ()
    for _ in tl.static_range(ROW_TILES * TILES * HALVES):
        acc = acc + ((nothing, nothing, nothing, nothing),)  # noqa: RUF005
    for step in range(STEPS):
        first_block = warp + step * (UNROLL * WARPS)
        if STEPS > 1:
            ahead = _fetch_step(
                w_address, scales, zeros, first_block + UNROLL * WARPS, lane, N, OUT, BLOCKS, GROUP,
                HAS_ZEROS, TILES, HALVES, UNROLL, WARPS,
            )  # fmt: skip
        for u in tl.static_range(UNROLL):
            block = first_block + u * WARPS
            inside = block < BLOCKS
            for row_tile in tl.static_range(ROW_TILES):
                row = tl.minimum(row_tile * _ROWS + lane // 4, num_rows - 1).to(tl.int64)
                from_row = x_address + row * x_stride * 2 + tl.minimum(block, BLOCKS - 1) * (4 * _HALF)
                low = _as_pairs(load_rows(from_row)) + _as_pairs(load_rows(from_row + 16))
                from_row += 2 * _HALF
                high = _as_pairs(load_rows(from_row)) + _as_pairs(load_rows(from_row + 16))
                new = ()
                for place in tl.static_range(ROW_TILES * TILES * HALVES):
                    if place // (TILES * HALVES) == row_tile:
                        fetched = weight[u * TILES * HALVES + place % (TILES * HALVES)]
                        added = _add_block(acc[place], low, high, fetched, GROUP, HAS_ZEROS)
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
