"""Turns a step plan into tensors, and copies them to the device in one packed copy.

Promise: a staging buffer is not overwritten before the copy from it has ended. The copies are asynchronous
on CUDA, so a violation would corrupt inputs only under load.

T new tokens, R rows of the batch, C of them chunks, D decodes, G groups of layers with page tables of their
own, U page-table entries that change.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.engine.graphs.buckets import PrefillBucket
from minisgl.kvcache.page_allocator import SCRATCH_PAGE
from minisgl.kvcache.snapshots import NO_SLOT
from minisgl.scheduler.plan import Chunk, RowInit, StepPlan
from triton_kernels.launch import align_up

STAGING_BUFFERS = 21
"""Up to seven copies per step, for three steps: the host fills one while two are in flight."""


class PageTableChange(NamedTuple):
    """Entries of `Rows.page_entries` to overwrite. Each entry appears once."""

    flat_index: np.ndarray  # int32 [U]; the resolver keeps groups * rows * pages below 2**31
    page_ids: np.ndarray  # int32 [U]


class PrefillBatch(NamedTuple):
    """A step's chunks, and the decodes that join them, as one ragged batch on the device.

    The order of tokens is decodes (one token each), chunks, padding. The order of rows is `num_decodes` rows
    of decodes, then C rows of chunks. The last rows of both kinds may be padding.
    """

    token_ids: Tensor  # int32 [T]  undefined for decodes: only the device knows their last tokens
    positions: Tensor  # int32 [T]
    slot_mapping: Tensor  # int32 [T]  -1 = padding, not written; for G > 1 [G * align_up(T)], see `slots_of`
    row_ids: Tensor  # int32 [R]
    context_len: Tensor  # int32 [R]  this step's tokens included; 0 = padding
    row_start: Tensor  # int32 [C + 1]  for the chunks; a padding row has no token
    logit_index: Tensor  # int32 [R]  each row's last token; for padding rows, the last real token
    part_start: Tensor  # int32 [2 * C + 1]  `StateSaves` of the chunks
    state_slots: Tensor  # int32 [C]
    max_query_len: int
    num_decodes: int = 0
    num_keys: int = 0  # the sum of context_len of the chunks; 0 = the host does not know

    def slots_of(self, group: int) -> Tensor:
        """The slots of the tokens in the pages of a group, int32 [T]."""
        num_tokens = len(self.token_ids)
        first = group * align_up(num_tokens)
        return self.slot_mapping[first : first + num_tokens]


class Decodes(NamedTuple):
    """Rows that decode in one batch with a step's chunks. Each feeds its last token."""

    rows: np.ndarray  # int32 [D]
    lengths: np.ndarray  # int32 [D]  tokens in the pool, this step's included


