"""The linear layers of 4-bit weights over more rows, against float64."""

import pytest

from tests.triton_kernels.int4_layer import check_tiled, check_tiled_gated, layer
from triton_kernels.int4_linear_many import Int4TiledConfig, int4_linear_many_with

# Rows, outputs, width, group, zero points and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((17, 48, 256), 128, False, Int4TiledConfig(16, 64, 4, 2)),
    # Three of four splits have nothing to add.
    ((9, 144, 128), 128, False, Int4TiledConfig(16, 64, 4, 3, splits=4, scale_sums=True)),
    ((33, 130, 640), 128, True, Int4TiledConfig(32, 64, 4, 3, splits=3, scale_sums=True)),
    ((70, 100, 256), 64, True, Int4TiledConfig(64, 128, 4, 2)),
    ((33, 130, 384), 32, False, Int4TiledConfig(32, 64, 4, 2, splits=2)),
    ((40, 70, 128), 32, True, Int4TiledConfig(64, 64, 4, 2, fused=False)),
]


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_every_row_and_output_is_computed_and_nothing_else_is_used(size, group, zero_points, config, device):
    check_tiled(size, group, zero_points, config, device)


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, group, zero_points, config, device):
    check_tiled_gated(size, group, zero_points, config, device)


def test_sums_are_scaled_for_groups_of_128_only(device):
    one = layer((4, 64, 128), 64, False, device)
    with pytest.raises(ValueError, match="scaling sums needs groups of 128, got 64"):
        int4_linear_many_with(one.x, one.weight, config=Int4TiledConfig(16, 64, 4, 2, scale_sums=True))
