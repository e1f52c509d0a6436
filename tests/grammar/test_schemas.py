"""JSON schemas: what is taken is enforced exactly, as jsonschema says; what is not is refused by name."""

import json
import string
from pathlib import Path
from typing import Any

import pytest
from grammar_tokens import Tokens, allowed
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema
from jsonschema import Draft202012Validator

from minisgl.errors import RequestError
from minisgl.grammar.compiler import with_options
from minisgl.grammar.json_schema import canonical_schema
from minisgl.grammar.keywords import UNWRITABLE
from minisgl.grammar.spec import json_object_spec, json_schema_spec

SAMPLES = json.loads((Path(__file__).parent / "samples.json").read_text(encoding="utf-8"))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "ab"]}, "maxItems": 3},
        "born": {"type": "string", "format": "date"},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 3}, "in": {"$ref": "#/$defs/place"}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}


def is_date(text: str) -> bool:
    import datetime

    try:
        return bool(datetime.date.fromisoformat(text[:10]))
    except ValueError:
        return False


def texts(value: Any) -> list[str]:
    """A value as models write it."""
    return [
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, indent=2),
    ]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: json.dumps(one["schema"])[:50])
def test_valid_instances_are_accepted_and_invalid_ones_refused(
    sample: dict[str, Any], tokens: Tokens
) -> None:
    grammar = tokens.schema(sample["schema"])
    for value in sample["valid"]:
        for text in texts(value):
            assert tokens.longest_prefix(grammar, text) == text
            assert tokens.after(grammar, text).may_end
    for value in sample["invalid"]:
        assert not any(tokens.accepts(grammar, text) for text in texts(value)), value


WALKED = [one for one in SAMPLES if one.get("walks", True)]


@pytest.mark.parametrize("sample", WALKED, ids=lambda one: json.dumps(one["schema"])[:50])
def test_random_walks_through_the_masks_end_in_valid_instances(
    sample: dict[str, Any], tokens: Tokens, words: Tokens
) -> None:
    schema = sample["schema"]
    if (isinstance(schema, dict) and "$schema" in schema) or "exclusiveMinimum" in json.dumps(schema):
        schema = canonical_schema(schema, "schema")  # what the newest draft calls the same
    validator = Draft202012Validator(schema)
    for vocabulary in (tokens, words):
        grammar = vocabulary.schema(sample["schema"])
        for seed in range(15):
            text = vocabulary.walk(grammar, seed)
            validator.validate(json.loads(text))
            assert '"format": "date"' not in json.dumps(schema) or is_date(json.loads(text))


def test_walks_through_a_larger_schema(words: Tokens) -> None:
    grammar = words.schema(PERSON)
    validator = Draft202012Validator(PERSON)
    for seed in range(25):
        value = json.loads(words.walk(grammar, seed))
        validator.validate(value)
        assert list(value) == [name for name in PERSON["properties"] if name in value]
        assert is_date(value.get("born", "2000-01-01"))


