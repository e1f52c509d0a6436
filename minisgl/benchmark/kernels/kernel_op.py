"""What `minisgl tune` tries: for each op its shapes in a model, the problems to time, the configurations.

Promise: the names, order and values of `exact` and `near` are those with which the op's launcher looks its
configuration up.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from minisgl.benchmark.attention_problems import (
    AttentionShape,
    decode_problem,
    decode_shape,
    prefill_problem,
)
from minisgl.benchmark.kernel_timing import Problem
from minisgl.benchmark.linear_candidates import (
    SHARED_BYTES,
    Matrix,
    few_rows_candidates,
    gate_up_matrices,
    many_rows_candidates,
    plain_matrices,
)
from minisgl.benchmark.model_shapes import ModelShape
from minisgl.benchmark.token_problems import (
    add_rms_norm_problem,
    fused_moe_problem,
    gated_linear_many_problem,
    gated_linear_problem,
    linear_many_problem,
    linear_problem,
    rms_norm_problem,
    silu_mul_problem,
)
from triton_kernels.decode_config import DecodeConfig, default_decode_config
from triton_kernels.fused_moe import MoeConfig, default_moe_config, fused_moe_triton
from triton_kernels.launch import ceil_div, next_power_of_2, num_multiprocessors
from triton_kernels.linear_few import default_linear_config, gated_linear_triton, linear_triton
from triton_kernels.linear_many import LIBRARY, gated_linear_many_with, linear_many_with
from triton_kernels.moe_gemm import GemmConfig
from triton_kernels.moe_pairs import PairsConfig
from triton_kernels.paged_decode import paged_decode_triton
from triton_kernels.paged_prefill import PrefillConfig, default_prefill_config, paged_prefill_triton
from triton_kernels.paged_prefill_hopper import (
    HopperPrefillConfig,
    default_hopper_config,
    paged_prefill_hopper,
)
from triton_kernels.rms_norm import (
    NormConfig,
    add_rms_norm_triton,
    default_norm_config,
    rms_norm_triton,
)
from triton_kernels.silu_mul import SiluMulConfig, silu_mul_triton

PAGE_SIZE = 16
TOKENS = (1, 64, 256, 1024, 8192)
MOE_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 8192)
FEW_TOKENS = (1, 5)
"""For the CPU, where kernels run in Triton's interpreter."""


class Case(NamedTuple):
    """A problem that has not been built yet."""

    label: str
    size: int
    build: Callable[[torch.device, torch.dtype], Problem]


class TunableOp(NamedTuple):
    """One op with a configuration; its functions are of a model's part, which is mostly the whole."""

    op: str
    files: tuple[str, ...]  # of triton_kernels: a change of their code makes measurements stale
    by_size: bool  # each size may have a configuration of its own: it does not change results
    exact: Callable[[Any], dict[str, int]]
    near: Callable[[Any], dict[str, int]]
    cases: Callable[[Any, bool], list[Case]]  # the flag: on a GPU
    default: Callable[[Any, int, int], Any]  # of (part, size, bytes of an element)
    candidates: Callable[[Any, int], Iterable[Any]]  # of (part, size)
    launcher: Callable[..., Any]  # takes `config`
    parts: Callable[[ModelShape], list[Any]] = lambda shape: [shape]  # with an entry each; have a `name`

    def function(self, config: Any) -> Callable[..., Any]:
        """The op with one configuration."""
        return functools.partial(self.launcher, config=config)


