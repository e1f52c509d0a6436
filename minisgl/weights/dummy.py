"""Random weights for benchmarks, where only the shapes matter."""

import torch
from torch import nn

STANDARD_DEVIATION = 0.02


def fill_dummy(model: nn.Module, seed: int) -> None:
    """Matrices get N(0, 0.02), vectors (norm weights, biases) 1; the same for one seed, dtype and device."""
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            parameter.normal_(0.0, STANDARD_DEVIATION, generator=generators[parameter.device])
