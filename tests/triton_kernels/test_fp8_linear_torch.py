"""torch's own product of FP8 numbers: how it is called, and on a GPU what it yields."""

import pytest
import torch

from tests.triton_kernels.fp8_layer import assert_close, layer
from triton_kernels.fp8_linear_torch import fp8_linear_torch


def test_a_weight_with_scales_of_channels_and_rows_of_any_number(device):
    one = layer((21, 144, 256), device)
    got = fp8_linear_torch(*one.four, one.bias, torch.bfloat16)
    assert got.shape == (21, 144)
    assert_close(got, one.expected(one.bias))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch multiplies with scales of blocks on GPUs only"
)
def test_a_weight_with_scales_of_blocks(device):
    one = layer((40, 256, 512), device, blocks=True)
    assert_close(fp8_linear_torch(*one.four), one.expected())
