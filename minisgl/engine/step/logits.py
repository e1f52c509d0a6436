"""Penalties, biases and bans of logits before sampling, and log probabilities.

Promise: a row without rules gets its logits back bit by bit, so its tokens do not depend on other rows. A row
with rules keeps its state on the device, and the step itself advances it. The tables have one entry per row
and vocabulary token, so the engine allocates them when the first request with rules comes.

R rows of the batch, B rows of the tables, N rows to write, D different rules among them, M tokens that the
rules name, V vocabulary, K biases, W bad words of up to P + 1 tokens, k top tokens.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from minisgl.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from minisgl.scheduler.plan import LogitRules, RowInit, RowRules
from triton_kernels.logit_rules import BANNED, ENDS, IN_PROMPT, RuleTables, count_tokens, logit_rules

SLICE_ROWS = 64
"""Rows processed at a time, which bounds the memory of float32 copies of the logits, and of new marks."""
INIT_TABLES = (
    ("min_len", 0),
    ("repetition", 0),
    ("frequency", 0),
    ("presence", 0),
    ("bias_ids", 0),
    ("bias", 0.0),
    ("bad_words", -1),
    ("bad_last", -1),
    ("recent", -1),
)
"""The tables whose whole rows `init_rows` writes, and the value that fills unused biases and bad words."""


class StagedRules(NamedTuple):
    """The D different rules of N rows as packed int32 arrays (floats as bits).

    K' and W' are the largest numbers of biases and of bad words among these rules.
    """

    plain_rows: np.ndarray  # rows that go to another request and have no rules
    row: np.ndarray  # [N]
    rules_of: np.ndarray  # [N]  index of the row's rules, 0..D-1
    min_len: np.ndarray  # [D]
    repetition: np.ndarray  # [D]
    frequency: np.ndarray  # [D]
    presence: np.ndarray  # [D]
    bias_ids: np.ndarray  # [D * K']
    bias: np.ndarray  # [D * K']
    bad_words: np.ndarray  # [D * W' * P]
    bad_last: np.ndarray  # [D * W']
    recent: np.ndarray  # [D * P]
    logprob_ids: np.ndarray  # [D * MAX_LOGPROBS]
    mark_base: np.ndarray  # [D]  mark of all tokens that the rules do not name
    mark_begin: np.ndarray  # [D]  index of the first named token in mark_id
    num_marks: np.ndarray  # [D]
    mark_id: np.ndarray  # [M]  named tokens; a token may occur twice
    mark: np.ndarray  # [M]


def pack_rules(inits: tuple[RowInit, ...], row_rules: tuple[RowRules, ...], vocab_size: int) -> StagedRules:
    """Pack the rules of rows that go to another request, for `LogitTables.init_rows`."""
    num = len(row_rules)
    num_biases = max([1, *(len(rules.bias_ids) // 4 for _, rules in row_rules)])
    num_words = max([1, *(len(rules.bad_words_ids) for _, rules in row_rules)])
    floats = np.zeros((3, num), dtype=np.float32)
    min_len = np.zeros(num, dtype=np.int32)
    bias_ids = np.zeros((num, num_biases), dtype=np.int32)
    bias = np.zeros((num, num_biases), dtype=np.float32)
    bad_words = np.full((num, num_words, MAX_BAD_WORD_TOKENS - 1), -1, dtype=np.int32)
    bad_last = np.full((num, num_words), -1, dtype=np.int32)
    recent = np.full((num, MAX_BAD_WORD_TOKENS - 1), -1, dtype=np.int32)
    logprob_ids = np.full((num, MAX_LOGPROBS), -1, dtype=np.int32)
    mark_base = np.zeros(num, dtype=np.int32)
    mark_id: list[np.ndarray] = []
    mark: list[np.ndarray] = []
    scratch = np.zeros(vocab_size, dtype=np.int32)
    for place, (_, rules) in enumerate(row_rules):
        floats[:, place] = rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty
        min_len[place] = rules.min_len
        bias_ids[place, : len(rules.bias_ids) // 4] = np.frombuffer(rules.bias_ids, "<i4")
        bias[place, : len(rules.bias) // 4] = np.frombuffer(rules.bias, "<f4")
        for word, ids in enumerate(rules.bad_words_ids):
            *before, bad_last[place, word] = ids
            if before:
                bad_words[place, word, -len(before) :] = before
        prompt, output = np.frombuffer(rules.prompt, "<i4"), np.frombuffer(rules.output, "<i4")
        last = np.concatenate([prompt[-recent.shape[1] :], output])[-recent.shape[1] :]
        recent[place, recent.shape[1] - len(last) :] = last
        asked = np.frombuffer(rules.logprob_token_ids, "<i4")
        logprob_ids[place, : len(asked)] = asked
        mark_base[place] = BANNED if rules.allowed_token_ids else 0
        ids, marks = _marks(rules, prompt, output, scratch)
        mark_id.append(ids)
        mark.append(marks)
    repetition, frequency, presence = floats.view(np.int32)
    num_marks = np.array([len(ids) for ids in mark_id], dtype=np.int32)
    ruled = [row for rows, _ in row_rules for row in rows]
    plain = {init.row for init in inits}.difference(ruled)
    return StagedRules(
        plain_rows=np.array(sorted(plain), dtype=np.int32),
        row=np.array(ruled, dtype=np.int32),
        rules_of=np.repeat(np.arange(num, dtype=np.int32), [len(rows) for rows, _ in row_rules]),
        min_len=min_len,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
        bias_ids=bias_ids.ravel(),
        bias=bias.view(np.int32).ravel(),
        bad_words=bad_words.ravel(),
        bad_last=bad_last.ravel(),
        recent=recent.ravel(),
        logprob_ids=logprob_ids.ravel(),
        mark_base=mark_base,
        mark_begin=np.cumsum(num_marks, dtype=np.int32) - num_marks,
        num_marks=num_marks,
        mark_id=np.concatenate([np.empty(0, dtype=np.int32), *mark_id]),
        mark=np.concatenate([np.empty(0, dtype=np.int32), *mark]),
    )


def _marks(
    rules: LogitRules, prompt: np.ndarray, output: np.ndarray, scratch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that rules name, int32 [M], and the mark of each, int32 [M].

    Args:
        scratch: int32 [V], zero before and after. The function touches only the named tokens in it, so its
            time does not depend on V. It holds each mark's difference from `mark_base`.
    """
    vocab_size = len(scratch)
    allowed, ends = np.frombuffer(rules.allowed_token_ids, "<i4"), np.frombuffer(rules.stop_ids, "<i4")
    ends = ends[ends < vocab_size]
    np.add.at(scratch, output, 1)
    scratch[prompt] |= IN_PROMPT
    scratch[ends] |= ENDS
    scratch[allowed] |= BANNED
    named = np.concatenate([prompt, output, ends, allowed])
    if len(named) > vocab_size // 8:
        named = np.flatnonzero(scratch)
    marks = scratch[named] ^ (BANNED if len(allowed) else 0)
    scratch[named] = 0
    return named.astype(np.int32), marks


