"""Rules on logits: against the rules applied token by token, in the reference and in the kernels."""

import random

import numpy as np
import pytest
import torch

from triton_kernels.logit_rules import (
    BANNED,
    ENDS,
    IN_PROMPT,
    RuleTables,
    count_tokens,
    count_tokens_triton,
    logit_rules,
    logit_rules_triton,
)

NUM_LINES, NUM_BIASES, NUM_WORDS, NUM_BEFORE = 6, 5, 3, 4
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def dtypes() -> list[torch.dtype]:
    """bfloat16 only on a GPU: the interpreter gets it wrong."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


def random_tables(rng: random.Random, vocab_size: int) -> RuleTables:
    """Tables in which lines 1 and 4 have no rules but NaN and -1."""
    has_rules = torch.tensor([line not in (1, 4) for line in range(NUM_LINES)])

    def floats(low: float, high: float) -> torch.Tensor:
        values = torch.tensor([rng.uniform(low, high) for _ in range(NUM_LINES)])
        return torch.where(has_rules, values, float("nan"))

    bias_ids = torch.zeros(NUM_LINES, NUM_BIASES, dtype=torch.int32)
    bias = torch.zeros(NUM_LINES, NUM_BIASES)
    recent = torch.tensor(
        [[rng.randrange(vocab_size) for _ in range(NUM_BEFORE)] for _ in range(NUM_LINES)]
    ).int()
    bad_words = torch.full((NUM_LINES, NUM_WORDS, NUM_BEFORE), -1, dtype=torch.int32)
    bad_last = torch.full((NUM_LINES, NUM_WORDS), -1, dtype=torch.int32)
    for line in range(NUM_LINES):
        ids = rng.sample(range(vocab_size), min(vocab_size, rng.randrange(NUM_BIASES + 1)))
        bias_ids[line, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        bias[line, : len(ids)] = torch.tensor([rng.uniform(-9, 9) for _ in ids])
        for word in range(rng.randrange(NUM_WORDS + 1)):
            bad_last[line, word] = rng.choice([rng.randrange(vocab_size), vocab_size - 1, *ids])
            length = rng.randrange(NUM_BEFORE + 1)
            if length:
                bad_words[line, word, -length:] = recent[line, -length:]
            if length and rng.random() < 0.3:  # another token somewhere: the word has not begun
                bad_words[line, word, -rng.randint(1, length)] = vocab_size + 7
    marks = [
        [
            rng.choice([0, 0, 1, 2, rng.randrange(1 << 24)])
            | rng.choice([0, IN_PROMPT])
            | rng.choice([0, 0, 0, ENDS])
            | rng.choice([0, 0, 0, 0, BANNED])
            for _ in range(vocab_size)
        ]
        for _ in range(NUM_LINES)
    ]
    return RuleTables(
        has_rules=has_rules,
        min_len=torch.tensor([rng.randrange(1, 9) for _ in range(NUM_LINES)], dtype=torch.int32),
        repetition=floats(0.1, 3),
        frequency=floats(-2, 2),
        presence=floats(-2, 2),
        bias_ids=bias_ids,
        bias=torch.where(has_rules[:, None], bias, float("nan")),
        bad_words=bad_words,
        bad_last=bad_last,
        recent=recent,
        marks=torch.where(has_rules[:, None], torch.tensor(marks), -1).int(),
    )


def expected_of_row(logits: torch.Tensor, line: int, context_len: int, tables: RuleTables) -> torch.Tensor:
    """The rules of one row, token by token in float32."""
    x = logits.float().numpy().copy()
    repetition, frequency, presence = (
        table[line].numpy() for table in (tables.repetition, tables.frequency, tables.presence)
    )
    ends_early = context_len < int(tables.min_len[line])
    biases = zip(tables.bias_ids[line].tolist(), tables.bias[line].numpy(), strict=True)
    bias = {token: value for token, value in biases if value}
    recent = tables.recent[line].tolist()
    bad = set()
    for before, last in zip(tables.bad_words[line].tolist(), tables.bad_last[line].tolist(), strict=True):
        length = sum(token >= 0 for token in before)
        if last >= 0 and before[NUM_BEFORE - length :] == recent[NUM_BEFORE - length :]:
            bad.add(last)
    with np.errstate(all="ignore"):
        for token, mark in enumerate(tables.marks[line].tolist()):
            count = np.float32(mark % (1 << 24))
            if count or mark & IN_PROMPT:
                x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
            x[token] -= frequency * count
            if count:
                x[token] -= presence
            x[token] += bias.get(token, np.float32(0))
            if mark & BANNED or (ends_early and mark & ENDS):
                x[token] = -np.inf
            if token in bad:
                x[token] += np.float32(-np.inf)
        return torch.from_numpy(x).to(logits.dtype)


def on(device: str, tables: RuleTables) -> RuleTables:
    return RuleTables(*(table.to(device) for table in tables))


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 300, 5000])
def test_each_row_gets_its_rules_token_by_token_and_other_rows_every_bit_of_theirs(
    device: str, vocab_size: int, dtype: torch.dtype
) -> None:
    for seed in range(2 if vocab_size > 1000 else 6):
        rng = random.Random(1000 * vocab_size + seed)
        tables = random_tables(rng, vocab_size)
        row_ids = torch.tensor([3, 1, 0, 4, 5, 1, 2], dtype=torch.int32)
        context_len = torch.tensor([rng.randrange(10) for _ in row_ids], dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        logits = (5 * torch.randn(len(row_ids), vocab_size, generator=generator)).to(dtype)
        for odd in (float("nan"), float("inf"), -float("inf"), -0.0):
            logits[torch.rand(logits.shape, generator=generator) < 0.05] = odd
        given = (logits.to(device), row_ids.to(device), context_len.to(device), on(device, tables))
        for apply in (logit_rules, logit_rules_triton):
            found = apply(*given).cpu()
            assert found.dtype == dtype
            for place, line in enumerate(row_ids.tolist()):
                if tables.has_rules[line]:
                    wanted = expected_of_row(logits[place], line, int(context_len[place]), tables)
                    torch.testing.assert_close(found[place], wanted, rtol=0, atol=0, equal_nan=True)
                else:
                    assert torch.equal(found[place].view(BITS[dtype]), logits[place].view(BITS[dtype]))
        assert torch.equal(given[0].cpu().view(BITS[dtype]), logits.view(BITS[dtype])), "input overwritten"


@pytest.mark.parametrize("apply", [logit_rules, logit_rules_triton])
def test_more_rows_than_a_slice_of_the_reference(device: str, apply) -> None:
    tables = random_tables(random.Random(5), 9)
    row_ids = torch.tensor([index % NUM_LINES for index in range(150)], dtype=torch.int32)
    context_len = torch.full((150,), 4, dtype=torch.int32)
    logits = torch.randn(NUM_LINES, 9, generator=torch.Generator().manual_seed(0))[row_ids]
    found = apply(logits.to(device), row_ids.to(device), context_len.to(device), on(device, tables)).cpu()
    assert torch.equal(found, found[:NUM_LINES][row_ids])
    assert not torch.equal(found, logits)


def test_a_token_with_a_bias_and_a_begun_bad_word_is_banned_and_token_0_keeps_its_own_bias(
    device: str,
) -> None:
    tables = random_tables(random.Random(1), 40)
    for table, value in zip(tables, (True, 0, 1.0, 0.0, 0.0, 0, 0.0, -1, -1, -1, 0), strict=True):
        table.fill_(value)
    # The entries behind these are unused: token 0 with a bias of 0.
    tables.bias_ids[2, :3] = torch.tensor([9, 0, 30], dtype=torch.int32)
    tables.bias[2, :3] = torch.tensor([1.5, -2.5, 4.0])
    tables.recent[2] = torch.tensor([-1, -1, 5, 6])
    tables.bad_last[2] = torch.tensor([9, 30, 30], dtype=torch.int32)
    tables.bad_words[2, :, -1] = torch.tensor([6, 7, 8], dtype=torch.int32)
    rows, lengths = torch.tensor([2], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    wanted = torch.zeros(1, 40)
    wanted[0, 0], wanted[0, 9], wanted[0, 30] = -2.5, -float("inf"), 4.0
    for apply in (logit_rules, logit_rules_triton):
        found = apply(
            torch.zeros(1, 40, device=device), rows.to(device), lengths.to(device), on(device, tables)
        )
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("num_before", [1, 2, 15])
def test_a_rows_token_is_counted_once_and_becomes_its_newest(device: str, num_before: int) -> None:
    rng = random.Random(num_before)
    num_lines, vocab_size = 9, 70
    marks = [[rng.randrange(1 << 27) for _ in range(vocab_size)] for _ in range(num_lines)]
    recent = [[rng.randrange(-1, vocab_size) for _ in range(num_before)] for _ in range(num_lines)]
    # The last line is padding's, which is not counted; a negative token is none.
    row_ids, tokens = [4, 8, 2, 8, 0, 7, 1], [5, 3, 69, 0, -1, 0, -2]
    counted = [True, False, True, False, True, True, False]
    wanted_marks, wanted_recent = [list(line) for line in marks], [list(line) for line in recent]
    for row, token, is_counted in zip(row_ids, tokens, counted, strict=True):
        if is_counted and token >= 0:
            wanted_marks[row][token] += 1
            wanted_recent[row] = [*wanted_recent[row][1:], token]
    for count in (count_tokens, count_tokens_triton):
        given_marks, given_recent = (
            torch.tensor(lines, dtype=torch.int32, device=device) for lines in (marks, recent)
        )
        count(
            torch.tensor(row_ids, dtype=torch.int32, device=device),
            torch.tensor(tokens, dtype=torch.int32, device=device),
            torch.tensor(counted, device=device),
            given_recent,
            given_marks,
        )
        assert given_marks.tolist() == wanted_marks
        assert given_recent.tolist() == wanted_recent
