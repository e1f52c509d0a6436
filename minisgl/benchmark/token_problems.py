"""Everything but attention as problems to time: norms, SiLU-mul, RoPE and store, experts, sampling.

T tokens, R rows, M model width, F MLP width, E experts, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.model_shapes import ModelShape
from triton_kernels.fused_moe import fused_moe_reference
from triton_kernels.moe_route import top_k_reference
from triton_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from triton_kernels.rope_store import rope_store_reference
from triton_kernels.sample import sample_reference
from triton_kernels.silu_mul import silu_mul_reference

EPS = 1e-5
PAGE_SIZE = 16

SAMPLING = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.6, 0, 1.0, 0.0),
    "top_p": (0.6, 0, 0.9, 0.0),
    "top_p flat": (2.5, 0, 0.9, 0.0),
    "top_k": (0.6, 50, 1.0, 0.0),
    "top_k top_p min_p": (0.6, 50, 0.9, 0.05),
}
"""Temperature, top_k, top_p, min_p."""


def rms_norm_problem(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """RMSNorm of [T, M]."""
    weight = torch.randn(width, device=device, dtype=dtype)
    moved = 2 * tokens * width * dtype.itemsize
    xs = [torch.randn((tokens, width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))]

    def check(function: Any) -> float:
        poison(moved // 2, device)
        got = function(xs[0], weight, EPS)
        return relative_error(got, rms_norm_reference(xs[0].double(), weight, EPS))

    arguments = [(x, weight, EPS) for x in xs]
    return Problem("rms_norm", f"{tokens}x{width}", tokens, moved, 0.0, arguments, moved, check)


def add_rms_norm_problem(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """RMSNorm of a sum of two [T, M]."""
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
    return Problem("add_rms_norm", f"{tokens}x{width}", tokens, moved, 0.0, arguments, moved, check)


def silu_mul_problem(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """SiLU-mul of [T, 2F]."""
    moved = 3 * tokens * width * dtype.itemsize
    gate_ups = [
        torch.randn((tokens, 2 * width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))
    ]

    def check(function: Any) -> float:
        poison(moved // 3, device)
        return relative_error(function(gate_ups[0]), silu_mul_reference(gate_ups[0].double()))

    return Problem(
        "silu_mul", f"{tokens}x{width}", tokens, moved, 0.0, [(x,) for x in gate_ups], moved, check
    )


def rope_store_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """From qkv [T, (H + 2K) * D] to random slots of pools that hold NaN."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    width = (heads + 2 * kv_heads) * head_dim
    moved = 2 * tokens * width * dtype.itemsize
    sets = num_sets(moved, device)
    pages = sets * math.ceil(tokens / PAGE_SIZE) + 1
    pools = torch.full((2, pages, PAGE_SIZE, kv_heads, head_dim), math.nan, device=device, dtype=dtype)
    angles = torch.rand((4096, head_dim // 2), device=device) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 4096, (tokens,), device=device, dtype=torch.int32)
    slots = PAGE_SIZE + torch.randperm(sets * tokens, device=device, dtype=torch.int32)
    norms: tuple[Any, ...] = ()
    if shape.qk_norm:
        norms = (*torch.randn((2, head_dim), device=device, dtype=dtype), EPS)
    arguments = [
        (
            torch.randn((tokens, width), device=device, dtype=dtype),
            cos_sin,
            positions,
            slots[i * tokens : (i + 1) * tokens],
            pools[0],
            pools[1],
            *norms,
        )
        for i in range(sets)
    ]

    def check(function: Any) -> float:
        poison(moved // 2, device)
        expected_pools = torch.full_like(pools, math.nan, dtype=torch.float64)
        pools.fill_(math.nan)
        q = function(*arguments[0])
        qkv, table = arguments[0][:2]
        wide_norms: list[Any] = [weight.double() for weight in norms[:2]] + list(norms[2:])
        wide: list[Any] = [qkv.double(), table.double(), *arguments[0][2:4], *expected_pools, *wide_norms]
        expected = rope_store_reference(*wide)
        if not torch.equal(pools.isnan(), expected_pools.isnan()):
            raise ValueError("wrong slots written")
        return max(
            relative_error(q, expected), relative_error(pools.nan_to_num(), expected_pools.nan_to_num())
        )

    label = f"{tokens}x{heads}/{kv_heads}/{head_dim}" + (" normed" if norms else "")
    return Problem("rope_store", label, tokens, moved, 0.0, arguments, moved, check)


def fused_moe_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """[T, M] through E experts; the bytes are those of the experts that the first set's routing hits."""
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
        if got.isfinite().all() and 2 * hits[0] <= experts:  # the others may hold anything
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
    label = f"{tokens}x{shape.hidden} {experts}x{width} top {top_k}"
    return Problem("fused_moe", label, tokens, moved, flop, arguments, int(moved), check)


def sample_problem(rows: int, vocab: int, kind: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """Logits [R, V] like a model's; `kind` is one of SAMPLING."""
    set_bytes = rows * vocab * dtype.itemsize
    logits = [
        (2.5 * torch.randn((rows, vocab), device=device)).to(dtype)
        for _ in range(num_sets(set_bytes, device))
    ]
    temperature, top_k, top_p, min_p = SAMPLING[kind]
    columns = (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, device=device, dtype=torch.int32),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.arange(rows, device=device, dtype=torch.int64) * 7919 - 1000,
        torch.arange(rows, device=device, dtype=torch.int32),
    )

    def check(function: Any) -> float:
        poison(rows * 4, device)
        got = function(logits[0], *columns)
        # A few other ids are no error: a draw within a rounding of two ids' boundary may go either way.
        differ = (got != sample_reference(logits[0], *columns)).sum().item()
        if differ > max(1, rows // 64) or got.min() < 0 or got.max() >= vocab:
            raise ValueError(f"{differ} of {rows} ids differ from the reference's")
        return 0.0

    arguments = [(x, *columns) for x in logits]
    return Problem("sample", f"{rows}x{vocab} {kind}", rows, set_bytes, 0.0, arguments, set_bytes, check)
