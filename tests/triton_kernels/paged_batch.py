"""Random paged batches with NaN wherever a kernel must not look, and attention over them by another way."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PagedBatch(NamedTuple):
    """R rows, row r with new_tokens[r] queries at the end of its context_len[r] keys; T includes padding."""

    q: Tensor  # [T, H, D], not contiguous
    k_cache: Tensor  # [P, S, K, D], NaN outside the rows' tokens
    v_cache: Tensor
    page_table: Tensor  # int32 [B, C]; unused entries point to a page of NaN
    row_ids: Tensor  # int32 [R]
    context_len: Tensor  # int32 [R]
    row_start: Tensor  # int32 [R + 1]


def paged_batch(
    seed: int,
    contexts: list[int],
    new_tokens: list[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_pages: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding_tokens: int = 0,
) -> PagedBatch:
    """A batch whose rows own random pages in random order, in a pool that is NaN elsewhere."""
    rng = torch.Generator().manual_seed(seed)
    num_rows, num_lines = len(contexts), len(contexts) + 2
    pages_needed = sum(-(-n // page_size) for n in contexts)
    order = torch.randperm(pages_needed, generator=rng) + 1
    pools = [
        torch.full((pages_needed + 1, page_size, num_kv_heads, head_dim), float("nan")) for _ in range(2)
    ]
    page_table = torch.zeros((num_lines, max_pages), dtype=torch.int32)
    row_ids = torch.randperm(num_lines, generator=rng)[:num_rows].int()
    taken = 0
    for row, length in zip(row_ids.tolist(), contexts, strict=True):
        pages = order[taken : taken + -(-length // page_size)]
        taken += len(pages)
        page_table[row, : len(pages)] = pages.int()
        for index, page in enumerate(pages.tolist()):
            filled = min(page_size, length - index * page_size)
            for pool in pools:
                pool[page, :filled] = torch.randn((filled, num_kv_heads, head_dim), generator=rng)
    num_tokens = sum(new_tokens) + padding_tokens
    qkv = torch.randn((num_tokens, (num_heads + 2 * num_kv_heads) * head_dim), generator=rng).to(
        device, dtype
    )
    q = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    row_start = torch.tensor([0, *new_tokens]).cumsum(0).int()
    return PagedBatch(
        q,
        pools[0].to(device, dtype),
        pools[1].to(device, dtype),
        page_table.to(device),
        row_ids.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        row_start.to(device),
    )


FP8_SCALES = (0.375, 1.7)
"""Scales of keys and values, in pools of FP8."""


def with_fp8_pools(batch: PagedBatch) -> tuple[PagedBatch, PagedBatch, Tensor]:
    """The batch with its keys and values in FP8, the same in float64 by another way, and the scales."""
    stored, exact = [], []
    for pool, scale in zip((batch.k_cache, batch.v_cache), FP8_SCALES, strict=True):
        stored.append((pool.float() / scale).to(torch.float8_e4m3fn))
        exact.append(stored[-1].double() * torch.tensor(scale).double())
    scales = torch.tensor(FP8_SCALES, device=batch.q.device)
    return (
        batch._replace(k_cache=stored[0], v_cache=stored[1]),
        batch._replace(k_cache=exact[0], v_cache=exact[1]),
        scales,
    )


def attention_by_sdpa(
    batch: PagedBatch, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """float64 [T, H, D]: torch's attention over each row's gathered keys (softcap by hand), 0 for padding.

    sinks [H]: one more key of each head, at which every query scores that much, and whose value is 0.
    """
    num_tokens, num_heads, head_dim = batch.q.shape
    out = torch.zeros((num_tokens, num_heads, head_dim), dtype=torch.float64)
    page_size = batch.k_cache.shape[1]
    starts = batch.row_start.tolist()
    for r, (row, length) in enumerate(zip(batch.row_ids.tolist(), batch.context_len.tolist(), strict=True)):
        begin, end = starts[r], starts[r + 1]
        if begin == end or length == 0:
            continue
        keys, values = (
            torch.stack([pool[batch.page_table[row, j // page_size], j % page_size] for j in range(length)])
            .cpu()
            .double()
            .transpose(0, 1)
            .repeat_interleave(num_heads // pool.shape[2], 0)
            for pool in (batch.k_cache, batch.v_cache)
        )
        queries = batch.q[begin:end].cpu().double().transpose(0, 1)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)[None, :]
        seen = (distance >= 0) & (distance < (window or length))
        if sinks is not None:
            scores = queries @ keys.transpose(1, 2) * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            scores = scores.masked_fill(~seen, float("-inf"))
            sink = sinks.cpu().double()[:, None, None].expand(-1, end - begin, 1)
            values = torch.cat((torch.zeros_like(values[:, :1]), values), 1)
            out[begin:end] = (torch.cat((sink, scores), 2).softmax(-1) @ values).transpose(0, 1)
            continue
        if softcap:
            scores = softcap * torch.tanh(queries @ keys.transpose(1, 2) * scale / softcap)
            mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, scale=scale)
        out[begin:end] = mixed.transpose(0, 1)
    return out
