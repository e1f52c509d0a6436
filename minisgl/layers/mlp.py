"""The gated MLP. T tokens, M model width, F MLP width."""

import torch
from torch import Tensor, nn

from minisgl.layers.linear import FusedLinear, Linear
from triton_kernels.registry import KERNELS
from triton_kernels.silu_mul import gelu_tanh_mul


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one matrix product."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device)
        self.kernels = KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        return self.down_proj(self.kernels.gated_linear(x, self.gate_up_proj.weight))


class GeluMLP(nn.Module):
    """`down(gelu_tanh(gate(x)) * up(x))`, with gate and up in one matrix product (Gemma)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, dtype, device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, M] -> [T, M]."""
        return self.down_proj(gelu_tanh_mul(self.gate_up_proj(x)))
