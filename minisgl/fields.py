"""Checks a request's fields against their annotated types, which state type and bounds once.

Promise: a value passes as msgspec checks its type, or is refused with its field, the needed type and the
given value; OpenAPI's document shows the same types. Unknown fields are refused by name, never ignored.
"""

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from minisgl.errors import RequestError

MAX_SHOWN_CHARS = 60
"""Most characters of a value in an error message."""

Neutral = tuple[object, ...] | None
"""The values of an unsupported field that change nothing, so that they may pass; None = every value."""


def convert_value(value: Any, kind: Any, param: str) -> Any:
    """Convert `value` to the type `kind`, whose `msgspec.Meta` holds the bounds; lists may become tuples.

    Raises:
        RequestError: 400 `invalid_type` or `invalid_value` that names `param`.
    """
    if isinstance(value, float):
        value = float(value)  # it may be a subclass, such as numpy's
    if isinstance(value, set | frozenset):  # msgspec would accept it as a list
        raise RequestError(
            400, "invalid_type", f"{param} must be {describe_type(kind)}, got {shorten(value)}", param
        )
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        code = "invalid_type" if ", got `" in text else "invalid_value"
        place = re.search(r" - at `\$((?:\[\d+\])*)", text)
        path = place[1] if place else ""
        for index in re.findall(r"\d+", path):
            value = list(value)[int(index)]  # it may be a set
        got = f"a length of {len(value)}" if " of length " in text else shorten(value)
        at = f" at {param}{path}" if path else ""
        raise RequestError(
            400, code, f"{param} must be {describe_type(kind)}, got {got}{at}", param
        ) from None


def convert(fields: Mapping[str, Any], kind: type[Any], where: str = "") -> Any:
    """Convert `fields` to the struct `kind`, ignoring other fields. `where` precedes field names in errors.

    Raises:
        RequestError: 400 with the field that is missing, has the wrong type or is out of bounds.
    """
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        for field in inspect.type_info(kind).fields:  # pyright: ignore[reportAttributeAccessIssue]  a struct's
            name = where + field.name
            if field.name in fields:
                convert_value(fields[field.name], type_of(kind, field.name), name)
            elif field.required:
                raise RequestError(400, "missing_required_parameter", f"{name} is missing", name) from None
        raise


def type_of(kind: type[Any], name: str) -> Any:
    """The annotated type of a struct's field."""
    return next(field.type for field in msgspec.structs.fields(kind) if field.name == name)


def refuse_unknown(
    fields: Mapping[str, Any], known: Collection[str], others: Mapping[str, Neutral], where: str = ""
) -> None:
    """Refuse every field that is not known, not null, and not among `others` with a neutral value.

    Raises:
        RequestError: 400 `unsupported_parameter` or `unknown_parameter`, with the field.
    """
    for name, value in fields.items():
        if name in known or value is None:
            continue
        field = where + str(name)[:MAX_SHOWN_CHARS]
        if name not in others:
            like = difflib.get_close_matches(str(name)[:MAX_SHOWN_CHARS], [*known, *others], 1)
            hint = f"; did you mean {like[0]}?" if like else ""
            raise RequestError(400, "unknown_parameter", f"unknown parameter: {field}{hint}", field)
        neutral = others[name]
        if neutral is not None and not any(_is_same(value, one) for one in neutral):
            raise RequestError(
                400,
                "unsupported_parameter",
                f"{field} = {shorten(value)} is not supported here; leave it out",
                field,
            )


def describe_type(kind: Any) -> str:
    """A description of an annotated type, for error messages."""
    return _words(inspect.type_info(kind))


def json_type_name(value: object) -> str:
    """The JSON name of a value's type, or its Python name if JSON has no such type."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def shorten(value: object) -> str:
    """A value as JSON for an error message, cut to `MAX_SHOWN_CHARS`; its `repr` if it is no JSON value."""
    part = value[: MAX_SHOWN_CHARS + 1] if isinstance(value, str | list | tuple) else value
    try:
        text = json.dumps(part, ensure_ascii=False)
    except TypeError:
        text = repr(part)
    except (ValueError, RecursionError):  # Python converts no integer of more than 4300 digits to text
        return "a very large value"
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def _is_same(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _words(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata():
            title = (kind.extra_json_schema or {}).get("title")
            return f"a {title.lower()}" if title else _words(kind.type)
        case inspect.UnionType():
            return " or ".join(_words(one) for one in kind.types if not isinstance(one, inspect.NoneType))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            name = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            if kind.gt is not None:
                return f"{name} above {kind.gt:g}" + ("" if kind.le is None else f" and at most {kind.le:g}")
            return f"{name}{_span(kind.ge, kind.le)}"
        case inspect.StrType():
            return f"a string{_span(kind.min_length, kind.max_length, ' of', ' characters')}"
        case inspect.LiteralType():
            values = [f'"{one}"' for one in kind.values]
            return ("one of " if len(values) > 1 else "") + ", ".join(values)
        case inspect.ListType() | inspect.VarTupleType():
            count = _span(kind.min_length, kind.max_length, " of", " items")
            is_any = isinstance(kind.item_type, inspect.AnyType)
            return (
                f"a list{count}" if is_any else f"a list{count or ' of items'}, each {_words(kind.item_type)}"
            )
        case inspect.DictType():
            if isinstance(kind.value_type, inspect.AnyType):
                return "an object"
            count = _span(kind.min_length, kind.max_length, " of", " entries")
            return f"an object{count}, each key {_words(kind.key_type)}, each value {_words(kind.value_type)}"
        case inspect.StructType():
            fields = [f'"{field.name}": {_words(field.type)}' for field in kind.fields]
            if kind.tag_field is not None:
                fields.insert(0, f'"{kind.tag_field}": "{kind.tag}"')
            return "{" + ", ".join(fields) + "}"
        case _:
            return "a JSON value"


def _span(least: float | None, most: float | None, before: str = " from", after: str = "") -> str:
    if least is not None and most is not None:
        return f"{before} {least} to {most}{after}"
    if least is not None:
        return f" of at least {least}{after}"
    return "" if most is None else f" of up to {most}{after}"
