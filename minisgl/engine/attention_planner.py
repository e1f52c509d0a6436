"""What attention backends that plan on the host are told of each batch before it runs.

Promise: the host's lengths are those that the device's rows will have when the batch runs, whatever is in
flight: a row grows by one with each decode step that was launched, so nothing has to be read back. A backend
that plans nothing costs nothing here.
"""

from collections.abc import Sequence

import numpy as np

from minisgl.attention.interface import Backend, BatchPages
from minisgl.engine.inputs import HostPageTable
from minisgl.scheduler.plan import Chunk


class AttentionPlans:
    """Plans the batches of one engine, in the order in which they are launched.

    Args:
        pages: the host's page table, which has the pages of a batch before it is planned.
    """

    def __init__(self, backend: Backend, pages: HostPageTable) -> None:
        self._plan_prefill = backend.plan_prefill
        self._plan_decode = backend.plan_decode
        self._pages = pages
        self._lengths = np.zeros(pages.padding_row + 1, dtype=np.int32)  # tokens in the pool

    def decode(self, rows: Sequence[int], num_rows: int) -> None:
        """One more token for each of `rows`, in a batch that is padded to `num_rows`."""
        if self._plan_decode is None:
            return
        ids = np.full(num_rows, self._pages.padding_row, dtype=np.int32)
        ids[: len(rows)] = rows
        self._lengths[ids[: len(rows)]] += 1
        lengths = np.maximum(self._lengths[ids], 1)  # padding has its scratch page
        self._plan_decode(
            BatchPages(np.arange(num_rows + 1, dtype=np.int32), *self._pages.pages_of(ids, lengths))
        )

    def prefill(self, chunks: tuple[Chunk, ...]) -> None:
        """Chunks of prompts, whose rows are as long as their chunks end afterwards."""
        if self._plan_decode is None and self._plan_prefill is None:
            return
        ids = np.array([chunk.row for chunk in chunks], dtype=np.int32)
        new_tokens = np.array([chunk.num_new_tokens for chunk in chunks], dtype=np.int32)
        lengths = new_tokens + np.array([chunk.num_computed_tokens for chunk in chunks], dtype=np.int32)
        self._lengths[ids] = lengths
        self._plan_prompts(ids, new_tokens, lengths)

    def padding_prefill(self, num_rows: int, row_tokens: int) -> None:
        """Rows of padding with so many tokens each, as runs before serving have them."""
        ids = np.full(num_rows, self._pages.padding_row, dtype=np.int32)
        tokens = np.full(num_rows, row_tokens, dtype=np.int32)
        self._plan_prompts(ids, tokens, tokens)

    def _plan_prompts(self, ids: np.ndarray, new_tokens: np.ndarray, lengths: np.ndarray) -> None:
        if self._plan_prefill is not None:
            row_start = np.concatenate([[0], np.cumsum(new_tokens)]).astype(np.int32)
            self._plan_prefill(BatchPages(row_start, *self._pages.pages_of(ids, lengths)))
