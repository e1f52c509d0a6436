"""A linear layer of FP8 numbers (e4m3), plain and as a gated MLP's first half.

    fp8_linear:        y[m, n] = sum over k of x[m, k] * w[n, k] * s(m, n, k)  (+ bias[n])
    fp8_gated_linear:  y[m, f] = silu(g) * u,   g, u = round of the above at n = f and n = F + f;  N = 2 * F

with scales of channels, s(m, n, k) = sx[0, m] * sw[n], sw float32 [N], or with scales of blocks,
s(m, n, k) = sx[k // 128, m] * sw[n // 128, k // 128], sw float32 [ceil(N / 128), ceil(K / 128)]. A gated
weight with scales of blocks has them for its halves apart, the gate's first: ceil(F / 128) each. sx is what
quantize_fp8 gives.

M rows, N outputs, K inputs, F = N / 2. x and w are e4m3, w is [N, K], contiguous, x's rows may be strided.
Sums in float32, `round` to the dtype of y. A scale for the whole weight is sw with equal values.

fp8_linear_few.py serves up to FEW_ROWS rows, fp8_linear_many.py or fp8_linear_torch.py more, as the tuning
table says, or else `default_fp8_choice`. GPUs before 8.9 have no FP8: there, plain torch multiplies in
float32, slowly.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.fp8_linear_few import (
    FEW_ROWS,
    FEWEST_ROWS,
    fp8_gated_linear_few,
    fp8_gated_linear_few_with_peaks,
    fp8_linear_few,
)
from triton_kernels.fp8_linear_many import (
    LIBRARY,
    Fp8TiledConfig,
    fp8_gated_linear_many_with,
    fp8_linear_many_with,
)
from triton_kernels.fp8_linear_torch import fp8_linear_torch
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_fp8 import (
    GROUP,
    dequantize_fp8,
    empty_fp8,
    quantize_fp8,
    quantize_fp8_triton,
    quantize_fp8_with_peaks,
    silu_mul_fp8_triton,
)
from triton_kernels.silu_mul import silu_mul, silu_mul_reference
from triton_kernels.tuning import tuned

ROOM = 128
"""Rows that the second half of a gated MLP may read, whatever lies behind the last (`with_rows_behind`)."""


def fp8_linear_reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The same as fp8_linear, in plain torch; in float64 if that is the dtype, else in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = dequantize_fp8(x, x_scale, wide)
    y = F.linear(
        rows, dequantized_weight(weight, weight_scale, wide), None if bias is None else bias.to(wide)
    )
    return y.to(dtype)


def fp8_gated_linear_reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The same as fp8_gated_linear, in plain torch."""
    halves = [
        fp8_linear_reference(x, x_scale, part, scales, dtype=dtype)
        for part, scales in zip(weight.chunk(2), weight_scale.chunk(2), strict=True)
    ]
    return silu_mul_reference(torch.cat(halves, dim=1))


