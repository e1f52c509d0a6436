"""The choice of experts: the reference against a loop over tokens, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from triton_kernels.fused_moe import fused_moe_reference
from triton_kernels.moe_choice import Choice, choose_experts, choose_experts_reference, choose_experts_triton
from triton_kernels.moe_route import top_k_reference

NOWHERE = float("-inf")


def weights_of(choice: Tensor, factors: Tensor, top_k: int) -> tuple[list[list[int]], Tensor]:
    """Each token's experts, ascending, and the weights [T, E] that fused_moe and the factors give."""
    experts, weights = top_k_reference(choice, top_k, True)
    dense = torch.zeros(len(choice), choice.shape[1] + 1, dtype=weights.dtype, device=choice.device)
    dense.scatter_(1, experts.long(), weights * factors)
    return [sorted(row) for row in experts.tolist()], dense[:, :-1]


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_reference_chooses_and_weighs_as_transformers_glm_does(
    groups: tuple[int, int], renormalize: bool
) -> None:
    torch.manual_seed(0)
    config = Glm4MoeConfig(
        n_routed_experts=16,
        num_experts_per_tok=3,
        hidden_size=32,
        n_group=groups[0],
        topk_group=groups[1],
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = Glm4MoeTopkRouter(config)
    with torch.no_grad():
        router.weight.normal_()
    router.e_score_correction_bias.normal_(0, 0.3)
    logits, weights, experts = router(torch.randn(50, 32))
    choice = Choice(3, True, renormalize, 2.5, *groups)
    chosen, ours = weights_of(*choose_experts(logits, choice, router.e_score_correction_bias), 3)
    assert chosen == [sorted(row) for row in experts.tolist()]
    theirs = torch.zeros(50, 16).scatter_(1, experts, weights)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0, -4.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    chosen, weights = weights_of(*choose_experts_reference(logits, Choice(2), bias), 2)
    assert chosen == [[0, 3]]
    scores = torch.sigmoid(torch.tensor([3.0, -4.0]))
    torch.testing.assert_close(weights[0, [0, 3]], scores / scores.sum())


def test_a_scale_multiplies_its_experts_weight() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
    scale = torch.tensor([2.0, -0.25, 0.0])
    _, weights = weights_of(*choose_experts_reference(logits, Choice(2, sigmoid=False), None, scale), 2)
    near, far = torch.softmax(torch.tensor([2.0, 1.0]), 0)
    expected = torch.tensor([[2 * near, 0.25 * far, 0.0], [0.0, 0.25 * far, 0.0]])
    torch.testing.assert_close(weights, expected)


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 40),
    experts_of_group=st.sampled_from([2, 8, 20]),
    groups=st.sampled_from([(1, 1), (2, 1), (8, 3), (5, 5)]),
    top_k=st.integers(1, 8),
    sigmoid=st.booleans(),
    renormalize=st.booleans(),
    biased=st.booleans(),
    scaled=st.booleans(),
    strange=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_kernel_equals_the_reference(
    tokens, experts_of_group, groups, top_k, sigmoid, renormalize, biased, scaled, strange, seed
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    experts = experts_of_group * groups[0]
    choice = Choice(min(top_k, experts_of_group * groups[1]), sigmoid, renormalize, 1.8, *groups)
    rng = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((tokens, experts), generator=rng)
    if strange:  # ties, as far as a rounding does not break them, NaN, padding, scores that vanish
        logits = logits.round()
        logits[logits == 2] = float("nan")
        logits[logits == -4] = -200.0
        logits[seed % tokens] = NOWHERE
    bias = torch.randn(experts, generator=rng) if biased else None
    scale = torch.randn(experts, generator=rng) if scaled else None
    arguments = [None if one is None else one.to(device) for one in (bias, scale)]
    wide = torch.cat((logits, torch.full_like(logits, 9.0)), 1).to(device)[:, :experts]
    got, factors = choose_experts_triton(wide, choice, *arguments)
    expected, expected_factors = choose_experts_reference(wide, choice, *arguments)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(factors, expected_factors, atol=1e-6, rtol=1e-5)


def test_padding_goes_to_no_expert_and_yields_zeros() -> None:
    logits = torch.full((3, 8), NOWHERE)
    logits[1] = torch.arange(8.0)
    choice, factors = choose_experts(logits, Choice(2), torch.ones(8))
    out = fused_moe_reference(torch.ones(3, 16), choice, torch.ones(8, 32, 16), torch.ones(8, 16, 16), 2)
    assert (out * factors)[[0, 2]].count_nonzero() == 0
    assert (out * factors)[1].min() > 0
