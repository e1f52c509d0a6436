"""Penalties, biases and bans of logits before sampling, and the tokens that they count.

For row b = row_ids[r] of the tables with has_rules[b], l = its logits in float32, c[t] = how often its output
has token t so far (the low bits of marks[b, t]). The order is:

    repetition  l[t] / p where l[t] > 0, else l[t] * p, of tokens in prompt or output (Keskar et al. 2019)
    frequency   l[t] - f * c[t]
    presence    l[t] - q where c[t] > 0
    bias        l[t] + b[t]
    bans        -inf: tokens that are not allowed, that would end the output before it has min_len tokens, or
                that would complete a bad word

The result is rounded to the logits' own precision. A row without rules gets its logits back bit by bit.

R rows of the batch, B rows of the tables, V vocabulary, K biases, W bad words of up to P + 1 tokens.

Cost: R*V logits read and written, 4*V bytes of marks read for each row with rules: memory-bound. The rules'
own numbers are read once for each block of the vocabulary, and come from L2.
"""

# A kernel launch looks like a call, but it takes options that the kernel does not declare, and plain numbers
# for its constexpr parameters.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.launch import ceil_div, next_power_of_2

COUNT_MASK = (1 << 24) - 1
"""The low bits of a mark count the token in the output. The high bits are the flags below."""
IN_PROMPT = 1 << 24
ENDS = 1 << 25
BANNED = 1 << 26

_COUNT_MASK = tl.constexpr(COUNT_MASK)
_SEEN_MASK = tl.constexpr(COUNT_MASK | IN_PROMPT)
_ENDS = tl.constexpr(ENDS)
_BANNED = tl.constexpr(BANNED)

_MOST_BLOCK_V = 4096
_SLICE_ROWS = 64
"""Rows that the reference processes at a time, which bounds the memory of its float32 copies."""


class RuleTables(NamedTuple):
    """The rules of each row, contiguous. Rows without rules hold any numbers, but no token ids from V up."""

    has_rules: Tensor  # bool [B]
    min_len: Tensor  # int32 [B]  least tokens of prompt and output before the output may end
    repetition: Tensor  # float32 [B]
    frequency: Tensor  # float32 [B]
    presence: Tensor  # float32 [B]
    bias_ids: Tensor  # int32 [B, K]  a token has one bias at most; unused entries give token 0 a bias of 0
    bias: Tensor  # float32 [B, K]
    bad_words: Tensor  # int32 [B, W, P]  the tokens before the last one; -1 = any token
    bad_last: Tensor  # int32 [B, W]  the last token; -1 = no word
    recent: Tensor  # int32 [B, P]  the newest tokens, the last one last; -1 = none
    marks: Tensor  # int32 [B, V]


def logit_rules_reference(logits: Tensor, row_ids: Tensor, context_len: Tensor, tables: RuleTables) -> Tensor:
    """The same as logit_rules up to the sign of zeros, in plain torch."""
    slices = (part.split(_SLICE_ROWS) for part in (logits, row_ids.long(), context_len))
    return torch.cat([_rules_of_slice(*parts, tables) for parts in zip(*slices, strict=True)])


def _rules_of_slice(logits: Tensor, rows: Tensor, context_len: Tensor, tables: RuleTables) -> Tensor:
    marks = tables.marks[rows]
    counts = marks & COUNT_MASK
    x = logits.float()
    repetition = tables.repetition[rows][:, None]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where((marks & (COUNT_MASK | IN_PROMPT)) != 0, repeated, x)
    x = x - tables.frequency[rows][:, None] * counts
    x = x - tables.presence[rows][:, None] * (counts > 0)
    x = x.scatter_add(1, tables.bias_ids[rows].long(), tables.bias[rows])
    too_early = (context_len < tables.min_len[rows])[:, None] & ((marks & ENDS) != 0)
    x = x.masked_fill(((marks & BANNED) != 0) | too_early, float("-inf"))
    words, last = tables.bad_words[rows], tables.bad_last[rows]
    begun = ((words == tables.recent[rows][:, None, :]) | (words < 0)).all(2) & (last >= 0)
    x = x.scatter_add(1, last.clamp(min=0).long(), torch.where(begun, float("-inf"), 0.0))
    return torch.where(tables.has_rules[rows][:, None], x.to(logits.dtype), logits)


