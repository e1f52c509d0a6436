"""RoPE, and the store of keys and values into the pools.

T tokens, H query heads, K KV heads, D head dim.
"""

import math
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import BENCH_TOKENS, KernelOp, token_cases
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.rms_norm import rms_norm_reference
from triton_kernels.rope_store import rope_store_reference, rope_store_triton

EPS = 1e-5
PAGE_SIZE = 16


def rope_store_problem(tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Rotates qkv [T, (H + 2K) * D], and stores keys and values to random slots of pools that hold NaN."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    width = (heads + 2 * kv_heads) * head_dim
    # qkv in and out; for each token its row of the table, position and slot. Positions differ as in prefill.
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

    return Problem(moved, 0.0, arguments, moved, check)


def _rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Plain torch; does not support padding tokens."""
    _, _, kv_heads, head_dim = k_cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = rms_norm_reference(q, q_norm_weight, eps)
        k = rms_norm_reference(k, k_norm_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    k_cache.flatten(0, 1)[slots] = rotated(k)
    v_cache.flatten(0, 1)[slots] = v
    return rotated(q)


def _label(tokens: int, shape: ModelShape) -> str:
    heads = f"{shape.heads}/{shape.kv_heads}/{shape.head_dim}"
    return f"{tokens}x{heads}" + (" normed" if shape.qk_norm else "")


ROPE_STORE = KernelOp(
    name="rope_store",
    launcher=rope_store_triton,
    bench_cases=token_cases(rope_store_problem, BENCH_TOKENS, _label),
    plain_torch=_rope_store,
)
