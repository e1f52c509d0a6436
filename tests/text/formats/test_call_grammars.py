"""Grammars, run by llguidance: they take what families write, nothing else, and it is read back."""

import copy
import json
import random
from typing import Any, NamedTuple

import jsonschema
import llguidance
import numpy as np
import pytest
from families import FAMILIES, TOOLS, WEATHER, Family, parse
from llguidance import LLMatcher
from small_tokenizers import byte_level
from tokenizers import AddedToken

from minisgl.errors import RequestError
from minisgl.text.formats.call_grammars.lark import ThoughtFirst, call_grammar
from minisgl.text.formats.call_grammars.structure import describe
from minisgl.text.formats.events import collect
from minisgl.text.formats.tools import Tools
from minisgl.text.tokenizer import Tokenizer

NAMES = sorted(FAMILIES)
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
SMALL_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rom", "{x"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 12},
        "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "note": {"type": ["string", "null"], "maxLength": 4},
        "opts": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/short"}, "b": {"const": 5}},
            "required": ["b"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"$ref": "#/$defs/short"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "opts"],
    "additionalProperties": False,
    "$defs": {"short": {"type": "string", "minLength": 1, "maxLength": 3}},
}


class Case(NamedTuple):
    """A family with a tokenizer that has its markers as tokens, or as text."""

    family: Family
    tokenizer: Tokenizer
    matchers: llguidance.LLTokenizer
    token_ids: dict[str, int]

    def matcher(self, choice: str, tools: list[dict[str, Any]] = TOOLS, **options: Any) -> LLMatcher:
        structure = describe(self.family.format)
        assert structure is not None
        grammar = call_grammar(structure, tools, choice, token_ids=self.token_ids, **options)
        matcher = LLMatcher(self.matchers, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, text: str, choice: str, tools: list[dict[str, Any]] = TOOLS, **options: Any) -> str:
        """What of `text` the grammar does not take; "..." if it takes all and wants more."""
        matcher = self.matcher(choice, tools, **options)
        ids = self.tokenizer.encode(text, False)
        count = matcher.validate_tokens(ids)
        if count < len(ids):
            return self.tokenizer.decode(ids[count:], skip_special_tokens=False)
        matcher.consume_tokens(ids)
        return "" if matcher.is_accepting() else "..."


def make_case(name: str, with_tokens: bool) -> Case:
    family = for_grammars(name)
    fast = byte_level()
    marks = [mark.replace("<|channel>thought", "<|channel>") for mark in family.format.markers]
    marks = [mark for mark in marks if mark[0] + mark[-1] in ("<>", "[]") and len(mark) > 2]
    if not with_tokens:
        marks = [mark for mark in marks if mark == "<|channel|>"]
    fast.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = Tokenizer(fast, {})
    matchers = llguidance.LLTokenizer(fast.to_str(), eos_token=fast.token_to_id("<|im_end|>"))
    return Case(family, tokenizer, matchers, tokenizer.added_tokens())


def for_grammars(name: str) -> Family:
    """The family without what its grammar leaves out: Python's single quotes, two calls in harmony."""
    family = FAMILIES[name]
    turn = family.turn.replace('{{ "\'" + v + "\'" }}', "{{ v | tojson }}")
    ordered = dict(sorted(WEATHER.items()))
    calls = (("get_weather", ordered), *family.calls[1:])
    return family._replace(turn=turn, calls=calls[:1] if name == "harmony" else calls)


def calls_only(family: Family) -> Family:
    """The family's turn without thought and text."""
    turn = family.turn
    if "<think>" in family.begin:
        turn = turn.partition("</think>")[2]
    turn = turn.replace("<|channel|>commentary<|message|>{{ m.content }}<|end|>", "")
    if family.format.channels:
        turn = turn.replace("{% set f = c.function %}<|start|>assistant", "{% set f = c.function %}")
    return family._replace(begin=family.begin.split("<think>")[0], turn=turn)


def reply(family: Family, **changes: Any) -> str:
    message = family.message() | changes
    for call in message["tool_calls"]:  # JSON without escapes for characters that need none
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return family.reply(message).removesuffix("<|call|>")


def sorted_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tools = copy.deepcopy(tools)
    properties = tools[0]["function"]["parameters"]["properties"]
    tools[0]["function"]["parameters"]["properties"] = dict(sorted(properties.items()))
    return tools


