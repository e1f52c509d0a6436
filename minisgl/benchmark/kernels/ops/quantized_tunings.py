"""How the linear layers of quantized weights are tuned: over many rows, where the best choice differs most.

Promise: FP8 layers may choose torch's product, and 4-bit layers that of the weight made 16-bit numbers.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import Case, Tuning
from minisgl.benchmark.kernels.kernel_timing import Problem
from minisgl.benchmark.kernels.model_shapes import ModelShape
from minisgl.benchmark.kernels.ops import fp8_ops, int4_ops
from minisgl.benchmark.kernels.ops.linear_ops import Matrix, gate_up_matrices, plain_matrices
from triton_kernels.fp8_linear import default_fp8_choice, library_takes
from triton_kernels.fp8_linear_many import (
    LIBRARY,
    Fp8TiledConfig,
    fp8_gated_linear_many_with,
    fp8_linear_many_with,
)
from triton_kernels.fp8_linear_torch import fp8_linear_torch
from triton_kernels.gpu import Gpu
from triton_kernels.int4_linear import BETWEEN, default_many_config, suits_hopper
from triton_kernels.int4_linear_many import (
    DEQUANTIZED,
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)
from triton_kernels.int4_packing import BLOCK
from triton_kernels.silu_mul import silu_mul

FP8_ROWS = (64, 128, 192, 256, 4096)
BLOCKS_ROWS = (16, *FP8_ROWS)
"""Plain layers with scales of blocks have this kernel for any number of rows."""
INT4_ROWS = tuple(sorted((16, 32, 64, 128, 256, *BETWEEN)))
CPU_OUTPUTS, CPU_WIDTH = 256, 128
"""The corner of a matrix that Triton's interpreter computes."""


def _parts(gated: bool, multiple: int) -> Callable[[ModelShape], list[Matrix]]:
    """The matrices that are quantized, if kernels take their width: not the head."""

    def parts(shape: ModelShape) -> list[Matrix]:
        every = gate_up_matrices(shape) if gated else plain_matrices(shape, quantized=True)
        return [one for one in every if one.outputs != shape.vocab and one.width % multiple == 0]

    return parts


def _cases(build: Callable[..., Problem], sizes: tuple[int, ...]) -> Callable[[Matrix, bool], list[Case]]:
    """On a CPU, few rows of a corner of the matrix."""

    def cases(matrix: Matrix, on_gpu: bool) -> list[Case]:
        outputs, width = (matrix.outputs, matrix.width) if on_gpu else (CPU_OUTPUTS, CPU_WIDTH)
        chosen = sizes if on_gpu else (5,)
        return [Case(f"{rows} rows", rows, functools.partial(build, rows, width, outputs)) for rows in chosen]

    return cases


def _results(matrix: Matrix, gated: bool) -> int:
    return matrix.outputs // 2 if gated else matrix.outputs


def _fp8_layer(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, *, gated: bool, config: Fp8TiledConfig
) -> Tensor:
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if config == LIBRARY:
        y = fp8_linear_torch(x, x_scale, weight, scale, None, dtype)
        return silu_mul(y) if gated else y
    function = fp8_gated_linear_many_with if gated else fp8_linear_many_with
    return function(x, x_scale, weight, scale, dtype=dtype, config=config)


def _fp8_tuning(gated: bool, blocks: bool) -> Tuning:
    def candidates(matrix: Matrix, rows: int, gpu: Gpu) -> list[Fp8TiledConfig]:
        if not gpu.has_fp8 or (blocks and not gpu.has_tma):
            return []
        outputs = _results(matrix, gated)
        own = fp8_ops.many_rows_candidates(outputs, matrix.width, rows, gpu, gated=gated, blocks=blocks)
        return [*own, LIBRARY] if library_takes(outputs, matrix.width, blocks) else own

    return Tuning(
        files=("fp8_linear_many.py", "fp8_linear_torch.py", "linear_many.py"),
        by_size=True,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width},
        near=lambda matrix: {},
        cases=_cases(
            functools.partial(fp8_ops.fp8_linear_problem, gated=gated, blocks=blocks),
            BLOCKS_ROWS if blocks and not gated else FP8_ROWS,
        ),
        default=lambda matrix, size, element, gpu: default_fp8_choice(
            _results(matrix, gated), matrix.width, size, blocks, gated, gpu
        ),
        candidates=candidates,
        launcher=functools.partial(_fp8_layer, gated=gated),
        parts=_parts(gated, 128 if blocks else 16),
    )


def _int4_tuning(gated: bool) -> Tuning:
    """For groups of 128 without zero points; others take the defaults."""
    problem = functools.partial(int4_ops.int4_linear_problem, gated=gated, group=BLOCK)

    def candidates(matrix: Matrix, size: int, gpu: Gpu) -> list[Int4TiledConfig]:
        if not gpu.has_tma:  # such a GPU always multiplies with torch; there is nothing to choose
            return []
        results = _results(matrix, gated)
        tiled = int4_ops.many_rows_candidates(results, matrix.width, size, gpu, gated=gated, group=BLOCK)
        return [*tiled, DEQUANTIZED]

    return Tuning(
        files=(
            "int4_linear_many.py",
            "int4_linear_hopper.py",
            "int4_packing.py",
            "linear_many.py",
            "quantize_int4.py",
        ),
        by_size=True,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width, "group": BLOCK, "zeros": 0},
        near=lambda matrix: {},
        cases=_cases(problem, INT4_ROWS),
        default=lambda matrix, size, element, gpu: default_many_config(
            _results(matrix, gated),
            matrix.width,
            size,
            gated,
            gpu,
            hopper=suits_hopper(_results(matrix, gated), gpu),
        ),
        candidates=candidates,
        launcher=int4_gated_linear_many_with if gated else int4_linear_many_with,
        parts=_parts(gated, BLOCK),
    )


QUANTIZED: dict[str, Tuning] = {
    "fp8_linear_many": _fp8_tuning(gated=False, blocks=False),
    "fp8_gated_linear_many": _fp8_tuning(gated=True, blocks=False),
    "fp8_linear_many_blocks": _fp8_tuning(gated=False, blocks=True),
    "fp8_gated_linear_many_blocks": _fp8_tuning(gated=True, blocks=True),
    "int4_linear_many": _int4_tuning(gated=False),
    "int4_gated_linear_many": _int4_tuning(gated=True),
}
"""Op -> how it is tuned."""
