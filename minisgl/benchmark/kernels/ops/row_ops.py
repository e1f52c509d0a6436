"""The ops on rows after the model: rules, masks, sampling, and advancing the rows' tables.

R rows, V vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import Case, KernelOp
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from minisgl.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS_IDS, MAX_LOGIT_BIAS
from triton_kernels.advance_rows import advance_rows_reference, advance_rows_triton
from triton_kernels.logit_rules import (
    BANNED,
    ENDS,
    IN_PROMPT,
    RuleTables,
    count_tokens_reference,
    count_tokens_triton,
    logit_rules_reference,
    logit_rules_triton,
)
from triton_kernels.sample import sample_triton
from triton_kernels.sample_reference import sample_reference
from triton_kernels.token_mask import num_mask_words, token_mask_reference, token_mask_triton

SAMPLING = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.6, 0, 1.0, 0.0),
    "top_p": (0.6, 0, 0.9, 0.0),
    "top_p flat": (2.5, 0, 0.9, 0.0),
    "top_k": (0.6, 50, 1.0, 0.0),
    "top_k top_p min_p": (0.6, 50, 0.9, 0.05),
}
"""Temperature, top_k, top_p, min_p."""
GPU_ROWS, CPU_ROWS = 256, 2
RULES = ("none", "penalties", "all")
"""Rules of the rows: none, penalties of the tokens of a text, or these with 300 biases and 64 bad words."""
NUM_BIASES, NUM_WORDS = 300, 64
NUM_BEFORE = MAX_BAD_WORD_TOKENS - 1


def sample_problem(rows: int, vocab: int, kind: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """Samples from logits [R, V] that resemble a model's; `kind` is one of SAMPLING."""
    set_bytes = rows * vocab * dtype.itemsize
    logits = [
        (2.5 * torch.randn((rows, vocab), device=device)).to(dtype)
        for _ in range(num_sets(set_bytes, device))
    ]
    temperature, top_k, top_p, min_p = SAMPLING[kind]
    columns = (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, device=device, dtype=torch.int32),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.arange(rows, device=device, dtype=torch.int64) * 7919 - 1000,
        torch.arange(rows, device=device, dtype=torch.int32),
    )

    def check(function: Any) -> float:
        poison(rows * 4, device)
        got = function(logits[0], *columns)
        # A few ids may differ: rounding decides a draw at the boundary of two ids.
        differ = (got != sample_reference(logits[0], *columns)).sum().item()
        if differ > max(1, rows // 64) or got.min() < 0 or got.max() >= vocab:
            raise ValueError(f"{differ} of {rows} ids differ from the reference's")
        return 0.0

    arguments = [(x, *columns) for x in logits]
    return Problem(set_bytes, 0.0, arguments, set_bytes, check)


def advance_rows_problem(rows: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Writes tokens and lengths of R rows into tables, where the rows have another order."""
    row_ids = torch.randperm(rows, device=device, dtype=torch.int32)
    tables = torch.zeros((2, rows + 1), device=device, dtype=torch.int32)
    arguments = [(row_ids, row_ids + 5, row_ids + 9, *tables, rows)]

    def check(function: Any) -> float:
        tables.zero_()
        function(*arguments[0])
        expected = torch.zeros_like(tables)
        advance_rows_reference(row_ids, row_ids + 5, row_ids + 9, expected[0], expected[1], rows)
        if not torch.equal(tables, expected):
            raise ValueError("wrong rows")
        return 0.0

    return Problem(20.0 * rows, 0.0, arguments, 20 * rows, check)


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Plain torch: sorts the logits, and takes random numbers from torch's generator."""
    vocab = logits.shape[1]
    values, ids = logits.float().sort(dim=1, descending=True)
    weights = (values / temperature.clamp(min=1e-10)[:, None]).softmax(1)
    before = weights.cumsum(1) - weights
    kept = before < top_p[:, None]
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    kept &= torch.arange(vocab, device=logits.device)[None, :] < limit
    kept &= weights >= min_p[:, None] * weights[:, :1]
    noise = torch.empty_like(weights).exponential_()
    place = (weights * kept / noise).argmax(1, keepdim=True)
    drawn = ids.gather(1, place)[:, 0]
    return torch.where(temperature > 0, drawn, ids[:, 0]).int()


def _sample_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    def case(rows: int, kind: str) -> Case:
        build = functools.partial(sample_problem, rows, shape.vocab, kind)
        return Case(f"{rows}x{shape.vocab} {kind}", rows, build)

    if not on_gpu:
        return [case(CPU_ROWS, kind) for kind in SAMPLING]
    cases = [case(rows, kind) for rows in (1, GPU_ROWS) for kind in SAMPLING]
    wide = [case(GPU_ROWS, kind) for kind in ("top_p", "top_p flat")]
    return cases + [one._replace(label=f"{one.label} float32", dtype=torch.float32) for one in wide]


def _advance_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    return [Case(f"{rows}", rows, functools.partial(advance_rows_problem, rows))]


def token_mask_problem(rows: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Masks of random bits for three quarters of R rows of random logits."""
    set_bytes = 2 * rows * vocab * dtype.itemsize + num_mask_words(vocab) * rows * 3
    logits = [
        torch.randn(rows, vocab, device=device, dtype=dtype) for _ in range(num_sets(set_bytes, device))
    ]
    num_masks = max(1, 3 * rows // 4)
    shape = (num_masks, num_mask_words(vocab))
    masks = torch.randint(-(2**31), 2**31, shape, device=device, dtype=torch.int64).int()
    mask_of = torch.full((rows,), -1, device=device, dtype=torch.int32)
    mask_of[torch.randperm(rows, device=device)[:num_masks]] = torch.arange(
        num_masks, device=device, dtype=torch.int32
    )

    def check(function: Any) -> float:
        poison(rows * vocab * dtype.itemsize, device)
        expected = token_mask_reference(logits[0], mask_of, masks)
        if not torch.equal(function(logits[0], mask_of, masks), expected):
            raise ValueError("wrong logits")
        return 0.0

    return Problem(float(set_bytes), 0.0, [(one, mask_of, masks) for one in logits], set_bytes, check)


def _mask_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    rows = GPU_ROWS if on_gpu else CPU_ROWS
    return [Case(f"{rows}x{shape.vocab}", rows, functools.partial(token_mask_problem, rows, shape.vocab))]


def _numbers_of_rows(on_gpu: bool) -> tuple[int, ...]:
    return (1, 64, GPU_ROWS) if on_gpu else (CPU_ROWS,)


def rule_tables(rows: int, vocab: int, kind: str, device: torch.device) -> RuleTables:
    """Random rules of R + 1 rows, `kind` one of RULES. Without rules, the floats are NaN."""
    lines = rows + 1
    integers = functools.partial(torch.randint, device=device, dtype=torch.int32)

    def floats(low: float, high: float) -> Tensor:
        values = torch.empty(lines, device=device).uniform_(low, high)
        return values if kind != "none" else values.fill_(float("nan"))

    bias_ids = torch.zeros((lines, MAX_LOGIT_BIAS), device=device, dtype=torch.int32)
    bias = torch.zeros((lines, MAX_LOGIT_BIAS), device=device)
    bad_last = torch.full((lines, MAX_BAD_WORDS_IDS), -1, device=device, dtype=torch.int32)
    bad_words = torch.full((lines, MAX_BAD_WORDS_IDS, NUM_BEFORE), -1, device=device, dtype=torch.int32)
    recent = integers(0, vocab, (lines, NUM_BEFORE))
    if kind == "all":
        num_biases = min(NUM_BIASES, vocab)
        # Distinct tokens, spread over the vocabulary, in another place for each row.
        spread = torch.arange(num_biases, device=device) * (vocab // num_biases)
        shift = torch.arange(lines, device=device)[:, None] * 7919
        bias_ids[:, :num_biases] = ((spread + shift) % vocab).int()
        bias[:, :num_biases].uniform_(-5, 5)
        bad_last[:, :NUM_WORDS] = integers(0, vocab, (lines, NUM_WORDS))
        bad_words[:, :NUM_WORDS, -1] = recent[:, -1:]
        bad_words[:, : NUM_WORDS // 2, -2] = integers(0, vocab, (lines, NUM_WORDS // 2))  # have not begun
    marks = torch.zeros((lines, vocab), device=device, dtype=torch.int32)
    named = integers(0, vocab, (lines, min(2000, vocab))).long()
    marks.scatter_(1, named, integers(0, 5, named.shape) | IN_PROMPT)
    marks.scatter_(1, named[:, :8], ENDS)
    marks.scatter_(1, named[:, 8:16], BANNED)
    return RuleTables(
        has_rules=torch.full((lines,), kind != "none", device=device),
        min_len=integers(0, 20, (lines,)),
        repetition=floats(0.8, 1.5),
        frequency=floats(-2, 2),
        presence=floats(-2, 2),
        bias_ids=bias_ids,
        bias=bias,
        bad_words=bad_words,
        bad_last=bad_last,
        recent=recent,
        marks=marks,
    )


def logit_rules_problem(
    rows: int, vocab: int, kind: str, device: torch.device, dtype: torch.dtype
) -> Problem:
    """Applies rules to R rows of random logits, where the rows have another order in the tables."""
    tables = rule_tables(rows, vocab, kind, device)
    bytes_per_logit = 2 * dtype.itemsize + (tables.marks.itemsize if kind != "none" else 0)
    set_bytes = rows * vocab * bytes_per_logit
    row_ids = torch.randperm(rows, device=device, dtype=torch.int32)
    context_len = torch.randint(0, 20, (rows,), device=device, dtype=torch.int32)
    logits = [
        torch.randn(rows, vocab, device=device, dtype=dtype) for _ in range(num_sets(set_bytes, device))
    ]

    def check(function: Any) -> float:
        poison(rows * vocab * dtype.itemsize, device)
        expected = logit_rules_reference(logits[0], row_ids, context_len, tables)
        got = function(logits[0], row_ids, context_len, tables)
        banned = expected == float("-inf")
        if not torch.equal(got == float("-inf"), banned):
            raise ValueError("other tokens are banned")
        if kind == "none" and not torch.equal(got, expected):
            raise ValueError("rows without rules are changed")
        return relative_error(got.masked_fill(banned, 0), expected.masked_fill(banned, 0))

    arguments = [(one, row_ids, context_len, tables) for one in logits]
    return Problem(float(set_bytes), 0.0, arguments, set_bytes, check)


def count_tokens_problem(rows: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Problem:
    """Counts a token of each of R rows but every fifth, where the rows have another order in the tables."""
    tables = rule_tables(rows, vocab, "penalties", device)
    row_ids = torch.randperm(rows, device=device, dtype=torch.int32)
    token_ids = torch.randint(0, vocab, (rows,), device=device, dtype=torch.int32)
    counted = torch.arange(rows, device=device) % 5 != 4
    recent, marks = tables.recent, tables.marks

    def check(function: Any) -> float:
        expected = recent.clone(), marks.clone()
        count_tokens_reference(row_ids, token_ids, counted, *expected)
        function(row_ids, token_ids, counted, recent, marks)
        if not (torch.equal(recent, expected[0]) and torch.equal(marks, expected[1])):
            raise ValueError("wrong counts or newest tokens")
        return 0.0

    num_bytes = rows * (4 + 4 + 1 + 2 * 4 + 2 * 4 * NUM_BEFORE)
    return Problem(float(num_bytes), 0.0, [(row_ids, token_ids, counted, recent, marks)], num_bytes, check)


def _rules_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    def case(rows: int, kind: str) -> Case:
        build = functools.partial(logit_rules_problem, rows, shape.vocab, kind)
        return Case(f"{rows}x{shape.vocab} {kind}", rows, build)

    cases = [case(rows, kind) for rows in _numbers_of_rows(on_gpu) for kind in RULES]
    if on_gpu:
        wide = case(GPU_ROWS, "all")
        cases.append(wide._replace(label=f"{wide.label} float32", dtype=torch.float32))
    return cases


def _count_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    return [
        Case(f"{rows}x{shape.vocab}", rows, functools.partial(count_tokens_problem, rows, shape.vocab))
        for rows in _numbers_of_rows(on_gpu)
    ]


SAMPLE = KernelOp(name="sample", launcher=sample_triton, bench_cases=_sample_cases, plain_torch=_sample)
ADVANCE_ROWS = KernelOp(name="advance_rows", launcher=advance_rows_triton, bench_cases=_advance_cases)
TOKEN_MASK = KernelOp(
    name="token_mask", launcher=token_mask_triton, bench_cases=_mask_cases, plain_torch=token_mask_reference
)
LOGIT_RULES = KernelOp(
    name="logit_rules",
    launcher=logit_rules_triton,
    bench_cases=_rules_cases,
    plain_torch=logit_rules_reference,
)
COUNT_TOKENS = KernelOp(
    name="count_tokens",
    launcher=count_tokens_triton,
    bench_cases=_count_cases,
    plain_torch=count_tokens_reference,
)
