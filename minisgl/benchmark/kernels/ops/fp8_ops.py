"""FP8: rounding rows to it, alone and behind norms and SiLU, and the linear layers of FP8 numbers.

Promise: every candidate fits the GPU's shared memory and keeps its sums in registers.
R rows, K width, N outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from triton_kernels.fp8_linear import fp8_gated_linear_reference, fp8_linear_reference
from triton_kernels.fp8_linear_few import FEW_ROWS, Fp8Config, fp8_that_fits
from triton_kernels.fp8_linear_many import Fp8TiledConfig
from triton_kernels.gpu import Gpu
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_fp8 import GROUP, dequantize_fp8, quantize_fp8_reference, quantize_weight_fp8

Fp8Candidate = Fp8Config | Fp8TiledConfig

MOST_PROGRAMS = 1024
LEAST_STEPS = 4
"""The least steps over K of a split."""


def fp8_linear_problem(
    rows: int,
    width: int,
    outputs: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    gated: bool,
    blocks: bool,
) -> Problem:
    """A linear layer [N, K] of FP8 numbers over R rows, without bias; its arguments end with the dtype of y.

    Args:
        gated: the layer is a gated MLP's first half; it yields N / 2 outputs.
        blocks: weights have scales of blocks of 128 x 128, rows scales of 128 columns.
    """
    results = outputs // 2 if gated else outputs
    moved = outputs * width + rows * width + rows * results * dtype.itemsize
    group = GROUP if blocks else None
    arguments = []
    for _ in range(num_sets(moved, device)):
        x = quantize_fp8_reference(torch.randn((rows, width), device=device, dtype=dtype), group)
        halves = torch.randn((outputs, width), device=device, dtype=dtype).chunk(2 if gated else 1)
        parts = [quantize_weight_fp8(half * width**-0.5, blocks) for half in halves]
        weight, scales = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        arguments.append((*x, weight, scales))
    known: list[Tensor] = []

    def check(function: Any) -> float:
        poison(rows * results * dtype.itemsize, device)
        got = function(*arguments[0])
        if not known:
            exact = fp8_gated_linear_reference if gated else fp8_linear_reference
            known.append(exact(*arguments[0], dtype=torch.float64))
        return relative_error(got, known[0])

    return Problem(moved, 2.0 * rows * outputs * width, arguments, moved, check, in_fp8=True)


def quantizing_problem(
    unfused: Callable[..., Tensor],
    inputs: Callable[[], tuple[Any, ...]],
    num_bytes: int,
    group: int | None,
    device: torch.device,
) -> Problem:
    """An op that yields e4m3 and scales: its numbers must be those of `unfused`, within a rounding to FP8.

    Args:
        unfused: yields the numbers before they are rounded, of the same arguments in float32.
        inputs: new arguments, for each input set.
    """
    arguments = [inputs() for _ in range(num_sets(num_bytes, device))]

    def check(candidate: Any) -> float:
        poison(num_bytes // 2, device)
        rounded, scales, *_ = candidate(*arguments[0])
        wide = [one.float() if isinstance(one, Tensor) else one for one in arguments[0]]
        exact = unfused(*wide)
        peaks = exact.unflatten(1, (-1, group or exact.shape[1])).abs().amax(-1).t() / 448.0
        got = dequantize_fp8(rounded, scales)
        if not ((got - exact).abs() <= exact.abs() * 0.07 + exact.abs().amax() / 1e4).all():
            raise ValueError("a value is further off than FP8 rounds")
        return relative_error(scales, peaks)

    return Problem(num_bytes, 0.0, arguments, num_bytes, check)


def few_rows_candidates(
    outputs: int, width: int, rows: int, gpu: Gpu, *, gated: bool, blocks: bool
) -> list[Fp8Config]:
    """Candidates for up to FEW_ROWS rows. `outputs` are those of a row: N, or N / 2 if `gated`."""
    if rows > FEW_ROWS:
        return []
    if blocks:
        tiles = [(64, 128, 4, 8), (64, 128, 4, 12), (32, 128, 4, 10), (32, 128, 2, 10), (16, 128, 2, 12)]
        tiles += [(128, 128, 4, 6), (128, 128, 8, 6)]
    else:
        tiles = [
            (64, 128, 4, 8),
            (64, 128, 4, 12),
            (64, 256, 4, 4),
            (64, 256, 4, 6),
            (64, 512, 4, 3),
            (128, 128, 4, 6),
            (32, 256, 2, 6),
            (32, 512, 2, 4),
            (32, 512, 4, 4),
            (16, 512, 2, 5),
            (16, 1024, 2, 3),
            (16, 1024, 4, 4),
            (16, 512, 2, 6, 2),
            (16, 1024, 4, 3, 4),
            (8, 1024, 4, 4, 4),
            (8, 2048, 8, 3, 8),
        ]
    found = [fp8_that_fits(Fp8Config(*tile), rows, gated, gpu) for tile in tiles]
    return [
        config
        for config in dict.fromkeys(found)
        if config.num_stages > 1
        and not (config.splits > 1 and (gated or rows > 16))
        and (config.block_n >= 64 or (rows <= 32 and outputs / config.block_n <= MOST_PROGRAMS))
        and config.block_k <= width
    ]


def many_rows_candidates(
    outputs: int, width: int, rows: int, gpu: Gpu, *, gated: bool, blocks: bool
) -> list[Fp8TiledConfig]:
    """Candidates for any number of rows, by TMA; none on a GPU without it."""
    if not gpu.has_tma:
        return []
    if rows > 512:
        return _prompt_candidates(gpu, gated=gated, blocks=blocks)
    narrow = max(16, next_power_of_2(min(rows, 128)))
    tiles = [
        (narrow, 64, 128, 4, 8, False),
        (narrow, 64, 128, 4, 12, False),
        (narrow, 128, 128, 4, 6, False),
        (narrow, 128, 128, 8, 5, False),
    ]
    if rows > 16:
        tall = 64 if rows <= 64 else 128
        warps = 4 if tall == 64 else 8
        tiles += [(tall, 32, 128, warps, 8, True), (tall, 64, 128, warps, 6, True)]
        tiles += [(tall, 128, 128, 8, 4, True)] if rows > 64 else []
    if rows > 128:
        tiles += [(256, 64, 128, 8, 4, False)]
    if not blocks:
        tiles += [(narrow, 64, 256, 4, 4, False)]
        tiles += [(64, 64, 256, 4, 4, False)] if narrow == 128 else []
    found = []
    for block_m, block_n, block_k, warps, stages, rows_tall in tiles:
        weight_rows = 2 * block_n if gated else block_n
        stages = gpu.stages_that_fit(stages, block_k * (weight_rows + block_m))
        # Sums and products that are added to them: more than 192 of a thread leave too few registers.
        if stages < 2 or (weight_rows + block_n) * block_m > 192 * 32 * warps:
            continue
        units = ceil_div(rows, block_m) * ceil_div(outputs, block_n)
        most = width // (block_k * LEAST_STEPS)
        splits = [1] + [n for n in (2, 3, 4, 6, 8) if n <= most and n * units <= 3 * gpu.multiprocessors]
        splits.sort(key=lambda n, units=units: -_share_of_waves(n * units, gpu.multiprocessors))
        found += [Fp8TiledConfig(block_m, block_n, block_k, warps, stages, n, rows_tall) for n in splits[:2]]
    return list(dict.fromkeys(found))


def _prompt_candidates(gpu: Gpu, *, gated: bool, blocks: bool) -> list[Fp8TiledConfig]:
    """Candidates for the rows of prompts."""
    found = [
        Fp8TiledConfig(128, 128, 128, 8, 4, wide=True, two_level=two_level, persistent=True, row_blocks=rows)
        for two_level in ((True,) if blocks else (True, False))
        for rows in (8, 16, 64)
    ]
    found += [
        Fp8TiledConfig(128, 128, 128, 8, 4, wide=True, row_blocks=16),
        Fp8TiledConfig(128, 128, 128, 8, 3, wide=True, persistent=True, row_blocks=16),
        Fp8TiledConfig(128, 128, 128, 8, 4, persistent=True, row_blocks=16),
        Fp8TiledConfig(128, 128, 128, 4, 4, persistent=True, row_blocks=16),
        Fp8TiledConfig(128, 64, 128, 4, 4, wide=True, row_blocks=16),
        Fp8TiledConfig(128, 64, 128, 8, 4, wide=True, row_blocks=16),
        Fp8TiledConfig(256, 64, 128, 8, 4, wide=True, persistent=True, row_blocks=8),
        Fp8TiledConfig(128, 128, 128, 8, 4, wide=True, rows_tall=False, persistent=True, row_blocks=16),
    ]
    if blocks:
        # Smaller tiles: while one program scales its sums, another one of the multiprocessor multiplies.
        found += [
            Fp8TiledConfig(64, 128, 128, 4, 3, row_blocks=16),
            Fp8TiledConfig(64, 128, 128, 4, 4, row_blocks=32),
            Fp8TiledConfig(128, 64, 128, 4, 4, row_blocks=16),
            Fp8TiledConfig(128, 64, 128, 8, 4, row_blocks=16),
            Fp8TiledConfig(128, 128, 128, 8, 3, row_blocks=16),
            Fp8TiledConfig(128, 128, 128, 16, 4, persistent=True, row_blocks=16),
            Fp8TiledConfig(128, 128, 128, 8, 6, persistent=True, row_blocks=8),
        ]
    if not blocks and not gated:
        found += [
            Fp8TiledConfig(128, 256, 128, 8, 4, two_level=False, persistent=True, row_blocks=rows)
            for rows in (8, 16)
        ]
        found.append(Fp8TiledConfig(256, 128, 128, 8, 4, two_level=False, persistent=True, row_blocks=8))
        found.append(Fp8TiledConfig(128, 256, 128, 8, 4, two_level=False, row_blocks=16))
    return list(dict.fromkeys(_with_stages_that_fit(config, gated, gpu) for config in found))


def _with_stages_that_fit(config: Fp8TiledConfig, gated: bool, gpu: Gpu) -> Fp8TiledConfig:
    weight_rows = config.block_n * (2 if gated or config.wide else 1)
    stages = gpu.stages_that_fit(config.num_stages, config.block_k * (config.block_m + weight_rows))
    return config._replace(num_stages=stages)


def _share_of_waves(programs: int, multiprocessors: int) -> float:
    """The used share of the multiprocessors' time, if each runs one program at a time."""
    return programs / (ceil_div(programs, multiprocessors) * multiprocessors)
