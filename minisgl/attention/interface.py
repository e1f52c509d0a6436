"""The arguments of attention: where each row's keys and values lie in the pool.

R rows, T new tokens, N of them that leave the attention layer, B rows of the device tables, C most pages of a
row, I pages of all rows of a batch.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor


class AttentionInputs(NamedTuple):
    """The batch of one step.

    Row r owns the new tokens `row_start[r] : row_start[r + 1]`, the last of its `context_len[r]` keys.
    Padding rows have `context_len` 0 or the scratch page; their outputs are not NaN.
    """

    page_table: Tensor  # int32 [B, C]  page ids of each row of the device tables
    row_ids: Tensor  # int32 [R]  the line of page_table of each row of the batch
    context_len: Tensor  # int32 [R]  keys each row sees, this step's included
    slot_mapping: Tensor  # int32 [T]  slot of each new token's K/V; -1 = padding, not stored
    row_start: Tensor  # int32 [R + 1]
    max_query_len: int  # most new tokens of a row; with 1 each row has one (T == R without `decodes`)
    is_decode: bool = False  # False for prompts, even if they are fed token by token
    arrivals: Tensor | None = None  # int32 zeros: counters of our decode kernel, which resets them
    decodes: "JoinedDecodes | None" = None  # rows that decode in the same batch as prompts
    output_index: Tensor | None = None  # int [N]  new tokens that leave the attention layer; None = all
    layer_input: Tensor | None = None  # [T, E]  what the layer gets of each token beside the stream (Gemma 4)
    rows: "tuple[RowKeys, ...] | None" = None  # on a CPU, the rows that have keys; None = not looked up yet
    groups: "tuple[AttentionInputs, ...]" = ()  # this batch for each group of layers; empty = there is one
    num_keys: int = 0  # of all rows, as the host knows it; 0 = it does not
    few_keys: "FewKeys | None" = None  # on a CPU, all keys of a decode step of several rows, if they are few
    state_saves: "StateSaves | None" = None  # states in the middle of rows to keep, in linear attention

    def of_group(self, group: int) -> "AttentionInputs":
        """The batch in the pages of a group of layers."""
        return self.groups[group] if self.groups else self

    def select_outputs(self, x: Tensor) -> Tensor:
        """[T, ...] -> [N, ...]: the tokens that leave the attention layer."""
        return x if self.output_index is None else x.index_select(0, self.output_index)


def in_groups(groups: "list[AttentionInputs]") -> AttentionInputs:
    """One batch for all groups of layers, from the batch in the pages of each."""
    return groups[0] if len(groups) == 1 else groups[0]._replace(groups=tuple(groups))


class StateSaves(NamedTuple):
    """Snapshots that a prefill takes of rows' states; see `triton_kernels.gated_delta.DeltaSaves`."""

    part_start: Tensor  # int32 [2R + 1]  row r's new tokens up to its snapshot, and those behind it
    slots: Tensor  # int32 [R]  of the snapshots; -1 = none


class RowKeys(NamedTuple):
    """A row of a CPU's batch, in numbers that the host can read."""

    begin: int  # it owns the new tokens begin : end
    end: int
    length: int  # keys it sees
    slots: Tensor  # int64 [length]  where these lie in the pool
    run: slice | None  # the same, if it is a run of slots


class FewKeys(NamedTuple):
    """The keys of R rows, padded to the L of the longest one."""

    slots: Tensor  # int64 [R * L]  where they lie in the pool; padding repeats a row's first key
    is_real: Tensor  # bool [R, 1, 1, L]


class JoinedDecodes(NamedTuple):
    """D rows that decode in the same batch as prompts. Row r owns the new token r unless it is padding.

    The prompts' tokens follow and may overlap the padding. Only for backends that plan nothing.
    """

    inputs: AttentionInputs  # of the decoding rows alone
    is_real: Tensor  # bool [D]  False = padding


class Attend(Protocol):
    """Causal attention over the pool: a token sees the last `window` tokens, itself included; 0 = all."""

    def __call__(
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
        """q [T, H, D] over k_cache and v_cache [P, S, K, D] -> [T, H, D], undefined for tokens of `decodes`.

        Args:
            softcap: if above 0, scores become softcap * tanh(scores / softcap).
            kv_scales: float32 [2], of keys and values; only for a pool of FP8, which must have them.
            sinks: float32 [H]: a score of each head that takes its share of the softmax and has no value.
        """
        ...


class BatchPages(NamedTuple):
    """The host's copy of a batch, for backends that plan on the host. Each row has at least one page."""

    row_start: np.ndarray  # int32 [R + 1]  as in AttentionInputs
    page_start: np.ndarray  # int32 [R + 1]  row r has page_ids[page_start[r] : page_start[r + 1]]
    last_page_len: np.ndarray  # int32 [R]  keys in a row's last page
    page_ids: np.ndarray  # int32 [I]


PlanBatch = Callable[[BatchPages], None]
"""Called before each run of a batch, including CUDA graph replays, and before its recording. It does not wait
for launched steps."""


class Backend(NamedTuple):
    """An attention backend: the function that computes it, and its planning on the host."""

    attend: Attend
    plan_prefill: PlanBatch | None = None
    plan_decode: PlanBatch | None = None
    num_bytes: int = 0  # device memory that it holds


class PrefillDecodePair(NamedTuple):
    """An `Attend` that uses one backend for prompts and another one for decode steps."""

    prefill: Attend
    decode: Attend
    decodes_with_triton: bool = False
    """`decode` is our Triton kernel, so the fused op `rope_paged_decode` may replace it."""

    def __call__(
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
        """Call `decode` in decode steps, else `prefill`."""
        attend = self.decode if inputs.is_decode else self.prefill
        more = {} if sinks is None else {"sinks": sinks}
        return attend(q, k_cache, v_cache, inputs, scale, window, softcap, kv_scales, **more)


def pair_backends(prefill: Backend, decode: Backend) -> Backend:
    """Combine a backend for prompts and one for decode steps."""
    attend = PrefillDecodePair(prefill.attend, decode.attend, decodes_with_triton(decode.attend))
    return Backend(attend, prefill.plan_prefill, decode.plan_decode)


def decodes_with_triton(attend: Attend) -> bool:
    """Whether decode steps use our Triton kernel."""
    return isinstance(attend, PrefillDecodePair) and attend.decodes_with_triton
