"""The linear layers: over up to 16 rows, over 32 to 256 rows, and both with a gated activation.

Promise: every candidate fits the GPU's shared memory; tuning checks and times it.
R rows, K width, N outputs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import Case, Cases, KernelOp, Tuning
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.gpu import Gpu
from triton_kernels.launch import ceil_div
from triton_kernels.linear import gated_linear_reference, linear_reference
from triton_kernels.linear_few import (
    MAX_ROWS,
    LinearConfig,
    default_linear_config,
    gated_linear_triton,
    linear_that_fits,
    linear_triton,
)
from triton_kernels.linear_many import (
    LIBRARY,
    TiledConfig,
    gated_linear_many,
    gated_linear_many_with,
    linear_many,
    linear_many_with,
)

FEWEST_PROGRAMS, MOST_PROGRAMS = 48, 640
"""Bounds for the programs of narrow tiles. Fewer leave most multiprocessors idle; more only add starts."""
LEAST_STEPS = 4
"""The least steps over K of a split."""
CPU_OUTPUTS, CPU_WIDTH = 80, 136
"""The corner of a matrix that Triton's interpreter computes."""


class Matrix(NamedTuple):
    """A weight [outputs, width] of a model."""

    name: str  # the model's name
    outputs: int
    width: int


def gate_up_matrices(shape: ModelShape) -> list[Matrix]:
    """The gate and up projection of a dense MLP, as one matrix; none for a model with experts."""
    return [] if shape.experts else [Matrix(shape.name, 2 * shape.intermediate, shape.hidden)]