def instances(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid instances, keys in the schema's order. hypothesis-jsonschema makes the values in objects.

    (The objects, too, if hypothesis had not renamed what 0.23 uses of its insides.)
    """
    if "$ref" in schema:
        return st.deferred(lambda: instances(PERSON["$defs"]["place"]))
    if "anyOf" in schema:
        return st.one_of(*map(instances, schema["anyOf"]))
    if schema["type"] == "object":
        known = {name: instances(one) for name, one in schema.get("properties", {}).items()}
        required = schema.get("required", ())
        found = st.fixed_dictionaries({}, optional=known).filter(lambda x: all(one in x for one in required))
        if required:
            must = {name: known[name] for name in required}
            may = {name: one for name, one in known.items() if name not in required}
            found = st.fixed_dictionaries(must, optional=may)
        if schema.get("additionalProperties", True) is not False:
            others = st.dictionaries(
                st.text(max_size=3), instances(schema["additionalProperties"]), max_size=3
            )
            found = st.tuples(found, others).map(lambda two: {**two[1], **two[0]})
        return found.map(lambda x: {name: x[name] for name in [*known, *x] if name in x})
    return from_schema(schema)


def is_expressible(value: Any) -> bool:
    """Whether a valid instance is none of those that docs/structured-output.md calls narrower."""
    if isinstance(value, dict):
        return all(map(is_expressible, [*value, *value.values()]))
    if isinstance(value, list):
        return all(map(is_expressible, value))
    if isinstance(value, str):
        is_quoted = "@" in value and (value.startswith('"') or "[" in value)  # unusual e-mail addresses
        return not UNWRITABLE.search(value) and not is_quoted
    return True


GENERATED: tuple[dict[str, Any], ...] = (
    PERSON,
    {"type": "array", "items": {"type": ["integer", "boolean", "null"]}, "maxItems": 4},
    {"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}},
    {"anyOf": [{"type": "string", "minLength": 2}, {"type": "array", "items": {"type": "string"}}]},
    {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "string", "pattern": "^[a-c]+$"}},
    },
)


@pytest.mark.parametrize("which", range(len(GENERATED)))
def test_every_prefix_of_a_valid_instance_is_allowed(which: int, tokens: Tokens) -> None:
    schema = {"additionalProperties": {"type": "null"}, **GENERATED[which]}
    if "anyOf" in schema:
        del schema["additionalProperties"]
    grammar = tokens.schema(schema)

    @given(instances(schema))
    @settings(
        max_examples=80,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    def check(value: Any) -> None:
        # The generator takes additionalProperties for a property with a type, now and then.
        assume(is_expressible(value) and Draft202012Validator(schema).is_valid(value))
        for text in texts(value)[:2]:
            assert tokens.longest_prefix(grammar, text) == text
            assert tokens.after(grammar, text).may_end

    check()


REFUSED = [
    ({"properties": {"a": {"uniqueItems": True}}}, ".properties.a.uniqueItems", "not supported"),
    ({"not": {}}, ".not", "not supported"),
    ({"anyOf": [True, {"if": True, "then": True}]}, ".anyOf[1].if", "not supported"),
    ({"items": {"contains": {}}}, ".items.contains", "not supported"),
    ({"prefixItems": [{"minContains": 1}]}, ".prefixItems[0].minContains", "not supported"),
    ({"dependentRequired": {"a": ["b"]}}, ".dependentRequired", "not supported"),
    ({"propertyNames": {"maxLength": 3}}, ".propertyNames", "list the names"),
    ({"$dynamicRef": "#x"}, ".$dynamicRef", "not supported"),
    ({"unevaluatedProperties": False, "anyOf": [True]}, ".unevaluatedProperties", "not supported"),
    ({"nullable": True, "type": "string"}, ".nullable", '"null"'),
    ({"divisibleBy": 2}, ".divisibleBy", "multipleOf"),
    ({"x-guidance": {"lenient": True}}, ".x-guidance", "not supported"),
    ({"ref": "#"}, ".ref", "not known"),
    ({"colour": 1}, ".colour", "not known"),
    ({"format": "iri"}, ".format", "known are"),
    ({"format": "unknown"}, ".format", "known are"),
    ({"pattern": "(?=a)"}, ".pattern", "lookaround"),
    ({"patternProperties": {"a**": True}}, ".patternProperties.a**", "nothing before it"),
    ({"minProperties": 2}, ".minProperties", "up to 1"),
    ({"$ref": "https://example.com/schema"}, ".$ref", "outside of this schema"),
    ({"$ref": "#/$defs/none"}, ".$ref", "a place in this schema"),
    ({"$ref": "#none"}, ".$ref", "not in this schema"),
    ({"$defs": {"a": {"$id": "x", "type": "null"}}, "$ref": "#/$defs/a"}, ".$defs.a.$id", "root only"),
    ({"$schema": "https://example.com/mine"}, ".$schema", "not known"),
    (
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a", "minimum": 3,
         "definitions": {"a": {"type": "integer"}}},
        ".minimum",
        "ignored beside $ref",
    ),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "contentEncoding": "base64"},
     ".contentEncoding", "leave $schema out"),
    ({"minimum": 2**53}, ".minimum", "not exact"),
    ({"const": [1, 2**60]}, ".const[1]", "not exact"),
    ({"enum": ["a", "\x01"]}, ".enum[1]", "can't contain"),
    ({"properties": {"\x7f": True}}, ".properties.\x7f", "can't contain"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}, "", "no finite value"),
    ({"$ref": "#"}, "", "no finite value"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        ".$defs.b",
        "no finite value",
    ),
    ({"type": "object", "properties": {"a": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}},
     ".properties.a", "oneOf"),
    ({"type": "array", "items": {"type": "string", "pattern": "a$b"}}, ".items", "lookaround"),
    (False, "", "false"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "place", "why"), REFUSED, ids=lambda one: str(one)[:40])
def test_what_is_not_honoured_is_refused_with_its_place(
    schema: Any, place: str, why: str, tokens: Tokens
) -> None:
    field = "response_format.json_schema.schema"
    with pytest.raises(RequestError) as caught:
        tokens.compile(json_schema_spec(schema, field))
    assert caught.value.status == 400
    assert caught.value.param == field + place
    assert field + place in caught.value.message
    assert why in caught.value.message


INVALID = [
    ({"type": "text"}, ".type"),
    ({"type": []}, ".type"),
    ({"enum": []}, ".enum"),
    ({"enum": "a"}, ".enum"),
    ({"required": True}, ".required"),
    ({"required": [1]}, ".required"),
    ({"properties": []}, ".properties"),
    ({"properties": {"a": 3}}, ".properties.a"),
    ({"items": "a"}, ".items"),
    ({"anyOf": []}, ".anyOf"),
    ({"minLength": -1}, ".minLength"),
    ({"maxItems": 1.5}, ".maxItems"),
    ({"minimum": "3"}, ".minimum"),
    ({"minimum": True}, ".minimum"),
    ({"multipleOf": 0}, ".multipleOf"),
    ({"pattern": 3}, ".pattern"),
    ({"format": 3}, ".format"),
    ({"$ref": 3}, ".$ref"),
    ({"$schema": 3}, ".$schema"),
    ({"additionalProperties": 3}, ".additionalProperties"),
]


@pytest.mark.parametrize(("schema", "place"), INVALID, ids=lambda one: str(one)[:40])
def test_a_malformed_schema_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        json_schema_spec(schema, "schema")
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "schema" + place)


def test_annotations_change_nothing(tokens: Tokens) -> None:
    plain = {"type": "object", "properties": {"title": {"type": "string"}}}
    noted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/x",
        "title": "T",
        "description": "d",
        "default": {},
        "examples": [1],
        "x-order": 3,
        "uniqueItems": False,
        "nullable": False,
        "minProperties": 0,
        "$defs": {"unused": {"not": "looked at"}},
        **plain,
        "properties": {"title": {"type": "string", "description": "a property, not an annotation"}},
    }
    assert json_schema_spec(noted, "s") == json_schema_spec(plain, "s")
    assert tokens.schema(noted) is tokens.schema(plain)


def test_a_key_has_one_spelling_so_none_comes_twice(tokens: Tokens) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}, "a\n": {"type": "integer"}}}
    grammar = tokens.schema(schema)
    for text in ('{"é":1,"é":"x"}', '{"é":1,"\\u00e9":"x"}', '{"a\\n":1,"a\\u000a":"x"}', '{"\\u00e9":"x"}'):
        assert not tokens.accepts(grammar, text)


def test_keys_stand_in_the_schemas_order(tokens: Tokens) -> None:
    properties = {name: {"type": "integer"} for name in "zay"}
    grammar = tokens.schema({"type": "object", "properties": properties})
    assert tokens.accepts(grammar, '{"z":1,"a":2,"y":3,"other":4}')
    for wrong in ('{"a":1,"z":2}', '{"z":1,"y":2,"a":3}', '{"other":1,"z":2}'):
        assert not tokens.accepts(grammar, wrong)


@pytest.mark.parametrize("gap", ["", " ", "\n", "\n" + 40 * " "])
def test_whitespace_is_bounded(gap: str, tokens: Tokens) -> None:
    grammar = tokens.compile(json_object_spec("response_format"))
    assert tokens.accepts(grammar, f'{{{gap}"a"{gap}:{gap}[{gap}1{gap},{gap}2{gap}]{gap}}}')
    for bad in ("  ", "\t", "\r\n", "\n\n", "\n" + 41 * " "):
        assert not tokens.accepts(grammar, f'{{{bad}"a":1}}')
    assert tokens.after(grammar, "{}").may_end
    assert allowed(tokens.after(grammar, "{}")) == {0, 1}
    assert tokens.longest_prefix(grammar, " {}") == ""


def test_whitespace_can_be_switched_off(tokens: Tokens) -> None:
    grammar = tokens.compile(json_object_spec("response_format", whitespace=False))
    assert tokens.accepts(grammar, '{"a b":[1,2]}')
    assert not tokens.accepts(grammar, '{"a b": 1}')
    assert not tokens.accepts(grammar, '{"a":1,\n"b":2}')


def test_the_options_of_the_library_are_ours() -> None:
    assert json.loads(with_options({"type": "string"}, False))["x-guidance"] == {
        "json_allowed_escapes": 'nrbtf\\"',
        "whitespace_flexible": False,
    }


def test_text_and_value_make_the_same_spec() -> None:
    assert json_schema_spec(json.dumps(PERSON), "s") == json_schema_spec(PERSON, "s")
    assert hash(json_schema_spec(PERSON, "s")) == hash(json_schema_spec(PERSON, "s"))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ('{"type": }', "invalid_json"),
        ('{"const": NaN}', "invalid_json"),
        ({"const": float("inf")}, "invalid_json"),
        ('"string"', "invalid_type"),
        (3, "invalid_type"),
        ("", "invalid_type"),
        ({"const": "\ud800"}, "invalid_unicode"),
        ({"const": {1, 2}}, "invalid_json"),
        ("1" * 5000, "invalid_json"),
    ],
    ids=str,
)
def test_what_is_no_json_is_refused(value: Any, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        json_schema_spec(value, "schema")
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, code, "schema")


def test_printable_characters_need_no_escape(tokens: Tokens) -> None:
    grammar = tokens.schema({"type": "string"})
    assert tokens.accepts(grammar, json.dumps(string.printable[:-2] + "éß漢😀\u2028", ensure_ascii=False))
