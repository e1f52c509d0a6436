"""Root-mean-square normalisation, alone or fused with the residual addition before it.

N rows, M model width.
"""

import torch
from torch import Tensor, nn

from triton_kernels.registry import KERNELS


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32; the weight is allocated, not initialised."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device), requires_grad=False)
        self.eps = eps
        self.kernels = KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """[N, M] -> [N, M]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [N, M]."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