def plain_matrices(shape: ModelShape, *, quantized: bool = False) -> list[Matrix]:
    """All but an MLP's gate and up: qkv, attention's output, linear attention's projections, down, the head.

    Args:
        quantized: the gates of linear attention are not, so they are apart.
    """
    query_heads = shape.heads * (2 if shape.gated_attention else 1)
    attention = [
        Matrix(shape.name, (query_heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        Matrix(shape.name, shape.hidden, shape.heads * shape.head_dim),
    ]
    if shape.linear_value_heads:
        # Queries, keys, values and what gates them; and of each value head a decay and a weight.
        of_heads = 2 * (shape.linear_key_heads + shape.linear_value_heads) * shape.linear_head_dim
        gates = 0 if quantized else 2 * shape.linear_value_heads
        attention += [
            Matrix(shape.name, of_heads + gates, shape.hidden),
            Matrix(shape.name, shape.hidden, shape.linear_value_heads * shape.linear_head_dim),
        ]
    mlp = [] if shape.experts else [Matrix(shape.name, shape.hidden, shape.intermediate)]
    return list(dict.fromkeys([*attention, *mlp, Matrix(shape.name, shape.vocab, shape.hidden)]))


def linear_problem(rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """A linear layer [N, K] over R rows, without bias."""
    return _linear_problem(linear_reference, rows, width, outputs, device, dtype)


def gated_linear_problem(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """A gated MLP's first half, [2F, K], over R rows."""
    return _linear_problem(gated_linear_reference, rows, width, outputs, device, dtype)


def _linear_problem(
    reference: Callable[..., Tensor],
    rows: int,
    width: int,
    outputs: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Problem:
    moved = outputs * width * dtype.itemsize
    arguments = [
        (
            torch.randn((rows, width), device=device, dtype=dtype),
            torch.randn((outputs, width), device=device, dtype=dtype) * width**-0.5,
        )
        for _ in range(num_sets(moved, device))
    ]

    known: list[Tensor] = []

    def check(function: Any) -> float:
        poison(rows * outputs * dtype.itemsize, device)
        x, weight = arguments[0]
        got = function(x, weight)
        if not known:
            known.append(reference(x.double(), weight.double()))
        return relative_error(got, known[0])

    flop = 2.0 * rows * outputs * width
    return Problem(moved, flop, arguments, moved, check)


def few_rows_candidates(matrix: Matrix, gpu: Gpu, *, gated: bool) -> list[LinearConfig]:
    """Candidates for up to 16 rows."""
    tiles = (
        (8, 256, 4, 8, 4),
        (8, 512, 2, 5, 2),
        (8, 1024, 4, 3, 4),
        (16, 512, 2, 4, 2),
        (16, 512, 4, 4, 4),
        (16, 1024, 4, 3, 4),
        (16, 256, 2, 4),
        (16, 256, 2, 8),
        (16, 256, 4, 4),
        (16, 512, 2, 4),
        (32, 128, 2, 6),
        (32, 128, 4, 6),
        (32, 256, 2, 4),
        (64, 64, 4, 8),
        (64, 128, 4, 4),
        (64, 128, 4, 6),
        (64, 128, 4, 8),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
    )
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    configs = [linear_that_fits(LinearConfig(*tile), MAX_ROWS, gated, gpu) for tile in tiles]
    return [
        config
        for config in dict.fromkeys(configs)
        if not (gated and config.splits > 1)
        and config.num_stages > 1
        and (config.block_n == 64 or outputs / config.block_n <= MOST_PROGRAMS)
        and (config.block_n <= 16 or outputs / config.block_n >= FEWEST_PROGRAMS)
    ]


def many_rows_candidates(matrix: Matrix, rows: int, gpu: Gpu, *, gated: bool) -> list[TiledConfig]:
    """Candidates for 33 to 256 rows: each tile with the two numbers of splits that best fill whole waves.

    None without TMA: there only torch's product serves so many rows.
    """
    if not gpu.has_tma:
        return []
    tiles = (
        (64, 64, 4, 8, False),
        (64, 64, 4, 5, False),
        (64, 128, 4, 6, False),
        (128, 64, 4, 6, False),
        (128, 64, 8, 4, False),
        (128, 128, 8, 3, False),
        (256, 64, 8, 4, False),
        (16, 128, 4, 8, True),
        (32, 128, 4, 6, True),
        (32, 64, 4, 8, True),
    )
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    found: list[TiledConfig] = []
    for block_n, block_k, warps, stages, rows_tall in tiles:
        block_m = max(64 if rows_tall else 32, min(rows, 128))
        weight_rows = 2 * block_n if gated else block_n
        stages = gpu.stages_that_fit(stages, 2 * block_k * (weight_rows + block_m))
        # More than 128 accumulators a thread leave too few registers.
        if stages < 2 or weight_rows * block_m > 128 * 32 * warps:
            continue
        tiles_there = ceil_div(rows, block_m) * ceil_div(outputs, block_n)
        if rows_tall and tiles_there > MOST_PROGRAMS:
            continue
        most = matrix.width // (block_k * LEAST_STEPS)
        splits = [1] + [
            n for n in (2, 3, 4, 6, 8) if n <= most and n * tiles_there <= 2 * gpu.multiprocessors
        ]
        splits.sort(key=lambda n, tiles=tiles_there: -_share_of_waves(n * tiles, gpu.multiprocessors))
        found += [TiledConfig(block_m, block_n, block_k, n, warps, stages, rows_tall) for n in splits[:2]]
    return list(dict.fromkeys(found))


def _share_of_waves(programs: int, multiprocessors: int) -> float:
    """The used share of the multiprocessors' time, if each runs one program at a time."""
    return programs / (ceil_div(programs, multiprocessors) * multiprocessors)


def _tune_cases(
    build: Callable[..., Problem], sizes: tuple[int, ...]
) -> Callable[[Matrix, bool], list[Case]]:
    """On a CPU, one size of a corner of the matrix."""

    def cases(matrix: Matrix, on_gpu: bool) -> list[Case]:
        outputs, width = matrix.outputs, matrix.width
        chosen = sizes
        if not on_gpu:
            chosen, outputs, width = sizes[:1], min(outputs, CPU_OUTPUTS), min(width, CPU_WIDTH)
        return [Case(f"{rows} rows", rows, functools.partial(build, rows, width, outputs)) for rows in chosen]

    return cases


def _bench_cases(build: Callable[..., Problem], rows: tuple[int, ...], cpu_rows: int, gated: bool) -> Cases:
    def cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
        width, mlp = shape.hidden, shape.intermediate
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        if not on_gpu:  # the interpreter is slow
            mlp, qkv = min(mlp, 192), min(qkv, 192)
        matrices = [(width, 2 * mlp)] if gated else [(width, qkv), (width, width), (mlp, width)]
        return [
            Case(f"{count}x{k} to {n}", count, functools.partial(build, count, k, n))
            for count in (rows if on_gpu else (cpu_rows,))
            for k, n in matrices
        ]

    return cases


def _few_rows_tuning(build: Callable[..., Problem], launcher: Callable[..., Any], gated: bool) -> Tuning:
    return Tuning(
        files=("linear_few.py",),
        by_size=False,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width},
        near=lambda matrix: {},
        cases=_tune_cases(build, (1, 16)),
        default=lambda matrix, size, element, gpu: default_linear_config(
            matrix.outputs // 2 if gated else matrix.outputs, matrix.width, gated, gpu
        ),
        candidates=lambda matrix, size, gpu: few_rows_candidates(matrix, gpu, gated=gated),
        launcher=launcher,
        parts=gate_up_matrices if gated else plain_matrices,
    )


def _many_rows_tuning(build: Callable[..., Problem], launcher: Callable[..., Any], gated: bool) -> Tuning:
    """The choices are our kernel and torch's matrix product, which is the default."""
    return Tuning(
        files=("linear_many.py",),
        by_size=True,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width},
        near=lambda matrix: {},
        cases=_tune_cases(build, (64, 128, 256)),
        default=lambda matrix, size, element, gpu: LIBRARY,
        candidates=lambda matrix, size, gpu: many_rows_candidates(matrix, size, gpu, gated=gated),
        launcher=launcher,
        parts=gate_up_matrices if gated else plain_matrices,
    )


LINEAR = KernelOp(
    name="linear",
    launcher=linear_triton,
    bench_cases=_bench_cases(linear_problem, (1, 8, 16), 2, gated=False),
    plain_torch=linear_reference,
    tuning=_few_rows_tuning(linear_problem, linear_triton, gated=False),
)
GATED_LINEAR = KernelOp(
    name="gated_linear",
    launcher=gated_linear_triton,
    bench_cases=_bench_cases(gated_linear_problem, (1, 8, 16), 2, gated=True),
    plain_torch=gated_linear_reference,
    tuning=_few_rows_tuning(gated_linear_problem, gated_linear_triton, gated=True),
)
LINEAR_MANY = KernelOp(
    name="linear_many",
    launcher=linear_many,
    bench_cases=_bench_cases(linear_problem, (32, 64, 256), 20, gated=False),
    plain_torch=linear_reference,
    tuning=_many_rows_tuning(linear_problem, linear_many_with, gated=False),
)
GATED_LINEAR_MANY = KernelOp(
    name="gated_linear_many",
    launcher=gated_linear_many,
    bench_cases=_bench_cases(gated_linear_problem, (32, 64, 256), 20, gated=True),
    plain_torch=gated_linear_reference,
    tuning=_many_rows_tuning(gated_linear_problem, gated_linear_many_with, gated=True),
)
