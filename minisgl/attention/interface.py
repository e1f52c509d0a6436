"""What a step tells the attention layers: where each row's keys and values lie in the pool.

R rows, T new tokens, N of them that go on behind attention, B rows of the device tables, C max pages per row,
I pages that the rows of a batch have.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor


class AttentionInputs(NamedTuple):
    """One step's batch. Padding rows have `context_len` 0 or point to the scratch page; never NaN out.

    Row r owns the new tokens `row_start[r] : row_start[r + 1]`, the last of its `context_len[r]` keys.
    """

    page_table: Tensor  # int32 [B, C]  page ids of every row of the device tables
    row_ids: Tensor  # int32 [R]  which line of page_table each row of the batch is
    context_len: Tensor  # int32 [R]  keys each row sees, this step's included
    slot_mapping: Tensor  # int32 [T]  slot each new token's K/V goes to; -1 = padding, not written
    row_start: Tensor  # int32 [R + 1]
    max_query_len: int  # most new tokens of a row; 1 = each row has one (T == R, unless there are `decodes`)
    is_decode: bool = False  # a decode step; prompts may come token by token, too
    arrivals: Tensor | None = None  # int32, zeros: what our decode kernel counts in, and leaves as it was
    decodes: "JoinedDecodes | None" = None  # rows that decode with the prompts of a batch
    kept: Tensor | None = None  # int [N]  places of the tokens that go on behind attention; None = all

    def keep(self, x: Tensor) -> Tensor:
        """[T, ...] -> [N, ...], those that go on."""
        return x if self.kept is None else x.index_select(0, self.kept)


class JoinedDecodes(NamedTuple):
    """D rows that decode with the prompts of others: row r owns the batch's new token r, if it is no padding.

    Behind them come the prompts' tokens, from the first D on or before. For backends that plan nothing.
    """

    inputs: AttentionInputs  # as if nobody else were there
    is_real: Tensor  # bool [D]  whether a row is no padding


Attend = Callable[[Tensor, Tensor, Tensor, AttentionInputs, float, int], Tensor]
"""(q [T, H, D], k_cache [P, S, K, D], v_cache, inputs, scale, window) -> [T, H, D]; causal.

A token sees the last `window` tokens, itself included; 0 = all. What comes out for tokens that belong to
`decodes` may be anything.
"""


class BatchPages(NamedTuple):
    """A batch as the host knows it, for a backend that plans: each row has at least one page. On the host."""

    row_start: np.ndarray  # int32 [R + 1]  as in AttentionInputs
    page_start: np.ndarray  # int32 [R + 1]  row r has page_ids[page_start[r] : page_start[r + 1]]
    last_page_len: np.ndarray  # int32 [R]  keys in a row's last page
    page_ids: np.ndarray  # int32 [I]


PlanBatch = Callable[[BatchPages], None]
"""Called before each run of a batch, replays of a recorded one included, and before it is recorded. It waits
for no step that was launched."""


class Backend(NamedTuple):
    """Attention of an engine: how it is computed, and what the host has to say of a batch before."""

    attend: Attend
    plan_prefill: PlanBatch | None = None
    plan_decode: PlanBatch | None = None
    num_bytes: int = 0  # of the device's memory that it holds


class Pair(NamedTuple):
    """An `Attend` of two: one for prompts and one for decode steps."""

    prefill: Attend
    decode: Attend
    decodes_by_kernels: bool = False
    """decode is by our kernels: a step that would call it may begin at qkv (`rope_paged_decode`)."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        inputs: AttentionInputs,
        scale: float,
        window: int = 0,
    ) -> Tensor:
        """As the one whose turn it is."""
        attend = self.decode if inputs.is_decode else self.prefill
        return attend(q, k_cache, v_cache, inputs, scale, window)


def pair(prefill: Backend, decode: Backend) -> Backend:
    """One backend for prompts and one for decode steps."""
    attend = Pair(prefill.attend, decode.attend, decodes_by_kernels(decode.attend))
    return Backend(attend, prefill.plan_prefill, decode.plan_decode)


def decodes_by_kernels(attend: Attend) -> bool:
    """Whether decode steps attend by our kernels."""
    return isinstance(attend, Pair) and attend.decodes_by_kernels
