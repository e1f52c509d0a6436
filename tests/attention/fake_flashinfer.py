"""Stands in for the package flashinfer on the CPU: its two wrappers, which compute in plain torch.

What `run` uses is what flashinfer's kernels use: the buffers a wrapper was given (so that a recorded graph
would read the same) and what was planned last. Calls that flashinfer would refuse fail here, too.
"""

from typing import Any

import torch
from torch import Tensor

from triton_kernels.attention_reference import paged_prefill_reference

__version__ = "0.0.fake"
TABLES_BYTES = 8 << 20


class _PagedWrapper:
    """What both wrappers share."""

    def __init__(self, workspace: Tensor) -> None:
        self.workspace = workspace
        self.tables = torch.zeros(TABLES_BYTES, dtype=torch.uint8)
        self.num_plans = 0
        self.planned: dict[str, Any] = {}

    def reset_workspace_buffer(self, workspace: Tensor, tables: Tensor) -> None:
        self.workspace, self.tables = workspace, tables

    def note(self, **planned: Any) -> None:
        assert planned["q_data_type"] == planned["kv_data_type"]
        self.planned = planned
        self.num_plans += 1

    def attend(
        self,
        q: Tensor,
        caches: tuple[Tensor, Tensor],
        row_start: Tensor,
        page_start: Tensor,
        page_ids: Tensor,
        last_page_len: Tensor,
    ) -> Tensor:
        k_cache, v_cache = caches
        assert q.dtype == self.planned["q_data_type"]
        assert k_cache.shape[1] == self.planned["page_size"]
        counts = page_start.diff()
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, count in enumerate(counts.tolist()):
            table[row, :count] = page_ids[int(page_start[row]) :][:count]
        lengths = (counts - 1) * k_cache.shape[1] + last_page_len
        longest = int(row_start.diff().max())
        rows = torch.arange(len(counts), dtype=torch.int32)
        window = self.planned["window_left"] + 1
        where = (table, rows, lengths.int(), row_start, longest, self.planned["sm_scale"], window)
        return paged_prefill_reference(q, k_cache, v_cache, *where)


class BatchPrefillWithPagedKVCacheWrapper(_PagedWrapper):
    """Prompts."""

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        super().__init__(workspace)
        assert layout == "NHD"
        assert backend in ("fa2", "fa3")
        self.backend = backend

    def plan(
        self,
        row_start: Tensor,
        page_start: Tensor,
        page_ids: Tensor,
        last_page_len: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        assert int(page_start[-1]) == len(page_ids)
        self.batch = tuple(part.clone() for part in (row_start, page_start, page_ids, last_page_len))
        self.note(page_size=page_size, heads=(num_heads, num_kv_heads, head_dim), **options)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        if q.shape[0] != int(self.batch[0][-1]):
            raise ValueError("q.shape[0] does not match qo_indptr[-1]")
        return out.copy_(self.attend(q, caches, *self.batch))


class BatchDecodeWithPagedKVCacheWrapper(_PagedWrapper):
    """Decode steps; with `use_cuda_graph` of one size, in the buffers that were given."""

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_tensor_cores: bool,
        backend: str,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(workspace)
        assert layout == "NHD"
        assert use_tensor_cores
        assert backend == "fa2"
        self.use_cuda_graph = use_cuda_graph
        self.buffers: Any = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    def plan(
        self,
        page_start: Tensor,
        page_ids: Tensor,
        last_page_len: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        assert int(page_start[-1]) == len(page_ids)
        if self.use_cuda_graph:
            if len(last_page_len) != len(self.buffers[2]):
                raise ValueError("The batch size should be fixed in cudagraph mode")
            self.buffers[0].copy_(page_start)
            self.buffers[1][: len(page_ids)].copy_(page_ids)
            self.buffers[2].copy_(last_page_len)
        else:
            self.buffers = (page_start.clone(), page_ids.clone(), last_page_len.clone())
        self.note(page_size=page_size, heads=(num_heads, num_kv_heads, head_dim), **options)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        page_start, page_ids, last_page_len = self.buffers
        row_start = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        if q.shape[0] != len(last_page_len):
            raise ValueError("q does not match the batch size")
        return out.copy_(self.attend(q, caches, row_start, page_start, page_ids, last_page_len))


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    page_start: Tensor,
    page_ids: Tensor,
    last_page_len: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    global_override_indptr_cpu: Tensor,
    **options: Any,
) -> None:
    """Plans without touching the buffers, which whoever calls it has filled."""
    assert wrapper.use_cuda_graph
    assert wrapper.num_plans > 0, "flashinfer loads its kernels in the first plan()"
    assert page_start.device.type == "cpu"
    assert torch.equal(page_start, global_override_indptr_cpu)
    wrapper.note(page_size=page_size, heads=(num_heads, num_kv_heads, head_dim), **options)
