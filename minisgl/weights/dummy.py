"""Random weights for benchmarks that need only the shapes."""

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor, nn

STANDARD_DEVIATION = 0.02
DUMMY_SEED = 0
"""Seed of an engine's dummy weights, independent of --seed."""


class Fillable(Protocol):
    """The experts of a mixture."""

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """Set the weights to those that `normal` fills a tensor with, quantized."""
        ...


class Quantizable(Protocol):
    """A module whose weight is quantized."""

    dtype: torch.dtype
    in_features: int
    sizes: tuple[int, ...]
    scales: Tensor

    def quantize(self, values: Tensor) -> None:
        """Set numbers and scales from unquantized values [out, in_features]."""
        ...


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fill matrices from N(0, 0.02), biases with 0 and other vectors (norm weights) with 1. Deterministic per
    seed, dtype and device; a quantized weight gets the numbers that it would have unquantized, quantized,
    unless the unquantized model has its shared experts among the others."""
    generators: dict[torch.device, torch.Generator] = {}

    def normal(parameter: Tensor) -> None:
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
        parameter.normal_(0.0, STANDARD_DEVIATION, generator=generators[parameter.device])

    filled = set()
    with torch.no_grad():
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            # Not isinstance: from Python 3.12 on, a protocol's check does not see a module's parameters.
            if hasattr(module, "quantize"):
                weight = cast(Quantizable, module)
                shape = (sum(weight.sizes), weight.in_features)
                values = torch.empty(shape, dtype=weight.dtype, device=weight.scales.device)
                normal(values)
                weight.quantize(values)
                own = {name: parameter for name, parameter in own.items() if name == "bias"}
            if hasattr(module, "fill_dummy"):
                cast(Fillable, module).fill_dummy(normal)
                own = {}
            for name, parameter in own.items():
                if parameter.dim() == 1:
                    # Biases of 1 would outweigh what depends on the tokens: all would go to the same experts.
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                elif id(parameter) not in filled:
                    filled.add(id(parameter))
                    normal(parameter)
