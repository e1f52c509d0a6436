"""The FP8 linear layers over few rows, against float64."""

import pytest
import torch

from tests.triton_kernels.fp8_layer import assert_close, layer
from triton_kernels.fp8_linear_few import (
    FEW_ROWS,
    Fp8Config,
    default_fp8_config,
    fp8_gated_linear_few,
    fp8_gated_linear_few_with_peaks,
    fp8_linear_few,
)
from triton_kernels.gpu import Gpu
from triton_kernels.quantize_fp8 import quantize_fp8_triton, quantize_fp8_with_peaks

# Rows, outputs, width and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((1, 48, 96), None),
    ((5, 33, 64), Fp8Config(64, 32, 4, 2)),
    ((16, 130, 304), None),
    ((19, 130, 304), Fp8Config(32, 128, 2, 3)),
    ((FEW_ROWS, 70, 256), None),
]
SPLIT_CASES = [
    ((1, 40, 512), Fp8Config(8, 256, 4, 3, splits=4)),
    ((16, 130, 272), Fp8Config(16, 128, 2, 3, splits=2)),
]
BLOCK_CASES = [
    ((1, 256, 256), None),
    ((5, 200, 384), Fp8Config(32, 128, 2, 3)),
    ((40, 130, 304), Fp8Config(128, 128, 4, 2)),
]


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """What the kernel is for, where the interpreter can do it."""
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.mark.parametrize(("size", "config"), [*CASES, *SPLIT_CASES])
def test_scales_of_rows_and_channels_with_and_without_bias(size, config, device, dtype):
    one = layer(size, device)
    bias = one.bias if size[0] % 2 else None
    got = fp8_linear_few(*one.four, bias, dtype, config)
    assert got.dtype == dtype
    assert_close(got, one.expected(bias))


@pytest.mark.parametrize(("size", "config"), BLOCK_CASES)
def test_scales_of_blocks_are_applied_inside_the_sum(size, config, device, dtype):
    one = layer(size, device, blocks=True)
    assert_close(fp8_linear_few(*one.four, one.bias, dtype, config), one.expected(one.bias))


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 21])
def test_a_gated_layer_takes_the_gate_from_the_first_half(rows, blocks, device, dtype):
    one = layer((rows, 2 * 136, 256), device, blocks, halves=2)
    assert_close(fp8_gated_linear_few(*one.four, dtype), one.expected_gated(), on_gpu=8e-3)


@pytest.mark.parametrize(("rows", "outputs"), [(1, 272), (5, 4300)])
def test_rows_rounded_by_what_a_gated_layer_says_of_them_are_the_same(rows, outputs, device, dtype):
    """The last program's outputs beyond the layer's do not count, and several programs round a row."""
    one = layer((rows, outputs, 128), device, halves=2)
    y, peaks = fp8_gated_linear_few_with_peaks(*one.four, dtype, Fp8Config(64, 64, 4, 2))
    assert torch.equal(peaks.amax(1), y.float().abs().amax(1))
    for got, expected in zip(quantize_fp8_with_peaks(y, peaks), quantize_fp8_triton(y), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("config", [None, Fp8Config(32, 64, 2, 3), SPLIT_CASES[1][1]])
def test_a_row_is_the_same_to_the_last_bit_alone_and_in_a_batch(config, device, dtype):
    one = layer((16, 130, 272), device)
    # Whole numbers: numpy's products in the interpreter add up in an order that depends on the place.
    x, weight = ((rounded.float() / 64).round().to(rounded.dtype) for rounded in (one.x, one.weight))
    together = fp8_linear_few(x, one.x_scale, weight, one.weight_scale, None, dtype, config)
    for row in (0, 7, 15):
        scale = one.x_scale[:, row : row + 1].contiguous()
        alone = fp8_linear_few(x[row : row + 1], scale, weight, one.weight_scale, None, dtype, config)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kib", [99, 227])
@pytest.mark.parametrize("gated", [False, True])
def test_the_default_configuration_fits_into_shared_memory(kib, gated):
    gpu = Gpu((9, 0), kib * 1024, 132)
    for outputs in (64, 1024, 4096, 6144, 151936):
        for rows in (1, 16, 32, FEW_ROWS):
            for blocks in (False, True):
                config = default_fp8_config(outputs, rows, blocks, gated, gpu)
                tile = (2 if gated else 1) * config.block_n + max(16, rows)
                assert config.num_stages >= 2
                assert config.block_k * tile * config.num_stages <= gpu.shared_bytes
