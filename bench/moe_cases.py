"""Cases of the mixture of experts for bench/kernels.py: tokens through one layer of a model's experts.

T tokens, E experts, M model width, F expert width.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from kernel_case import COLD_BYTES, Case, num_sets, poison, relative_error
from torch import Tensor

from triton_kernels.fused_moe import fused_moe_reference, fused_moe_triton
from triton_kernels.moe_route import route_triton, top_k_reference

DEVICE = "cuda"
BF16 = torch.bfloat16
MEMORY_BOUND_TOKENS = 512
"""Up to here a case is rated by the bytes of the experts hit, above by its FLOP."""


class MoeShape(NamedTuple):
    """One model's mixture."""

    label: str
    experts: int
    top_k: int
    width: int
    expert_width: int


QWEN3_30B = MoeShape("30B-A3B", 128, 8, 2048, 768)
MIXTRAL_8X7B = MoeShape("8x7B", 8, 2, 4096, 14336)


def moe_shapes() -> Iterator[tuple[MoeShape, int]]:
    """(model, tokens)."""
    for tokens in (1, 2, 4, 8, 16, 32, 64, 256, 512, 1024, 2048, 4096, 8192, 16384):
        yield QWEN3_30B, tokens
    for tokens in (1, 16, 2048, 8192):
        yield MIXTRAL_8X7B, tokens


def moe_weights(shape: MoeShape, layers: int) -> list[tuple[Tensor, Tensor]]:
    """gate_up and down of some layers."""
    experts, width, expert_width = shape.experts, shape.width, shape.expert_width
    result = []
    for _ in range(layers):
        gate_up = torch.empty((experts, 2 * expert_width, width), device=DEVICE, dtype=BF16)
        down = torch.empty((experts, width, expert_width), device=DEVICE, dtype=BF16)
        result.append((gate_up.normal_(std=width**-0.5), down.normal_(std=expert_width**-0.5)))
    return result


def moe_case(shape: MoeShape, tokens: int) -> Case:
    """One mixture; consecutive calls use other layers, so that no expert is left in L2 from the last."""
    expert_bytes = 3 * shape.width * shape.expert_width * 2
    least_hit = expert_bytes * min(shape.experts, shape.top_k)
    layers = moe_weights(shape, max(1, min(4, math.ceil(COLD_BYTES / least_hit))))
    sets = [
        (
            torch.randn((tokens, shape.width), device=DEVICE, dtype=BF16),
            torch.randn((tokens, shape.experts), device=DEVICE),
        )
        for _ in range(16 if tokens <= 64 else 4)
    ]
    hit = [len(top_k_reference(logits, shape.top_k, True)[0].unique()) for _, logits in sets]
    moved = round(expert_bytes * sum(hit) / len(hit))
    flop = 6.0 * tokens * shape.top_k * shape.width * shape.expert_width

    def run(one: tuple[Tensor, Tensor], layer: tuple[Tensor, Tensor]) -> Tensor:
        return fused_moe_triton(*one, *layer, shape.top_k)

    def check() -> float:
        poison(4 * tokens * shape.top_k * shape.width)
        got = run(sets[0], layers[0])
        if not torch.equal(got, run(sets[0], layers[0])):
            raise ValueError("two runs differ")
        if 2 * hit[0] <= shape.experts:
            unused = [layers[0][0].clone(), layers[0][1].clone()]
            chosen = top_k_reference(sets[0][1], shape.top_k, True)[0].unique().long()
            mask = torch.ones(shape.experts, dtype=torch.bool, device=DEVICE)
            mask[chosen] = False
            for weight in unused:
                weight[mask] = float("nan")
            if not torch.equal(got, run(sets[0], (unused[0], unused[1]))):
                raise ValueError("an expert that is not hit was read")
        x, logits = sets[0]
        return relative_error(got, fused_moe_reference(x.float(), logits, *layers[0], shape.top_k))

    calls: list[Callable[[], Any]] = [
        lambda one=one, layer=layer: run(one, layer)
        for one, layer in zip(sets, itertools.cycle(layers), strict=False)
    ]
    unit = "TB/s" if tokens <= MEMORY_BOUND_TOKENS else "TFLOP/s"
    work = moved if unit == "TB/s" else flop
    return Case("moe", f"{tokens}x {shape.label}", work, unit, check, calls, moved)


def route_case(tokens: int) -> Case:
    """Routing and sort alone."""
    experts, top_k = QWEN3_30B.experts, QWEN3_30B.top_k
    moved = tokens * (4 * experts + 12 * top_k)
    sets = [torch.randn((tokens, experts), device=DEVICE) for _ in range(num_sets(moved))]

    def check() -> float:
        poison(4 * tokens * top_k)
        routing = route_triton(sets[0], top_k, True)
        chosen, weights = top_k_reference(sets[0], top_k, True)
        if not torch.equal(routing.experts, chosen):
            raise ValueError("other experts")
        if not torch.equal(routing.order.long(), chosen.flatten().sort(stable=True).indices):
            raise ValueError("another order")
        return relative_error(routing.weights, weights)

    calls = [lambda logits=logits: route_triton(logits, top_k, True) for logits in sets]
    return Case("moe_route", f"{tokens}x{experts}/{top_k}", moved, "TB/s", check, calls, moved)
