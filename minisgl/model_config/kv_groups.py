"""Which layers of a model keep the same part of a row: KV groups.

Promise: every layer is in one group, and a layer that reads another layer's keys and values is in that one's.
The group that keeps all tokens comes first, then windows from the longest on, then the states. Most models
have one group. Layers of a group may have different shapes: they share page ids, not memory.
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
    """Layers that keep the same part of a row: all tokens, a window of them, or a state."""

    layers: tuple[int, ...]
    window: int = 0
    """Tokens that a token sees, itself included; 0 = all of them, or a state."""
    elements_per_token: int = 0
    """Keys and values of one token in all layers; 0 for states."""
    states: tuple[StateShape, ...] = ()
    """The state of each layer; empty = the layers keep keys and values."""

    @property
    def kind(self) -> str:
        """One of "all", "window" and "state"."""
        return "state" if self.states else "window" if self.window else "all"

    def state_bytes(self, element_bytes: int) -> int:
        """A row's state in all layers, and a snapshot's; 0 for other groups."""
        return sum(state.num_bytes(element_bytes) for state in self.states)


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
    members: dict[int, list[int]] = {}
    elements: dict[int, int] = {}
    states: dict[int, StateShape] = {}
    for layer, shape in enumerate(shapes):
        if isinstance(shape, StateShape):
            states[layer] = shape
            continue
        source = sources[layer] if sources else layer
        window = windows[source] if windows else 0
        if max_context_tokens and window >= max_context_tokens:
            window = 0
        members.setdefault(window, []).append(layer)
        elements[window] = elements.get(window, 0) + (shape.num_elements if source == layer else 0)
    in_order = sorted(members, key=lambda window: (window > 0, -window))
    groups = [KVGroup(tuple(members[window]), window, elements[window]) for window in in_order]
    return (*groups, *([KVGroup(tuple(states), states=tuple(states.values()))] if states else []))