class LogitTables:
    """Tables of rules, indexed by row id. The last row is for padding. The tensors never move.

    `rules` has the tables, and `logit_rules` says what they mean.
    """

    logprob_ids: Tensor  # int32 [B, MAX_LOGPROBS]  whose log probabilities are returned; -1 = the likeliest

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        def table(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(max_rows + 1, *shape, dtype=dtype, device=device)

        num_before = MAX_BAD_WORD_TOKENS - 1
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.rules = RuleTables(
            has_rules=table(torch.bool),
            min_len=table(torch.int32),
            repetition=table(torch.float32),
            frequency=table(torch.float32),
            presence=table(torch.float32),
            bias_ids=table(torch.int32, MAX_LOGIT_BIAS),
            bias=table(torch.float32, MAX_LOGIT_BIAS),
            bad_words=table(torch.int32, MAX_BAD_WORDS_IDS, num_before),
            bad_last=table(torch.int32, MAX_BAD_WORDS_IDS),
            recent=table(torch.int32, num_before),
            marks=table(torch.int32, vocab_size),
        )
        self.logprob_ids = table(torch.int32, MAX_LOGPROBS)

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.nbytes for table in self.rules) + self.logprob_ids.nbytes

    def init_rows(self, rules: StagedRules, staged: list[Tensor]) -> None:
        """Write the rules of rows that go to another request.

        Args:
            rules: from `pack_rules`.
            staged: the same arrays on the device.
        """
        parts = dict(zip(StagedRules._fields, staged, strict=True))
        # Not by assignment: on CUDA, that copies the value from the host and waits for the copy.
        self.rules.has_rules.index_fill_(0, parts["plain_rows"].long(), False)
        if not len(rules.row):
            return
        self.rules.has_rules.index_fill_(0, parts["row"].long(), True)
        num = len(rules.min_len)
        for name, missing in INIT_TABLES:
            target: Tensor = getattr(self.rules, name)
            shape = (num, -1, *target.shape[2:]) if target.dim() > 1 else (num,)
            part = parts[name].view(target.dtype).view(shape)
            if target.dim() > 1 and part.shape[1] < target.shape[1]:
                padding = [0, 0] * (target.dim() - 2)
                part = functional.pad(part, (*padding, 0, target.shape[1] - part.shape[1]), value=missing)
            target[parts["row"]] = part[parts["rules_of"]]
        asked = parts["logprob_ids"].view(num, MAX_LOGPROBS)
        self.logprob_ids[parts["row"]] = asked[parts["rules_of"]]
        for begin in range(0, len(rules.row), SLICE_ROWS):
            end = begin + SLICE_ROWS
            num_marks = int(rules.num_marks[rules.rules_of[begin:end]].sum())
            self._write_marks(parts, parts["row"][begin:end], parts["rules_of"][begin:end], num_marks)

    def _write_marks(self, parts: dict[str, Tensor], row: Tensor, rules_of: Tensor, num_marks: int) -> None:
        """Write the marks of some rows; num_marks: the total number of their named tokens."""
        self.rules.marks[row] = parts["mark_base"][rules_of][:, None].expand(-1, self.vocab_size)
        counts = parts["num_marks"][rules_of]
        # For each mark to write: place = index of its row in `row`, rank = index among the marks of that row.
        place = torch.arange(len(row), dtype=torch.int32, device=row.device)
        place = place.repeat_interleave(counts, output_size=num_marks)
        before = counts.cumsum(0, dtype=torch.int32) - counts
        rank = torch.arange(num_marks, dtype=torch.int32, device=row.device) - before[place]
        source = parts["mark_begin"][rules_of][place] + rank
        flat = row[place] * self.vocab_size + parts["mark_id"][source]
        self.rules.marks.view(-1)[flat] = parts["mark"][source]

    def asked_logprobs(self, row_ids: Tensor) -> Tensor:
        """The tokens whose log probabilities each row returns, for `pack_logprobs`; row_ids: int32 [R]."""
        rows = row_ids.long()
        return torch.where(self.rules.has_rules[rows][:, None], self.logprob_ids[rows], -1)

    def apply_rules(self, logits: Tensor, row_ids: Tensor, context_len: Tensor) -> Tensor:
        """Apply the rows' rules to logits [R, V]; context_len: int32 [R], the tokens of each row so far."""
        return logit_rules(logits, row_ids, context_len, self.rules)

    def add_tokens(self, row_ids: Tensor, token_ids: Tensor, counted: Tensor) -> None:
        """Add the rows' new tokens to the counts and to `recent`.

        Args:
            token_ids: int32 [R]. A negative value means no token, and is skipped.
            counted: bool [R], the rows to update. Each of them may occur once in the batch.
        """
        count_tokens(row_ids, token_ids, counted, self.rules.recent, self.rules.marks)


