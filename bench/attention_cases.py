"""Cases and launch configurations of the attention kernels for bench/kernels.py; optionally flashinfer's.

H query heads, K KV heads, D head dim, R rows, T new tokens.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from kernel_case import Case, num_sets, poison, relative_error
from torch import Tensor

from triton_kernels.paged_decode import DecodeConfig, paged_decode_reference, paged_decode_triton
from triton_kernels.paged_prefill import (
    PrefillConfig,
    paged_prefill,
    paged_prefill_reference,
    paged_prefill_triton,
)
from triton_kernels.paged_prefill_hopper import HopperPrefillConfig, paged_prefill_hopper

DEVICE = "cuda"
BF16 = torch.bfloat16
PAGE_TABLE_TOKENS = 131072


class AttentionShape(NamedTuple):
    """Rows of (context, new tokens), and the model's heads."""

    label: str
    contexts: list[int]
    new_tokens: list[int]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16


class AttentionSet(NamedTuple):
    """One input set: its own pages of the common pools."""

    q: Tensor
    page_table: Tensor
    row_ids: Tensor
    context_len: Tensor
    row_start: Tensor


def attention_sets(shape: AttentionShape, sets: int) -> tuple[Tensor, Tensor, list[AttentionSet]]:
    """Common K and V pools, NaN outside the rows' tokens, and sets whose random pages are disjoint."""
    size = shape.page_size
    pages_per_row = [math.ceil(n / size) for n in shape.contexts]
    num_pages = sets * sum(pages_per_row) + 1
    pools = []
    for _ in range(2):
        pool = torch.empty((num_pages, size, shape.kv_heads, shape.head_dim), device=DEVICE, dtype=BF16)
        pool.normal_()
        pool[0] = float("nan")
        pools.append(pool)
    order = 1 + torch.randperm(num_pages - 1, device=DEVICE, dtype=torch.int32)
    rows = len(shape.contexts)
    result = []
    taken = 0
    for _ in range(sets):
        page_table = torch.zeros((rows + 1, PAGE_TABLE_TOKENS // size), device=DEVICE, dtype=torch.int32)
        row_ids = torch.randperm(rows + 1)[:rows].int()
        for row, pages, length in zip(row_ids.tolist(), pages_per_row, shape.contexts, strict=True):
            page_table[row, :pages] = order[taken : taken + pages]
            if length % size:
                for pool in pools:
                    pool[order[taken + pages - 1], length % size :] = float("nan")
            taken += pages
        q = torch.randn((sum(shape.new_tokens), shape.heads, shape.head_dim), device=DEVICE, dtype=BF16)
        result.append(
            AttentionSet(
                q,
                page_table,
                row_ids.to(DEVICE),
                torch.tensor(shape.contexts, dtype=torch.int32, device=DEVICE),
                torch.tensor([0, *shape.new_tokens], device=DEVICE).cumsum(0).int(),
            )
        )
    return pools[0], pools[1], result


def decode_shapes() -> list[AttentionShape]:
    def rows(label: str, contexts: list[int], **model: int) -> AttentionShape:
        return AttentionShape(label, contexts, [1] * len(contexts), **model)

    return [
        rows("64x4096", [4096] * 64),
        rows("1x131072", [131072]),
        rows("256x1024", [1024] * 256),
        rows("8x8192", [8192] * 8),
        rows("1x1024", [1024]),
        rows("unequal 1x100000+255x100", [100_000] + [100] * 255),
        rows("ragged 64x~2000", [37 + 61 * i for i in range(64)]),
        rows("64x4096 page 1", [4096] * 64, page_size=1),
        rows("64x4096 page 256", [4096] * 64, page_size=256),
        rows("64x1024 16/8/128", [1024] * 64, heads=16),
        rows("64x1024 28/4/128", [1024] * 64, heads=28, kv_heads=4),
        rows("64x1024 9/3/64", [1024] * 64, heads=9, kv_heads=3, head_dim=64),
        rows("16x2048 16/8/256", [2048] * 16, heads=16, head_dim=256),
    ]


def prefill_shapes() -> list[AttentionShape]:
    return [
        AttentionShape("1x8192", [8192], [8192]),
        AttentionShape("8x2048", [2048] * 8, [2048] * 8),
        AttentionShape("1x32768", [32768], [32768]),
        AttentionShape("512 on 32k", [32768 + 512], [512]),
        AttentionShape("2048 on 32k", [32768 + 2048], [2048]),
        AttentionShape("64 decode 2k + 448 on 4k", [2048] * 64 + [4096 + 448], [1] * 64 + [448]),
        AttentionShape("1x8192 9/3/64", [8192], [8192], heads=9, kv_heads=3, head_dim=64),
        AttentionShape("1x8192 28/4/128", [8192], [8192], heads=28, kv_heads=4),
        AttentionShape("1x4096 16/8/256", [4096], [4096], heads=16, head_dim=256),
    ]


def kv_bytes(shape: AttentionShape) -> int:
    return 4 * sum(shape.contexts) * shape.kv_heads * shape.head_dim


def attention_flop(shape: AttentionShape) -> float:
    pairs = sum(
        new * (context - new) + new * (new + 1) / 2
        for context, new in zip(shape.contexts, shape.new_tokens, strict=True)
    )
    return 4.0 * shape.heads * shape.head_dim * pairs


def decode_case(shape: AttentionShape, config: DecodeConfig | None = None) -> Case:
    k_cache, v_cache, sets = attention_sets(shape, num_sets(kv_bytes(shape)))
    scale = shape.head_dim**-0.5

    def run(one: AttentionSet, row: slice = slice(None)) -> Tensor:
        return paged_decode_triton(
            one.q[row],
            k_cache,
            v_cache,
            one.page_table,
            one.row_ids[row],
            one.context_len[row],
            scale,
            config=config,
        )

    def check() -> float:
        poison(sets[0].q.nbytes)
        got = run(sets[0])
        expected = paged_decode_reference(sets[0].q.float(), k_cache, v_cache, *sets[0][1:4], scale)
        for r in {0, len(shape.contexts) // 2, len(shape.contexts) - 1}:
            if not torch.equal(run(sets[0], slice(r, r + 1))[0], got[r]):
                raise ValueError(f"row {r} alone differs from row {r} in the batch")
        return relative_error(got, expected)

    calls = [lambda one=one: run(one) for one in sets]
    return Case("decode", shape.label, kv_bytes(shape), "TB/s", check, calls, kv_bytes(shape))


def prefill_case(shape: AttentionShape, config: PrefillConfig | HopperPrefillConfig | None = None) -> Case:
    """Without a configuration what the engine calls, with one the kernel that it belongs to."""
    k_cache, v_cache, sets = attention_sets(shape, num_sets(kv_bytes(shape)))
    scale = shape.head_dim**-0.5
    longest = max(shape.new_tokens)

    launch: Any = paged_prefill
    if config is not None:
        kernel = paged_prefill_triton if isinstance(config, PrefillConfig) else paged_prefill_hopper
        launch = partial(kernel, config=config)

    def run(one: AttentionSet) -> Tensor:
        return launch(
            one.q,
            k_cache,
            v_cache,
            one.page_table,
            one.row_ids,
            one.context_len,
            one.row_start,
            longest,
            scale,
        )

    def check() -> float:
        poison(sets[0].q.nbytes)
        got = run(sets[0])
        expected = paged_prefill_reference(sets[0].q.float(), k_cache, v_cache, *sets[0][1:5], longest, scale)
        return relative_error(got, expected)

    calls = [lambda one=one: run(one) for one in sets]
    flop = attention_flop(shape)
    return Case("prefill", shape.label, flop, "TFLOP/s", check, calls, kv_bytes(shape))


def decode_variants() -> list[DecodeConfig]:
    """Tile, split, stages, programs per multiprocessor (as many as shared memory holds)."""
    shapes = [(64, 3, 3), (64, 3, 2), (64, 4, 2), (64, 5, 1), (32, 4, 4), (32, 3, 4), (32, 5, 3), (128, 3, 1)]
    return [
        DecodeConfig(block_n, split, 128, 4, stages, programs)
        for (block_n, stages, programs), split in itertools.product(shapes, (256, 512, 1024))
    ] + [
        DecodeConfig(64, 512, 128, 8, 3, 3),
        DecodeConfig(64, 512, 128, 2, 3, 3),
        DecodeConfig(32, 512, 128, 2, 4, 4),
        DecodeConfig(128, 512, 128, 8, 3, 1),
        DecodeConfig(64, 512, 64, 4, 3, 3),
        DecodeConfig(64, 512, 256, 4, 3, 3),
        DecodeConfig(64, 512, 128, 4, 3, 6),
    ]


def prefill_variants() -> list[PrefillConfig | HopperPrefillConfig]:
    hopper = ((128, 2, 1), (128, 2, 2), (128, 2, 4), (64, 4, 1), (64, 4, 4), (64, 2, 1))
    return [HopperPrefillConfig(*values) for values in hopper] + [
        PrefillConfig(block_m, block_n, warps, stages)
        for block_m, block_n, warps, stages in (
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
            (128, 32, 8, 3),
            (128, 32, 8, 4),
            (64, 64, 4, 2),
            (64, 64, 4, 3),
            (64, 128, 4, 2),
            (64, 32, 4, 3),
            (64, 64, 8, 3),
            (128, 128, 4, 2),
        )
    ]


def flashinfer_calls(shape: AttentionShape, decode: bool) -> list[Callable[[], Any]]:
    """flashinfer's fa2 kernels on the same kind of batch; planning is not timed."""
    import flashinfer  # pyright: ignore[reportMissingImports]  # only there if somebody installed it

    k_cache, v_cache, sets = attention_sets(shape, min(16, num_sets(kv_bytes(shape))))
    calls = []
    for one in sets:
        pages = [math.ceil(n / shape.page_size) for n in shape.contexts]
        indices = torch.cat(
            [one.page_table[row, :n] for row, n in zip(one.row_ids.tolist(), pages, strict=True)]
        )
        indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32, device=DEVICE)
        last = torch.tensor(
            [(n - 1) % shape.page_size + 1 for n in shape.contexts], dtype=torch.int32, device=DEVICE
        )
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        common = (shape.heads, shape.kv_heads, shape.head_dim, shape.page_size)
        if decode:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(indptr, indices, last, *common, q_data_type=BF16, kv_data_type=BF16)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            wrapper.plan(one.row_start, indptr, indices, last, *common, causal=True, q_data_type=BF16)
        calls.append(lambda wrapper=wrapper, one=one: wrapper.run(one.q, (k_cache, v_cache)))
    return calls
