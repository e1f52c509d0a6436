"""Chooses the kind of a mixture's weights."""

import torch

from minisgl.layers.experts.fp8 import Fp8Experts
from minisgl.layers.experts.weights import ExpertSizes, PlainExperts
from minisgl.model_config.quantization import Fp8Scheme, Scheme

AnyExperts = PlainExperts | Fp8Experts


def make_experts(
    sizes: ExpertSizes, scheme: Scheme | None, dtype: torch.dtype, device: torch.device
) -> AnyExperts:
    """Weights of the kind that `scheme` says; None = unquantized."""
    if scheme is None:
        return PlainExperts(sizes, dtype, device)
    assert isinstance(scheme, Fp8Scheme)
    return Fp8Experts(sizes, scheme, dtype, device)
