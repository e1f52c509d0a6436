"""What some requests ask for between the model's logits and the sampler, and of the log probabilities.

Promise: a row that asks for nothing gets its logits back bit by bit, so that its tokens do not depend on the
company; and a row that does has its state on the device, advanced by the step itself. The tables are large
(one entry per row and token of the vocabulary) and are made when the first such request comes.

For one row, l = its logits in float32, c[t] = how often the output has token t so far, in this order:

    repetition  l[t] / r where l[t] > 0, else l[t] * r, of tokens in prompt or output (Keskar et al. 2019)
    frequency   l[t] - f * c[t]
    presence    l[t] - p where c[t] > 0
    bias        l[t] + b[t]
    bans        -inf: tokens that are not allowed, that would end the output before it has min_tokens, or that
                would complete a bad word
then rounded to the logits' own precision.

R rows of the batch, B rows of the tables, N of them at hand, V vocabulary, K biases, W bad words of up to L
tokens, k top tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from minisgl.scheduler.plan import LogitRules, RowInit

COUNT_MASK = (1 << 24) - 1
"""The low bits of a mark count the token in the output; the others say what else is known of it."""
IN_PROMPT = 1 << 24
ENDS = 1 << 25
BANNED = 1 << 26

SLICE_ROWS = 64
"""Rows that are worked on at a time: bounds the float32 copies of the logits."""


class StagedRules(NamedTuple):
    """The rules of N rows as packed arrays, all int32 (floats as bits)."""

    plain_rows: np.ndarray  # [rows that change hands and have no rules]
    row: np.ndarray  # [N]
    min_len: np.ndarray  # [N]
    repetition: np.ndarray  # [N]
    frequency: np.ndarray  # [N]
    presence: np.ndarray  # [N]
    bias_ids: np.ndarray  # [N * K]
    bias: np.ndarray  # [N * K]
    bad_words: np.ndarray  # [N * W * (L - 1)]
    bad_last: np.ndarray  # [N * W]
    recent: np.ndarray  # [N * (L - 1)]
    mark_base: np.ndarray  # [N]  of all tokens but those that are named
    mark_at: np.ndarray  # [named tokens]  places in the flattened table, which has fewer than 2**31
    mark: np.ndarray  # [named tokens]


def pack_rules(inits: tuple[RowInit, ...], vocab_size: int) -> StagedRules:
    """What `LogitTables.init_rows` takes, of the rows that change hands."""
    ruled = [(init.row, init.rules) for init in inits if init.rules is not None]
    num = len(ruled)
    floats = np.zeros((3, num), dtype=np.float32)
    min_len = np.zeros(num, dtype=np.int32)
    bias_ids = np.zeros((num, MAX_LOGIT_BIAS), dtype=np.int32)
    bias = np.zeros((num, MAX_LOGIT_BIAS), dtype=np.float32)
    bad_words = np.full((num, MAX_BAD_WORDS_IDS, MAX_BAD_WORD_TOKENS - 1), -1, dtype=np.int32)
    bad_last = np.full((num, MAX_BAD_WORDS_IDS), -1, dtype=np.int32)
    recent = np.full((num, MAX_BAD_WORD_TOKENS - 1), -1, dtype=np.int32)
    mark_base = np.zeros(num, dtype=np.int32)
    mark_at: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    mark: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    for place, (row, rules) in enumerate(ruled):
        floats[:, place] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
        min_len[place] = rules.min_len
        if rules.logit_bias:
            bias_ids[place, : len(rules.logit_bias)] = [token_id for token_id, _ in rules.logit_bias]
            bias[place, : len(rules.logit_bias)] = [value for _, value in rules.logit_bias]
        for word, ids in enumerate(rules.bad_words_ids):
            *before, bad_last[place, word] = ids
            if before:
                bad_words[place, word, -len(before) :] = before
        prompt, output = np.frombuffer(rules.prompt, "<i4"), np.frombuffer(rules.output, "<i4")
        last = np.concatenate([prompt[-recent.shape[1] :], output])[-recent.shape[1] :]
        recent[place, recent.shape[1] - len(last) :] = last
        mark_base[place] = BANNED if rules.allowed_token_ids else 0
        marks = _marks(rules, prompt, output, vocab_size)
        named = np.flatnonzero(marks != mark_base[place])
        mark_at.append((row * vocab_size + named).astype(np.int32))
        mark.append(marks[named])
    repetition, frequency, presence = floats.view(np.int32)
    return StagedRules(
        plain_rows=np.array([init.row for init in inits if init.rules is None], dtype=np.int32),
        row=np.array([row for row, _ in ruled], dtype=np.int32),
        min_len=min_len,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        bias_ids=bias_ids.ravel(),
        bias=bias.view(np.int32).ravel(),
        bad_words=bad_words.ravel(),
        bad_last=bad_last.ravel(),
        recent=recent.ravel(),
        mark_base=mark_base,
        mark_at=np.concatenate(mark_at),
        mark=np.concatenate(mark),
    )


def _marks(rules: LogitRules, prompt: np.ndarray, output: np.ndarray, vocab_size: int) -> np.ndarray:
    """What is known of each token, int32 [V]."""
    marks = np.bincount(output, minlength=vocab_size).astype(np.int32)
    marks[prompt] |= IN_PROMPT
    if rules.allowed_token_ids:
        is_banned = np.ones(vocab_size, dtype=bool)
        is_banned[list(rules.allowed_token_ids)] = False
        marks[is_banned] |= BANNED
    ends = [token_id for token_id in rules.stop_ids if token_id < vocab_size]
    marks[ends] |= ENDS
    return marks


class LogitTables(nn.Module):
    """Persistent tables, indexed by row id; the last row belongs to nobody. Buffers: they never move."""

    has_rules: Tensor  # bool [B]
    min_len: Tensor  # int32 [B]  prompt and output together have so many tokens before the output may end
    repetition: Tensor  # float32 [B]
    frequency: Tensor  # float32 [B]
    presence: Tensor  # float32 [B]
    bias_ids: Tensor  # int32 [B, K]  token 0 gets a bias of 0 where there are fewer
    bias: Tensor  # float32 [B, K]
    bad_words: Tensor  # int32 [B, W, L - 1]  what stands before the last token; -1 = anything
    bad_last: Tensor  # int32 [B, W]  -1 = no word
    recent: Tensor  # int32 [B, L - 1]  the newest tokens, the last one last; -1 = none
    marks: Tensor  # int32 [B, V]

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        super().__init__()

        def table(name: str, dtype: torch.dtype, *shape: int) -> None:
            self.register_buffer(name, torch.zeros(max_rows + 1, *shape, dtype=dtype, device=device))

        self.max_rows = max_rows
        self.vocab_size = vocab_size
        table("has_rules", torch.bool)
        table("min_len", torch.int32)
        for name in ("repetition", "frequency", "presence"):
            table(name, torch.float32)
        table("bias_ids", torch.int32, MAX_LOGIT_BIAS)
        table("bias", torch.float32, MAX_LOGIT_BIAS)
        table("bad_words", torch.int32, MAX_BAD_WORDS_IDS, MAX_BAD_WORD_TOKENS - 1)
        table("bad_last", torch.int32, MAX_BAD_WORDS_IDS)
        table("recent", torch.int32, MAX_BAD_WORD_TOKENS - 1)
        table("marks", torch.int32, vocab_size)

    def init_rows(self, staged: list[Tensor]) -> None:
        """Write the rules of rows that change hands: `pack_rules`, on the device."""
        parts = dict(zip(StagedRules._fields, staged, strict=True))
        # Not by assignment: on CUDA that copies the single value from the host and waits for the copy.
        self.has_rules.index_fill_(0, parts.pop("plain_rows").long(), False)
        row = parts.pop("row")
        if not row.numel():
            return
        self.has_rules.index_fill_(0, row.long(), True)
        self.marks[row] = parts.pop("mark_base")[:, None].expand(-1, self.vocab_size)
        self.marks.view(-1)[parts.pop("mark_at")] = parts.pop("mark")
        for name, part in parts.items():
            target: Tensor = getattr(self, name)
            target[row] = part.view(target.dtype).view(row.numel(), *target.shape[1:])

    def ruled(self, logits: Tensor, row_ids: Tensor, context_len: Tensor) -> Tensor:
        """Logits [R, V] as the rows' rules make them; context_len: int32 [R], their tokens so far."""
        return torch.cat(
            [
                self._ruled(*parts)
                for parts in zip(
                    logits.split(SLICE_ROWS),
                    row_ids.long().split(SLICE_ROWS),
                    context_len.split(SLICE_ROWS),
                    strict=True,
                )
            ]
        )

    def _ruled(self, logits: Tensor, rows: Tensor, context_len: Tensor) -> Tensor:
        marks = self.marks[rows]
        counts = marks & COUNT_MASK
        x = logits.float()
        repetition = self.repetition[rows][:, None]
        repeated = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where((marks & (COUNT_MASK | IN_PROMPT)) != 0, repeated, x)
        x = x - self.frequency[rows][:, None] * counts
        x = x - self.presence[rows][:, None] * (counts > 0)
        x = x.scatter_add(1, self.bias_ids[rows].long(), self.bias[rows])
        too_early = (context_len < self.min_len[rows])[:, None] & ((marks & ENDS) != 0)
        x = x.masked_fill(((marks & BANNED) != 0) | too_early, float("-inf"))
        words, last = self.bad_words[rows], self.bad_last[rows]
        begun = ((words == self.recent[rows][:, None, :]) | (words < 0)).all(2) & (last >= 0)
        x = x.scatter_add(1, last.clamp(min=0).long(), torch.where(begun, float("-inf"), 0.0))
        return torch.where(self.has_rules[rows][:, None], x.to(logits.dtype), logits)

    def note(self, row_ids: Tensor, token_ids: Tensor, counted: Tensor) -> None:
        """Book the rows' new tokens, int32 [R], where `counted`, bool [R]; such a row comes once."""
        rows = row_ids.long()
        flat = rows * self.vocab_size + token_ids.long()
        self.marks.view(-1).scatter_add_(0, flat, counted.int())
        old = self.recent[rows]
        new = torch.cat([old[:, 1:], token_ids[:, None]], 1)
        self.recent[rows] = torch.where(counted[:, None], new, old)


def pack_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """What the model thinks of these tokens (int [N]) by these logits [N, V]: int32 [N, 2 + 2 * k].

    In each line: the token's log probability (float32 as bits), how many tokens are likelier, the ids of the
    k = min(20, V) likeliest, their log probabilities (as bits).
    """
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    packed = []
    for part, ids in zip(logits.split(SLICE_ROWS), token_ids.long().split(SLICE_ROWS), strict=True):
        logprobs = torch.log_softmax(part.float(), 1)
        chosen = logprobs.gather(1, ids[:, None])
        likelier = (logprobs > chosen).sum(1, keepdim=True)
        top = logprobs.topk(num_top, 1)
        packed.append(
            torch.cat(
                [chosen.view(torch.int32), likelier.int(), top.indices.int(), top.values.view(torch.int32)], 1
            )
        )
    return torch.cat(packed)
