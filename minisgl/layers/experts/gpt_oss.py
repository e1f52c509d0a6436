"""gpt-oss's experts: matrices with biases, of which its checkpoints store all experts' together.

Promise: the kernels see the gate in the upper rows, whatever the checkpoint does: there, rows of gate and up
take turns, and matrices are transposed. Those in MXFP4 are mxfp4.py's.

T tokens, M model width, E experts, F width of one expert.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from minisgl.layers.experts.weights import ExpertSizes
from triton_kernels.registry import KERNELS


class GptOssExperts(nn.Module):
    """gate_up [E, 2F, M], down [E, M, F] and their biases [E, 2F] and [E, M]; not initialised."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.sizes = sizes
        self.kernels = KERNELS

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        experts, width, half = sizes.experts, sizes.width, sizes.half
        self.gate_up = made(experts, 2 * half, width)
        self.gate_up_bias = made(experts, 2 * half)
        self.down = made(experts, width, half)
        self.down_bias = made(experts, width)

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
        pairs = self.gate_up.detach().view(experts, 2, half, width).permute(0, 3, 2, 1)
        return {
            "experts.gate_up_proj": pairs,
            "experts.gate_up_proj_bias": self.gate_up_bias.detach().view(experts, 2, half).transpose(1, 2),
            "experts.down_proj": self.down.detach().transpose(1, 2),
            "experts.down_proj_bias": self.down_bias.detach(),
        }

    def finish_loading(self) -> None:
        """See `ExpertWeights`."""

    def fill_dummy(self, normal: Callable[[Tensor], None]) -> None:
        """See `ExpertWeights`; biases are 0."""
        normal(self.gate_up)
        normal(self.down)
        self.gate_up_bias.zero_()
        self.down_bias.zero_()
