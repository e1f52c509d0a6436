"""The states of linear attention in all layers: those of rows, and snapshots of them.

Promise: a copy is queued behind the steps launched so far and before the next one, for all layers at once.
Prefill writes snapshots itself where a state in the middle of a chunk is wanted.

L layers of linear attention, R rows, N snapshots; other letters as in linear_attention.py.
"""

from collections.abc import Iterable, Sequence

import torch

from minisgl.layers.linear_attention import LinearAttention
from triton_kernels.gated_delta import TAPS, DeltaStates


class StatePool:
    """Lines 0..R-1 of each layer's states are rows', line R is padding's; snapshots lie apart.

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
        nothing = DeltaStates(torch.empty(0), torch.empty(0))
        for layer in layers:  # what they had until now goes first
            layer.use_states(nothing, nothing)
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()  # else parts of it could go to smaller tensors, and the rest to none
        (shape,) = {layer.shape for layer in layers}
        sizes = (shape.num_heads, shape.key_dim, shape.value_dim)

        def zeros(num_lines: int) -> DeltaStates:
            lines = (len(layers), num_lines)
            return DeltaStates(
                torch.zeros(*lines, TAPS, shape.conv_channels, dtype=dtype, device=device),
                torch.zeros(*lines, *sizes, dtype=torch.float32, device=device),
            )

        self.states = zeros(max_rows + 1)
        """[L, R + 1, 4, C], and float32 [L, R + 1, V, D, E]."""
        self.snapshots = zeros(num_snapshots)
        """The same of N lines."""
        for index, layer in enumerate(layers):
            layer.use_states(
                DeltaStates(*(one[index] for one in self.states)),
                DeltaStates(*(one[index] for one in self.snapshots)),
            )

    def save(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy the states of rows to snapshots: pairs of a row and a snapshot."""
        for row, snapshot in copies:
            _copy(self.states, row, self.snapshots, snapshot)

    def load(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy snapshots to rows: pairs of a snapshot and a row."""
        for snapshot, row in copies:
            _copy(self.snapshots, snapshot, self.states, row)


def _copy(source: DeltaStates, source_line: int, target: DeltaStates, target_line: int) -> None:
    # One by one: of many at once, torch would make a copy in between.
    for from_tensor, to_tensor in zip(source, target, strict=True):
        to_tensor[:, target_line].copy_(from_tensor[:, source_line])
