"""Decode attention: one new query per row over that row's paged keys and values.

    seen(r)   = the last min(context_len[r], window or all) tokens of row row_ids[r]
    s[h, j]   = scale * q[r, h] . k[j, h // G]          then softcap * tanh(s / softcap), if softcap > 0
    out[r, h] = sum over seen j of softmax(s[h])[j] * v[j, h // G]
    token j's k and v lie at page page_table[row_ids[r], j // S], offset j % S of the pools

R rows of the batch, B rows of the page table, C pages a row may have, H query heads, K KV heads, G = H / K
query heads per KV head, D head dim, P pages, S page size. A row with context_len 0 yields zeros. Memory
outside the seen tokens is never used (it may hold NaN). H a multiple of K, G <= 16, D <= 256 and a multiple
of 8, S any power of two. q's rows and heads and the pools' pages, tokens and heads may be strided; the D
elements of a head lie next to each other.

How: a row is cut into splits of `split_tokens` (half as long for rows of at most two of them, which would
leave most of the GPU idle; doubled, tripled, ... where the row would get more than `max_splits`). Where the
cuts lie depends on the row's own length and on nothing else, so its result is the same to the last bit alone
and in any batch. (split, KV head) pairs are the units of work. A fixed number of programs per multiprocessor
takes them in turn, finding each by a prefix sum over context_len, so one captured grid serves all lengths
and very unequal rows spread evenly. The G query heads of a unit fill one 16-row tensor-core tile. Rows of
one split are finished there; a second kernel merges the splits of the rest.

Cost: 2 * sum(context_len) * K * D elements read, once: memory bound. 4 * sum(context_len) * H * D FLOP.
Scratch: R * H * min(max_splits, C * S / split_tokens) * (D + 1) floats.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare; calling one from
# another looks like the call that raises outside of a kernel; range yields no int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div, next_power_of_2, num_multiprocessors
from triton_kernels.tuning import tuned

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK_R = 256
_BLOCK_G = 16
_BLOCK_SPLITS = 16


class DecodeConfig(NamedTuple):
    """A launch configuration of paged_decode; split_tokens and max_splits change the last bits of results."""

    block_n: int  # keys per tile
    split_tokens: int  # an even multiple of block_n
    max_splits: int  # per row; a power of two
    num_warps: int
    num_stages: int
    programs_per_sm: int


def default_decode_config(head_dim: int, element_size: int, page_size: int = 16) -> DecodeConfig:
    """The configuration used where no other is given; each as measured on an H200."""
    row_bytes = 2 * next_power_of_2(head_dim) * element_size
    if row_bytes == 512 and page_size >= 16:
        return DecodeConfig(32, 1024, 64, num_warps=4, num_stages=3, programs_per_sm=4)
    block_n = min(64, max(16, 32768 // row_bytes))
    return DecodeConfig(block_n, 512, 64, num_warps=4, num_stages=3, programs_per_sm=3)


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
    _, num_heads, head_dim = q.shape
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


@triton.jit
def _row_cuts(length, window: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """(first seen token, tokens per split, number of splits) of a row; an empty row has one empty split."""
    start = tl.maximum(length - window, 0) if window > 0 else length * 0
    seen = length - start
    split_tokens = SPLIT * tl.maximum((seen + SPLIT * MAX_SPLITS - 1) // (SPLIT * MAX_SPLITS), 1)
    if MAX_SPLITS >= 4:
        split_tokens = tl.where(seen <= 2 * SPLIT, SPLIT // 2, split_tokens)
    num_splits = tl.maximum((seen + split_tokens - 1) // split_tokens, 1)
    return start, split_tokens, num_splits


@triton.jit
def _count_splits(num_splits, target, row, row_begin, total):
    """Go on with a search for the target-th split over a block of rows: what comes before it, and the sum.

    (The search loads in the kernel's own body, because torch.compile takes a tensor that is loaded in a
    function, and then decides where to store, for one that is written.)
    """
    ends = total + tl.cumsum(num_splits, 0)
    before = (ends <= target) & (num_splits > 0)
    row += tl.sum(before.to(tl.int32), 0)
    row_begin = tl.maximum(row_begin, tl.max(tl.where(before, ends, 0), 0))
    return row, row_begin, total + tl.sum(num_splits, 0)


@triton.jit(do_not_specialize=["num_rows"])
def _paged_decode_splits_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    row_ids_ptr,
    context_len_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    num_rows,
    page_table_stride,
    q_row_stride,
    q_head_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SCRATCH_SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    G: tl.constexpr = H // K
    group = tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_D)
    num_units = tl.program_id(0) * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        length = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
        _, _, num_splits = _row_cuts(length, window, SPLIT, MAX_SPLITS)
        num_units += tl.sum(tl.where(rows < num_rows, num_splits, 0), 0) * K
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        target = unit // K
        row = unit * 0
        row_begin = unit * 0
        total = unit * 0
        for r0 in range(0, num_rows, BLOCK_R):
            rows = r0 + tl.arange(0, BLOCK_R)
            length = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
            _, _, num_splits = _row_cuts(length, window, SPLIT, MAX_SPLITS)
            num_splits = tl.where(rows < num_rows, num_splits, 0)
            row, row_begin, total = _count_splits(num_splits, target, row, row_begin, total)
        split = target - row_begin
        kv_head = unit % K
        row_length = tl.load(context_len_ptr + row)
        start, split_tokens, row_splits = _row_cuts(row_length, window, SPLIT, MAX_SPLITS)
        low = start + split * split_tokens
        high = tl.minimum(row_length, low + split_tokens)
        pages_ptr = page_table_ptr + tl.load(row_ids_ptr + row).to(tl.int64) * page_table_stride

        heads = kv_head * G + group
        q_mask = (group < G)[:, None] & (lanes < D)[None, :]
        q_offsets = row.to(tl.int64) * q_row_stride + heads[:, None] * q_head_stride + lanes[None, :]
        q = tl.load(q_ptr + q_offsets, q_mask, other=0.0)

        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        # Page ids are fetched one tile ahead: a load in this loop that another load waits for would cost the
        # pipeline half its depth.
        token = low + tl.arange(0, BLOCK_N)
        next_page = tl.load(pages_ptr + token // S, token < high, other=0)
        for n0 in range(low, high, BLOCK_N):
            token = n0 + tl.arange(0, BLOCK_N)
            seen = token < high
            page = next_page.to(tl.int64)
            next_token = token + BLOCK_N
            next_page = tl.load(pages_ptr + next_token // S, next_token < high, other=0)
            kv_mask = seen[:, None] & (lanes < D)[None, :]
            k_rows = page * k_page_stride + (token % S) * k_token_stride + kv_head * k_head_stride
            k = tl.load(k_cache_ptr + k_rows[:, None] + lanes[None, :], kv_mask, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if softcap > 0:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(seen[None, :], scores * _LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp2(top - new_top)
            weights = tl.exp2(scores - new_top[:, None])
            mass = mass * shrink + tl.sum(weights, 1)
            v_rows = page * v_page_stride + (token % S) * v_token_stride + kv_head * v_head_stride
            v = tl.load(v_cache_ptr + v_rows[:, None] + lanes[None, :], kv_mask, other=0.0)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
            top = new_top

        acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        if row_splits == 1:
            out_offsets = (row.to(tl.int64) * H + heads)[:, None] * D + lanes[None, :]
            tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), q_mask)
        else:
            place = (row.to(tl.int64) * H + heads) * SCRATCH_SPLITS + split
            tl.store(partial_out_ptr + place[:, None] * D + lanes[None, :], acc, q_mask)
            tl.store(partial_lse_ptr + place, top + tl.log2(mass), group < G)


@triton.jit
def _merge_splits_kernel(
    context_len_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    out_ptr,
    window: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SCRATCH_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    _, _, num_splits = _row_cuts(tl.load(context_len_ptr + row), window, SPLIT, MAX_SPLITS)
    if num_splits > 1:
        head = row.to(tl.int64) * H + tl.program_id(1)
        lanes = tl.arange(0, BLOCK_D)
        all_splits = tl.arange(0, MAX_SPLITS)
        lse_ptr = partial_lse_ptr + head * SCRATCH_SPLITS
        top = tl.max(tl.load(lse_ptr + all_splits, all_splits < num_splits, other=float("-inf")), 0)
        mass = tl.zeros([BLOCK_SPLITS], tl.float32)
        acc = tl.zeros([BLOCK_SPLITS, BLOCK_D], tl.float32)
        for s0 in range(0, num_splits, BLOCK_SPLITS):
            splits = s0 + tl.arange(0, BLOCK_SPLITS)
            there = splits < num_splits
            weight = tl.exp2(tl.load(lse_ptr + splits, there, other=float("-inf")) - top)
            offsets = (head * SCRATCH_SPLITS + splits)[:, None] * D + lanes[None, :]
            mask = there[:, None] & (lanes < D)[None, :]
            mass += weight
            acc += weight[:, None] * tl.load(partial_out_ptr + offsets, mask, other=0.0)
        merged = tl.sum(acc, 0) / tl.sum(mass, 0)
        tl.store(out_ptr + head * D + lanes, merged.to(out_ptr.dtype.element_ty), lanes < D)


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    config: DecodeConfig | None = None,
) -> Tensor:
    """The kernels, whatever the device."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    if config is None:
        default = default_decode_config(head_dim, q.element_size(), page_size)
        exact, near = (head_dim, num_heads // num_kv_heads), (num_kv_heads, page_size)
        config = tuned(default, "paged_decode", q.device, q.dtype, exact, near)
    max_seen = page_table.shape[1] * page_size
    if window > 0:
        max_seen = min(max_seen, window)
    short_splits = min(4, ceil_div(max_seen, config.split_tokens // 2))
    scratch_splits = min(config.max_splits, max(short_splits, ceil_div(max_seen, config.split_tokens)))
    block_d = next_power_of_2(head_dim)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    scratch = (num_rows, num_heads, scratch_splits)
    partial_lse = torch.empty(scratch, dtype=torch.float32, device=q.device)
    partial_out = torch.empty((*scratch, head_dim), dtype=torch.float32, device=q.device)
    _paged_decode_splits_kernel[(num_multiprocessors(q.device) * config.programs_per_sm,)](
        q,
        k_cache,
        v_cache,
        page_table,
        row_ids,
        context_len,
        out,
        partial_out,
        partial_lse,
        num_rows,
        page_table.stride(0),
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        scale,
        window,
        softcap,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        config.split_tokens,
        config.max_splits,
        scratch_splits,
        _BLOCK_G,
        config.block_n,
        block_d,
        _BLOCK_R,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if scratch_splits > 1:
        _merge_splits_kernel[(num_rows, num_heads)](
            context_len,
            partial_out,
            partial_lse,
            out,
            window,
            num_heads,
            head_dim,
            config.split_tokens,
            config.max_splits,
            scratch_splits,
            block_d,
            _BLOCK_SPLITS,
            num_warps=2,
        )
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
    window > 0 only the last `window` tokens are seen; softcap > 0 bends scores to softcap * tanh(s/softcap).
    """
    if q.device.type == "cpu":
        return paged_decode_reference(
            q, k_cache, v_cache, page_table, row_ids, context_len, scale, window, softcap
        )
    return paged_decode_triton(q, k_cache, v_cache, page_table, row_ids, context_len, scale, window, softcap)
