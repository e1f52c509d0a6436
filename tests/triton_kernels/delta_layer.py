"""Random inputs of the linear attention's ops, with NaN in all memory that nobody may use."""

from typing import NamedTuple

import torch
from torch import Tensor

from triton_kernels.gated_delta import TAPS, DeltaStates, DeltaWeights

NAN = float("nan")


class DeltaLayer(NamedTuple):
    """Sizes of a layer: key heads, value heads, their dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def weights(self, dtype: torch.dtype, device: str) -> DeltaWeights:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        return DeltaWeights(
            (normal(self.channels, TAPS) * 0.5).to(device, dtype),
            (normal(self.value_heads) * 0.5).to(device),
            normal(self.value_heads).to(device),
            (normal(self.value_dim) * 0.2 + 1).to(device, dtype),
        )

    def states(self, num_lines: int, dtype: torch.dtype, device: str) -> DeltaStates:
        """All NaN: what no token has written may not be used."""
        conv = torch.full((num_lines, TAPS, self.channels), NAN, dtype=dtype, device=device)
        shape = (num_lines, self.value_heads, self.key_dim, self.value_dim)
        return DeltaStates(conv, torch.full(shape, NAN, device=device))

    def inputs(
        self, num_tokens: int, dtype: torch.dtype, device: str, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """qkvz and ba: columns of one matrix with further columns, which are NaN."""
        generator = torch.Generator().manual_seed(seed)
        width = self.channels + self.value_heads * self.value_dim
        matrix = torch.full((num_tokens, width + 2 * self.value_heads + 3), NAN)
        matrix[:, :-3] = torch.randn((num_tokens, matrix.shape[1] - 3), generator=generator)
        matrix = matrix.to(device, dtype)
        return matrix[:, :width], matrix[:, width:-3]


def clone(states: DeltaStates) -> DeltaStates:
    return DeltaStates(*(one.clone() for one in states))


def int32(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
