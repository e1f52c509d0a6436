"""The linear layers of 4-bit weights over few rows, against float64."""

import pytest
import torch

from tests.triton_kernels.int4_layer import assert_close, layer
from triton_kernels.gpu import Gpu
from triton_kernels.int4_linear_few import (
    FEW_ROWS,
    ROWS_OF_PROGRAMS,
    Int4Config,
    default_int4_config,
    int4_gated_linear_few,
    int4_linear_few,
)
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES

# Rows, outputs, width, group, zero points and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((1, 48, 512), 128, False, None),
    ((8, 40, 640), 128, True, Int4Config(16, 4, 2)),
    ((9, 33, 256), 64, False, Int4Config(16, 2, 3)),
    ((16, 40, 384), 64, True, Int4Config(32, 2, 2)),
    ((FEW_ROWS, 70, 256), 32, True, Int4Config(16, 2, 2)),
    ((3, 16, 128), 32, False, Int4Config(16, 4, 2)),
]


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_every_row_and_output_is_computed_with_and_without_bias(size, group, zero_points, config, device):
    one = layer(size, group, zero_points, device)
    bias = one.bias if size[0] % 2 else None
    got = int4_linear_few(one.x, one.weight, bias, config)
    assert got.dtype == one.x.dtype
    assert_close(got, one.expected(bias))


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES[1:3] + CASES[4:5])
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, group, zero_points, config, device):
    rows, outputs, width = size
    one = layer((rows, 2 * outputs, width), group, zero_points, device)
    assert_close(int4_gated_linear_few(one.x, one.weight, config), one.expected_gated())


def test_a_row_is_the_same_to_the_last_bit_alone_and_in_a_batch(device):
    one = layer((8, 40, 512), 128, False, device)
    # Whole numbers: numpy's products in the interpreter add up in an order that depends on the place.
    x = (4 * one.x).round()
    weight = one.weight._replace(scales=torch.ones_like(one.weight.scales))
    together = int4_linear_few(x, weight)
    for row in (0, 3, 7):
        assert torch.equal(int4_linear_few(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize("kib", [99, 227])
@pytest.mark.parametrize("gated", [False, True])
def test_the_default_configuration_fits_into_shared_memory(kib, gated):
    gpu = Gpu((9, 0), kib * 1024, 132)
    for rows in ROWS_OF_PROGRAMS:
        config = default_int4_config(rows, gated, gpu)
        tile = config.block_n * BLOCK_BYTES * (2 if gated else 1) + rows * BLOCK * 2
        assert config.num_stages >= 2
        assert config.num_warps * tile * config.num_stages <= gpu.shared_bytes
