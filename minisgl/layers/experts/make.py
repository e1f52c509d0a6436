"""Chooses the kind of a mixture's weights."""

import torch

from minisgl.layers.experts.fp8 import Fp8Experts
from minisgl.layers.experts.gpt_oss import GptOssExperts
from minisgl.layers.experts.int4 import Int4Experts
from minisgl.layers.experts.mxfp4 import Mxfp4Experts
from minisgl.layers.experts.weights import ExpertSizes, PlainExperts
from minisgl.model_config.config import ExpertStorage
from minisgl.model_config.quantization import Int4Scheme, Scheme

AnyExperts = PlainExperts | Fp8Experts | Int4Experts | GptOssExperts | Mxfp4Experts


def make_experts(
    sizes: ExpertSizes, scheme: Scheme | None, dtype: torch.dtype, device: torch.device
) -> AnyExperts:
    """Weights of the kind that `scheme` says; None = unquantized."""
    if sizes.stored is ExpertStorage.MXFP4:
        return Mxfp4Experts(sizes, dtype, device)
    if sizes.stored is ExpertStorage.GPT_OSS:
        return GptOssExperts(sizes, dtype, device)
    if scheme is None:
        return PlainExperts(sizes, dtype, device)
    if isinstance(scheme, Int4Scheme):
        return Int4Experts(sizes, scheme, dtype, device)
    return Fp8Experts(sizes, scheme, dtype, device)
