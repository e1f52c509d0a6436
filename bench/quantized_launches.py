"""The launches of the kernels of quantized models, at shapes of models and on meta tensors.

Promise: as kernel_launches.py. GPUs without FP8 have no launches of FP8 layers, those without TMA none of its
kernels.
"""

import functools
from collections.abc import Iterator

import torch
from kernel_launches import BF16, F32, Launch, attention_arguments, empty, ints

from triton_kernels import (
    fp8_linear,
    fp8_linear_few,
    fp8_linear_many,
    int4_linear,
    int4_linear_few,
    int4_linear_many,
    int4_linear_warp,
    moe_fp8,
    moe_int4,
    paged_decode,
    paged_prefill,
    quantize_fp8,
    quantize_int4,
    rms_norm_fp8,
    rope_store,
    unpack_pages,
)
from triton_kernels.gpu import Gpu
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.launch import ceil_div
from triton_kernels.moe_gate import SILU, Gate, GateKind
from triton_kernels.quantize_fp8 import FP8, GROUP
from triton_kernels.quantize_int4 import Int4Weight

SPLIT = fp8_linear_few.Fp8Config(16, 512, 2, 6, splits=2)
"""Tuning tries it where outputs are few."""


EVERYWHERE = {
    ("blocks", 1),
    ("channels", 64),
    ("blocks", 8192),
    ("by 128", 64),
    ("mxfp4", 4),
    ("mxfp4", 8192),
}
"""Launches of experts that are compiled for every GPU."""


def quantized_launches(gpu: Gpu) -> Iterator[Launch]:
    """Every launch for this GPU."""
    if gpu.has_fp8:
        yield from _rounding()
        yield from _fp8_layers(gpu)
        yield from _fp8_cache()
    yield from _int4_layers(gpu)
    yield from _fp8_experts()
    yield from _int4_experts()


def _rounding() -> Iterator[Launch]:
    row, wide, weight = empty(64, 4096), empty(64, 2 * 14336), empty(4096)
    for group in (None, GROUP):
        name = "" if group is None else " by 128"
        call = functools.partial(quantize_fp8.quantize_fp8_triton, row, group)
        yield Launch(f"quantize_fp8{name}", call, group is None)
        yield Launch(f"silu_mul_fp8{name}", functools.partial(quantize_fp8.silu_mul_fp8_triton, wide, group))
        if group is None:
            call = functools.partial(quantize_fp8.quantize_fp8_with_peaks, row, empty(64, 224, dtype=F32))
            yield Launch("quantize_fp8 with peaks", call)
        call = functools.partial(rms_norm_fp8.add_rms_norm_fp8_triton, row, row, weight, 1e-5, group)
        yield Launch(f"add_rms_norm_fp8{name}", call)


