"""Tells attention backends that plan on the host the lengths and pages of each batch before it runs.

Promise: the host knows the lengths that the device's rows will have when the batch runs, even while earlier
steps are in flight. A row grows by one token with each launched decode step, so the host reads nothing back.
If a backend plans nothing, these calls do nothing.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.attention.interface import Backend, BatchPages
from minisgl.engine.step.inputs import HostPageTable
from minisgl.scheduler.plan import Chunk


class AttentionPlanner:
    """Plans the batches of one engine, in the order in which they are launched.

    Args:
        pages: the host's page table. It must hold the pages of a batch before the batch is planned.
    """

    def __init__(self, backend: Backend, pages: HostPageTable) -> None:
        self._plan_prefill = backend.plan_prefill
        self._plan_decode = backend.plan_decode
        self._pages = pages
        self._lengths = np.zeros(pages.padding_row + 1, dtype=np.int32)  # tokens in the pool

    def plan_decode(self, rows: Sequence[int], num_rows: int) -> None:
        """Plan a decode batch: one more token for each of `rows`, padded to `num_rows` rows."""
        if self._plan_decode is None:
            return
        ids = np.full(num_rows, self._pages.padding_row, dtype=np.int32)
        ids[: len(rows)] = rows
        self._lengths[ids[: len(rows)]] += 1
        lengths = np.maximum(self._lengths[ids], 1)  # a padding row has its scratch page
        self._plan_decode(
            BatchPages(np.arange(num_rows + 1, dtype=np.int32), *self._pages.pages_of(ids, lengths))
        )

    def plan_prefill(self, chunks: tuple[Chunk, ...]) -> None:
        """Plan a batch of prompt chunks. Each row's length becomes the end of its chunk."""
        if self._plan_decode is None and self._plan_prefill is None:
            return
        ids = np.array([chunk.row for chunk in chunks], dtype=np.int32)
        new_tokens = np.array([chunk.num_new_tokens for chunk in chunks], dtype=np.int32)
        lengths = new_tokens + np.array([chunk.num_computed_tokens for chunk in chunks], dtype=np.int32)
        self._lengths[ids] = lengths
        self._plan_prompts(ids, new_tokens, lengths)

    def plan_padding_prefill(self, num_rows: int, row_tokens: int) -> None:
        """Plan a batch of `num_rows` padding rows with `row_tokens` tokens each, for dry runs."""
        ids = np.full(num_rows, self._pages.padding_row, dtype=np.int32)
        tokens = np.full(num_rows, row_tokens, dtype=np.int32)
        self._plan_prompts(ids, tokens, tokens)

    def _plan_prompts(self, ids: np.ndarray, new_tokens: np.ndarray, lengths: np.ndarray) -> None:
        if self._plan_prefill is not None:
            row_start = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
            self._plan_prefill(BatchPages(row_start, *self._pages.pages_of(ids, lengths)))
