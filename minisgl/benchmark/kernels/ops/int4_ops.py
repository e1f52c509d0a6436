"""The linear layers of 4-bit weights.

Promise: every candidate fits the GPU's shared memory and keeps its sums in registers.
R rows, K width, N outputs.
"""

from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from triton_kernels.gpu import Gpu
from triton_kernels.int4_linear import (
    HOPPER_TILES,
    MOST_ROWS,
    int4_gated_linear_reference,
    int4_linear_reference,
    shared_bytes_of_numbers,
    suits_hopper,
)
from triton_kernels.int4_linear_few import FEW_ROWS, Int4Config, int4_that_fits, rows_of_a_program
from triton_kernels.int4_linear_hopper import OUTPUTS
from triton_kernels.int4_linear_many import Int4TiledConfig
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.quantize_int4 import quantize_weight_int4

FEWEST_PROGRAMS, MOST_PROGRAMS = 96, 2048
LEAST_STEPS = 4
"""The least steps over K of a split."""


def int4_linear_problem(
    rows: int,
    width: int,
    outputs: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    gated: bool,
    group: int,
    zero_points: bool = False,
) -> Problem:
    """A linear layer [N, K] of 4-bit weights over R rows, without bias; its arguments are x and the weight.

    Args:
        gated: the layer is a gated MLP's first half; it yields N / 2 outputs.
        group: inputs that share a scale.
    """
    results = outputs // 2 if gated else outputs
    of_groups = outputs * width // group * dtype.itemsize * (2 if zero_points else 1)
    moved = outputs * width // 2 + of_groups + rows * (width + results) * dtype.itemsize
    arguments = []
    for _ in range(num_sets(moved, device)):
        x = torch.randn((rows, width), device=device, dtype=dtype)
        weight = torch.randn((outputs, width), device=device, dtype=dtype) * width**-0.5
        arguments.append((x, quantize_weight_int4(weight, group, zero_points)))
    known: list[Tensor] = []

    def check(function: Any) -> float:
        poison(rows * results * dtype.itemsize, device)
        x, weight = arguments[0]
        got = function(x, weight)
        if not known:
            exact = int4_gated_linear_reference if gated else int4_linear_reference
            known.append(exact(x.double(), weight))
        return relative_error(got, known[0])

    return Problem(moved, 2.0 * rows * outputs * width, arguments, moved, check)


def few_rows_candidates(outputs: int, width: int, rows: int, gpu: Gpu, *, gated: bool) -> list[Int4Config]:
    """Candidates for up to FEW_ROWS rows. `outputs` are those of a row: N, or N / 2 if `gated`."""
    if rows > FEW_ROWS:
        return []
    found = []
    for block_n in (16, 32, 64):
        for warps, stages in ((2, 6), (4, 3), (4, 5), (8, 2), (8, 3)):
            programs = ceil_div(outputs, block_n)
            # Sums of a thread: each warp has its own.
            sums = block_n * rows_of_a_program(rows) * (2 if gated else 1) // 32
            if warps * BLOCK <= width and sums <= 64 and FEWEST_PROGRAMS <= programs <= MOST_PROGRAMS:
                found.append(int4_that_fits(Int4Config(block_n, warps, stages), rows, gated, gpu))
    return [config for config in dict.fromkeys(found) if config.num_stages > 1]


def many_rows_candidates(
    outputs: int, width: int, rows: int, gpu: Gpu, *, gated: bool, group: int
) -> list[Int4TiledConfig]:
    """Candidates for up to MOST_ROWS rows, by TMA; none on a GPU without it.

    Fewer stages than fit let several programs share a multiprocessor: one makes numbers of its weights while
    the tensor cores work for another.
    """
    if not gpu.has_tma or rows > MOST_ROWS:
        return []
    # Up to 96 rows two tiles of 64 share rows.
    narrow = 64 if 64 < rows <= 96 else max(16, next_power_of_2(min(rows, 256)))
    tiles = [(narrow, 64, 4), (narrow, 128, 8), (narrow, 128, 4)]
    if narrow > 128:
        tiles += [(128, 64, 4), (128, 128, 8)]
    found = []
    for fused in (True, False) if gated else (True,):
        results = outputs if fused else 2 * outputs
        for block_m, block_n, warps in tiles:
            weight_rows = 2 * block_n if gated and fused else block_n
            # A thread has its sums, and the numbers made of a tile.
            if weight_rows * block_m > 160 * 32 * warps:
                continue
            units = ceil_div(rows, block_m) * ceil_div(results, block_n)
            most = width // (BLOCK * LEAST_STEPS)
            splits = [
                n for n in (1, 2, 3, 4, 8) if n == 1 or (n <= most and n * units <= 4 * gpu.multiprocessors)
            ]
            splits.sort(key=lambda n, units=units: -_share_of_waves(n * units, gpu.multiprocessors))
            can_scale_sums = group == BLOCK and 2 * weight_rows * block_m <= 160 * 32 * warps
            stages = _stages(
                gpu, BLOCK_BYTES * (weight_rows + 4 * block_m), shared_bytes_of_numbers(weight_rows)
            )
            pairs = [(n, splits[0]) for n in stages] + [(n, splits[1]) for n in stages[-1:] if splits[1:]]
            found += [
                Int4TiledConfig(block_m, block_n, warps, n, parts, scale_sums, fused)
                for n, parts in pairs
                for scale_sums in (False, True)[: 1 + can_scale_sums]
            ]
    if suits_hopper(outputs, gpu) and rows > 64:
        found += _hopper_candidates(outputs, width, rows, gpu, gated)
    return list(dict.fromkeys(found))


def _hopper_candidates(outputs: int, width: int, rows: int, gpu: Gpu, gated: bool) -> list[Int4TiledConfig]:
    """Candidates of Hopper's kernel: tiles near these rows, splits for one and two turns of programs."""
    found = []
    for block_m, (stages, _) in HOPPER_TILES.items():
        if not rows <= 2 * block_m <= 4 * rows:
            continue
        tiles = ceil_div(rows, block_m) * ceil_div(outputs, OUTPUTS if gated else 2 * OUTPUTS)
        most = max(1, width // (BLOCK * LEAST_STEPS))
        shares = [1] + [max(1, min(8, most, n * gpu.multiprocessors // tiles)) for n in (1, 2)]
        found += [Int4TiledConfig(block_m, 2 * OUTPUTS, 12, stages, n, hopper=True) for n in shares]
    return found


def _stages(gpu: Gpu, stage_bytes: int, other_bytes: int) -> list[int]:
    """Numbers of stages with which one, two and three programs fit a multiprocessor, 2 to 6."""
    most = gpu.stages_that_fit(12, stage_bytes, other_bytes)
    return sorted({max(2, min(6, most // programs)) for programs in (1, 2, 3) if most >= 2})


def _share_of_waves(programs: int, multiprocessors: int) -> float:
    """The used share of the multiprocessors' time, if each runs one program at a time."""
    return programs / (ceil_div(programs, multiprocessors) * multiprocessors)
