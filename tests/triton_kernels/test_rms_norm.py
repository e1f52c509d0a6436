"""RMSNorm: the reference against a float64 formula, the kernels against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

EPS = 1e-5


def test_reference_equals_the_formula():
    x, weight = torch.randn(7, 40), torch.randn(40)
    expected = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS).double(), expected, atol=1e-6, rtol=1e-6)


def test_add_is_the_norm_of_the_rounded_sum():
    x, residual, weight = (torch.randn(5, 24).half(), torch.randn(5, 24).half(), torch.randn(24).half())
    y, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(y, rms_norm(new_residual, weight, EPS))


@pytest.mark.parametrize("norm", [rms_norm_reference, rms_norm_triton])
def test_the_result_is_rounded_once(norm, device):
    x, weight = torch.randn(40, 96, device=device).half(), torch.randn(96, device=device).half()
    exact = x.double() / (x.double().square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    # All but those that float32 moves across the middle between two numbers.
    assert (norm(x, weight, EPS) == exact.half()).double().mean() > 0.995


@settings(max_examples=30)
@given(rows=st.integers(1, 20), width=st.integers(1, 700), half=st.booleans(), extra=st.integers(0, 3))
def test_kernels_equal_the_reference(rows, width, half, extra):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if half else torch.float32
    rng = torch.Generator().manual_seed(rows * width)
    wide = torch.randn((rows, width + extra), generator=rng).to(device, dtype)
    x = wide[:, :width]
    residual = torch.randn((rows, width), generator=rng).to(device, dtype)
    weight = torch.randn(width, generator=rng).to(device, dtype)
    # Half a last place of the result may flip where the sums of squares differ in their last place.
    tolerance = 2e-3 if half else 1e-5
    torch.testing.assert_close(
        rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS), atol=tolerance, rtol=tolerance
    )
    y, new_residual = add_rms_norm_triton(x, residual, weight, EPS)
    expected_y, expected_residual = add_rms_norm_reference(x, residual, weight, EPS)
    torch.testing.assert_close(y, expected_y, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(new_residual, expected_residual, rtol=0, atol=0)


@pytest.mark.parametrize("width", [128, 2048, 5120])
def test_kernel_at_model_widths(width, device):
    x, weight = torch.randn(9, width, device=device), torch.randn(width, device=device)
    torch.testing.assert_close(rms_norm_triton(x, weight, EPS), rms_norm_reference(x, weight, EPS))
