"""The linear layers of 4-bit weights over more rows, against float64."""

import pytest
import torch

from tests.triton_kernels.int4_layer import assert_close, layer
from triton_kernels.int4_linear_many import (
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)

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


def poison_what_is_allocated_next(rows: int, outputs: int, splits: int, device: str) -> None:
    """NaN in memory of the sizes of the output and of the partial sums."""
    pieces = [torch.full((n, rows, outputs), float("nan"), device=device) for n in (1, splits)]
    del pieces


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_every_row_and_output_is_computed_and_nothing_else_is_used(size, group, zero_points, config, device):
    one = layer(size, group, zero_points, device)
    bias = one.bias if size[0] % 2 else None
    poison_what_is_allocated_next(size[0], size[1], config.splits, device)
    assert_close(int4_linear_many_with(one.x, one.weight, bias, config=config), one.expected(bias))


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, group, zero_points, config, device):
    rows, outputs, width = size
    one = layer((rows, 2 * outputs, width), group, zero_points, device)
    poison_what_is_allocated_next(rows, 2 * outputs, config.splits, device)
    got = int4_gated_linear_many_with(one.x, one.weight, config=config)
    assert_close(got, one.expected_gated())


def test_sums_are_scaled_for_groups_of_128_only(device):
    one = layer((4, 64, 128), 64, False, device)
    with pytest.raises(ValueError, match="scaling sums needs groups of 128, got 64"):
        int4_linear_many_with(one.x, one.weight, config=Int4TiledConfig(16, 64, 4, 2, scale_sums=True))
