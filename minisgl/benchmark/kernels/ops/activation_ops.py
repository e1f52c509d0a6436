"""The activations of gated MLPs: SiLU-mul and GELU-mul.

T tokens, F MLP width.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import BENCH_TOKENS, TUNE_TOKENS, KernelOp, Tuning, token_cases
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.silu_mul import (
    SiluMulConfig,
    gelu_tanh_mul_reference,
    gelu_tanh_mul_triton,
    silu_mul_reference,
    silu_mul_triton,
)


def silu_mul_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """SiLU-mul of [T, 2F]."""
    return _gated_problem(silu_mul_reference, tokens, shape, device, dtype)


def gelu_tanh_mul_problem(
    tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Problem:
    """GELU-mul of [T, 2F]."""
    return _gated_problem(gelu_tanh_mul_reference, tokens, shape, device, dtype)


def _gated_problem(
    reference: Callable[[Tensor], Tensor],
    tokens: int,
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
) -> Problem:
    width = shape.intermediate
    moved = 3 * tokens * width * dtype.itemsize
    gate_ups = [
        torch.randn((tokens, 2 * width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))
    ]

    def check(function: Any) -> float:
        poison(moved // 3, device)
        return relative_error(function(gate_ups[0]), reference(gate_ups[0].double()))

    return Problem(moved, 0.0, [(x,) for x in gate_ups], moved, check)


def _label(tokens: int, shape: ModelShape) -> str:
    return f"{tokens}x{shape.intermediate}"


SILU_MUL = KernelOp(
    name="silu_mul",
    launcher=silu_mul_triton,
    bench_cases=token_cases(silu_mul_problem, BENCH_TOKENS, _label),
    plain_torch=silu_mul_reference,
    flashinfer=lambda flashinfer, problem, case: problem.calls(flashinfer.activation.silu_and_mul),
    tuning=Tuning(
        files=("silu_mul.py",),
        by_size=True,
        exact=lambda shape: {},
        near=lambda shape: {"F": shape.intermediate},
        cases=token_cases(silu_mul_problem, TUNE_TOKENS),
        default=lambda shape, size, element, gpu: SiluMulConfig(),
        candidates=lambda shape, size, gpu: [
            SiluMulConfig(block_f, warps)
            for block_f, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8))
        ],
        launcher=silu_mul_triton,
    ),
)
GELU_TANH_MUL = KernelOp(
    name="gelu_tanh_mul",
    launcher=gelu_tanh_mul_triton,
    bench_cases=token_cases(gelu_tanh_mul_problem, BENCH_TOKENS, _label),
)