CASES = {(name, tokens): make_case(name, tokens) for name in NAMES for tokens in (True, False)}
EACH = pytest.mark.parametrize(("name", "tokens"), sorted(CASES))


@EACH
def test_what_a_template_writes_is_taken(name: str, tokens: bool) -> None:
    case = CASES[name, tokens]
    thought: ThoughtFirst = "open" if "<think>" in case.family.begin else "may"
    whole = reply(case.family)
    final = "<|channel|>final<|message|>" if name == "harmony" else ""
    for tools in (TOOLS, STRICT):
        assert case.takes(whole, "auto", sorted_tools(tools), thought=thought) == ""
        assert case.takes(f"{final}Look [x] {{a}}.", "auto", tools) == ""
    bare = calls_only(case.family)
    first = reply(bare, content="", reasoning_content="" if bare.begin != case.family.begin else None)
    assert case.takes(first, "required", sorted_tools(TOOLS)) == ""


@EACH
def test_thoughts_come_first_where_they_may(name: str, tokens: bool) -> None:
    case = CASES[name, tokens]
    spec = describe(case.family.format)
    assert spec is not None
    if spec.thought is None:
        return
    call = one_call(case, "ping", {})
    thought = f"{spec.thought.open}hm <b> {{}}{spec.thought.close}"
    assert case.takes(thought + call, "required", thought="may") == ""
    assert case.takes(call, "required", thought="may") == ""
    assert case.takes(thought + call, "required", thought="no") != ""
    assert case.takes(thought.removeprefix(spec.thought.open) + call, "required", thought="open") == ""
    assert case.takes(call, "required", thought="open") != ""
    assert case.takes(thought + "text", "required", thought="may") == "text"


def one_call(case: Case, name: str, arguments: dict[str, Any]) -> str:
    bare = calls_only(case.family)._replace(calls=((name, arguments),))
    return reply(bare, content="", reasoning_content=None)


