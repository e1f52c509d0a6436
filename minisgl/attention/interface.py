"""What a step tells the attention layers: where each row's keys and values lie in the pool.

R rows, T new tokens, B rows of the device tables, C max pages per row.
"""

from collections.abc import Callable
from typing import NamedTuple

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
    max_query_len: int  # most new tokens of a row; 1 = every row is a decode (T == R)


Attend = Callable[[Tensor, Tensor, Tensor, AttentionInputs, float, int], Tensor]
"""A backend: (q [T, H, D], k_cache [P, S, K, D], v_cache, inputs, scale, window) -> [T, H, D]; causal.

A token sees the last `window` tokens, itself included; 0 = all.
"""
