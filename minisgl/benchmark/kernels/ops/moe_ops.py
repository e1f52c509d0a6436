"""A layer of experts: the routing by itself, and the whole layer.

T tokens, M model width, E experts.
"""

import math
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import ELEMENT_SIZE, Case, KernelOp, Tuning, token_cases
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.fused_moe import MoeConfig, default_moe_config, fused_moe_reference, fused_moe_triton
from triton_kernels.gpu import Gpu
from triton_kernels.moe_gemm import GemmConfig, gemm_that_fits
from triton_kernels.moe_pairs import PairsConfig
from triton_kernels.moe_route import Routing, route_triton, top_k_reference

BENCH_MOE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 8192)
TUNE_MOE_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 8192)


def fused_moe_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """[T, M] through E experts; its bytes count only the experts that get a token (the mean over sets)."""
    experts, top_k, width = shape.experts, shape.experts_per_token, shape.expert_width
    std = 0.02
    gate_up = torch.randn((experts, 2 * width, shape.hidden), device=device, dtype=dtype) * std
    down = torch.randn((experts, shape.hidden, width), device=device, dtype=dtype) * std
    sets = [
        (
            torch.randn((tokens, shape.hidden), device=device, dtype=dtype),
            torch.randn((tokens, experts), device=device, dtype=dtype),
        )
        for _ in range((16 if tokens <= 64 else 4) if device.type == "cuda" else 1)
    ]
    arguments = [(x, logits, gate_up, down, top_k) for x, logits in sets]
    chosen = [top_k_reference(logits, top_k, True)[0].unique().long() for _, logits in sets]
    hits = [len(experts_hit) for experts_hit in chosen]
    known: list[Tensor] = []

    def check(function: Any) -> float:
        x, logits = sets[0]
        poison(4 * tokens * top_k * shape.hidden, device)
        got = function(*arguments[0])
        if got.isfinite().all() and 2 * hits[0] <= experts:  # experts without a token may hold anything
            unused = torch.ones(experts, dtype=torch.bool, device=device)
            unused[chosen[0]] = False
            poisoned = [weight.clone() for weight in (gate_up, down)]
            for weight in poisoned:
                weight[unused] = math.nan
            if not torch.equal(got, function(x, logits, *poisoned, top_k)):
                raise ValueError("an expert that is not hit was read, or two runs differ")
        if not known:
            known.append(fused_moe_reference(x.float(), logits, gate_up, down, top_k))
        return relative_error(got, known[0])

    weight_bytes = 3 * shape.hidden * width * dtype.itemsize * sum(hits) / len(hits)
    moved = weight_bytes + 2 * sets[0][0].nbytes
    flop = 6.0 * tokens * top_k * shape.hidden * width
    return Problem(moved, flop, arguments, int(moved), check)


def moe_route_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """The routing and sorting of fused_moe, from float32 router logits [T, E]."""
    experts, top_k = shape.experts, shape.experts_per_token
    moved = tokens * (4 * experts + 12 * top_k)
    logits = [torch.randn((tokens, experts), device=device) for _ in range(num_sets(moved, device))]

    def check(function: Any) -> float:
        poison(4 * tokens * top_k, device)
        routing: Routing = function(*arguments[0])
        chosen, weights = top_k_reference(logits[0], top_k, True)
        if not torch.equal(routing.experts, chosen):
            raise ValueError("other experts")
        if not torch.equal(routing.order.long(), chosen.flatten().sort(stable=True).indices):
            raise ValueError("another order")
        return relative_error(routing.weights, weights)

    arguments = [(x, top_k, True) for x in logits]
    return Problem(moved, 0.0, arguments, moved, check)


def moe_candidates(gpu: Gpu) -> list[MoeConfig]:
    """Candidates with tiles for this GPU, each with as many stages as fit."""
    pairs = (
        (2, 1024, 1, 2, 256, 12),
        (4, 256, 3, 2, 256, 8),
        (2, 256, 3, 2, 256, 12),
        (2, 512, 3, 1, 256, 12),
        (1, 1024, 3, 1, 1024, 6),
    )
    products = (
        ((16, 32, 128, 4, 4, 1), (16, 64, 128, 4, 4, 1)),
        ((16, 64, 128, 4, 3, 1), (16, 128, 128, 4, 3, 1)),
        ((16, 64, 128, 4, 4, 1), (16, 128, 128, 4, 3, 1)),
        ((16, 64, 64, 4, 5, 1), (16, 128, 64, 4, 5, 1)),
        ((32, 64, 64, 4, 4, 1), (32, 128, 64, 4, 4, 1)),
        ((32, 64, 128, 4, 3, 1), (32, 128, 64, 4, 4, 1)),
        ((64, 64, 64, 4, 4, 4), (64, 128, 64, 4, 4, 4)),
        ((64, 128, 64, 4, 3, 8), (64, 256, 64, 8, 3, 8)),
        ((128, 64, 64, 4, 4, 8), (128, 128, 64, 4, 4, 8)),
        ((128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 3, 8)),
        ((128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 4, 8)),
        ((128, 128, 64, 8, 4, 16), (128, 256, 64, 8, 4, 16)),
    )
    fitting = [
        MoeConfig(
            gemm_that_fits(GemmConfig(*gate_up), gpu, ELEMENT_SIZE, gated=True),
            gemm_that_fits(GemmConfig(*down), gpu, ELEMENT_SIZE, gated=False),
        )
        for gate_up, down in products
    ]
    small = fitting[2]
    return list(dict.fromkeys([*(small._replace(pairs=PairsConfig(*one)) for one in pairs), *fitting]))


def _bench_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    def label(tokens: int, shape: ModelShape) -> str:
        return f"{tokens}x{shape.hidden} {shape.experts}x{shape.expert_width} top {shape.experts_per_token}"

    cases = token_cases(fused_moe_problem, BENCH_MOE_TOKENS, label, cpu_tokens=(2,))
    return cases(shape, on_gpu) if shape.experts else []


def _route_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    def label(tokens: int, shape: ModelShape) -> str:
        return f"{tokens}x{shape.experts} top {shape.experts_per_token}"

    cases = token_cases(moe_route_problem, (1, 64, 8192), label, cpu_tokens=(2,))
    return cases(shape, on_gpu) if shape.experts else []


def _tune_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    return token_cases(fused_moe_problem, TUNE_MOE_TOKENS)(shape, on_gpu) if shape.experts else []


MOE_ROUTE = KernelOp(name="moe_route", launcher=route_triton, bench_cases=_route_cases)
FUSED_MOE = KernelOp(
    name="fused_moe",
    launcher=fused_moe_triton,
    bench_cases=_bench_cases,
    tuning=Tuning(
        files=("fused_moe.py", "moe_gate.py", "moe_gemm.py", "moe_pairs.py", "moe_route.py"),
        by_size=True,
        exact=lambda shape: {"top_k": shape.experts_per_token},
        near=lambda shape: {"E": shape.experts, "M": shape.hidden, "F": shape.expert_width},
        cases=_tune_cases,
        default=lambda shape, size, element, gpu: default_moe_config(
            size, shape.experts, shape.expert_width, shape.experts_per_token, element, gpu
        ),
        candidates=lambda shape, size, gpu: moe_candidates(gpu),
        launcher=fused_moe_triton,
    ),
)
