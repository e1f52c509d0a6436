"""A linear layer, plain and gated, over the rows of a larger decode batch: up to MOST_ROWS.

    linear_many:        as linear.linear
    gated_linear_many:  as linear.gated_linear

M rows, N outputs, K inputs. x's rows may be strided, w is [N, K], contiguous; K a multiple of 8.

BLOCK_N rows of w are the tall operand of the tensor cores and BLOCK_M rows of x the narrow one, or the other
way round; the copy engine (TMA) fetches both several steps ahead. The tall operand has at least 64 rows; with
few outputs it is x, so that more programs share the outputs. If that still leaves multiprocessors idle,
SPLITS programs share the sum over k, and a second kernel adds their partial sums in a fixed order.

linear_few.py serves up to FEW_ROWS rows. For more rows the tuning table chooses a configuration or torch's
own product by shape and rows; without an entry torch's product is used. A row's result is the same to the
last bit in all batches with the same configuration.

Cost: N*K elements read, x once for every BLOCK_N outputs: memory bound up to about 200 rows. 2*M*N*K FLOP.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_kernels.early_start import (
    after_predecessor,
    between_kernels,
    can_start_early,
    fetch_into_l2,
    let_next_start_here,
)
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear_few import FEW_ROWS, gated_linear_triton, linear_triton
from triton_kernels.silu_mul import silu_mul
from triton_kernels.tuning import has_entry, tuned

MOST_ROWS = 256
LARGE_WEIGHT = 1 << 27
"""Elements of a weight above which the time of a launch is negligible."""
SUM_BLOCK = 512
_LINE = tl.constexpr(64)
"""Inputs in a line of memory."""
_LINES_AHEAD = tl.constexpr(8)


class TiledConfig(NamedTuple):
    """A launch configuration of the kernel; LIBRARY = torch's own product instead."""

    block_m: int  # rows per program
    block_n: int  # outputs per program
    block_k: int
    splits: int  # programs that share the sum over k
    num_warps: int
    num_stages: int
    rows_tall: bool = False  # x is the tall operand: at least 64 rows per program, outputs from 16 on


LIBRARY = TiledConfig(0, 0, 0, 0, 0, 0)


@triton.jit
def _product(w, x, acc, ROWS_TALL: tl.constexpr):
    """acc and the product of w [outputs, k] and x [rows, k]: [rows, outputs] if ROWS_TALL, or transposed."""
    if ROWS_TALL:
        return tl.dot(x, w.T, acc, input_precision="ieee")
    else:
        return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit
def first_of_block(block, num_rows, BLOCK_M: tl.constexpr):
    """The first row of a block of BLOCK_M rows.

    The last block ends where the rows end, so the block before may have some of its rows, too; both yield the
    same numbers. Zeros beyond the last row take the copy engine longer than rows.
    """
    return tl.maximum(tl.minimum(block * BLOCK_M, num_rows - BLOCK_M), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _tiled_linear_kernel(
    x_desc,
    w_desc,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    OUT,
    K,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_TALL: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Programs that read the same part of the weight follow each other.
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    row_start = first_of_block(tl.program_id(0) % num_row_blocks, num_rows, BLOCK_M)
    tile = tl.program_id(0) // num_row_blocks
    split = tile % SPLITS
    output_start = tile // SPLITS * BLOCK_N
    blocks = tl.cdiv(K, BLOCK_K)
    blocks_each = tl.cdiv(blocks, SPLITS)
    first = split * blocks_each
    if EARLY:
        # Prefetch the weights' first lines, which no kernel writes, while the previous kernel ends.
        ahead_k = tl.minimum(first * BLOCK_K + tl.arange(0, _LINES_AHEAD) * _LINE, K - 1)
        ahead_outputs = tl.minimum(output_start + tl.arange(0, BLOCK_N), OUT - 1).to(tl.int64)
        fetch_into_l2(w_ptr + ahead_outputs[:, None] * K + ahead_k[None, :])
        if GATED:
            fetch_into_l2(w_ptr + (OUT + ahead_outputs)[:, None] * K + ahead_k[None, :])
    row_start = after_predecessor(row_start, EARLY)
    acc = tl.zeros([BLOCK_M, BLOCK_N] if ROWS_TALL else [BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N] if ROWS_TALL else [BLOCK_N, BLOCK_M], tl.float32)
    for block in range(first, min(first + blocks_each, blocks)):
        # The copy engine reads zeros beyond the last row and column.
        x = x_desc.load([row_start, block * BLOCK_K])
        w = w_desc.load([output_start, block * BLOCK_K])
        acc = _product(w, x, acc, ROWS_TALL)
        if GATED:
            w = w_desc.load([OUT + output_start, block * BLOCK_K])
            up = _product(w, x, up, ROWS_TALL)
    row_start = let_next_start_here(row_start, EARLY)
    outputs = tl.expand_dims(output_start + tl.arange(0, BLOCK_N), 0 if ROWS_TALL else 1)
    rows = tl.expand_dims(row_start + tl.arange(0, BLOCK_M), 1 if ROWS_TALL else 0)
    there = (rows < num_rows) & (outputs < OUT)
    if SPLITS > 1:  # y is the partial sums: float32 [SPLITS, M, N]
        N = 2 * OUT if GATED else OUT
        places = (split * num_rows + rows).to(tl.int64) * N + outputs
        tl.store(y_ptr + places, acc, there)
        if GATED:
            tl.store(y_ptr + places + OUT, up, there)
    else:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + outputs, outputs < OUT, other=0.0).to(tl.float32)
        if GATED:
            gate = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
            acc = gate * tl.sigmoid(gate) * up.to(y_ptr.dtype.element_ty).to(tl.float32)
        y_ptrs = y_ptr + rows.to(tl.int64) * OUT + outputs
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), there)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_splits_kernel(
    partial_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    OUT,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    N = 2 * OUT if GATED else OUT
    # Behind a gated layer of 4 bits, one of many inputs follows. Started early, its programs would be shared
    # out unevenly. Other gated layers have one part, if nothing else is tuned.
    row = tl.program_id(0)
    row = after_predecessor(row, EARLY) if GATED else between_kernels(row, EARLY)
    row = row.to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = outputs < OUT
    acc = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        places = partial_ptr + (split * num_rows + row) * N + outputs
        acc += tl.load(places, there, other=0.0)
        if GATED:
            up += tl.load(places + OUT, there, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outputs, there, other=0.0).to(tl.float32)
    if GATED:
        gate = acc.to(y_ptr.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * OUT + outputs, acc.to(y_ptr.dtype.element_ty), there)


def linear_many_with(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: TiledConfig) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] by one configuration, whatever the device."""
    return F.linear(x, weight, bias) if config == LIBRARY else _launch(x, weight, bias, False, config)


def gated_linear_many_with(x: Tensor, weight: Tensor, *, config: TiledConfig) -> Tensor:
    """x [M, K], weight [2F, K] -> silu(gate) * up, [M, F], by one configuration, whatever the device."""
    if config == LIBRARY:
        return silu_mul(F.linear(x, weight))
    return _launch(x, weight, None, True, config)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, config: TiledConfig) -> Tensor:
    num_rows, width = x.shape
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    splits = config.splits
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    partial = y
    if splits > 1:
        partial = torch.empty((splits, num_rows, weight.shape[0]), dtype=torch.float32, device=x.device)
    kind = {
        "HAS_BIAS": bias is not None,
        "GATED": gated,
        "SPLITS": splits,
        "EARLY": can_start_early(x.device),
    }
    tiles = ceil_div(num_rows, config.block_m) * ceil_div(num_outputs, config.block_n)
    _tiled_linear_kernel[(tiles * splits,)](
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        weight,
        x if bias is None else bias,
        partial,
        num_rows,
        num_outputs,
        width,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        ROWS_TALL=config.rows_tall,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **kind,
    )
    if splits > 1:
        grid = (num_rows, ceil_div(num_outputs, SUM_BLOCK))
        _sum_splits_kernel[grid](
            partial,
            x if bias is None else bias,
            y,
            num_rows,
            num_outputs,
            BLOCK=SUM_BLOCK,
            num_warps=4,
            **kind,
        )
    return y


def is_for_many(x: Tensor, weight: Tensor, op: str) -> bool:
    """Whether the tuning table has an entry for this layer and the look-up is worth its time.

    Compiled code looks up once, when it is recorded. Otherwise the host's time per launch counts, so only
    large weights are worth it.

    Args:
        op: "linear_many" or "gated_linear_many".
    """
    return (
        x.device.type == "cuda"
        and x.element_size() == 2
        and (torch.compiler.is_compiling() or (x.shape[0] <= MOST_ROWS and weight.numel() >= LARGE_WEIGHT))
        and has_entry(op, x.device, x.dtype, (weight.shape[0], weight.shape[1]))
    )


def _are_few(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.shape[0] <= FEW_ROWS


def _config(x: Tensor, weight: Tensor, op: str) -> TiledConfig:
    num_rows, width = x.shape
    if num_rows > MOST_ROWS or width % 8 or x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return LIBRARY
    size = next_power_of_2(num_rows)
    return tuned(LIBRARY, op, x.device, x.dtype, exact=(weight.shape[0], width), near=(), size=size)


# Opaque to torch.compile, whose code serves any number of rows: the op chooses when it runs, which is once
# for each recorded graph.


@torch.library.custom_op("minisgl::linear_many", mutates_args=())
def linear_many(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear, by the fastest kernel for this number of rows."""
    if _are_few(x):
        return linear_triton(x, weight, bias)
    return linear_many_with(x, weight, bias, config=_config(x, weight, "linear_many"))


@linear_many.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("minisgl::gated_linear_many", mutates_args=())
def gated_linear_many(x: Tensor, weight: Tensor) -> Tensor:
    """gated_linear, by the fastest kernel for this number of rows."""
    if _are_few(x):
        return gated_linear_triton(x, weight)
    return gated_linear_many_with(x, weight, config=_config(x, weight, "gated_linear_many"))


@gated_linear_many.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))
