"""Attention by torch's scaled_dot_product_attention, for the CPU and as a reference: one row at a time, or
several rows that decode and have few keys.

Promise: memory outside a row's keys is never used (it may hold NaN); a row without keys yields zeros.

T new tokens, H query heads, K KV heads, G = H / K, D head dim, P pages, S page size, N queries of one row and
L keys that they see.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.attention.interface import AttentionInputs, FewKeys, RowKeys
from triton_kernels.attention_reference import softmax_with_sinks
from triton_kernels.e4m3 import FP8
from triton_kernels.on_cpu import FEW_BYTES, on_one_thread

QUERIES_AT_ONCE = 512
"""Queries of a row per block. This bounds the mask and the scores, which grow with queries times keys."""
FEW_KEYS = 512
"""With at most so many keys a row, a call of torch for each row costs more than gathering the keys of all."""


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    inputs: AttentionInputs,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, H, D] over the rows' pages of k_cache and v_cache [P, S, K, D], causal -> [T, H, D]."""
    k_scale, v_scale = (1.0, 1.0) if kv_scales is None else kv_scales.tolist()
    scale *= k_scale
    queries = q.unflatten(1, (k_cache.shape[2], -1))
    few = inputs.few_keys
    is_plain = not softcap and sinks is None
    if few is not None and is_plain and (not window or few.is_real.shape[3] <= window):
        out = _attend_few_keys(queries, k_cache, v_cache, few, scale).flatten(1, 2)
        return out if v_scale == 1 else out * v_scale
    rows = inputs.rows if inputs.rows is not None else find_rows(inputs, k_cache.shape[1])
    blocks = [
        (low, min(low + QUERIES_AT_ONCE, row.end), row)
        for row in rows
        for low in range(row.begin, row.end, QUERIES_AT_ONCE)
    ]
    if len(blocks) == 1 and blocks[0][:2] == (0, len(q)):
        out = _attend_block(queries, k_cache, v_cache, *blocks[0], scale, window, softcap, sinks)
        out = out.flatten(1, 2).contiguous()
        return out if v_scale == 1 else out * v_scale
    out = torch.zeros(queries.shape, dtype=q.dtype, device=q.device)
    for low, high, row in blocks:
        some = queries[low:high]
        out[low:high] = _attend_block(some, k_cache, v_cache, low, high, row, scale, window, softcap, sinks)
    return out.flatten(1, 2) if v_scale == 1 else out.flatten(1, 2) * v_scale


def with_rows_of_a_cpu(inputs: AttentionInputs, page_size: int) -> AttentionInputs:
    """Look the rows up once for all layers, where that does not wait for a device."""
    if inputs.row_ids.device.type != "cpu":
        return inputs
    rows = find_rows(inputs, page_size)
    return inputs._replace(rows=rows, few_keys=_find_few_keys(inputs, rows, page_size))


