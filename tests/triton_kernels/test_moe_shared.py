"""A mixture with a gated shared expert: the reference against its parts, the kernels against it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from triton_kernels.fused_moe import SharedExpert, fused_moe
from triton_kernels.moe_shared import moe_shared, moe_shared_reference, moe_shared_triton

INF = float("inf")
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, SharedExpert]


def inputs(tokens: int, experts: int, width: int, expert_width: int, seed: int = 0) -> Inputs:
    """x, logits, gate_up, down, shared; in float64."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    gate_up = normal(experts + 1, 2 * expert_width, width) / math.sqrt(width)
    down = normal(experts + 1, width, expert_width) / math.sqrt(expert_width)
    x, logits = normal(tokens, width), 2 * normal(tokens, experts + 1)
    return x, logits, gate_up[:-1], down[:-1], SharedExpert(gate_up[-1], down[-1])


def narrowed(tensors: Inputs, device: str, dtype: torch.dtype) -> Inputs:
    *routed, shared = tensors
    x, logits, gate_up, down, *matrices = (one.to(device, dtype) for one in (*routed, *shared))
    return x, logits.float(), gate_up, down, SharedExpert(*matrices)


def relative_error(got: Tensor, expected: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.cpu().double() - expected).norm() / expected.norm())


def test_the_reference_adds_the_gated_shared_expert_to_the_mixture() -> None:
    x, logits, gate_up, down, shared = inputs(5, 6, 32, 16)
    gate, up = (x @ shared.gate_up.T).split(16, 1)
    expected = fused_moe(x, logits[:, :6], gate_up, down, 2)
    expected += (F.silu(gate) * up) @ shared.down.T / (1 + torch.exp(-logits[:, 6:]))
    torch.testing.assert_close(moe_shared(x, logits, gate_up, down, shared, 2), expected)


@settings(max_examples=10)
@given(
    tokens=st.sampled_from([1, 3, 5, 9]),
    experts_and_top_k=st.sampled_from([(4, 4), (8, 3), (40, 5)]),
    width=st.sampled_from([16, 48]),
    expert_width=st.sampled_from([16, 32]),
    half=st.booleans(),
    renormalize=st.booleans(),
    seed=st.integers(0, 100),
)
def test_kernels_equal_the_reference(
    tokens: int,
    experts_and_top_k: tuple[int, int],
    width: int,
    expert_width: int,
    half: bool,
    renormalize: bool,
    seed: int,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (experts, top_k), dtype = experts_and_top_k, torch.float16 if half else torch.float32
    tensors = inputs(tokens, experts, width, expert_width, seed)
    narrow = narrowed(tensors, device, dtype)
    expected = moe_shared_reference(*narrowed(narrow, "cpu", torch.float64), top_k, renormalize)
    got = moe_shared_triton(*narrow, top_k, renormalize)
    assert got.dtype == dtype
    assert relative_error(got, expected) < (2e-3 if half else 1e-5)


@pytest.mark.parametrize("tokens", [3, 6])
def test_padding_yields_zeros_whatever_it_holds(tokens: int, device: str) -> None:
    x, logits, gate_up, down, shared = narrowed(inputs(tokens, 8, 48, 32), device, torch.float32)
    logits[1] = -INF
    expected = moe_shared_reference(x, logits, gate_up, down, shared, 2)
    assert (expected[1] == 0).all()
    x[1] = float("nan")
    got = moe_shared_triton(x, logits, gate_up, down, shared, 2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", [2, 7])
def test_rows_may_be_strided_and_weights_not_hit_are_never_used(tokens: int, device: str) -> None:
    x, logits, gate_up, down, shared = narrowed(inputs(tokens, 30, 48, 32), device, torch.float32)
    logits[:, 4:28] = -50.0
    expected = moe_shared_reference(x, logits, gate_up, down, shared, 2)
    gate_up[4:28], down[4:28] = float("nan"), float("nan")
    apart = torch.full((tokens, 100), float("nan"), device=device)
    apart[:, :48], apart[:, 50:81] = x, logits
    got = moe_shared_triton(apart[:, :48], apart[:, 50:81], gate_up, down, shared, 2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_gate_that_is_nan_is_not_hidden(device: str) -> None:
    for tokens in (2, 6):  # of each path
        tensors = narrowed(inputs(tokens, 8, 48, 32), device, torch.float32)
        tensors[1][0, 8] = float("nan")
        for run in (moe_shared_reference, moe_shared_triton):
            out = run(*tensors, 2)
            assert out[0].isnan().all()
            assert out[1:].isfinite().all()
