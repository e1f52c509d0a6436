"""Root-mean-square normalisation, alone or fused with the residual addition before it.

N rows, M model width.
"""

import torch
from torch import Tensor, nn

from triton_kernels.registry import KERNELS


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and rounded once; the weight is allocated,
    not initialised.

    Args:
        less_one: checkpoints hold the weight less 1 (Gemma), which `add_one` makes good. It is float32 then:
            next to 1, the small numbers that are stored would lose most of their digits.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        less_one: bool = False,
    ) -> None:
        super().__init__()
        weight = torch.empty(hidden_size, dtype=torch.float32 if less_one else dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.less_one = less_one
        self.kernels = KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """[N, M] -> [N, M]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [N, M]."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def add_one(self) -> None:
        """Called once, when what the checkpoint holds is in place."""
        if self.less_one:
            self.weight.add_(1.0)
