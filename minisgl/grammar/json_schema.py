"""Checks a JSON schema keyword by keyword and rewrites it to what llguidance honours exactly.

Promise: each keyword is honoured, or does not constrain, or is refused with its place; none is ignored. The
result has no annotations, so equal shapes share a compiled grammar. The order of properties stays.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from minisgl.errors import RequestError
from minisgl.fields import json_type_name, shorten
from minisgl.grammar.endless import find_endless
from minisgl.grammar.formats import FORMATS
from minisgl.grammar.keywords import (
    ANNOTATIONS,
    APPLICATORS,
    COUNTS,
    DIALECT,
    HINTS,
    MAX_PLACE_CHARS,
    NEUTRAL,
    OLD_DRAFTS,
    TYPES,
    UNWRITABLE,
)
from minisgl.grammar.limits import (
    MAX_ALTERNATIVES,
    MAX_COUNT,
    MAX_ENUM_VALUES,
    MAX_JOINED_PATTERNS,
    MAX_LEVELS,
    MAX_LITERAL_CHARS,
    MAX_NUMBER,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PROPERTIES,
)
from minisgl.grammar.patterns import PatternError, to_llguidance


def canonical_schema(schema: Any, where: str) -> Any:
    """The schema as llguidance is to have it. `where` is the field that holds it, for errors.

    Raises:
        RequestError: 400 `invalid_schema`, `unsupported_schema` or `schema_too_large`, with the place.
    """
    return _Document(schema, where).canonical()


class _Document:
    """One schema, with the definitions that its references reach."""

    def __init__(self, root: Any, where: str) -> None:
        self.root = root
        self.where = where
        self.anchors: dict[str, list[str]] | None = None  # name -> pointers, once one is needed
        self.names: dict[str, str] = {}  # pointer -> name among the canonical definitions
        self.taken: set[str] = set()
        self.waiting: list[str] = []
        self.num_properties = self.num_enum_values = 0
        self.num_levels = self.level = self.deepest = 0
        self.draft = root.get("$schema") if isinstance(root, dict) else None
        if self.draft is not None and not isinstance(self.draft, str):
            raise self.invalid(f"{where}.$schema", "must be a string", self.draft)
        if self.draft is not None and not DIALECT.fullmatch(self.draft):
            raise self.refused(f"{where}.$schema", "is a dialect that is not known; leave it out for 2020-12")
        self.id = root.get("$id") if isinstance(root, dict) else None
        self.is_old = any(name in (self.draft or "") for name in OLD_DRAFTS)

    def canonical(self) -> Any:
        schema = self.definition(self.root, self.where)
        definitions: dict[str, Any] = {}
        places = {}
        while self.waiting:
            pointer = self.waiting.pop()
            place = self.where + "".join(f".{_unescape(part)}" for part in pointer.split("/")[1:])
            places[self.names[pointer]] = place
            definitions[self.names[pointer]] = self.definition(self.target(pointer, place), place)
        if definitions:
            schema = {**(schema if isinstance(schema, dict) else {}), "$defs": definitions}
        if _num_joined_patterns(schema) > MAX_JOINED_PATTERNS:
            what = "patterns and formats in a schema with allOf, or with keywords beside $ref"
            raise self.too_large(self.where, what, MAX_JOINED_PATTERNS)
        endless = find_endless(schema)
        if endless is not None:
            place = places.get(endless, self.where)
            raise self.refused(place, "is satisfied by no finite value: it demands itself again without end")
        return schema

    def definition(self, schema: Any, place: str) -> Any:
        """A schema that references may name, or the root; counts its levels."""
        self.deepest = 0
        found = self.schema(schema, place)
        self.num_levels += self.deepest
        if self.num_levels > MAX_LEVELS:
            raise self.too_large(place, "levels of schemas in all definitions together", MAX_LEVELS)
        return found

    def schema(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self.invalid(place, "must be a schema, which is an object or true or false", schema)
        out: dict[str, Any] = {}
        self.level += 1
        self.deepest = max(self.deepest, self.level)
        for key, value in schema.items():
            at = f"{place}.{key}"
            if key in NEUTRAL:
                self.unsupported(key, value, schema, out, at)
            elif key.startswith("content") and "draft-07" in (self.draft or ""):
                raise self.refused(
                    at, f"is a demand in {self.draft}, which is not supported; leave $schema out"
                )
            elif key in ANNOTATIONS or key.startswith("x-"):
                continue
            elif key in ("$schema", "$id", "id", "$anchor"):
                self.identity(key, value, place, at)
            elif key in READERS:
                READERS[key](self, value, schema, out, at)
            elif key in COUNTS:
                count = self.count(value, at)
                if count != COUNTS[key]:
                    out[key] = count
            else:
                raise self.refused(at, "is a keyword that is not known; names that begin with x- may pass")
        self.check_counts(out, place)
        self.level -= 1
        return out

    # Errors

    def invalid(self, place: str, needed: str, got: Any) -> RequestError:
        place = place[:MAX_PLACE_CHARS]
        message = f"{place} {needed}, got {shorten(got)} ({json_type_name(got)})"
        return RequestError(400, "invalid_schema", message, place)

    def refused(self, place: str, why: str) -> RequestError:
        place = place[:MAX_PLACE_CHARS]
        return RequestError(400, "unsupported_schema", f"{place} {why}", place)

    def too_large(self, place: str, what: str, limit: int) -> RequestError:
        place = place[:MAX_PLACE_CHARS]
        return RequestError(400, "schema_too_large", f"{place}: at most {limit} {what} are taken", place)

    # Keywords that are not supported, or only say where a schema belongs

    def unsupported(self, key: str, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if any(_same(value, one) for one in NEUTRAL[key]):
            return
        if value is False and not any(name in schema for name in APPLICATORS):
            if key == "unevaluatedProperties":  # the same where no other schema evaluates properties
                out.setdefault("additionalProperties", False)
                return
            if key == "unevaluatedItems":
                if "items" not in schema or (
                    isinstance(schema["items"], list) and "additionalItems" not in schema
                ):
                    out["items"] = False
                return
        hint = f"; {HINTS[key]}" if key in HINTS else ""
        raise self.refused(at, f"is a keyword that is not supported{hint}")

    def identity(self, key: str, value: Any, place: str, at: str) -> None:
        if not isinstance(value, str):
            raise self.invalid(at, "must be a string", value)
        if place == self.where or key == "$anchor" or (key == "id" and "draft-04" not in (self.draft or "")):
            return
        raise self.refused(at, "is supported at the schema's root only")

    # References

    def read_ref(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, str):
            raise self.invalid(at, "must be a string", value)
        if self.is_old:
            for key in schema:
                if key not in ANNOTATIONS and not key.startswith(("x-", "$")) and key != "id":
                    beside = f"{at.removesuffix('.$ref')}.{key}"
                    raise self.refused(
                        beside, f"would be ignored beside $ref, as {self.draft} says; put both into allOf"
                    )
        pointer = self.pointer(value, at)
        out["$ref"] = f"#/$defs/{_escape(self.name(pointer, at))}" if pointer else "#"

    def pointer(self, reference: str, at: str) -> str:
        """The JSON pointer of a reference within this document; empty for its root."""
        if isinstance(self.id, str) and self.id and reference.startswith(self.id):
            reference = reference[len(self.id) :].removeprefix("#")
            reference = f"#{reference}"
        if not reference.startswith("#"):
            raise self.refused(at, f"refers to {shorten(reference)}, outside of this schema")
        fragment = unquote(reference[1:])
        if not fragment or fragment.startswith("/"):
            return fragment
        if self.anchors is None:
            self.anchors = {}
            for pointer, name in _anchors(self.root):
                self.anchors.setdefault(name, []).append(pointer)
        found = self.anchors.get(fragment, [])
        if len(found) != 1:
            raise self.refused(at, f"refers to {shorten(reference)}, which is not in this schema")
        return found[0]

    def name(self, pointer: str, at: str) -> str:
        if pointer not in self.names:
            base = _unescape(pointer.rsplit("/", 1)[1]) or "definition"
            name = base if base not in self.taken else f"{base}-{len(self.names)}"
            while name in self.taken:
                name += "-"
            self.taken.add(name)
            self.names[pointer] = name
            self.target(pointer, at)
            self.waiting.append(pointer)
        return self.names[pointer]

    def target(self, pointer: str, at: str) -> Any:
        node = self.root
        for part in map(_unescape, pointer.split("/")[1:]):
            if isinstance(node, dict) and "$id" in node and node is not self.root:
                raise self.refused(at, f"reaches {pointer} through a schema with its own $id")
            if isinstance(node, list) and part.isdecimal() and int(part[:9]) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                raise self.invalid(at, "has a $ref that must name a place in this schema", f"#{pointer}")
        return node

    # Keywords for every type

    def read_type(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name in TYPES for name in names):
            raise self.invalid(at, f"must be one of {', '.join(TYPES)}, or a list of these", value)
        out["type"] = value

    def read_enum(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, list) or not value:
            raise self.invalid(at, "must be a list of values", value)
        self.num_enum_values += len(value)
        if self.num_enum_values > MAX_ENUM_VALUES:
            raise self.too_large(at, "enum values in a schema", MAX_ENUM_VALUES)
        out["enum"] = [self.constant(one, f"{at}[{i}]") for i, one in enumerate(value)]

    def read_const(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out["const"] = self.constant(value, at)

    def constant(self, value: Any, at: str) -> Any:
        """A value that an instance must equal, in the spelling that the grammar will have."""
        if isinstance(value, str):
            self.text(value, at)
        elif isinstance(value, list):
            return [self.constant(one, f"{at}[{i}]") for i, one in enumerate(value)]
        elif isinstance(value, dict):
            for key in value:
                self.text(key, at)
            return {key: self.constant(one, f"{at}.{key}") for key, one in value.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            return self.number(value, at)
        return value

    def text(self, value: str, at: str) -> None:
        if len(value) > MAX_LITERAL_CHARS:
            raise self.too_large(at, "characters of a fixed text", MAX_LITERAL_CHARS)
        found = UNWRITABLE.search(value)
        if found:
            raise self.refused(at, f"has the character {shorten(found[0])}, which answers can't contain")

    def number(self, value: Any, at: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(at, "must be a number", value)
        if not (abs(value) <= MAX_NUMBER and math.isfinite(value)):
            raise self.refused(at, f"is beyond ±{MAX_NUMBER}, where JSON numbers are not exact")
        return int(value) if value == int(value) else value

    # Combining schemas

    def read_allOf(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out.setdefault("allOf", []).extend(self.several(value, at))

    def read_anyOf(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out["anyOf"] = self.several(value, at)

    def read_oneOf(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out["oneOf"] = self.several(value, at)

    def several(self, value: Any, at: str, limit: int = MAX_ALTERNATIVES) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.invalid(at, "must be a list of schemas", value)
        if len(value) > limit:
            raise self.too_large(at, "schemas in one list", limit)
        return [self.schema(one, f"{at}[{i}]") for i, one in enumerate(value)]

    # Strings and numbers

    def read_pattern(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out["pattern"] = self.pattern(value, at)

    def pattern(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise self.invalid(at, "must be a string", value)
        try:
            return to_llguidance(value)
        except PatternError as error:
            raise self.refused(at, str(error)) from None

    def read_format(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, str):
            raise self.invalid(at, "must be a string", value)
        found = FORMATS.get(value)
        if found is None:
            raise self.refused(at, f"has the value {shorten(value)}; known are {', '.join(sorted(FORMATS))}")
        also: dict[str, Any] = {}
        if found.pattern is not None:
            also["pattern"] = f"^(?:{found.pattern})$"
        if found.minimum is not None:
            also["minimum"], also["maximum"] = found.minimum, found.maximum
        if found.library is not None:
            out["format"] = found.library
        if also:
            out.setdefault("allOf", []).append(also)

    def count(self, value: Any, at: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
            raise self.invalid(at, "must be a whole number of at least 0", value)
        if value > MAX_COUNT:
            raise self.too_large(at, "of anything", MAX_COUNT)
        return int(value)

    def read_minimum(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        self.bound("minimum", value, schema, out, at)

    def read_maximum(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        self.bound("maximum", value, schema, out, at)

    def bound(self, key: str, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        number = self.number(value, at)
        exclusive = f"exclusive{key.capitalize()}"
        out[exclusive if schema.get(exclusive) is True else key] = number  # true: draft 4

    def read_exclusiveMinimum(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, bool):
            out["exclusiveMinimum"] = self.number(value, at)

    def read_exclusiveMaximum(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, bool):
            out["exclusiveMaximum"] = self.number(value, at)

    def read_multipleOf(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if self.number(value, at) <= 0:
            raise self.invalid(at, "must be above 0", value)
        out["multipleOf"] = self.number(value, at)

    # Arrays

    def read_items(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, list):
            out["items"] = self.schema(value, at)
            return
        if "prefixItems" in schema:
            raise self.invalid(at, "must be one schema beside prefixItems", value)
        out["prefixItems"] = self.several(value, at, MAX_PROPERTIES)
        if "additionalItems" in schema:  # which counts beside a list only
            out["items"] = self.schema(
                schema["additionalItems"], at.removesuffix("items") + "additionalItems"
            )

    def read_additionalItems(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        """Read with `items`, beside which alone it counts."""

    def read_prefixItems(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if self.is_old or "2019-09" in (self.draft or ""):
            raise self.refused(at, f"would be ignored, as {self.draft} says; leave $schema out")
        out["prefixItems"] = self.several(value, at, MAX_PROPERTIES)

    # Objects

    def read_properties(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        out["properties"] = self.named(value, at)
        required = schema.get("required")
        optional = out["properties"].keys() - set(map(str, required if isinstance(required, list) else ()))
        if len(optional) > MAX_OPTIONAL_PROPERTIES:
            raise self.too_large(at, "properties of an object that are not required", MAX_OPTIONAL_PROPERTIES)

    def named(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.invalid(at, "must be an object of schemas", value)
        self.num_properties += len(value)
        if self.num_properties > MAX_PROPERTIES:
            raise self.too_large(at, "properties in a schema", MAX_PROPERTIES)
        for name in value:
            self.text(name, f"{at}.{name}")
        return {name: self.schema(one, f"{at}.{name}") for name, one in value.items()}

    def read_patternProperties(
        self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str
    ) -> None:
        found = self.named(value, at)
        if found:
            out["patternProperties"] = {
                self.pattern(name, f"{at}.{name}"): one for name, one in found.items()
            }

    def read_additionalProperties(
        self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str
    ) -> None:
        out["additionalProperties"] = self.schema(value, at)

    def read_required(self, value: Any, schema: dict[str, Any], out: dict[str, Any], at: str) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.invalid(at, "must be a list of names", value)
        if len(value) > MAX_PROPERTIES:
            raise self.too_large(at, "required names", MAX_PROPERTIES)
        for name in value:
            self.text(name, at)
        out["required"] = list(dict.fromkeys(value))

    def check_counts(self, out: dict[str, Any], place: str) -> None:
        """Drop a minimum of properties that `required` implies, and refuse one that keys given twice meet."""
        least = out.get("minProperties", 0)
        if least and least <= len(out.get("required", ())):
            del out["minProperties"]
        elif least > 1:
            raise self.refused(
                f"{place}.minProperties", "is supported up to 1, or up to the number of required properties"
            )


READERS: dict[str, Callable[[_Document, Any, dict[str, Any], dict[str, Any], str], None]] = {
    "$ref": _Document.read_ref,
    "type": _Document.read_type,
    "enum": _Document.read_enum,
    "const": _Document.read_const,
    "allOf": _Document.read_allOf,
    "anyOf": _Document.read_anyOf,
    "oneOf": _Document.read_oneOf,
    "pattern": _Document.read_pattern,
    "format": _Document.read_format,
    "minimum": _Document.read_minimum,
    "maximum": _Document.read_maximum,
    "exclusiveMinimum": _Document.read_exclusiveMinimum,
    "exclusiveMaximum": _Document.read_exclusiveMaximum,
    "multipleOf": _Document.read_multipleOf,
    "items": _Document.read_items,
    "additionalItems": _Document.read_additionalItems,
    "prefixItems": _Document.read_prefixItems,
    "properties": _Document.read_properties,
    "patternProperties": _Document.read_patternProperties,
    "additionalProperties": _Document.read_additionalProperties,
    "required": _Document.read_required,
}
"""Keyword -> what checks and rewrites its value; those of COUNTS need no more than a number."""


def _anchors(root: Any) -> Iterator[tuple[str, str]]:
    """The pointer and name of each $anchor in a document."""
    stack: list[tuple[str, Any]] = [("", root)]
    while stack:
        pointer, node = stack.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$anchor"), str):
                yield pointer, node["$anchor"]
            stack += [(f"{pointer}/{_escape(key)}", one) for key, one in node.items()]
        elif isinstance(node, list):
            stack += [(f"{pointer}/{i}", one) for i, one in enumerate(node)]


def _num_joined_patterns(schema: Any) -> int:
    """The patterns and formats of a schema where some may hold for one string together; 0 where none can."""
    num_patterns, are_joined, stack = 0, False, [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            num_patterns += isinstance(node.get("pattern"), str) + isinstance(node.get("format"), str)
            are_joined |= "allOf" in node or ("$ref" in node and len(node) > 1)
            stack += node.values()
        elif isinstance(node, list):
            stack += node
    return num_patterns if are_joined else 0


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _escape(part: str) -> str:
    return part.replace("~", "~0").replace("/", "~1")


def _unescape(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")


def dump(schema: Any) -> str:
    """The canonical text of a canonical schema."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
