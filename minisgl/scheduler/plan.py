"""A step plan: the scheduler's decision for one step. Immutable, plain numbers, the same for every rank.

Vocabulary: a row is a request's place in the engine's device tables, a page is `page_size` consecutive token
places of the pool, a slot is one token's place.
"""

from typing import NamedTuple

import numpy as np

RULES_BASE_COST_TOKENS = 512
"""Fixed part of the cost of writing a request's rules, in tokens."""

NO_LOGITS = -1
"""Replaces a token id when the model gave the row no logit above minus infinity (NaN does not count)."""
NONE_ALLOWED = -2
"""Replaces a token id when the row's `LogitRules` and mask ban every token that the model allows."""


class LogitRules(NamedTuple):
    """Changes to a row's logits before sampling, and the tokens that they depend on.

    `SamplingParams` explains each field. Bytes are little-endian int32; those of `bias` are float32.
    """

    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    bias_ids: bytes
    bias: bytes
    allowed_token_ids: bytes  # empty = all
    bad_words_ids: tuple[tuple[int, ...], ...]
    stop_ids: bytes  # banned while prompt and output together have fewer than min_len tokens
    min_len: int
    prompt: bytes  # only its end, if nothing but bad words depends on it
    output: bytes = b""  # not empty after a preemption
    logprob_token_ids: bytes = b""  # not a rule: whose log probabilities are returned; empty = the likeliest

    @property
    def cost_tokens(self) -> int:
        """Cost of writing the rules, in tokens of a packed list (an estimate from a rough measurement)."""
        parts = (self.bias_ids, self.allowed_token_ids, self.stop_ids, self.prompt, self.output)
        return RULES_BASE_COST_TOKENS + sum(map(len, parts)) // 4 + 2 * sum(map(len, self.bad_words_ids))


class RowInit(NamedTuple):
    """Sampling state of a row that gets a new request, written before this step runs."""

    row: int
    temperature: float
    top_k: int  # 0 = off
    top_p: float
    min_p: float
    seed: int  # signed 64-bit; seed and position determine the random number


class RowRules(NamedTuple):
    """Rules of rows that get a new request. A new request's row that is not listed has no rules."""

    rows: tuple[int, ...]
    rules: LogitRules


class PageUpdate(NamedTuple):
    """Entries of one row's page table, written before this step runs."""

    row: int
    first_index: int
    page_ids: bytes  # little-endian int32
    group: int = 0  # of layers; each has page tables of its own


class StateCopies(NamedTuple):
    """Copies of linear attention's states before the step: all saves, then all loads."""

    saves: tuple[tuple[int, int], ...] = ()  # row, slot of a snapshot
    loads: tuple[tuple[int, int], ...] = ()  # slot of a snapshot, row


class Chunk(NamedTuple):
    """The part of one row's prompt that this step computes."""

    row: int
    num_computed_tokens: int  # already in the pool: the position of the first new token
    token_ids: bytes  # little-endian int32
    samples: bool  # the prompt ends here, so the step also samples this row's next token
    targets: bytes = b""  # little-endian int32: return the log probability of targets[i] after token i
    snapshot: tuple[int, int] | None = None  # n, slot: the step keeps the state behind the first n tokens

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids) // 4


class LogitExtras(NamedTuple):
    """Work that a step does besides sampling from unchanged logits. Most steps have none."""

    rules: bool = False  # some rows have `LogitRules`
    logprobs: bool = False  # some rows return the log probabilities of their new tokens
    masks: bool = False  # some rows' tokens must be allowed by a mask, so sampling waits for `TokenMasks`


PLAIN = LogitExtras()


class StepPlan(NamedTuple):
    """One step. Its result has one token id per entry of `sampled_rows`, in that order."""

    step_id: int
    row_inits: tuple[RowInit, ...]
    page_updates: tuple[PageUpdate, ...]
    decode_rows: tuple[int, ...]  # each row feeds its last token, which the device holds
    chunks: tuple[Chunk, ...]
    sampled_rows: tuple[int, ...]  # decode_rows, then the rows of the chunks that sample
    decode_extras: LogitExtras = PLAIN
    chunk_extras: LogitExtras = PLAIN  # of the chunks that sample
    decode_lengths: tuple[int, ...] = ()  # only with chunks: each decode row's tokens after this step
    row_rules: tuple[RowRules, ...] = ()  # for rows of row_inits; each LogitRules appears once
    masked: tuple[int, ...] = ()  # places in sampled_rows of the rows that need a mask
    state_copies: StateCopies = StateCopies()

    @property
    def num_new_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.num_new_tokens for chunk in self.chunks)


class TokenMasks(NamedTuple):
    """The masks of a step, which are known once all earlier steps are applied. One for each of `masked`."""

    step_id: int
    num_words: int
    """Words of one mask: one bit for each token of the vocabulary."""
    words: bytes
    """Little-endian int32 [masked, num_words]; bit t % 32 of word t // 32 is 1 if token t is allowed."""


class StepResult(NamedTuple):
    """A step's results. `scheduler.logprobs` describes the lines of log probabilities."""

    token_ids: list[int]  # one per entry of sampled_rows; NO_LOGITS or NONE_ALLOWED if no token was chosen
    logprobs: np.ndarray | None = None  # int32 [sampled rows, 2 + 2 * k], if the plan asked for them
    prompt_logprobs: tuple[np.ndarray, ...] = ()
    """int32 [targets, 2 + 2 * k] for each chunk; empty if no chunk has targets."""
