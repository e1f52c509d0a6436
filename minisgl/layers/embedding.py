"""The token embedding. T tokens, V vocabulary, M model width."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Embedding(nn.Module):
    """One row of `weight` [V, M] per token; allocated, not initialised."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """int32 or int64 [T] -> [T, M]."""
        return F.embedding(token_ids, self.weight)
