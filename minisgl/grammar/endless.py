"""Finds schemas that no finite value satisfies, such as `{"$ref": "#"}` or a required property of itself.

A grammar made from one would let a model write for ever.
"""

from collections.abc import Iterator
from typing import Any

MAX_VISITS = 2_000_000
"""Steps after which a schema counts as endless: only one made for the purpose needs as many."""


def find_endless(root: Any) -> str | None:
    """The name of a definition of a canonical schema that has no finite instance; "" for the root itself."""
    definitions: dict[str, Any] = root.get("$defs", {}) if isinstance(root, dict) else {}
    open_names = {"", *definitions}
    budget = MAX_VISITS

    def ends(schema: Any) -> bool:
        nonlocal budget
        budget -= 1
        if isinstance(schema, bool) or budget < 0:
            return budget >= 0
        reference = schema.get("$ref")
        if reference is not None and _name(reference) in open_names:
            return False
        if not all(map(ends, schema.get("allOf", ()))):
            return False
        if any(key in schema and not any(map(ends, schema[key])) for key in ("anyOf", "oneOf")):
            return False
        types = schema.get("type", ())
        types = [types] if isinstance(types, str) else types
        if "const" in schema or "enum" in schema or any(one not in ("object", "array") for one in types):
            return True
        if not types:
            return True  # a value of another type will do
        return ("object" in types and _object_ends(schema, ends)) or _array_ends(schema, ends)

    schemas = {"": root, **definitions}
    referrers: dict[str, list[str]] = {}
    for name, schema in schemas.items():
        for reference in set(_references(schema, top=name == "")):
            referrers.setdefault(_name(reference), []).append(name)
    if not referrers:
        return None
    waiting = list(schemas)
    while waiting:
        name = waiting.pop()
        if name in open_names and ends(schemas[name]):
            open_names.discard(name)
            waiting += referrers.get(name, ())
    return max(open_names, default=None)  # a definition rather than the root


def _references(schema: Any, top: bool) -> Iterator[str]:
    """The references inside of a schema; those of a root without its definitions."""
    if top and isinstance(schema, dict):
        schema = {key: one for key, one in schema.items() if key != "$defs"}
    stack = [schema] if isinstance(schema, dict) else []
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            stack += [part for part in node.values() if isinstance(part, (dict, list))]
        else:
            stack += [part for part in node if isinstance(part, (dict, list))]


def _name(reference: str) -> str:
    if reference == "#":
        return ""
    return reference.removeprefix("#/$defs/").replace("~1", "/").replace("~0", "~")


def _object_ends(schema: dict[str, Any], ends: Any) -> bool:
    properties, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    patterns = schema.get("patternProperties")
    return all(
        ends(properties[name]) if name in properties else bool(patterns) or ends(other)
        for name in schema.get("required", ())
    )


def _array_ends(schema: dict[str, Any], ends: Any) -> bool:
    if "array" not in ([schema["type"]] if isinstance(schema["type"], str) else schema["type"]):
        return False
    least, first = schema.get("minItems", 0), schema.get("prefixItems", ())
    if not all(ends(one) for one in first[:least]):
        return False
    return least <= len(first) or ends(schema.get("items", True))
