"""Attention over a paged pool in plain torch, in float32 or wider.

The kernels are compared with it, and CPU tensors take it. Shape letters, formulas and edge cases are those of
paged_decode.py and paged_prefill.py.
"""

import torch
from torch import Tensor

from triton_kernels.fp8_cache import from_pool, scales_of

_REFERENCE_QUERIES = 256
"""Queries of a row whose scores are in memory at a time."""


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as paged_decode, in plain torch, one row at a time."""
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k_scale, v_scale = scales_of(kv_scales)
    out = torch.zeros_like(q)
    for r, (row, length) in enumerate(zip(row_ids.tolist(), context_len.tolist(), strict=True)):
        if length == 0:
            continue
        start = max(0, length - window) if window else 0
        first_page = start // page_size
        pages = page_table[row, first_page : -(-length // page_size)].long()
        seen = slice(start - first_page * page_size, length - first_page * page_size)
        keys = from_pool(k_cache[pages].flatten(0, 1)[seen], dtype, k_scale)
        values = from_pool(v_cache[pages].flatten(0, 1)[seen], dtype, v_scale)
        queries = q[r].view(num_kv_heads, num_heads // num_kv_heads, head_dim).to(dtype)
        scores = queries @ keys.permute(1, 2, 0) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = softmax_with_sinks(scores, None if sinks is None else sinks.view(num_kv_heads, -1, 1))
        out[r] = (weights @ values.transpose(0, 1)).flatten(0, 1).to(q.dtype)
    return out


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    max_query_len: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same as paged_prefill, in plain torch, a block of one row's queries at a time."""
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    starts = row_start.tolist()
    k_scale, v_scale = scales_of(kv_scales)
    for r, (row, length) in enumerate(zip(row_ids.tolist(), context_len.tolist(), strict=True)):
        first, end = starts[r], starts[r + 1]
        if first == end:
            continue
        pages = page_table[row, : -(-length // page_size)].long()
        keys = from_pool(k_cache[pages].flatten(0, 1)[:length], dtype, k_scale).permute(1, 2, 0)
        values = from_pool(v_cache[pages].flatten(0, 1)[:length], dtype, v_scale).transpose(0, 1)
        for low in range(first, end, _REFERENCE_QUERIES):
            high = min(end, low + _REFERENCE_QUERIES)
            position = torch.arange(low, high, device=q.device) - end + length
            seen_low = max(0, length - end + low - window + 1) if window else 0
            seen_high = length - end + high
            key_position = torch.arange(seen_low, seen_high, device=q.device)
            seen = key_position[None, :] <= position[:, None]
            if window:
                seen &= key_position[None, :] > position[:, None] - window
            queries = (
                q[low:high].view(high - low, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
            )
            scores = queries @ keys[:, None, :, seen_low:seen_high] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill_(~seen, float("-inf"))
            weights = softmax_with_sinks(
                scores, None if sinks is None else sinks.view(num_kv_heads, -1, 1, 1)
            )
            mixed = weights @ values[:, None, seen_low:seen_high]
            out[low:high] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last dimension, with one more term in the denominator: exp of the sinks, whose
    shape is that of the scores with 1 at the end, or fits it."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
