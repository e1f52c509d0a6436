"""JSON Schema's keywords by what becomes of them; json_schema.py reads those that constrain."""

import re
from typing import Any

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = frozenset(
    {
        *("$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly"),
        *("writeOnly", "contentEncoding", "contentMediaType", "contentSchema", "externalDocs", "xml"),
        *("discriminator", "propertyOrdering", "enumNames", "enumDescriptions", "markdownDescription"),
        *("$defs", "definitions"),
    }
)
"""Keywords that constrain nothing; so are those that begin with `x-`. Definitions count where a $ref uses
them."""
COUNTS = {
    "minLength": 0,
    "maxLength": None,
    "minItems": 0,
    "maxItems": None,
    "minProperties": 0,
    "maxProperties": None,
}
"""Keywords that count -> the value that constrains nothing."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "not": (False,),
    "if": (),
    "then": (),
    "else": (),
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
    "$vocabulary": (),
    "extends": (),
    "disallow": (),
    "divisibleBy": (),
    "x-guidance": (),
}
"""Keywords that are not supported -> the values that constrain nothing."""
HINTS = {
    "nullable": 'write "type": [..., "null"]',
    "propertyNames": "list the names in properties, or use patternProperties",
    "divisibleBy": "write multipleOf",
    "extends": "write allOf",
}
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas evaluate properties and items, too."""
DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3467]|draft/(2019-09|2020-12))/schema#?")
OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts whose $ref overrides what stands beside it."""
MAX_PLACE_CHARS = 500
"""Most characters of a place in an error."""
UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that a JSON string needs `\\u` for, which is not allowed: it could spell one key in two ways."""
