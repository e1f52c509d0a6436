"""Attention over pages: decode, decode with RoPE and store, and prefill by one of two kernels.

Promise: `exact` and `near` have the names, order and values that the op's launcher looks up.
"""

import functools
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl.benchmark.kernels.kernel_op import ELEMENT_SIZE, Case, KernelOp, Tuning
from minisgl.benchmark.kernels.kernel_timing import Calls, Problem
from minisgl.benchmark.kernels.model_shapes import ModelShape
from minisgl.benchmark.kernels.ops.attention_problems import (
    AttentionShape,
    decode_problem,
    decode_shape,
    prefill_problem,
    rope_decode_problem,
)
from triton_kernels.decode_config import DecodeConfig, decode_that_fits, default_decode_config
from triton_kernels.gpu import Gpu, gpu_of
from triton_kernels.launch import ceil_div
from triton_kernels.paged_decode import paged_decode_triton, rope_paged_decode
from triton_kernels.paged_prefill import (
    PrefillConfig,
    default_prefill_config,
    paged_prefill_triton,
    prefill_that_fits,
)
from triton_kernels.paged_prefill_hopper import (
    HopperPrefillConfig,
    default_hopper_config,
    paged_prefill_hopper,
)

PAGE_SIZE = 16


def _paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    row_ids: Tensor,
    context_len: Tensor,
    scale: float,
    *_: Any,
) -> Tensor:
    """Gather all pages of every row, up to the width of the page table, and attend to them."""
    pages = page_table[row_ids]
    keys = k_cache[pages].flatten(1, 2).transpose(1, 2)
    values = v_cache[pages].flatten(1, 2).transpose(1, 2)
    seen = torch.arange(keys.shape[2], device=q.device)[None, :] < context_len[:, None]
    values = values.masked_fill(~seen[:, None, :, None], 0)
    keys = keys.masked_fill(~seen[:, None, :, None], 0)
    mask = seen[:, None, None, :]
    out = F.scaled_dot_product_attention(q[:, :, None], keys, values, mask, scale=scale, enable_gqa=True)
    return out[:, :, 0]


def _is_hopper() -> bool | None:
    """Whether the GPU is a Hopper; None without a GPU."""
    return gpu_of(torch.device("cuda")).has_wgmma if torch.cuda.is_available() else None


