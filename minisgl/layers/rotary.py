"""The table of rotary angles. D head dim.

Promise: the angles equal those of transformers. They are computed in float32 on the CPU, so that every
device gets the same bits.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from minisgl.errors import ModelError
from minisgl.model_config.config import ModelConfig, RopeScaling


def make_cos_sin(config: ModelConfig, device: torch.device | str = "cpu", *, local: bool = False) -> Tensor:
    """float32 [max_position, D]: the cosines of D/2 angles, then their sines.

    If only `rotary_dim` elements are rotated, the angles behind theirs are 0.

    Args:
        local: the table of `local_rope_layers`, with their own theta and no scaling.

    Raises:
        ModelError: the RoPE scaling is not supported.
    """
    if torch.device(device).type == "meta":  # a meta device needs only the shape
        size = config.head_dim if local else config.global_head_dim or config.head_dim
        return torch.empty(config.max_position, size, device=device)
    if config.global_head_dim is not None and not local:
        config = replace(config, head_dim=config.global_head_dim)
    theta, scaling = config.rope_theta, config.rope_scaling
    if local:
        theta, scaling = config.local_rope_theta, None
    rotary_dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    frequencies = _scaled(1.0 / theta**exponents, theta, scaling, config.max_position)
    positions = torch.arange(config.max_position, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies)
    factor = 1.0 if scaling is None else scaling.attention_factor
    table = _unrotated(config)
    cos, sin = table.chunk(2, dim=-1)
    cos[:, : rotary_dim // 2] = angles.cos() * factor
    sin[:, : rotary_dim // 2] = angles.sin() * factor
    return table.to(device)


def make_unrotated(config: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """float32 [max_position, D]: the table of `no_rope_layers`, whose angles are all 0."""
    if torch.device(device).type == "meta":
        return torch.empty(config.max_position, config.head_dim, device=device)
    return _unrotated(config).to(device)


def _unrotated(config: ModelConfig) -> Tensor:
    ones = torch.ones(config.max_position, config.head_dim // 2, dtype=torch.float32, device="cpu")
    return torch.cat((ones, torch.zeros_like(ones)), dim=-1)


def _scaled(frequencies: Tensor, theta: float, scaling: RopeScaling | None, max_position: int) -> Tensor:
    """The frequencies theta^(-2i / D), [D/2], after `scaling`."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        # Llama 3.1: long wavelengths are scaled by `factor`, short ones kept, those between interpolated.
        wavelengths = 2 * math.pi / frequencies
        turns = scaling.original_max_position / wavelengths
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - keep) * frequencies / scaling.factor + keep * frequencies
    if scaling.kind == "yarn":
        keep = _yarn_share_kept(frequencies.shape[0], theta, scaling)
        return (1 - keep) * frequencies / scaling.factor + keep * frequencies
    if scaling.kind == "longrope":
        # https://arxiv.org/abs/2402.13753. transformers decides by each sequence's current length. Keys
        # in the pool can't be rotated again, so here the longest served context decides.
        long = max_position > scaling.original_max_position
        factors = scaling.long_factors if long else scaling.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32, device="cpu")
    if scaling.kind == "proportional":
        rotated = int(scaling.rotated_share * frequencies.shape[0])
        return torch.cat((frequencies[:rotated] / scaling.factor, torch.zeros_like(frequencies[rotated:])))
    raise ModelError(
        f"RoPE scaling {scaling.kind!r} is not known; known are linear, llama3, yarn, longrope, proportional"
    )


def _yarn_share_kept(num_frequencies: int, theta: float, scaling: RopeScaling) -> Tensor:
    """The unscaled share of each frequency, from 1 to 0: YaRN's ramp (https://arxiv.org/abs/2309.00071).

    Frequency i turns original_max_position * theta^(-2i / D) / 2 pi times over the original context; the
    ramp falls from 1 where that number is beta_fast to 0 where it is beta_slow.
    """

    def place(turns: float) -> float:
        length = scaling.original_max_position / (turns * 2 * math.pi)
        return num_frequencies * math.log(length) / math.log(theta)

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(num_frequencies, dtype=torch.float32, device="cpu") - low) / (high - low)
    return 1 - ramp.clamp(0.0, 1.0)
