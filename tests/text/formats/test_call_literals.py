"""Values that are not written as JSON: Python's literals against `ast`, and text by a tool's schema."""

import ast
import json
from typing import Any

import pytest
from families import FAMILIES, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing.response_parser import _coerce

from minisgl.text.formats.events import collect
from minisgl.text.formats.tools import Tools, cast

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def pythonic(text: str) -> tuple[str, bool]:
    """Arguments of one call, and whether they are complete; the same for every character alone."""
    found = parse(FAMILIES["pythonic"], text, None)
    assert found == parse(FAMILIES["pythonic"], [text], None)
    (call,) = collect(found).calls
    return call.arguments, call.complete


@settings(max_examples=200)
@given(value=VALUES)
def test_what_python_writes_is_read_as_python_reads_it(value: Any) -> None:
    assert pythonic(f"[f(a={value!r})]") == (json.dumps({"a": value}, ensure_ascii=False), True)


@pytest.mark.parametrize(
    "literal",
    [
        *(
            '"a\\tb\\x41\\101\\u00e9\\U0001F389\\\n"',
            "'it\\'s'",
            '"""a "b"\nc"""',
            "'''x'''",
            '""',
            "1_000",
            "0x10",
        ),
        *(
            "-0.5",
            ".5",
            "1.",
            "1e5",
            "+3",
            "(1,)",
            "()",
            "[1, 2,]",
            "{'a': 1,}",
            "[ ]",
            "{ }",
            "{1: 2}",
            '"\\d"',
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_pythons_odd_literals(literal: str) -> None:
    expected = json.dumps({"a": ast.literal_eval(literal)}, ensure_ascii=False)
    assert pythonic(f"[f( a = {literal} , )]") == (expected, True)


def test_json_in_pythons_place_is_read_too() -> None:
    text = '{"a": [true, false, null], "b": "\\ud83c\\udf89\\/"}'
    arguments, complete = pythonic(f"[f(a={text})]")
    assert complete
    assert json.loads(arguments) == {"a": json.loads(text)}


@pytest.mark.parametrize(
    "literal", ["foo", "f()", "1+2", "{1, 2}", "1j", "[1", '"a', "'a' 'b'", "b'x'", "[" * 300]
)
def test_what_is_no_literal_ends_the_call_incomplete(literal: str) -> None:
    assert not pythonic(f"[f(x=0, a={literal})]")[1]


TYPES = ["string", "integer", "number", "boolean", "null", "object", "array"]


@settings(max_examples=300)
@given(
    raw=st.one_of(
        st.sampled_from(
            [
                "7",
                "-7",
                "3.0",
                "1.5",
                "true",
                "False",
                "null",
                "None",
                '{"a": 1}',
                "[1]",
                "x",
                "",
                "NaN",
                "1e400",
            ]
        ),
        st.text(max_size=5),
    ),
    types=st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
)
def test_a_value_gets_the_type_that_transformers_gives_it(raw: str, types: list[str]) -> None:
    value = json.loads(cast(raw, tuple(types)))
    expected = _coerce(raw, tuple(types))
    assert value == expected
    assert type(value) is type(expected)


def test_types_are_found_behind_references_and_unions() -> None:
    schema = {
        "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {
            "a": {"$ref": "#/$defs/count"},
            "b": {"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]},
            "c": {"enum": ["x", 1, None]},
            "d": {"const": True},
            "e": {"$ref": "#/$defs/loop"},
            "f": {},
            "g": {"type": ["string", "null"]},
            "h": {"type": "string", "nullable": True},
            "i": {"allOf": [{"type": "array"}]},
        },
        "additionalProperties": {"type": "number"},
    }
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    found = {name: tools.types("f", name) for name in [*schema["properties"], "other"]}
    assert found == {
        "a": ("integer",),
        "b": ("integer", "null"),
        "c": ("string", "integer", "null"),
        "d": ("boolean",),
        "e": (),
        "f": (),
        "g": ("string", "null"),
        "h": ("string", "null"),
        "i": ("array",),
        "other": ("number",),
    }
    assert tools.types("nobody", "a") == ()


def test_without_a_type_a_value_is_json_where_it_can_be() -> None:
    assert [cast(raw, ()) for raw in ("7", " [1] ", "x", '"x"', "Infinity", "[" * 5000)] == [
        *("7", "[1]", '"x"', '"x"', '"Infinity"', json.dumps("[" * 5000)),
    ]
