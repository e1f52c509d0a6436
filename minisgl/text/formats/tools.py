"""The tools of one request: which names may be called, and which JSON types each parameter takes."""

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any

STRING = frozenset({"string"})
JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
MAX_REFERENCES = 32
"""A chain of `$ref` longer than this leads nowhere."""
MAX_SUBSCHEMAS = 1000
"""More parts of one parameter's schema are not read for its types."""


class Tools:
    """Names and parameter schemas.

    Args:
        tools: OpenAI's objects {"type": "function", "function": {"name", "parameters"}}, or the inner ones.
            None: the names are not known, and every name may be called.
    """

    def __init__(self, tools: Iterable[Mapping[str, Any]] | None) -> None:
        self.known = tools is not None
        self._schemas: dict[str, Any] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            self._schemas[function["name"]] = function.get("parameters") or {}

    def __contains__(self, name: str) -> bool:
        return not self.known or name in self._schemas

    def types(self, name: str, parameter: str) -> tuple[str, ...]:
        """The JSON types of a parameter in the schema's order; empty if the schema does not say."""
        root = self._schemas.get(name)
        if not isinstance(root, Mapping):
            return ()
        schema = resolve(root, root)
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and parameter in properties:
            return _types(properties[parameter], root)
        extra = schema.get("additionalProperties")
        return _types(extra, root)


def resolve(schema: Any, root: Mapping[str, Any], steps: int = MAX_REFERENCES) -> Mapping[str, Any]:
    """The schema behind `$ref`s into the same document; empty if there is none."""
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and steps:
        reference, steps = schema["$ref"], steps - 1
        schema = root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) and "$ref" not in schema else {}


def _types(schema: Any, root: Mapping[str, Any]) -> tuple[str, ...]:
    """The types that a schema allows, in its order."""
    found: dict[str, None] = {}
    ahead, num_seen = [schema], 0
    while ahead and num_seen < MAX_SUBSCHEMAS:
        schema, num_seen = resolve(ahead.pop(), root), num_seen + 1
        if schema.get("nullable"):
            schema = {"anyOf": [{**schema, "nullable": False}, {"type": "null"}]}
        declared = schema.get("type")
        for name in [declared] if isinstance(declared, str) else declared or ():
            if name in JSON_TYPES:
                found[name] = None
        if declared is None:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else []
            for value in [*values, *([schema["const"]] if "const" in schema else [])]:
                found[_type_name(value)] = None
            inner = [one for union in ("anyOf", "oneOf", "allOf") for one in schema.get(union) or ()]
            ahead += reversed(inner)
    return tuple(found)


def _type_name(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def cast(raw: str, types: tuple[str, ...]) -> str:
    """The JSON of a value that a model wrote without saying its type.

    `raw` becomes the first of `types` that it can be read as, a string last. Without types it is JSON if it
    can be read so.
    """
    for name in types:
        value = _read(raw.strip(), name)
        if value is not None:
            return value
    if not types:
        value = loads(raw.strip())
        if value is not FAILED:
            return dumps(value)
    return dumps(raw)


FAILED = object()


def loads(text: str) -> Any:
    """The value of JSON text without NaN and infinities; FAILED if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return FAILED


def dumps(value: Any) -> str:
    """JSON as the rest of the world writes it by default, without escaping what is not ASCII."""
    return json.dumps(value, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(name)


def _read(raw: str, kind: str) -> str | None:
    """`raw` as JSON of a type other than string; None if it is not of that type."""
    match kind:
        case "null":
            return "null" if raw in ("null", "None") else None
        case "boolean":
            lower = raw.lower()
            return lower if lower in ("true", "false") else {"1": "true", "0": "false"}.get(raw)
        case "integer" | "number":
            try:
                return str(int(raw))
            except ValueError:
                pass
            try:
                number = float(raw)
                if kind == "integer" and number.is_integer():
                    return str(int(number))
                return json.dumps(number, allow_nan=False) if kind == "number" else None
            except (ValueError, OverflowError):
                return None
        case "object" | "array":
            value = loads(raw)
            if value is FAILED:
                value = _python_literal(raw)
            return dumps(value) if isinstance(value, dict if kind == "object" else list) else None
    return None


def _python_literal(raw: str) -> Any:
    """A dict or list that a model wrote in Python's words; FAILED if it is none."""
    try:
        value = ast.literal_eval(raw)
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return FAILED
    return value