def find_rows(inputs: AttentionInputs, page_size: int) -> tuple[RowKeys, ...]:
    """The rows that have keys, as `attend` reads them; once per step is enough for all layers."""
    starts = inputs.row_start.tolist()
    rows = []
    for r, (row, length) in enumerate(zip(inputs.row_ids.tolist(), inputs.context_len.tolist(), strict=True)):
        if length == 0:
            continue
        pages = inputs.page_table[row, : -(-length // page_size)]
        first, ids = int(pages[0]), pages.tolist()
        run = None
        if ids == list(range(first, first + len(ids))):  # one run, which needs no copy
            run = slice(first * page_size, first * page_size + length)
        offsets = torch.arange(page_size, device=pages.device)
        slots = (pages.long()[:, None] * page_size + offsets).flatten()[:length]
        rows.append(RowKeys(starts[r], starts[r + 1], length, slots, run))
    return tuple(rows)


def _find_few_keys(inputs: AttentionInputs, rows: tuple[RowKeys, ...], page_size: int) -> FewKeys | None:
    """The keys of all rows, if that is how `attend` should read them. Padding is at most half of them."""
    lengths = [row.length for row in rows]
    if not inputs.is_decode or len(rows) < 2 or len(rows) != len(inputs.row_ids):
        return None
    longest = max(lengths)
    if longest > FEW_KEYS or longest * len(rows) > 2 * sum(lengths):
        return None
    places = torch.arange(longest)
    is_real = places < inputs.context_len[:, None]
    places = places * is_real
    pages = inputs.page_table.index_select(0, inputs.row_ids).long().gather(1, places // page_size)
    slots = pages * page_size + places % page_size
    return FewKeys(slots.flatten(), is_real[:, None, None])


def _attend_few_keys(queries: Tensor, k_cache: Tensor, v_cache: Tensor, few: FewKeys, scale: float) -> Tensor:
    """queries [R, K, G, D] of R rows -> [R, K, G, D]; the G heads are torch's queries."""
    num_rows, _, _, length = few.is_real.shape
    k, v = (
        _select(pool, few.slots, 0, num_rows * length)
        .to(queries.dtype)
        .unflatten(0, (num_rows, length))
        .transpose(1, 2)
        for pool in (k_cache, v_cache)
    )
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=few.is_real, scale=scale)


def _attend_block(
    queries: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    low: int,
    high: int,
    row: RowKeys,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """queries [N, K, G, D] of a row's new tokens low : high -> [N, K, G, D]."""
    num_queries = high - low
    end = row.length - (row.end - high)  # the block sees the row's keys begin : end
    begin = max(0, end - num_queries + 1 - window) if window else 0
    length = end - begin
    k, v = (
        _select(pool, row.run or row.slots, begin, end).to(queries.dtype).transpose(0, 1)
        for pool in (k_cache, v_cache)
    )
    is_plain = not softcap and sinks is None
    if num_queries == 1 and is_plain:  # no mask is needed, so the G heads can be torch's queries
        if k.device.type == "cpu" and 2 * k.nbytes < FEW_BYTES:
            return on_one_thread(F.scaled_dot_product_attention, queries, k[None], v[None], scale=scale)
        return F.scaled_dot_product_attention(queries, k[None], v[None], scale=scale)
    group = queries.shape[2]
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    heads = queries.permute(1, 2, 0, 3)
    if num_queries == length and not window and is_plain:  # torch skips what the causal mask hides
        return F.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale).permute(2, 0, 1, 3)
    seen = torch.ones(num_queries, length, dtype=torch.bool, device=k.device).tril(length - num_queries)
    if window:
        seen = seen.triu(length - num_queries - window + 1)
    if not is_plain:
        return _written_out(heads, k, v, seen, scale, softcap, sinks).permute(2, 0, 1, 3)
    mixed = F.scaled_dot_product_attention(heads, k, v, attn_mask=seen, scale=scale)
    return mixed.permute(2, 0, 1, 3)


def _select(pool: Tensor, slots: slice | Tensor, begin: int, end: int) -> Tensor:
    """The keys or values [L, K, D] at slots[begin : end] of pool [P, S, K, D]."""
    if pool.dtype == FP8:  # torch does not read every type by index
        return _select(pool.view(torch.uint8), slots, begin, end).view(FP8)
    page_size = pool.shape[1]
    if isinstance(slots, slice):
        begin, end = slots.start + begin, slots.start + end
        first = begin // page_size
        run = pool[first : -(-end // page_size)].flatten(0, 1)
        return run[begin - first * page_size : end - first * page_size]
    wanted = slots[begin:end]
    if pool.is_contiguous():
        return pool.flatten(0, 1).index_select(0, wanted)
    return pool[wanted // page_size, wanted % page_size]


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """q [K, G, N, D] over k and v [K, G, L, D] with capped scores or sinks [H], in float32; seen is bool
    [N, L]."""
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sinks = None if sinks is None else sinks.view(len(q), -1, 1, 1)
    weights = softmax_with_sinks(scores.masked_fill(~seen, float("-inf")), sinks)
    return (weights @ v.float()).to(q.dtype)
