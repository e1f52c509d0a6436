"""Experts of FP8 numbers (e4m3), whose activations are FP8 too.

Promise: which numbers are rounded to FP8 does not depend on how many tokens a step has. Sums are float32.

T tokens, M model width, E experts, F width of one expert. Widths that the kernels do not take are padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.layers.experts.weights import ExpertSizes, views_of_parts
from minisgl.model_config.quantization import ActivationScales, Fp8Scheme, WeightScales
from triton_kernels.launch import ceil_div
from triton_kernels.moe_fp8 import Fp8ExpertWeights, fused_moe_fp8
from triton_kernels.quantize_fp8 import FP8, GROUP, LARGEST, quantize_weight_fp8


class Fp8Experts(nn.Module):
    """All experts' FP8 matrices; allocated, not initialised.

    Tensors: those of `Fp8ExpertWeights`; of schemes with one scale for a matrix also `gate_up_part_scale`
    float32 [E, 2] and `down_part_scale` [E, 1], of those with stored scales of activations `gate_up_inputs`
    and `down_inputs` of these shapes: what the checkpoint has.

    Args:
        dtype: of the activations before they are rounded.
    """

    def __init__(
        self, sizes: ExpertSizes, scheme: Fp8Scheme, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.scheme = scheme
        self.dtype = dtype
        self.has_blocks = scheme.weights is WeightScales.BLOCK
        experts, width, half = sizes.experts, sizes.width, sizes.half

        def numbers(outputs: int, inputs: int) -> nn.Parameter:
            padding = -inputs % GROUP if self.has_blocks else 0
            values = torch.empty(experts, outputs, inputs + padding, dtype=FP8, device=device)
            values[:, :, inputs:].zero_()
            return nn.Parameter(values, requires_grad=False)

        def scales(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device), requires_grad=False)

        self.gate_up = numbers(2 * half, width)
        self.down = numbers(width, half)
        if self.has_blocks:
            self.gate_up_scale = scales(experts, 2, ceil_div(half, GROUP), ceil_div(width, GROUP))
            self.down_scale = scales(experts, ceil_div(width, GROUP), ceil_div(half, GROUP))
        else:
            self.gate_up_scale = scales(experts, 2 * half)
            self.down_scale = scales(experts, width)
        self.gate_up_part_scale = self.down_part_scale = None
        if scheme.weights is WeightScales.TENSOR:
            self.gate_up_part_scale, self.down_part_scale = scales(experts, 2), scales(experts, 1)
        self.gate_up_inputs = self.down_inputs = self.input_scale = self.hidden_scale = None
        if scheme.activations is ActivationScales.STATIC:
            self.gate_up_inputs, self.down_inputs = scales(experts, 2), scales(experts, 1)
            self.input_scale, self.hidden_scale = scales(1), scales(experts)

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
        """See `ExpertWeights`."""
        return fused_moe_fp8(x, logits, self.tensors(), top_k, renormalize)

    def tensors(self) -> Fp8ExpertWeights:
        """What the kernels read."""
        return Fp8ExpertWeights(
            self.gate_up,
            self.gate_up_scale,
            self.down,
            self.down_scale,
            self.input_scale,
            self.hidden_scale,
        )

    def part_tensors(self) -> dict[str, Tensor]:
        """See `ExpertWeights`."""
        sizes = self.sizes
        views = views_of_parts(
            sizes, self.gate_up[:, :, : sizes.width], self.down[:, :, : sizes.half], "weight"
        )
        views |= views_of_parts(sizes, *self._stored_scales(), self.scheme.scale_name)
        if self.gate_up_inputs is not None and self.down_inputs is not None:
            views |= views_of_parts(sizes, self.gate_up_inputs, self.down_inputs, "input_scale")
        return views

    def _stored_scales(self) -> tuple[Tensor, Tensor]:
        """Of each expert: the scales of gate and of up one after the other, and those of down."""
        if self.gate_up_part_scale is not None and self.down_part_scale is not None:
            return self.gate_up_part_scale, self.down_part_scale
        if self.has_blocks:
            return self.gate_up_scale.flatten(1, 2), self.down_scale
        return self.gate_up_scale.unsqueeze(2), self.down_scale.unsqueeze(2)

    def finish_loading(self) -> None:
        """See `ExpertWeights`. All experts have the same rows: the largest of their input scales counts."""
        if self.gate_up_part_scale is not None and self.down_part_scale is not None:
            self.gate_up_scale.copy_(self.gate_up_part_scale.repeat_interleave(self.sizes.half, 1))
            self.down_scale.copy_(self.down_part_scale.expand_as(self.down_scale))
        if self.input_scale is not None and self.gate_up_inputs is not None:
            self.input_scale.copy_(self.gate_up_inputs.max())
        if self.hidden_scale is not None and self.down_inputs is not None:
            self.hidden_scale.copy_(self.down_inputs[:, 0])

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`; an activation's largest value is 1."""
        views, name = self.part_tensors(), self.scheme.scale_name
        names = self.sizes.part_names
        for target, parts in ((self.gate_up, names[:2]), (self.down, names[2:])):
            inputs = self.sizes.half if target is self.down else self.sizes.width
            values = torch.empty((*target.shape[:2], inputs), dtype=self.dtype, device=target.device)
            normal(values)
            for expert, matrix in enumerate(values):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    layer = f"experts.{expert}.{part}"
                    self._quantize(rows, views[f"{layer}.weight"], views[f"{layer}.{name}"])
        for inputs_of in (self.gate_up_inputs, self.down_inputs):
            if inputs_of is not None:
                inputs_of.fill_(1 / LARGEST)
        self.finish_loading()

    def _quantize(self, rows: Tensor, numbers: Tensor, scales: Tensor) -> None:
        """Round a matrix [out, in] into an expert's own numbers and scales."""
        if self.scheme.weights is WeightScales.TENSOR:
            scale = (rows.float().abs().max() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
            rounded = (rows.float() / scale).clamp(-LARGEST, LARGEST).to(FP8)
        else:
            rounded, scale = quantize_weight_fp8(rows, self.has_blocks)
        numbers.copy_(rounded)
        scales.copy_(scale.reshape(scales.shape))
