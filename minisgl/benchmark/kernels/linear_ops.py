"""The linear layers of a model, and the configurations that `minisgl tune` tries for them.

Promise: a candidate fits a Hopper's shared memory; whether it is right and fast is measured.
"""

from typing import NamedTuple

from minisgl.benchmark.model_shapes import ModelShape
from triton_kernels.launch import ceil_div
from triton_kernels.linear_few import MAX_ROWS, LinearConfig, linear_stage_bytes
from triton_kernels.linear_many import TiledConfig

SHARED_BYTES = 227 * 1024
MULTIPROCESSORS = 132
FEWEST_PROGRAMS, MOST_PROGRAMS = 48, 640
"""Programs of narrow tiles: fewer leave most multiprocessors idle, more only start more often."""
LEAST_STEPS = 4
"""Steps over k that a split must have left."""


class Matrix(NamedTuple):
    """A weight [outputs, width] of a model."""

    name: str  # the model's
    outputs: int
    width: int


def gate_up_matrices(shape: ModelShape) -> list[Matrix]:
    """A dense MLP's gate and up projections as one; none where there are experts."""
    return [] if shape.experts else [Matrix(shape.name, 2 * shape.intermediate, shape.hidden)]


def plain_matrices(shape: ModelShape) -> list[Matrix]:
    """All that are not gated: into attention and out of it, out of the MLP, the head."""
    attention = [
        Matrix(shape.name, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        Matrix(shape.name, shape.hidden, shape.heads * shape.head_dim),
    ]
    mlp = [] if shape.experts else [Matrix(shape.name, shape.hidden, shape.intermediate)]
    return list(dict.fromkeys([*attention, *mlp, Matrix(shape.name, shape.vocab, shape.hidden)]))


def few_rows_candidates(matrix: Matrix, *, gated: bool) -> list[LinearConfig]:
    """For up to 16 rows."""
    tiles = (
        (8, 256, 4, 8, 4),
        (8, 512, 2, 5, 2),
        (8, 1024, 4, 3, 4),
        (16, 512, 2, 4, 2),
        (16, 512, 4, 4, 4),
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
    )
    outputs = matrix.outputs // 2 if gated else matrix.outputs
    configs = [LinearConfig(*tile) for tile in tiles]
    return [
        config
        for config in configs
        if not (gated and config.splits > 1)
        and (config.block_n == 64 or outputs / config.block_n <= MOST_PROGRAMS)
        and (config.block_n <= 16 or outputs / config.block_n >= FEWEST_PROGRAMS)
        and linear_stage_bytes(config, MAX_ROWS, gated) * config.num_stages <= SHARED_BYTES
    ]


def many_rows_candidates(matrix: Matrix, rows: int, *, gated: bool) -> list[TiledConfig]:
    """For `rows` from 33 to 256: tiles, each with the two numbers of splits that fill whole waves best."""
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
        stages = min(stages, SHARED_BYTES // (2 * block_k * (weight_rows + block_m)))
        # Sums that a thread holds: more than 128 leave too few registers.
        if stages < 2 or weight_rows * block_m > 128 * 32 * warps:
            continue
        tiles_there = ceil_div(rows, block_m) * ceil_div(outputs, block_n)
        if rows_tall and tiles_there > MOST_PROGRAMS:
            continue
        most = matrix.width // (block_k * LEAST_STEPS)
        splits = [1] + [n for n in (2, 3, 4, 6, 8) if n <= most and n * tiles_there <= 2 * MULTIPROCESSORS]
        splits.sort(key=lambda n, tiles=tiles_there: -_share_of_waves(n * tiles))
        found += [TiledConfig(block_m, block_n, block_k, n, warps, stages, rows_tall) for n in splits[:2]]
    return list(dict.fromkeys(found))


def _share_of_waves(programs: int) -> float:
    """How much of the multiprocessors' time is used if each runs one program at a time."""
    return programs / (ceil_div(programs, MULTIPROCESSORS) * MULTIPROCESSORS)
