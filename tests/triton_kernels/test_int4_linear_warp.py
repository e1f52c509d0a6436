"""The 4-bit layers of few rows that warps compute from registers. All but the choice needs a GPU."""

import pytest
import torch

from tests.triton_kernels.int4_layer import Layer, assert_close, layer
from triton_kernels.int4_linear import int4_gated_linear, int4_linear
from triton_kernels.int4_linear_warp import (
    MOST_ROWS,
    Int4WarpConfig,
    int4_gated_linear_warp,
    int4_linear_warp,
    suits_warps,
)

CONFIGS = (
    Int4WarpConfig(1, 4, 4),
    Int4WarpConfig(2, 2, 1),
    Int4WarpConfig(1, 1, 2),
    Int4WarpConfig(1, 8, 1),
)
"""With more warps than blocks, with tiles that the last program computes again, with one warp."""


def aligned(size: tuple[int, int, int], group: int, zero_points: bool, device: str) -> Layer:
    """A layer of bfloat16, whose rows lie as these kernels take them."""
    one = layer(size, group, zero_points, device)
    zeros = None if one.weight.zeros is None else one.weight.zeros.bfloat16()
    weight = one.weight._replace(scales=one.weight.scales.bfloat16(), zeros=zeros)
    return one._replace(x=one.x.contiguous().bfloat16(), weight=weight)


@pytest.mark.parametrize(("group", "zero_points"), [(128, False), (128, True), (64, True), (32, False)])
@pytest.mark.parametrize("rows", [1, 8, 11])
def test_warps_yield_the_products_of_the_dequantized_numbers(rows, group, zero_points, device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = aligned((rows, 288, 640), group, zero_points, device)
    assert suits_warps(one.x, one.weight, gated=True)
    for config in (None, *CONFIGS):
        assert_close(int4_linear_warp(one.x, one.weight, one.bias, config), one.expected(one.bias))
        assert_close(int4_gated_linear_warp(one.x, one.weight, config), one.expected_gated())


def test_a_row_is_the_same_in_all_batches(device):
    if device != "cuda":
        pytest.skip("the instructions need a GPU")
    one = aligned((MOST_ROWS, 288, 640), 128, False, device)
    plain, gated = int4_linear(one.x, one.weight), int4_gated_linear(one.x, one.weight)
    for rows in (1, 7, 8, 9):
        assert torch.equal(int4_linear(one.x[:rows], one.weight), plain[:rows])
        assert torch.equal(int4_gated_linear(one.x[:rows], one.weight), gated[:rows])


def test_only_few_rows_of_bfloat16_and_whole_tiles_suit_warps():
    few, odd, many = (
        aligned(size, 128, False, "cpu") for size in ((5, 48, 256), (5, 40, 256), (MOST_ROWS + 1, 48, 256))
    )
    assert not suits_warps(few.x, few.weight, gated=True)  # 24 outputs
    assert not suits_warps(few.x.float(), few.weight, gated=False)
    assert not suits_warps(few.x[:, 1:], few.weight, gated=False)
    assert not suits_warps(odd.x, odd.weight, gated=False)
    assert not suits_warps(many.x, many.weight, gated=False)
