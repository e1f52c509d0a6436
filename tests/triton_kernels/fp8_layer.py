"""FP8 linear layers for tests: inputs of odd sizes, NaN around them, and what they must yield, in float64."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from triton_kernels.quantize_fp8 import GROUP, quantize_fp8_reference, quantize_weight_fp8


class Layer(NamedTuple):
    """The arguments of an FP8 layer, and its numbers in float64."""

    x: torch.Tensor
    x_scale: torch.Tensor
    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor
    exact_x: torch.Tensor
    exact_weight: torch.Tensor

    @property
    def four(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first arguments of every FP8 layer."""
        return self.x, self.x_scale, self.weight, self.weight_scale

    def expected(self, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product."""
        return F.linear(self.exact_x, self.exact_weight, None if bias is None else bias.double())

    def expected_gated(self) -> torch.Tensor:
        """silu(gate) * up of the product."""
        gate, up = self.expected().chunk(2, dim=1)
        return F.silu(gate) * up


def surrounded(values: torch.Tensor) -> torch.Tensor:
    """The same rows in the middle of NaN: beside them, where rows may lie apart, and behind the last."""
    shape = (values.shape[0] + 5, values.shape[1] + 16)
    around = torch.full(shape, float("nan"), device=values.device).to(values.dtype)
    around[: values.shape[0], : values.shape[1]] = values
    return around[: values.shape[0], : values.shape[1]]


def behind(values: torch.Tensor) -> torch.Tensor:
    """The same contiguous tensor with NaN behind it."""
    shape = (values.shape[0] + 9, *values.shape[1:])
    around = torch.full(shape, float("nan"), device=values.device).to(values.dtype)
    around[: values.shape[0]] = values
    return around[: values.shape[0]]


def layer(size: tuple[int, int, int], device: str, blocks: bool = False, halves: int = 1) -> Layer:
    """A layer of this size, rows, outputs, width; a gated one has two halves with scales of their own."""
    rows, outputs, width = size
    rng = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, width, generator=rng) * torch.rand(rows, 1, generator=rng)
    weight = torch.randn(outputs, width, generator=rng) * torch.rand(outputs, 1, generator=rng)
    group = GROUP if blocks else None
    padded = F.pad(x, (0, -width % GROUP)) if blocks else x
    rounded, x_scale = quantize_fp8_reference(padded, group)
    rounded = rounded[:, :width]
    parts = [quantize_weight_fp8(part, blocks) for part in weight.chunk(halves)]
    exact = []
    for part, scales in parts:
        wide = scales[:, None]
        if blocks:
            wide = scales.repeat_interleave(GROUP, 0)[: part.shape[0]].repeat_interleave(GROUP, 1)[:, :width]
        exact.append(part.double() * wide.double())
    wide = x_scale.t().repeat_interleave(GROUP, 1)[:, :width] if blocks else x_scale.t()
    tensors = (
        surrounded(rounded),
        x_scale,
        behind(torch.cat([part for part, _ in parts])),
        behind(torch.cat([scales for _, scales in parts])),
        torch.randn(outputs, generator=rng),
        rounded.double() * wide.double(),
        torch.cat(exact),
    )
    x, *others = (tensor.to(device) for tensor in tensors)
    x = tensors[0] if device == "cpu" else surrounded(tensors[0].cpu()).to(device)
    return Layer(x, *others)


def assert_close(got: torch.Tensor, expected: torch.Tensor, on_gpu: float = 5e-3) -> None:
    """Close by norm: to float32's sums in the interpreter, to bfloat16 and 14 bits on a GPU."""
    tolerance = 1e-5 if got.dtype == torch.float32 and got.device.type == "cpu" else on_gpu
    assert got.isfinite().all()
    assert (got.double() - expected).norm() <= tolerance * expected.norm()
