"""Checks that every settings class shares: a field's type, and the message of a refusal."""

from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from minisgl.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
LARGEST = (1 << 31) - 1
"""Bound of counts that have no smaller bound."""


def require(ok: bool, flag: str, needed: str, got: object) -> None:
    if not ok:
        text = str(got)
        text = text if len(text) <= 60 else text[:57] + "..."
        raise ConfigError(f"--{flag.replace('_', '-')} must be {needed}, got {text}")


def check_types(config: Any) -> None:
    """Check each field's type: Python callers may pass anything; flags and JSON have the right types."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (
            get_args(hints[field.name]) if isinstance(hints[field.name], UnionType) else (hints[field.name],)
        )
        if not any(_is_kind(value, kind) for kind in kinds):
            require(False, field.name, KIND_NAMES[kinds[0]], repr(value))


KIND_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    tuple[str, ...]: "a tuple of texts",
}


def _is_kind(value: object, kind: Any) -> bool:
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if kind is float:
        kind = int | float
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
