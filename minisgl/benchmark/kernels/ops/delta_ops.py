"""Linear attention with the gated delta rule: one decode step, and prefill.

R rows, T tokens, K key heads, V value heads, D and E elements of a key head and a value head, C channels.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import Case, KernelOp, Tuning
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.gated_delta import CHUNK, TAPS, DeltaStates, DeltaWeights, gated_delta_reference
from triton_kernels.gated_delta_decode import (
    DeltaDecodeConfig,
    default_delta_decode_config,
    gated_delta_decode_triton,
)
from triton_kernels.gated_delta_decode_hopper import HEAD_DIM
from triton_kernels.gated_delta_prefill import (
    DeltaPrefillConfig,
    default_delta_prefill_config,
    gated_delta_prefill_triton,
    scan_stages_that_fit,
)
from triton_kernels.gpu import Gpu

EPS = 1e-6
DECODE_ROWS = (1, 16, 64, 256)
PREFILL_LENGTHS = ((512,), (2048,), (8192,), (1024,) * 8, (64,) * 64)


def delta_problem(
    lengths: tuple[int, ...], decodes: bool, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Rows with so many new tokens each behind 100 others; with `decodes` one each, by the decode step."""
    heads, dim = shape.linear_value_heads, shape.linear_head_dim
    channels = 2 * shape.linear_key_heads * dim + heads * dim
    rows, tokens = len(lengths), sum(lengths)
    row_start = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    context_len = 100 + torch.tensor(lengths, dtype=torch.int32, device=device)
    row_ids = torch.arange(rows, dtype=torch.int32, device=device)

    def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(sizes, device=device, dtype=dtype)

    weights = DeltaWeights(
        normal(channels, TAPS) * 0.5,
        normal(heads, dtype=torch.float32) * 0.5,
        normal(heads, dtype=torch.float32),
        1 + 0.2 * normal(dim),
    )
    state_bytes = 8 * rows * heads * dim * dim  # float32, read and written
    row_bytes = dtype.itemsize * (channels + 2 * heads * dim + 2 * heads)
    moved = state_bytes + tokens * row_bytes + dtype.itemsize * channels * (rows * TAPS + TAPS)
    # Products with the state, and of the tokens of a chunk with each other.
    flop = 0.0 if decodes else 2.0 * tokens * heads * (3 * dim * dim + CHUNK * 3 * dim)

    def arguments() -> tuple[Any, ...]:
        matrix = normal(tokens, channels + heads * dim + 2 * heads)
        qkvz, ba = matrix.split((channels + heads * dim, 2 * heads), dim=1)
        recurrent = normal(rows + 1, heads, dim, dim, dtype=torch.float32) * 0.1
        states = DeltaStates(normal(rows + 1, TAPS, channels), recurrent)
        lines = (row_ids, context_len) if decodes else (row_ids, context_len, row_start)
        return (qkvz, ba, weights, states, *lines, EPS)

    sets = [arguments() for _ in range(num_sets(moved, device))]

    def check(function: Callable[..., Tensor]) -> float:
        qkvz, ba, _, states, *_ = sets[0]
        fresh, exact = (DeltaStates(*(one.clone() for one in states)) for _ in range(2))
        exact = DeltaStates(*(one.double() for one in exact))
        poison(tokens * heads * dim * dtype.itemsize, device)
        got = function(qkvz, ba, weights, fresh, *sets[0][4:])
        doubled = DeltaWeights(*(one.double() for one in weights))
        lines = (row_ids, context_len, row_start)
        expected = gated_delta_reference(qkvz.double(), ba.double(), doubled, exact, *lines, EPS)
        if not torch.equal(fresh.conv, exact.conv.to(dtype)):
            raise ValueError("the convolution's states differ")
        state = relative_error(fresh.recurrent[:-1], exact.recurrent[:-1])
        return max(state, relative_error(got, expected))

    return Problem(moved, flop, sets, moved, check)


