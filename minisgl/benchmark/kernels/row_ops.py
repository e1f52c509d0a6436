"""Everything but attention as problems to time: norms, linear layers, RoPE and store, experts, sampling.

T tokens, R rows, M model width, F MLP width, E experts, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.model_shapes import ModelShape
from triton_kernels.advance_rows import advance_rows_reference
from triton_kernels.fused_moe import fused_moe_reference
from triton_kernels.linear import gated_linear_reference, linear_reference
from triton_kernels.moe_route import Routing, top_k_reference
from triton_kernels.norm_router import add_rms_norm_router_reference
from triton_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from triton_kernels.rope_store import rope_store_reference
from triton_kernels.sample import sample_reference
from triton_kernels.silu_mul import gelu_tanh_mul_reference, silu_mul_reference

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


def add_rms_norm_router_problem(
    tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Problem:
    """The norm of a sum of two [T, M] with a router [E, M] behind it; every fourth token is padding."""
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

    label = f"{tokens}x{width} {shape.experts}"
    return Problem("add_rms_norm_router", label, tokens, moved, 0.0, arguments, moved, check)


def silu_mul_problem(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """SiLU-mul of [T, 2F]."""
    return _gated_problem("silu_mul", silu_mul_reference, tokens, width, device, dtype)


def gelu_tanh_mul_problem(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """GELU-mul of [T, 2F]."""
    return _gated_problem("gelu_tanh_mul", gelu_tanh_mul_reference, tokens, width, device, dtype)


def _gated_problem(
    op: str,
    reference: Callable[[Tensor], Tensor],
    tokens: int,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Problem:
    moved = 3 * tokens * width * dtype.itemsize
    gate_ups = [
        torch.randn((tokens, 2 * width), device=device, dtype=dtype) for _ in range(num_sets(moved, device))
    ]

    def check(function: Any) -> float:
        poison(moved // 3, device)
        return relative_error(function(gate_ups[0]), reference(gate_ups[0].double()))

    return Problem(op, f"{tokens}x{width}", tokens, moved, 0.0, [(x,) for x in gate_ups], moved, check)


def linear_problem(rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """A linear layer [N, K] over R rows, without bias."""
    return _linear_problem("linear", linear_reference, rows, width, outputs, device, dtype)


def linear_many_problem(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """The same for the op of larger batches."""
    return linear_problem(rows, width, outputs, device, dtype)._replace(op="linear_many")


def gated_linear_many_problem(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """A gated MLP's first half for the op of larger batches."""
    return gated_linear_problem(rows, width, outputs, device, dtype)._replace(op="gated_linear_many")


def gated_linear_problem(
    rows: int, width: int, outputs: int, device: torch.device, dtype: torch.dtype
) -> Problem:
    """A gated MLP's first half, [2F, K], over R rows."""
    return _linear_problem("gated_linear", gated_linear_reference, rows, width, outputs, device, dtype)


def _linear_problem(
    op: str,
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
    return Problem(op, f"{rows}x{width} to {outputs}", rows, moved, flop, arguments, moved, check)


def rope_store_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """From qkv [T, (H + 2K) * D] to random slots of pools that hold NaN."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    width = (heads + 2 * kv_heads) * head_dim
    # In and out, each token's row of the table (all positions differ, as in a prefill), position and slot.
    moved = tokens * (2 * width * dtype.itemsize + 4 * head_dim + 8)
    sets = num_sets(moved, device)
    pages = sets * math.ceil(tokens / PAGE_SIZE) + 1
    pools = torch.full((2, pages, PAGE_SIZE, kv_heads, head_dim), math.nan, device=device, dtype=dtype)
    angles = torch.rand((max(4096, tokens), head_dim // 2), device=device) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randperm(len(angles), device=device, dtype=torch.int32)[:tokens]
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


def moe_route_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Routing and sort of fused_moe by themselves, from float32 router logits [T, E]."""
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
    label = f"{tokens}x{experts} top {top_k}"
    return Problem("moe_route", label, tokens, moved, 0.0, arguments, moved, check)


def advance_rows_problem(rows: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Tokens and lengths of R rows into tables that hold them in another order."""
    row_ids = torch.randperm(rows, device=device, dtype=torch.int32)
    tables = torch.zeros((2, rows + 1), device=device, dtype=torch.int32)
    arguments = [(row_ids, row_ids + 5, row_ids + 9, *tables, rows)]

    def check(function: Any) -> float:
        tables.zero_()
        function(*arguments[0])
        expected = torch.zeros_like(tables)
        advance_rows_reference(row_ids, row_ids + 5, row_ids + 9, expected[0], expected[1], rows)
        if not torch.equal(tables, expected):
            raise ValueError("wrong rows")
        return 0.0

    return Problem("advance_rows", f"{rows}", rows, 20.0 * rows, 0.0, arguments, 20 * rows, check)


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
    label = f"{rows}x{vocab} {kind}" + (" float32" if dtype == torch.float32 else "")
    return Problem("sample", label, rows, set_bytes, 0.0, arguments, set_bytes, check)
