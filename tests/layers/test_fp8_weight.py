"""FP8 weights: who rounds the input, in which company, and which parts a weight has."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from minisgl.layers.fp8_weight import Fp8Weight
from minisgl.layers.norm import RMSNorm
from minisgl.layers.weight import Fp8Rows, InputFormat
from minisgl.model_config.quantization import ActivationScales, Fp8Scheme, WeightScales
from triton_kernels.quantize_fp8 import GROUP, dequantize_fp8, quantize_fp8_reference
from triton_kernels.registry import KERNELS

CPU = torch.device("cpu")
SCHEMES = [
    Fp8Scheme(weights, activations)
    for weights, activations in itertools.product(WeightScales, ActivationScales)
    if (weights is WeightScales.BLOCK) == (activations is ActivationScales.GROUP)
]
SIZES = [(256, (128, 256)), (150, (96, 40, 40)), (48, (80, 80))]


def filled(width: int, sizes: tuple[int, ...], scheme: Fp8Scheme, *, bias: bool = False) -> Fp8Weight:
    """A weight from random numbers, whose static input scale covers inputs of up to 5."""
    generator = torch.Generator().manual_seed(width)
    weight = Fp8Weight(width, sizes, scheme, torch.float32, CPU, bias=bias)
    weight.quantize(torch.randn(sum(sizes), width, generator=generator))
    if weight.input_scales is not None:
        weight.input_scales.copy_(torch.linspace(1, 5, len(sizes)) / 448)
        weight.finish_loading()
    if weight.bias is not None:
        weight.bias.normal_(generator=generator)
    return weight


def dequantized(weight: Fp8Weight) -> torch.Tensor:
    """The numbers times their scales, float64 [out, in]."""
    parts = []
    for tensors in weight.part_tensors():
        scale = tensors["weight_scale"].double()
        out, width = tensors["weight"].shape
        if weight.has_blocks:
            scale = scale.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
        parts.append(tensors["weight"].double() * scale)
    return torch.cat(parts)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("width", "sizes"), SIZES)
def test_the_product_is_that_of_the_rounded_numbers(
    width: int, sizes: tuple[int, ...], scheme: Fp8Scheme
) -> None:
    weight = filled(width, sizes, scheme, bias=True)
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(1))
    rounded = weight._rounded(x)
    exact_x = dequantize_fp8(*rounded, torch.float64)[:, :width]
    assert ((exact_x - x).abs() <= x.abs() / 16 + 1e-4).all(), "e4m3 has three bits behind the first"
    assert weight.bias is not None
    expected = F.linear(exact_x, dequantized(weight), weight.bias.double())
    torch.testing.assert_close(weight.multiply(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_is_rounded_alike_alone_and_in_company(scheme: Fp8Scheme) -> None:
    weight = filled(256, (128, 128), scheme)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 70)[:, None]
    values, scales = weight._rounded(x)
    for row in (0, 33, 69):
        alone = weight._rounded(x[row : row + 1])
        assert torch.equal(alone.values[0].float(), values[row].float())
        assert torch.equal(alone.scales[:, 0], scales[:, row])


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("width", [256, 150])
def test_the_norm_before_may_round_and_nothing_changes(width: int, scheme: Fp8Scheme) -> None:
    weight = filled(width, (64, 64), scheme)
    norm = RMSNorm(width, 1e-5, torch.float32, CPU)
    norm.weight.fill_(0.7)
    x, residual = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(3))
    plain, total = norm.forward_add(x, residual)
    given, same_total = norm.forward_add_as(x, residual, weight.input_format)
    torch.testing.assert_close(same_total, total)
    can_round = not weight.padding and scheme.activations is not ActivationScales.STATIC
    assert isinstance(given, Fp8Rows) == can_round == (weight.input_format is not InputFormat.PLAIN)
    torch.testing.assert_close(weight.multiply(given), weight.multiply(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("wanted", InputFormat)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_gated_layer_rounds_its_rows_as_the_next_layer_wants_them(
    scheme: Fp8Scheme, wanted: InputFormat
) -> None:
    weight = filled(256, (128, 128), scheme)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(4))
    plain, given = weight.gated(x), weight.gated(x, wanted)
    assert isinstance(plain, torch.Tensor)
    if wanted is InputFormat.PLAIN:
        assert isinstance(given, torch.Tensor)
        assert torch.equal(given, plain)
    else:
        assert isinstance(given, Fp8Rows)
        expected = quantize_fp8_reference(plain, GROUP if wanted is InputFormat.FP8_GROUPS else None)
        torch.testing.assert_close(dequantize_fp8(*given), dequantize_fp8(*expected))


def test_replaced_ops_are_called_and_fused_ones_are_not() -> None:
    norm = RMSNorm(256, 1e-5, torch.float32, CPU)
    norm.weight.fill_(1.0)
    norm.kernels = KERNELS._replace(add_rms_norm=lambda x, residual, weight, eps: (x, residual))
    x = torch.ones(2, 256)
    given, _ = norm.forward_add_as(x, x, InputFormat.FP8_ROWS)
    assert given is x
    weight = filled(256, (64, 64), SCHEMES[0])
    weight.kernels = KERNELS._replace(silu_mul=lambda gate_up: gate_up[:, :1])
    gated = weight.gated(x)
    assert isinstance(gated, torch.Tensor)
    assert torch.equal(gated, weight.multiply(x)[:, :1])


def test_a_static_input_scale_is_the_largest_of_the_parts() -> None:
    weight = filled(256, (64, 64, 64), Fp8Scheme(WeightScales.TENSOR, ActivationScales.STATIC))
    assert weight.input_scale.item() == pytest.approx(5 / 448)
    assert weight._rounded(torch.full((1, 256), 100.0)).values.float().max() == 448
