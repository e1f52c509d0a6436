"""What a route's body may hold, as tables: they check the bodies, and describe them in OpenAPI.

Promise: no field of a body is ignored that could change the answer: it is honoured, or the request is
refused with a 400 that names it. Only a field's neutral value (null, `n: 1`, `tools: []`) passes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, kind_of, refuse_unknown


class Is(NamedTuple):
    """The field has one of the values, or, where `negated`, another. A field that is missing is null."""

    field: str
    values: tuple[bool | int | None, ...]
    negated: bool = False

    def holds(self, body: Mapping[str, Any]) -> bool:
        """Of a body whose fields have their types."""
        return (body.get(self.field) in self.values) != self.negated

    def as_schema(self) -> dict[str, Any]:
        """In JSON Schema."""
        listed = {"enum": list(self.values)}
        schema: dict[str, Any] = {"properties": {self.field: {"not": listed} if self.negated else listed}}
        if (None in self.values) == self.negated:
            schema["required"] = [self.field]
        return schema


class Condition(NamedTuple):
    """One of the alternatives must hold, or the body is refused because of `param`."""

    param: str
    message: str
    alternatives: tuple[Is, ...]

    def as_schema(self) -> dict[str, Any]:
        """In JSON Schema."""
        return {"anyOf": [one.as_schema() for one in self.alternatives]}


def given(field: str) -> Is:
    """The field is there and not null."""
    return Is(field, (None,), negated=True)


def missing(field: str) -> Is:
    """The field is not there, or null."""
    return Is(field, (None,))


class Body(NamedTuple):
    """The body of a route: the fields of some structs together, and others by rule."""

    structs: tuple[type[Any], ...]
    conditions: tuple[Condition, ...] = ()
    others: Mapping[str, Neutral] = {}

    @property
    def known(self) -> set[str]:
        """The names of the fields that are honoured."""
        return {name for kind in self.structs for name in kind.__struct_fields__}

    def read(self, data: bytes) -> list[Any]:
        """The structs of a body.

        Raises:
            RequestError: 400 with the field at fault.
        """
        fields = decode_object(data)
        refuse_unknown(fields, self.known, self.others)
        made = [convert(fields, kind) for kind in self.structs]
        for condition in self.conditions:
            if not any(one.holds(fields) for one in condition.alternatives):
                raise RequestError(400, "invalid_value", condition.message, condition.param)
        return made


def number(text: str) -> int | float:
    """A number of JSON that is not written as a whole one, but may be one: 16.0.

    Raises:
        ValueError: too large for a float.
    """
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return int(value) if value.is_integer() else value


DECODER = msgspec.json.Decoder(float_hook=number)


def decode_object(data: bytes) -> dict[str, Any]:
    """A body's fields.

    Raises:
        RequestError: 400, it is no JSON object.
    """
    if not data:
        raise RequestError(400, "invalid_json", "the body is empty; send a JSON object")
    try:
        fields = DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "invalid_json", f"the body must be a JSON object, got {kind_of(fields)}")
    return fields
