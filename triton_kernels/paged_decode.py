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

How: a row is cut into slices of `split_tokens` / 8 tokens, or longer ones where there would be more than
2 * `max_splits`. Consecutive slices of about `split_tokens`, at least two, form a split, in which they are
folded from left to right; eight splits, folded in the same way, are a node of a tree, eight such nodes the
next, up to the row. Where the cuts lie depends on the row's own length and on nothing else. A unit of work is
one (split, KV head), or, in a batch whose splits would leave most of the GPU idle, one (slice, KV head); then
splits are nodes of the tree, too, and are folded with the same operations. So a row's result is the same to
the last bit alone and in any batch.

A fixed number of programs takes the units in turn, finding each by a prefix sum over context_len, so one
captured grid serves all lengths. There are more programs than the GPU holds: the hardware starts one where
another ends, which evens out units of unequal length. A program is one warp where one has registers enough:
nothing waits at barriers, and while one program changes units the others keep the memory busy. The query
heads are the columns of both products (scores are [keys, heads], outputs [head dim, heads]): tensor cores
take 8 columns, but 16 rows.

One kernel does it all. A program that is done with a unit leaves its softmax state in memory and counts its
arrival at the tree's node above; the one that arrives last finds all states there, folds them and goes on
upwards. Nobody waits for anybody. The counters are zeros before and after a call, so that graphs can replay.

