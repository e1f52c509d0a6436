"""Linear layers of 4-bit weights by Hopper's warps with roles, against float64. Most needs a Hopper GPU."""

import pytest
import torch

from tests.triton_kernels.int4_layer import check_tiled, check_tiled_gated, layer
from triton_kernels.gpu import Gpu
from triton_kernels.int4_linear import default_hopper_config
from triton_kernels.int4_linear_hopper import OUTPUTS, takes
from triton_kernels.int4_linear_many import Int4TiledConfig, int4_linear_many_with
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES

H200 = Gpu((9, 0), 227 << 10, 132)


def hopper(block_m: int, stages: int, splits: int = 1) -> Int4TiledConfig:
    return Int4TiledConfig(block_m, 128, 12, stages, splits, hopper=True)


# Rows, outputs, width, group, zero points and a configuration; few, because each is compiled anew.
CASES = [
    ((256, 512, 1024), 128, False, hopper(256, 3)),
    # Rows and outputs end within a tile, and two tiles share rows.
    ((300, 200, 640), 128, True, hopper(256, 3)),
    ((65, 136, 384), 64, True, hopper(128, 4)),
    ((130, 136, 1152), 32, False, hopper(128, 5, splits=2)),
    # Fewer steps than stages; and three of four splits have nothing to add.
    ((96, 464, 128), 32, True, hopper(64, 8, splits=4)),
    ((77, 1000, 640), 64, False, hopper(64, 2)),
    # Tiles of two parts.
    ((150, 200, 640), 128, True, hopper(160, 4)),
    ((400, 464, 1152), 32, False, hopper(192, 4, splits=2)),
    ((70, 136, 384), 64, False, hopper(80, 8)),
    ((151, 200, 640), 128, True, hopper(160, 4)),
    ((131, 464, 1152), 32, False, hopper(192, 4)),
    ((71, 136, 384), 64, False, hopper(96, 7)),
    # All rows are in the first part.
    ((65, 136, 640), 128, True, hopper(160, 4)),
]


@pytest.fixture
def on_hopper(device: str) -> str:
    if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_every_row_and_output_is_computed_and_nothing_else_is_used(
    size, group, zero_points, config, on_hopper
):
    check_tiled(size, group, zero_points, config, on_hopper)


@pytest.mark.parametrize(("size", "group", "zero_points", "config"), CASES)
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, group, zero_points, config, on_hopper):
    check_tiled_gated(size, group, zero_points, config, on_hopper)


def test_the_same_rows_yield_the_same_bits(on_hopper):
    one = layer((256, 1024, 4096), 128, False, on_hopper)
    assert takes(one.x, one.weight, gated=False)
    first = int4_linear_many_with(one.x, one.weight, config=hopper(256, 3))
    for _ in range(20):
        assert torch.equal(int4_linear_many_with(one.x, one.weight, config=hopper(256, 3)), first)


def test_what_the_kernel_does_not_take_is_refused():
    one = layer((70, 64, 128), 128, False, "cpu")  # float32
    assert not takes(one.x, one.weight, gated=False)
    with pytest.raises(ValueError, match=r"needs a Hopper GPU, .* got cpu, torch\.float32"):
        int4_linear_many_with(one.x, one.weight, config=hopper(128, 5))


def test_the_default_is_what_was_fastest():
    """Of Llama-3.1-8B's layers on an H200: rows of a program, splits."""
    layers = {"qkv": (6144, 4096), "o": (4096, 4096), "down": (4096, 14336), "gate and up": (14336, 4096)}

    def chosen(rows: int) -> dict[str, tuple[int, int]]:
        configs = {
            name: default_hopper_config(outputs, width, rows, name == "gate and up", H200)
            for name, (outputs, width) in layers.items()
        }
        return {name: (config.block_m, config.splits) for name, config in configs.items()}

    assert chosen(96) == {"qkv": (96, 2), "o": (96, 4), "down": (96, 4), "gate and up": (96, 1)}
    assert chosen(128) == {"qkv": (128, 2), "o": (128, 4), "down": (128, 4), "gate and up": (128, 1)}
    assert chosen(160) == {"qkv": (160, 2), "o": (160, 4), "down": (160, 4), "gate and up": (160, 1)}
    assert chosen(256) == {"qkv": (128, 1), "o": (128, 2), "down": (256, 4), "gate and up": (256, 1)}
    assert chosen(512) == {"qkv": (256, 1), "o": (128, 1), "down": (256, 2), "gate and up": (256, 1)}


def test_the_default_fits_into_shared_memory():
    for rows in (65, 100, 130, 170, 200, 300, 512):
        config = default_hopper_config(4096, 4096, rows, False, H200)
        stage = 2 * config.block_m * BLOCK + 2 * OUTPUTS * BLOCK_BYTES
        assert config.num_stages * stage + 1024 <= H200.shared_bytes
