"""A linear layer of 4-bit weights and 16-bit rows, plain and as a gated MLP's first half.

    int4_linear:        y[m, n] = sum over k of x[m, k] * w[n, k]  (+ bias[n])
    int4_gated_linear:  y[m, f] = silu(g) * u,   g, u = round of the above at n = f and n = F + f;   N = 2 * F

M rows, N outputs, K inputs, F = N / 2. The weight is as quantize_int4.py says, x's rows may be strided. Sums
in float32, `round` to the dtype of x.

int4_linear_warp.py serves up to 16 rows of bfloat16, int4_linear_few.py up to FEW_ROWS, and on GPUs with TMA
int4_linear_many.py up to MOST_ROWS; on Hopper it takes over at 17 rows, or at 9 (`_suits_tiles`), and from 65
rows on it mostly launches int4_linear_hopper.py. Beyond MOST_ROWS the weight is made 16-bit numbers, which
torch multiplies: that takes 2*N*K bytes of memory for a moment.
"""

import functools

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.int4_linear_few import FEW_ROWS, int4_gated_linear_few, int4_linear_few
from triton_kernels.int4_linear_hopper import OUTPUTS, takes
from triton_kernels.int4_linear_many import (
    DEQUANTIZED,
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)
from triton_kernels.int4_linear_warp import int4_gated_linear_warp, int4_linear_warp, suits_warps
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_int4 import Int4Weight, check_int4, dequantize_int4_reference
from triton_kernels.silu_mul import silu_mul_reference
from triton_kernels.tuning import tuned

MOST_ROWS = 512
_MOST_TUNED = 256
BETWEEN = (96, 160, 192)
"""Numbers of rows between two powers of two for which Hopper's kernel has tiles; tuned, as the powers are."""
HOPPER_TILES = {96: (7, 0.81), 128: (5, 0.86), 160: (4, 1.09), 192: (4, 1.16), 256: (3, 1.47)}
"""Rows of a program of Hopper's kernel: the stages that fit, and microseconds of a step on an H200."""
_LARGE = 4096 * 4096
"""Numbers of a weight from which on the kernel for many rows is the faster one from 9 rows on."""


def shared_bytes_of_numbers(weight_rows: int) -> int:
    """What numbers made of a tile of weights take beside its stages: from Triton 3.8 on they pass there."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return 2 * BLOCK * weight_rows if version >= (3, 8) else 0


def int4_linear_reference(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """The same as int4_linear, in plain torch; in float64 if x is, else in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    numbers = dequantize_int4_reference(weight, wide)
    return F.linear(x.to(wide), numbers, None if bias is None else bias.to(wide)).to(x.dtype)


def int4_gated_linear_reference(x: Tensor, weight: Int4Weight) -> Tensor:
    """The same as int4_gated_linear, in plain torch."""
    return silu_mul_reference(int4_linear_reference(x, weight))


