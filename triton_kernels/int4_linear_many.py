"""A linear layer of 4-bit weights, plain and gated, over the rows of a larger decode batch.

    int4_linear_many_with:        as int4_linear.int4_linear, by one configuration
    int4_gated_linear_many_with:  as int4_linear.int4_gated_linear, by one configuration

M rows, N outputs, K inputs. x's rows may be strided; the weight is as quantize_int4.py says. Needs TMA.

The copy engine fetches tiles several steps ahead. Packed weights become 16-bit numbers in registers, the tall
operand of the tensor cores; x is the narrow one. Scales are applied to the weights, which are rounded to the
dtype of x, or with SCALE_SUMS in float32 to the sums over 128 inputs (groups of 128 only). SPLITS programs
may share the sum over k; a second kernel adds their parts in a fixed order.

Cost: N*K/2 + 2*M*K bytes read, 2*M*N bytes written, 2*M*N*K FLOP: memory bound up to about 80 rows.
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

from triton_kernels.early_start import after_predecessor, can_start_early, let_next_start_here
from triton_kernels.int4_linear_hopper import launch_int4_hopper, takes
from triton_kernels.int4_packing import BLOCK, QUARTER, block_values, int4_divisor, int4_quarters
from triton_kernels.launch import ceil_div
from triton_kernels.linear_many import SUM_BLOCK, _sum_splits_kernel, first_of_block
from triton_kernels.quantize_int4 import Int4Weight, dequantize_int4
from triton_kernels.silu_mul import silu_mul

_BLOCK = tl.constexpr(BLOCK)
_QUARTER = tl.constexpr(QUARTER)


class Int4TiledConfig(NamedTuple):
    """A launch configuration of this file's kernel, or of int4_linear_hopper.py's."""

    block_m: int  # rows per program
    block_n: int  # outputs per program, at least 64
    num_warps: int
    num_stages: int
    splits: int = 1  # programs that share the sum over k
    scale_sums: bool = False  # else the weights are scaled; only groups of 128
    fused: bool = True  # else a gated layer's product is written, and another kernel gates it
    hopper: bool = False  # that kernel: 128 outputs of the weight and 12 warps a program


DEQUANTIZED = Int4TiledConfig(0, 0, 0, 0)
"""The weight is made 16-bit numbers, rounded to the dtype of x, which torch multiplies."""


@triton.jit
def _added(acc, words, x, values, SCALE_SUMS: tl.constexpr):
    """acc [outputs, rows] and the products of one block; x [rows, 128]."""
    dtype: tl.constexpr = x.dtype
    s0, s1, s2, s3, z0, z1, z2, z3 = values
    w0, w1, w2, w3 = int4_quarters(words, z0, z1, z2, z3, dtype)
    if not SCALE_SUMS:
        w0 *= s0.to(dtype)
        w1 *= s1.to(dtype)
        w2 *= s2.to(dtype)
        w3 *= s3.to(dtype)
    # [outputs, 32, 2, 2] -> [outputs, 128]: no number leaves its thread.
    quarters = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    w = tl.reshape(tl.permute(quarters, 0, 3, 2, 1), [words.shape[0], 4 * words.shape[1]])
    if SCALE_SUMS:
        return acc + tl.dot(w, x.T, input_precision="ieee") * s0.to(tl.float32)
    return tl.dot(w, x.T, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _int4_tiled_kernel(
    x_desc,
    w_desc,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    OUT,
    K,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    N = 2 * OUT if GATED else OUT
    # Programs that read the same part of the weight follow each other.
    program = after_predecessor(tl.program_id(0), EARLY)
    num_row_blocks = tl.cdiv(num_rows, BLOCK_M)
    row_start = first_of_block(program % num_row_blocks, num_rows, BLOCK_M)
    tile = program // num_row_blocks
    split = tile % SPLITS
    output_start = tile // SPLITS * BLOCK_N
    blocks = K // _BLOCK
    blocks_each = tl.cdiv(blocks, SPLITS)
    first = split * blocks_each
    scales = scale_ptr + tl.minimum(output_start + tl.arange(0, BLOCK_N), OUT - 1)
    zeros = zero_ptr + tl.minimum(output_start + tl.arange(0, BLOCK_N), OUT - 1)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    dtype: tl.constexpr = x_desc.dtype
    last = blocks - 1
    start = tl.minimum(first, last)
    values = block_values(scales, zeros, start, N, dtype, GROUP, HAS_ZEROS)
    up_values = values
    if GATED:
        up_values = block_values(
            scales + OUT, zeros + OUT, tl.minimum(first, last), N, dtype, GROUP, HAS_ZEROS
        )
    for block in range(first, min(first + blocks_each, blocks)):
        # The copy engine reads zeros beyond the last row; a tile beyond the last output has the next block's.
        # Scales come one turn ahead, because the compiler does not fetch them with the tiles.
        x = x_desc.load([row_start, block * _BLOCK])
        words = w_desc.load([block * N + output_start, 0])
        ahead = tl.minimum(block + 1, last)
        next_values = block_values(scales, zeros, ahead, N, dtype, GROUP, HAS_ZEROS)
        acc = _added(acc, words, x, values, SCALE_SUMS)
        values = next_values
        if GATED:
            words = w_desc.load([block * N + OUT + output_start, 0])
            next_values = block_values(scales + OUT, zeros + OUT, ahead, N, dtype, GROUP, HAS_ZEROS)
            up = _added(up, words, x, up_values, SCALE_SUMS)
            up_values = next_values
    acc *= int4_divisor(dtype)
    up *= int4_divisor(dtype)
    row_start = let_next_start_here(row_start, EARLY)
    outputs = (output_start + tl.arange(0, BLOCK_N))[:, None]
    rows = (row_start + tl.arange(0, BLOCK_M))[None, :]
    there = (rows < num_rows) & (outputs < OUT)
    if SPLITS > 1:  # y is the partial sums: float32 [SPLITS, M, N]
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
        tl.store(y_ptr + rows.to(tl.int64) * OUT + outputs, acc.to(y_ptr.dtype.element_ty), there)


def int4_linear_many_with(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, *, config: Int4TiledConfig
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] by one configuration.

    Raises:
        ValueError: the configuration is not for such a weight, rows or GPU.
    """
    if config == DEQUANTIZED:
        return F.linear(x, dequantize_int4(weight, x.dtype), bias)
    return _launch(x, weight, bias, False, config)


