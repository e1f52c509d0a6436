"""From the qkv projection to attention: normalise and rotate q and k, store k and v in the pool, in one pass.

    slot = slot_mapping; (a, b) = the halves of a head's D elements, (c, s) = those of cos_sin[positions[t]]
    normed(x, w)  = w * x / sqrt(mean(x^2) + eps)                       only where a weight w is given (Qwen3)
    rotated(x)    = (a*c - b*s, b*c + a*s)                              (Llama's rotate-half pairing)
    q[t, h]                       = rotated(normed(qkv[t, h], wq))      0 <= h < H
    k_cache[page, offset, kh]     = rotated(normed(qkv[t, H + kh], wk)) page, offset = divmod(slot[t], S)
    v_cache[page, offset, kh]     = qkv[t, H + K + kh]
    with normed_values (Gemma 4): x / sqrt(mean(x^2) + eps), x = that, or qkv[t, H + kh] if values are keys

T new tokens, H query heads, K KV heads, D head dim (even), P pages, S page size. Float32 inside, one rounding
of q, k and normalised values, to the dtype of qkv. A token with slot_mapping -1 (padding) is not stored; its
q is still written, rotated as at position 0, so that a padding token's position is never trusted. T may be 0;
qkv rows and the pools' page, token and head strides are free; the elements of a head lie next to each other.

The table contains the scaling of the angles (linear, dynamic, Llama 3, YaRN), and YaRN's attention factor as
a factor on both halves of its rows. Pairs whose angles are 0 are not rotated.

Cost: T*(H+2K)*D elements read and as many written, plus T*D*4 bytes of table: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import can_start_early, start_next_and_wait
from triton_kernels.fp8_cache import scales_of, stored, to_pool
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.linear_few import MAX_ROWS
from triton_kernels.on_cpu import rope_store_cpu

NormedValues = Literal["values", "keys"]
"""What values are normalised from, without a weight: qkv's values, or its keys, where it has no values."""


def num_query_heads(qkv: Tensor, num_kv_heads: int, head_dim: int, normed_values: NormedValues | None) -> int:
    """The query heads H of qkv [T, (H + 2K) * D]; where values are keys, [T, (H + K) * D]."""
    return qkv.shape[1] // head_dim - (num_kv_heads if normed_values == "keys" else 2 * num_kv_heads)


