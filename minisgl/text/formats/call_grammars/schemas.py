"""Takes a tool's JSON Schema apart for grammars of formats that write values not as JSON.

Promise: a keyword that can't be carried over is a 400 that names its place, never ignored.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from minisgl.errors import RequestError
from minisgl.fields import shorten
from minisgl.text.formats.tools import JSON_TYPES, resolve

TEXT_KEYWORDS_REFUSED = ("pattern", "format", "contentEncoding", "contentMediaType")
OBJECT_KEYWORDS_REFUSED = (
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired",
    "dependentSchemas", "dependencies", "if", "not", "allOf", "anyOf", "oneOf", "enum", "const",
)  # fmt: skip
ARRAY_KEYWORDS_REFUSED = ("uniqueItems", "prefixItems", "contains", "minContains", "maxContains")
MAX_PLACE_CHARS = 150
MAX_DEPTH = 40
MAX_PLACES = 20_000
"""Schemas that are nested deeper, or whose parts are more, are refused."""
DEFINITIONS = ("$defs", "definitions")


class Property(NamedTuple):
    """One property of an object's schema."""

    key: str
    schema: Mapping[str, Any]
    is_required: bool
    where: str  # names the schema in errors


class Text(NamedTuple):
    """Strings that a schema allows: one string, or all of a length."""

    value: str | None
    min_chars: int = 0
    max_chars: int | None = None


def refusal(where: str, why: str) -> RequestError:
    """The error for a part of a schema that a format can't guarantee."""
    if len(where) > MAX_PLACE_CHARS:
        where = where[:MAX_PLACE_CHARS] + "..."
    return RequestError(
        400,
        "unsupported_schema",
        f"{where} is not supported: {why}; leave it out or use tool_choice auto",
        "tools",
    )


def plain(schema: Any, root: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The schema itself, without a reference or an allOf of one around it."""
    if schema is True:
        return {}
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            raise refusal(where, "a schema must be an object")
        if "$ref" in schema:
            target = resolve(schema, root)
            if not target:
                raise refusal(f"{where}.$ref", "it refers to no schema in the same document")
            schema = target
        elif isinstance(schema.get("allOf"), list):
            if len(schema["allOf"]) != 1 or "type" in schema:
                raise refusal(f"{where}.allOf", "this model's calls can't guarantee it")
            schema = {**{key: value for key, value in schema.items() if key != "allOf"}, **schema["allOf"][0]}
        else:
            return schema
    raise refusal(where, "it refers to itself")


def properties(schema: Any, root: Mapping[str, Any], where: str) -> list[Property]:
    """The properties of an object in the schema's order. Others than these are not written."""
    schema = plain(schema, root, where)
    for keyword in OBJECT_KEYWORDS_REFUSED:
        if schema.get(keyword):
            raise refusal(f"{where}.{keyword}", "this model's calls can't guarantee it")
    if kinds(schema) not in ((), ("object",)):
        raise refusal(f"{where}.type", "arguments must be an object")
    found, required = schema.get("properties") or {}, schema.get("required") or []
    for key in required:
        if key not in found:
            raise refusal(f"{where}.required", f"{shorten(key)} is not among the properties")
    return [
        Property(key, inner, key in required, f"{where}.properties.{key}")
        for key, inner in found.items()
        if inner is not False
    ]


def kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema names, or that its keywords are about."""
    implied = [kind for keyword, kind in (("properties", "object"), ("items", "array")) if keyword in schema]
    declared = schema.get("type", implied)
    declared = [declared] if isinstance(declared, str) else declared or []
    return tuple(dict.fromkeys(kind for kind in declared if kind in JSON_TYPES))


def values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else None


def choices(schema: Mapping[str, Any], where: str) -> list[tuple[Any, str]]:
    """The schemas of anyOf and oneOf, each with its place."""
    return [
        (choice, f"{where}.{union}[{rank}]")
        for union in ("anyOf", "oneOf")
        for rank, choice in enumerate(schema.get(union) or ())
    ]


class Depth(NamedTuple):
    """How deep a place in a schema is, and how many places a grammar has looked at in all."""

    here: int
    places: list[int]  # one number

    def deeper(self, where: str) -> "Depth":
        """One level further down.

        Raises:
            RequestError: 400; the schema is too deep or too large, or has no end as it refers to itself.
        """
        self.places[0] += 1
        if self.here >= MAX_DEPTH or self.places[0] > MAX_PLACES:
            raise refusal(where, "its schema is too deep or too large, or refers to itself")
        return Depth(self.here + 1, self.places)


def texts(schema: Any, root: Mapping[str, Any], where: str, depth: Depth) -> list[Text]:
    """The strings that a schema allows."""
    depth, schema = depth.deeper(where), plain(schema, root, where)
    listed = values(schema)
    if listed is not None:
        return [Text(value) for value in listed if isinstance(value, str)]
    found = []
    for choice, place in choices(schema, where):
        found += texts(choice, root, place, depth)
    if "string" in kinds(schema):
        for keyword in TEXT_KEYWORDS_REFUSED:
            if keyword in schema:
                raise refusal(
                    f"{where}.{keyword}", "this model writes bare text here, which can't be held to it"
                )
        found.append(Text(None, schema.get("minLength") or 0, schema.get("maxLength")))
    return found


def without_texts(schema: Any, root: Mapping[str, Any], where: str, depth: Depth) -> dict[str, Any] | None:
    """The schema without the strings that it allows; None if nothing else is left.

    A schema that names no type stays as it is, strings included.
    """
    depth, schema = depth.deeper(where), plain(schema, root, where)
    listed = values(schema)
    if listed is not None:
        rest = [value for value in listed if not isinstance(value, str)]
        return {"enum": rest} if rest else None
    found = choices(schema, where)
    if found:
        parts = [without_texts(choice, root, place, depth) for choice, place in found]
        parts = [part for part in parts if part is not None]
        return {"anyOf": parts} if parts else None
    named = kinds(schema)
    others = [kind for kind in named if kind != "string"]
    if named and not others:
        return None
    return {**schema, "type": others} if others else dict(schema)


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of `root` as a schema of its own, in which references still find what they refer to."""
    return {**{key: root[key] for key in DEFINITIONS if key in root}, **schema}
