"""Values normalised without a weight, each head (Gemma 4), in a copy of what the qkv projection put out.

    out[t] = q[t], k[t], round(v[t, h] / sqrt(mean(v[t, h]^2) + eps)) for each value head h

T tokens, H query heads, K KV heads, D head dim. Without values of their own, v is k. Float32 inside. Rows may
be strided, T may be 0.

Cost: 2 * T * (H + 2K) * D elements moved: memory bound; for few rows, a launch.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import between_kernels, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2

_BLOCK = 2048
"""Elements of a program."""


def norm_values_reference(qkv: Tensor, kv_size: int, head_dim: int, eps: float, from_keys: bool) -> Tensor:
    """The same as norm_values, in plain torch."""
    values = qkv[:, -kv_size:].unflatten(1, (-1, head_dim))
    wide = values if qkv.dtype == torch.float64 else values.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    others = qkv if from_keys else qkv[:, :-kv_size]
    return torch.cat((others, normed.flatten(1).to(qkv.dtype)), dim=1)


@triton.jit
def _norm_values_kernel(
    qkv_ptr,
    out_ptr,
    qkv_stride,
    heads: tl.constexpr,
    value_heads: tl.constexpr,
    D: tl.constexpr,
    eps: tl.constexpr,
    FROM_KEYS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = between_kernels(tl.program_id(0), EARLY).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lanes = tl.arange(0, BLOCK_D)
    is_value = head >= heads - value_heads
    source = tl.where(is_value, head - value_heads, head) if FROM_KEYS else head
    mask = (head < heads)[:, None] & (lanes < D)[None, :]
    x = tl.load(qkv_ptr + row * qkv_stride + source[:, None] * D + lanes[None, :], mask, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
    y = wide * tl.where(is_value, scale, 1.0)[:, None]
    out_ptrs = out_ptr + row * (heads * D) + head[:, None] * D + lanes[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask)


def norm_values_triton(qkv: Tensor, kv_size: int, head_dim: int, eps: float, from_keys: bool) -> Tensor:
    """Launch the kernel on any device."""
    num_rows, width = qkv.shape
    width += kv_size if from_keys else 0
    out = torch.empty((num_rows, width), dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    block_d = next_power_of_2(head_dim)
    block_h = max(1, _BLOCK // block_d)
    _norm_values_kernel[(num_rows, ceil_div(width // head_dim, block_h))](
        qkv,
        out,
        qkv.stride(0),
        width // head_dim,
        kv_size // head_dim,
        head_dim,
        eps,
        from_keys,
        block_h,
        block_d,
        can_start_early(qkv.device),
        num_warps=4,
    )
    return out


def norm_values(qkv: Tensor, kv_size: int, head_dim: int, eps: float, *, from_keys: bool) -> Tensor:
    """[T, (H + 2K) * D] of qkv [T, (H + 2K) * D] whose values are normalised; kv_size = K * D.

    from_keys: qkv has no values, which are the keys: [T, (H + K) * D].
    """
    if qkv.device.type == "cuda":
        return norm_values_triton(qkv, kv_size, head_dim, eps, from_keys)
    return norm_values_reference(qkv, kv_size, head_dim, eps, from_keys)
