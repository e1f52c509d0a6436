"""The ops as a CPU runs them: their references, with fewer passes over memory and fewer calls of torch.

Promise: as exact as the references. Sums and products are float32 (float64 for inputs in float64), rounded
once. Memory that a reference does not read or write is not touched either.

On a CPU every call of torch costs microseconds, as much as the work of one token, and every temporary of a
long prompt goes through memory. So the calls here are few and work in place where the buffer is their own.

T tokens, M width, H query heads, K KV heads, D head dim, P pages, S page size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.e4m3 import FP8
from triton_kernels.fp8_cache import scales_of, to_pool
from triton_kernels.packed_weights import HalfWeight

FEW_ROWS = 16
"""Up to so many rows, calls of torch cost more than passes over memory."""
WEIGHTS_FIRST_ROWS = 64
IS_AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
"""From two to so many rows of float32, MKL without AVX-512 is up to four times as fast with the weights as
the left factor. Measured with AVX2 only."""
BLOCK_ROWS = 128
FEW_BYTES = 1 << 20
"""Reading less than this takes one thread no longer than waking others. They sleep between calls, because
threads that spin take the processor from each other on a busy machine."""


def on_one_thread(function: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """Call a function of torch on the calling thread alone."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*arguments, **options)
    finally:
        torch.set_num_threads(num_threads)


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The op `linear`; the weight may be packed (packed_weights.py)."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    if isinstance(weight, HalfWeight):
        return weight.linear(x, bias)
    if IS_AVX2 and x.dtype == torch.float32 and 2 <= x.shape[0] <= WEIGHTS_FIRST_ROWS:
        return _weights_first(x, weight, bias)
    return F.linear(x, weight, bias)


def _weights_first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The transpose of weight @ x.T, contiguous."""
    y = torch.mm(weight, x.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op `rms_norm`. torch's own has one call; for many rows its passes take longer than ours."""
    if x.shape[0] <= FEW_ROWS and weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = _wide(x)
    scale = _root_mean_square_inverse(wide, eps)
    # `wide` is x itself where x is wide already, so only a copy is written.
    y = wide * scale if wide is x else wide.mul_(scale)
    return y.mul_(weight).to(x.dtype)


def add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op `add_rms_norm`."""
    new_residual = x + residual
    return rms_norm_cpu(new_residual, weight, eps), new_residual


def silu_mul_cpu(gate_up: Tensor) -> Tensor:
    """The op `silu_mul`, in blocks of rows whose temporaries stay in the cache."""
    if gate_up.shape[0] <= BLOCK_ROWS:
        return _silu_mul_wide(gate_up).to(gate_up.dtype)
    y = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for some, part in zip(gate_up.split(BLOCK_ROWS), y.split(BLOCK_ROWS), strict=True):
        part.copy_(_silu_mul_wide(some))
    return y


def _silu_mul_wide(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    wide = _wide(gate)
    bent = F.silu(wide) if wide is gate else F.silu(wide, inplace=True)
    return bent.mul_(up)


def rope_store_cpu(
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
    normed_values: str | None = None,
) -> Tensor:
    """The op `rope_store`. q and k are rotated together, because their heads lie side by side in qkv."""
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], *k_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_rotated = heads.shape[1] - (0 if normed_values == "keys" else num_kv_heads)
    num_heads = num_rotated - num_kv_heads
    stored = None
    if num_tokens and int(slot_mapping.min()) < 0:
        stored = (slot_mapping >= 0).nonzero().flatten()
        positions = positions.masked_fill(slot_mapping < 0, 0)
    table = cos_sin.index_select(0, positions)
    has_norms = q_norm_weight is not None or k_norm_weight is not None
    wide = heads[:, :num_rotated].to(table.dtype, copy=has_norms)
    if has_norms:
        scale = _root_mean_square_inverse(wide, eps)
        for part, weight in ((slice(num_heads), q_norm_weight), (slice(num_heads, None), k_norm_weight)):
            if weight is not None:
                wide[:, part].mul_(scale[:, part]).mul_(weight)
    # [T, heads, 2, D / 2]: halves (a, b) turn into (a * cos - b * sin, b * cos + a * sin).
    halves = wide.unflatten(2, (2, -1))
    a, b = halves.unbind(2)
    cos, sin = table.view(num_tokens, 1, 2, head_dim // 2).unbind(2)
    turned = halves * cos.unsqueeze(2)
    turned[:, :, 0].addcmul_(b, sin, value=-1)
    turned[:, :, 1].addcmul_(a, sin)
    rotated = turned.flatten(2).to(qkv.dtype)
    k, v, slots = rotated[:, num_heads:], heads[:, -num_kv_heads:], slot_mapping
    if normed_values is not None:
        wide = v.to(table.dtype)
        v = (wide * _root_mean_square_inverse(wide, eps)).to(qkv.dtype)
    if stored is not None:
        k, v, slots = k[stored], v[stored], slots[stored]
    slots = slots.long()
    k_scale, v_scale = scales_of(kv_scales)
    store_cpu(k_cache, slots, to_pool(k, k_cache, k_scale))
    store_cpu(v_cache, slots, to_pool(v, v_cache, v_scale))
    return rotated[:, :num_heads]


def store_cpu(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write x [T, K, D], of the pool's type, to the slots, int64 [T], of pool [P, S, K, D]."""
    if pool.dtype == FP8:  # torch does not copy every type by index
        pool, x = pool.view(torch.uint8), x.view(torch.uint8)
    if len(slots) <= FEW_ROWS and pool.is_contiguous():
        pool.flatten(0, 1).index_copy_(0, slots, x)
    else:
        pool[slots // pool.shape[1], slots % pool.shape[1]] = x


def _wide(x: Tensor) -> Tensor:
    """x in the precision to compute in: itself if it is float64 or float32."""
    return x if x.dtype == torch.float64 else x.float()


def _root_mean_square_inverse(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
