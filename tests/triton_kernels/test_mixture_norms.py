"""The norms around MLP and experts: the references against formulas, the kernels against the references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triton_kernels.mixture_norms import (
    EntryNorms,
    ExitNorms,
    enter_mixture,
    enter_mixture_reference,
    leave_mixture,
    leave_mixture_reference,
)

EPS = 1e-6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(rng: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def padded(tokens: int) -> Tensor:
    """Slots; every third token is padding."""
    places = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    return torch.where(places % 3 == 1, -1, 7 * places)


def wide_of(arguments: tuple) -> tuple:
    """The same arguments in float64."""
    return tuple(
        type(one)(*(part.double() for part in one))
        if isinstance(one, EntryNorms | ExitNorms)
        else one.double()
        if isinstance(one, Tensor) and one.is_floating_point()
        else one
        for one in arguments
    )


def entry(tokens: int, width: int, experts: int, dtype: torch.dtype, extra: int = 0) -> tuple:
    rng = torch.Generator().manual_seed(tokens * width + experts)
    x, residual = (random(rng, dtype, tokens, width + extra)[:, :width] for _ in range(2))
    norms = EntryNorms(*(random(rng, dtype, width) for _ in range(4)))
    router = random(rng, dtype, experts, width)
    return x, residual, norms, EPS, router, width**-0.5, padded(tokens)


def leaving(tokens: int, width: int, dtype: torch.dtype, *, with_factors: bool, extra: int = 0) -> tuple:
    rng = torch.Generator().manual_seed(tokens * width)
    a, b, residual = (random(rng, dtype, tokens, width + extra)[:, :width] for _ in range(3))
    norms = ExitNorms(*(random(rng, dtype, width) for _ in range(3)))
    factors = random(rng, torch.float32, tokens, 1) if with_factors else None
    return a, b, factors, residual, norms, EPS, random(rng, dtype, 1)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight


def test_references_equal_the_formulas():
    arguments = wide_of(entry(5, 24, 6, torch.float32))
    x, residual, norms, _, router, factor, slots = arguments
    stream = norm(x, norms.inner) + residual
    got = enter_mixture_reference(*arguments)
    for one, weight in ((got[0], norms.mlp), (got[1], norms.experts)):
        torch.testing.assert_close(one, norm(stream, weight))
    torch.testing.assert_close(got[2], stream)
    is_real = slots >= 0
    logits = norm(stream, norms.route) @ router.T * factor
    torch.testing.assert_close(got[3][is_real], logits[is_real])
    assert (got[3][~is_real] == float("-inf")).all()
    arguments = wide_of(leaving(5, 24, torch.float32, with_factors=True))
    a, b, factors, residual, norms, _, scalar = arguments
    y, new_residual = leave_mixture_reference(*arguments)
    both = norm(a, norms.mlp) + norm(b * factors, norms.experts)
    torch.testing.assert_close(y, norm(both, norms.outer) * scalar)
    torch.testing.assert_close(new_residual, residual * scalar)


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 5),
    width=st.integers(1, 300),
    experts=st.sampled_from([1, 2, 7, 20]),
    half=st.booleans(),
    with_factors=st.booleans(),
    extra=st.integers(0, 3),
)
def test_kernels_equal_the_references(tokens, width, experts, half, with_factors, extra):
    dtype = torch.float16 if half else torch.float32
    tolerance = 8e-3 if half else 2e-5
    arguments = entry(tokens, width, experts, dtype, extra)
    for got, expected in zip(enter_mixture(*arguments), enter_mixture_reference(*arguments), strict=True):
        torch.testing.assert_close(got, expected.to(got.dtype), atol=tolerance, rtol=tolerance)
    arguments = leaving(tokens, width, dtype, with_factors=with_factors, extra=extra)
    for got, expected in zip(leave_mixture(*arguments), leave_mixture_reference(*arguments), strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16")
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_models_width_in_bfloat16(tokens):
    arguments = entry(tokens, 2816, 128, torch.bfloat16)
    exact = enter_mixture_reference(*wide_of(arguments))
    for got, expected in zip(enter_mixture(*arguments), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=5e-2, rtol=3e-2)
    arguments = leaving(tokens, 2816, torch.bfloat16, with_factors=True)
    exact = leave_mixture_reference(*wide_of(arguments))
    for got, expected in zip(leave_mixture(*arguments), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=5e-2, rtol=3e-2)
