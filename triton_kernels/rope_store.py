"""From the qkv projection to attention: rotate q and k, store k and v in the paged pool, in one pass.

    slot = slot_mapping; (a, b) = the halves of a head's D elements, (c, s) = those of cos_sin[positions[t]]
    rotated = (a*c - b*s, b*c + a*s)                                    (Llama's rotate-half pairing)
    q[t, h]                       = rotated(qkv[t, h])                  0 <= h < H
    k_cache[page, offset, kh]     = rotated(qkv[t, H + kh])             page, offset = divmod(slot[t], S)
    v_cache[page, offset, kh]     = qkv[t, H + K + kh]

T new tokens, H query heads, K KV heads, D head dim (even), P pages, S page size. Float32 inside, one
rounding. A token with slot_mapping -1 (padding) is not stored; its q is still written (rotated as at
position 0, so that a padding token's position is never trusted). T may be 0. qkv rows and the pools' page,
token and head strides are free; the elements of a head lie next to each other.

Cost: T*(H+2K)*D elements read and as many written, plus T*D*4 bytes of table: memory bound.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import next_power_of_2


def rope_store_reference(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """What rope_store means, in plain torch."""
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    stored = slot_mapping >= 0
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    table = cos_sin[torch.where(stored, positions, 0).long()]
    cos, sin = table.unsqueeze(1).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        a, b = x.to(table.dtype).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    slots = slot_mapping[stored].long()
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, offsets] = rotated(k)[stored].to(k_cache.dtype)
    v_cache[pages, offsets] = v[stored].to(v_cache.dtype)
    return rotated(q)


@triton.jit
def _rope_store_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_ptr,
    qkv_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.where(slot < 0, 0, position)
    half: tl.constexpr = D // 2
    lanes = tl.arange(0, BLOCK_HALF)
    in_half = lanes < half
    cos = tl.load(cos_sin_ptr + position * D + lanes, in_half, other=0.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * D + half + lanes, in_half, other=0.0)[None, :]
    row_ptr = qkv_ptr + token * qkv_stride

    heads = tl.arange(0, BLOCK_H)
    q_mask = (heads < H)[:, None] & in_half[None, :]
    q_offsets = heads[:, None] * D + lanes[None, :]
    a = tl.load(row_ptr + q_offsets, q_mask, other=0.0).to(tl.float32)
    b = tl.load(row_ptr + q_offsets + half, q_mask, other=0.0).to(tl.float32)
    q_out = q_ptr + token * (H * D) + q_offsets
    tl.store(q_out, (a * cos - b * sin).to(q_ptr.dtype.element_ty), q_mask)
    tl.store(q_out + half, (b * cos + a * sin).to(q_ptr.dtype.element_ty), q_mask)

    if slot >= 0:
        page = slot // S
        offset = slot % S
        kv_heads = tl.arange(0, BLOCK_K)
        kv_mask = (kv_heads < K)[:, None] & in_half[None, :]
        kv_offsets = kv_heads[:, None] * D + lanes[None, :]
        k_row = row_ptr + H * D
        k_a = tl.load(k_row + kv_offsets, kv_mask, other=0.0).to(tl.float32)
        k_b = tl.load(k_row + kv_offsets + half, kv_mask, other=0.0).to(tl.float32)
        k_out = k_cache_ptr + page * k_page_stride + offset * k_token_stride
        k_out += kv_heads[:, None] * k_head_stride + lanes[None, :]
        tl.store(k_out, (k_a * cos - k_b * sin).to(k_cache_ptr.dtype.element_ty), kv_mask)
        tl.store(k_out + half, (k_b * cos + k_a * sin).to(k_cache_ptr.dtype.element_ty), kv_mask)
        v_row = k_row + K * D
        v_out = v_cache_ptr + page * v_page_stride + offset * v_token_stride
        v_out += kv_heads[:, None] * v_head_stride + lanes[None, :]
        v_low = tl.load(v_row + kv_offsets, kv_mask, other=0.0)
        v_high = tl.load(v_row + kv_offsets + half, kv_mask, other=0.0)
        tl.store(v_out, v_low.to(v_cache_ptr.dtype.element_ty), kv_mask)
        tl.store(v_out + half, v_high.to(v_cache_ptr.dtype.element_ty), kv_mask)


def rope_store_triton(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """The kernel, whatever the device."""
    num_tokens = qkv.shape[0]
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rope_store_kernel[(num_tokens,)](
        qkv,
        cos_sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        q,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        next_power_of_2(num_heads),
        next_power_of_2(num_kv_heads),
        next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return q


def rope_store(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate q and k of qkv [T, (H+2K)*D], write k and v into the pools, return the rotated q [T, H, D].

    cos_sin is float32 [max_position, D] (cosines of D/2 angles, then their sines), positions and slot_mapping
    are int32 [T] (slot -1 = store nothing), k_cache and v_cache are [P, S, K, D] and are written in place.
    """
    if qkv.device.type == "cpu":
        return rope_store_reference(qkv, cos_sin, positions, slot_mapping, k_cache, v_cache)
    return rope_store_triton(qkv, cos_sin, positions, slot_mapping, k_cache, v_cache)