def _hopper_default(shape: ModelShape, size: int, element: int, gpu: Gpu) -> HopperPrefillConfig:
    block_q = 2 * (64 // (shape.heads // shape.kv_heads))
    tiles = ceil_div(size, block_q) + 1
    return default_hopper_config(shape.head_dim, shape.kv_heads, tiles, gpu.multiprocessors)


def hopper_candidates(shape: ModelShape, gpu: Gpu) -> list[HopperPrefillConfig]:
    """Candidates with the default block_n, because block_n changes results and the other fields do not.

    None for GPUs that the kernel is not for.
    """
    if not gpu.has_wgmma:
        return []
    block_n = _hopper_default(shape, 1, 2, gpu).block_n
    stages = (2, 3) if shape.head_dim < 128 else (2,)
    heads = [count for count in (1, 2, 4, 8) if shape.kv_heads % count == 0]
    return [HopperPrefillConfig(block_n, *one) for one in itertools.product(stages, heads)]


def decode_candidates(shape: ModelShape, gpu: Gpu, is_fp8: bool = False) -> list[DecodeConfig]:
    """Candidates that all split rows in the same way, because the split changes the last bits of results.

    Over e4m3 also tiles of twice the tokens, which have as many bytes.
    """
    group = shape.heads // shape.kv_heads
    tiles = (
        (16, 1, 3, 24, 6, 4),
        (16, 1, 3, 24, 8, 5),
        (16, 1, 4, 24, 5, 3),
        (16, 1, 4, 24, 6, 4),
        (16, 1, 4, 24, 8, 8),
        (16, 1, 4, 12, 6, 4),
        (16, 1, 5, 24, 6, 4),
        (32, 2, 3, 12, 3, 2),
        (32, 2, 4, 12, 3, 2),
    )
    if is_fp8:
        tiles = (
            *((2 * block_n, *rest) for block_n, *rest in tiles),
            (16, 1, 5, 24, 8, 8),
            (64, 1, 3, 24, 4, 3),
        )
    configs = [
        DecodeConfig(block_n, 128, 64, warps, stages, few, some, many)
        for block_n, warps, stages, few, some, many in tiles
    ]
    return [
        config
        for config in configs
        if decode_that_fits(config, shape.head_dim, ELEMENT_SIZE, group, gpu, is_fp8) == config
    ]


def prefill_candidates(shape: ModelShape, gpu: Gpu, is_fp8: bool = False) -> list[PrefillConfig]:
    """Candidates for the portable kernel."""
    tiles = [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 32, 8, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (64, 32, 8, 2),
    ]
    configs = [PrefillConfig(*tile) for tile in tiles]
    return [
        config
        for config in configs
        if prefill_that_fits(config, shape.head_dim, ELEMENT_SIZE, gpu, is_fp8) == config
    ]


def _attention_exact(shape: ModelShape) -> dict[str, int]:
    return {"D": shape.head_dim, "G": shape.heads // shape.kv_heads}


def _attention_near(shape: ModelShape) -> dict[str, int]:
    return {"K": shape.kv_heads, "S": PAGE_SIZE}


def _heads(shape: ModelShape) -> dict[str, Any]:
    return {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}


def _heads_label(shape: ModelShape) -> str:
    return f" {shape.heads}/{shape.kv_heads}/{shape.head_dim}"


def _decode_batches(shape: ModelShape, on_gpu: bool, is_fp8: bool = False) -> list[AttentionShape]:
    """The batches that `minisgl bench kernel` measures."""
    heads, of = _heads(shape) | {"is_fp8": is_fp8}, _heads_label(shape)
    if not on_gpu:
        return [decode_shape(f"3x70{of}", [70, 1, 33], **heads)]
    batches = {
        "64x4096": [4096] * 64,
        "1x131072": [131072],
        "256x1024": [1024] * 256,
        "8x8192": [8192] * 8,
        "1x1024": [1024],
        "1x100000+255x100": [100_000] + [100] * 255,
        "ragged 64x~2000": [37 + 61 * i for i in range(64)],
    }
    pages = {f"64x4096{of} page {size}": size for size in (1, 256)}
    return [
        *(decode_shape(label + of, contexts, **heads) for label, contexts in batches.items()),
        *(decode_shape(label, [4096] * 64, **heads, page_size=size) for label, size in pages.items()),
    ]


def _decode_cases(batches: list[AttentionShape]) -> list[Case]:
    return [
        Case(batch.label, len(batch.contexts), functools.partial(decode_problem, batch), batch)
        for batch in batches
    ]


def _tune_decode_cases(shape: ModelShape, on_gpu: bool, is_fp8: bool = False) -> list[Case]:
    batches = [(1, 1024), (1, 32768), (8, 8192), (64, 4096), (256, 1024)] if on_gpu else [(1, 40), (3, 70)]
    return _decode_cases(
        [
            decode_shape(f"{rows}x{context}", [context] * rows, **_heads(shape), is_fp8=is_fp8)
            for rows, context in batches
        ]
    )


def _rope_decode_cases(shape: ModelShape, on_gpu: bool, is_fp8: bool = False) -> list[Case]:
    return [
        Case(
            batch.label,
            len(batch.contexts),
            functools.partial(rope_decode_problem, batch, shape.qk_norm),
        )
        for batch in _decode_batches(shape, on_gpu, is_fp8)
    ]


def _prefill_cases(
    shape: ModelShape,
    on_gpu: bool,
    batches: dict[str, tuple[list[int], list[int]]],
    suffix: str = "",
    is_fp8: bool = False,
) -> list[Case]:
    """Batches are contexts and new tokens of each row; on a CPU there is one small batch instead."""
    if not on_gpu:
        batches = {"5 on 20": ([25], [5])}
    shapes = [
        AttentionShape(label + suffix, contexts, new, **_heads(shape), page_size=PAGE_SIZE, is_fp8=is_fp8)
        for label, (contexts, new) in batches.items()
    ]
    return [
        Case(batch.label, sum(batch.new_tokens), functools.partial(prefill_problem, batch), batch)
        for batch in shapes
    ]


def _bench_prefill_cases(shape: ModelShape, on_gpu: bool, is_fp8: bool = False) -> list[Case]:
    batches = {
        "1x8192": ([8192], [8192]),
        "8x2048": ([2048] * 8, [2048] * 8),
        "1x32768": ([32768], [32768]),
        "512 on 32k": ([32768 + 512], [512]),
        "2048 on 32k": ([32768 + 2048], [2048]),
        "64 decode 2k + 448 on 4k": ([2048] * 64 + [4096 + 448], [1] * 64 + [448]),
    }
    return _prefill_cases(shape, on_gpu, batches, _heads_label(shape), is_fp8)


def _tune_prefill_cases(shape: ModelShape, on_gpu: bool, is_fp8: bool = False) -> list[Case]:
    batches = {"1x2048": ([2048], [2048]), "1x8192": ([8192], [8192])}
    batches |= {"8x2048": ([2048] * 8, [2048] * 8), "512 on 32k": ([32768 + 512], [512])}
    return _prefill_cases(shape, on_gpu, batches, is_fp8=is_fp8)


def _portable_prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    """No case where the launcher would take the Hopper kernel."""
    takes_hopper = on_gpu and _is_hopper() and shape.head_dim in (64, 128, 256)
    return [] if takes_hopper else _tune_prefill_cases(shape, on_gpu)


def _hopper_prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    may_take_hopper = on_gpu and _is_hopper() is not False and shape.head_dim in (64, 128, 256)
    return _tune_prefill_cases(shape, on_gpu) if may_take_hopper else []


def _flashinfer_decode(flashinfer: Any, problem: Problem, case: Case) -> Calls:
    """Planning is not timed."""
    calls: Calls = []
    for arguments in problem.arguments:
        q, k_cache, v_cache = arguments[:3]
        indptr, indices, last, *sizes = _flashinfer_pages(arguments, case)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        calls.append(functools.partial(wrapper.run, q, (k_cache, v_cache)))
    return calls


def _flashinfer_prefill(flashinfer: Any, problem: Problem, case: Case) -> Calls:
    """Planning is not timed."""
    calls: Calls = []
    for arguments in problem.arguments:
        q, k_cache, v_cache = arguments[:3]
        row_start = arguments[6]
        indptr, indices, last, *sizes = _flashinfer_pages(arguments, case)
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(row_start, indptr, indices, last, *sizes, causal=True, q_data_type=q.dtype)
        calls.append(functools.partial(wrapper.run, q, (k_cache, v_cache)))
    return calls


def _flashinfer_pages(arguments: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    """The arguments of flashinfer's `plan`: where each row's pages begin, the pages, the tokens on each row's
    last page, and the sizes of the model."""
    shape = case.attention
    assert shape is not None
    page_table, row_ids, context_len = arguments[3:6]
    pages = [math.ceil(n / shape.page_size) for n in shape.contexts]
    indices = torch.cat([page_table[row, :n] for row, n in zip(row_ids.tolist(), pages, strict=True)])
    indptr = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32, device=page_table.device)
    last = ((context_len - 1) % shape.page_size + 1).int()
    return indptr, indices, last, shape.heads, shape.kv_heads, shape.head_dim, shape.page_size


def _decode_tuning(is_fp8: bool) -> Tuning:
    return Tuning(
        files=(
            "paged_decode.py",
            "paged_decode_kernel.py",
            "decode_splits.py",
            "decode_config.py",
            *(("fp8_cache.py",) if is_fp8 else ()),
        ),
        by_size=False,
        exact=_attention_exact,
        near=_attention_near,
        cases=functools.partial(_tune_decode_cases, is_fp8=is_fp8),
        default=lambda shape, size, element, gpu: default_decode_config(
            shape.head_dim, element, shape.heads // shape.kv_heads, is_fp8=is_fp8, gpu=gpu
        ),
        candidates=lambda shape, size, gpu: (
            decode_candidates(shape, gpu, is_fp8) if gpu.has_fp8 or not is_fp8 else []
        ),
        launcher=paged_decode_triton,
    )


def _prefill_tuning(is_fp8: bool) -> Tuning:
    return Tuning(
        files=("paged_prefill.py",),
        by_size=False,
        exact=_attention_exact,
        near=_attention_near,
        cases=functools.partial(_tune_prefill_cases, is_fp8=True) if is_fp8 else _portable_prefill_cases,
        default=lambda shape, size, element, gpu: default_prefill_config(
            shape.head_dim, element, gpu, is_fp8
        ),
        candidates=lambda shape, size, gpu: (
            prefill_candidates(shape, gpu, is_fp8) if gpu.has_fp8 or not is_fp8 else []
        ),
        launcher=paged_prefill_triton,
    )


PAGED_DECODE = KernelOp(
    name="paged_decode",
    launcher=paged_decode_triton,
    bench_cases=lambda shape, on_gpu: _decode_cases(_decode_batches(shape, on_gpu)),
    plain_torch=_paged_decode,
    flashinfer=_flashinfer_decode,
    tuning=_decode_tuning(is_fp8=False),
)
PAGED_DECODE_FP8 = KernelOp(
    name="paged_decode_fp8",
    launcher=paged_decode_triton,
    bench_cases=lambda shape, on_gpu: _decode_cases(_decode_batches(shape, on_gpu, is_fp8=True)),
    tuning=_decode_tuning(is_fp8=True),
)
ROPE_PAGED_DECODE_FP8 = KernelOp(
    name="rope_paged_decode_fp8",
    launcher=rope_paged_decode,
    bench_cases=functools.partial(_rope_decode_cases, is_fp8=True),
)
PAGED_PREFILL_FP8 = KernelOp(
    name="paged_prefill_fp8",
    launcher=paged_prefill_triton,
    bench_cases=functools.partial(_bench_prefill_cases, is_fp8=True),
    tuning=_prefill_tuning(is_fp8=True),
)
ROPE_PAGED_DECODE = KernelOp(
    name="rope_paged_decode", launcher=rope_paged_decode, bench_cases=_rope_decode_cases
)
PAGED_PREFILL = KernelOp(
    name="paged_prefill",
    launcher=paged_prefill_triton,
    bench_cases=_bench_prefill_cases,
    flashinfer=_flashinfer_prefill,
    tuning=_prefill_tuning(is_fp8=False),
)
PAGED_PREFILL_HOPPER = KernelOp(
    name="paged_prefill_hopper",
    launcher=paged_prefill_hopper,
    bench_cases=lambda shape, on_gpu: [],  # measured as paged_prefill, whose launcher takes it on a Hopper
    tuning=Tuning(
        files=("paged_prefill_hopper.py",),
        by_size=True,
        exact=lambda shape: {**_attention_exact(shape), "K": shape.kv_heads},
        near=lambda shape: {"S": PAGE_SIZE},
        cases=_hopper_prefill_cases,
        default=_hopper_default,
        candidates=lambda shape, size, gpu: hopper_candidates(shape, gpu),
        launcher=paged_prefill_hopper,
    ),
)
