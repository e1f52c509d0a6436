"""Which layers of a model keep their cache in the same way: KV groups.

Promise: every layer is in one group, and a layer that reads another layer's keys and values is in that one's.
The groups that keep all tokens come first, then windows from the longest on, then states. Most models have
one group.
"""

from collections.abc import Sequence
from typing import NamedTuple


class KVShape(NamedTuple):
    """Keys, and values, of one token in one layer."""

    num_heads: int
    head_dim: int

    @property
    def num_elements(self) -> int:
        """Keys and values together."""
        return 2 * self.num_heads * self.head_dim


class StateShape(NamedTuple):
    """What a layer of linear attention keeps of a row, however long that is."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_tokens: int
    """Inputs of the convolution before the next token."""

    def num_bytes(self, element_bytes: int) -> int:
        """Bytes of one layer's state: float32 [heads, key_dim, value_dim], and [channels, tokens] of the
        model's dtype."""
        recurrent_bytes = 4 * self.num_heads * self.key_dim * self.value_dim
        return recurrent_bytes + self.conv_channels * self.conv_tokens * element_bytes


class KVGroup(NamedTuple):
    """Layers whose cache has one shape and is kept in one way: all tokens, a window of them, or a state."""

    layers: tuple[int, ...]
    shape: KVShape | StateShape
    window: int = 0
    """Tokens that the next one sees, itself included; 0 = all of them, or a state."""
    num_stored: int = 0
    """How many of the layers have a cache of their own; the others read one of these."""

    @property
    def is_state(self) -> bool:
        return isinstance(self.shape, StateShape)

    @property
    def kind(self) -> str:
        """One of "all", "window" and "state"."""
        return "state" if self.is_state else "window" if self.window else "all"

    @property
    def elements_per_token(self) -> int:
        """Keys and values of one token in all layers; 0 for states."""
        return self.num_stored * self.shape.num_elements if isinstance(self.shape, KVShape) else 0

    def state_bytes(self, element_bytes: int) -> int:
        """A row's state in all layers, and a snapshot's; 0 for other groups."""
        if not isinstance(self.shape, StateShape):
            return 0
        return self.num_stored * self.shape.num_bytes(element_bytes)


def group_layers(
    shapes: Sequence[KVShape | StateShape],
    windows: Sequence[int] = (),
    sources: Sequence[int] = (),
    max_context_tokens: int | None = None,
) -> tuple[KVGroup, ...]:
    """Group the layers of a model.

    Args:
        shapes: of each layer's cache.
        windows: of each layer, 0 = none; empty = no layer has one.
        sources: the layer whose keys and values each layer reads; empty = each reads its own.
        max_context_tokens: a window that is as long counts as none.
    """
    members: dict[tuple[int, KVShape | StateShape], list[int]] = {}
    stored: dict[tuple[int, KVShape | StateShape], int] = {}
    for layer in range(len(shapes)):
        source = sources[layer] if sources else layer
        window = windows[source] if windows else 0
        if isinstance(shapes[source], StateShape) or (max_context_tokens and window >= max_context_tokens):
            window = 0
        key = (window, shapes[source])
        members.setdefault(key, []).append(layer)
        stored[key] = stored.get(key, 0) + (source == layer)
    groups = [
        KVGroup(tuple(layers), shape, window, stored[window, shape])
        for (window, shape), layers in members.items()
    ]
    return tuple(sorted(groups, key=lambda group: (group.is_state, group.window > 0, -group.window)))