@triton.jit
def _ruled(logits, marks, repetition, frequency, presence, bias, banning):
    """Logits after all rules but bad words, in float32; `banning`: the flags that ban a token now."""
    x = logits.to(tl.float32)
    counts = marks & _COUNT_MASK
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where((marks & _SEEN_MASK) != 0, repeated, x)
    # The product is exact in float64 and rounded once, as float32's is. In float32, the compiler would fuse
    # it with the subtraction, and the result would differ from torch's.
    x -= (frequency.to(tl.float64) * counts.to(tl.float64)).to(tl.float32)
    x = x - tl.where(counts > 0, presence, 0.0) + bias
    return tl.where((marks & banning) != 0, float("-inf"), x)


@triton.jit
def _logit_rules_kernel(
    logits_ptr,
    row_ids_ptr,
    context_len_ptr,
    has_rules_ptr,
    min_len_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    bias_ids_ptr,
    bias_ptr,
    bad_words_ptr,
    bad_last_ptr,
    recent_ptr,
    marks_ptr,
    out_ptr,
    V: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCK_V
    tokens = begin + tl.arange(0, BLOCK_V)
    exists = tokens < V
    logits_ptr += entry * V
    out_ptr += entry * V
    row = tl.load(row_ids_ptr + entry).to(tl.int64)
    logits = tl.load(logits_ptr + tokens, exists, other=0.0)
    if tl.load(has_rules_ptr + row) == 0:
        tl.store(out_ptr + tokens, logits, exists)
        return
    marks_ptr += row * V
    marks = tl.load(marks_ptr + tokens, exists, other=0)
    entries = tl.arange(0, BLOCK_K)
    bias_ids = tl.load(bias_ids_ptr + row * K + entries, entries < K, other=-1)
    words = tl.arange(0, BLOCK_W)
    last = tl.load(bad_last_ptr + row * W + words, words < W, other=-1)
    too_early = tl.load(context_len_ptr + entry) < tl.load(min_len_ptr + row)
    banning = _BANNED | tl.where(too_early, _ENDS, 0)
    repetition = tl.load(repetition_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    presence = tl.load(presence_ptr + row)
    x = _ruled(logits, marks, repetition, frequency, presence, -0.0, banning)
    tl.store(out_ptr + tokens, x.to(logits.dtype), exists)

    # The few tokens with a bias are computed once more, then those of bad words. Barriers keep the stores of
    # one token, by different threads, in order.
    biased = (bias_ids >= begin) & (bias_ids < begin + BLOCK_V)
    bias = tl.load(bias_ptr + row * K + entries, biased, other=0.0)
    biased &= bias != 0
    if tl.max(biased.to(tl.int32), 0) > 0:
        marks_b = tl.load(marks_ptr + bias_ids, biased, other=0)
        logits_b = tl.load(logits_ptr + bias_ids, biased, other=0.0)
        x_b = _ruled(logits_b, marks_b, repetition, frequency, presence, bias, banning)
        tl.debug_barrier()
        tl.store(out_ptr + bias_ids, x_b.to(logits.dtype), biased)
    begun = (last >= begin) & (last < begin + BLOCK_V)
    if tl.max(begun.to(tl.int32), 0) > 0:
        places = tl.arange(0, BLOCK_P)
        recent = tl.load(recent_ptr + row * P + places, places < P, other=-1)
        before = tl.load(
            bad_words_ptr + (row * W + words[:, None]) * P + places[None, :],
            begun[:, None] & (places < P)[None, :],
            other=-1,
        )
        fits = (before == recent[None, :]) | (before < 0)
        begun &= tl.min(fits.to(tl.int32), 1) > 0
        marks_w = tl.load(marks_ptr + last, begun, other=0)
        logits_w = tl.load(logits_ptr + last, begun, other=0.0)
        # A bias, which is finite, would change nothing. The sum, not -inf itself: NaN stays NaN.
        x_w = _ruled(logits_w, marks_w, repetition, frequency, presence, -0.0, banning) + float("-inf")
        tl.debug_barrier()
        tl.store(out_ptr + last, x_w.to(logits.dtype), begun)


def logit_rules_triton(logits: Tensor, row_ids: Tensor, context_len: Tensor, tables: RuleTables) -> Tensor:
    """Launch the kernel on any device."""
    num_rows, vocab_size = logits.shape
    num_biases = tables.bias.shape[1]
    _, num_words, num_before = tables.bad_words.shape
    block_v = min(_MOST_BLOCK_V, next_power_of_2(vocab_size))
    out = torch.empty_like(logits)
    _logit_rules_kernel[(num_rows, ceil_div(vocab_size, block_v))](
        logits,
        row_ids,
        context_len,
        *tables,
        out,
        vocab_size,
        num_biases,
        num_words,
        num_before,
        block_v,
        next_power_of_2(num_biases),
        next_power_of_2(num_words),
        next_power_of_2(num_before),
        num_warps=8,
    )
    return out


def logit_rules(logits: Tensor, row_ids: Tensor, context_len: Tensor, tables: RuleTables) -> Tensor:
    """The logits after the rules of their rows, [R, V].

    Args:
        logits: [R, V].
        row_ids: int32 [R], each in 0..B-1. A row may occur several times (padding does).
        context_len: int32 [R], the number of tokens of each row so far.
    """
    if logits.device.type == "cpu":
        return logit_rules_reference(logits, row_ids, context_len, tables)
    return logit_rules_triton(logits.contiguous(), row_ids, context_len, tables)


def count_tokens_reference(
    row_ids: Tensor, token_ids: Tensor, counted: Tensor, recent: Tensor, marks: Tensor
) -> None:
    """The same as count_tokens, in plain torch."""
    rows = row_ids.long()
    counted = counted & (token_ids >= 0)
    flat = rows * marks.shape[1] + token_ids.clamp(min=0).long()
    marks.view(-1).scatter_add_(0, flat, counted.int())
    old = recent[rows]
    new = torch.cat([old[:, 1:], token_ids[:, None]], 1)
    recent[rows] = torch.where(counted[:, None], new, old)


@triton.jit
def _count_tokens_kernel(
    row_ids_ptr,
    token_ids_ptr,
    counted_ptr,
    recent_ptr,
    marks_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    entry = tl.program_id(0)
    token = tl.load(token_ids_ptr + entry)
    if (tl.load(counted_ptr + entry) != 0) & (token >= 0):
        row = tl.load(row_ids_ptr + entry).to(tl.int64)
        mark_ptr = marks_ptr + row * V + token
        tl.store(mark_ptr, tl.load(mark_ptr) + 1)
        places = tl.arange(0, BLOCK_P)
        moved = tl.load(recent_ptr + row * P + places + 1, places + 1 < P, other=token)
        tl.debug_barrier()  # all are read before any is overwritten
        tl.store(recent_ptr + row * P + places, moved, places < P)


def count_tokens_triton(
    row_ids: Tensor, token_ids: Tensor, counted: Tensor, recent: Tensor, marks: Tensor
) -> None:
    """Launch the kernel on any device."""
    num_before = recent.shape[1]
    _count_tokens_kernel[(row_ids.shape[0],)](
        row_ids,
        token_ids,
        counted,
        recent,
        marks,
        marks.shape[1],
        num_before,
        next_power_of_2(num_before),
        num_warps=1,
    )


def count_tokens(row_ids: Tensor, token_ids: Tensor, counted: Tensor, recent: Tensor, marks: Tensor) -> None:
    """Add the rows' new tokens to the counts in `marks` and to `recent`, tables of `RuleTables`.

    Args:
        row_ids: int32 [R], each in 0..B-1.
        token_ids: int32 [R], each below V. A negative value means no token, and is skipped.
        counted: bool [R], the rows to update. Each of them may occur once in the batch.
    """
    run = count_tokens_reference if row_ids.device.type == "cpu" else count_tokens_triton
    run(row_ids, token_ids, counted, recent, marks)
