"""The ops on rows after the model: masks, sampling, and advancing the rows' tables.

R rows, V vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import Case, KernelOp
from minisgl.benchmark.kernels.kernel_timing import Problem, num_sets, poison
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.advance_rows import advance_rows_reference, advance_rows_triton
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


SAMPLE = KernelOp(name="sample", launcher=sample_triton, bench_cases=_sample_cases, plain_torch=_sample)
ADVANCE_ROWS = KernelOp(name="advance_rows", launcher=advance_rows_triton, bench_cases=_advance_cases)
TOKEN_MASK = KernelOp(
    name="token_mask", launcher=token_mask_triton, bench_cases=_mask_cases, plain_torch=token_mask_reference
)
