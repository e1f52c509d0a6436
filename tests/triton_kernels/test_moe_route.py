"""Routing: experts and weights against a stable sort, pairs against a sort by expert."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels import moe_route
from triton_kernels.moe_route import route_triton, top_k_reference


def test_reference_takes_the_lowest_id_first_among_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [0.0, -0.0, 0.0, -1.0], [float("nan"), 1.0, 2.0, 1.0]])
    experts, weights = top_k_reference(logits, 2, True)
    assert experts.tolist() == [[1, 2], [0, 1], [2, 1]]
    torch.testing.assert_close(weights[:2], torch.full((2, 2), 0.5))
    torch.testing.assert_close(weights[2], torch.tensor([2.0, 1.0]).softmax(0))


@settings(max_examples=25)
@given(
    tokens=st.integers(1, 100),
    experts=st.sampled_from([1, 8, 60, 128, 256]),
    top_k=st.integers(1, 8),
    renormalize=st.booleans(),
    ties=st.booleans(),
    few=st.booleans(),
    seed=st.integers(0, 100),
)
def test_kernels_equal_the_reference(tokens, experts, top_k, renormalize, ties, few, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    top_k = min(top_k, experts)
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, experts), generator=rng)
    if ties:
        logits = logits.round() * torch.randint(0, 2, logits.shape, generator=rng)
        logits[logits == 2] = float("nan")
        logits[seed % tokens] = float("-inf")
    logits = logits.to(device)
    with patch.object(moe_route, "FEW_PAIRS", moe_route.FEW_PAIRS if few else 0):
        routing = route_triton(logits, top_k, renormalize)
    chosen, weights = top_k_reference(logits, top_k, renormalize)
    assert torch.equal(routing.experts, chosen)
    torch.testing.assert_close(routing.weights, weights, atol=1e-6, rtol=1e-5)
    flat = chosen.flatten()
    sorted_pairs = flat.sort(stable=True).indices[: int((flat < experts).sum())]
    assert torch.equal(routing.order[: len(sorted_pairs)].long(), sorted_pairs)
    counts = torch.bincount(flat.long(), minlength=experts + 1)[:experts]
    assert torch.equal(routing.expert_end.long(), counts.cumsum(0))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="thousands of tokens take too long in the interpreter"
)
@pytest.mark.parametrize("tokens", [33, 512, 513, 8192, 20000])
def test_many_tokens(tokens):
    logits = torch.randn((tokens, 128), device="cuda", dtype=torch.bfloat16)
    routing = route_triton(logits, 8, True)
    chosen, _ = top_k_reference(logits, 8, True)
    assert torch.equal(routing.experts, chosen)
    assert torch.equal(routing.order.long(), chosen.flatten().sort(stable=True).indices)
