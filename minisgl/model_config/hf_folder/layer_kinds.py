"""Reads from config.json which layers have a window, and which have no rotary embeddings."""

from typing import Any

from minisgl.errors import ModelError
from minisgl.model_config.hf_folder.families import Family, Windows
from minisgl.model_config.hf_folder.json_fields import integer, unsupported, whole_number

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def layer_windows(raw: dict[str, Any], family: Family, max_position: int) -> tuple[int, ...]:
    """`ModelConfig.windows`; a window as long as the longest context counts as no window."""
    kinds = layer_kinds(raw, family)
    if SLIDING not in kinds:
        return ()
    window = integer({"sliding_window": raw.get("sliding_window", family.sliding_window)}, "sliding_window")
    if window >= max_position:
        return ()
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def layer_kinds(raw: dict[str, Any], family: Family) -> list[str]:
    """Each layer's type, as transformers assigns them; see `_kinds`."""
    kinds = _kinds(raw, family)
    return [*kinds[:-1], FULL] if family.last_layer_full else kinds


def _kinds(raw: dict[str, Any], family: Family) -> list[str]:
    """Each layer's type, as transformers assigns them: "full_attention", "sliding_attention" or
    "linear_attention".

    Raises:
        ModelError: `layer_types` has the wrong length, an unknown type, or a type that this class ignores.
    """
    num_layers = integer(raw, "num_hidden_layers")
    listed = raw.get("layer_types") or []
    if not isinstance(listed, list) or len(listed) not in (0, num_layers):
        raise ModelError(f"config.json: layer_types must name a type for each of {num_layers} layers")
    known = (FULL, LINEAR) if family.linear_attention else (FULL, SLIDING)
    others = sorted({str(kind) for kind in listed} - set(known))
    if others:
        raise unsupported(f"layer_types {', '.join(others)}; known are {', '.join(known)}")
    if family.linear_attention:
        every = integer(raw, "full_attention_interval", 4)
        return listed or [FULL if (layer + 1) % every == 0 else LINEAR for layer in range(num_layers)]

    window = raw.get("sliding_window", family.sliding_window)
    used = window is not None and family.windows is not Windows.NONE
    if family.windows in USED_WHERE_SAID:
        used = used and bool(raw.get("use_sliding_window"))
    by_pattern = family.windows in (Windows.EVERY_SECOND, Windows.PATTERN)
    if not used and ((by_pattern and not listed) or (SLIDING in listed and family.windows in LISTED)):
        raise ModelError("config.json: some layers are to have a window, but there is no sliding_window")
    if listed and family.windows in LISTED:
        return listed
    with_window = _with_window(raw, family, num_layers) if used else set()
    kinds = [SLIDING if layer in with_window else FULL for layer in range(num_layers)]
    if SLIDING in listed and listed != kinds:
        raise unsupported("layer_types with sliding_attention, which this architecture does not read")
    return kinds


USED_WHERE_SAID = (Windows.ALL_IF_USED, Windows.LATER_LAYERS_IF_USED, Windows.NO_ROPE_IF_USED)
"""These classes read `use_sliding_window`."""
LISTED = (
    Windows.LATER_LAYERS_IF_USED,
    Windows.EVERY_SECOND,
    Windows.PATTERN,
    Windows.NO_ROPE_IF_USED,
)
"""These classes read `layer_types`."""


def _with_window(raw: dict[str, Any], family: Family, num_layers: int) -> set[int]:
    """The layers with a window, if config.json does not list their types."""
    layers = range(num_layers)
    if family.windows is Windows.LATER_LAYERS_IF_USED:
        return set(layers[whole_number(raw, "max_window_layers", 28) :])
    if family.windows is Windows.NO_ROPE_IF_USED:
        return set(layers_without_rope(raw))
    if family.windows is Windows.EVERY_SECOND:
        return {layer for layer in layers if (layer + 1) % 2}
    if family.windows is Windows.PATTERN:
        every = family.window_pattern or integer(raw, "sliding_window_pattern", family.default_pattern)
        return {layer for layer in layers if (layer + 1) % every}
    return set(layers)


def layers_without_rope(raw: dict[str, Any]) -> frozenset[int]:
    """The layers without rotary embeddings: a 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th.

    Raises:
        ModelError: `no_rope_layers` is not a list of 0 and 1 for every layer.
    """
    num_layers = integer(raw, "num_hidden_layers")
    listed = raw.get("no_rope_layers")
    if listed is None:
        every = integer(raw, "no_rope_layer_interval", 4)
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    if not isinstance(listed, list) or len(listed) < num_layers or not set(listed) <= {0, 1}:
        raise ModelError(
            f"config.json: no_rope_layers must be 0 (no RoPE) or 1 for each of {num_layers} layers, "
            f"got {listed!r}"
        )
    return frozenset(layer for layer in range(num_layers) if not listed[layer])
