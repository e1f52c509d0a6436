"""Weights of FP8 numbers (e4m3) whose inputs are FP8 too.

Promise: an input is rounded to the same numbers whoever rounds it, the op before or `multiply`, and however
many rows there are. Sums are float32.

N rows of input, `in` and `out` features, P parts. Widths that the kernels do not take are padded with zeros.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.layers.weight import Fp8Rows, Input, InputFormat, make_bias, with_biases
from minisgl.model_config.quantization import ActivationScales, Fp8Scheme, WeightScales
from triton_kernels.fp8_linear import fp8_gated_linear, fp8_gated_linear_then_round, fp8_linear
from triton_kernels.launch import ceil_div
from triton_kernels.quantize_fp8 import FP8, GROUP, LARGEST, quantize_fp8, quantize_weight_fp8
from triton_kernels.registry import KERNELS

WIDTH_UNIT = 16
"""The kernels take inputs of a multiple of this width; with scales of blocks, of a multiple of GROUP."""


class Fp8Weight(nn.Module):
    """A weight of one or more parts; allocated, not initialised.

    Tensors: `values` e4m3 [out, padded in]; `scales` float32, [out] or, with scales of blocks, [blocks of
    each part's out, blocks of in]; `part_scales` and `input_scales` float32 [P], what the checkpoint has of
    each part if the scheme has one scale for a tensor; `bias` [out] of `dtype`, or None.

    Args:
        sizes: output features of each part.
        dtype: of inputs and outputs.
    """

    input_scale: Tensor

    def __init__(
        self,
        in_features: int,
        sizes: Sequence[int],
        scheme: Fp8Scheme,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.sizes = tuple(sizes)
        self.scheme = scheme
        self.dtype = dtype
        self.kernels = KERNELS
        self.has_blocks = scheme.weights is WeightScales.BLOCK
        unit = GROUP if self.has_blocks else WIDTH_UNIT
        self.padding = -in_features % unit
        out_features = sum(sizes)
        values = torch.empty(out_features, in_features + self.padding, dtype=FP8, device=device)
        values[:, in_features:].zero_()
        self.values = nn.Parameter(values, requires_grad=False)
        self.block_rows = tuple(ceil_div(size, GROUP) for size in sizes)
        shape = (sum(self.block_rows), values.shape[1] // GROUP) if self.has_blocks else (out_features,)

        def scales(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.scales = scales(*shape)
        one_each = scheme.weights is WeightScales.TENSOR
        self.part_scales = scales(len(self.sizes)) if one_each else None
        self.input_scales = None
        if scheme.activations is ActivationScales.STATIC:
            self.input_scales = scales(len(self.sizes))
            self.register_buffer("input_scale", torch.empty(1, 1, device=device), persistent=False)
        self.bias = make_bias(out_features, dtype, device) if bias else None

    @property
    def input_format(self) -> InputFormat:
        """See `Weight`."""
        if self.padding or self.scheme.activations is ActivationScales.STATIC:
            return InputFormat.PLAIN
        return InputFormat.FP8_GROUPS if self.has_blocks else InputFormat.FP8_ROWS

    def multiply(self, x: Input) -> Tensor:
        """See `Weight`."""
        rows = self._rounded(x)
        if not self.has_blocks or all(size % GROUP == 0 for size in self.sizes[:-1]):
            return fp8_linear(*rows, self.values, self.scales, self.bias, self.dtype)
        # A kernel's blocks begin at multiples of 128 rows, and here a part begins elsewhere.
        y = torch.cat(
            [
                fp8_linear(*rows, values, scales, None, self.dtype)
                for values, scales in zip(
                    self.values.split(self.sizes), self.scales.split(self.block_rows), strict=True
                )
            ],
            dim=1,
        )
        return y if self.bias is None else y + self.bias

    def gated(self, x: Input, wanted: InputFormat = InputFormat.PLAIN) -> Input:
        """See `Weight`."""
        if self.kernels.silu_mul is not KERNELS.silu_mul:  # the user has replaced the op
            return self.kernels.silu_mul(self.multiply(x))
        rows = self._rounded(x)
        if wanted is InputFormat.PLAIN:
            return fp8_gated_linear(*rows, self.values, self.scales, self.dtype)
        group = GROUP if wanted is InputFormat.FP8_GROUPS else None
        return Fp8Rows(*fp8_gated_linear_then_round(*rows, self.values, self.scales, self.dtype, group))

    def _rounded(self, x: Input) -> Fp8Rows:
        if isinstance(x, Fp8Rows):
            return x
        if self.padding:
            x = F.pad(x, (0, self.padding))
        if self.scheme.activations is ActivationScales.STATIC:
            values = (x.float() / self.input_scale).clamp(-LARGEST, LARGEST).to(FP8)
            return Fp8Rows(values, self.input_scale.expand(1, x.shape[0]).contiguous())
        return Fp8Rows(*quantize_fp8(x, GROUP if self.has_blocks else None))

    def part_tensors(self) -> list[dict[str, Tensor]]:
        """See `Weight`."""
        values = self.values.detach()[:, : self.in_features].split(self.sizes)
        scales = self._scales_of_parts()
        name = self.scheme.scale_name
        parts = [{"weight": rows, name: some} for rows, some in zip(values, scales, strict=True)]
        if self.input_scales is not None:
            each = self.input_scales.detach().split(1)
            parts = [part | {"input_scale": scale} for part, scale in zip(parts, each, strict=True)]
        return with_biases(parts, self.bias, self.sizes)

    def _scales_of_parts(self) -> Sequence[Tensor]:
        """Views: [1], [out, 1] or [blocks, blocks] of each part."""
        if self.part_scales is not None:
            return self.part_scales.detach().split(1)
        if self.has_blocks:
            return self.scales.detach().split(self.block_rows)
        return self.scales.detach().unsqueeze(1).split(self.sizes)

    def finish_loading(self) -> None:
        """See `Weight`. The input scale of a fused layer is the largest of its parts'."""
        if self.part_scales is not None:
            sizes = torch.tensor(self.sizes, device=self.scales.device)
            self.scales.copy_(self.part_scales.repeat_interleave(sizes))
        if self.input_scales is not None:
            self.input_scale.copy_(self.input_scales.max())

    def quantize(self, values: Tensor) -> None:
        """Set the numbers and scales from unquantized `values` [out, in]; an input's largest value is 1."""
        for rows, part in zip(values.split(self.sizes), self.part_tensors(), strict=True):
            if self.part_scales is not None:
                scale = (rows.float().abs().max() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
                rounded = (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
            else:
                rounded, scale = quantize_weight_fp8(rows, self.has_blocks)
            part["weight"].copy_(rounded)
            target = part[self.scheme.scale_name]
            target.copy_(scale.reshape(target.shape))
        if self.input_scales is not None:
            self.input_scales.fill_(1 / LARGEST)
        self.finish_loading()
