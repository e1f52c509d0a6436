"""The scheduler's decision for one step: immutable, plain numbers, the same for every rank.

Vocabulary: a row is a request's place in the engine's device tables, a page is `page_size`
consecutive token places of the pool, a slot is one token's place.
"""

from typing import NamedTuple

import numpy as np

SCRATCH_PAGE = 0
"""Page 0 of the pool belongs to nobody: padding rows and unset page-table entries point to it."""


class LogitRules(NamedTuple):
    """What stands between a row's logits and the sampler (`SamplingParams` has the meanings), and the tokens
    that it depends on."""

    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]  # () = all
    bad_words_ids: tuple[tuple[int, ...], ...]
    stop_ids: tuple[int, ...]  # not to be sampled while prompt and output have less than min_len tokens
    min_len: int
    prompt: bytes  # little-endian int32
    output: bytes  # little-endian int32; there is some after a preemption


class RowInit(NamedTuple):
    """A row that changes hands: sampling state to write before this step runs."""

    row: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    seed: int  # signed 64-bit; with the position it determines the random number
    rules: LogitRules | None = None


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
    targets: bytes = b""  # little-endian int32: the log probability of targets[i] behind token i is wanted

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) // 4


class Extras(NamedTuple):
    """What a step does besides sampling from the logits as they are: for most steps nothing."""

    rules: bool = False  # some of its rows have `LogitRules`
    logprobs: bool = False  # some want the log probabilities of their new tokens


PLAIN = Extras()


class StepPlan(NamedTuple):
    """One step. Results come back as one token id per entry of `sampled_rows`, in that order."""

    step_id: int
    row_inits: tuple[RowInit, ...]
    page_updates: tuple[PageUpdate, ...]
    decode_rows: tuple[int, ...]  # each feeds its last token, which lies on the device
    chunks: tuple[Chunk, ...]
    sampled_rows: tuple[int, ...]  # decode_rows, then the rows of the chunks that sample
    decode_extras: Extras = PLAIN
    chunk_extras: Extras = PLAIN  # of the chunks that sample
    decode_lengths: tuple[int, ...] = ()  # where there are chunks: the decode rows' tokens after this step

    @property
    def num_new_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.num_new_tokens for chunk in self.chunks)


class StepResult(NamedTuple):
    """What a step gave. For the lines of log probabilities see `scheduler.logprobs`."""

    token_ids: list[int]  # one per entry of sampled_rows
    logprobs: np.ndarray | None = None  # int32 [sampled rows, 2 + 2 * k], where the plan asked for them
    prompt_logprobs: tuple[np.ndarray, ...] = ()
    """int32 [targets, 2 + 2 * k] of each chunk; empty if none has targets."""
