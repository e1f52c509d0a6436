"""Problems of decode and prefill attention: paged batches in pools that contain NaN in all other places.

H query heads, K KV heads, D head dim, S page size, R rows, T new tokens.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from triton_kernels.attention_reference import paged_decode_reference, paged_prefill_reference
from triton_kernels.decode_config import fewest_alike, num_arrivals
from triton_kernels.e4m3 import FP8
from triton_kernels.fp8_cache import to_pool
from triton_kernels.paged_decode import Rope
from triton_kernels.rope_store import rope_store_reference

EPS = 1e-6
FP8_SCALES = (0.5, 1.5)
"""Scales of keys and values in pools of e4m3."""
FP8_NAN = 0x7F
LONGEST_TOKENS = 131072
"""The capacity of a row of the page tables, as in an engine with long contexts."""


class AttentionShape(NamedTuple):
    """A batch, as context and new tokens of each row, and a model's heads."""

    label: str
    contexts: list[int]
    new_tokens: list[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    is_fp8: bool = False  # the pools hold e4m3

    def kv_bytes(self, element_size: int) -> int:
        """Bytes of the keys and values that the batch reads, in pools of such elements or of e4m3."""
        size = 1 if self.is_fp8 else element_size
        return 2 * size * sum(self.contexts) * self.kv_heads * self.head_dim

    @property
    def flop(self) -> float:
        """FLOPs of both products, for the pairs that the causal mask keeps."""
        pairs = sum(
            new * (context - new) + new * (new + 1) / 2
            for context, new in zip(self.contexts, self.new_tokens, strict=True)
        )
        return 4.0 * self.heads * self.head_dim * pairs


class Pools(NamedTuple):
    """Keys and values [P, S, K, D] of all input sets."""

    k_cache: Tensor
    v_cache: Tensor
    scales: Tensor | None = None  # float32 [2]; only of pools of e4m3


class AttentionSet(NamedTuple):
    """One input set, with its own pages of the common pools."""

    q: Tensor  # [T, H, D]
    page_table: Tensor  # int32 [B, C]
    row_ids: Tensor  # int32 [R]
    context_len: Tensor  # int32 [R]
    row_start: Tensor  # int32 [R + 1]


def decode_shape(label: str, contexts: list[int], **heads: Any) -> AttentionShape:
    """A batch with one new token in each row."""
    return AttentionShape(label, contexts, [1] * len(contexts), **heads)


def decode_problem(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Decode attention. The check compares with float32; a part of the rows must give the same bits."""
    pools, sets = attention_sets(shape, device, dtype)
    k_cache, v_cache, kv_scales = pools
    scale = shape.head_dim**-0.5
    num_rows = len(shape.contexts)
    counters = torch.zeros(num_arrivals(num_rows, shape.kv_heads), dtype=torch.int32, device=device)
    options = (scale, 0, 0.0, counters, kv_scales)
    arguments = [(one.q, k_cache, v_cache, *one[1:4], *options) for one in sets]
    known: list[Tensor] = []

    def check(function: Any) -> float:
        one = sets[0]
        poison(one.q.nbytes, device)
        got = function(*arguments[0])
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        count = max(num_rows // 2, fewest_alike(num_rows, *heads, dtype.itemsize, kv_scales is not None))
        rows = torch.arange(num_rows - 1, num_rows - 1 - count, -1, device=device)
        others = one.row_ids[rows], one.context_len[rows]
        apart = function(one.q[rows], k_cache, v_cache, one.page_table, *others, *options)
        if not torch.equal(apart, got[rows]):
            raise ValueError("rows differ in other company")
        if not known:
            q = one.q.float()
            known.append(paged_decode_reference(q, k_cache, v_cache, *one[1:4], scale, kv_scales=kv_scales))
        return relative_error(got, known[0])

    moved = shape.kv_bytes(dtype.itemsize)
    return Problem(moved, shape.flop, arguments, moved, check)


def rope_decode_problem(
    shape: AttentionShape, normed: bool, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Decode attention that begins at qkv [R, (H + 2K) * D], and rotates and stores the new keys and values.

    Args:
        normed: RMSNorm is applied to q and k.
    """
    pools, sets = attention_sets(shape, device, dtype)
    k_cache, v_cache, kv_scales = pools
    scale = shape.head_dim**-0.5
    num_rows, head_dim, kv_heads = len(shape.contexts), shape.head_dim, shape.kv_heads
    width = (shape.heads + 2 * kv_heads) * head_dim
    counters = torch.zeros(num_arrivals(num_rows, kv_heads), dtype=torch.int32, device=device)
    angles = torch.rand((max(shape.contexts), head_dim // 2), device=device) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = tuple(torch.randn((2, head_dim), device=device, dtype=dtype)) if normed else (None, None)
    arguments = []
    for one in sets:
        last = one.context_len - 1
        pages = one.page_table[one.row_ids.long(), last.long() // shape.page_size]
        slots = pages * shape.page_size + last % shape.page_size
        qkv = torch.randn((num_rows, width), device=device, dtype=dtype)
        rope = Rope(cos_sin, last, slots, *norms, eps=EPS)
        arguments.append((qkv, rope, k_cache, v_cache, *one[1:4], scale, 0, 0.0, counters, kv_scales))

    def check(function: Any) -> float:
        qkv, (_, positions, slots, *_) = arguments[0][:2]
        poison(qkv.nbytes, device)
        newest = [pool.flatten(0, 1) for pool in (k_cache, v_cache)]
        for pool in newest:
            if shape.is_fp8:  # torch does not write every type by index
                pool.view(torch.uint8)[slots.long()] = FP8_NAN
            else:
                pool[slots.long()] = math.nan
        got = function(*arguments[0])
        stored = torch.zeros((2, num_rows, 1, kv_heads, head_dim), dtype=torch.float64, device=device)
        places = torch.arange(num_rows, dtype=torch.int32, device=device)
        wide: list[Any] = [None if weight is None else weight.double() for weight in norms]
        options: list[Any] = [*stored, *wide, EPS]
        q = rope_store_reference(qkv.double(), cos_sin.double(), positions, places, *options)
        found = [_at(pool, slots) for pool in newest]
        if kv_scales is not None:
            # Keys are rounded to the queries' type before FP8, which may double the error.
            rounded = zip(stored.to(dtype), (k_cache, v_cache), kv_scales, strict=True)
            stored = torch.stack([to_pool(x, pool, scale).double() for x, pool, scale in rounded])
        expected = paged_decode_reference(
            q.float(), k_cache, v_cache, *sets[0][1:4], scale, kv_scales=kv_scales
        )
        errors = [relative_error(one, exact[:, 0]) for one, exact in zip(found, stored, strict=True)]
        return max(relative_error(got, expected), *errors)

    moved = shape.kv_bytes(dtype.itemsize)
    return Problem(moved, shape.flop, arguments, moved, check)


def prefill_problem(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> Problem:
    """Prefill attention. The check compares with float32."""
    pools, sets = attention_sets(shape, device, dtype)
    k_cache, v_cache, kv_scales = pools
    scale = shape.head_dim**-0.5
    longest = max(shape.new_tokens)
    options = (longest, scale, 0, 0.0, kv_scales)
    arguments = [(one.q, k_cache, v_cache, *one[1:5], *options) for one in sets]
    known: list[Tensor] = []

    def check(function: Any) -> float:
        one = sets[0]
        poison(one.q.nbytes, device)
        got = function(*arguments[0])
        if not known:
            known.append(paged_prefill_reference(one.q.float(), k_cache, v_cache, *one[1:5], *options))
        return relative_error(got, known[0])

    tokens = sum(shape.new_tokens)
    moved = shape.kv_bytes(dtype.itemsize) + 2 * tokens * shape.heads * shape.head_dim * dtype.itemsize
    return Problem(moved, shape.flop, arguments, int(moved), check)


def attention_sets(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, most: int = 64
) -> tuple[Pools, list[AttentionSet]]:
    """Pools with NaN outside the rows' tokens, and at most `most` input sets with their own pages."""
    size = shape.page_size
    sets = min(most, num_sets(shape.kv_bytes(2), device))
    pages_per_row = [math.ceil(n / size) for n in shape.contexts]
    num_pages = sets * sum(pages_per_row) + 1
    pools = []
    for _ in range(2):
        pool = torch.empty((num_pages, size, shape.kv_heads, shape.head_dim), device=device, dtype=dtype)
        pool.normal_()
        pool[0] = float("nan")
        pools.append(pool)
    order = 1 + torch.randperm(num_pages - 1, device=device, dtype=torch.int32)
    rows = len(shape.contexts)
    table_pages = math.ceil(max(LONGEST_TOKENS if device.type == "cuda" else 0, *shape.contexts, 1) / size)
    result = []
    taken = 0
    for _ in range(sets):
        page_table = torch.zeros((rows + 1, table_pages), device=device, dtype=torch.int32)
        row_ids = torch.randperm(rows + 1)[:rows].int()
        for row, pages, length in zip(row_ids.tolist(), pages_per_row, shape.contexts, strict=True):
            page_table[row, :pages] = order[taken : taken + pages]
            if length % size:
                for pool in pools:
                    pool[order[taken + pages - 1].long(), length % size :] = float("nan")
            taken += pages
        q = torch.randn((sum(shape.new_tokens), shape.heads, shape.head_dim), device=device, dtype=dtype)
        result.append(
            AttentionSet(
                q,
                page_table,
                row_ids.to(device),
                torch.tensor(shape.contexts, dtype=torch.int32, device=device),
                torch.tensor([0, *shape.new_tokens], device=device).cumsum(0).int(),
            )
        )
    if not shape.is_fp8:
        return Pools(pools[0], pools[1]), result
    scales = torch.tensor(FP8_SCALES, device=device)
    return Pools(pools[0].to(FP8), pools[1].to(FP8), scales), result


def _at(pool: Tensor, slots: Tensor) -> Tensor:
    """What a pool [N, K, D] has at these slots; torch does not read every type by index."""
    if pool.dtype != FP8:
        return pool[slots.long()]
    return pool.view(torch.uint8)[slots.long()].view(FP8).float()