def _fp8_layers(gpu: Gpu) -> Iterator[Launch]:
    for outputs, width, gated in ((4096, 4096, False), (28672, 4096, True)):
        results = outputs // 2 if gated else outputs
        for blocks in (False, True):
            scales = (
                empty(outputs // GROUP, width // GROUP, dtype=F32) if blocks else empty(outputs, dtype=F32)
            )
            for rows in (16, 64, 256, 8192):
                arguments = (
                    empty(rows, width, dtype=FP8),
                    empty(width // GROUP if blocks else 1, rows, dtype=F32),
                    empty(outputs, width, dtype=FP8),
                    scales,
                )
                name = f"fp8_{'gated_' * gated}linear {rows} to {outputs}x{width}{' by blocks' * blocks}"
                if rows <= fp8_linear_few.FEW_ROWS:
                    few = fp8_linear_few.fp8_gated_linear_few if gated else fp8_linear_few.fp8_linear_few
                    yield Launch(name, functools.partial(few, *arguments), rows == 16)
                if gpu.has_tma and rows > 16:
                    config = fp8_linear.default_fp8_tiled_config(results, rows, blocks, gated, gpu)
                    many = fp8_linear_many.fp8_linear_many_with
                    if gated:
                        many = fp8_linear_many.fp8_gated_linear_many_with
                    yield Launch(
                        f"{name}, tiled", functools.partial(many, *arguments, config=config), rows == 256
                    )
            if gated and not blocks:
                arguments = (empty(16, width, dtype=FP8), empty(1, 16, dtype=F32), arguments[2], scales)
                call = functools.partial(fp8_linear_few.fp8_gated_linear_few_with_peaks, *arguments)
                yield Launch("fp8_gated_linear 16 with peaks", call, False)
            if not blocks and not gated:
                arguments = (empty(16, width, dtype=FP8), empty(1, 16, dtype=F32), arguments[2], scales)
                config = fp8_linear_few.fp8_that_fits(SPLIT, 16, gated, gpu)
                call = functools.partial(fp8_linear_few.fp8_linear_few, *arguments, config=config)
                yield Launch("fp8_linear 16 split", call)


def _fp8_cache() -> Iterator[Launch]:
    """Attention over pools of e4m3, and what stores into them."""
    scales, shape = empty(2, dtype=F32), (32, 8, 128, 16)
    _, *rest = attention_arguments(64, *shape, kv_dtype=FP8)
    _, *more = attention_arguments(128, *shape, kv_dtype=FP8)
    rows, more_rows = (ints(64), ints(64)), (ints(128), ints(128))
    qkv, table = empty(64, 48 * 128), empty(8192, 128, dtype=F32)
    store = functools.partial(rope_store.rope_store_triton, qkv, table, *rows, *rest[:2], kv_scales=scales)
    yield Launch("rope_store fp8 cache 32/8/128", store, False)
    decode = functools.partial(paged_decode.paged_decode_triton, scale=0.1, kv_scales=scales)
    rope = paged_decode.Rope(table, *rows)
    yield Launch("rope_decode fp8 cache 32/8/128", functools.partial(decode, qkv, *rest, rope=rope))
    rope = paged_decode.Rope(table, *more_rows)
    call = functools.partial(decode, empty(128, 48 * 128), *more, rope=rope)
    yield Launch("rope_decode fp8 cache 32/8/128 128 rows", call, False)
    for odd in ((28, 4, 80, 1), (16, 8, 256, 256)):
        arguments = attention_arguments(64, *odd, kv_dtype=FP8)
        name = "{}/{}/{} page {}".format(*odd)
        yield Launch(f"decode fp8 cache {name}", functools.partial(decode, *arguments), False)
    q, *pools_and_rows = attention_arguments(4096, *shape, kv_dtype=FP8)
    arguments = (q, *pools_and_rows, ints(65), 512, 0.1)
    prefill = functools.partial(paged_prefill.paged_prefill_triton, *arguments, kv_scales=scales)
    yield Launch("prefill fp8 cache 32/8/128 page 16", prefill)
    room = unpack_pages.empty_pages(pools_and_rows[0], pools_and_rows[2], 64, 4096, BF16)
    unpack = functools.partial(unpack_pages.unpack_pages, room, *pools_and_rows, scales)
    yield Launch("unpack_pages 8/128 page 16", unpack)


def _fp8_experts() -> Iterator[Launch]:
    """Qwen3-30B-A3B's; also of GPUs without FP8."""
    experts, width, half = 128, 2048, 768
    for kind in ("channels", "blocks", "given"):
        blocks, given = kind == "blocks", kind == "given"
        shapes = ((experts, 2, half // GROUP, width // GROUP), (experts, width // GROUP, half // GROUP))
        weights = moe_fp8.Fp8ExpertWeights(
            empty(experts, 2 * half, width, dtype=FP8),
            empty(*(shapes[0] if blocks else (experts, 2 * half)), dtype=F32),
            empty(experts, width, half, dtype=FP8),
            empty(*(shapes[1] if blocks else (experts, width)), dtype=F32),
            empty(1, dtype=F32) if given else None,
            empty(experts, dtype=F32) if given else None,
        )
        for tokens in (1, 64) if given else (1, 64, 8192):
            x, logits = empty(tokens, width), empty(tokens, experts, dtype=F32)
            call = functools.partial(moe_fp8.fused_moe_fp8_triton, x, logits, weights, 8)
            yield Launch(f"moe_fp8 {kind} {tokens} tokens", call, (kind, tokens) in EVERYWHERE)


def _int4_experts() -> Iterator[Launch]:
    """Qwen3-30B-A3B's of 4-bit numbers, and gpt-oss-20b's of MXFP4."""
    clamped = Gate(GateKind.CLAMPED, 1.702, 7.0)
    for kind, group, zero_points in (("by 128", 128, False), ("by 32", 32, True), ("mxfp4", 32, False)):
        is_mxfp4 = kind == "mxfp4"
        experts, top_k, width, half = (32, 4, 2880, 2880) if is_mxfp4 else (128, 8, 2048, 768)
        matrices = []
        for outputs, inputs in ((2 * half, width), (width, half)):
            blocks = ceil_div(inputs, BLOCK)
            per_block, dtype = (1, torch.int32) if is_mxfp4 else (BLOCK // group, BF16)
            shape = (experts, blocks * per_block, outputs)
            packed = empty(experts, blocks, outputs, BLOCK_BYTES, dtype=torch.uint8)
            zeros = empty(*shape) if zero_points else None
            bias = empty(experts, outputs) if is_mxfp4 else None
            matrices.append(moe_int4.PackedExperts(packed, empty(*shape, dtype=dtype), zeros, bias))
        gate = clamped if is_mxfp4 else SILU
        for tokens in (4, 64) if zero_points else (4, 16, 64, 8192):
            x, logits = empty(tokens, width), empty(tokens, experts, dtype=F32)
            call = functools.partial(moe_int4.fused_moe_int4_triton, x, logits, *matrices, top_k, gate=gate)
            yield Launch(f"moe_int4 {kind} {tokens} tokens", call, (kind, tokens) in EVERYWHERE)


def _int4_layers(gpu: Gpu) -> Iterator[Launch]:
    def weight(outputs: int, width: int, group: int, zero_points: bool) -> Int4Weight:
        packed = empty(width // BLOCK, outputs, BLOCK_BYTES, dtype=torch.uint8)
        zeros = empty(width // group, outputs) if zero_points else None
        return Int4Weight(packed, empty(width // group, outputs), zeros)

    kinds = ((4096, 4096, False, 128, False), (28672, 4096, True, 128, False), (4096, 4096, False, 32, True))
    for outputs, width, gated, group, zero_points in kinds:
        own = weight(outputs, width, group, zero_points)
        name = f"int4_{'gated_' * gated}linear to {outputs}x{width} by {group}"
        for rows in (8, 32):
            few = int4_linear_few.int4_gated_linear_few if gated else int4_linear_few.int4_linear_few
            yield Launch(f"{name}, {rows}", functools.partial(few, empty(rows, width), own), rows == 8)
        warp = int4_linear_warp.int4_gated_linear_warp if gated else int4_linear_warp.int4_linear_warp
        for rows in (8, 16) if group == 128 and not gated else (8,):
            call = functools.partial(warp, empty(rows, width), own)
            yield Launch(f"{name}, {rows} in warps", call, rows == 8 and not gated)
        results = outputs // 2 if gated else outputs
        many = int4_linear_many.int4_linear_many_with
        if gated:
            many = int4_linear_many.int4_gated_linear_many_with
        if gpu.has_tma:
            for rows in (16, 32, 64, 256) if gpu.has_wgmma else (64, 256):
                config = int4_linear.default_int4_tiled_config(results, rows, gated, gpu, group)
                call = functools.partial(many, empty(rows, width), own, config=config)
                yield Launch(f"{name}, {rows} tiled", call, rows == 64)
        if gpu.has_wgmma:
            for rows in (96, 160, 192, 256):
                config = int4_linear.default_hopper_config(results, width, rows, gated, gpu)
                call = functools.partial(many, empty(rows, width), own, config=config)
                yield Launch(f"{name}, {rows} by warps with roles", call, rows == 256)
    call = functools.partial(quantize_int4.dequantize_int4_triton, weight(4096, 4096, 128, False), BF16)
    yield Launch("dequantize_int4", call)
