"""A linear layer of 4-bit weights over many rows of bfloat16 on Hopper GPUs, by warps with roles.

    launch_int4_hopper:  as int4_linear_many.py, which adds up the parts of several programs

M rows, N outputs (gated: 2 * N of the weight), K inputs; the weight is as quantize_int4.py says. Written in
Gluon, Triton's language of explicit layouts and warps.

A program multiplies 2 * 64 outputs (gated: 64 of gate and 64 of up) and ROWS rows, a power of two, with MORE
rows besides, in steps of 128 inputs. Its warps have roles:
    two groups of four   64 outputs each. Packed weights become the numbers of half a step in registers, the
                         tall operand, while the tensor cores multiply the other half, or for the other group
    one more             a thread of it lets the copy engine fetch packed weights and rows STAGES steps ahead
What a thread loads of 16-bit words is, quarter by quarter, what the matrix instruction wants of it. Numbers
are multiplied by their scales, which rounds them to bfloat16.

Cost: N*K/2 + 2*M*K bytes read, 2*M*N bytes written, 2*M*N*K FLOP.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Gluon's compile-time values are plain objects to a reader of types, and its tensors are built by them.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false
# Both ends of a loop's turn ask the same compile-time value.
# pyright: reportPossiblyUnboundVariable=false

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from triton_kernels.early_start import after_predecessor_here, can_start_early
from triton_kernels.gpu import gpu_of
from triton_kernels.int4_packing import BLOCK, HIGH_BYTES, LOW_BYTES, MIDDLE, QUARTER
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_int4 import Int4Weight

OUTPUTS = 64
"""Of a group of warps."""
_OUTPUTS = gl.constexpr(OUTPUTS)
_BLOCK = gl.constexpr(BLOCK)
_QUARTER = gl.constexpr(QUARTER)
_HALF = gl.constexpr(2 * QUARTER)
_MIDDLE = gl.constexpr(MIDDLE)
_DIVISOR = gl.constexpr(128.0)
"""What numbers made of words are divided by: `int4_divisor` of bfloat16."""
_CONSUMER_REGISTERS = gl.constexpr(232)
_PRODUCER_REGISTERS = gl.constexpr(40)
_ROW_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_WORD_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)

# Gluon's names change: these are since Triton 3.8.
_copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _fetch(
    x_desc, more_desc, w_desc, x_tiles, more_tiles, w_tiles, full, empty, row_start, output_start,
    second_start, first, steps, N,
    ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Let the copy engine fetch rows and words into slots that both groups have left."""
    for step in range(steps):
        slot = step % STAGES
        block = first + step
        mbarrier.wait(empty.index(slot), (step // STAGES & 1) ^ 1)
        landed = full.index(slot)
        mbarrier.expect(landed, ((ROWS + MORE) * _BLOCK + 2 * _OUTPUTS * _QUARTER) * 2)
        _copy_box(w_desc, [block * N + output_start, 0], landed, w_tiles.index(2 * slot))
        _copy_box(w_desc, [block * N + second_start, 0], landed, w_tiles.index(2 * slot + 1))
        for half in gl.static_range(2):
            k = block * _BLOCK + half * _HALF
            _copy_box(x_desc, [row_start, k], landed, x_tiles.index(2 * slot + half))
            if MORE:
                _copy_box(more_desc, [row_start + ROWS, k], landed, more_tiles.index(2 * slot + half))


@gluon.jit
def _values(pointers, block, N, GROUP: gl.constexpr):
    """Scales or zero points of a block's quarters."""
    row = block * (_BLOCK // GROUP)
    first = gl.load(pointers + row * N)
    if GROUP == _BLOCK:
        return first, first, first, first
    elif GROUP == 2 * _QUARTER:
        third = gl.load(pointers + (row + 1) * N)
        return first, first, third, third
    else:
        second = gl.load(pointers + (row + 1) * N)
        third = gl.load(pointers + (row + 2) * N)
        return first, second, third, gl.load(pointers + (row + 3) * N)


@gluon.jit
def _values_of(scale_ptrs, zero_ptrs, block, N, GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Scales and zero points (or anything, if there are none) of a block's quarters."""
    scales = _values(scale_ptrs, block, N, GROUP)
    if HAS_ZEROS:
        return scales, _values(zero_ptrs, block, N, GROUP)
    else:
        return scales, scales


@gluon.jit
def _times(numbers, scale):
    """numbers * scale, two at a time."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [numbers, scale[:, None]],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _minus(zeros):
    """What is added for zero points."""
    return (zeros.to(gl.float32) * (-1.0 / _DIVISOR)).to(gl.bfloat16)[:, None]


@gluon.jit
def _half(words, scales, zeros, layout: gl.constexpr, HALF: gl.constexpr, HAS_ZEROS: gl.constexpr):
    """Words [outputs, 32] -> half of the weights, [outputs, 64] of `layout`, divided by _DIVISOR.

    No number leaves its thread.
    """
    if HAS_ZEROS:
        first, second = _minus(zeros[2 * HALF]), _minus(zeros[2 * HALF + 1])
    else:
        first = gl.full(words.shape, -_MIDDLE / _DIVISOR, gl.bfloat16, words.type.layout)
        second = first
    a, b = gl.inline_asm_elementwise(
        HIGH_BYTES if HALF else LOW_BYTES,
        "=r,=r,r,r,r",
        [words, first, second],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    quarters = gl.join(_times(a, scales[2 * HALF]), _times(b, scales[2 * HALF + 1])).permute([0, 2, 1])
    return gl.convert_layout(quarters.reshape([words.shape[0], 2 * _QUARTER]), layout)


@gluon.jit
def _finish(
    acc, tile, other_done, bias_ptr, y_ptr, y_desc, row_start, start, split, num_rows, N, OUT,
    ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, SPLITS: gl.constexpr,
    MINE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Store a group's sums, or of a gated layer the first group's.

    Args:
        tile: shared memory [ROWS, outputs] that nobody reads any more; one for both groups of a gated layer.
        other_done: of a gated layer, where the second group says that its sums are in the tile.
    """
    acc = acc * _DIVISOR
    output = start + gl.arange(0, _OUTPUTS, gl.SliceLayout(1, mma))
    if SPLITS > 1:  # y is the partial sums: float32 [SPLITS, M, N]
        end = N if GATED and MINE else OUT
        rows = (row_start + gl.arange(0, ROWS, gl.SliceLayout(0, mma)))[None, :]
        there = (rows < num_rows) & (output < end)[:, None]
        gl.store(y_ptr + (split * num_rows + rows).to(gl.int64) * N + output[:, None], acc, there)
    else:
        if HAS_BIAS:
            acc += gl.load(bias_ptr + gl.minimum(output, OUT - 1)).to(gl.float32)[:, None]
        rounded = acc.to(gl.bfloat16)
        by_output = tile.permute([1, 0])
        if GATED and MINE:
            by_output.store(rounded)
            tl.debug_barrier()
            mbarrier.arrive(other_done)
        else:
            if GATED:
                mbarrier.wait(other_done, 0)
                up = by_output.load(mma).to(gl.float32)
                gate = rounded.to(gl.float32)
                rounded = (gate / (1.0 + gl.exp(-gate)) * up).to(gl.bfloat16)
                tl.debug_barrier()
            by_output.store(rounded)
            fence_async_shared()
            tl.debug_barrier()
            _store_box(y_desc, [row_start, start], tile)
            tma.store_wait(0)


@gluon.jit
def _multiply_group(
    scale_ptr, zero_ptr, bias_ptr, y_ptr, y_desc, more_y_desc, x_tiles, more_tiles, w_tiles, full, empty,
    ends, row_start, output_start, second_start, first, steps, blocks, split, num_rows, N, OUT,
    GROUP: gl.constexpr, HAS_ZEROS: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
    SPLITS: gl.constexpr, ROWS: gl.constexpr, MORE: gl.constexpr, STAGES: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """Four warps: the products of 64 outputs."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    more_mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE or ROWS, 16])
    layout: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    start = second_start if MINE else output_start
    end = N if GATED and MINE else OUT
    output = gl.minimum(start + gl.arange(0, _OUTPUTS, gl.SliceLayout(1, layout)), end - 1)
    scale_ptrs = scale_ptr + output
    zero_ptrs = zero_ptr + output
    acc = gl.zeros([_OUTPUTS, ROWS], gl.float32, mma)
    more = gl.zeros([_OUTPUTS, MORE], gl.float32, more_mma) if MORE else 0
    scales, zeros = _values_of(scale_ptrs, zero_ptrs, gl.minimum(first, blocks - 1), N, GROUP, HAS_ZEROS)
    for step in range(steps):
        ahead = gl.minimum(first + step + 1, blocks - 1)
        next_scales, next_zeros = _values_of(scale_ptrs, zero_ptrs, ahead, N, GROUP, HAS_ZEROS)
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        words = w_tiles.index(2 * slot + MINE).load(layout)
        # The second half becomes numbers while the tensor cores multiply the first.
        low = _half(words, scales, zeros, layout, 0, HAS_ZEROS)
        low_rows = x_tiles.index(2 * slot).permute([1, 0])
        sums = warpgroup_mma(low, low_rows, acc, is_async=True)
        if MORE:
            low_rows = more_tiles.index(2 * slot).permute([1, 0])
            more_sums = warpgroup_mma(low, low_rows, more, is_async=True)
        high = _half(words, scales, zeros, layout, 1, HAS_ZEROS)
        high_rows = x_tiles.index(2 * slot + 1).permute([1, 0])
        sums = warpgroup_mma(high, high_rows, sums, is_async=True)
        if MORE:
            high_rows = more_tiles.index(2 * slot + 1).permute([1, 0])
            more_sums = warpgroup_mma(high, high_rows, more_sums, is_async=True)
            acc, more, low, high = warpgroup_mma_wait(0, deps=[sums, more_sums, low, high])
        else:
            acc, low, high = warpgroup_mma_wait(0, deps=[sums, low, high])
        mbarrier.arrive(empty.index(slot))
        scales, zeros = next_scales, next_zeros
    if SPLITS == 1:
        # Both groups have read all rows, so their places are free.
        mbarrier.arrive(ends.index(0))
        mbarrier.wait(ends.index(0), 0)
    place: gl.constexpr = 0 if GATED else MINE
    _finish(
        acc, x_tiles.index(place), ends.index(1), bias_ptr, y_ptr, y_desc, row_start, start, split, num_rows,
        N, OUT, ROWS, HAS_BIAS, GATED, SPLITS, MINE, mma,
    )  # fmt: skip
    if MORE:
        _finish(
            more, more_tiles.index(place), ends.index(2), bias_ptr, y_ptr, more_y_desc, row_start + ROWS,
            start, split, num_rows, N, OUT, MORE, HAS_BIAS, GATED, SPLITS, MINE, more_mma,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["num_rows"])
def _int4_hopper_kernel(
    x_desc,
    more_desc,
    w_desc,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    y_desc,
    more_y_desc,
    num_rows,
    OUT,
    K,
    GROUP: gl.constexpr,
    HAS_ZEROS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
    MORE: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    N = 2 * OUT if GATED else OUT
    WIDTH: gl.constexpr = _OUTPUTS if GATED else 2 * _OUTPUTS
    BLOCK_M: gl.constexpr = ROWS + MORE
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, ROWS, _HALF], _ROW_LAYOUT)
    more_tiles = x_tiles
    if MORE:
        more_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, MORE, _HALF], _ROW_LAYOUT)
    w_tiles = gl.allocate_shared_memory(gl.int16, [2 * STAGES, _OUTPUTS, _QUARTER], _WORD_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ends = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ends.index(0), count=2)
    mbarrier.init(ends.index(1), count=1)
    mbarrier.init(ends.index(2), count=1)

    # Programs that read the same part of the weight follow each other.
    program = after_predecessor_here(gl.program_id(0), EARLY)
    num_row_blocks = gl.cdiv(num_rows, BLOCK_M)
    row_start = gl.maximum(gl.minimum(program % num_row_blocks * BLOCK_M, num_rows - BLOCK_M), 0)
    tile = program // num_row_blocks
    split = tile % SPLITS
    output_start = tile // SPLITS * WIDTH
    second_start = output_start + (OUT if GATED else _OUTPUTS)
    blocks = K // _BLOCK
    blocks_each = gl.cdiv(blocks, SPLITS)
    first = split * blocks_each
    steps = gl.maximum(gl.minimum(blocks_each, blocks - first), 0)
    gl.warp_specialize(
        [
            (_multiply_group, (
                scale_ptr, zero_ptr, bias_ptr, y_ptr, y_desc, more_y_desc, x_tiles, more_tiles, w_tiles, full,
                empty, ends, row_start, output_start, second_start, first, steps, blocks, split, num_rows, N,
                OUT, GROUP, HAS_ZEROS, HAS_BIAS, GATED, SPLITS, ROWS, MORE, STAGES, 0,
            )),
            (_multiply_group, (
                scale_ptr, zero_ptr, bias_ptr, y_ptr, y_desc, more_y_desc, x_tiles, more_tiles, w_tiles, full,
                empty, ends, row_start, output_start, second_start, first, steps, blocks, split, num_rows, N,
                OUT, GROUP, HAS_ZEROS, HAS_BIAS, GATED, SPLITS, ROWS, MORE, STAGES, 1,
            )),
            (_fetch, (
                x_desc, more_desc, w_desc, x_tiles, more_tiles, w_tiles, full, empty, row_start, output_start,
                second_start, first, steps, N, ROWS, MORE, STAGES,
            )),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def takes(x: Tensor, weight: Int4Weight, *, gated: bool) -> bool:
    """Whether the kernel can compute the layer; x's rows are to suit the copy engine."""
    results = weight.outputs // 2 if gated else weight.outputs
    types = {
        x.dtype,
        weight.scales.dtype,
        weight.scales.dtype if weight.zeros is None else weight.zeros.dtype,
    }
    return types == {torch.bfloat16} and results % 8 == 0 and gpu_of(x.device).has_wgmma


def launch_int4_hopper(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    y: Tensor,
    partial: Tensor,
    *,
    gated: bool,
    block_m: int,
    stages: int,
    splits: int,
) -> None:
    """x [M, K] -> y [M, N]; with several splits only their parts, float32 [splits, M, outputs of the weight].

    Args:
        block_m: rows of a program: 64, 128 or 256, or one of these and a smaller power of two from 16 on.
        splits: programs that share the sum over k.
    """
    num_rows, width = x.shape
    results = y.shape[1]
    own = OUTPUTS if gated else 2 * OUTPUTS
    words = weight.packed.view(torch.int16).view(-1, QUARTER)
    tiles = ceil_div(num_rows, block_m) * ceil_div(results, own)
    rows = 1 << block_m.bit_length() - 1
    more = block_m - rows
    _int4_hopper_kernel[(tiles * splits,)](
        TensorDescriptor.from_tensor(x, [rows, BLOCK // 2], _ROW_LAYOUT),
        TensorDescriptor.from_tensor(x, [more or rows, BLOCK // 2], _ROW_LAYOUT),
        TensorDescriptor.from_tensor(words, [OUTPUTS, QUARTER], _WORD_LAYOUT),
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias,
        partial,
        TensorDescriptor.from_tensor(y, [rows, OUTPUTS], _ROW_LAYOUT),
        TensorDescriptor.from_tensor(y, [more or rows, OUTPUTS], _ROW_LAYOUT),
        num_rows,
        results,
        width,
        GROUP=weight.group,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        GATED=gated,
        SPLITS=splits,
        ROWS=rows,
        MORE=more,
        STAGES=stages,
        EARLY=can_start_early(x.device),
        num_warps=4,
    )
