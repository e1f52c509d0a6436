"""From a step plan to tensors: everything a step needs from the host travels in one packed copy.

Promise: a staging buffer is not written again before the copy out of it is over (the copies are
asynchronous on CUDA; an engine that forgets this reads garbage only under load).

T new tokens, R rows of the batch, U page-table entries that change.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.scheduler.plan import SCRATCH_PAGE, RowInit, StepPlan

STAGING_BUFFERS = 3
"""One being filled, and one for each step that may be in flight."""

ALIGNMENT = 4
"""Staged arrays start at multiples of 16 bytes: Triton compiles another kernel for pointers that don't."""


class PageTableChange(NamedTuple):
    """Entries of the flattened page table to overwrite, each named once."""

    flat_index: np.ndarray  # int32 [U]; the resolver keeps rows * pages below 2**31
    page_ids: np.ndarray  # int32 [U]


class PrefillBatch(NamedTuple):
    """The chunks of a step as one ragged batch, on the device."""

    token_ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slot_mapping: Tensor  # int32 [T]
    row_ids: Tensor  # int32 [R]
    context_len: Tensor  # int32 [R]  this step's tokens included
    row_start: Tensor  # int32 [R + 1]
    logit_index: Tensor  # int32 [R]  each row's last token
    sampling: Tensor  # int32 [N]  which of the R rows sample, ascending
    max_query_len: int


class HostPageTable:
    """The host's copy of the page table: what slots are computed from."""

    def __init__(self, max_rows: int, max_pages_per_row: int, page_size: int) -> None:
        self._table = np.full((max_rows + 1, max_pages_per_row), SCRATCH_PAGE, dtype=np.int32)
        self._page_size = page_size

    def update(self, plan: StepPlan) -> PageTableChange | None:
        """Apply the plan's changes here and return them for the device; None = none."""
        if not plan.page_updates:
            return None
        width = self._table.shape[1]
        index: list[int] = []
        page_ids: list[int] = []
        for update in plan.page_updates:
            first = update.row * width + update.first_index
            index += range(first, first + len(update.page_ids))
            page_ids += update.page_ids
        change = PageTableChange(np.array(index, dtype=np.int32), np.array(page_ids, dtype=np.int32))
        self._table.reshape(-1)[change.flat_index] = change.page_ids
        return change

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        """int32 [T]: the pool's slot of each position of a row."""
        return self._table[row, positions // self._page_size] * self._page_size + positions % self._page_size


class Stager:
    """Copies packed int32 arrays to the device through a ring of pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * STAGING_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * STAGING_BUFFERS
        self._next = 0

    def to_device(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """int32 arrays -> int32 tensors on the device, views of one copy."""
        padded = [-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays]
        total = sum(padded)
        packed = np.zeros(total, dtype=np.int32)
        starts = [0, *np.cumsum(padded).tolist()]
        for array, start in zip(arrays, starts, strict=False):
            packed[start : start + len(array)] = array
        tensor = torch.from_numpy(packed) if self._device.type == "cpu" else self._copy(packed)
        return [tensor[start : start + len(array)] for array, start in zip(arrays, starts, strict=False)]

    def _copy(self, packed: np.ndarray) -> Tensor:
        total = len(packed)
        buffer = self._buffers[self._next]
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        if buffer is None or buffer.numel() < total:
            buffer = torch.empty(max(total, 1024) * 2, dtype=torch.int32, pin_memory=True)
            self._buffers[self._next] = buffer
        buffer.numpy()[:total] = packed
        tensor = buffer[:total].to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[self._next] = event
        self._next = (self._next + 1) % STAGING_BUFFERS
        return tensor


def build_prefill(plan: StepPlan, pages: HostPageTable, stager: Stager) -> PrefillBatch:
    """The plan's chunks as one batch."""
    chunks = plan.chunks
    lengths = [chunk.num_new_tokens for chunk in chunks]
    positions = [
        np.arange(chunk.num_computed_tokens, chunk.num_computed_tokens + length, dtype=np.int32)
        for chunk, length in zip(chunks, lengths, strict=True)
    ]
    row_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lengths, out=row_start[1:])
    sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
    tensors = stager.to_device(
        [
            np.concatenate([np.frombuffer(chunk.token_ids, dtype="<i4") for chunk in chunks]),
            np.concatenate(positions),
            np.concatenate([pages.slots(c.row, p) for c, p in zip(chunks, positions, strict=True)]),
            np.array([chunk.row for chunk in chunks], dtype=np.int32),
            np.array([p[-1] + 1 for p in positions], dtype=np.int32),
            row_start,
            row_start[1:] - 1,
            np.array(sampling, dtype=np.int32),
        ]
    )
    return PrefillBatch(*tensors, max_query_len=max(lengths))


def pack_row_inits(inits: tuple[RowInit, ...]) -> list[np.ndarray]:
    """int32 [N] each: row, temperature, top_k, top_p, min_p (floats as bits), seed's low and high half."""
    floats = np.array([(init.temperature, init.top_p, init.min_p) for init in inits], dtype=np.float32)
    temperature, top_p, min_p = floats.T.copy().view(np.int32)
    seed = np.array([init.seed for init in inits], dtype="<i8").view("<i4").reshape(-1, 2)
    row = np.array([init.row for init in inits], dtype=np.int32)
    top_k = np.array([init.top_k for init in inits], dtype=np.int32)
    return [row, temperature, top_k, top_p, min_p, seed[:, 0], seed[:, 1]]
