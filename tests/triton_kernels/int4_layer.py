"""Linear layers of 4-bit weights for tests: inputs of odd sizes, and what they must yield, in float64."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from tests.triton_kernels.fp8_layer import behind, surrounded
from triton_kernels.int4_linear_many import (
    Int4TiledConfig,
    int4_gated_linear_many_with,
    int4_linear_many_with,
)
from triton_kernels.int4_packing import pack_int4
from triton_kernels.quantize_int4 import Int4Weight


class Layer(NamedTuple):
    """The arguments of a layer, and the weight's numbers in float64."""

    x: torch.Tensor
    weight: Int4Weight
    bias: torch.Tensor
    exact_weight: torch.Tensor

    def expected(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product."""
        return F.linear(self.x.double(), self.exact_weight, None if bias is None else bias.double())

    def expected_gated(self) -> torch.Tensor:
        """silu(gate) * up of the product."""
        gate, up = self.expected().chunk(2, dim=1)
        return F.silu(gate) * up


def layer(size: tuple[int, int, int], group: int, zero_points: bool, device: str) -> Layer:
    """A layer of this size, rows, outputs, width, of random numbers, scales and zero points.

    The numbers come first and the weight from them, by the formula alone.
    """
    rows, outputs, width = size
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rng = torch.Generator().manual_seed(rows + outputs + group)
    numbers = torch.randint(0, 16, (outputs, width), generator=rng)
    scales = (torch.rand(width // group, outputs, generator=rng) + 0.1).to(dtype)
    zeros = torch.randint(0, 17, scales.shape, generator=rng).to(dtype) if zero_points else None
    exact = torch.empty(outputs, width, dtype=torch.float64)
    for k in range(width):
        zero = 8.0 if zeros is None else zeros[k // group].double()
        exact[:, k] = (numbers[:, k].double() - zero) * scales[k // group].double()
    x = torch.randn(rows, width, generator=rng).to(dtype)
    weight = Int4Weight(
        pack_int4(numbers).to(device),
        behind(scales.to(device)),
        None if zeros is None else behind(zeros.to(device)),
    )
    bias = torch.randn(outputs, generator=rng).to(dtype).to(device)
    return Layer(surrounded(x.to(device)), weight, bias, exact.to(device))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Close by norm: to float32's sums in the interpreter, to bfloat16 on a GPU."""
    assert got.isfinite().all()
    tolerance = 5e-3 if got.dtype == torch.bfloat16 else 1e-5
    assert (got.double() - expected).norm() <= tolerance * expected.norm()


def check_tiled(
    size: tuple[int, int, int], group: int, zero_points: bool, config: Int4TiledConfig, device: str
) -> None:
    """Every row and output is computed, and nothing else is used. Odd numbers of rows have a bias."""
    one = layer(size, group, zero_points, device)
    bias = one.bias if size[0] % 2 else None
    _poison_what_is_allocated_next(size[0], size[1], config.splits, device)
    assert_close(int4_linear_many_with(one.x, one.weight, bias, config=config), one.expected(bias))


def check_tiled_gated(
    size: tuple[int, int, int], group: int, zero_points: bool, config: Int4TiledConfig, device: str
) -> None:
    """The same of a layer with twice the outputs, whose first half is the gate."""
    rows, outputs, width = size
    one = layer((rows, 2 * outputs, width), group, zero_points, device)
    _poison_what_is_allocated_next(rows, 2 * outputs, config.splits, device)
    assert_close(int4_gated_linear_many_with(one.x, one.weight, config=config), one.expected_gated())


def _poison_what_is_allocated_next(rows: int, outputs: int, splits: int, device: str) -> None:
    """NaN in memory of the sizes of the output and of the partial sums."""
    pieces = [torch.full((n, rows, outputs), float("nan"), device=device) for n in (1, splits)]
    del pieces
