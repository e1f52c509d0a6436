"""Random weights for benchmarks that need only the shapes."""

import torch
from torch import nn

STANDARD_DEVIATION = 0.02
DUMMY_SEED = 0
"""Seed of an engine's dummy weights, independent of --seed."""


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Fill matrices from N(0, 0.02) and vectors (norm weights, biases) with 1. Deterministic per seed, dtype
    and device."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generators[parameter.device])
