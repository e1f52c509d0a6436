"""A layer of quantized experts: FP8 with scales of channels or of blocks, 4-bit groups, MXFP4.

Promise: every candidate fits the GPU's shared memory, and the kernels of its kind of weights.
T tokens, M model width, E experts, F width of one expert.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.benchmark.kernels.kernel_op import Case, Tuning, token_cases
from minisgl.benchmark.kernels.kernel_timing import Problem, poison, relative_error
from minisgl.benchmark.kernels.model_shapes import ModelShape
from triton_kernels.e2m1_packing import pack_e2m1, pack_scales
from triton_kernels.gpu import Gpu
from triton_kernels.int4_packing import BLOCK
from triton_kernels.moe_fp8 import (
    Fp8ExpertWeights,
    MoeFp8Config,
    default_moe_fp8_config,
    fused_moe_fp8_reference,
    fused_moe_fp8_triton,
)
from triton_kernels.moe_fp8_gemm import Fp8GemmConfig, fp8_gemm_that_fits
from triton_kernels.moe_int4 import (
    MoeInt4Config,
    PackedExperts,
    default_moe_int4_config,
    fused_moe_int4_reference,
    fused_moe_int4_triton,
)
from triton_kernels.moe_int4_gemm import Int4GemmConfig, int4_gemm_that_fits
from triton_kernels.moe_route import top_k_reference
from triton_kernels.mxfp4 import quantize_mxfp4
from triton_kernels.quantize_fp8 import GROUP, quantize_weight_fp8
from triton_kernels.quantize_int4 import quantize_weight_int4

KINDS = ("fp8", "fp8_blocks", "int4", "mxfp4")
GROUP_OF_INT4 = 128
TUNE_TOKENS = (8, 16, 64, 256, 1024, 8192)
TUNE_TOKENS_OF_4_BITS = (256, 1024, 8192)
"""Fewer tokens run moe_int4_pairs.py and moe_int4_warp.py, which are not tuned."""
BYTES = {"fp8": 1.0, "fp8_blocks": 1.0, "int4": 0.5 + 2 / GROUP_OF_INT4, "mxfp4": 0.5 + 1 / 32}
"""Of a weight, with its share of a scale."""
EITHER_NUMBER = 3.0
"""A gated product between two FP8 numbers may fall to either: the error of a layer counts so much less."""


def quantized_moe_problem(
    kind: str, tokens: int, shape: ModelShape, device: torch.device, dtype: torch.dtype
) -> Problem:
    """[T, M] through E experts of one of KINDS; its bytes count only the experts that get a token."""
    experts, top_k, width, half = shape.experts, shape.experts_per_token, shape.hidden, shape.expert_width
    sizes = [(2 * half, width), (width, half)]
    matrices = [
        [torch.randn(*size, device=device, dtype=dtype) * 0.02 for size in sizes] for _ in range(experts)
    ]
    weights: tuple[Any, ...]
    if kind.startswith("fp8"):
        weights = (_fp8_weights(matrices, kind == "fp8_blocks"),)
        reference: Callable[..., Tensor] = fused_moe_fp8_reference
    else:
        pack = _int4_matrices if kind == "int4" else _mxfp4_matrices
        weights = tuple(pack([both[place] for both in matrices]) for place in range(2))
        reference = fused_moe_int4_reference
    del matrices
    sets = [
        (torch.randn(tokens, width, device=device, dtype=dtype), torch.randn(tokens, experts, device=device))
        for _ in range((16 if tokens <= 64 else 4) if device.type == "cuda" else 1)
    ]
    arguments = [(x, logits, *weights, top_k) for x, logits in sets]
    hits = [len(top_k_reference(logits, top_k, True)[0].unique()) for _, logits in sets]
    known: list[Tensor] = []

    def check(function: Any) -> float:
        poison(4 * tokens * top_k * width, device)
        got = function(*arguments[0])
        if not torch.equal(got, function(*arguments[0])):
            raise ValueError("two runs differ")
        if not known:
            known.append(reference(*arguments[0]).float())
        return relative_error(got, known[0]) / (EITHER_NUMBER if kind.startswith("fp8") else 1.0)

    moved = 3 * width * half * BYTES[kind] * sum(hits) / len(hits) + 2 * sets[0][0].nbytes
    flop = 6.0 * tokens * top_k * width * half
    return Problem(moved, flop, arguments, int(moved), check, in_fp8=kind.startswith("fp8"))


def _fp8_weights(matrices: list[list[Tensor]], blocks: bool) -> Fp8ExpertWeights:
    """Widths that are no multiples of 128 have no kernels of blocks here."""
    gate_up, down = [], []
    for first, second in matrices:
        halves = [quantize_weight_fp8(part, blocks) for part in first.chunk(2)]
        scales = torch.stack if blocks else torch.cat
        gate_up.append((torch.cat([part for part, _ in halves]), scales([scale for _, scale in halves])))
        down.append(quantize_weight_fp8(second, blocks))
    tensors = [torch.stack(list(each)) for pairs in (gate_up, down) for each in zip(*pairs, strict=True)]
    return Fp8ExpertWeights(*tensors)


def _int4_matrices(matrices: list[Tensor]) -> PackedExperts:
    packed = [quantize_weight_int4(matrix, GROUP_OF_INT4) for matrix in matrices]
    return PackedExperts(
        torch.stack([one.packed for one in packed]),
        torch.stack([one.scales for one in packed]),
    )


def _mxfp4_matrices(matrices: list[Tensor]) -> PackedExperts:
    missing = -matrices[0].shape[1] % BLOCK
    rounded = [quantize_mxfp4(F.pad(matrix, (0, missing))) for matrix in matrices]
    return PackedExperts(
        torch.stack([pack_e2m1(codes) for codes, _ in rounded]),
        torch.stack([pack_scales(scales) for _, scales in rounded]),
    )


def fp8_candidates(gpu: Gpu, blocks: bool) -> list[MoeFp8Config]:
    """Candidates with tiles for this GPU, each with as many stages as fit."""
    products = [
        ((16, 64, 128, 4, 5, 1), (16, 64, 128, 4, 6, 1)),
        ((16, 64, 128, 4, 8, 1), (16, 64, 128, 4, 8, 1)),
        ((16, 64, 128, 4, 3, 1), (16, 64, 128, 4, 4, 1)),
        ((16, 128, 128, 4, 4, 1), (16, 128, 128, 4, 6, 1)),
        ((16, 128, 128, 8, 4, 1), (16, 128, 128, 8, 6, 1)),
        ((16, 32, 128, 4, 6, 1), (16, 32, 128, 4, 6, 1)),
        ((32, 64, 128, 4, 5, 1), (32, 64, 128, 4, 6, 1)),
        ((32, 128, 128, 8, 4, 1), (32, 128, 128, 4, 5, 1)),
        ((64, 64, 128, 4, 4, 4), (64, 128, 128, 4, 4, 4)),
        ((64, 128, 128, 8, 3, 8), (64, 128, 128, 8, 4, 8)),
        ((128, 64, 128, 8, 4, 8, True, True), (128, 128, 128, 8, 4, 8, True, True)),
        ((128, 64, 128, 4, 4, 8, True, True), (128, 64, 128, 4, 4, 8, True, True)),
        ((128, 128, 128, 8, 3, 8, True, True), (128, 128, 128, 8, 4, 16, True, True)),
    ]
    if not blocks:
        products += [
            ((16, 64, 256, 4, 3, 1), (16, 64, 256, 4, 3, 1)),
            ((32, 64, 256, 4, 3, 1), (32, 64, 256, 4, 3, 1)),
        ]
    found = [
        MoeFp8Config(
            fp8_gemm_that_fits(Fp8GemmConfig(*gate_up), gpu, gated=True),
            fp8_gemm_that_fits(Fp8GemmConfig(*down), gpu, gated=False),
        )
        for gate_up, down in products
    ]
    return list(dict.fromkeys(found))


def int4_candidates(gpu: Gpu) -> list[MoeInt4Config]:
    """Candidates with tiles for this GPU, each with as many stages as fit."""
    products = (
        ((16, 64, 4, 5, 1), (16, 64, 4, 5, 1)),
        ((16, 64, 4, 3, 1), (16, 64, 4, 3, 1)),
        ((16, 64, 4, 8, 1), (16, 64, 4, 6, 1)),
        ((16, 128, 8, 4, 1), (16, 128, 8, 4, 1)),
        ((16, 128, 4, 4, 1), (16, 128, 4, 4, 1)),
        ((16, 64, 4, 4, 1), (16, 128, 4, 4, 1)),
        ((16, 64, 4, 6, 1), (16, 128, 4, 6, 1)),
        ((16, 32, 4, 5, 1), (16, 32, 4, 5, 1)),
        ((32, 64, 4, 4, 1), (32, 64, 4, 4, 1)),
        ((32, 128, 8, 3, 1), (32, 128, 8, 3, 1)),
        ((64, 64, 4, 4, 4), (64, 64, 4, 4, 4)),
        ((64, 128, 8, 4, 8), (128, 128, 8, 4, 8)),
        ((128, 64, 4, 3, 8), (128, 64, 4, 4, 8)),
        ((64, 128, 8, 3, 8), (64, 128, 8, 4, 8)),
    )
    found = [
        MoeInt4Config(
            int4_gemm_that_fits(Int4GemmConfig(*gate_up), gpu, gated=True),
            int4_gemm_that_fits(Int4GemmConfig(*down), gpu, gated=False),
        )
        for gate_up, down in products
    ]
    return list(dict.fromkeys(found))


def candidates_of(kind: str, gpu: Gpu) -> list[Any]:
    """The candidates of one of KINDS."""
    return fp8_candidates(gpu, kind == "fp8_blocks") if kind.startswith("fp8") else int4_candidates(gpu)


def launcher_of(kind: str) -> Callable[..., Tensor]:
    """What takes a problem's arguments and `config`."""
    return fused_moe_fp8_triton if kind.startswith("fp8") else fused_moe_int4_triton