Cost: 2 * sum(context_len) * K * D elements read, once: memory bound. 4 * sum(context_len) * H * D FLOP.
Scratch: D + 2 floats for each head and a counter for each KV head, for each split that the page table has
room for (at most `max_splits` a row), or each slice of the few rows that may be taken slice by slice,
whichever is more; what units of rows with several need of it is written and read.
"""

# Launching a kernel looks like calling it, but takes options that it does not declare; calling one from
# another looks like the call that raises outside of a kernel; range yields no int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.early_start import after_predecessor, can_start_early
from triton_kernels.launch import ceil_div, next_power_of_2, num_multiprocessors
from triton_kernels.tuning import tuned

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK_R = 32
_SLICES_PER_SPLIT = 8
_FEW_UNITS_PER_SM = 2  # fewer, and the batch is taken slice by slice
_FAN = tl.constexpr(8)  # splits, and nodes above them, below one node
MAX_SPLITS = 64


class DecodeConfig(NamedTuple):
    """A launch configuration of paged_decode; the first three fields change the last bits of results."""

    block_n: int  # keys per tile; at least 16 for each warp
    split_tokens: int  # a multiple of 8 * block_n
    max_splits: int  # per row; at most MAX_SPLITS
    num_warps: int
    num_stages: int
    programs_per_sm: int  # to be launched, not only resident: the others start where one ends


def default_decode_config(head_dim: int, element_size: int, group: int = 4) -> DecodeConfig:
    """The configuration used where no other is given, as measured on an H200.

    One warp where the outputs of a KV head's query heads leave it enough registers, 8 KiB per warp and tile,
    and thrice the programs that a multiprocessor holds (8 warps).
    """
    block_d = next_power_of_2(head_dim)
    num_warps = max(1, block_d * _block_g(group) // 1024)
    block_n = min(32, max(16, 2048 // block_d) * num_warps)
    if element_size == 4:  # no tensor cores: a product's sums need more registers
        num_warps, block_n = 4, 16
    two_tiles = 2 * (2 * block_n * block_d * element_size)
    programs_per_sm = 3 * min(8 // num_warps, (200 << 10) // two_tiles)
    return DecodeConfig(block_n, 1024, MAX_SPLITS, num_warps, num_stages=3, programs_per_sm=programs_per_sm)


def _block_g(group: int) -> int:
    """Columns of the tensor-core tiles: a KV head's query heads, rounded up."""
    return 8 if group <= 8 else 16


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
def _row_cuts(
    length,
    window: tl.constexpr,
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """How a row is cut; an empty row has one empty slice.

    Returns (first seen token, begin of first slice, tokens per slice, slices per split, number of slices).
    Slices begin at multiples of the tile, so that a tile lies in one page where pages are large enough.
    """
    start = tl.maximum(length - window, 0) if window > 0 else length * 0
    begin = start // BLOCK_N * BLOCK_N
    tokens = length - begin
    slice_tokens = SLICE * tl.maximum((tokens + SLICE * MAX_SLICES - 1) // (SLICE * MAX_SLICES), 1)
    per_split = tl.maximum(SPLIT // slice_tokens, 2)
    num_slices = tl.maximum((tokens + slice_tokens - 1) // slice_tokens, 1)
    return start, begin, slice_tokens, per_split, num_slices


@triton.jit
def _fold(top, mass, acc, more_top, more_mass, more_acc, HEADS: tl.constexpr):
    """The softmax state over two sets of keys from theirs; heads lie along axis HEADS of acc.

    Slices are folded here in a loop over tiles and there from memory, and to the same bits: which products
    are rounded before they are added is written out, not left to the compiler.
    """
    new_top = tl.maximum(top, more_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    old = tl.exp2(top - base)
    new = tl.exp2(more_top - base)
    mass = tl.fma(mass, old, more_mass * new)
    old_acc = tl.broadcast_to(tl.expand_dims(old, 1 - HEADS), acc.shape)
    acc = tl.fma(acc, old_acc, more_acc * tl.expand_dims(new, 1 - HEADS))
    return new_top, mass, acc


@triton.jit
def _load_state(acc_ptr, sum_ptr, place, there, lanes, group, G: tl.constexpr, D: tl.constexpr):
    """The softmax state (top, mass, acc) at `place` if it is `there`; else that over no keys.

    Not through L1, which does not see what other multiprocessors write.
    """
    mask = there & (group < G)
    top = tl.load(sum_ptr + place * (2 * G) + group, mask, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(sum_ptr + place * (2 * G) + G + group, mask, other=0.0, cache_modifier=".cg")
    offsets = place * (G * D) + group[None, :] * D + lanes[:, None]
    acc = tl.load(acc_ptr + offsets, mask[None, :] & (lanes < D)[:, None], other=0.0, cache_modifier=".cg")
    return top, mass, acc


@triton.jit(do_not_specialize=["num_rows"])
def _paged_decode_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    row_ids_ptr,
    context_len_ptr,
    out_ptr,
    partial_acc_ptr,
    partial_sum_ptr,
    arrivals_ptr,
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
    SLICE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SLICES: tl.constexpr,
    ROW_SLICES: tl.constexpr,
    ROW_SPLITS: tl.constexpr,
    FEW_UNITS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    num_rows = after_predecessor(num_rows, EARLY)
    G: tl.constexpr = H // K
    ONE_PAGE: tl.constexpr = S % BLOCK_N == 0
    group = tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    # The searches load in the kernel's own body, because torch.compile takes a tensor that is loaded in a
    # function, and then decides where to store, for one that is written.
    num_splits = tl.program_id(0) * 0
    num_slices = tl.program_id(0) * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        lengths = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
        _, _, _, per_split, slices = _row_cuts(lengths, window, SLICE, SPLIT, MAX_SLICES, BLOCK_N)
        slices = tl.where(rows < num_rows, slices, 0)
        num_slices += tl.sum(slices, 0)
        num_splits += tl.sum((slices + per_split - 1) // per_split, 0)
    by_slice = num_splits * K < FEW_UNITS
    num_units = tl.where(by_slice, num_slices, num_splits) * K
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        # The block of rows that holds the target-th (split or slice), then the row and what comes before it.
        target = unit // K
        rows = tl.arange(0, BLOCK_R) - BLOCK_R
        lengths = tl.zeros([BLOCK_R], tl.int32)
        lines = tl.zeros([BLOCK_R], tl.int32)
        units = tl.zeros([BLOCK_R], tl.int32)
        before = target * 0
        total = target * 0
        while total <= target:
            rows += BLOCK_R
            lengths = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
            lines = tl.load(row_ids_ptr + rows, rows < num_rows, other=0)
            _, _, _, per_split, slices = _row_cuts(lengths, window, SLICE, SPLIT, MAX_SLICES, BLOCK_N)
            per_unit = tl.where(by_slice, 1, per_split)
            units = tl.where(rows < num_rows, (slices + per_unit - 1) // per_unit, 0)
            before = total
            total += tl.sum(units, 0)
        ends = before + tl.cumsum(units, 0)
        here = (ends - units <= target) & (target < ends)
        row = tl.sum(tl.where(here, rows, 0), 0)
        line = tl.sum(tl.where(here, lines, 0), 0)
        length = tl.sum(tl.where(here, lengths, 0), 0)
        part = target - tl.sum(tl.where(here, ends - units, 0), 0)
        kv_head = target * 0 + unit % K
        start, begin, slice_tokens, per_split, num_parts = _row_cuts(
            length, window, SLICE, SPLIT, MAX_SLICES, BLOCK_N
        )
        per_unit = tl.where(by_slice, 1, per_split)
        num_parts = (num_parts + per_unit - 1) // per_unit
        low = begin + part * per_unit * slice_tokens
        high = tl.minimum(length, low + per_unit * slice_tokens)
        pages_ptr = page_table_ptr + line.to(tl.int64) * page_table_stride
        k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * k_head_stride
        v_head_ptr = v_cache_ptr + kv_head.to(tl.int64) * v_head_stride

        # Page ids are fetched one tile ahead: a load in this loop that another load waits for would cost the
        # pipeline half its depth. Further ahead, and Triton would not pipeline the loop at all.
        ahead = low if ONE_PAGE else low + keys
        next_page = tl.load(pages_ptr + ahead // S, ahead < high, other=0)
        heads = kv_head * G + group
        q_mask = (lanes < D)[:, None] & (group < G)[None, :]
        q_offsets = row.to(tl.int64) * q_row_stride + heads[None, :] * q_head_stride + lanes[:, None]
        q = tl.load(q_ptr + q_offsets, q_mask, other=0.0)
        # State of the slice and of the unit's slices before it.
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
        unit_top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        unit_mass = tl.zeros([BLOCK_G], tl.float32)
        unit_acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
        slice_end = low + slice_tokens
        for n0 in range(low, high, BLOCK_N):
            page = next_page.to(tl.int64)
            ahead = n0 + BLOCK_N if ONE_PAGE else n0 + BLOCK_N + keys
            next_page = tl.load(pages_ptr + ahead // S, ahead < high, other=0)
            token = n0 + keys
            seen = token < high
            if window > 0:
                seen = seen & (token >= start)
            if ONE_PAGE:
                k_from = k_head_ptr + (page * k_page_stride + (n0 % S) * k_token_stride)
                v_from = v_head_ptr + (page * v_page_stride + (n0 % S) * v_token_stride)
                k_ptrs = k_from + ((keys * k_token_stride)[:, None] + lanes[None, :])
                v_ptrs = v_from + ((keys * v_token_stride)[None, :] + lanes[:, None])
            else:
                k_rows = page * k_page_stride + (token % S) * k_token_stride
                v_rows = page * v_page_stride + (token % S) * v_token_stride
                k_ptrs = k_head_ptr + k_rows[:, None] + lanes[None, :]
                v_ptrs = v_head_ptr + v_rows[None, :] + lanes[:, None]
            k = tl.load(k_ptrs, seen[:, None] & (lanes < D)[None, :], other=0.0)
            scores = tl.dot(k, q, input_precision="ieee") * scale
            if softcap > 0:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
            scores = tl.where(seen[:, None], scores * _LOG2_E, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            # Only before a window can a tile be without a seen token.
            base = tl.where(new_top == float("-inf"), 0.0, new_top) if window > 0 else new_top
            shrink = tl.exp2(top - base)
            weights = tl.exp2(scores - base[None, :])
            mass = mass * shrink + tl.sum(weights, 0)
            v = tl.load(v_ptrs, seen[None, :] & (lanes < D)[:, None], other=0.0)
            acc = acc * shrink[None, :]
            acc = tl.dot(v, weights.to(v.dtype), acc, input_precision="ieee")
            top = new_top
            if n0 + BLOCK_N >= tl.minimum(slice_end, high):
                unit_top, unit_mass, unit_acc = _fold(unit_top, unit_mass, unit_acc, top, mass, acc, 1)
                top = tl.full([BLOCK_G], float("-inf"), tl.float32)
                mass = tl.zeros([BLOCK_G], tl.float32)
                acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
                slice_end += slice_tokens

        # Up the tree, as far as this program is the last to arrive. A node's state goes where the first of
        # those it was folded from lay, `apart` places from the next node's.
        first_place = (row.to(tl.int64) * K + kv_head) * tl.where(by_slice, ROW_SLICES, ROW_SPLITS)
        arrivals_here = arrivals_ptr + first_place
        acc_here = partial_acc_ptr + first_place * (G * D)
        sum_here = partial_sum_ptr + first_place * (2 * G)
        fan = tl.where(by_slice, per_split, _FAN)
        apart = 1
        num_nodes = num_parts
        node = part
        while num_nodes > 1:
            parent = node // fan
            first = parent * fan
            num_below = tl.minimum(num_nodes - first, fan)
            place = node * apart
            place_offsets = place * (G * D) + group[None, :] * D + lanes[:, None]
            tl.store(acc_here + place_offsets, unit_acc, q_mask)
            tl.store(sum_here + place * (2 * G) + group, unit_top, group < G)
            tl.store(sum_here + place * (2 * G) + G + group, unit_mass, group < G)
            tl.debug_barrier()  # all threads have stored; the counter then makes it known to other programs
            arrived = tl.atomic_add(arrivals_here + parent, 1, sem="acq_rel", scope="gpu")
            if arrived == num_below - 1:
                tl.store(arrivals_here + parent, 0)
                unit_top = tl.full([BLOCK_G], float("-inf"), tl.float32)
                unit_mass = tl.zeros([BLOCK_G], tl.float32)
                unit_acc = tl.zeros([BLOCK_D, BLOCK_G], tl.float32)
                for below in range(0, num_below, WIDE):
                    # Several at a time, as many as fit into registers: none waits for another's loads.
                    states = ()
                    for i in tl.static_range(WIDE):
                        place = (first + below + i) * apart
                        there = below + i < num_below
                        state = _load_state(acc_here, sum_here, place, there, lanes, group, G, D)
                        states = states + (state,)  # noqa: RUF005 (no unpacking in kernels)
                    for i in tl.static_range(WIDE):
                        unit_top, unit_mass, unit_acc = _fold(unit_top, unit_mass, unit_acc, *states[i], 1)
                tl.debug_barrier()  # all threads have loaded what the next store overwrites
                num_nodes = (num_nodes + fan - 1) // fan
                arrivals_here += num_nodes
                apart *= fan
                node = parent
                fan = _FAN
            else:
                num_nodes = 0
        if num_nodes == 1:
            done = unit_acc / tl.where(unit_mass > 0, unit_mass, 1.0)[None, :]
            out_offsets = (row.to(tl.int64) * H + heads)[None, :] * D + lanes[:, None]
            tl.store(out_ptr + out_offsets, done.to(out_ptr.dtype.element_ty), q_mask)


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
    arrivals: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """The kernel, whatever the device."""
    num_rows, num_heads, head_dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    if config is None:
        default = default_decode_config(head_dim, q.element_size(), group)
        exact, near = (head_dim, group), (num_kv_heads, page_size)
        config = tuned(default, "paged_decode", q.device, q.dtype, exact, near)
    multiprocessors = num_multiprocessors(q.device)
    few_units = multiprocessors * _FEW_UNITS_PER_SM
    slice_tokens = max(config.block_n, config.split_tokens // _SLICES_PER_SPLIT)
    # The most that the page table has room for; all splits of a row but its last exceed half of split_tokens.
    max_tokens = page_table.shape[1] * page_size
    if window > 0:
        max_tokens = min(max_tokens, window + config.block_n)
    row_slices = min(2 * config.max_splits, ceil_div(max_tokens, slice_tokens))
    row_splits = min(config.max_splits, ceil_div(max_tokens, ceil_div(config.split_tokens, 2)))
    few_rows = min(num_rows, ceil_div(few_units, num_kv_heads))
    max_units = num_kv_heads * max(num_rows * row_splits, few_rows * row_slices)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    partial_acc = torch.empty((max_units, group, head_dim), dtype=torch.float32, device=q.device)
    partial_sum = torch.empty((max_units, 2, group), dtype=torch.float32, device=q.device)
    if arrivals is None:
        arrivals = torch.zeros((max_units,), dtype=torch.int32, device=q.device)
    elif not torch.compiler.is_compiling() and arrivals.shape[0] < max_units:
        raise ValueError(f"this batch takes {max_units} arrivals, got {arrivals.shape[0]}; see num_arrivals")
    _paged_decode_kernel[(min(multiprocessors * config.programs_per_sm, max_units),)](
        q,
        k_cache,
        v_cache,
        page_table,
        row_ids,
        context_len,
        out,
        partial_acc,
        partial_sum,
        arrivals,
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
        slice_tokens,
        config.split_tokens,
        2 * config.max_splits,
        row_slices,
        row_splits,
        few_units,
        _block_g(group),
        config.block_n,
        next_power_of_2(head_dim),
        _BLOCK_R,
        8 if group <= 4 else 4,
        can_start_early(q.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def num_arrivals(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """How many `arrivals` paged_decode needs for so many rows, whatever the number of their pages."""
    few_rows = min(num_rows, ceil_div(num_multiprocessors(device) * _FEW_UNITS_PER_SM, num_kv_heads))
    return num_kv_heads * max(num_rows * MAX_SPLITS, few_rows * 2 * MAX_SPLITS)


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
    arrivals: Tensor | None = None,
) -> Tensor:
    """Attention of q [R, H, D] over the first context_len[r] tokens of row row_ids[r]; returns [R, H, D].

    k_cache and v_cache are [P, S, K, D], page_table int32 [B, C], row_ids and context_len int32 [R]. With
    window > 0 only the last `window` tokens are seen; softcap > 0 bends scores to softcap * tanh(s/softcap).
    arrivals are at least num_arrivals(R, K, device) int32 zeros, which are zeros again afterwards: calls that
    follow each other on a stream may share them. None: new ones, which takes another launch.
    """
    if q.device.type == "cpu":
        return paged_decode_reference(
            q, k_cache, v_cache, page_table, row_ids, context_len, scale, window, softcap
        )
    return paged_decode_triton(
        q, k_cache, v_cache, page_table, row_ids, context_len, scale, window, softcap, arrivals
    )
