"""Attention by our Triton kernels.

T new tokens, H query heads, K KV heads, D head dim, P pages, S page size.
"""

import torch
from torch import Tensor

from minisgl.attention.interface import AttentionInputs
from triton_kernels.paged_prefill_hopper import takes
from triton_kernels.registry import KERNELS, Kernels
from triton_kernels.unpack_pages import UnpackedPages, empty_pages, unpack_pages

MOST_UNPACKED_KEYS = 1 << 15
"""Of a step, with pools of FP8: 128 MiB for 8 KV heads of 128."""
FEWEST_PAIRS = 1 << 21
"""Of a query and a key of its row, for which unpacking pays: on an H200 it saves 0.01 to 0.03 ns per pair
with 32 heads, but takes the host 0.1 ms. Steps that the host would delay are graphs, which do not unpack."""


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
    kernels: Kernels = KERNELS,
) -> Tensor:
    """q [T, H, D] over the rows' pages of k_cache and v_cache [P, S, K, D], causal -> [T, H, D]."""
    given = {"kv_scales": kv_scales, "sinks": sinks}
    more = {name: tensor for name, tensor in given.items() if tensor is not None}
    where = (inputs.page_table, inputs.row_ids, inputs.context_len)
    if inputs.max_query_len == 1 and inputs.decodes is None:
        options = (scale, window, softcap, inputs.arrivals)
        return kernels.paged_decode(q, k_cache, v_cache, *where, *options, **more)
    sees_all = sinks is None and not window
    if kv_scales is not None and sees_all and kernels.paged_prefill is KERNELS.paged_prefill:
        room = _room_to_unpack(q, k_cache, inputs)
        if room is not None:
            unpack_pages(room, k_cache, v_cache, *where, kv_scales)
            k_cache, v_cache, page_table = room
            where, more = (page_table, *where[1:]), {}
    rows = (*where, inputs.row_start, inputs.max_query_len)
    return kernels.paged_prefill(q, k_cache, v_cache, *rows, scale, window, softcap, **more)


def _room_to_unpack(q: Tensor, k_cache: Tensor, inputs: AttentionInputs) -> UnpackedPages | None:
    """Where to unpack a pool of FP8 for the kernel that takes 16-bit pools only; None = that does not pay."""
    num_rows, num_keys = len(inputs.row_ids), inputs.num_keys
    num_queries = len(q) - (0 if inputs.decodes is None else len(inputs.decodes.is_real))
    pairs = num_queries * num_keys // max(num_rows, 1)
    if num_keys > MOST_UNPACKED_KEYS or pairs < FEWEST_PAIRS:
        return None
    no_page = torch.empty((0, *k_cache.shape[1:]), dtype=q.dtype, device=q.device)
    if not takes(q, no_page, no_page):
        return None
    return empty_pages(k_cache, inputs.page_table, num_rows, num_keys, q.dtype)