def _tuning(kind: str) -> Tuning:
    is_fp8 = kind.startswith("fp8")
    unit = GROUP if kind in ("fp8_blocks", "int4") else 32 if kind == "mxfp4" else 1

    def cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
        if (
            not shape.experts
            or shape.hidden % (unit if kind == "mxfp4" else GROUP)
            or shape.expert_width % unit
        ):
            return []
        sizes = TUNE_TOKENS if is_fp8 else TUNE_TOKENS_OF_4_BITS
        return token_cases(functools.partial(quantized_moe_problem, kind), sizes)(shape, on_gpu)

    own = (
        ("moe_fp8.py", "moe_fp8_gemm.py", "quantize_fp8.py")
        if is_fp8
        else ("moe_int4.py", "moe_int4_gemm.py", "int4_packing.py", "e2m1_packing.py")
    )
    default = default_moe_fp8_config if is_fp8 else default_moe_int4_config
    return Tuning(
        files=(*own, "moe_gemm.py", "moe_route.py"),
        by_size=True,
        exact=lambda shape: {"top_k": shape.experts_per_token},
        near=lambda shape: {"E": shape.experts, "M": shape.hidden, "F": shape.expert_width},
        cases=cases,
        default=lambda shape, size, element, gpu: default(size, shape.experts, shape.experts_per_token, gpu),
        candidates=lambda shape, size, gpu: candidates_of(kind, gpu),
        launcher=launcher_of(kind),
    )


QUANTIZED_MOE: dict[str, Tuning] = {f"fused_moe_{kind}": _tuning(kind) for kind in KINDS}
"""Op -> how it is tuned."""