NO_DECODES = Decodes(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


def decodes_of(plan: StepPlan) -> Decodes:
    """The decodes of a plan that has chunks."""
    rows, lengths = np.array([plan.decode_rows, plan.decode_lengths], dtype=np.int32)
    return Decodes(rows, lengths)


class HostPageTable:
    """The host's copy of the page tables, from which it computes slots."""

    def __init__(self, max_rows: int, max_pages_per_row: int, page_size: int, num_groups: int = 1) -> None:
        shape = (num_groups, max_rows + 1, max_pages_per_row)
        self._tables = np.full(shape, SCRATCH_PAGE, dtype=np.int32)
        self._table = self._tables[0]
        self._page_size = page_size
        self.num_groups = num_groups
        self._stride = align_up(self._table.size) if num_groups > 1 else self._table.size

    @property
    def padding_row(self) -> int:
        """The row id of padding. No request ever has it."""
        return self._table.shape[0] - 1

    @property
    def max_tokens(self) -> int:
        """Most tokens that the pages of one row can hold."""
        return self._table.shape[1] * self._page_size

    def update(self, plan: StepPlan) -> PageTableChange | None:
        """Apply the plan's page updates here, and return them for the device; None if there are none."""
        if not plan.page_updates:
            return None
        width = self._table.shape[1]
        first = np.array(
            [
                update.group * self._stride + update.row * width + update.first_index
                for update in plan.page_updates
            ]
        )
        page_ids = [np.frombuffer(update.page_ids, "<i4") for update in plan.page_updates]
        for update, ids in zip(plan.page_updates, page_ids, strict=True):
            start = update.first_index
            self._tables[update.group, update.row, start : start + len(ids)] = ids
        flat_index = _runs(first, np.array([len(ids) for ids in page_ids]))
        return PageTableChange(flat_index, np.concatenate(page_ids))

    def slots(self, row: int | np.ndarray, positions: np.ndarray, group: int = 0) -> np.ndarray:
        """The pool's slot of each position, int32 [T], in one row or in one row per position."""
        page_ids = self._tables[group, row, positions // self._page_size]
        return page_ids * self._page_size + positions % self._page_size

    def pages_of(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pages of R >= 1 rows, given their numbers of tokens, each at least 1.

        Returns:
            Three int32 arrays: where each row's pages begin, plus the end of the last row [R + 1]; the number
            of tokens in each row's last page [R]; the page ids, row after row.
        """
        counts = -(-lengths // self._page_size)
        page_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        pages = [self._table[row, :count] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        return page_start, (lengths - (counts - 1) * self._page_size).astype(np.int32), np.concatenate(pages)


class Stager:
    """Copies packed int32 arrays to the device through a ring of pinned host buffers.

    Args:
        num_buffers: of the ring. Each grows to twice the size of the largest copy through it.
    """

    def __init__(self, device: torch.device, num_buffers: int = STAGING_BUFFERS) -> None:
        self._device = device
        self._buffers: list[Tensor | None] = [None] * num_buffers
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def to_device(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Copy int32 arrays to the device. The returned tensors are views of one packed tensor."""
        return self.buffer(arrays)[1]

    def buffer(self, arrays: list[np.ndarray]) -> tuple[Tensor, list[Tensor]]:
        """Copy arrays to a new packed tensor, which `overwrite` can refill. Returns it and its views."""
        packed = _packed(arrays)
        tensor = torch.empty(len(packed), dtype=torch.int32, device=self._device)
        self._copy(packed, tensor)
        return tensor, _views(tensor, arrays)

    def overwrite(self, packed: Tensor, arrays: list[np.ndarray]) -> None:
        """Refill a `buffer` with arrays of the same lengths, after the work queued on the device."""
        self._copy(_packed(arrays), packed)

    def _copy(self, packed: np.ndarray, target: Tensor) -> None:
        if self._device.type == "cpu":
            target.copy_(torch.from_numpy(packed))
            return
        total = len(packed)
        buffer = self._buffers[self._next]
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        if buffer is None or buffer.numel() < total:
            buffer = torch.empty(max(total, 1024) * 2, dtype=torch.int32, pin_memory=True)
            self._buffers[self._next] = buffer
        buffer.numpy()[:total] = packed
        target.copy_(buffer[:total], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copied[self._next] = event
        self._next = (self._next + 1) % len(self._buffers)


def row_ids_to_device(device: torch.device, rows: Sequence[int]) -> Tensor:
    """Copy row ids to the device, int32 [R], without waiting for the work queued there."""
    staged = torch.tensor(rows, dtype=torch.int32, pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)


def _packed(arrays: list[np.ndarray]) -> np.ndarray:
    """Join the arrays to one, each aligned."""
    starts = _starts(arrays)
    packed = np.zeros(starts[-1], dtype=np.int32)
    for array, start in zip(arrays, starts, strict=False):
        packed[start : start + len(array)] = array
    return packed


def _views(packed: Tensor, arrays: list[np.ndarray]) -> list[Tensor]:
    """The views of a packed tensor that correspond to `arrays`."""
    return [packed[start : start + len(a)] for a, start in zip(arrays, _starts(arrays), strict=False)]


def _starts(arrays: list[np.ndarray]) -> list[int]:
    """The aligned start of each array, and the aligned end of the last one."""
    return [0, *np.cumsum([align_up(len(array)) for array in arrays]).tolist()]


def prefill_size(chunks: tuple[Chunk, ...], num_decodes: int = 0) -> PrefillBucket:
    """The size of a prefill of these chunks and decodes, without padding."""
    num_tokens = sum(chunk.num_new_tokens for chunk in chunks)
    return PrefillBucket(num_tokens + num_decodes, len(chunks), num_decodes)


def build_prefill(
    chunks: tuple[Chunk, ...], pages: HostPageTable, stager: Stager, decodes: Decodes = NO_DECODES
) -> PrefillBatch:
    """Build one batch of the decodes, then the chunks. It has only the padding that alignment needs."""
    size = prefill_size(chunks, len(decodes.rows))
    room = align_up(size.decodes)
    size = PrefillBucket(max(size.tokens, room), size.rows, room)
    tensors = stager.to_device(pack_prefill(chunks, decodes, pages, size))
    longest = max(chunk.num_new_tokens for chunk in chunks)
    num_keys = sum(chunk.num_computed_tokens + chunk.num_new_tokens for chunk in chunks)
    return PrefillBatch(*tensors, max_query_len=longest, num_decodes=room, num_keys=num_keys)


def pack_prefill(
    chunks: tuple[Chunk, ...], decodes: Decodes, pages: HostPageTable, size: PrefillBucket
) -> list[np.ndarray]:
    """The int32 arrays of a `PrefillBatch`, in the order of its fields, padded to `size`."""
    num_rows = size.decodes + size.rows
    token_ids, positions = np.zeros((2, size.tokens), dtype=np.int32)
    stride = align_up(size.tokens)  # between the slots of two groups
    num_slots = size.tokens if pages.num_groups == 1 else pages.num_groups * stride
    slots = np.full(num_slots, -1, dtype=np.int32)
    row_ids = np.full(num_rows, pages.padding_row, dtype=np.int32)
    context_len = np.zeros(num_rows, dtype=np.int32)
    # Padding rows repeat the last real token, whose logits are wanted anyway: no other token reaches experts.
    num_tokens = len(decodes.rows) + sum(chunk.num_new_tokens for chunk in chunks)
    logit_index = np.full(num_rows, max(num_tokens - 1, 0), dtype=np.int32)
    row_start = np.empty(size.rows + 1, dtype=np.int32)
    end = row_start[0] = len(decodes.rows)
    positions[:end] = decodes.lengths - 1
    row_ids[:end], context_len[:end] = decodes
    logit_index[:end] = np.arange(end)
    # All chunks at once: a call with many choices has as many chunks, most of them short.
    fields = [(chunk.row, chunk.num_computed_tokens, chunk.num_new_tokens) for chunk in chunks]
    rows, starts, counts = np.array(fields, dtype=np.int32).reshape(-1, 3).T
    new, own = slice(end, num_tokens), slice(size.decodes, size.decodes + len(chunks))
    token_ids[new] = np.frombuffer(b"".join([chunk.token_ids for chunk in chunks]), dtype="<i4")
    positions[new] = _runs(starts, counts)
    rows_of_tokens = np.concatenate([decodes.rows, np.repeat(rows, counts)])
    for group in range(pages.num_groups):
        own_slots = slice(group * stride, group * stride + num_tokens)
        slots[own_slots] = pages.slots(rows_of_tokens, positions[:num_tokens], group)
    row_ids[own], context_len[own] = rows, starts + counts
    ends = end + np.cumsum(counts)
    row_start[1 : len(chunks) + 1], logit_index[own] = ends, ends - 1
    row_start[len(chunks) + 1 :] = num_tokens
    saves = pack_saves(chunks, row_start)
    return [token_ids, positions, slots, row_ids, context_len, row_start, logit_index, *saves]


def pack_saves(chunks: tuple[Chunk, ...], row_start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The int32 arrays of `StateSaves`, for as many rows as `row_start` has."""
    part_start = np.repeat(row_start, 2)[1:]  # all second parts are empty
    state_slots = np.full(len(row_start) - 1, NO_SLOT, dtype=np.int32)
    for place, chunk in enumerate(chunks):
        if chunk.snapshot is not None:
            num_before, state_slots[place] = chunk.snapshot
            part_start[2 * place + 1] = row_start[place] + num_before
    return part_start, state_slots


def _runs(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """For each i, `count[i]` consecutive numbers from `first[i]` on; int32 [sum of the counts]."""
    before = np.cumsum(count) - count
    return np.arange(count.sum(), dtype=np.int32) + np.repeat((first - before).astype(np.int32), count)


def pack_row_inits(inits: tuple[RowInit, ...]) -> list[np.ndarray]:
    """Arrays int32 [N] of row, temperature, top_k, top_p, min_p (floats as bits), and seed bits [2 * N]."""
    floats = np.array([(init.temperature, init.top_p, init.min_p) for init in inits], dtype=np.float32)
    temperature, top_p, min_p = floats.T.copy().view(np.int32)
    seed = np.array([init.seed for init in inits], dtype="<i8").view("<i4")
    row = np.array([init.row for init in inits], dtype=np.int32)
    top_k = np.array([init.top_k for init in inits], dtype=np.int32)
    return [row, temperature, top_k, top_p, min_p, seed]
