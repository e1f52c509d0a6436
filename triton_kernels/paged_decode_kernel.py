"""The kernel of decode attention. paged_decode.py says what it computes, and launches it.

One program computes units of work one after the other. A unit is one split of a row (decode_splits.py) for
one KV head.
"""

# One kernel function that calls another looks like the call that raises outside of a kernel; range yields no
# int in a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false

import triton
import triton.language as tl

from triton_kernels.decode_splits import merge_splits, row_cuts
from triton_kernels.early_start import after_predecessor, start_next_if_few
from triton_kernels.fp8_cache import stored, unpacked_pairs

_LOG2_E = tl.constexpr(1.4426950408889634)
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
