"""The norm with a router behind it: the reference against formulas, the kernel against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triton_kernels.norm_router import (
    add_rms_norm_router,
    add_rms_norm_router_reference,
    add_rms_norm_router_triton,
    router_logits,
)

EPS = 1e-5


def inputs(tokens: int, width: int, experts: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, residual, weight, router."""
    rng = torch.Generator().manual_seed(tokens * width + experts)
    shapes = ((tokens, width), (tokens, width), (width,), (experts, width))
    scales = (1.0, 1.0, 1.0, width**-0.5)
    return [
        (scale * torch.randn(shape, generator=rng)).to(device, dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def slots(tokens: int, device: str) -> Tensor:
    """Every third token is padding."""
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    return torch.where(places % 3 == 1, -1, 7 * places)


def test_reference_equals_the_formulas():
    x, residual, weight, router = inputs(5, 24, 6, "cpu", torch.float32)
    y, stream, logits = add_rms_norm_router_reference(x, residual, weight, EPS, router, slots(5, "cpu"))
    total = x.double() + residual.double()
    normed = total / (total.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(stream.double(), total, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(y.double(), normed, atol=1e-6, rtol=1e-5)
    routed = [0, 2, 3]
    torch.testing.assert_close(
        logits[routed].double(), (normed @ router.double().T)[routed], atol=1e-6, rtol=1e-5
    )
    assert (logits[[1, 4]] == float("-inf")).all()
    bias = torch.arange(6.0)
    biased = add_rms_norm_router(x, residual, weight, EPS, router, slots(5, "cpu"), bias)[2]
    torch.testing.assert_close(biased, logits + bias)


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 40),
    width=st.integers(1, 300),
    experts=st.sampled_from([1, 2, 7, 60, 128]),
    half=st.booleans(),
    biased=st.booleans(),
    extra=st.integers(0, 3),
)
def test_kernel_equals_the_reference(tokens, width, experts, half, biased, extra):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if half else torch.float32
    x, residual, weight, router = inputs(tokens, width, experts, device, dtype)
    if extra:  # strided rows
        nans = torch.full((tokens, extra), float("nan"), dtype=dtype, device=device)
        x, residual = (torch.cat((one, nans), 1)[:, :width] for one in (x, residual))
    where = slots(tokens, device)
    bias = 3 * router[:, 0].clone() if biased else None
    got = add_rms_norm_router_triton(x, residual, weight, EPS, router, where, bias)
    expected = add_rms_norm_router_reference(x, residual, weight, EPS, router, where, bias)
    tolerance = 5e-3 if half else 1e-5
    for one, other in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(got[2], expected[2].float(), atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16, and more rows than the kernels take")
@pytest.mark.parametrize("tokens", [0, 1, 16, 17, 300, 600])
def test_any_number_of_rows_at_a_models_width(tokens):
    arguments = inputs(tokens, 2048, 128, "cuda", torch.bfloat16)
    x, residual, weight, router = arguments
    where = slots(tokens, "cuda")
    y, stream, logits = add_rms_norm_router(x, residual, weight, EPS, router, where)
    exact = add_rms_norm_router_reference(
        x.double(), residual.double(), weight.double(), EPS, router.double(), where
    )
    for got, expected in ((y, exact[0]), (stream, exact[1]), (logits, exact[2])):
        torch.testing.assert_close(got.double(), expected, atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("in_float32", [False, True])
def test_ops_are_what_they_tell_torch_compile(tokens, in_float32):
    x, residual, weight, router = inputs(tokens, 24, 6, "cpu", torch.bfloat16)
    where = slots(tokens, "cpu")
    for op, arguments in (
        (router_logits, (x, router, where, None, in_float32)),
        (add_rms_norm_router, (x, residual, weight, EPS, router, where, None, in_float32)),
    ):
        torch.library.opcheck(op, arguments)
    logits = router_logits(x, router, where, None, in_float32)
    expected = x.float() @ router.float().T
    expected[where < 0] = float("-inf")
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-6 if in_float32 else 1e-2, rtol=1e-2)
