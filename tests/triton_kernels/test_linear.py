"""The linear layers over few rows, against float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from triton_kernels.gpu import Gpu
from triton_kernels.linear import gated_linear, gelu_linear, linear
from triton_kernels.linear_few import (
    FEW_ROWS,
    MAX_ROWS,
    LinearConfig,
    default_linear_config,
    gated_linear_triton,
    linear_triton,
    more_rows_config,
)
from triton_kernels.registry import with_replacements

# Rows, outputs, width and a configuration; few, because each is compiled anew on a GPU.
CASES = [
    ((1, 48, 96), None),
    ((2, 40, 300), LinearConfig(16, 64, 2, 3)),
    ((5, 33, 64), LinearConfig(64, 32, 4, 2)),
    ((MAX_ROWS, 130, 257), None),
    ((MAX_ROWS - 3, 130, 257), LinearConfig(16, 64, 2, 3)),
    ((MAX_ROWS + 3, 130, 257), None),
    ((FEW_ROWS, 130, 257), LinearConfig(16, 64, 2, 3)),
]
SPLIT_CASES = [
    ((1, 40, 512), LinearConfig(8, 128, 4, 3, splits=4)),
    ((MAX_ROWS, 130, 257), LinearConfig(16, 64, 2, 3, splits=2)),
]


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """What the kernel is for, where the interpreter can do it."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def inputs(rows: int, outputs: int, width: int, device: str | torch.device, dtype: torch.dtype):
    rng = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * width, generator=rng)[:, :width]  # rows lie apart
    weight, bias = torch.randn(outputs, width, generator=rng), torch.randn(outputs, generator=rng)
    return tuple(tensor.to(device, dtype) for tensor in (x, weight, bias))


def assert_close(got: torch.Tensor, expected: torch.Tensor, in_bfloat16: float = 5e-3) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: in_bfloat16}[got.dtype]
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("size", "config"), [*CASES, *SPLIT_CASES])
def test_a_linear_layer_with_and_without_bias(size, config, device, dtype):
    rows, outputs, width = size
    x, weight, bias = inputs(rows, outputs, width, device, dtype)
    added = bias if rows % 2 else None
    expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert_close(linear_triton(x, weight, added, config), expected)
    if config is None:  # on a GPU the same kernel, up to MAX_ROWS rows
        assert_close(linear(x, weight, added), expected)


@pytest.mark.parametrize(("size", "config"), CASES)
def test_a_gated_layer_takes_the_gate_from_the_first_half(size, config, device, dtype):
    rows, outputs, width = size
    x, weight, _ = inputs(rows, 2 * outputs, width, device, dtype)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert_close(gated_linear_triton(x, weight, config), expected, in_bfloat16=8e-3)
    if config is None:
        assert_close(gated_linear(x, weight), expected, in_bfloat16=8e-3)


@pytest.mark.parametrize(("size", "config"), CASES)
def test_a_gated_layer_with_gelu(size, config, device, dtype):
    rows, outputs, width = size
    x, weight, _ = inputs(rows, 2 * outputs, width, device, dtype)
    gate, up = F.linear(x.double(), weight.double()).chunk(2, dim=-1)
    expected = F.gelu(gate, approximate="tanh") * up
    assert_close(gated_linear_triton(x, weight, config, gelu=True), expected, in_bfloat16=8e-3)
    if config is None:
        assert_close(gelu_linear(x, weight), expected, in_bfloat16=8e-3)


@pytest.mark.parametrize("config", [None, LinearConfig(32, 64, 2, 3)])
def test_a_row_is_the_same_to_the_last_bit_alone_and_in_any_batch(config, device, dtype):
    x, weight, _ = inputs(MAX_ROWS, 130, 257, device, dtype)
    if device == "cpu":  # numpy's products in the interpreter add up in an order that depends on the place
        x, weight = x.mul_(8).round_(), weight.mul_(8).round_()
    together = linear_triton(x, weight, config=config)
    for row in (0, 7, MAX_ROWS - 1):
        assert torch.equal(linear_triton(x[row : row + 1], weight, config=config)[0], together[row])


@pytest.mark.parametrize("config", [None, LinearConfig(32, 64, 2, 3)])
def test_nothing_beyond_the_rows_and_the_weights_is_used(config, device, dtype):
    x, weight, _ = inputs(3, 40, 96, device, dtype)
    stage = torch.full((8, 96), float("nan"), dtype=x.dtype, device=device)
    stage[:3] = x
    rows = torch.full((60, 96), float("nan"), dtype=x.dtype, device=device)
    rows[:40] = weight
    got = linear_triton(stage[:3], rows[:40], config=config)
    assert torch.equal(got, linear_triton(x, weight, config=config))


def test_more_rows_than_the_kernel_takes_are_torchs(device):
    x, weight, bias = inputs(MAX_ROWS + 1, 40, 64, device, torch.float32)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("kib", [48, 99, 227])
@pytest.mark.parametrize("gated", [False, True])
def test_the_default_configuration_fits_into_shared_memory(kib, gated):
    gpu = Gpu((9, 0), kib * 1024, 132)
    for outputs, width in itertools.product((64, 1024, 4096, 6144, 14336, 151936), (576, 1024, 4096)):
        config = default_linear_config(outputs, width, gated, gpu)
        for_more = more_rows_config(outputs, gated, gpu)
        for rows, chosen in ((MAX_ROWS, config), (FEW_ROWS, for_more)):
            tile = (2 if gated else 1) * chosen.block_n + rows
            assert chosen.num_stages >= 1
            assert 2 * chosen.block_k * tile * chosen.num_stages <= gpu.shared_bytes


def test_replacing_a_part_of_the_gated_layer_takes_it_apart(monkeypatch):
    import triton_kernels.silu_mul as module

    monkeypatch.setattr(module, "twice", lambda gate_up: gate_up * 2, raising=False)
    kernels = with_replacements(["silu_mul=triton_kernels.silu_mul:twice"])
    x, weight, _ = inputs(2, 8, 4, torch.device("cpu"), torch.float32)
    assert torch.equal(kernels.gated_linear(x, weight), 2 * linear(x, weight))
