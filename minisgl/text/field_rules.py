"""Which fields of a JSON object pass unread, and which are refused because they ask for what is not here.

Promise: a field is known, harmless, neutral, or named in a 400; none is ignored that could change the answer.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from minisgl.errors import RequestError

Rules = Mapping[str, Callable[[object], bool]]
"""Fields that exist elsewhere and not here (yet) -> whether a value asks for nothing."""

HARMLESS = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Say something about the caller, nothing about the answer."""


def one_of(*neutral: object) -> Callable[[object], bool]:
    """The rule that lets exactly these values pass."""
    return lambda value: any(value == other and type(value) is type(other) for other in neutral)


def refuse_unsupported(
    fields: Mapping[str, Any], known: Collection[str], unsupported: Rules, where: str = ""
) -> None:
    """Pass what is known, harmless, null or neutral. `where` stands before a field's name in errors.

    Raises:
        RequestError: 400 `unsupported_parameter` or `unknown_parameter`, with the field.
    """
    for name, value in fields.items():
        if name in known or name in HARMLESS or value is None:
            continue
        field = where + short(name)
        if name not in unsupported:
            raise RequestError(400, "unknown_parameter", f"unknown parameter: {field}", field)
        if not unsupported[name](value):
            raise RequestError(
                400,
                "unsupported_parameter",
                f"{field} = {short(value)} is not supported here; leave it out",
                field,
            )


def kind_of(value: object) -> str:
    """The JSON name of a value's type, of a value that JSON has not its Python name."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def short(value: object) -> str:
    """A value for an error message, cut when it is long."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
