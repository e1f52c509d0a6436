"""Tables of the fields of request bodies. They check the bodies and describe them in OpenAPI.

Promise: no field that could change the answer is ignored. It is honoured, or the request is refused with a
400 that names it. An unsupported field may only have its neutral value (null, `n: 1`, `tools: []`).
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

import msgspec

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, json_type_name, refuse_unknown


class FieldIs(NamedTuple):
    """The field has one of `values`, or with `negated` none of them. A missing field counts as null."""

    field: str
    values: tuple[bool | int | None, ...]
    negated: bool = False

    def holds(self, body: Mapping[str, Any]) -> bool:
        """Whether `body` satisfies it. The fields must already have their types."""
        return (body.get(self.field) in self.values) != self.negated

    def as_schema(self) -> dict[str, Any]:
        """The same as JSON Schema."""
        listed = {"enum": list(self.values)}
        schema: dict[str, Any] = {"properties": {self.field: {"not": listed} if self.negated else listed}}
        if (None in self.values) == self.negated:
            schema["required"] = [self.field]
        return schema


class Condition(NamedTuple):
    """At least one of the alternatives must hold; otherwise the body is refused and `param` is named."""

    param: str
    message: str
    alternatives: tuple[FieldIs, ...]

    def as_schema(self) -> dict[str, Any]:
        """The same as JSON Schema."""
        return {"anyOf": [one.as_schema() for one in self.alternatives]}


def given(field: str) -> FieldIs:
    """The field is present and not null."""
    return FieldIs(field, (None,), negated=True)


def missing(field: str) -> FieldIs:
    """The field is absent or null."""
    return FieldIs(field, (None,))


DOCUMENTED_AS = "documented_as"
"""Key of `Meta.extra`: the types that describe a field in OpenAPI's document. It is for fields whose reader
checks more than msgspec does, and therefore names faults better."""


def documented_types(kind: type[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, types) of each field of a struct whose annotation has DOCUMENTED_AS."""
    for field in msgspec.structs.fields(kind):
        for part in (field.type, *get_args(field.type)):
            for meta in getattr(part, "__metadata__", ()):
                if DOCUMENTED_AS in (meta.extra or {}):
                    yield field.name, meta.extra[DOCUMENTED_AS]


class Body(NamedTuple):
    """The body of a route.

    `name` is that of its schema in OpenAPI's document. `structs` define the supported fields. `unsupported`
    maps known but unsupported fields to the values that may be ignored.
    """

    name: str
    structs: tuple[type[Any], ...]
    conditions: tuple[Condition, ...] = ()
    unsupported: Mapping[str, Neutral] = {}

    @property
    def known(self) -> set[str]:
        """The names of the supported fields."""
        return {name for kind in self.structs for name in kind.__struct_fields__}

    def read(self, data: bytes) -> list[Any]:
        """Decode and check a body; returns one value per struct.

        Raises:
            RequestError: 400 that names the invalid field.
        """
        fields = decode_object(data)
        refuse_unknown(fields, self.known, self.unsupported)
        made = [convert(fields, kind) for kind in self.structs]
        for condition in self.conditions:
            if not any(one.holds(fields) for one in condition.alternatives):
                raise RequestError(400, "invalid_value", condition.message, condition.param)
        return made


def number(text: str) -> int | float:
    """Convert a JSON number with fraction or exponent; integral values such as 16.0 become int.

    Raises:
        ValueError: the number is too large for a float.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return int(value) if value.is_integer() else value


SURROGATE = re.compile("[\ud800-\udfff]")
DECODER = msgspec.json.Decoder(float_hook=number)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a body to a dict of its fields.

    Raises:
        RequestError: 400 if the body is no JSON object.
    """
    if not data:
        raise RequestError(400, "invalid_json", "the body is empty; send a JSON object")
    try:
        fields = DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        lone = _lone_surrogate(data)
        if lone is not None:
            raise RequestError(
                400,
                "invalid_unicode",
                f"the body has the lone surrogate \\u{ord(lone):04x}, which is half of a character; send "
                "both halves of it, or leave it out",
            ) from None
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(
            400, "invalid_json", f"the body must be a JSON object, got {json_type_name(fields)}"
        )
    return fields


def _lone_surrogate(data: bytes) -> str | None:
    """The first lone surrogate in a body that is valid JSON but for these; None: there is none."""
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        found = SURROGATE.search(json.dumps(fields, ensure_ascii=False))
    except (ValueError, RecursionError):
        return None
    return found[0] if found else None
