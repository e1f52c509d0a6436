"""The scheduler's decision for one step: immutable, plain numbers, the same for every rank.

Vocabulary: a row is a request's place in the engine's device tables, a page is `page_size`
consecutive token places of the pool, a slot is one token's place.
"""

from typing import NamedTuple

SCRATCH_PAGE = 0
"""Page 0 of the pool belongs to nobody: padding rows and unset page-table entries point to it."""


class RowInit(NamedTuple):
    """A row that changes hands: sampling state to write before this step runs."""

    row: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    seed: int  # signed 64-bit; with the position it determines the random number


class PageUpdate(NamedTuple):
    """Entries of one row's page table to overwrite before this step runs."""

    row: int
    first_index: int
    page_ids: tuple[int, ...]


class Chunk(NamedTuple):
    """The part of one row's prompt that is fed in this step."""

    row: int
    num_computed_tokens: int  # already in the pool: the position of the first new token
    token_ids: bytes  # little-endian int32
    samples: bool  # the prompt ends here: the step yields this row's next token

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) // 4


class StepPlan(NamedTuple):
    """One step. Results come back as one token id per entry of `sampled_rows`, in that order."""

    step_id: int
    row_inits: tuple[RowInit, ...]
    page_updates: tuple[PageUpdate, ...]
    decode_rows: tuple[int, ...]  # each feeds its last token, which lies on the device
    chunks: tuple[Chunk, ...]
    sampled_rows: tuple[int, ...]  # decode_rows, then the rows of the chunks that sample

    @property
    def num_new_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.num_new_tokens for chunk in self.chunks)