def pack_logprobs(logits: Tensor, token_ids: Tensor, asked: Tensor | None = None) -> Tensor:
    """Log probabilities of tokens, int [N], under logits [N, V], as int32 [N, 2 + 2 * k].

    Each line holds the token's log probability (float32 as bits), the number of likelier tokens, the ids of
    the k = min(20, V) likeliest tokens, and their log probabilities (as bits). The line of a negative token,
    which means no token, is undefined.

    Args:
        asked: int32 [N, 20], tokens that take the place of the likeliest in lines where the first is not -1;
            a later -1 counts as token 0.
    """
    num_rows, vocab_size = logits.shape
    num_top = min(MAX_LOGPROBS, vocab_size)
    packed = torch.empty(num_rows, 2 + 2 * num_top, dtype=torch.int32, device=logits.device)
    ids = token_ids.clamp(min=0).long()[:, None]
    for begin in range(0, num_rows, SLICE_ROWS):
        lines = slice(begin, begin + SLICE_ROWS)
        logprobs = logits[lines].log_softmax(1, dtype=torch.float32)
        chosen = logprobs.gather(1, ids[lines])
        likelier = (logprobs > chosen).sum(1, keepdim=True, dtype=torch.int32)
        top, top_ids = logprobs.topk(num_top, 1)
        if asked is not None:
            own = asked[lines, :num_top].long()
            is_asked, own = own[:, :1] >= 0, own.clamp(min=0)
            top = torch.where(is_asked, logprobs.gather(1, own), top)
            top_ids = torch.where(is_asked, own, top_ids)
        fields = (chosen.view(torch.int32), likelier, top_ids.int(), top.view(torch.int32))
        torch.cat(fields, 1, out=packed[lines])
    return packed