def _attention_exact(shape: ModelShape) -> dict[str, int]:
    return {"D": shape.head_dim, "G": shape.heads // shape.kv_heads}


def _attention_near(shape: ModelShape) -> dict[str, int]:
    return {"K": shape.kv_heads, "S": PAGE_SIZE}


def _heads(shape: ModelShape) -> dict[str, int]:
    return {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}


def _decode_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    batches = [(1, 1024), (1, 32768), (8, 8192), (64, 4096), (256, 1024)] if on_gpu else [(1, 40), (3, 70)]
    return [
        Case(
            f"{rows}x{context}",
            rows,
            functools.partial(
                decode_problem, decode_shape(f"{rows}x{context}", [context] * rows, **_heads(shape))
            ),
        )
        for rows, context in batches
    ]


def _is_hopper() -> bool | None:
    """None: there is no GPU to tell."""
    return torch.cuda.get_device_capability() == (9, 0) if torch.cuda.is_available() else None


def _portable_prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    """None where the launcher would take the other kernel."""
    taken = on_gpu and _is_hopper() and shape.head_dim in (64, 128, 256)
    return [] if taken else _prefill_cases(shape, on_gpu)


def _hopper_prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    taken = on_gpu and _is_hopper() is not False and shape.head_dim in (64, 128, 256)
    return _prefill_cases(shape, on_gpu) if taken else []


def _hopper_default(shape: ModelShape, size: int, element: int) -> HopperPrefillConfig:
    block_q = 2 * (64 // (shape.heads // shape.kv_heads))
    processors = num_multiprocessors(torch.device("cuda")) if torch.cuda.is_available() else 132
    return default_hopper_config(shape.head_dim, shape.kv_heads, ceil_div(size, block_q) + 1, processors)


def _hopper_candidates(shape: ModelShape) -> list[HopperPrefillConfig]:
    """One block_n, because it changes results; the rest does not."""
    block_n = _hopper_default(shape, 1, 2).block_n
    stages = (2, 3) if shape.head_dim < 128 else (2,)
    heads = [count for count in (1, 2, 4, 8) if shape.kv_heads % count == 0]
    return [HopperPrefillConfig(block_n, *one) for one in itertools.product(stages, heads)]


def _prefill_cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
    batches = {"1x2048": ([2048], [2048]), "1x8192": ([8192], [8192])}
    batches |= {"8x2048": ([2048] * 8, [2048] * 8), "512 on 32k": ([32768 + 512], [512])}
    if not on_gpu:
        batches = {"5 on 20": ([25], [5])}
    return [
        Case(
            label,
            sum(new),
            functools.partial(
                prefill_problem, AttentionShape(label, contexts, new, **_heads(shape), page_size=PAGE_SIZE)
            ),
        )
        for label, (contexts, new) in batches.items()
    ]


def _token_cases(
    build: Callable[[int, ModelShape, torch.device, torch.dtype], Problem],
    sizes: tuple[int, ...] = TOKENS,
) -> Callable[[ModelShape, bool], list[Case]]:
    def cases(shape: ModelShape, on_gpu: bool) -> list[Case]:
        return [
            Case(f"{tokens} tokens", tokens, functools.partial(build, tokens, shape))
            for tokens in (sizes if on_gpu else FEW_TOKENS)
        ]

    return cases


def _norm_candidates(shape: ModelShape) -> list[NormConfig]:
    elements = next_power_of_2(shape.hidden)
    return [
        NormConfig(block_t, warps)
        for block_t, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32))
        if 2 <= block_t * elements / (32 * warps) <= 64 or block_t == 1
    ]


def _decode_candidates(shape: ModelShape) -> list[DecodeConfig]:
    """One way to cut rows: it changes the last bits of results."""
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
    return [
        DecodeConfig(block_n, 128, 64, warps, stages, few, some, many)
        for block_n, warps, stages, few, some, many in tiles
    ]


def _prefill_candidates(shape: ModelShape) -> list[PrefillConfig]:
    tiles = [
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 32, 8, 3),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
    ]
    return [PrefillConfig(*tile) for tile in tiles]


