"""gpt-oss's experts: matrices with biases, of which its checkpoints store all experts' together.

Promise: the kernels see the gate in the upper rows, whatever the checkpoint does: there, rows of gate and up
take turns, and unquantized matrices are transposed. MXFP4 becomes the model's dtype while loading, which is
exact in bfloat16; its numbers lie beside the matrices until then.

T tokens, M model width, E experts, F width of one expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.layers.experts.weights import ExpertSizes
from minisgl.model_config.config import ExpertStorage
from triton_kernels.mxfp4 import BLOCK_OF_SCALE, dequantize_mxfp4
from triton_kernels.registry import KERNELS


class GptOssExperts(nn.Module):
    """gate_up [E, 2F, M], down [E, M, F] and their biases [E, 2F] and [E, M]; not initialised.

    Of a checkpoint in MXFP4 also, until it is loaded, `blocks` uint8 [E, outputs, inputs / 32, 16] and
    `scales` uint8 [E, outputs, inputs / 32] of both.
    """

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = sizes
        self.kernels = KERNELS
        self.is_mxfp4 = sizes.stored is ExpertStorage.MXFP4

        def made(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        experts, width, half = sizes.experts, sizes.width, sizes.half
        self.gate_up = made(experts, 2 * half, width)
        self.gate_up_bias = made(experts, 2 * half)
        self.down = made(experts, width, half)
        self.down_bias = made(experts, width)
        self.stored: dict[str, Tensor] = {}
        self._device = device

    def forward(self, x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> Tensor:
        """See `ExpertWeights`."""
        biases = (self.gate_up_bias, self.down_bias)
        weights = (self.gate_up, self.down)
        return self.kernels.fused_moe(
            x, logits, *weights, top_k, renormalize, biases=biases, gate=self.sizes.gate
        )

    def part_tensors(self) -> dict[str, Tensor]:
        """See `ExpertWeights`. Of interleaved tensors, views with a last dimension of 2, which files lack."""
        experts, width, half = self.sizes.experts, self.sizes.width, self.sizes.half
        views = {
            "experts.gate_up_proj_bias": self.gate_up_bias.detach().view(experts, 2, half).transpose(1, 2),
            "experts.down_proj_bias": self.down_bias.detach(),
        }
        if not self.is_mxfp4:
            pairs = self.gate_up.detach().view(experts, 2, half, width).permute(0, 3, 2, 1)
            return views | {
                "experts.gate_up_proj": pairs,
                "experts.down_proj": self.down.detach().transpose(1, 2),
            }
        if not self.stored:
            for name, outputs, inputs in (("gate_up_proj", 2 * half, width), ("down_proj", width, half)):
                shape = (experts, outputs, inputs // BLOCK_OF_SCALE)
                kind = {"dtype": torch.uint8, "device": self._device}
                self.stored[f"experts.{name}_blocks"] = torch.empty(*shape, BLOCK_OF_SCALE // 2, **kind)
                self.stored[f"experts.{name}_scales"] = torch.empty(*shape, **kind)
        return views | self.stored

    def finish_loading(self) -> None:
        """See `ExpertWeights`: MXFP4 becomes numbers of the model's dtype, an expert at a time."""
        if not self.stored:
            return
        parts = {name.removeprefix("experts."): tensor for name, tensor in self.stored.items()}
        for expert in range(self.sizes.experts):
            rows, down = (
                dequantize_mxfp4(parts[f"{name}_blocks"][expert], parts[f"{name}_scales"][expert])
                for name in ("gate_up_proj", "down_proj")
            )
            self.gate_up[expert].copy_(torch.cat((rows[::2], rows[1::2])))
            self.down[expert].copy_(down)
        self.stored = {}

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`; biases are 0."""
        normal(self.gate_up)
        normal(self.down)
        self.gate_up_bias.zero_()
        self.down_bias.zero_()