def default_int4_tiled_config(
    num_outputs: int, rows: int, gated: bool, gpu: Gpu, group: int = BLOCK
) -> Int4TiledConfig:
    """The configuration of the kernel for many rows if none is given or tuned.

    On Hopper, for up to FEW_ROWS rows, it was the fastest of those tried on an H200 with Llama-3.1-8B's
    layers. For more, tuning finds up to 1.7 times the speed.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
        rows: as `_size_of` gives it.
    """
    rows = next_power_of_2(rows)
    if not gpu.multiplies_from_shared:
        block_m, block_n, warps = max(16, min(rows, 128)), 64, 4
        if num_outputs > 8192 and not gated:
            block_n, warps = 128, 8
        tiles = ceil_div(rows, block_m) * ceil_div(num_outputs, block_n)
        splits = max(1, min(4, gpu.multiprocessors // tiles))
        weight_bytes = BLOCK_BYTES * block_n * (2 if gated else 1)
        # The weight's tiles do not go through registers.
        others = weight_bytes + shared_bytes_of_numbers(2 * block_n if gated else block_n)
        stages = gpu.stages_that_fit(6, weight_bytes + 4 * BLOCK_BYTES * block_m, others)
        return Int4TiledConfig(block_m, block_n, warps, stages, splits)
    if rows <= FEW_ROWS:
        return Int4TiledConfig(max(16, rows), 64, 4, 3, 2 if gated else 4, scale_sums=group == BLOCK)
    block_m, block_n, warps = max(16, min(rows, 256)), 128, 8
    fused = not gated or block_m <= 64  # else a thread has no room for the sums of both halves
    weight_rows = 2 * block_n if gated and fused else block_n
    tiles = ceil_div(rows, block_m) * ceil_div(num_outputs * (1 if fused else 2), block_n)
    splits = max(1, min(4, gpu.multiprocessors // tiles))
    stage_bytes = BLOCK_BYTES * (weight_rows + 4 * block_m)
    stages = gpu.stages_that_fit(6, stage_bytes, shared_bytes_of_numbers(weight_rows))
    return Int4TiledConfig(
        block_m, block_n, warps, stages, splits, scale_sums=group == BLOCK and block_m <= 128, fused=fused
    )


@functools.cache  # launches that are not recorded ask each time
def default_hopper_config(num_outputs: int, width: int, rows: int, gated: bool, gpu: Gpu) -> Int4TiledConfig:
    """The configuration of Hopper's kernel that should take the least time, if none is given or tuned.

    Of Llama-3.1-8B's layers over 80 to 512 rows, on an H200, it was the fastest of those tried, or up to 6 %
    slower.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
    """
    sums = num_outputs * (2 if gated else 1)

    def microseconds(block_m: int, splits: int) -> float:
        tiles = ceil_div(rows, block_m) * ceil_div(sums, 2 * OUTPUTS)
        steps = ceil_div(tiles * splits, gpu.multiprocessors) * ceil_div(width // BLOCK, splits)
        # Parts are written and read again, and another kernel adds them up.
        adding = 2 + splits * rows * sums * 8 / 5e6 if splits > 1 else 0
        return steps * HOPPER_TILES[block_m][1] + adding

    every = [(block_m, splits) for block_m in HOPPER_TILES for splits in range(1, 5)]
    block_m, splits = min(every, key=lambda one: microseconds(*one))
    return Int4TiledConfig(block_m, 2 * OUTPUTS, 12, HOPPER_TILES[block_m][0], splits, hopper=True)


def suits_hopper(num_outputs: int, gpu: Gpu) -> bool:
    """Whether Hopper's kernel can store a layer's results, of bfloat16."""
    return gpu.has_wgmma and num_outputs % 8 == 0


def default_many_config(
    num_outputs: int, width: int, rows: int, gated: bool, gpu: Gpu, group: int = BLOCK, *, hopper: bool
) -> Int4TiledConfig:
    """The configuration if none is tuned.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
        rows: a power of two, or one of BETWEEN.
        hopper: the layer suits Hopper's kernel.
    """
    if hopper and rows > 64:
        return default_hopper_config(num_outputs, width, rows, gated, gpu)
    return default_int4_tiled_config(num_outputs, rows, gated, gpu, group)


def _size_of(rows: int) -> int:
    """The number of rows, of those that are tuned, whose configuration serves `rows`.

    A tile larger than the rows is filled with zeros, which takes the copy engine longer than rows do.
    """
    power = next_power_of_2(rows)
    return next((size for size in BETWEEN if power // 2 < rows <= size < power), power)


def _many_config(x: Tensor, weight: Int4Weight, gated: bool) -> Int4TiledConfig:
    outputs = weight.outputs // 2 if gated else weight.outputs
    size = _size_of(x.shape[0])
    hopper = takes(x, weight, gated=gated)
    if hopper and x.shape[0] > _MOST_TUNED:
        return default_hopper_config(outputs, weight.width, x.shape[0], gated, gpu_of(x.device))
    default = default_many_config(
        outputs, weight.width, size, gated, gpu_of(x.device), weight.group, hopper=hopper
    )
    op = "int4_gated_linear_many" if gated else "int4_linear_many"
    exact = (weight.outputs, weight.width, weight.group, int(weight.zeros is not None))
    config = tuned(default, op, x.device, x.dtype, exact=exact, near=(), size=size)
    # A table from before so few rows were tuned has a choice for 64.
    is_for_more = size <= FEW_ROWS and config.block_m != size
    return default if is_for_more or (config.hopper and not hopper) else config


def _suits_tma(x: Tensor) -> bool:
    is_aligned = x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x.shape[0] <= MOST_ROWS and is_aligned and gpu_of(x.device).has_tma


def _suits_tiles(x: Tensor, weight: Int4Weight) -> bool:
    """Whether the kernel for many rows is faster than those for few, as it was on an H200.

    Other groups than 128, and zero points, take it more instructions for each weight, so it needs more rows.
    Of smaller layers up to 16 rows were not measured.
    """
    is_plain = weight.group == BLOCK and weight.zeros is None
    fewest = 9 if is_plain and weight.outputs * weight.width >= _LARGE else 17
    is_16_bit = x.dtype in (torch.bfloat16, torch.float16)
    return x.shape[0] >= fewest and is_16_bit and gpu_of(x.device).has_wgmma and _suits_tma(x)


# Opaque to torch.compile, whose code serves any number of rows: the op chooses when it runs, which is once
# for each recorded graph.


@torch.library.custom_op("minisgl::int4_linear_many", mutates_args=())
def int4_linear_many(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """int4_linear, by the fastest kernel for this number of rows."""
    weight = Int4Weight(packed, scales, zeros)
    if x.device.type == "cpu":
        return int4_linear_reference(x, weight, bias)
    if not _suits_tiles(x, weight):
        if suits_warps(x, weight, gated=False):
            return int4_linear_warp(x, weight, bias)
        if x.shape[0] <= FEW_ROWS:
            return int4_linear_few(x, weight, bias)
    if _suits_tma(x):
        return int4_linear_many_with(x, weight, bias, config=_many_config(x, weight, False))
    return int4_linear_many_with(x, weight, bias, config=DEQUANTIZED)


@int4_linear_many.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[1]))


@torch.library.custom_op("minisgl::int4_gated_linear_many", mutates_args=())
def int4_gated_linear_many(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """int4_gated_linear, by the fastest kernel for this number of rows."""
    weight = Int4Weight(packed, scales, zeros)
    if x.device.type == "cpu":
        return int4_gated_linear_reference(x, weight)
    if not _suits_tiles(x, weight):
        if suits_warps(x, weight, gated=True):
            return int4_gated_linear_warp(x, weight)
        if x.shape[0] <= FEW_ROWS:
            return int4_gated_linear_few(x, weight)
    if _suits_tma(x):
        return int4_gated_linear_many_with(x, weight, config=_many_config(x, weight, True))
    return int4_gated_linear_many_with(x, weight, config=DEQUANTIZED)


@int4_gated_linear_many.register_fake
def _(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], packed.shape[1] // 2))


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None) -> Tensor:
    """x [M, K], bias [N] -> [M, N], all of one dtype.

    Raises:
        ValueError: the weight's tensors do not fit each other, or x; or a bias of another dtype.
    """
    _check(x, weight)
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"a bias is of the dtype of x, {x.dtype}; got {bias.dtype}")
    if x.device.type == "cpu":
        return int4_linear_reference(x, weight, bias)
    return int4_linear_many(x, *weight, bias)


def int4_gated_linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """x [M, K], a weight [2F, K] (the gate's outputs first) -> silu(gate) * up, [M, F], of the dtype of x.

    Raises:
        ValueError: the weight's tensors do not fit each other, or x.
    """
    _check(x, weight)
    if x.device.type == "cpu":
        return int4_gated_linear_reference(x, weight)
    return int4_gated_linear_many(x, *weight)


def _check(x: Tensor, weight: Int4Weight) -> None:
    check_int4(weight)
    if x.shape[1] != weight.width:
        raise ValueError(f"a weight of {weight.width} inputs needs rows of as many, got {x.shape[1]}")
