"""The fields that say what an answer must look like: `response_format` and vLLM's `structured_outputs`.

Promise: at most one grammar results, and nothing in these fields is ignored. What can't be honoured is a 400
that names its place. SGLang's `json_schema`, `regex` and `ebnf` are fields of `SamplingParams`.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from minisgl.errors import RequestError
from minisgl.fields import Neutral, convert, refuse_unknown, shorten
from minisgl.grammar.spec import (
    GrammarSpec,
    choice_spec,
    grammar_spec,
    json_object_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)
from minisgl.server.http.bodies import DOCUMENTED_AS


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(Struct, frozen=True):
    name: str
    schema: dict[str, Any] | bool
    description: str | None = None
    strict: bool | None = None
    """Changes nothing: a schema is always enforced in full, or refused."""


class JsonSchemaFormat(Struct, frozen=True, tag_field="type", tag="json_schema"):
    """JSON that is valid for a schema."""

    json_schema: JsonSchema


class StructuralTagFormat(Struct, frozen=True, tag_field="type", tag="structural_tag"):
    """Free text with parts of a given structure: either `format`, or `structures` and `triggers`."""

    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's field: exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    """JSON without spaces and line breaks."""


RESPONSE_FORMATS = (TextFormat, JsonObjectFormat, JsonSchemaFormat, StructuralTagFormat)


class OutputFields(Struct, frozen=True):
    """What the answer must look like; at most one of these, and of json_schema, regex and ebnf."""

    response_format: (
        Annotated[
            dict[str, Any],
            Meta(extra={DOCUMENTED_AS: RESPONSE_FORMATS}),
        ]
        | None
    ) = None
    structured_outputs: (
        Annotated[dict[str, Any], Meta(extra={DOCUMENTED_AS: (StructuredOutputs,)})] | None
    ) = None


UNSUPPORTED: dict[str, Neutral] = {"disable_fallback": (False, True), "whitespace_pattern": (), "backend": ()}
"""Fields of `structured_outputs` that are not honoured, and the values that change nothing."""


def grammar_of(fields: OutputFields) -> GrammarSpec | None:
    """The grammar that the fields ask for.

    Raises:
        RequestError: 400 that names the field, or the place in the schema, that can't be honoured.
    """
    found = [
        spec
        for spec in (_of_response_format(fields.response_format), _of_structured(fields.structured_outputs))
        if spec is not None
    ]
    if len(found) > 1:
        message = "give either response_format or structured_outputs"
        raise RequestError(400, "invalid_value", message, "structured_outputs")
    return found[0] if found else None


def _of_response_format(given: dict[str, Any] | None) -> GrammarSpec | None:
    if given is None:
        return None
    where = "response_format"
    match given.get("type"):
        case "text":
            refuse_unknown(given, {"type"}, {}, f"{where}.")
            return None
        case "json_object":
            refuse_unknown(given, {"type"}, {}, f"{where}.")
            return json_object_spec(where)
        case "json_schema":
            refuse_unknown(given, {"type", "json_schema"}, {}, f"{where}.")
            inner = given.get("json_schema")
            if not isinstance(inner, dict):
                message = f"{where}.json_schema must be an object with name and schema"
                raise RequestError(400, "invalid_type", message, f"{where}.json_schema")
            where = f"{where}.json_schema."
            refuse_unknown(inner, JsonSchema.__struct_fields__, {}, where)
            return json_schema_spec(convert(inner, JsonSchema, where).schema, f"{where}schema")
        case "structural_tag":
            return structural_tag_spec(given, where)
        case other:
            message = (
                f"{where}.type must be text, json_object, json_schema or structural_tag, got {shorten(other)}"
            )
            raise RequestError(400, "invalid_value", message, f"{where}.type")


def _of_structured(given: dict[str, Any] | None) -> GrammarSpec | None:
    if given is None:
        return None
    where = "structured_outputs."
    refuse_unknown(given, StructuredOutputs.__struct_fields__, UNSUPPORTED, where)
    fields: StructuredOutputs = convert(given, StructuredOutputs, where)
    whitespace = not fields.disable_any_whitespace
    found: list[GrammarSpec] = []
    if fields.json is not None:
        found.append(json_schema_spec(fields.json, f"{where}json", whitespace))
    if fields.json_object:
        found.append(json_object_spec(f"{where}json_object", whitespace))
    if fields.regex is not None:
        found.append(regex_spec(fields.regex, f"{where}regex"))
    if fields.choice is not None:
        found.append(choice_spec(fields.choice, f"{where}choice"))
    if fields.grammar is not None:
        found.append(grammar_spec(fields.grammar, f"{where}grammar", whitespace))
    if fields.structural_tag is not None:
        found.append(structural_tag_spec(fields.structural_tag, f"{where}structural_tag", whitespace))
    if len(found) != 1:
        message = (
            "structured_outputs must have one of json, json_object, regex, choice, grammar, structural_tag"
        )
        raise RequestError(400, "invalid_value", message, "structured_outputs")
    return found[0]
