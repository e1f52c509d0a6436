"""Attention by torch's scaled_dot_product_attention, one row at a time: for the CPU and as a reference.

Promise: memory outside a row's keys is never used (it may hold NaN); a row without keys yields zeros.

T new tokens, H query heads, K KV heads, G = H / K, D head dim, P pages, S page size, N queries of one row and
L keys that they see.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.interface import AttentionInputs

QUERIES_AT_ONCE = 512
"""Queries of a row per block. This bounds the mask and the scores, which grow with queries times keys."""


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """q [T, H, D] over the rows' pages of k_cache and v_cache [P, S, K, D], causal -> [T, H, D]."""
    page_size, num_kv_heads = k_cache.shape[1:3]
    queries = q.unflatten(1, (num_kv_heads, -1))
    out = torch.zeros(queries.shape, dtype=q.dtype, device=q.device)
    starts = inputs.row_start.tolist()
    rows = zip(inputs.row_ids.tolist(), inputs.context_len.tolist(), strict=True)
    for r, (row, length) in enumerate(rows):
        if length == 0:
            continue
        for low in range(starts[r], starts[r + 1], QUERIES_AT_ONCE):
            high = min(low + QUERIES_AT_ONCE, starts[r + 1])
            end = length - (starts[r + 1] - high)  # the block sees the row's keys begin : end
            begin = max(0, end - (high - low) + 1 - window) if window else 0
            first_page = begin // page_size
            pages = inputs.page_table[row, first_page : -(-end // page_size)]
            seen = slice(begin - first_page * page_size, end - first_page * page_size)
            keys = k_cache.index_select(0, pages).flatten(0, 1)[seen]
            values = v_cache.index_select(0, pages).flatten(0, 1)[seen]
            out[low:high] = _attend_block(queries[low:high], keys, values, scale, window, softcap)
    return out.flatten(1, 2)


def _attend_block(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """queries [N, K, G, D] of the last N tokens of keys and values [L, K, D] -> [N, K, G, D]."""
    num_queries, length = len(queries), len(keys)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if num_queries == 1 and not softcap:  # no mask is needed, so the G heads can be torch's queries
        return F.scaled_dot_product_attention(queries, k[None], v[None], scale=scale)
    seen = torch.ones(num_queries, length, dtype=torch.bool, device=keys.device).tril(length - num_queries)
    if window:
        seen = seen.triu(length - num_queries - window + 1)
    group = queries.shape[2]
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    if softcap:
        return _softcapped(queries.permute(1, 2, 0, 3), k, v, seen, scale, softcap).permute(2, 0, 1, 3)
    mixed = F.scaled_dot_product_attention(queries.permute(1, 2, 0, 3), k, v, attn_mask=seen, scale=scale)
    return mixed.permute(2, 0, 1, 3)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """q [K, G, N, D] over k and v [K, G, L, D] with capped scores, in float32; seen is bool [N, L]."""
    scores = softcap * torch.tanh(q.float() @ k.float().transpose(2, 3) * (scale / softcap))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ v.float()).to(q.dtype)
