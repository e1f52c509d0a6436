"""Packing 4-bit weights, quantizing to them, and back."""

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
    pack_int4,
    quantize_weight_int4,
    unpack_int4,
)


def test_a_byte_holds_an_input_and_the_one_64_behind_it():
    numbers = torch.zeros(3, 256, dtype=torch.int32)
    numbers[2, 128 + 5], numbers[2, 128 + 64 + 5] = 7, 12
    packed = pack_int4(numbers)
    assert packed.shape == (2, 3, 64)
    assert packed[1, 2, 5] == 7 + 16 * 12
    assert packed.sum() == packed[1, 2, 5]


def test_unpacking_yields_what_was_packed():
    numbers = torch.randint(0, 16, (37, 384))
    assert torch.equal(unpack_int4(pack_int4(numbers)), numbers.to(torch.uint8))


def test_a_width_that_is_no_multiple_of_128_is_refused():
    with pytest.raises(ValueError, match="multiple of 128 inputs, got 192"):
        pack_int4(torch.zeros(4, 192, dtype=torch.int32))


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
