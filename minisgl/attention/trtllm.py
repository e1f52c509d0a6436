"""Attention by TensorRT-LLM's kernels for Blackwell GPUs, through flashinfer.

The kernels read lengths and pages on the device, so the host plans nothing. Follows the documentation of
trtllm_batch_context_with_kv_cache and trtllm_batch_decode_with_kv_cache in flashinfer 0.6.14.

T new tokens, H query heads, K KV heads, D head dim, P pages, S page size.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.interface import AttentionInputs

WORKSPACE_BYTES = 128 << 20
"""The size in flashinfer's documentation. The workspace must be zeros before its first use."""


class TrtllmAttention:
    """Attention of prompts and of decode steps.

    Args:
        max_context_tokens: most keys of a row.
    """

    def __init__(self, max_context_tokens: int, device: torch.device) -> None:
        self._max_context_tokens = max_context_tokens
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] over the rows' pages of k_cache and v_cache [P, S, K, D], causal -> [T, H, D]."""
        assert softcap == 0, "choice.py refuses this backend for models with a soft cap"
        assert sinks is None, "choice.py refuses this backend for models with sinks"
        assert kv_scales is None, "choice.py refuses this backend for a cache of FP8"
        return torch.ops.minisgl.trtllm_attend(
            q,
            k_cache,
            v_cache,
            inputs.page_table,
            inputs.row_ids,
            inputs.context_len,
            inputs.row_start,
            self._workspace,
            1 if inputs.is_decode else inputs.max_query_len,
            self._max_context_tokens,
            scale,
            window,
            inputs.is_decode,
        )


torch.library.define(
    "minisgl::trtllm_attend",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor row_ids, Tensor context_len, "
    "Tensor row_start, Tensor workspace, int max_query_len, int max_context_tokens, float scale, int window, "
    "bool is_decode) -> Tensor",
)


@torch.library.impl("minisgl::trtllm_attend", ("cpu", "cuda"))
def _trtllm_attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    row_start: Tensor,
    workspace: Tensor,
    max_query_len: int,
    max_context_tokens: int,
    scale: float,
    window: int,
    is_decode: bool,
) -> Tensor:
    flashinfer: Any = importlib.import_module("flashinfer")
    lengths = context_len.clamp(min=1)  # padding rows see the scratch page
    common = {
        "query": q.contiguous(),
        "kv_cache": (k_cache, v_cache),
        "workspace_buffer": workspace,
        "block_tables": page_table.index_select(0, row_ids),
        "seq_lens": lengths,
        "bmm1_scale": scale,
        "bmm2_scale": 1.0,
        "window_left": window - 1,  # tokens before the query's own; -1 = all
        "out": q.new_empty(q.shape),
        "kv_layout": "NHD",
    }
    if is_decode:
        return flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            max_seq_len=max_context_tokens, backend="trtllm-gen", **common
        )
    return flashinfer.prefill.trtllm_batch_context_with_kv_cache(
        max_q_len=max_query_len,
        max_kv_len=max_context_tokens,
        batch_size=len(row_ids),
        cum_seq_lens_q=row_start,
        cum_seq_lens_kv=torch.cat([row_start[:1], lengths.cumsum(0, dtype=torch.int32)]),
        **common,
    )


@torch.library.register_fake("minisgl::trtllm_attend")
def _trtllm_attend_fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)
