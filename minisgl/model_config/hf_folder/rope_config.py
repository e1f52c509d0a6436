"""Reads the rotary position embeddings (RoPE) from config.json.

Promise: a RoPE setting that this engine does not support is refused by name.
"""

import math
from typing import Any, NamedTuple

from minisgl.errors import ModelError
from minisgl.model_config.config import RopeScaling
from minisgl.model_config.hf_folder.json_fields import integer, number, share, unsupported

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


class RopeSettings(NamedTuple):
    """The RoPE settings of a model."""

    theta: float
    scaling: RopeScaling | None
    local_theta: float = 10000.0


def read_rope(raw: dict[str, Any], default_theta: float, rotary_dim: int) -> RopeSettings:
    """Theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    older, newer = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    for settings in (older, newer):
        if not isinstance(settings, dict) or any(isinstance(value, dict) for value in settings.values()):
            raise ModelError("config.json: RoPE settings that differ by layer type are not supported")
    # If a file has both, transformers uses rope_scaling; theta may still be in rope_parameters.
    theta = number(newer, "rope_theta", number(raw, "rope_theta", default_theta))
    parameters = older or newer
    return RopeSettings(number(parameters, "rope_theta", theta), _rope_scaling(raw, parameters, rotary_dim))


def read_rope_by_layer_type(
    raw: dict[str, Any], default_theta: float, default_local_theta: float, rotary_dim: int
) -> RopeSettings:
    """Settings by layer type: nested in transformers 5, `rope_local_base_freq` in version 4 (Gemma 3)."""
    nested = raw.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not set(nested) <= {"full_attention", "sliding_attention"}:
        raise ModelError("config.json: rope_parameters must be those of full_attention and sliding_attention")
    full = {**(nested.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise unsupported(f"RoPE of type {kind!r} in the layers with a window")
    return RopeSettings(
        number(full, "rope_theta", number(raw, "rope_theta", default_theta)),
        _rope_scaling(raw, full, rotary_dim),
        number(local, "rope_theta", number(raw, "rope_local_base_freq", default_local_theta)),
    )


def read_rotary_dim(raw: dict[str, Any], default_share: float | None, head_dim: int) -> int:
    """How many of a head's elements are rotated.

    Args:
        default_share: of a family that reads `partial_rotary_factor`; None = others, which rotate all.

    Raises:
        ModelError: it is no even number above 0, or the family rotates all and config.json asks for a part.
    """
    key = "partial_rotary_factor"
    settings: list[dict[str, Any]] = [raw]
    for outer in (raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}):
        inner = [value for value in outer.values() if isinstance(value, dict)]
        settings += [one for one in (outer, *inner) if one.get("rope_type") != "proportional"]
    given = [one for one in settings if one.get(key) is not None]
    if default_share is None:
        if any(one[key] != 1.0 for one in given):
            raise unsupported(f"{key} = {given[-1][key]!r}")
        return head_dim
    # As in transformers, the RoPE settings' own goes before that outside of them.
    rotary_dim = int(head_dim * share(given[-1] if given else {key: default_share}, key))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"config.json: {key} must rotate an even number of a head's {head_dim} elements")
    return rotary_dim


def _rope_scaling(raw: dict[str, Any], parameters: dict[str, Any], rotary_dim: int) -> RopeScaling | None:
    """The scaling that `parameters` ask for.

    Args:
        rotary_dim: how many of a head's elements are rotated.

    Raises:
        ModelError: the RoPE type is not supported.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "proportional":
        return RopeScaling(
            kind="proportional",
            factor=number(parameters, "factor", 1.0),
            rotated_share=share(parameters, "partial_rotary_factor"),
        )
    # Dynamic NTK changes nothing up to max_position_embeddings. Longer contexts are refused, because keys in
    # the pool can't be rotated again when a sequence grows.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=number(parameters, "factor"))
    # The first versions of Phi-3 use these names.
    if kind == "su" or (kind == "yarn" and "short_factor" in parameters):
        kind = "longrope"
    if kind not in ("llama3", "yarn", "longrope"):
        raise unsupported(f"RoPE of type {kind!r}; known are {', '.join(ROPE_TYPES)}")
    # transformers prefers the key outside of the RoPE settings.
    key = "original_max_position_embeddings"
    max_position = integer(raw, "max_position_embeddings")
    original = integer(parameters if raw.get(key) is None else raw, key, max_position)
    if kind == "yarn":
        return _yarn(parameters, original, max_position)
    if kind == "longrope":
        return _longrope(parameters, original, max_position, rotary_dim)
    scaling = RopeScaling(
        kind="llama3",
        factor=number(parameters, "factor"),
        original_max_position=original,
        low_freq_factor=number(parameters, "low_freq_factor"),
        high_freq_factor=number(parameters, "high_freq_factor"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: RoPE's high_freq_factor must be larger than low_freq_factor")
    return scaling


def _yarn(parameters: dict[str, Any], original: int, max_position: int) -> RopeScaling:
    factor = number(parameters, "factor", max_position / original)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    magnify = magnitude(1.0)
    if mscale and mscale_all_dim:
        magnify = magnitude(number(parameters, "mscale")) / magnitude(number(parameters, "mscale_all_dim"))
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=number(parameters, "attention_factor", magnify),
    )


def _longrope(parameters: dict[str, Any], original: int, max_position: int, rotary_dim: int) -> RopeScaling:
    factor = number(parameters, "factor", max_position / original)
    magnify = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=factor,
        original_max_position=original,
        short_factors=_factors(parameters, "short_factor", rotary_dim // 2),
        long_factors=_factors(parameters, "long_factor", rotary_dim // 2),
        attention_factor=number(parameters, "attention_factor", magnify),
    )


def _factors(parameters: dict[str, Any], key: str, count: int) -> tuple[float, ...]:
    listed = parameters.get(key)
    if not isinstance(listed, list) or len(listed) != count:
        got = f"{len(listed)} of them" if isinstance(listed, list) else repr(listed)
        raise ModelError(f"config.json: RoPE's {key} must be a list of {count} numbers, got {got}")
    return tuple(number({key: value}, key) for value in listed)
