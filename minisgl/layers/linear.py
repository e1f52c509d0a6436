"""Matrix products with weights stored as Hugging Face does: [out, in].

N rows of input, `in` and `out` features.
"""

import torch
from torch import Tensor, nn

from triton_kernels.registry import KERNELS


class Linear(nn.Module):
    """`y = x @ weight.T (+ bias)`; both are allocated, not initialised."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(out_features, dtype=dtype, device=device), requires_grad=False
            )
        self.kernels = KERNELS

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.kernels.linear(x, self.weight, self.bias)


class FusedLinear(nn.Module):
    """Several linear layers with the same input, fused into one matrix product; their rows are concatenated.

    Args:
        parts: the checkpoint's name of each part and its output features, in order.
        bias: every part has a bias.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.kernels = KERNELS
        out_features = sum(parts.values())
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(out_features, dtype=dtype, device=device), requires_grad=False
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, sum of the parts]."""
        return self.kernels.linear(x, self.weight, self.bias)

    def part_tensors(self) -> dict[str, Tensor]:
        """Views of the fused tensors, by name in the checkpoint: each part's weight [out, in], bias [out]."""
        views: dict[str, Tensor] = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                rows = torch.split(fused.detach(), list(self.parts.values()))
                views |= {f"{part}.{kind}": some for part, some in zip(self.parts, rows, strict=True)}
        return views
