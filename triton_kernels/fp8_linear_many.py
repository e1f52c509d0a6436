"""A linear layer of FP8 numbers, plain and gated, over more rows: a decode batch, or a prompt.

    fp8_linear_many_with:        as fp8_linear.fp8_linear, by one configuration
    fp8_gated_linear_many_with:  as fp8_linear.fp8_gated_linear, by one configuration

M rows, N outputs, K inputs. x's rows may be strided, w is [N, K], contiguous; K a multiple of 16.

The copy engine (TMA) fetches tiles several steps ahead. A program computes one tile of outputs, or two that
share the tile of x (`wide`): two neighbours, or gate and up. SPLITS programs may share the sum over k; a
second kernel then adds their parts in a fixed order. With PERSISTENT, one program a multiprocessor goes
through all tiles. The tensor cores keep 14 bits of their sums: with TWO_LEVEL the sums over BLOCK_K inputs
are added up in float32; scales of blocks ask for that anyway.

Cost: N*K + M*K bytes read, 2*M*N bytes written, 2*M*N*K FLOP: memory bound up to about 300 rows.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.early_start import after_predecessor, can_start_early, let_next_start_here
from triton_kernels.gpu import num_multiprocessors
from triton_kernels.launch import ceil_div
from triton_kernels.linear_many import SUM_BLOCK, _sum_splits_kernel, first_of_block
from triton_kernels.quantize_fp8 import GROUP

_GROUP = tl.constexpr(GROUP)


class Fp8TiledConfig(NamedTuple):
    """A launch configuration of the kernel."""

    block_m: int  # rows per program
    block_n: int  # outputs per tile
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the sum over k
    rows_tall: bool = True  # x is the tall operand: at least 64 rows per program; else w
    wide: bool = False  # two tiles of outputs per program; gated layers always have two
    two_level: bool = True
    persistent: bool = False
    row_blocks: int = 64  # blocks of rows that share outputs, before the next outputs' turn


LIBRARY = Fp8TiledConfig(0, 0, 0, 0, 0)
"""Stands for torch's own product; fp8_linear_torch.py has it."""


