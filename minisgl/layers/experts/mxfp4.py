"""gpt-oss's experts in MXFP4, which stay in 4 bits: matrices with biases, all experts' in one tensor.

Promise: the kernels see the gate in the upper rows, and their own packing, made in the memory that the
checkpoint's blocks were read into; there, rows of gate and up take turns.

T tokens, M model width, E experts, F width of one expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minisgl.errors import ModelError
from minisgl.layers.experts.weights import ExpertSizes
from triton_kernels.e2m1_packing import pack_e2m1, pack_scales
from triton_kernels.int4_packing import BLOCK, BLOCK_BYTES
from triton_kernels.launch import ceil_div
from triton_kernels.moe_int4 import PackedExperts, fused_moe_int4
from triton_kernels.mxfp4 import (
    BIAS,
    BLOCK_OF_SCALE,
    LARGEST_SCALE,
    mxfp4_codes,
    quantize_mxfp4,
)


class Mxfp4Experts(nn.Module):
    """All experts' MXFP4 matrices and biases; allocated, not initialised.

    Tensors: of gate_up and of down `packed` and `scales` as `PackedExperts` says, and `bias` [E, outputs] of
    `dtype`. Until loaded, `packed` and `scales` have the checkpoint's own layout.

    Args:
        dtype: of activations and biases.
    """

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = sizes
        self.dtype = dtype

        def made(*shape: int, dtype: torch.dtype = torch.uint8) -> nn.Parameter:
            empty = torch.empty(sizes.experts, *shape, dtype=dtype, device=device)
            return nn.Parameter(empty, requires_grad=False)

        def packed(outputs: int, inputs: int) -> nn.Parameter:
            return made(ceil_div(inputs, BLOCK), outputs, BLOCK_BYTES)

        def scales(outputs: int, inputs: int) -> nn.Parameter:
            return made(ceil_div(inputs, BLOCK), outputs, dtype=torch.int32)

        width, half = sizes.width, sizes.half
        self.gate_up_packed, self.gate_up_scales = packed(2 * half, width), scales(2 * half, width)
        self.down_packed, self.down_scales = packed(width, half), scales(width, half)
        self.gate_up_bias, self.down_bias = made(2 * half, dtype=dtype), made(width, dtype=dtype)

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
        """See `ExpertWeights`."""
        return fused_moe_int4(x, logits, *self.tensors(), top_k, renormalize, self.sizes.gate)

    def tensors(self) -> tuple[PackedExperts, PackedExperts]:
        """What the kernels read: gate_up and down."""
        return (
            PackedExperts(self.gate_up_packed, self.gate_up_scales, None, self.gate_up_bias),
            PackedExperts(self.down_packed, self.down_scales, None, self.down_bias),
        )

    def part_tensors(self) -> dict[str, Tensor]:
        """See `ExpertWeights`. The bias of gate and up has a last dimension of 2, which files lack."""
        experts, half = self.sizes.experts, self.sizes.half
        views = {
            "experts.gate_up_proj_bias": self.gate_up_bias.detach().view(experts, 2, half).transpose(1, 2),
            "experts.down_proj_bias": self.down_bias.detach(),
        }
        for name, stored in self._stored().items():
            views[f"experts.{name}_blocks"], views[f"experts.{name}_scales"] = stored
        return views

    def _stored(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each matrix the blocks uint8 [E, out, in / 32, 16] and scales [E, out, in / 32] of a checkpoint,
        in the memory of `packed` and `scales`."""
        experts, width, half = self.sizes.experts, self.sizes.width, self.sizes.half
        found = {}
        for name, weight, outputs, inputs in (
            ("gate_up_proj", self.tensors()[0], 2 * half, width),
            ("down_proj", self.tensors()[1], width, half),
        ):
            groups = inputs // BLOCK_OF_SCALE
            of_blocks = weight.packed.detach().view(experts, -1)[:, : outputs * inputs // 2]
            all_scales = weight.scales.detach().view(experts, -1).view(torch.uint8)
            of_scales = all_scales[:, : outputs * groups]
            blocks = of_blocks.view(experts, outputs, groups, BLOCK_OF_SCALE // 2)
            found[name] = (blocks, of_scales.view(experts, outputs, groups))
        return found

    def finish_loading(self) -> None:
        """See `ExpertWeights`: an expert at a time.

        Raises:
            ModelError: a scale is NaN, or too large for the kernels.
        """
        for (name, (blocks, scales)), weight in zip(self._stored().items(), self.tensors(), strict=True):
            largest = int(scales.max())
            if largest > LARGEST_SCALE:
                power = "NaN" if largest == 255 else f"2^{largest - BIAS}"
                raise ModelError(
                    f"{name}_scales: the largest MXFP4 scale is {power}; the kernels take up to"
                    f" 2^{LARGEST_SCALE - BIAS}, and no NaN: is the checkpoint whole?"
                )
            for expert in range(self.sizes.experts):
                codes, own = mxfp4_codes(blocks[expert]), scales[expert].clone()
                if weight.bias is self.gate_up_bias:
                    codes, own = (torch.cat((rows[::2], rows[1::2])) for rows in (codes, own))
                self._set(weight, expert, codes, own)

    def _set(self, weight: PackedExperts, expert: int, codes: Tensor, scales: Tensor) -> None:
        """Pack codes [out, in] and scales [out, in / 32] of one expert; what is padded is 0."""
        weight.packed[expert].copy_(pack_e2m1(F.pad(codes, (0, -codes.shape[1] % BLOCK))))
        padding = weight.scales.shape[1] * BLOCK // BLOCK_OF_SCALE - scales.shape[1]
        weight.scales[expert].copy_(pack_scales(F.pad(scales, (0, padding))))

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`; biases are 0."""
        sizes = self.sizes
        shapes = ((2 * sizes.half, sizes.width), (sizes.width, sizes.half))
        for weight, shape in zip(self.tensors(), shapes, strict=True):
            values = torch.empty((sizes.experts, *shape), dtype=self.dtype, device=weight.packed.device)
            normal(values)
            for expert, matrix in enumerate(values):
                self._set(weight, expert, *quantize_mxfp4(matrix))
        self.gate_up_bias.zero_()
        self.down_bias.zero_()
