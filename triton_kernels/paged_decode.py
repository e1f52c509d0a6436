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

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false

from typing import Any, NamedTuple

import torch
from torch import Tensor

from triton_kernels.attention_reference import paged_decode_reference
from triton_kernels.decode_config import (
    FEW_ROWS,
    DecodeConfig,
    block_g,
    choose_config,
    programs_for_equal_rows,
)
from triton_kernels.e4m3 import FP8
from triton_kernels.early_start import can_start_early
from triton_kernels.gpu import num_multiprocessors
from triton_kernels.launch import ceil_div, next_power_of_2
from triton_kernels.paged_decode_kernel import _paged_decode_kernel
from triton_kernels.rope_store import NormedValues, num_query_heads, rope_store_reference

_BLOCK_R = 32


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
    *others: Any,
) -> Tensor:
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = num_query_heads(q, num_kv_heads, head_dim, others[-1]) if rotation else q.shape[1]
    return q.new_empty((q.shape[0], num_heads, head_dim))


def _launch_or_op(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    where: tuple[Any, ...],
    arrivals: Tensor | None,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    rope: Rope | None = None,
) -> Tensor:
    """Launch the kernel, or give torch.compile the op above for many rows over pools of e4m3."""
    is_many = q.shape[0] > FEW_ROWS and arrivals is not None
    if pools[0].dtype != FP8 or not is_many or not torch.compiler.is_compiling():
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
    return _launch_or_op(q, (k_cache, v_cache), where, arrivals, kv_scales, sinks)


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
    return _launch_or_op(qkv, (k_cache, v_cache), where, arrivals, kv_scales, sinks, rope)
