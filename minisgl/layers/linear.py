"""Matrix products with weights stored as Hugging Face does: [out, in], no bias.

N rows of input, `in` and `out` features.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """`y = x @ weight.T`; the weight is allocated, not initialised."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return F.linear(x, self.weight)


class FusedLinear(nn.Module):
    """Several linear layers of one input as a single product; their rows lie one after the other.

    Args:
        parts: the checkpoint's name of each part and its output features, in order.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.parts = parts
        weight = torch.empty(sum(parts.values()), in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, sum of the parts]."""
        return F.linear(x, self.weight)

    def part_weights(self) -> dict[str, Tensor]:
        """Each part's [out, in] rows, as a view of the fused weight."""
        rows = torch.split(self.weight.detach(), list(self.parts.values()))
        return dict(zip(self.parts, rows, strict=True))