def rope_store_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Tensor | None = None,
    normed_values: NormedValues | None = None,
) -> Tensor:
    """The same as rope_store, in plain torch."""
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = num_query_heads(qkv, num_kv_heads, head_dim, normed_values)
    is_stored = slot_mapping >= 0
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads[:, :num_heads], heads[:, num_heads:][:, :num_kv_heads], heads[:, -num_kv_heads:]
    table = cos_sin[torch.where(is_stored, positions, 0).long()]
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)

    def normalised(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.to(table.dtype)
        return x if weight is None else normalised(x) * weight.to(x.dtype)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(qkv.dtype)

    slots = slot_mapping[is_stored].long()
    pages, offsets = slots // page_size, slots % page_size
    k_scale, v_scale = scales_of(kv_scales)
    if normed_values is not None:
        v = normalised(v.to(table.dtype)).to(qkv.dtype)
    k_cache[pages, offsets] = to_pool(rotated(normed(k, k_norm_weight))[is_stored], k_cache, k_scale)
    v_cache[pages, offsets] = to_pool(v[is_stored], v_cache, v_scale)
    return rotated(normed(q, q_norm_weight))


@triton.jit
def _normed(a, b, weight_a, weight_b, D: tl.constexpr, eps: tl.constexpr):
    """RMSNorm of heads [N, D] given as halves a and b; float32."""
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
    return a * scale * weight_a.to(tl.float32)[None, :], b * scale * weight_b.to(tl.float32)[None, :]


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    qkv_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    kv_scales_ptr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    V_IS_K: tl.constexpr,
    eps: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    FEW: tl.constexpr,
    PARTS_FIRST: tl.constexpr,
    HALF_H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token's first half of the query heads and k, or its second half and v."""
    token = tl.program_id(0) // 2 if PARTS_FIRST else tl.program_id(0)
    part = tl.program_id(0) % 2 if PARTS_FIRST else tl.program_id(1)
    half: tl.constexpr = D // 2
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    pool_dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    kv_scale = 1.0
    if pool_dtype == tl.float8e4nv:
        kv_scale = tl.load(kv_scales_ptr + part)
    lanes = tl.arange(0, BLOCK_HALF)
    in_half = lanes < half
    # Loaded before the wait: weights, a table, and data from before the step.
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.where(slot < 0, 0, position)
    if FEW:
        cos = tl.load(cos_sin_ptr + position * D + lanes, in_half, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + position * D + half + lanes, in_half, other=0.0)[None, :]
    if Q_NORM:
        q_weight_a = tl.load(q_norm_ptr + lanes, in_half, other=0.0)
        q_weight_b = tl.load(q_norm_ptr + half + lanes, in_half, other=0.0)
    if K_NORM:
        k_weight_a = tl.load(k_norm_ptr + lanes, in_half, other=0.0)
        k_weight_b = tl.load(k_norm_ptr + half + lanes, in_half, other=0.0)
    token = start_next_and_wait(token, EARLY).to(tl.int64)
    heads = part * HALF_H + tl.arange(0, BLOCK_H)
    kv_heads = tl.arange(0, BLOCK_K)
    q_mask = ((tl.arange(0, BLOCK_H) < HALF_H) & (heads < H))[:, None] & in_half[None, :]
    kv_mask = (kv_heads < K)[:, None] & in_half[None, :]
    q_offsets = heads[:, None] * D + lanes[None, :]
    kv_offsets = kv_heads[:, None] * D + lanes[None, :]
    row_ptr = qkv_ptr + token * qkv_stride
    kv_row = row_ptr + (H if V_IS_K else H + part * K) * D
    # All loads come before the first store, because the compiler must not move a load across a store.
    a = tl.load(row_ptr + q_offsets, q_mask, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + q_offsets + half, q_mask, other=0.0).to(tl.float32)
    kv_a = tl.load(kv_row + kv_offsets, kv_mask, other=0.0)
    kv_b = tl.load(kv_row + kv_offsets + half, kv_mask, other=0.0)
    if not FEW:  # loaded here, because its wait for the position would delay all later loads
        cos = tl.load(cos_sin_ptr + position * D + lanes, in_half, other=0.0)[None, :]
        sin = tl.load(cos_sin_ptr + position * D + half + lanes, in_half, other=0.0)[None, :]

    if Q_NORM:
        a, b = _normed(a, b, q_weight_a, q_weight_b, D, eps)
    q_out = q_ptr + token * (H * D) + q_offsets
    tl.store(q_out, (a * cos - b * sin).to(dtype), q_mask)
    tl.store(q_out + half, (b * cos + a * sin).to(dtype), q_mask)

    kv_mask = kv_mask & (slot >= 0)
    page = tl.maximum(slot, 0) // S
    offset = tl.maximum(slot, 0) % S
    if part == 0:
        k_a = kv_a.to(tl.float32)
        k_b = kv_b.to(tl.float32)
        if K_NORM:
            k_a, k_b = _normed(k_a, k_b, k_weight_a, k_weight_b, D, eps)
        k_out = k_cache_ptr + page * k_page_stride + offset * k_token_stride
        k_out += kv_heads[:, None] * k_head_stride + lanes[None, :]
        tl.store(k_out, stored((k_a * cos - k_b * sin).to(dtype), kv_scale, pool_dtype), kv_mask)
        tl.store(k_out + half, stored((k_b * cos + k_a * sin).to(dtype), kv_scale, pool_dtype), kv_mask)
    else:
        if V_NORM:
            v_a = kv_a.to(tl.float32)
            v_b = kv_b.to(tl.float32)
            v_factor = tl.rsqrt((tl.sum(v_a * v_a, 1) + tl.sum(v_b * v_b, 1)) / D + eps)[:, None]
            kv_a = (v_a * v_factor).to(dtype)
            kv_b = (v_b * v_factor).to(dtype)
        v_out = v_cache_ptr + page * v_page_stride + offset * v_token_stride
        v_out += kv_heads[:, None] * v_head_stride + lanes[None, :]
        tl.store(v_out, stored(kv_a, kv_scale, pool_dtype), kv_mask)
        tl.store(v_out + half, stored(kv_b, kv_scale, pool_dtype), kv_mask)


def rope_store_triton(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Tensor | None = None,
    normed_values: NormedValues | None = None,
) -> Tensor:
    """Launch the kernel on any device."""
    num_tokens = qkv.shape[0]
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = num_query_heads(qkv, num_kv_heads, head_dim, normed_values)
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half_heads = ceil_div(num_heads, 2)
    block_h = next_power_of_2(half_heads)
    # Measured order of programs: with 8 KV heads a token's two programs are neighbours, with 4 heads those
    # of one part.
    parts_first = num_kv_heads * head_dim >= 1024
    few = True if num_tokens <= MAX_ROWS else False  # noqa: SIM210 (torch.compile takes no symbol here)
    _rope_store_kernel[(2 * num_tokens, 1) if parts_first else (num_tokens, 2)](
        qkv,
        cos_sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        cos_sin if q_norm_weight is None else q_norm_weight,
        cos_sin if k_norm_weight is None else k_norm_weight,
        q,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        cos_sin if kv_scales is None else kv_scales,
        q_norm_weight is not None,
        k_norm_weight is not None,
        normed_values is not None,
        normed_values == "keys",
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        few,
        parts_first,
        half_heads,
        block_h,
        next_power_of_2(num_kv_heads),
        next_power_of_2(head_dim // 2),
        can_start_early(qkv.device),
        num_warps=2 if block_h == 16 else 4,  # as measured for 16, 32 and 64 heads
    )
    return q


def rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    kv_scales: Tensor | None = None,
    normed_values: NormedValues | None = None,
) -> Tensor:
    """Rotate q and k of qkv [T, (H+2K)*D], write k and v into the pools, return the rotated q [T, H, D].

    cos_sin is float32 [max_position, D] (cosines of D/2 angles, then their sines), positions and slot_mapping
    are int32 [T] (slot -1 = store nothing), k_cache and v_cache are [P, S, K, D] and are written in place.
    q_norm_weight and k_norm_weight [D] ask for an RMSNorm (eps) of every head of q or k before its rotation.
    kv_scales, float32 [2], are the scales of keys and values in pools of e4m3, which must have them.
    normed_values: values are normalised, too, without a weight; with "keys" qkv [T, (H+K)*D] has no others.
    """
    norms = (q_norm_weight, k_norm_weight, eps)
    arguments = (qkv, cos_sin, positions, slot_mapping, k_cache, v_cache, *norms, kv_scales, normed_values)
    if qkv.device.type == "cpu":
        return rope_store_cpu(*arguments)
    return rope_store_triton(*arguments)