def _moe_candidates(shape: ModelShape) -> list[MoeConfig]:
    pairs = (
        (2, 1024, 1, 2, 256, 12),
        (4, 256, 3, 2, 256, 8),
        (2, 512, 3, 1, 256, 12),
        (1, 1024, 3, 1, 1024, 6),
    )
    products = (
        ((16, 32, 128, 4, 4, 1), (16, 64, 128, 4, 4, 1)),
        ((16, 64, 128, 4, 3, 1), (16, 128, 128, 4, 3, 1)),
        ((16, 64, 128, 4, 4, 1), (16, 128, 128, 4, 3, 1)),
        ((16, 64, 64, 4, 5, 1), (16, 128, 64, 4, 5, 1)),
        ((32, 64, 64, 4, 4, 1), (32, 128, 64, 4, 4, 1)),
        ((32, 64, 128, 4, 3, 1), (32, 128, 64, 4, 4, 1)),
        ((64, 64, 64, 4, 4, 4), (64, 128, 64, 4, 4, 4)),
        ((64, 128, 64, 4, 3, 8), (64, 256, 64, 8, 3, 8)),
        ((128, 64, 64, 4, 4, 8), (128, 128, 64, 4, 4, 8)),
        ((128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 3, 8)),
        ((128, 128, 64, 8, 4, 8), (128, 256, 64, 8, 4, 8)),
        ((128, 128, 64, 8, 4, 16), (128, 256, 64, 8, 4, 16)),
    )
    small = MoeConfig(GemmConfig(*products[2][0]), GemmConfig(*products[2][1]))
    return [
        *(small._replace(pairs=PairsConfig(*one)) for one in pairs),
        *(MoeConfig(GemmConfig(*gate_up), GemmConfig(*down)) for gate_up, down in products),
    ]


def _linear(
    op: str,
    parts: Callable[[ModelShape], list[Matrix]],
    build: Callable[..., Problem],
    launcher: Callable[..., Any],
) -> TunableOp:
    """A linear layer over up to 16 rows."""
    gated = op == "gated_linear"
    return TunableOp(
        op=op,
        files=("linear_few.py",),
        by_size=False,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width},
        near=lambda matrix: {},
        cases=functools.partial(_linear_cases, build, (1, 16)),
        default=lambda matrix, size, element: default_linear_config(
            matrix.outputs // 2 if gated else matrix.outputs, matrix.width, gated, SHARED_BYTES
        ),
        candidates=lambda matrix, size: few_rows_candidates(matrix, gated=gated),
        launcher=launcher,
        parts=parts,
    )


def _linear_many(
    op: str,
    parts: Callable[[ModelShape], list[Matrix]],
    build: Callable[..., Problem],
    launcher: Callable[..., Any],
) -> TunableOp:
    """A linear layer over 33 to 256 rows, by a kernel or by torch's product."""
    return TunableOp(
        op=op,
        files=("linear_many.py",),
        by_size=True,
        exact=lambda matrix: {"N": matrix.outputs, "K": matrix.width},
        near=lambda matrix: {},
        cases=functools.partial(_linear_cases, build, (64, 128, 256)),
        default=lambda matrix, size, element: LIBRARY,
        candidates=lambda matrix, size: many_rows_candidates(matrix, size, gated="gated" in op),
        launcher=launcher,
        parts=parts,
    )


def _linear_cases(
    build: Callable[..., Problem], sizes: tuple[int, ...], matrix: Matrix, on_gpu: bool
) -> list[Case]:
    """On a CPU one size of a corner of the matrix."""
    outputs, width = matrix.outputs, matrix.width
    if not on_gpu:
        sizes, outputs, width = sizes[:1], min(outputs, 80), min(width, 136)
    return [Case(f"{rows} rows", rows, functools.partial(build, rows, width, outputs)) for rows in sizes]


