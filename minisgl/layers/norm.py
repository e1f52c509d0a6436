"""Root-mean-square normalisation, alone or fused with the residual addition before it.

N rows, M model width.
"""

import torch
from torch import Tensor, nn

from minisgl.layers.weight import Fp8Rows, Input, InputFormat
from triton_kernels.quantize_fp8 import GROUP
from triton_kernels.registry import KERNELS
from triton_kernels.rms_norm_fp8 import add_rms_norm_fp8


class Factor(nn.Module):
    """A number of the checkpoint's that multiplies; `value` [1] is allocated, not initialised."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(1, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x times the number."""
        return x * self.value


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and rounded once.

    The weight is allocated, not initialised.

    Args:
        weight_minus_one: the checkpoint stores the weight minus 1 (Gemma), and `add_one` adds it back. The
            weight is float32 then: added to 1 in bfloat16, the small stored numbers would lose most digits.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_minus_one: bool = False,
    ) -> None:
        super().__init__()
        weight = torch.empty(hidden_size, dtype=torch.float32 if weight_minus_one else dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps
        self.weight_minus_one = weight_minus_one
        self.kernels = KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """[N, M] -> [N, M]."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), each [N, M]."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def forward_add_as(self, x: Tensor, residual: Tensor, wanted: InputFormat) -> tuple[Input, Tensor]:
        """`forward_add` with the norm as the next layer wants it; plain if the user has replaced the op."""
        if wanted is InputFormat.PLAIN or self.kernels.add_rms_norm is not KERNELS.add_rms_norm:
            return self.forward_add(x, residual)
        group = GROUP if wanted is InputFormat.FP8_GROUPS else None
        values, scales, residual = add_rms_norm_fp8(x, residual, self.weight, self.eps, group)
        return Fp8Rows(values, scales), residual

    def add_one(self) -> None:
        """Called once, after the checkpoint is loaded."""
        if self.weight_minus_one:
            self.weight.add_(1.0)