@EACH
def test_wrong_names_and_arguments_are_refused(name: str, tokens: bool) -> None:
    case = CASES[name, tokens]
    tools = sorted_tools(TOOLS)
    for choice in ("required", "get_weather"):
        assert case.takes(one_call(case, "get_weather", {"city": "Rom"}), choice, tools) == ""
        assert case.takes(one_call(case, "get_weather", {"city": "Rom", "days": 3}), choice, tools) == ""
        assert case.takes(one_call(case, "get_weather", {"city": "Rom", "days": "x"}), choice, tools) != ""
        assert case.takes(one_call(case, "get_weather", {"days": 3}), choice, tools) != ""
        assert case.takes(one_call(case, "get_winds", {"city": "Rom"}), choice, tools) != ""
        assert case.takes("Hello", choice, tools) != ""
        assert case.takes("", choice, tools) == "..."
    loose = [{"function": {"name": "ping", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    assert case.takes(one_call(case, "ping", {"a": 1}), "required", loose) == ""
    assert case.takes(one_call(case, "ping", {"a": "x"}), "required", loose) != ""
    assert case.takes(one_call(case, "ping", {}), "required") == ""
    assert case.takes(one_call(case, "ping", {}), "get_weather") != ""
    assert case.takes(one_call(case, "ping", {"a": 1}), "ping") != ""
    wrong = one_call(case, "get_weather", {"city": "Rom", "days": "x"})
    assert case.takes(wrong, "auto", tools) == ""
    assert case.takes(wrong, "auto", sorted_tools(STRICT)) != ""


@EACH
def test_two_calls_only_where_they_may_be_parallel(name: str, tokens: bool) -> None:
    case = CASES[name, tokens]
    if name == "harmony":
        return
    bare = calls_only(case.family)._replace(calls=(("ping", {}), ("ping", {})))
    two = reply(bare, content="", reasoning_content=None)
    assert case.takes(two, "required") == case.takes(two, "auto", STRICT) == ""
    assert case.takes(two, "required", parallel=False) != ""
    assert case.takes(two, "ping") != ""


@EACH
def test_what_a_grammar_allows_is_read_as_calls_that_fit(name: str, tokens: bool) -> None:
    """Random walks: any allowed token, one after the other, to the end."""
    case = CASES[name, tokens]
    tools = [{"type": "function", "function": {"name": "go", "parameters": SMALL_PARAMETERS}}, TOOLS[2]]
    randomness = random.Random(7)
    finished = 0
    for _ in range(6):
        ids = walk(case, case.matcher("required", tools), randomness)
        if ids is None:
            continue
        finished += 1
        text = case.tokenizer.decode(ids, skip_special_tokens=False)
        found = collect(parse(case.family._replace(begin=""), [text], tools))
        assert found.content.strip() == "", text
        assert found.calls, text
        for call in found.calls:
            assert call.complete
            if call.name == "go":
                jsonschema.validate(json.loads(call.arguments), SMALL_PARAMETERS)
            else:
                assert (call.name, call.arguments) == ("ping", "{}")
    assert finished >= 2


def walk(case: Case, matcher: LLMatcher, randomness: random.Random) -> list[int] | None:
    """Token ids that the matcher allows, to an end that it accepts; None if that takes too long."""
    ids: list[int] = []
    while len(ids) < 400:
        if matcher.is_accepting() and randomness.random() < 0.7:
            return ids
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        allowed = [one for one in allowed if case.tokenizer.token_text(int(one)) != "<|im_end|>"]
        # White space is allowed in JSON without end, so others come first.
        others = [one for one in allowed if case.tokenizer.token_bytes(int(one)).strip()]
        if not allowed:
            return ids if matcher.is_accepting() else None
        token = int(randomness.choice(others or allowed))
        assert matcher.consume_token(token)
        ids.append(token)
    return None


@pytest.mark.parametrize(
    ("name", "schema", "place"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        ("glm45", {"properties": {"a": {"type": "string", "format": "date"}}}, "properties.a.format"),
        ("gemma4", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "properties.a.uniqueItems"),
        ("gemma4", {"properties": {"a": {"$ref": "#"}}}, "properties.a"),
        ("gemma4", {"properties": {"a": {"enum": [{}]}}}, "properties.a.enum"),
        ("deepseek_v32", {"properties": {}, "required": ["a"]}, "required"),
        ("pythonic", {"properties": {"a-b": {}}}, "properties.a-b"),
        ("pythonic", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("qwen3_coder", {"properties": {"a": {"allOf": [{}, {}]}}}, "properties.a.allOf"),
        ("qwen3_coder", {"properties": {"a": {"$ref": "#/$defs/no"}}}, "properties.a.$ref"),
        ("glm45", {"properties": {"a": {"enum": ["</arg_value>"]}}}, "properties.a.enum"),
        ("glm45", {"type": "array"}, "type"),
        ("hermes", {"type": "array"}, "type"),
    ],
)
def test_a_schema_that_a_format_can_not_carry_is_a_400_with_its_place(
    name: str, schema: dict[str, Any], place: str
) -> None:
    tools = [TOOLS[2], {"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(RequestError) as caught:
        CASES[name, True].matcher("required", tools)
    assert caught.value.status == 400
    assert f"tools[1].function.parameters.{place}" in caught.value.message
    CASES[name, True].matcher("auto", tools)


@pytest.mark.parametrize("name", ["glm45", "gemma4", "pythonic", "hermes"])
@pytest.mark.parametrize(
    "parameter",
    [
        {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]},
        {"allOf": [{"$ref": "#/properties/a"}]},
        {"$ref": "#/$defs/0"},
        {"type": "array", "items": {"$ref": "#/properties/a"}},
        {"enum": [str(rank) for rank in range(5000)]},
    ],
)
def test_hostile_schemas_are_answered_at_once(name: str, parameter: dict[str, Any]) -> None:
    """Schemas without end, and one whose 60 parts can be combined in 2**30 ways."""
    definitions = {
        str(rank): {"anyOf": [{"$ref": f"#/$defs/{rank + 1}"}, {"$ref": f"#/$defs/{rank + 1}"}]}
        for rank in range(30)
    }
    schema = {
        "type": "object",
        "properties": {"a": parameter},
        "$defs": {**definitions, "30": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    structure = describe(CASES[name, True].family.format)
    assert structure is not None
    ends = "enum" in parameter or (name == "glm45" and "items" in parameter)
    if name == "hermes" or ends or (name == "pythonic" and "allOf" not in parameter):
        assert len(call_grammar(structure, tools, "required", token_ids={})) < 1_000_000
    else:
        with pytest.raises(RequestError, match=r"tools\[0\]\.function\.parameters\.properties\.a"):
            call_grammar(structure, tools, "required", token_ids={})
    Tools(tools).types("f", "a")


def test_a_choice_of_no_tool_is_a_400() -> None:
    with pytest.raises(RequestError, match="nobody"):
        CASES["hermes", True].matcher("nobody")