def dequantized_weight(weight: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight of FP8 numbers as numbers of `dtype`; scales of channels, or of blocks of an ungated one."""
    if scales.dim() == 1:
        return weight.to(dtype) * scales.to(dtype).unsqueeze(1)
    wide = scales.to(dtype).repeat_interleave(GROUP, 0)[: weight.shape[0]]
    return weight.to(dtype) * wide.repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


def default_fp8_choice(
    num_outputs: int, width: int, rows: int, blocks: bool, gated: bool, gpu: Gpu
) -> Fp8TiledConfig:
    """What multiplies if nothing is tuned: LIBRARY where it was faster on an H200, or our own kernel.

    Args: as default_fp8_tiled_config; width: the inputs, K.
    """
    if gpu.has_wgmma and _has_cuda_12_9() and library_takes(num_outputs, width, blocks):
        if rows > (FEW_ROWS if blocks else 128) and (blocks or rows <= 512):
            return LIBRARY
        if gated and rows == 128 and ceil_div(num_outputs, 128) > gpu.multiprocessors:
            return LIBRARY  # our tiles of 128 outputs would take a second turn
    return default_fp8_tiled_config(num_outputs, rows, blocks, gated, gpu)


def library_takes(num_outputs: int, width: int, blocks: bool) -> bool:
    """Whether torch's product serves such a weight: with scales of blocks on Hopper, since CUDA 12.9."""
    if blocks:
        return _has_cuda_12_9() and num_outputs % GROUP == 0 and width % (4 * GROUP) == 0
    return num_outputs % 16 == 0 and width % 16 == 0


def _has_cuda_12_9() -> bool:
    """Before, torch multiplies with scales of channels by another library, which was not measured."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2]) >= (12, 9)


def default_fp8_tiled_config(
    num_outputs: int, rows: int, blocks: bool, gated: bool, gpu: Gpu
) -> Fp8TiledConfig:
    """Our own kernel's configuration if none is given or tuned; measured on an H200.

    Args:
        num_outputs: outputs per row: N, or N / 2 if `gated`.
        rows: a power of two, or 192.
    """
    if rows > 512:
        config = _prompt_config(blocks, gated)
    elif blocks:
        config = _blocks_config(num_outputs, rows, gated, gpu)
    elif rows > 64 and num_outputs > 8192:
        config = Fp8TiledConfig(128, 128, GROUP, 8, 4)
    else:
        block_m = max(16, min(rows, 128))
        splits = 1 if gated else _splits(num_outputs, rows, block_m, 64, gpu)
        config = Fp8TiledConfig(block_m, 64, 2 * GROUP, 4, 4, splits, rows_tall=False)
    stage_bytes = config.block_k * (config.block_m + config.block_n * (2 if gated or config.wide else 1))
    return config._replace(num_stages=gpu.stages_that_fit(config.num_stages, stage_bytes))


def _prompt_config(blocks: bool, gated: bool) -> Fp8TiledConfig:
    row_blocks = 8 if gated else 16
    if blocks or gated:
        return Fp8TiledConfig(128, 128, GROUP, 8, 4, two_level=blocks, persistent=True, row_blocks=row_blocks)
    return Fp8TiledConfig(128, 256, GROUP, 8, 4, two_level=False, persistent=True, row_blocks=row_blocks)


def _blocks_config(num_outputs: int, rows: int, gated: bool, gpu: Gpu) -> Fp8TiledConfig:
    """For weights with scales of blocks, over up to 512 rows."""
    if rows > 64:
        return Fp8TiledConfig(128, 64 if gated else 128, GROUP, 8, 4)
    block_m = max(16, rows)
    if gated:
        return Fp8TiledConfig(block_m, 128, GROUP, 8, 5, rows_tall=False)
    if rows > 32:
        splits = 4 if ceil_div(num_outputs, 64) <= gpu.multiprocessors else 1
        return Fp8TiledConfig(64, 64, GROUP, 4, 6, splits)
    splits = min(4, _splits(num_outputs, rows, block_m, 128, gpu))
    return Fp8TiledConfig(block_m, 128, GROUP, 4, 6, splits, rows_tall=False)


def _splits(num_outputs: int, rows: int, block_m: int, block_n: int, gpu: Gpu) -> int:
    """As many programs for each tile as the multiprocessors have room for."""
    return max(1, gpu.multiprocessors // (ceil_div(rows, block_m) * ceil_div(num_outputs, block_n)))


def _are_few(x: Tensor, weight_scale: Tensor, gated: bool) -> bool:
    """Whether fp8_linear_few.py is faster: more rows of many inputs, and blocks, have their sums split."""
    if weight_scale.dim() == 2 and not gated:
        return False
    return x.shape[0] <= (FEW_ROWS if x.shape[1] <= 8192 else FEW_ROWS // 2)


def _many_config(x: Tensor, weight: Tensor, blocks: bool, gated: bool, dtype: torch.dtype) -> Fp8TiledConfig:
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    # Sizes as the tuning table has them.
    size = 192 if 128 < x.shape[0] <= 192 else next_power_of_2(x.shape[0])
    gpu = gpu_of(x.device)
    default = default_fp8_choice(num_outputs, x.shape[1], size, blocks, gated, gpu)
    op = ("fp8_gated_linear_many" if gated else "fp8_linear_many") + ("_blocks" if blocks else "")
    choice = tuned(default, op, x.device, torch.bfloat16, exact=(*weight.shape,), near=(), size=size)
    if choice == LIBRARY and (dtype != torch.bfloat16 or not library_takes(num_outputs, x.shape[1], blocks)):
        return default_fp8_tiled_config(num_outputs, size, blocks, gated, gpu)
    return choice


# Opaque to torch.compile, whose code serves any number of rows: the op chooses when it runs, which is once
# for each recorded graph.


@torch.library.custom_op("minisgl::fp8_linear_many", mutates_args=())
def fp8_linear_many(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """fp8_linear, by the fastest kernel for this number of rows."""
    arguments = (x, x_scale, weight, weight_scale, bias, dtype)
    if not _has_kernels(x):
        return fp8_linear_reference(*arguments)
    if _are_few(x, weight_scale, gated=False):
        return fp8_linear_few(*arguments)
    config = _many_config(x, weight, weight_scale.dim() == 2, False, dtype)
    if config == LIBRARY:
        return fp8_linear_torch(*arguments)
    return fp8_linear_many_with(*arguments, config=config)


@fp8_linear_many.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@torch.library.custom_op("minisgl::fp8_gated_linear_many", mutates_args=())
def fp8_gated_linear_many(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """fp8_gated_linear, by the fastest kernel for this number of rows."""
    arguments = (x, x_scale, weight, weight_scale, dtype)
    if not _has_kernels(x):
        return fp8_gated_linear_reference(*arguments)
    if _are_few(x, weight_scale, gated=True):
        return fp8_gated_linear_few(*arguments)
    config = _many_config(x, weight, weight_scale.dim() == 2, True, dtype)
    if config == LIBRARY:
        return silu_mul(fp8_linear_torch(x, x_scale, weight, weight_scale, None, dtype))
    return fp8_gated_linear_many_with(*arguments, config=config)


@fp8_gated_linear_many.register_fake
def _(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2), dtype=dtype)


@torch.library.custom_op("minisgl::fp8_gated_linear_rounded", mutates_args=())
def fp8_gated_linear_rounded(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """quantize_fp8 of fp8_gated_linear_many: behind torch's product, SiLU and the rounding are one launch.

    There, a sigmoid of fewer instructions may move a number to the next e4m3.
    """
    arguments = (x, x_scale, weight, weight_scale, dtype)
    if not _has_kernels(x):
        return quantize_fp8(fp8_gated_linear_many(*arguments), group)
    if not _are_few(x, weight_scale, gated=True):
        config = _many_config(x, weight, weight_scale.dim() == 2, True, dtype)
        if config == LIBRARY:
            y = fp8_linear_torch(x, x_scale, weight, weight_scale, None, dtype)
            return silu_mul_fp8_triton(y, group, room=ROOM)
    return quantize_fp8_triton(fp8_gated_linear_many(*arguments), group, room=ROOM)


@fp8_gated_linear_rounded.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    group: int | None = None,
) -> tuple[Tensor, Tensor]:
    return empty_fp8(x, weight.shape[0] // 2, group)


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x e4m3 [M, K] with scales [G, M], weight e4m3 [N, K] with scales, bias [N] -> [M, N] of `dtype`.

    Raises:
        ValueError: the scales do not fit each other or the weight.
    """
    _check(x, x_scale, weight, weight_scale, gated=False)
    arguments = (x, x_scale, weight, weight_scale, bias, dtype)
    if x.device.type == "cpu":
        return fp8_linear_reference(*arguments)
    if x.shape[0] <= FEWEST_ROWS and weight_scale.dim() == 1 and _has_kernels(x):
        return fp8_linear_few(*arguments)
    return fp8_linear_many(*arguments)


def fp8_gated_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """x e4m3 [M, K] with scales [G, M], weight e4m3 [2F, K] (the gate first) -> silu(gate) * up, [M, F].

    Raises:
        ValueError: the scales do not fit each other or the weight.
    """
    _check(x, x_scale, weight, weight_scale, gated=True)
    arguments = (x, x_scale, weight, weight_scale, dtype)
    if x.device.type == "cpu":
        return fp8_gated_linear_reference(*arguments)
    if x.shape[0] <= FEWEST_ROWS and _has_kernels(x):
        return fp8_gated_linear_few(*arguments)
    return fp8_gated_linear_many(*arguments)


def fp8_gated_linear_then_round(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    group: int | None = None,
) -> tuple[Tensor, Tensor]:
    """quantize_fp8(fp8_gated_linear(...), group), in fewer launches for many rows.

    Raises:
        ValueError: as these two.
    """
    _check(x, x_scale, weight, weight_scale, gated=True)
    arguments = (x, x_scale, weight, weight_scale, dtype)
    if x.device.type == "cpu":
        return quantize_fp8(fp8_gated_linear(*arguments), group)
    if x.shape[0] <= FEWEST_ROWS and _has_kernels(x):
        # With more rows there are enough programs to look for the largest values.
        if group is None:
            return quantize_fp8_with_peaks(*fp8_gated_linear_few_with_peaks(*arguments))
        return quantize_fp8(fp8_gated_linear_few(*arguments), group)
    return fp8_gated_linear_rounded(*arguments, group)


@torch.compiler.assume_constant_result
def _gpu_has_fp8(device: torch.device) -> bool:
    return gpu_of(device).has_fp8


def _has_kernels(x: Tensor) -> bool:
    return x.device.type == "cuda" and _gpu_has_fp8(x.device)


def _check(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, gated: bool) -> None:
    outputs, width = weight.shape
    if weight_scale.dim() == 1:
        wanted: tuple[int, ...] = (outputs,)
        groups = 1
    else:
        halves = 2 if gated else 1
        groups = ceil_div(width, GROUP)
        wanted = (halves * ceil_div(outputs // halves, GROUP), groups)
    if tuple(weight_scale.shape) != wanted or x_scale.shape[0] != groups or x.shape[1] != width:
        raise ValueError(
            f"a weight {(outputs, width)} with scales {wanted} needs rows of {width} with {groups} scales "
            f"each; got scales {tuple(weight_scale.shape)}, rows of {x.shape[1]} with {x_scale.shape[0]}"
        )
