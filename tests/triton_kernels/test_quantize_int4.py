"""Quantizing to 4-bit weights, and back."""

import pytest
import torch

from tests.triton_kernels.int4_layer import layer
from triton_kernels.quantize_int4 import (
    GROUPS,
    Int4Weight,
    check_int4,
    dequantize_int4,
    dequantize_int4_reference,
    dequantize_int4_triton,
    quantize_weight_int4,
)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_dequantizing_follows_the_formula(group, zero_points, device):
    one = layer((1, 45, 256), group, zero_points, device)
    reference = dequantize_int4_reference(one.weight, torch.float64)
    torch.testing.assert_close(reference, one.exact_weight, rtol=0, atol=0)
    torch.testing.assert_close(dequantize_int4_triton(one.weight, torch.float32), reference.float())
    torch.testing.assert_close(dequantize_int4(one.weight, torch.float32), reference.float())


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_quantizing_is_off_by_half_a_step_at_most(group, zero_points):
    weight = torch.randn(20, 256) + (2.0 if zero_points else 0.0)
    quantized = quantize_weight_int4(weight, group, zero_points)
    got = dequantize_int4_reference(quantized, torch.float32)
    # The largest of a group without zero points is 7 steps of 7.5; a rounded zero point adds half a step.
    steps = quantized.scales.t().repeat_interleave(group, 1)
    assert ((got - weight).abs() <= steps * (1.01 if zero_points else 0.51)).all()


def test_tensors_that_do_not_fit_each_other_are_refused():
    weight = layer((1, 45, 256), 64, True, "cpu").weight
    check_int4(weight)
    assert weight.zeros is not None
    for wrong in (
        weight._replace(packed=weight.packed.int()),
        weight._replace(scales=weight.scales[:, :-1]),
        weight._replace(scales=weight.scales[:3]),
        weight._replace(zeros=weight.zeros[:1]),
        Int4Weight(weight.packed, weight.scales[:1]),
    ):
        with pytest.raises(ValueError, match=r"packed 4-bit weights are uint8 \[K / 128, N, 64\]"):
            check_int4(wrong)
