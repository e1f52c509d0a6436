"""gpt-oss's experts in MXFP4 against transformers' own, from the same stored tensors."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from minisgl.errors import ModelError
from minisgl.layers.experts.mxfp4 import Mxfp4Experts
from minisgl.layers.experts.weights import ExpertSizes
from triton_kernels.moe_gate import Gate, GateKind

CLAMPED = Gate(GateKind.CLAMPED, 1.702, 7.0)
DEVICE = torch.device("cpu")


@pytest.mark.parametrize(("width", "half"), [(160, 96), (128, 256)])
def test_stored_blocks_become_what_transformers_computes(width: int, half: int) -> None:
    experts = 3
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=width, intermediate_size=half, num_local_experts=experts
    )
    theirs = GptOssExperts(config).float()
    sizes = ExpertSizes(experts, width, half, ("gate", "up", "down"), gate=CLAMPED)
    ours = Mxfp4Experts(sizes, torch.float32, DEVICE)
    for parameter in ours.parameters():
        parameter.fill_(float("nan") if parameter.is_floating_point() else 255)
    rng = torch.Generator().manual_seed(0)
    stored = {}
    for name, outputs, inputs in (("gate_up_proj", 2 * half, width), ("down_proj", width, half)):
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(120, 125, blocks.shape[:3], generator=rng, dtype=torch.uint8)
        bias = torch.randn(experts, outputs, generator=rng)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": bias}
        getattr(theirs, name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        getattr(theirs, f"{name}_bias").data = bias
    views = ours.part_tensors()
    assert views.keys() == {f"experts.{name}" for name in stored}
    for name, tensor in stored.items():
        views[f"experts.{name}"].copy_(tensor.view(views[f"experts.{name}"].shape))
    ours.finish_loading()
    x = torch.randn(6, width, generator=rng)
    logits = torch.randn(6, experts, generator=rng)
    chosen = logits.topk(2)
    with torch.no_grad():
        expected = theirs(x, chosen.indices, chosen.values.softmax(1))
    torch.testing.assert_close(
        ours(x, logits, 2, True), expected, rtol=1e-4, atol=1e-4 * expected.abs().max()
    )


def test_dummy_weights_are_the_normal_ones_in_four_bits() -> None:
    sizes = ExpertSizes(2, 96, 64, ("gate", "up", "down"))
    ours = Mxfp4Experts(sizes, torch.float32, DEVICE)
    rng = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor) -> None:
        tensor.normal_(0.0, 0.02, generator=rng)

    ours.fill_dummy(normal)
    out = ours(torch.randn(5, 96, generator=rng), torch.randn(5, 2, generator=rng), 1, True)
    assert out.isfinite().all()
    assert out.norm() > 0


@pytest.mark.parametrize(("scale", "named"), [(255, "NaN"), (193, r"2\^66")])
def test_scales_that_are_nan_or_too_large_are_refused(scale: int, named: str) -> None:
    ours = Mxfp4Experts(ExpertSizes(2, 96, 64, ("gate", "up", "down")), torch.float32, DEVICE)
    for view in ours.part_tensors().values():
        view.fill_(120 if view.dtype == torch.uint8 else 0.0)
    ours.part_tensors()["experts.down_proj_scales"][1, 5, 1] = scale
    with pytest.raises(ModelError, match=f"down_proj_scales: the largest MXFP4 scale is {named}"):
        ours.finish_loading()
