"""The mixture's router, and scales that a choice of experts does not express."""

import pytest
import torch
from torch import nn

from minisgl.errors import ModelError
from minisgl.layers.moe import MoeMLP
from minisgl.layers.norm import RMSNorm
from minisgl.model_config.config import ExpertsConfig
from minisgl.model_config.quantization import Int4Layout, Int4Scheme, Quantization

CPU = torch.device("cpu")


def test_a_router_in_float32_gives_logits_that_are_not_rounded() -> None:
    config = ExpertsConfig(
        num_experts=8, experts_per_token=2, intermediate_size=16, renormalize=True, router_in_float32=True
    )
    layer = MoeMLP(config, 64, torch.bfloat16, CPU)
    norm = RMSNorm(64, 1e-6, torch.bfloat16, CPU)
    for parameter in (*layer.parameters(), *norm.parameters()):
        nn.init.normal_(parameter)
    seen: list[torch.Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[:2]))
    x = torch.randn(20, 64, dtype=torch.bfloat16)
    layer.forward_add(x, torch.randn_like(x), norm, torch.arange(20, dtype=torch.int32))
    normed, logits = seen
    torch.testing.assert_close(
        logits.double(), normed.double() @ layer.router.double().T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("quantized", [False, True])
def test_negative_scales_of_quantized_experts_are_refused(quantized: bool) -> None:
    config = ExpertsConfig(
        num_experts=4, experts_per_token=2, intermediate_size=32, renormalize=True, expert_scales=True
    )
    quantization = (
        Quantization(scheme=Int4Scheme(layout=Int4Layout.COMPRESSED, group=32), source="a test")
        if quantized
        else None
    )
    layer = MoeMLP(config, 64, torch.float32, CPU, quantization)
    assert layer.expert_scale is not None
    layer.expert_scale.fill_(1.0)
    layer.finish_loading()
    layer.expert_scale[2] = -1.0
    if not quantized:
        layer.finish_loading()
        return
    with pytest.raises(ModelError, match="scales of at least 0, got negative ones"):
        layer.finish_loading()
