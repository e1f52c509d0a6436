"""Decode attention: one new query per row over that row's paged keys and values."""

import torch
from torch import Tensor


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
) -> Tensor:
    """What paged_decode means, in plain torch, one row at a time."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    for r, (row, length) in enumerate(zip(row_ids.tolist(), context_len.tolist(), strict=True)):
        if length == 0:
            continue
        start = max(0, length - window) if window else 0
        first_page = start // page_size
        pages = page_table[row, first_page : -(-length // page_size)].long()
        seen = slice(start - first_page * page_size, length - first_page * page_size)
        keys = k_cache[pages].flatten(0, 1)[seen].to(dtype)
        values = v_cache[pages].flatten(0, 1)[seen].to(dtype)
        queries = q[r].view(num_kv_heads, num_heads // num_kv_heads, head_dim).to(dtype)
        scores = queries @ keys.permute(1, 2, 0) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[r] = (scores.softmax(-1) @ values.transpose(0, 1)).flatten(0, 1).to(q.dtype)
    return out


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of q [R, H, D] over the first context_len[r] tokens of row row_ids[r]; returns [R, H, D].

    k_cache and v_cache are [P, S, K, D], page_table int32 [B, C], row_ids and context_len int32 [R]. With
    window > 0 only the last `window` tokens are seen; softcap > 0 bends scores to softcap * tanh(s / softcap).
    """
    return paged_decode_reference(
        q, k_cache, v_cache, page_table, row_ids, context_len, scale, window, softcap
    )