def _cases(lengths: tuple[tuple[int, ...], ...], decodes: bool, shape: ModelShape) -> list[Case]:
    """One case for each batch of rows."""
    if not shape.linear_value_heads:
        return []
    heads = f"{shape.linear_key_heads}/{shape.linear_value_heads}/{shape.linear_head_dim}"
    return [
        Case(f"{len(of)}x{of[0]} {heads}", sum(of), functools.partial(delta_problem, of, decodes, shape))
        for of in lengths
    ]


def _decode_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    rows = DECODE_ROWS if on_gpu else (2,)
    return _cases(tuple((1,) * count for count in rows), True, shape if on_gpu else _small(shape))


def _prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    lengths = PREFILL_LENGTHS if on_gpu else ((3, 70),)
    return _cases(lengths, False, shape if on_gpu else _small(shape))


def _small(shape: ModelShape) -> ModelShape:
    """Heads that Triton's interpreter computes in a second, if the model has any."""
    if not shape.linear_value_heads:
        return shape
    return shape._replace(linear_key_heads=1, linear_value_heads=2, linear_head_dim=16)


def _decode_candidates(shape: ModelShape, size: int, gpu: Gpu) -> list[DeltaDecodeConfig]:
    if gpu.is_hopper and shape.linear_head_dim == HEAD_DIM:
        return []  # gated_delta_decode_hopper.py runs them, which has one configuration
    return [DeltaDecodeConfig(warps) for warps in (4, 8, 16)]


def _prefill_candidates(shape: ModelShape, size: int, gpu: Gpu) -> list[DeltaPrefillConfig]:
    dim = shape.linear_head_dim
    default = default_delta_prefill_config(dim, dim, 2, gpu)
    found = []
    most = min(dim, 128) if gpu.multiplies_from_shared else default.block_e
    # One stage is wrong on Hopper (Triton 3.6); GPUs with room for one only take the default.
    for block_e, crowded, warps, stages in itertools.product((16, 32), (32, 64, 128), (4, 8), (2, 3)):
        fits = scan_stages_that_fit(stages, dim, crowded, gpu) == stages
        if block_e <= crowded <= most and fits:
            found.append(DeltaPrefillConfig(default.prepare_warps, block_e, crowded, warps, stages))
    if default.prepare_warps != 4:
        found += [one._replace(prepare_warps=4) for one in found[:1]]
    return found


def _parts(shape: ModelShape) -> list[ModelShape]:
    return [shape] if shape.linear_value_heads else []


def _exact(shape: ModelShape) -> dict[str, int]:
    return {"D": shape.linear_head_dim, "E": shape.linear_head_dim}


def _near(shape: ModelShape) -> dict[str, int]:
    return {"V": shape.linear_value_heads}


GATED_DELTA_DECODE = KernelOp(
    name="gated_delta_decode",
    launcher=gated_delta_decode_triton,
    bench_cases=_decode_cases,
    tuning=Tuning(
        files=("gated_delta_decode.py",),
        by_size=False,
        exact=_exact,
        near=_near,
        cases=_decode_cases,
        default=lambda shape, size, element, gpu: default_delta_decode_config(
            shape.linear_head_dim, shape.linear_head_dim
        ),
        candidates=_decode_candidates,
        launcher=gated_delta_decode_triton,
        parts=_parts,
    ),
)
GATED_DELTA_PREFILL = KernelOp(
    name="gated_delta_prefill",
    launcher=gated_delta_prefill_triton,
    bench_cases=_prefill_cases,
    tuning=Tuning(
        files=("gated_delta_prefill.py", "gated_delta_chunks.py", "gated_delta_ends.py"),
        by_size=False,
        exact=_exact,
        near=_near,
        cases=_prefill_cases,
        default=lambda shape, size, element, gpu: default_delta_prefill_config(
            shape.linear_head_dim, shape.linear_head_dim, element, gpu
        ),
        candidates=_prefill_candidates,
        launcher=gated_delta_prefill_triton,
        parts=_parts,
    ),
)