@triton.jit
def _product(w, x, acc, ROWS_TALL: tl.constexpr, TWO_LEVEL: tl.constexpr):
    """acc and the product of w [outputs, k] and x [rows, k]: [rows, outputs] if ROWS_TALL, or transposed."""
    if TWO_LEVEL:
        return acc + (tl.dot(x, w.T) if ROWS_TALL else tl.dot(w, x.T))
    elif ROWS_TALL:
        return tl.dot(x, w.T, acc)
    else:
        return tl.dot(w, x.T, acc)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_tiled_kernel(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    OUT,
    K,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_TALL: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    PERSISTENT: tl.constexpr,
    EARLY: tl.constexpr,
):
    STEP_N: tl.constexpr = 2 * BLOCK_N if WIDE and not GATED else BLOCK_N
    TALL: tl.constexpr = BLOCK_M if ROWS_TALL else BLOCK_N
    NARROW: tl.constexpr = BLOCK_N if ROWS_TALL else BLOCK_M
    program = after_predecessor(tl.program_id(0), EARLY)
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    num_output_blocks = tl.cdiv(OUT, STEP_N)
    num_units = num_row_blocks * num_output_blocks * SPLITS
    last_unit = num_units if PERSISTENT else program + 1
    blocks = tl.cdiv(K, BLOCK_K)
    blocks_each = tl.cdiv(blocks, SPLITS)
    second = OUT if GATED else BLOCK_N  # how far behind its outputs those of the second tile are
    groups = tl.cdiv(K, _GROUP)
    scale_rows = tl.cdiv(OUT, _GROUP)
    for unit in range(program, last_unit, tl.num_programs(0)):
        # Programs that read the same part of the weight follow each other, for ROW_BLOCKS blocks of rows.
        split = unit % SPLITS
        tile = unit // SPLITS
        batch = tile // (ROW_BLOCKS * num_output_blocks)
        batch_rows = tl.minimum(num_row_blocks - batch * ROW_BLOCKS, ROW_BLOCKS)
        place = tile % (ROW_BLOCKS * num_output_blocks)
        row_start = first_of_block(batch * ROW_BLOCKS + place % batch_rows, num_rows, BLOCK_M)
        output_start = place // batch_rows * STEP_N
        first = split * blocks_each
        last = tl.minimum(first + blocks_each, blocks)
        rows = row_start + tl.arange(0, BLOCK_M)
        acc = tl.zeros([TALL, NARROW], tl.float32)
        more = tl.zeros([TALL, NARROW], tl.float32)
        if BLOCKS:
            scale_row = output_start // _GROUP
            w_scales = w_scale_ptr + scale_row * groups
            if GATED:
                more_scales = w_scales + scale_rows * groups
            else:
                second_row = tl.minimum((output_start + BLOCK_N) // _GROUP, scale_rows - 1)
                more_scales = w_scale_ptr + second_row * groups
            x_scales = x_scale_ptr + rows
            x_scale = tl.load(x_scales + first * num_rows, rows < num_rows, other=0.0)
        for block in range(first, last):
            # Beyond the last row lies what `with_rows_behind` says, beyond the last column zeros.
            x = x_desc.load([row_start, block * BLOCK_K])
            w = w_desc.load([output_start, block * BLOCK_K])
            if BLOCKS:
                scale = tl.expand_dims(x_scale, 1 if ROWS_TALL else 0)
                ahead = tl.minimum(block + 1, last - 1)
                x_scale = tl.load(x_scales + ahead * num_rows, rows < num_rows, other=0.0)
                product = _product(w, x, tl.zeros([TALL, NARROW], tl.float32), ROWS_TALL, False)
                acc += product * (scale * tl.load(w_scales + block))
            else:
                acc = _product(w, x, acc, ROWS_TALL, TWO_LEVEL)
            if WIDE:
                w = w_desc.load([second + output_start, block * BLOCK_K])
                if BLOCKS:
                    product = _product(w, x, tl.zeros([TALL, NARROW], tl.float32), ROWS_TALL, False)
                    more += product * (scale * tl.load(more_scales + block))
                else:
                    more = _product(w, x, more, ROWS_TALL, TWO_LEVEL)
        if not PERSISTENT:
            row_start = let_next_start_here(row_start, EARLY)
        wide_rows = tl.expand_dims(row_start + tl.arange(0, BLOCK_M), 1 if ROWS_TALL else 0)
        outputs = tl.expand_dims(output_start + tl.arange(0, BLOCK_N), 0 if ROWS_TALL else 1)
        there = (wide_rows < num_rows) & (outputs < OUT)
        if not BLOCKS:
            scale = tl.load(x_scale_ptr + wide_rows, wide_rows < num_rows, other=0.0)
            acc *= scale * tl.load(w_scale_ptr + outputs, outputs < OUT, other=0.0)
            if WIDE:
                inside = outputs < OUT if GATED else outputs + BLOCK_N < OUT
                more *= scale * tl.load(w_scale_ptr + second + outputs, inside, other=0.0)
        if SPLITS > 1:  # y is the partial sums: float32 [SPLITS, M, N]
            N = 2 * OUT if GATED else OUT
            places = (split * num_rows + wide_rows).to(tl.int64) * N + outputs
            tl.store(y_ptr + places, acc, there)
            if WIDE:
                inside = there if GATED else there & (outputs + BLOCK_N < OUT)
                tl.store(y_ptr + places + second, more, inside)
        else:
            y_ptrs = y_ptr + wide_rows.to(tl.int64) * OUT + outputs
            dtype = y_ptr.dtype.element_ty
            if HAS_BIAS:
                acc += tl.load(bias_ptr + outputs, outputs < OUT, other=0.0).to(tl.float32)
            if GATED:
                gate = acc.to(dtype).to(tl.float32)
                acc = gate * tl.sigmoid(gate) * more.to(dtype).to(tl.float32)
            tl.store(y_ptrs, acc.to(dtype), there)
            if WIDE and not GATED:
                inside = outputs + BLOCK_N < OUT
                if HAS_BIAS:
                    more += tl.load(bias_ptr + BLOCK_N + outputs, inside, other=0.0).to(tl.float32)
                tl.store(y_ptrs + BLOCK_N, more.to(dtype), there & inside)


def with_rows_behind(x: Tensor, block_m: int) -> Tensor:
    """x [M, K] with what its memory holds behind it as further rows, `block_m` in all, if there is room.

    Zeros beyond the last row take the copy engine longer than rows do, whatever these hold: each row of a
    product depends on its own row of x alone.
    """
    num_rows, width = x.shape
    end = x.storage_offset() + (block_m - 1) * x.stride(0) + width
    if num_rows >= block_m or end * x.element_size() > x.untyped_storage().nbytes():
        return x
    return x.as_strided((block_m, width), x.stride())


def fp8_linear_many_with(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    config: Fp8TiledConfig,
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] by one configuration, whatever the device."""
    return _launch(x, x_scale, weight, weight_scale, bias, False, dtype, config)


def fp8_gated_linear_many_with(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    config: Fp8TiledConfig,
) -> Tensor:
    """x [M, K], weight [2F, K] -> silu(gate) * up, [M, F], by one configuration, whatever the device."""
    return _launch(x, x_scale, weight, weight_scale, None, True, dtype, config)


def _launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    gated: bool,
    dtype: torch.dtype,
    config: Fp8TiledConfig,
) -> Tensor:
    blocks = weight_scale.dim() == 2
    if blocks and (config.block_k != GROUP or GROUP % config.block_n):
        raise ValueError(
            f"scales of blocks need block_k = {GROUP} and a block_n that divides it, got {config}"
        )
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    splits = config.splits
    wide = gated or config.wide
    y = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    partial = y
    if splits > 1:
        partial = torch.empty((splits, num_rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    kind = {
        "HAS_BIAS": bias is not None,
        "GATED": gated,
        "SPLITS": splits,
        "EARLY": can_start_early(x.device),
    }
    outputs_each = config.block_n * (2 if wide and not gated else 1)
    units = ceil_div(num_rows, config.block_m) * ceil_div(num_outputs, outputs_each) * splits
    programs = min(units, num_multiprocessors(x.device)) if config.persistent else units
    _fp8_tiled_kernel[(programs,)](
        TensorDescriptor.from_tensor(with_rows_behind(x, config.block_m), [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        x_scale,
        weight_scale,
        x_scale if bias is None else bias,
        partial,
        num_rows,
        num_outputs,
        width,
        BLOCKS=blocks,
        WIDE=wide,
        TWO_LEVEL=config.two_level,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        ROWS_TALL=config.rows_tall,
        ROW_BLOCKS=config.row_blocks,
        PERSISTENT=config.persistent,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **kind,
    )
    if splits > 1:
        _sum_splits_kernel[(num_rows, ceil_div(num_outputs, SUM_BLOCK))](
            partial,
            x_scale if bias is None else bias,
            y,
            num_rows,
            num_outputs,
            BLOCK=SUM_BLOCK,
            num_warps=4,
            **kind,
        )
    return y
