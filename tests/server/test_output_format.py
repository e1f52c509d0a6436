"""What an answer must look like: each way to ask for it makes the grammar that it means, or is a 400."""

import json
from typing import Any

import msgspec
import pytest
from served_routes import model

from minisgl.errors import RequestError
from minisgl.grammar.spec import GrammarSpec, json_schema_spec
from minisgl.server.apis.chat import parse_chat
from minisgl.server.apis.completions import parse_completion

TINY = model(300)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}


def asked(**fields: Any) -> GrammarSpec | None:
    """The grammar of a chat, which is that of a completion with the same fields."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    found = parse_chat(msgspec.json.encode(chat), TINY).options.params.grammar
    other = parse_completion(msgspec.json.encode({"prompt": "Hi", **fields}), TINY).options.params.grammar
    assert found == other
    return found


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def of_format(**fields: Any) -> GrammarSpec | None:
    return asked(response_format=fields)


def of_schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": fields}


def test_response_formats() -> None:
    schema = json_schema_spec(SCHEMA, "response_format.json_schema.schema")
    assert asked() is None
    assert of_format(type="text") is None
    for strict in (None, True, False):
        named = {"name": "one", "schema": SCHEMA, "strict": strict, "description": "an a"}
        assert of_format(type="json_schema", json_schema=named) == schema
    anything = of_format(type="json_object")
    assert anything is not None
    assert json.loads(anything.text)["type"] == "object"
    tag = asked(response_format=TAG)
    assert tag is not None
    assert tag.kind == "structural_tag"


def test_structured_outputs() -> None:
    def asked_as(**fields: Any) -> tuple[str, str]:
        found = asked(structured_outputs=fields)
        assert found is not None
        assert found.where == "structured_outputs." + next(iter(fields))
        return found.kind, found.text

    schema = json_schema_spec(SCHEMA, "x").text
    assert asked_as(json=SCHEMA) == asked_as(json=json.dumps(SCHEMA)) == ("json_schema", schema)
    assert asked_as(json_object=True)[0] == "json_schema"
    assert asked_as(regex="[a-z]+")[0] == "regex"
    assert asked_as(choice=["a", "b"]) == ("choice", '["a", "b"]')
    assert asked_as(grammar='root ::= "a"')[0] == "lark"
    assert asked_as(structural_tag=TAG)[0] == "structural_tag"
    compact = asked(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert compact is not None
    assert not compact.whitespace


def test_sglangs_fields() -> None:
    of_schema, of_regex, of_ebnf = (
        asked(json_schema=json.dumps(SCHEMA)), asked(regex="a|b"), asked(ebnf='root ::= "a"')
    )  # fmt: skip
    assert of_schema == json_schema_spec(SCHEMA, "json_schema")
    assert of_regex is not None
    assert of_ebnf is not None
    assert (of_regex.where, of_ebnf.where) == ("regex", "ebnf")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "mood": 1}}, "response_format.mood"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": of_schema(schema={})}, "response_format.json_schema.name"),
        (
            {"response_format": of_schema(name="x", schema={"uniqueItems": True})},
            "response_format.json_schema.schema.uniqueItems",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": "{"}, "json_schema"),
        ({"choice": ["a"]}, "choice"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert (error.param or "") in error.message
