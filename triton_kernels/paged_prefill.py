"""Prefill attention: a ragged batch of new tokens, causal, over each row's paged keys and values."""

import torch
from torch import Tensor

_REFERENCE_QUERIES = 256


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
) -> Tensor:
    """What paged_prefill means, in plain torch, a block of one row's queries at a time."""
    _, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    starts = row_start.tolist()
    for r, (row, length) in enumerate(zip(row_ids.tolist(), context_len.tolist(), strict=True)):
        first, end = starts[r], starts[r + 1]
        if first == end:
            continue
        pages = page_table[row, : -(-length // page_size)].long()
        keys = k_cache[pages].flatten(0, 1)[:length].to(dtype).permute(1, 2, 0)
        values = v_cache[pages].flatten(0, 1)[:length].to(dtype).transpose(0, 1)
        for low in range(first, end, _REFERENCE_QUERIES):
            high = min(end, low + _REFERENCE_QUERIES)
            position = torch.arange(low, high) - end + length
            seen_low = max(0, length - end + low - window + 1) if window else 0
            seen_high = length - end + high
            key_position = torch.arange(seen_low, seen_high)
            seen = key_position[None, :] <= position[:, None]
            if window:
                seen &= key_position[None, :] > position[:, None] - window
            queries = (
                q[low:high].view(high - low, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).to(dtype)
            )
            scores = queries @ keys[:, None, :, seen_low:seen_high] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.masked_fill_(~seen, float("-inf")).softmax(-1)
            mixed = weights @ values[:, None, seen_low:seen_high]
            out[low:high] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def paged_prefill(
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
) -> Tensor:
    """Causal attention of q [T, H, D], where row r owns the queries row_start[r] : row_start[r+1].

    They are the last of the row's context_len[r] tokens, whose keys and values lie in k_cache and v_cache
    [P, S, K, D] at the pages page_table[row_ids[r]] (all int32). Returns [T, H, D], zeros after row_start[R].
    """
    return paged_prefill_reference(
        q,
        k_cache,
        v_cache,
        page_table,
        row_ids,
        context_len,
        row_start,
        max_query_len,
        scale,
        window,
        softcap,
    )
