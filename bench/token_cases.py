"""Cases of the elementwise, scatter and sampling kernels for bench/kernels.py, at the shapes of Llama-3.1-8B.

T tokens, R rows, V vocabulary.
"""

import math
from collections.abc import Iterator

import torch
from kernel_case import Case, num_sets, poison, relative_error
from torch import Tensor

from triton_kernels.advance_rows import advance_rows_triton
from triton_kernels.rms_norm import (
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm_reference,
    rms_norm_triton,
)
from triton_kernels.rope_store import rope_store_reference, rope_store_triton
from triton_kernels.sample import sample_reference, sample_triton
from triton_kernels.silu_mul import silu_mul_reference, silu_mul_triton

DEVICE = "cuda"
BF16 = torch.bfloat16


def elementwise_cases(tokens: int) -> Iterator[Case]:
    width, mlp = 4096, 14336
    weight = torch.randn(width, device=DEVICE, dtype=BF16)

    def rows(columns: int) -> Tensor:
        return torch.randn((tokens, columns), device=DEVICE, dtype=BF16)

    moved = 2 * tokens * width * 2
    xs = [rows(width) for _ in range(num_sets(moved))]

    def check_rms_norm() -> float:
        poison(moved // 2)
        return relative_error(
            rms_norm_triton(xs[0], weight, 1e-5), rms_norm_reference(xs[0].double(), weight, 1e-5)
        )

    yield Case(
        "rms_norm",
        f"{tokens}x{width}",
        moved,
        "TB/s",
        check_rms_norm,
        [lambda x=x: rms_norm_triton(x, weight, 1e-5) for x in xs],
        moved,
    )

    residuals = [rows(width) for _ in xs]

    def check_add_rms_norm() -> float:
        poison(moved // 2)
        y, new_residual = add_rms_norm_triton(xs[0], residuals[0], weight, 1e-5)
        expected, _ = add_rms_norm_reference(xs[0].double(), residuals[0].double(), weight, 1e-5)
        return max(
            relative_error(y, expected), relative_error(new_residual, xs[0].double() + residuals[0].double())
        )

    yield Case(
        "add_rms_norm",
        f"{tokens}x{width}",
        2 * moved,
        "TB/s",
        check_add_rms_norm,
        [
            lambda x=x, r=r: add_rms_norm_triton(x, r, weight, 1e-5)
            for x, r in zip(xs, residuals, strict=True)
        ],
        2 * moved,
    )

    moved = 3 * tokens * mlp * 2
    gate_ups = [rows(2 * mlp) for _ in range(num_sets(moved))]

    def check_silu_mul() -> float:
        poison(moved // 3)
        return relative_error(silu_mul_triton(gate_ups[0]), silu_mul_reference(gate_ups[0].double()))

    yield Case(
        "silu_mul",
        f"{tokens}x{mlp}",
        moved,
        "TB/s",
        check_silu_mul,
        [lambda g=g: silu_mul_triton(g) for g in gate_ups],
        moved,
    )

    for model in ((32, 8, 128), (16, 8, 128)):
        yield rope_store_case(tokens, *model, normed=False)
    for model in ((32, 8, 128), (32, 4, 128), (16, 8, 128)):
        yield rope_store_case(tokens, *model, normed=True)


def rope_store_case(tokens: int, heads: int, kv_heads: int, head_dim: int, normed: bool) -> Case:
    """Tokens into random slots; normed as Qwen3 does."""
    page_size = 16
    columns = (heads + 2 * kv_heads) * head_dim
    moved = 2 * tokens * columns * 2
    sets = num_sets(moved)
    num_pages = sets * math.ceil(tokens / page_size) + 1
    pools = torch.full((2, num_pages, page_size, kv_heads, head_dim), float("nan"), device=DEVICE, dtype=BF16)
    angles = torch.rand((4096, head_dim // 2), device=DEVICE) * 7
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    qkvs = [torch.randn((tokens, columns), device=DEVICE, dtype=BF16) for _ in range(sets)]
    positions = torch.randint(0, 4096, (tokens,), device=DEVICE, dtype=torch.int32)
    slots = (page_size + torch.randperm(sets * tokens, device=DEVICE, dtype=torch.int32)).view(sets, tokens)
    q_weight, k_weight = (
        torch.randn(head_dim, device=DEVICE, dtype=BF16) if normed else None for _ in range(2)
    )

    def check() -> float:
        poison(moved // 2)
        expected_pools = torch.full_like(pools, float("nan"), dtype=torch.float64)
        pools.fill_(float("nan"))
        q = rope_store_triton(qkvs[0], cos_sin, positions, slots[0], pools[0], pools[1], q_weight, k_weight)
        expected = rope_store_reference(
            qkvs[0].double(),
            cos_sin.double(),
            positions,
            slots[0],
            expected_pools[0],
            expected_pools[1],
            None if q_weight is None else q_weight.double(),
            None if k_weight is None else k_weight.double(),
        )
        if not torch.equal(pools.isnan(), expected_pools.isnan()):
            raise ValueError("wrong slots written")
        return max(
            relative_error(q, expected), relative_error(pools.nan_to_num(), expected_pools.nan_to_num())
        )

    return Case(
        "rope_store",
        f"{tokens}x{heads}/{kv_heads}/{head_dim}" + (" normed" if normed else ""),
        moved,
        "TB/s",
        check,
        [
            lambda i=i: rope_store_triton(
                qkvs[i], cos_sin, positions, slots[i], pools[0], pools[1], q_weight, k_weight
            )
            for i in range(sets)
        ],
        moved,
    )


def advance_rows_cases(rows: int) -> Iterator[Case]:
    row_ids = torch.randperm(rows, device=DEVICE, dtype=torch.int32)
    tables = torch.zeros((2, rows + 1), device=DEVICE, dtype=torch.int32)

    def check() -> float:
        advance_rows_triton(row_ids, row_ids + 5, row_ids + 9, tables[0], tables[1], rows)
        expected = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        if not (torch.equal(tables[0, :rows], expected + 5) and torch.equal(tables[1, :rows], expected + 9)):
            raise ValueError("wrong rows")
        return 0.0

    call = [lambda: advance_rows_triton(row_ids, row_ids, row_ids, tables[0], tables[1], rows)]
    yield Case("advance_rows", f"{rows}", 20 * rows, "TB/s", check, call, 20 * rows)


def sample_cases(rows: int, vocab: int, dtype: torch.dtype) -> Iterator[Case]:
    set_bytes = rows * vocab * dtype.itemsize
    logits = [2.5 * torch.randn((rows, vocab), device=DEVICE) for _ in range(num_sets(set_bytes))]
    logits = [x.to(dtype) for x in logits]
    name = "bf16" if dtype == BF16 else "f32"
    for label, temperature, top_k, top_p, min_p in (
        ("greedy", 0.0, 0, 1.0, 0.0),
        ("temperature", 0.6, 0, 1.0, 0.0),
        ("top_p", 0.6, 0, 0.9, 0.0),
        ("top_p flat", 2.5, 0, 0.9, 0.0),
        ("top_k", 0.6, 50, 1.0, 0.0),
        ("top_k top_p min_p", 0.6, 50, 0.9, 0.05),
    ):
        columns = (
            torch.full((rows,), temperature, device=DEVICE),
            torch.full((rows,), top_k, device=DEVICE, dtype=torch.int32),
            torch.full((rows,), top_p, device=DEVICE),
            torch.full((rows,), min_p, device=DEVICE),
            torch.arange(rows, device=DEVICE, dtype=torch.int64) * 7919 - 1000,
            torch.arange(rows, device=DEVICE, dtype=torch.int32),
        )

        def check(columns: tuple[Tensor, ...] = columns) -> float:
            poison(rows * 4)
            got = sample_triton(logits[0], *columns)
            # A few other ids are no error: a draw within a rounding of two ids' boundary may go either way.
            differ = (got != sample_reference(logits[0], *columns)).sum().item()
            if differ > max(1, rows // 64) or got.min() < 0 or got.max() >= vocab:
                raise ValueError(f"{differ} of {rows} ids differ from the reference's")
            return 0.0

        yield Case(
            "sample",
            f"{rows}x{vocab} {name} {label}",
            set_bytes,
            "TB/s",
            check,
            [lambda x=x, columns=columns: sample_triton(x, *columns) for x in logits],
            set_bytes,
        )
