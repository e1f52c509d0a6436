"""Prefill attention: a ragged batch of new tokens, causal, over each row's paged keys and values.

    row r owns the new tokens t in row_start[r] : row_start[r+1], n_r of them; token t sits at position
    p(t) = context_len[r] - n_r + (t - row_start[r]) and sees keys j with max(0, p - window + 1) <= j <= p
    s[h, j]   = scale * q[t, h] . k[j, h // G]          then softcap * tanh(s / softcap), if softcap > 0
    out[t, h] = sum over seen j of softmax(s[h])[j] * v[j, h // G]      with sinks, exp(sinks[h]) is one more
                                                                        term of the softmax's denominator
    token j's k and v lie at page page_table[row_ids[r], j // S], offset j % S of the pools

T new tokens, R rows of the batch, B rows of the page table, C pages a row may have, H query heads, K KV
heads, G = H / K query heads per KV head, D head dim, P pages, S page size. The new tokens' own k and v are
already in the pools. Rows may own no token (padding rows), one or more. Tokens from row_start[R] on are
padding and yield zeros; for tokens before row_start[0] out is not written.
Memory outside the seen tokens is never used (it may hold NaN). H a multiple of K, G <= 16, D <= 512 and a
multiple of 8, S any power of two. q's rows and heads and the pools' pages, tokens and heads may be strided;
the D elements of a head lie next to each other. Pools of e4m3 have scales (fp8_cache.py); their elements
become q's type before the products, whose sums are float32.

On Hopper GPUs paged_prefill_hopper.py runs the calls that it supports, which have no sinks. The kernel below
runs all others, and works wherever Triton does, including its interpreter.

A program processes BLOCK_M / G neighbouring queries of one row times the G heads of a KV head, so keys and
values are read once for all of them. It finds its row by a prefix sum over row_start, so the grid depends
only on T and R. Key tiles that no query sees are skipped, and tiles that all queries see are not masked.
Programs with long tiles start first. Softmax runs in base 2.

Cost: 4 * H * D FLOP per (query, seen key) pair: compute bound for chunks above about 50 tokens (G = 4). A row
of one token costs a whole tile of products, which the loads of its keys hide (in both kernels). Its keys are
not split among programs, so a few long decode rows should use paged_decode.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare; calling one from
# another looks like the call that raises outside of a kernel.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.attention_reference import paged_prefill_reference
from triton_kernels.e4m3 import FP8
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.paged_prefill_hopper import paged_prefill_hopper, takes
from triton_kernels.tuning import tuned

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK_R = 128


class PrefillConfig(NamedTuple):
    """A launch configuration of paged_prefill."""

    block_m: int  # query rows (tokens times heads of a group) per tile
    block_n: int  # keys per tile
    num_warps: int
    num_stages: int


def default_prefill_config(head_dim: int, element_size: int, gpu: Gpu, is_fp8: bool = False) -> PrefillConfig:
    """The configuration if none is given or tuned, for queries of `element_size`."""
    if element_size > 2:
        return PrefillConfig(16, 16, num_warps=4, num_stages=2)  # float32 is for tests
    if head_dim > 256:
        # The sums of more rows would not fit into registers; less shared memory holds fewer keys.
        config = PrefillConfig(64, 16, 8, 3) if gpu.has_wgmma else PrefillConfig(32, 32, 8, 2)
    elif head_dim > 128:
        block_m = 128 if gpu.multiplies_from_shared else 64  # the sums of 128 rows would spill
        config = PrefillConfig(block_m, 32, num_warps=8, num_stages=3)
    else:
        config = PrefillConfig(128, 64, num_warps=8, num_stages=3)
    return prefill_that_fits(config, head_dim, element_size, gpu, is_fp8)


@torch.compiler.assume_constant_result
def _default(device: torch.device, head_dim: int, element_size: int, is_fp8: bool) -> tuple[int, ...]:
    return tuple(default_prefill_config(head_dim, element_size, gpu_of(device), is_fp8))


def prefill_that_fits(
    config: PrefillConfig, head_dim: int, element_size: int, gpu: Gpu, is_fp8: bool = False
) -> PrefillConfig:
    """The configuration with as many stages as fit this GPU; at least 1, even if that does not fit."""
    columns = element_size * next_power_of_2(head_dim)
    stage_bytes = 2 * config.block_n * columns  # keys and values
    other_bytes = config.block_m * (columns + element_size * config.block_n)  # queries and weights
    if is_fp8:  # the tiles of one iteration are also there as the queries' type
        other_bytes += stage_bytes
        stage_bytes //= element_size
    return config._replace(num_stages=gpu.stages_that_fit(config.num_stages, stage_bytes, other_bytes))


@triton.jit
def _count_tiles(tiles, target, rows_before, row_begin, row_tiles, total):
    """One step of the search for the target-th tile, over a block of rows: the tiles before it, and the sum.

    The search loads in the kernel's own body: if a function loads a tensor and the value then decides where
    to store, torch.compile believes that the tensor is written.
    """
    ends = total + tl.cumsum(tiles, 0)
    before = ends <= target
    rows_before += tl.sum(before.to(tl.int32), 0)
    row_begin = tl.maximum(row_begin, tl.max(tl.where(before, ends, 0), 0))
    row_tiles += tl.sum(tl.where((ends > target) & (ends - tiles <= target), tiles, 0), 0)
    return rows_before, row_begin, row_tiles, total + tl.sum(tiles, 0)


@triton.jit
def _attend(
    acc,
    mass,
    top,
    q,
    position,
    low,
    high,
    length,
    pages_ptr,
    k_ptr,
    v_ptr,
    k_page_stride,
    k_token_stride,
    v_page_stride,
    v_token_stride,
    k_scale,
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One online-softmax pass over the keys low : high, whole tiles; MASKED applies causality and window."""
    FP8: tl.constexpr = k_ptr.dtype.element_ty == tl.float8e4nv
    lanes = tl.arange(0, BLOCK_D)
    to_base_2: tl.constexpr = _LOG2_E if softcap > 0 else scale * _LOG2_E
    # Page ids are fetched one tile ahead: a load that depends on another load of the same iteration would
    # halve the pipeline's depth.
    token = low + tl.arange(0, BLOCK_N)
    next_page = tl.load(pages_ptr + token // S, token < length, other=0)
    for n0 in range(low, high, BLOCK_N):
        token = n0 + tl.arange(0, BLOCK_N)
        page = next_page.to(tl.int64)
        next_token = token + BLOCK_N
        next_page = tl.load(pages_ptr + next_token // S, next_token < length, other=0)
        kv_mask = (lanes < D)[None, :]
        if MASKED:
            kv_mask = kv_mask & (token < length)[:, None]
        k_rows = page * k_page_stride + (token % S) * k_token_stride
        v_rows = page * v_page_stride + (token % S) * v_token_stride
        if MASKED or D != BLOCK_D:
            k = tl.load(k_ptr + k_rows[:, None] + lanes[None, :], kv_mask, other=0.0)
        else:
            k = tl.load(k_ptr + k_rows[:, None] + lanes[None, :])
        if FP8:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * k_scale
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if softcap > 0:
            scores = softcap * (2 * tl.sigmoid(scores * (2 * scale / softcap)) - 1)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if window > 0:
                seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * to_base_2)
        # With a window a query may see nothing of the first tile: avoid -inf minus -inf.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if window > 0 else new_top
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        shrink = tl.exp2(top - shift)
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED or D != BLOCK_D:
            v = tl.load(v_ptr + v_rows[:, None] + lanes[None, :], kv_mask, other=0.0)
        else:
            v = tl.load(v_ptr + v_rows[:, None] + lanes[None, :])
        if FP8:
            acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, mass, top


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _paged_prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    row_ids_ptr,
    context_len_ptr,
    row_start_ptr,
    out_ptr,
    num_tokens,
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
    kv_scales_ptr,
    sinks_ptr,
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    SINKS: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    G: tl.constexpr = H // K
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    FP8: tl.constexpr = k_cache_ptr.dtype.element_ty == tl.float8e4nv
    kv_head = tl.program_id(1)
    place = tl.arange(0, BLOCK_M)
    query = place // G
    head = kv_head * G + place % G
    lanes = tl.arange(0, BLOCK_D)

    # The tile is the program_id-th from the end, so that long ones start first.
    target = tl.program_id(0)
    rows_before = target * 0
    row_begin = target * 0
    row_tiles = target * 0
    num_tiles = target * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = num_rows - 1 - r0 - tl.arange(0, BLOCK_R)
        new = tl.load(row_start_ptr + rows + 1, rows >= 0, other=0)
        new -= tl.load(row_start_ptr + rows, rows >= 0, other=0)
        rows_before, row_begin, row_tiles, num_tiles = _count_tiles(
            (new + BLOCK_Q - 1) // BLOCK_Q, target, rows_before, row_begin, row_tiles, num_tiles
        )
    row = num_rows - 1 - rows_before
    tile = row_tiles - 1 - (target - row_begin)

    if tl.program_id(0) >= num_tiles:
        # There is always a spare program. The spare programs write zeros for the padding tokens.
        first = tl.load(row_start_ptr + num_rows) + (tl.program_id(0) - num_tiles) * BLOCK_Q
        for t0 in range(first, num_tokens, (tl.num_programs(0) - num_tiles) * BLOCK_Q):
            token = (t0 + query).to(tl.int64)
            mask = ((query < BLOCK_Q) & (token < num_tokens))[:, None] & (lanes < D)[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
            tl.store(out_ptr + (token * H + head)[:, None] * D + lanes[None, :], zeros, mask)
    else:
        begin = tl.load(row_start_ptr + row)
        end = tl.load(row_start_ptr + row + 1)
        length = tl.load(context_len_ptr + row)
        pages_ptr = page_table_ptr + tl.load(row_ids_ptr + row).to(tl.int64) * page_table_stride
        k_ptr = k_cache_ptr + kv_head.to(tl.int64) * k_head_stride
        v_ptr = v_cache_ptr + kv_head.to(tl.int64) * v_head_stride

        k_scale = 1.0
        v_scale = 1.0
        if FP8:
            k_scale = tl.load(kv_scales_ptr)
            v_scale = tl.load(kv_scales_ptr + 1)

        first = begin + tile * BLOCK_Q
        token = (first + query).to(tl.int64)
        mask = ((query < BLOCK_Q) & (first + query < end))[:, None] & (lanes < D)[None, :]
        q_offsets = token * q_row_stride + head * q_head_stride
        q = tl.load(q_ptr + q_offsets[:, None] + lanes[None, :], mask, other=0.0)

        first_position = length - end + first
        position = first_position + query
        # The window masks keys low : full_low, causality masks full_high : high, all queries see the others.
        high = tl.minimum(length, first_position + BLOCK_Q)
        full_high = (first_position + 1) // BLOCK_N * BLOCK_N
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        if SINKS:  # as if each query had seen one more key, without a value
            top = tl.load(sinks_ptr + head) * _LOG2_E
            mass += 1.0
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        low = 0
        if window > 0:
            low = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
            full_low = tl.maximum(first_position + BLOCK_Q - window, 0)
            full_low = (full_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            full_low = tl.minimum(full_low, (high + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
            acc, mass, top = _attend(
                acc, mass, top, q, position, low, full_low, length, pages_ptr, k_ptr, v_ptr,
                k_page_stride, k_token_stride, v_page_stride, v_token_stride, k_scale,
                scale, window, softcap, D, S, True, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            low = full_low
        acc, mass, top = _attend(
            acc, mass, top, q, position, low, full_high, length, pages_ptr, k_ptr, v_ptr,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride, k_scale,
            scale, window, softcap, D, S, False, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        acc, mass, top = _attend(
            acc, mass, top, q, position, tl.maximum(low, full_high), high, length, pages_ptr, k_ptr, v_ptr,
            k_page_stride, k_token_stride, v_page_stride, v_token_stride, k_scale,
            scale, window, softcap, D, S, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        out = acc / tl.where(mass > 0, mass, 1.0)[:, None]
        if FP8:
            out = out * v_scale
        out_offsets = (token * H + head)[:, None] * D + lanes[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask)


def paged_prefill_triton(
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
    config: PrefillConfig | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Launch the kernel on any device; max_query_len is not needed (the grid follows from T and R)."""
    num_tokens, num_heads, head_dim = q.shape
    num_rows = row_ids.shape[0]
    _, page_size, num_kv_heads, _ = k_cache.shape
    if config is None:
        is_fp8 = k_cache.dtype == FP8
        default = PrefillConfig(*_default(q.device, head_dim, q.element_size(), is_fp8))
        op = "paged_prefill_fp8" if is_fp8 else "paged_prefill"
        exact, near = (head_dim, num_heads // num_kv_heads), (num_kv_heads, page_size)
        config = tuned(default, op, q.device, q.dtype, exact, near)
    block_q = config.block_m // (num_heads // num_kv_heads)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    # An upper bound of the tiles, plus one: sum of ceil(n_r / block_q) < T / block_q + R.
    grid = (ceil_div(num_tokens, block_q) + num_rows, num_kv_heads)
    _paged_prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        page_table,
        row_ids,
        context_len,
        row_start,
        out,
        num_tokens,
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
        q if kv_scales is None else kv_scales,
        q if sinks is None else sinks,
        scale,
        window,
        softcap,
        sinks is not None,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        config.block_m,
        config.block_n,
        next_power_of_2(head_dim),
        _BLOCK_R,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def _attend_on_gpu(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *rows_and_options: Any, sinks: Tensor | None
) -> Tensor:
    """Run the Hopper kernel if it supports the call, else the Triton kernel."""
    if sinks is None and takes(q, k_cache, v_cache):
        return paged_prefill_hopper(q, k_cache, v_cache, *rows_and_options)
    return paged_prefill_triton(q, k_cache, v_cache, *rows_and_options, sinks=sinks)


@torch.library.custom_op("triton_kernels::paged_prefill", mutates_args=())
def _paged_prefill_op(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """_attend_on_gpu as an op, because torch.compile cannot look into Gluon."""
    rows = (page_table, row_ids, context_len, row_start)
    options = (max_query_len, scale, window, softcap, kv_scales)
    return _attend_on_gpu(q, k_cache, v_cache, *rows, *options, sinks=sinks)


@_paged_prefill_op.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


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
    kv_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of q [T, H, D], where row r owns the queries row_start[r] : row_start[r+1].

    They are the last of the row's context_len[r] tokens, whose keys and values lie in k_cache and v_cache
    [P, S, K, D] at the pages page_table[row_ids[r]] (all int32). Returns [T, H, D], zeros after row_start[R].
    kv_scales, float32 [2], are the scales of keys and values in pools of e4m3; sinks, float32 [H], a score of
    each head that takes its share of the softmax and has no value (gpt-oss).
    """
    rows = (page_table, row_ids, context_len, row_start)
    options = (max_query_len, scale, window, softcap, kv_scales)
    if q.device.type == "cpu":
        return paged_prefill_reference(q, k_cache, v_cache, *rows, *options, sinks)
    attend = _paged_prefill_op if torch.compiler.is_compiling() else _attend_on_gpu
    return attend(q, k_cache, v_cache, *rows, *options, sinks=sinks)
