"""The FP8 linear layers over more rows, against float64."""

import pytest
import torch

from tests.triton_kernels.fp8_layer import assert_close, layer
from triton_kernels.fp8_linear_many import (
    Fp8TiledConfig,
    fp8_gated_linear_many_with,
    fp8_linear_many_with,
    with_rows_behind,
)

# Rows, outputs, width and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((17, 48, 96), Fp8TiledConfig(32, 64, 64, 4, 3, rows_tall=False)),
    ((33, 130, 272), Fp8TiledConfig(32, 64, 64, 4, 3, splits=3, rows_tall=False)),
    ((70, 200, 144), Fp8TiledConfig(64, 64, 64, 4, 2, wide=True, two_level=False)),
    ((200, 300, 256), Fp8TiledConfig(64, 64, 64, 4, 2, wide=True, persistent=True, row_blocks=2)),
    ((33, 50, 272), Fp8TiledConfig(64, 32, 64, 4, 3, splits=3)),
    ((90, 110, 144), Fp8TiledConfig(64, 32, 128, 4, 2, splits=2, wide=True)),
]
BLOCK_CASES = [
    ((17, 300, 256), Fp8TiledConfig(32, 64, 128, 4, 3, rows_tall=False)),
    ((70, 400, 272), Fp8TiledConfig(64, 128, 128, 8, 2, wide=True, persistent=True, row_blocks=1)),
    ((33, 130, 640), Fp8TiledConfig(64, 32, 128, 4, 2, splits=3, wide=True)),
]


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """What the kernel is for, where the interpreter can do it."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def poison_what_is_allocated_next(rows: int, outputs: int, splits: int, device: str) -> None:
    """NaN in memory of the sizes of the output and of the partial sums."""
    pieces = [torch.full((n, rows, outputs), float("nan"), device=device) for n in (1, splits)]
    del pieces


@pytest.mark.parametrize(("size", "config"), CASES)
def test_every_row_and_output_is_computed_and_nothing_else_is_used(size, config, device, dtype):
    one = layer(size, device)
    bias = one.bias if size[0] % 2 else None
    poison_what_is_allocated_next(size[0], size[1], config.splits, device)
    assert_close(fp8_linear_many_with(*one.four, bias, dtype, config=config), one.expected(bias))


@pytest.mark.parametrize(("size", "config"), BLOCK_CASES)
def test_scales_of_blocks_are_applied_inside_the_sum(size, config, device, dtype):
    one = layer(size, device, blocks=True)
    poison_what_is_allocated_next(size[0], size[1], config.splits, device)
    assert_close(fp8_linear_many_with(*one.four, one.bias, dtype, config=config), one.expected(one.bias))


@pytest.mark.parametrize(("size", "config"), [*CASES[1:4], *BLOCK_CASES])
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, config, device, dtype):
    rows, outputs, width = size
    one = layer((rows, 2 * outputs, width), device, config in [c for _, c in BLOCK_CASES], halves=2)
    poison_what_is_allocated_next(rows, 2 * outputs, config.splits, device)
    got = fp8_gated_linear_many_with(*one.four, dtype, config=config)
    assert_close(got, one.expected_gated(), on_gpu=8e-3)


@pytest.mark.parametrize(("size", "config"), [CASES[0], CASES[4], BLOCK_CASES[0]])
def test_rows_that_lie_behind_are_read_and_change_nothing(size, config, device, dtype):
    rows, width = size[0], size[2]
    one = layer(size, device, config in [c for _, c in BLOCK_CASES])
    x, x_scale, weight, weight_scale = one.four
    around = torch.full((config.block_m, width), float("nan"), device=device).to(x.dtype)
    around[:rows] = x
    assert with_rows_behind(around[:rows], config.block_m).shape == (config.block_m, width)
    assert with_rows_behind(x, config.block_m).shape == x.shape  # its memory ends there
    others = (x_scale, weight, weight_scale, one.bias, dtype)
    got = fp8_linear_many_with(around[:rows], *others, config=config)
    assert torch.equal(got, fp8_linear_many_with(x, *others, config=config))


def test_tiles_that_do_not_fit_scales_of_blocks_are_refused(device):
    one = layer((4, 256, 256), device, blocks=True)
    with pytest.raises(ValueError, match="need block_k = 128"):
        fp8_linear_many_with(*one.four, config=Fp8TiledConfig(64, 64, 64, 4, 2))
