"""The states of linear attention in all layers: those of rows, and snapshots of them.

Promise: a copy is queued behind the steps launched so far and before the next one, for all layers at once.

L layers of linear attention, R rows, N snapshots; other letters as in linear_attention.py.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from minisgl.layers.linear_attention import LinearAttention
from triton_kernels.gated_delta import TAPS


class StatePool:
    """Lines 0..R-1 of each layer are rows', line R is padding's, the others are snapshots.

    Args:
        layers: all of one shape.
        dtype: of the convolutions' states; the others are float32.
    """

    def __init__(
        self,
        layers: Sequence[LinearAttention],
        max_rows: int,
        num_snapshots: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        for layer in layers:  # what they had until now goes first
            layer.use_states(torch.empty(0), torch.empty(0))
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # else parts of it could go to smaller tensors, and the rest to none
        (shape,) = {layer.shape for layer in layers}
        lines = (len(layers), max_rows + 1 + num_snapshots)
        sizes = (shape.num_heads, shape.key_dim, shape.value_dim)
        self._conv = torch.zeros(*lines, TAPS, shape.conv_channels, dtype=dtype, device=device)
        self._recurrent = torch.zeros(*lines, *sizes, dtype=torch.float32, device=device)
        self._first_snapshot = max_rows + 1
        for index, layer in enumerate(layers):
            layer.use_states(self._conv[index, : max_rows + 1], self._recurrent[index, : max_rows + 1])

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """[L, R + 1 + N, 4, C], and float32 [L, R + 1 + N, V, D, E]."""
        return self._conv, self._recurrent

    def save(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy the states of rows to snapshots: pairs of a row and a snapshot."""
        for row, snapshot in copies:
            self._copy(row, self._first_snapshot + snapshot)

    def load(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy snapshots to rows: pairs of a snapshot and a row."""
        for snapshot, row in copies:
            self._copy(self._first_snapshot + snapshot, row)

    def _copy(self, source: int, target: int) -> None:
        # One by one: of many at once, torch would make a copy in between.
        for tensor in self.tensors:
            tensor[:, target].copy_(tensor[:, source])
