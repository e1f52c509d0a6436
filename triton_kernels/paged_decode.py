"""Decode attention: one new query per row over that row's paged keys and values.

    seen(r)   = the last min(context_len[r], window or all) tokens of row row_ids[r]
    s[h, j]   = scale * q[r, h] . k[j, h // G]          then softcap * tanh(s / softcap), if softcap > 0
    out[r, h] = sum over seen j of softmax(s[h])[j] * v[j, h // G]      with sinks, exp(sinks[h]) is one more
                                                                        term of the softmax's denominator
    token j's k and v lie at page page_table[row_ids[r], j // S], offset j % S of the pools

R rows of the batch, B rows of the page table, C pages a row may have, H query heads, K KV heads, G = H / K
query heads per KV head, D head dim, P pages, S page size. A row with context_len 0 yields zeros. The kernel
never uses memory outside the seen tokens (it may hold NaN). H must be a multiple of K, G at most 16, D a
multiple of 8 from 16 to 512, S a power of two. q's rows and heads and the pools' pages, tokens and heads may
be strided; the D elements of a head must be contiguous. Pools of e4m3 have scales (fp8_cache.py), and strides
that are even; then the products are of float16, unless q is float32.

rope_paged_decode starts from the output of the qkv projection. It does the work of rope_store for the rows'
new tokens and then the above, in one launch: each program rotates the queries it needs, and the program with
a row's newest token also stores that token's key and value.

A row's result depends, to the last bit, on the row, the configuration and the batch's tier (`fewest_alike`).

Cost: 2 * sum(context_len) * K * D elements read, once: memory bound. 4 * sum(context_len) * H * D FLOP.
Scratch: D + 2 floats per head and one counter per KV head, for each split that the page table has room for
(at most `max_splits` per row), plus one counter. Only rows with several splits write and read it.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel; range yields no int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.attention_reference import paged_decode_reference
from triton_kernels.decode_config import (
    FEW_ROWS,
    DecodeConfig,
    block_g,
    choose_config,
    programs_for_equal_rows,
)
from triton_kernels.decode_splits import merge_splits, row_cuts
from triton_kernels.e4m3 import FP8
from triton_kernels.early_start import after_predecessor, can_start_early, start_next_if_few
from triton_kernels.fp8_cache import stored, unpacked_pairs
from triton_kernels.gpu import num_multiprocessors
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.rope_store import NormedValues, num_query_heads, rope_store_reference

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK_R = 32
_LOG2_WEIGHT = tl.constexpr(15.0)  # of the largest weight in float16, which so has small ones, too
_START_NEXT_SIZE = tl.constexpr(8 * 128)
# Rows * K * D up to which the next kernel may start at once; D rounded up to a power of two, at most 128.


@triton.jit(do_not_specialize=["num_rows"])
def _paged_decode_kernel(
    q_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
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
    kv_scales_ptr,
    sinks_ptr,
    k_page_stride: tl.constexpr,
    k_token_stride: tl.constexpr,
    k_head_stride: tl.constexpr,
    v_page_stride: tl.constexpr,
    v_token_stride: tl.constexpr,
    v_head_stride: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    SINKS: tl.constexpr,
    ROPE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    V_IS_K: tl.constexpr,
    eps: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    LOG_SPLIT: tl.constexpr,
    TIER_ROWS_1: tl.constexpr,
    TIER_ROWS_2: tl.constexpr,
    TIER_ROWS_3: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):
    G: tl.constexpr = H // K
    HALF: tl.constexpr = D // 2
    ONE_PAGE: tl.constexpr = S % BLOCK_N == 0
    FP8: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.float8e4nv
    # Of both products. Float16 holds e4m3 exactly, and is one conversion from it.
    WIDE_KV: tl.constexpr = tl.float32 if q_ptr.dtype.element_ty == tl.float32 else tl.float16
    # Values of e4m3 are loaded in pairs; see unpacked_pairs.
    UNIT: tl.constexpr = 2 if FP8 else 1
    V_PAGE: tl.constexpr = v_page_stride // UNIT
    V_TOKEN: tl.constexpr = v_token_stride // UNIT
    v_lanes = tl.arange(0, BLOCK_D // UNIT)
    group = tl.arange(0, BLOCK_G)
    lanes = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    # So few units leave multiprocessors free for the next kernel. With more, an early start costs time.
    NEXT_D: tl.constexpr = BLOCK_D if BLOCK_D < 128 else 128
    num_rows = start_next_if_few(num_rows, _START_NEXT_SIZE // (K * NEXT_D), EARLY)
    tier = (num_rows > TIER_ROWS_1).to(tl.int32) + (num_rows > TIER_ROWS_2).to(tl.int32)
    tier += (num_rows > TIER_ROWS_3).to(tl.int32)
    log_split = LOG_SPLIT + tier
    # The searches load in the kernel's own body: if a function loads a tensor and the value then decides
    # where to store, torch.compile believes that the tensor is written.
    # A unit of work is one (split, KV head). First come the full splits, which a program finds by a prefix
    # sum over context_len, then the last split of each row, which need no search. Program i starts with unit
    # i, then takes the next unclaimed unit (an atomic counter). This balances units of unequal length best
    # if the longest rows come first. The number of programs is fixed, so one CUDA graph serves all lengths.
    num_full = tl.program_id(0) * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        lengths = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
        _, _, _, splits = row_cuts(lengths, log_split, window, MAX_SPLITS, DOUBLINGS, BLOCK_N)
        num_full += tl.sum(splits - 1, 0)
    num_units = (num_full + num_rows) * K
    unit = tl.program_id(0)
    while unit < num_units:
        # The unit is a full split of its row, or the row's last split. Last splits come after all full ones.
        target = unit // K
        row = target - num_full
        full_split = target * 0
        first_row = target * 0
        total = tl.where(row < 0, 0, target + 1)
        while total <= target:
            rows = first_row + tl.arange(0, BLOCK_R)
            lengths = tl.load(context_len_ptr + rows, rows < num_rows, other=0)
            _, _, _, splits = row_cuts(lengths, log_split, window, MAX_SPLITS, DOUBLINGS, BLOCK_N)
            ends = total + tl.cumsum(splits - 1, 0)
            before = tl.sum((ends <= target).to(tl.int32), 0)
            row = first_row + before
            full_split = target - tl.max(tl.where(ends <= target, ends, total), 0)
            total += tl.sum(splits - 1, 0)
            first_row += BLOCK_R
        kv_head = target * 0 + unit % K
        length = tl.load(context_len_ptr + row)
        line = tl.load(row_ids_ptr + row)
        start, begin, log_tokens, num_splits = row_cuts(
            length, log_split, window, MAX_SPLITS, DOUBLINGS, BLOCK_N
        )
        split = tl.where(target < num_full, full_split, num_splits - 1)
        low = begin + (split << log_tokens)
        high = tl.where(split == num_splits - 1, length, low + (1 << log_tokens))
        pages_ptr = page_table_ptr + line.to(tl.int64) * page_table_stride

        # Page ids are fetched one tile ahead: a load that depends on another load of the same iteration would
        # halve the pipeline's depth. With page ids further ahead, Triton would not pipeline the loop at all.
        last = high - 1
        ahead = tl.minimum(low if ONE_PAGE else low + keys, last)
        if window > 0:
            ahead = tl.maximum(ahead, start)
        next_page = tl.load(pages_ptr + ahead // S, low < high, other=0)
        if ROPE:
            # A lane's partner is the other element of its rotated pair.
            partner = tl.where(lanes < HALF, lanes + HALF, lanes - HALF)
            partner = tl.max_contiguous(tl.multiple_of(partner, HALF & -HALF), HALF & -HALF)
            slot = tl.load(slot_mapping_ptr + row).to(tl.int64)
            position = tl.load(positions_ptr + row).to(tl.int64)
            angles_ptr = cos_sin_ptr + tl.where(slot < 0, 0, position) * D
            cos = tl.load(angles_ptr + lanes % HALF, lanes < D, other=0.0)
            sin = tl.load(angles_ptr + HALF + lanes % HALF, lanes < D, other=0.0)
            sin = tl.where(lanes < HALF, -sin, sin)
            if Q_NORM:
                q_weight = tl.load(q_norm_ptr + lanes, lanes < D, other=0.0).to(tl.float32)
                q_weight_of_partner = tl.load(q_norm_ptr + partner, lanes < D, other=0.0).to(tl.float32)
            if K_NORM:
                k_weight = tl.load(k_norm_ptr + lanes, lanes < D, other=0.0).to(tl.float32)
                k_weight_of_partner = tl.load(k_norm_ptr + partner, lanes < D, other=0.0).to(tl.float32)
        # Earlier kernels of this step wrote none of that, so it may be loaded before the wait. Every row has
        # a unit, so at least one program waits.
        kv_head = after_predecessor(kv_head, EARLY)
        k_head_ptr = k_cache_ptr + kv_head.to(tl.int64) * k_head_stride
        v_head_ptr = v_cache_ptr + kv_head.to(tl.int64) * v_head_stride
        heads = kv_head * G + group
        q_mask = (lanes < D)[:, None] & (group < G)[None, :]
        row_ptr = q_ptr + row.to(tl.int64) * q_row_stride
        q = tl.load(row_ptr + (heads[None, :] * q_head_stride + lanes[:, None]), q_mask, other=0.0)
        if ROPE:
            q_partner = tl.load(row_ptr + (heads[None, :] * D + partner[:, None]), q_mask, other=0.0)
            is_new = (lanes < D) & (split == num_splits - 1) & (slot >= 0)
            new_ptr = row_ptr + (H + kv_head) * D
            new_k = tl.load(new_ptr + lanes, is_new, other=0.0).to(tl.float32)
            new_k_partner = tl.load(new_ptr + partner, is_new, other=0.0).to(tl.float32)
            new_v = tl.load(new_ptr + (0 if V_IS_K else K * D) + lanes, is_new, other=0.0)
            x = q.to(tl.float32)
            x_partner = q_partner.to(tl.float32)
            if Q_NORM:
                factor = tl.rsqrt(tl.sum(x * x, 0) / D + eps)[None, :]
                x = x * factor * q_weight[:, None]
                x_partner = x_partner * factor * q_weight_of_partner[:, None]
            if K_NORM:
                k_factor = tl.rsqrt(tl.sum(new_k * new_k, 0) / D + eps)
                new_k = new_k * k_factor * k_weight
                new_k_partner = new_k_partner * k_factor * k_weight_of_partner
            if V_NORM:
                wide_v = new_v.to(tl.float32)
                new_v = (wide_v * tl.rsqrt(tl.sum(wide_v * wide_v, 0) / D + eps)).to(new_v.dtype)
            q = (x * cos[:, None] + x_partner * sin[:, None]).to(q.dtype)
            new_k = (new_k * cos + new_k_partner * sin).to(q.dtype)
            new_page = tl.maximum(slot, 0) // S
            place_in_page = tl.maximum(slot, 0) % S
            k_to = k_head_ptr + (new_page * k_page_stride + place_in_page * k_token_stride) + lanes
            v_to = v_head_ptr + (new_page * v_page_stride + place_in_page * v_token_stride) + lanes
            k_scale = 1.0
            v_scale = 1.0
            if FP8:
                k_scale = tl.load(kv_scales_ptr)
                v_scale = tl.load(kv_scales_ptr + 1)
            tl.store(k_to, stored(new_k, k_scale, k_cache_ptr.dtype.element_ty), is_new)
            tl.store(v_to, stored(new_v, v_scale, v_cache_ptr.dtype.element_ty), is_new)
            tl.debug_barrier()  # wait until all threads have stored what the loop loads
        if FP8:
            v_head_ptr = v_head_ptr.to(tl.pointer_type(tl.int16))
            k_factor = tl.zeros([BLOCK_G], tl.float32) + tl.load(kv_scales_ptr)
            if q.dtype == tl.bfloat16:
                # Float16 has fewer exponents: divide a head's queries by the power of two of their largest.
                peak = tl.max(tl.abs(q.to(tl.float32)), 0).to(tl.int32, bitcast=True)
                power = (peak & 0x7F800000).to(tl.float32, bitcast=True)
                power = tl.where(power > 0, power, 1.0)
                q = (q.to(tl.float32) / power[None, :]).to(tl.float16)
                k_factor = k_factor * power
            odd_acc = tl.zeros([BLOCK_D // UNIT, BLOCK_G], tl.float32)
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        masses = tl.zeros([BLOCK_N, BLOCK_G], tl.float32)  # per key of a tile; summed up at the end
        if SINKS:
            # As if the row's first split had seen one more key, without a value.
            top = tl.load(sinks_ptr + heads, (group < G) & (split == 0), other=float("-inf")) * _LOG2_E
            sink_mass = tl.where(split == 0, 32768.0 if FP8 else 1.0, 0.0)  # 2 ** _LOG2_WEIGHT
            masses += tl.where(keys == 0, sink_mass, 0.0)[:, None]
        acc = tl.zeros([BLOCK_D // UNIT, BLOCK_G], tl.float32)
        for n0 in range(low, high, BLOCK_N):
            page = next_page.to(tl.int64)
            ahead = tl.minimum(n0 + BLOCK_N if ONE_PAGE else n0 + BLOCK_N + keys, last)
            next_page = tl.load(pages_ptr + ahead // S)
            seen = n0 + keys < high
            # Positions in the tile. Lanes of unseen tokens read a seen token instead, with weight 0.
            there = tl.minimum(keys, last - n0)
            if window > 0:
                seen = seen & (n0 + keys >= start)
                there = tl.maximum(there, start - n0)
            if ONE_PAGE:
                k_from = k_head_ptr + (page * k_page_stride + (n0 % S) * k_token_stride)
                v_from = v_head_ptr + (page * V_PAGE + (n0 % S) * V_TOKEN)
                k_ptrs = (k_from + lanes)[None, :] + (there.to(tl.int64) * k_token_stride)[:, None]
                v_ptrs = (v_from + v_lanes)[:, None] + (there.to(tl.int64) * V_TOKEN)[None, :]
            else:
                k_rows = page * k_page_stride + ((n0 + there) % S) * k_token_stride
                v_rows = page * V_PAGE + ((n0 + there) % S) * V_TOKEN
                k_ptrs = k_head_ptr + k_rows[:, None] + lanes[None, :]
                v_ptrs = v_head_ptr + v_rows[None, :] + v_lanes[:, None]
            k = tl.load(k_ptrs) if D == BLOCK_D else tl.load(k_ptrs, (lanes < D)[None, :], other=0.0)
            v = tl.load(v_ptrs) if D == BLOCK_D else tl.load(v_ptrs, (v_lanes < D // UNIT)[:, None], other=0)
            if FP8:
                scores = tl.dot(k.to(WIDE_KV), q, input_precision="ieee") * k_factor[None, :]
            else:
                scores = tl.dot(k, q, input_precision="ieee")
            if softcap > 0:
                scores = softcap * _LOG2_E * (2 * tl.sigmoid(scores * (2 * scale / softcap)) - 1)
            else:
                scores = scores * (scale * _LOG2_E)
            scores = tl.where(seen[:, None], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 0))
            shrink = tl.exp2(top - new_top)
            if FP8:
                weights = tl.exp2(scores - (new_top - _LOG2_WEIGHT)[None, :])
                even, odd = unpacked_pairs(v, WIDE_KV)
                acc = tl.dot(even, weights.to(WIDE_KV), acc * shrink[None, :], input_precision="ieee")
                odd_acc = tl.dot(odd, weights.to(WIDE_KV), odd_acc * shrink[None, :], input_precision="ieee")
                masses = masses * shrink[None, :] + weights
            else:
                weights = tl.exp2(scores - new_top[None, :])
                masses = masses * shrink[None, :] + weights
                acc = acc * shrink[None, :]
                acc = tl.dot(v, weights.to(v.dtype), acc, input_precision="ieee")
            top = new_top
        mass = tl.sum(masses, 0)
        if FP8:
            acc = tl.reshape(tl.permute(tl.join(acc, odd_acc), (0, 2, 1)), [BLOCK_D, BLOCK_G])

        # The first counter hands out the units. Programs ask once per unit; the last one to ask resets it.
        next_unit = num_units
        if num_units > tl.num_programs(0):
            asked_ptr = arrivals_ptr + (kv_head - unit % K)  # + 0, which is known after the wait
            num_asked = tl.atomic_add(asked_ptr, 1, sem="relaxed", scope="gpu")
            next_unit = tl.num_programs(0) + num_asked
            if num_asked == num_units - 1:
                tl.store(asked_ptr, 0)

        row_splits = tl.minimum((MOST_SPLITS + (1 << tier) - 1) >> tier, MAX_SPLITS)
        first_place = (row.to(tl.int64) * K + kv_head) * row_splits
        top, mass, acc, is_done = merge_splits(
            top, mass, acc, split, num_splits, partial_acc_ptr + first_place * (G * D),
            partial_sum_ptr + first_place * (2 * G), arrivals_ptr + 1 + first_place, G, D, BLOCK_G, BLOCK_D,
            WIDE,
        )  # fmt: skip
        if is_done:
            done = acc / tl.where(mass > 0, mass, 1.0)[None, :]
            if FP8:
                done = done * tl.load(kv_scales_ptr + 1)
            out_offsets = (row.to(tl.int64) * H + heads)[None, :] * D + lanes[:, None]
            tl.store(out_ptr + out_offsets, done.to(out_ptr.dtype.element_ty), q_mask)
        unit = next_unit


class Rope(NamedTuple):
    """The arguments of rope_store that rope_paged_decode needs for the rows' new tokens."""

    cos_sin: Tensor  # float32 [max_position, D]
    positions: Tensor  # int32 [R]
    slot_mapping: Tensor  # int32 [R]; -1 = store nothing
    q_norm_weight: Tensor | None = None  # [D]; None = no norm
    k_norm_weight: Tensor | None = None
    eps: float = 1e-6
    normed_values: NormedValues | None = None  # not None: v is normalised; "keys": it is k


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
    kv_scales: Tensor | None = None,
    config: DecodeConfig | None = None,
    rope: Rope | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch the kernel on any device; with `rope`, `q` is qkv [R, (H+2K)*D] and the pools are written.

    Without a config, `choose_config` decides.
    """
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    num_rows = q.shape[0]
    # Without `rope` the kernel does not read the first three tensors and the norms: any tensor will do.
    cos_sin, positions, slot_mapping, q_norm, k_norm, eps, normed_values = rope or Rope(q, row_ids, row_ids)
    num_heads = q.shape[1] if rope is None else num_query_heads(q, num_kv_heads, head_dim, normed_values)
    group = num_heads // num_kv_heads
    shape = (num_heads, num_kv_heads, head_dim, page_size)
    config, (first, second, third) = choose_config(q, *shape, config, k_cache.dtype)
    multiprocessors = num_multiprocessors(q.device)
    # Most tokens that a row of the page table has room for.
    max_tokens = page_table.shape[1] * page_size
    if window > 0:
        max_tokens = min(max_tokens, window + config.block_n)
    doublings = (ceil_div(max_tokens, config.split_tokens * config.max_splits) - 1).bit_length()
    # Most splits of a row in the first tier; the other tiers have half, a quarter, an eighth of them. The
    # bound of eight times the maximum gives all longer page tables the same compiled kernel.
    most_splits = min(ceil_div(max_tokens, config.split_tokens), 8 * config.max_splits)
    # Arithmetic without branches, because torch.compile makes one code for any number of rows. Above the
    # second tier a multiprocessor gets only as many programs as keep the memory busy: with more, all would
    # hold a unit at once and none could balance the load. Smaller batches get more programs than the GPU
    # holds at once.
    units = [
        min(num_rows, rows) * min(config.max_splits, ceil_div(most_splits, 1 << tier))
        for tier, rows in enumerate((first, second, third, num_rows))
    ]
    max_units = num_kv_heads * max(*units)
    not_many = min(max(third + 1 - num_rows, 0), 1)
    are_few = min(max(second + 1 - num_rows, 0), 1)
    many = config.many_programs_per_sm
    if k_cache.dtype == FP8:
        many = programs_for_equal_rows(many, num_rows * num_kv_heads, multiprocessors)
    num_programs = multiprocessors * (
        many
        + not_many * (config.some_programs_per_sm - many)
        + are_few * (config.few_programs_per_sm - config.some_programs_per_sm)
    )
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    partial_acc = torch.empty((max_units, group, head_dim), dtype=torch.float32, device=q.device)
    partial_sum = torch.empty((max_units, 2, group), dtype=torch.float32, device=q.device)
    if arrivals is None:
        arrivals = torch.zeros((1 + max_units,), dtype=torch.int32, device=q.device)
    elif not torch.compiler.is_compiling() and arrivals.shape[0] <= max_units:
        raise ValueError(
            f"this batch takes {1 + max_units} arrivals, got {arrivals.shape[0]}; see num_arrivals"
        )
    _paged_decode_kernel[(min(num_programs, max_units),)](
        q,
        cos_sin,
        positions,
        slot_mapping,
        q if q_norm is None else q_norm,
        q if k_norm is None else k_norm,
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
        head_dim if rope is not None else q.stride(1),
        q if kv_scales is None else kv_scales,
        q if sinks is None else sinks,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        scale,
        window,
        softcap,
        sinks is not None,
        rope is not None,
        q_norm is not None,
        k_norm is not None,
        normed_values is not None,
        normed_values == "keys",
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        config.split_tokens.bit_length() - 1,
        first,
        second,
        third,
        config.max_splits,
        most_splits,
        doublings,
        block_g(group),
        config.block_n,
        next_power_of_2(head_dim),
        _BLOCK_R,
        8 if group <= 4 else 4,
        can_start_early(q.device),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


# Opaque to torch.compile, whose code serves any number of rows: over pools of e4m3 the op chooses the
# configuration when it runs, which is once for each recorded graph.


@torch.library.custom_op("minisgl::paged_decode_fp8", mutates_args=("k_cache", "v_cache", "arrivals"))
def _decode_many_over_fp8(
    q: Tensor,
    rotation: list[Tensor],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int,
    softcap: float,
    arrivals: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    eps: float,
    normed_values: str | None,
) -> Tensor:
    """paged_decode_triton with `Rope` taken apart; an empty `rotation` stands for None."""
    rope = None
    if rotation:
        cos_sin, positions, slot_mapping = rotation
        values: Any = normed_values
        rope = Rope(cos_sin, positions, slot_mapping, q_norm, k_norm, eps, values)
    where = (page_table, row_ids, context_len, scale, window, softcap)
    return paged_decode_triton(q, k_cache, v_cache, *where, arrivals, kv_scales, rope=rope, sinks=sinks)


@_decode_many_over_fp8.register_fake
def _(
    q: Tensor,
    rotation: list[Tensor],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int,
    softcap: float,
    arrivals: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    eps: float,
    normed_values: str | None,
) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[2:]
    values: Any = normed_values
    num_heads = num_query_heads(q, num_kv_heads, head_dim, values) if rotation else q.shape[1]
    return q.new_empty((q.shape[0], num_heads, head_dim))


def _launch_or_hide(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    where: tuple[Any, ...],
    arrivals: Tensor | None,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    rope: Rope | None = None,
) -> Tensor:
    """Launch the kernel; torch.compile sees an op where the number of rows decides more than it may see."""
    is_seen = pools[0].dtype != FP8 or q.shape[0] <= FEW_ROWS or arrivals is None
    if is_seen or not torch.compiler.is_compiling():
        return paged_decode_triton(q, *pools, *where, arrivals, kv_scales, rope=rope, sinks=sinks)
    rotation: list[Tensor] = []
    norms: tuple[Any, ...] = (None, None)
    others: tuple[Any, ...] = (0.0, None)
    if rope is not None:
        rotation, norms, others = [*rope[:3]], rope[3:5], rope[5:]
    return _decode_many_over_fp8(q, rotation, *norms, *pools, *where, arrivals, kv_scales, sinks, *others)


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
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q [R, H, D] over the first context_len[r] tokens of row row_ids[r]; returns [R, H, D].

    k_cache and v_cache are [P, S, K, D], page_table int32 [B, C], row_ids and context_len int32 [R]. With
    window > 0 a row sees only its last `window` tokens; with softcap > 0 scores are
    softcap * tanh(s/softcap). arrivals are at least num_arrivals(R, K) counters (int32 zeros). They are zeros
    again afterwards, so successive calls on a stream may share them. None allocates new ones, which takes
    another launch. kv_scales, float32 [2], are the scales of keys and values in pools of e4m3;
    sinks, float32 [H], a score of each head that takes its share of the softmax and has no value (gpt-oss).
    """
    where = (page_table, row_ids, context_len, scale, window, softcap)
    if q.device.type == "cpu":
        return paged_decode_reference(q, k_cache, v_cache, *where, kv_scales, sinks)
    return _launch_or_hide(q, (k_cache, v_cache), where, arrivals, kv_scales, sinks)


def rope_paged_decode(
    qkv: Tensor,
    rope: Rope,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    arrivals: Tensor | None = None,
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """rope_store of qkv (as that takes it), then paged_decode of its q, in one launch; returns [R, H, D].

    Arguments as theirs. Token r is the last of row r's context_len[r] tokens, and its slot is that token's
    place in the page table. With slot -1 the token is not stored, and its row sees what the pools hold.
    """
    where = (page_table, row_ids, context_len, scale, window, softcap)
    if qkv.device.type == "cpu":
        q = rope_store_reference(qkv, *rope[:3], k_cache, v_cache, *rope[3:6], kv_scales, rope.normed_values)
        return paged_decode_reference(q, k_cache, v_cache, *where, kv_scales, sinks)
    return _launch_or_hide(qkv, (k_cache, v_cache), where, arrivals, kv_scales, sinks, rope)
