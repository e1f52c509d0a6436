"""The pages of some rows out of pools of FP8, as pools of a wider type that have only these.

    k[p], v[p] = k_cache[q] * kv_scales[0], v_cache[q] * kv_scales[1]     table[row_ids[r], c] = p
    for each row r of the batch, its c-th page q = page_table[row_ids[r], c], and p = 0, 1, 2, ...

Prefill attention over FP8 pools cannot use Hopper's tensor copies, because the matrix products need wider
numbers in shared memory. Where many queries see the same keys, unpacking these first costs less.

R rows of the batch, B rows of the page table, C pages a row may have, P pages of a pool, S page size, K KV
heads, D head dim. The pages' tokens behind a row's last one are unpacked, too, whatever they hold. The D
elements of a head lie next to each other.

Cost: 6*K*D bytes moved for each token of a row: memory bound.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.fp8_cache import from_pool
from triton_kernels.launch import ceil_div

_BLOCK = 4096
_BLOCK_R = 128


class UnpackedPages(NamedTuple):
    """Pools [N, S, K, D], and the page table, int32 [B, C], whose other rows hold anything."""

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor


def empty_pages(
    k_cache: Tensor, page_table: Tensor, num_rows: int, num_keys: int, dtype: torch.dtype
) -> UnpackedPages:
    """Room for rows of `num_keys` tokens in all."""
    _, page_size, *head = k_cache.shape
    shape = (num_keys // page_size + num_rows, page_size, *head)
    k, v = (torch.empty(shape, dtype=dtype, device=k_cache.device) for _ in range(2))
    return UnpackedPages(k, v, torch.empty_like(page_table, memory_format=torch.contiguous_format))


def unpack_pages_reference(
    out: UnpackedPages,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    kv_scales: Tensor,
) -> None:
    """The same as unpack_pages, in plain torch."""
    page = 0
    for row, length in zip(row_ids.tolist(), context_len.tolist(), strict=True):
        for place in range(ceil_div(length, k_cache.shape[1])):
            source = page_table[row, place]
            for target, pool, scale in zip(out, (k_cache, v_cache), kv_scales, strict=False):
                target[page] = from_pool(pool[source], torch.float32, scale).to(target.dtype)
            out.page_table[row, place] = page
            page += 1


@triton.jit(do_not_specialize=["num_rows"])
def _unpack_pages_kernel(
    k_cache_ptr,
    v_cache_ptr,
    page_table_ptr,
    row_ids_ptr,
    context_len_ptr,
    kv_scales_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    num_rows,
    page_table_stride,
    table_stride,
    k_page_stride,
    k_token_stride,
    k_head_stride,
    v_page_stride,
    v_token_stride,
    v_head_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A program unpacks BLOCK elements of both pools' page; it finds its row by a prefix sum over lengths."""
    target = tl.program_id(0)
    row = target * 0
    row_begin = target * 0
    num_pages = target * 0
    for r0 in range(0, num_rows, BLOCK_R):
        rows = r0 + tl.arange(0, BLOCK_R)
        pages = (tl.load(context_len_ptr + rows, rows < num_rows, other=0) + S - 1) // S
        ends = num_pages + tl.cumsum(pages, 0)
        before = ends <= target
        row += tl.sum(before.to(tl.int32), 0)
        row_begin = tl.maximum(row_begin, tl.max(tl.where(before, ends, 0), 0))
        num_pages += tl.sum(pages, 0)
    if target < num_pages:
        row_id = tl.load(row_ids_ptr + row).to(tl.int64)
        place = target - row_begin
        page = tl.load(page_table_ptr + row_id * page_table_stride + place).to(tl.int64)
        if tl.program_id(1) == 0:
            tl.store(table_ptr + row_id * table_stride + place, target)
        element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = element < S * K * D
        token, head, lane = element // (K * D), element // D % K, element % D
        first = target.to(tl.int64) * (S * K * D)
        k = tl.load(
            k_cache_ptr + page * k_page_stride + token * k_token_stride + head * k_head_stride + lane, mask
        )
        k = k.to(tl.float32) * tl.load(kv_scales_ptr)
        tl.store(k_ptr + first + element, k.to(k_ptr.dtype.element_ty), mask)
        v = tl.load(
            v_cache_ptr + page * v_page_stride + token * v_token_stride + head * v_head_stride + lane, mask
        )
        v = v.to(tl.float32) * tl.load(kv_scales_ptr + 1)
        tl.store(v_ptr + first + element, v.to(v_ptr.dtype.element_ty), mask)


def unpack_pages(
    out: UnpackedPages,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    kv_scales: Tensor,
) -> None:
    """Fill `out`, of `empty_pages`, with the pages of the rows' context_len tokens, from pools [P, S, K, D].

    row_ids and context_len are int32 [R], kv_scales float32 [2]. Rows of context_len 0 have no page.
    """
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    grid = (len(out.k_cache), ceil_div(page_size * num_kv_heads * head_dim, _BLOCK))
    _unpack_pages_kernel[grid](
        k_cache,
        v_cache,
        page_table,
        row_ids,
        context_len,
        kv_scales,
        out.k_cache,
        out.v_cache,
        out.page_table,
        len(row_ids),
        page_table.stride(0),
        out.page_table.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        num_kv_heads,
        head_dim,
        page_size,
        _BLOCK,
        _BLOCK_R,
        num_warps=4,
    )
