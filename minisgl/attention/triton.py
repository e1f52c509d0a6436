"""Attention by our Triton kernels.

T new tokens, H query heads, K KV heads, D head dim, P pages, S page size.
"""

from torch import Tensor

from minisgl.attention.interface import AttentionInputs
from triton_kernels.registry import KERNELS, Kernels


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
    rows = (*where, inputs.row_start, inputs.max_query_len)
    return kernels.paged_prefill(q, k_cache, v_cache, *rows, scale, window, softcap, **more)
