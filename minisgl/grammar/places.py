"""Finds the part of a schema that the library refuses, for the error."""

import time
from collections.abc import Callable, Iterator
from typing import Any

MAX_TRIES = 300
MAX_SECONDS = 0.5


def find_place(schema: Any, error_of: Callable[[Any], str | None]) -> str:
    """The path of the smallest part with an error of its own, such as `.properties.a`; "" for the whole."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    tries, deadline = 0, time.monotonic() + MAX_SECONDS
    path, node = "", schema
    while True:
        for step, child in _parts(node):
            tries += 1
            if tries > MAX_TRIES or time.monotonic() > deadline:
                return path
            if child is False:
                continue
            alone = {**child, "$defs": definitions} if isinstance(child, dict) and definitions else child
            if error_of(alone) is not None:
                path, node = path + step, child
                break
        else:
            return path


def _parts(node: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside a schema, with the path to each."""
    if not isinstance(node, dict):
        return
    for key in ("$defs", "properties", "patternProperties"):
        for name, one in node.get(key, {}).items():
            yield f".{key}.{name}", one
    for key in ("items", "additionalProperties"):
        if key in node:
            yield f".{key}", node[key]
    for key in ("prefixItems", "allOf", "anyOf", "oneOf"):
        for i, one in enumerate(node.get(key, ())):
            yield f".{key}[{i}]", one
