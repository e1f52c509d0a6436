"""The norms that are rounded to FP8: as the norm and the rounding one after the other."""

import pytest
import torch

from triton_kernels.quantize_fp8 import FP8, GROUP, dequantize_fp8, quantize_fp8_triton
from triton_kernels.rms_norm import NormConfig, add_rms_norm_triton
from triton_kernels.rms_norm_fp8 import (
    add_rms_norm_fp8,
    add_rms_norm_fp8_reference,
    add_rms_norm_fp8_triton,
    rms_norm_fp8,
    rms_norm_fp8_reference,
    rms_norm_fp8_triton,
)

EPS = 1e-5
SIZES = [(1, 576, None, None), (5, 300, None, NormConfig(4, 2)), (3, 640, GROUP, None), (0, 128, GROUP, None)]


def inputs(rows: int, width: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rows + width)
    around = torch.full((2, rows, width + 24), float("nan"))
    around[..., :width] = torch.randn(2, rows, width, generator=rng)
    x, residual = around.to(device, torch.float16)[..., :width]
    return x, residual, torch.randn(width, generator=rng).to(device, torch.float16)


def assert_close(got, expected) -> None:
    """The scales of the reference, and nearly all of its values: the norms differ in their last bits."""
    assert got[0].dtype == FP8
    torch.testing.assert_close(got[1], expected[1], rtol=2e-3, atol=0)
    wanted = dequantize_fp8(*expected[:2])
    assert (dequantize_fp8(*got[:2]) - wanted).norm() <= 8e-3 * wanted.norm()


@pytest.mark.parametrize(("rows", "width", "group", "config"), SIZES)
def test_the_norm_is_rounded_to_fp8(rows, width, group, config, device):
    x, _, weight = inputs(rows, width, device)
    expected = rms_norm_fp8_reference(x, weight, EPS, group)
    assert_close(rms_norm_fp8_triton(x, weight, EPS, group, config), expected)
    assert_close(rms_norm_fp8(x, weight, EPS, group), expected)


@pytest.mark.parametrize(("rows", "width", "group", "config"), SIZES)
def test_the_sum_is_as_without_fp8_and_its_norm_is_rounded(rows, width, group, config, device):
    x, residual, weight = inputs(rows, width, device)
    expected = add_rms_norm_fp8_reference(x, residual, weight, EPS, group)
    for got in (
        add_rms_norm_fp8_triton(x, residual, weight, EPS, group, config),
        add_rms_norm_fp8(x, residual, weight, EPS, group),
    ):
        assert_close(got, expected)
        assert torch.equal(got[2], x + residual)


@pytest.mark.parametrize("group", [None, GROUP])
def test_the_numbers_are_those_of_the_norm_and_the_rounding_apart(group, device):
    x, residual, weight = inputs(9, 512, device)
    normed, _ = add_rms_norm_triton(x, residual, weight, EPS)
    got, scales, _ = add_rms_norm_fp8_triton(x, residual, weight, EPS, group)
    expected, expected_scales = quantize_fp8_triton(normed, group)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(got.float(), expected.float())