TUNABLE = {
    tunable.op: tunable
    for tunable in (
        TunableOp(
            op="paged_decode",
            files=("paged_decode.py", "decode_config.py"),
            by_size=False,
            exact=_attention_exact,
            near=_attention_near,
            cases=_decode_cases,
            default=lambda shape, size, element: default_decode_config(
                shape.head_dim, element, shape.heads // shape.kv_heads
            ),
            candidates=lambda shape, size: _decode_candidates(shape),
            launcher=paged_decode_triton,
        ),
        TunableOp(
            op="paged_prefill",
            files=("paged_prefill.py",),
            by_size=False,
            exact=_attention_exact,
            near=_attention_near,
            cases=_portable_prefill_cases,
            default=lambda shape, size, element: default_prefill_config(shape.head_dim, element),
            candidates=lambda shape, size: _prefill_candidates(shape),
            launcher=paged_prefill_triton,
        ),
        TunableOp(
            op="paged_prefill_hopper",
            files=("paged_prefill_hopper.py",),
            by_size=True,
            exact=lambda shape: {**_attention_exact(shape), "K": shape.kv_heads},
            near=lambda shape: {"S": PAGE_SIZE},
            cases=_hopper_prefill_cases,
            default=_hopper_default,
            candidates=lambda shape, size: _hopper_candidates(shape),
            launcher=paged_prefill_hopper,
        ),
        TunableOp(
            op="rms_norm",
            files=("rms_norm.py",),
            by_size=False,
            exact=lambda shape: {"block_m": next_power_of_2(shape.hidden)},
            near=lambda shape: {"M": shape.hidden},
            cases=_token_cases(lambda tokens, shape, *where: rms_norm_problem(tokens, shape.hidden, *where)),
            default=lambda shape, size, element: default_norm_config(shape.hidden),
            candidates=lambda shape, size: _norm_candidates(shape),
            launcher=rms_norm_triton,
        ),
        TunableOp(
            op="add_rms_norm",
            files=("rms_norm.py",),
            by_size=False,
            exact=lambda shape: {"block_m": next_power_of_2(shape.hidden)},
            near=lambda shape: {"M": shape.hidden},
            cases=_token_cases(
                lambda tokens, shape, *where: add_rms_norm_problem(tokens, shape.hidden, *where)
            ),
            default=lambda shape, size, element: default_norm_config(shape.hidden),
            candidates=lambda shape, size: _norm_candidates(shape),
            launcher=add_rms_norm_triton,
        ),
        TunableOp(
            op="silu_mul",
            files=("silu_mul.py",),
            by_size=True,
            exact=lambda shape: {},
            near=lambda shape: {"F": shape.intermediate},
            cases=_token_cases(
                lambda tokens, shape, *where: silu_mul_problem(tokens, shape.intermediate, *where)
            ),
            default=lambda shape, size, element: SiluMulConfig(),
            candidates=lambda shape, size: [
                SiluMulConfig(block_f, warps)
                for block_f, warps in itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8))
            ],
            launcher=silu_mul_triton,
        ),
        TunableOp(
            op="fused_moe",
            files=("fused_moe.py", "moe_gemm.py", "moe_pairs.py", "moe_route.py"),
            by_size=True,
            exact=lambda shape: {"top_k": shape.experts_per_token},
            near=lambda shape: {"E": shape.experts, "M": shape.hidden, "F": shape.expert_width},
            cases=lambda shape, on_gpu: (
                _token_cases(fused_moe_problem, MOE_TOKENS)(shape, on_gpu) if shape.experts else []
            ),
            default=lambda shape, size, element: default_moe_config(
                size, shape.experts, shape.expert_width, shape.experts_per_token, element
            ),
            candidates=lambda shape, size: _moe_candidates(shape),
            launcher=fused_moe_triton,
        ),
        _linear("linear", plain_matrices, linear_problem, linear_triton),
        _linear("gated_linear", gate_up_matrices, gated_linear_problem, gated_linear_triton),
        _linear_many("linear_many", plain_matrices, linear_many_problem, linear_many_with),
        _linear_many(
            "gated_linear_many", gate_up_matrices, gated_linear_many_problem, gated_linear_many_with
        ),
    )
}
