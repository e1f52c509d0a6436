"""Rounding to FP8, alone and behind SiLU, against plain torch."""

# A kernel launch looks like a call of a function whose constants are objects.
# pyright: reportArgumentType=false

import pytest
import torch
import triton
import triton.language as tl

from triton_kernels.quantize_fp8 import (
    FP8,
    GROUP,
    LARGEST,
    as_fp8,
    dequantize_fp8,
    quantize_fp8,
    quantize_fp8_reference,
    quantize_fp8_triton,
    quantize_weight_fp8,
    silu_mul_fp8_reference,
    silu_mul_fp8_triton,
)
from triton_kernels.silu_mul import silu_mul_triton

SIZES = [(1, 128, None), (5, 300, None), (3, 2500, None), (3, 1280, GROUP), (7, 4096, GROUP), (0, 256, GROUP)]


def rows_of(count: int, width: int, device: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Rows of different sizes that lie apart, NaN between them."""
    rng = torch.Generator().manual_seed(count + width)
    around = torch.full((count, width + 40), float("nan"))
    around[:, :width] = torch.randn(count, width, generator=rng) * torch.logspace(-3, 1, 8)[:count, None]
    return around.to(device, dtype)[:, :width]


def assert_same_numbers(got: tuple, expected: tuple) -> None:
    """Equal scales; equal values but for the few that a division moved across the middle of two."""
    assert got[0].dtype == FP8
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)
    differ = got[0].float() != expected[0].float()
    assert differ.sum() <= max(1, differ.numel() // 1000)
    torch.testing.assert_close(got[0].float(), expected[0].float(), rtol=0.13, atol=2**-9)


@triton.jit
def _as_fp8_kernel(x_ptr, y_ptr, N: tl.constexpr):
    places = tl.arange(0, N)
    tl.store(y_ptr + places, as_fp8(tl.load(x_ptr + places)))


def test_numbers_are_rounded_to_the_nearest_and_ties_to_even(device):
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    every = torch.cat([numbers, middles, middles * 0.999, middles * 1.001]).clamp(max=LARGEST)
    every = torch.nn.functional.pad(torch.cat([every, -every]), (0, 1024 - 2 * every.numel())).to(device)
    got = torch.empty(1024, dtype=FP8, device=device)
    _as_fp8_kernel[(1,)](every, got, 1024)
    assert torch.equal(got.float(), every.to(FP8).float())


@pytest.mark.parametrize(("count", "width", "group"), SIZES)
def test_the_kernel_equals_the_reference_and_uses_only_its_rows(count, width, group, device):
    x = rows_of(count, width, device)
    got = quantize_fp8_triton(x, group)
    assert got[1].shape == (width // group if group else 1, count)
    assert_same_numbers(got, quantize_fp8_reference(x, group))
    assert_same_numbers(quantize_fp8(x, group), quantize_fp8_reference(x, group))


@pytest.mark.parametrize(("count", "width", "group"), SIZES)
def test_silu_mul_is_quantized_as_if_it_ran_alone(count, width, group, device):
    gate_up = rows_of(count, 2 * width, device)
    expected = quantize_fp8_reference(silu_mul_triton(gate_up), group)
    assert_same_numbers(silu_mul_fp8_triton(gate_up, group), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter rounds to bfloat16 in another way")
@pytest.mark.parametrize("width", [128, 300, 14336, 17408])
def test_rows_of_bfloat16_are_rounded_two_numbers_at_a_time(width):
    gate_up = rows_of(8, 2 * width, "cuda", torch.bfloat16)
    assert_same_numbers(silu_mul_fp8_triton(gate_up), silu_mul_fp8_reference(gate_up))


@pytest.mark.parametrize("rows", [0, 3, 8])
@pytest.mark.parametrize("quantize", [quantize_fp8_triton, silu_mul_fp8_triton])
def test_rows_have_memory_behind_them_where_it_is_asked_for(quantize, rows, device):
    x = rows_of(rows, 256, device)
    rounded, scales = quantize(x, room=5)
    width = rounded.shape[1]
    assert rounded.is_contiguous()
    assert rounded.untyped_storage().nbytes() == max(rows, 5) * width
    for got, expected in zip((rounded, scales), quantize(x), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("group", [None, GROUP])
def test_what_was_rounded_is_within_a_sixteenth_of_each_value(group, device):
    x = rows_of(4, 512, device, torch.float32)
    again = dequantize_fp8(*quantize_fp8_triton(x, group))
    peak = x.abs().amax(1, keepdim=True)
    assert ((again - x).abs() <= x.abs() / 16 + peak / LARGEST / 1024).all()


@pytest.mark.parametrize("quantize", [quantize_fp8_triton, quantize_fp8_reference])
def test_zeros_stay_zeros_and_nan_stays_nan(quantize, device):
    x = torch.zeros(3, 256, device=device)
    x[1, 7] = float("nan")
    rounded, scales = quantize(x)
    assert (rounded[[0, 2]].float() == 0).all()
    assert (scales[0, [0, 2]] > 0).all()
    assert rounded[1, 7].float().isnan()


def test_a_width_that_groups_do_not_divide_is_refused(device):
    with pytest.raises(ValueError, match="multiple of it, got 200"):
        quantize_fp8_triton(torch.zeros(2, 200, device=device), GROUP)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_a_weight_has_a_scale_for_each_row_or_block(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rounded, scales = quantize_weight_fp8(weight)
    torch.testing.assert_close(rounded.float() * scales[:, None], weight, rtol=1 / 16, atol=1e-3)
    assert torch.equal(scales, weight.abs().amax(1) / LARGEST)
    rounded, scales = quantize_weight_fp8(weight, blocks=True)
    wide = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[: shape[0], : shape[1]]
    assert rounded.shape == shape
    torch.testing.assert_close(rounded.float() * wide, weight, rtol=1 / 16, atol=1e-3)
    assert scales[0, 0] == weight[:GROUP, :GROUP].abs().max() / LARGEST