def int4_gated_linear_many_with(x: Tensor, weight: Int4Weight, *, config: Int4TiledConfig) -> Tensor:
    """x [M, K], weight [2F, K] -> silu(gate) * up, [M, F], by one configuration; raises as the above."""
    if config == DEQUANTIZED or not config.fused:
        return silu_mul(int4_linear_many_with(x, weight, config=config))
    return _launch(x, weight, None, True, config)


def _launch(
    x: Tensor, weight: Int4Weight, bias: Tensor | None, gated: bool, config: Int4TiledConfig
) -> Tensor:
    if config.scale_sums and weight.group != BLOCK:
        raise ValueError(f"scaling sums needs groups of {BLOCK}, got {weight.group} and {config}")
    if config.hopper and not takes(x, weight, gated=gated):
        raise ValueError(
            f"{config} needs a Hopper GPU, rows, scales and zero points of bfloat16, a multiple of 8 results;"
            f" got {x.device}, {x.dtype}, {weight.scales.dtype}, {weight.outputs} outputs"
        )
    num_rows, width = x.shape
    num_outputs = weight.outputs // 2 if gated else weight.outputs
    splits = config.splits
    y = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    partial = y
    if splits > 1:
        partial = torch.empty((splits, num_rows, weight.outputs), dtype=torch.float32, device=x.device)
    kind = {
        "HAS_BIAS": bias is not None,
        "GATED": gated,
        "SPLITS": splits,
        "EARLY": can_start_early(x.device),
    }
    if config.hopper:
        launch_int4_hopper(
            x, weight, bias, y, partial, gated=gated, block_m=config.block_m, stages=config.num_stages,
            splits=splits,
        )  # fmt: skip
    else:
        words = weight.packed.view(torch.int16).view(-1, QUARTER)
        tiles = ceil_div(num_rows, config.block_m) * ceil_div(num_outputs, config.block_n)
        _int4_tiled_kernel[(tiles * splits,)](
            TensorDescriptor.from_tensor(x, [config.block_m, BLOCK]),
            TensorDescriptor.from_tensor(words, [config.block_n, QUARTER]),
            weight.scales,
            weight.scales if weight.zeros is None else weight.zeros,
            x if bias is None else bias,
            partial,
            num_rows,
            num_outputs,
            width,
            GROUP=weight.group,
            HAS_ZEROS=weight.zeros is not None,
            SCALE_SUMS=config.scale_sums,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **kind,
        )
    if splits > 1:
        _sum_splits_kernel[(num_rows, ceil_div(num_outputs, SUM_BLOCK))](
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
