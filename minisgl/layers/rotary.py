"""The table of rotary angles. D head dim.

Promise: the angles are those transformers computes, in float32 and on the CPU, so that every device
gets the same bits.
"""

import math

import torch
from torch import Tensor

from minisgl.config import ModelConfig, RopeScaling
from minisgl.errors import ModelError


def make_cos_sin(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """float32 [max_position, D]: the cosines of D/2 angles, then their sines.

    Raises:
        ModelError: the config asks for a RoPE scaling that is not known here.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)
    positions = torch.arange(config.max_position, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    """Frequencies [D/2] after the stretching that `scaling` describes."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position / wavelengths
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / scaling.factor + keep * frequencies
    raise ModelError(f"RoPE scaling {scaling.kind!r} is not known; known are linear and llama3")
