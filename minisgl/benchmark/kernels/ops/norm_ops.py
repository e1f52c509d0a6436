"""The norms: RMSNorm, RMSNorm of a sum, and RMSNorm of a sum followed by a router.

T tokens, M model width, E experts.
"""

import itertools
import math
from typing import Any

import torch

from minisgl.benchmark.kernels.kernel_op import BENCH_TOKENS, TUNE_TOKENS, Case, KernelOp, Tuning, token_cases
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.launch import next_power_of_2
from triton_kernels.norm_router import add_rms_norm_router_reference, add_rms_norm_router_triton
from triton_kernels.rms_norm import (
    NormConfig,
    add_rms_norm_reference,
    add_rms_norm_triton,
    default_norm_config,
    rms_norm_reference,
    rms_norm_triton,
)

EPS = 1e-5


def rms_norm_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """RMSNorm of [T, M]."""
    width = shape.hidden
    weight = torch.randn(width, device=device, dtype=dtype)
    moved = 2 * tokens * width * dtype.itemsize
    xs = [torch.randn((tokens, width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))]

    def check(function: Any) -> float:
        poison(moved // 2, device)
        got = function(xs[0], weight, EPS)
        return relative_error(got, rms_norm_reference(xs[0].double(), weight, EPS))

    arguments = [(x, weight, EPS) for x in xs]
    return Problem(moved, 0.0, arguments, moved, check)


def add_rms_norm_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """RMSNorm of a sum of two [T, M]."""
    width = shape.hidden
    weight = torch.randn(width, device=device, dtype=dtype)
    moved = 4 * tokens * width * dtype.itemsize
    pairs = [
        torch.randn((2, tokens, width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))
    ]

    def check(function: Any) -> float:
        poison(moved // 4, device)
        x, residual = pairs[0]
        y, new_residual = function(x, residual, weight, EPS)
        expected, _ = add_rms_norm_reference(x.double(), residual.double(), weight, EPS)
        return max(relative_error(y, expected), relative_error(new_residual, x.double() + residual.double()))

    arguments = [(x, residual, weight, EPS) for x, residual in pairs]
    return Problem(moved, 0.0, arguments, moved, check)


def add_rms_norm_router_problem(
    tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Problem:
    """RMSNorm of a sum of two [T, M], followed by a router [E, M]; every fourth token is padding."""
    width = shape.hidden
    moved = 4 * tokens * width * dtype.itemsize + shape.experts * (width * dtype.itemsize + 4 * tokens)
    slots = torch.arange(tokens, dtype=torch.int32, device=device)
    slots[3::4] = -1
    arguments = [
        (
            torch.randn((tokens, width), device=device, dtype=dtype),
            torch.randn((tokens, width), device=device, dtype=dtype),
            torch.randn(width, device=device, dtype=dtype),
            EPS,
            torch.randn((shape.experts, width), device=device, dtype=dtype) * width**-0.5,
            slots,
        )
        for _ in range(num_sets(moved, device))
    ]

    def check(function: Any) -> float:
        poison(moved // 2, device)
        x, residual, weight, eps, router, _ = arguments[0]
        y, new_residual, logits = function(*arguments[0])
        wide = (x.double(), residual.double(), weight.double(), eps, router.double(), slots)
        expected, total, expected_logits = add_rms_norm_router_reference(*wide)
        if not (logits[slots < 0] == -math.inf).all():
            raise ValueError("a padding token has a finite logit")
        routed = slots >= 0
        return max(
            relative_error(y, expected),
            relative_error(new_residual, total),
            relative_error(logits[routed], expected_logits[routed]),
        )

    return Problem(moved, 0.0, arguments, moved, check)


def _norm_candidates(shape: ModelShape) -> list[NormConfig]:
    elements = next_power_of_2(shape.hidden)
    return [
        NormConfig(block_t, warps)
        for block_t, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32))
        if 2 <= block_t * elements / (32 * warps) <= 64 or block_t == 1
    ]


def _norm_label(tokens: int, shape: ModelShape) -> str:
    return f"{tokens}x{shape.hidden}"


def _router_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    def label(tokens: int, shape: ModelShape) -> str:
        return f"{tokens}x{shape.hidden} {shape.experts}"

    cases = token_cases(add_rms_norm_router_problem, (1, 2, 16, 64, 256), label, cpu_tokens=(2,))
    return cases(shape, on_gpu) if shape.experts else []


RMS_NORM = KernelOp(
    name="rms_norm",
    launcher=rms_norm_triton,
    bench_cases=token_cases(rms_norm_problem, BENCH_TOKENS, _norm_label),
    plain_torch=rms_norm_reference,
    flashinfer=lambda flashinfer, problem, case: problem.calls(flashinfer.norm.rmsnorm),
    tuning=Tuning(
        files=("rms_norm.py",),
        by_size=False,
        exact=lambda shape: {"block_m": next_power_of_2(shape.hidden)},
        near=lambda shape: {"M": shape.hidden},
        cases=token_cases(rms_norm_problem, TUNE_TOKENS),
        default=lambda shape, size, element, gpu: default_norm_config(shape.hidden),
        candidates=lambda shape, size, gpu: _norm_candidates(shape),
        launcher=rms_norm_triton,
    ),
)
ADD_RMS_NORM = KernelOp(
    name="add_rms_norm",
    launcher=add_rms_norm_triton,
    bench_cases=token_cases(add_rms_norm_problem, BENCH_TOKENS, _norm_label),
    plain_torch=add_rms_norm_reference,
    # flashinfer's function works in place.
    flashinfer=lambda flashinfer, problem, case: problem.calls(flashinfer.norm.fused_add_rmsnorm),
    tuning=Tuning(
        files=("rms_norm.py",),
        by_size=False,
        exact=lambda shape: {"block_m": next_power_of_2(shape.hidden)},
        near=lambda shape: {"M": shape.hidden},
        cases=token_cases(add_rms_norm_problem, TUNE_TOKENS),
        default=lambda shape, size, element, gpu: default_norm_config(shape.hidden),
        candidates=lambda shape, size, gpu: _norm_candidates(shape),
        launcher=add_rms_norm_triton,
    ),
)
ADD_RMS_NORM_ROUTER = KernelOp(
    name="add_rms_norm_router", launcher=add_rms_norm_router_triton, bench_cases=_router_cases
)
