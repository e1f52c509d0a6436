"""Grammars that are no JSON schemas, and the limits of all: each refusal says its number."""

import contextlib
import json
import re
import string
import time
from collections.abc import Callable
from typing import Any

import pytest
from grammar_tokens import Tokens, allowed, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.errors import RequestError
from minisgl.grammar import json_schema, limits
from minisgl.grammar.matcher import GrammarError, Matcher
from minisgl.grammar.patterns import PatternError, to_llguidance
from minisgl.grammar.spec import (
    GrammarSpec,
    choice_spec,
    grammar_spec,
    json_schema_spec,
    regex_spec,
    structural_tag_spec,
)

PATTERNS = [
    r"^a.c$",
    r"^\d{3}-\d{4}$",
    r"[\w.-]+@[\w-]+\.\w{2,4}",
    r"^[^\[&~-]+$",
    "a|b$",
    "^a|b",
    "(ab|c)*?d+",
    r"^\u0041\x42\0?$",
    "[^]",
    "^(?:x|y)(?<name>z)?$",
    "^/a/b~#&",
    "{x}",
    "^[A-C][a-d]*( [A-C][a-d]*)*$",
    "(?i)aB",
    "^.{1,3}$",
    "(^a|b$)",
    "",
    "[a-c&&b]",
    "^[--/]+$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_elsewhere(pattern: str, tokens: Tokens) -> None:
    grammar = tokens.schema({"type": "string", "pattern": pattern})
    other = pattern.replace("(?<", "(?P<").replace("[^]", r"[\s\S]").replace("$", r"\Z").replace("&&", r"&\&")
    other = re.sub(r"(?<![\\\[\w])\.", "[^\\\\n\\\\r\u2028\u2029]", other).replace("[--/]", r"[\--/]")
    reference = re.compile(other, re.ASCII)

    @given(st.text(alphabet="abcdxyzAB01-_.@ \n\r[&~^/#{}\u2028é", max_size=6))
    @settings(max_examples=80, deadline=None, derandomize=True)
    def check(text: str) -> None:
        found = tokens.accepts(grammar, json.dumps(text, ensure_ascii=False))
        assert found == bool(reference.search(text))

    check()


def test_space_is_what_ecma_says(tokens: Tokens) -> None:
    spaces, others = (tokens.schema({"type": "string", "pattern": one}) for one in (r"^\s$", r"^\S$"))
    for char in "\t\n\f\r \u00a0\u2003\u2028\u3000\ufeff":
        text = json.dumps(char, ensure_ascii=False)
        assert tokens.accepts(spaces, text)
        assert not tokens.accepts(others, text)
    for char in "a\u200b\u0085é":
        text = json.dumps(char, ensure_ascii=False)
        assert tokens.accepts(others, text)
        assert not tokens.accepts(spaces, text)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)b", "lookaround"),
        ("(?<!a)b", "lookaround"),
        (r"\bword", "word boundary"),
        (r"(a)\1", "backreference"),
        (r"\k<a>", "backreference"),
        ("a{2}{3}", "two quantifiers"),
        ("a++", "nothing before it"),
        ("*a", "nothing before it"),
        ("[]", "matches nothing"),
        ("[z-a]", "out of order"),
        (r"[a-\d]", "a class"),
        ("a{3,2}", "out of order"),
        ("(a", "without its )"),
        ("a)", "without its ("),
        ("[a", "without its ]"),
        (r"\Z", "ECMA-262 does not have"),
        (r"\012", "octal"),
        (r"\u12", "malformed"),
        (r"\ud83d", "surrogate"),
        (r"\p", "braces"),
        ("(?x)a", "unknown kind"),
        ("a\\", "backslash"),
        ("((a{100}){100}){100}", f"more than {limits.MAX_EXPANDED_CHARS}"),
        ("(ab.{50}){7000}", f"more than {limits.MAX_EXPANDED_CHARS}"),
        ("a{99999999}", f"more than {limits.MAX_REPEATS}"),
        (".{200001}", f"more than {limits.MAX_REPEATS}"),
        ("a" * (limits.MAX_PATTERN_CHARS + 1), f"at most {limits.MAX_PATTERN_CHARS}"),
    ],
)
def test_patterns_that_can_not_be_taken_say_why(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=re.escape(why)):
        to_llguidance(pattern)
    with pytest.raises(RequestError, match=re.escape(why)) as caught:
        regex_spec(pattern, "structured_outputs.regex")
    assert caught.value.param == "structured_outputs.regex"


@given(st.text(alphabet=r"ab\.[](){}*+?|^$-,019dwsuxcpk:=!<>", max_size=12))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_is_a_pattern_or_a_named_error(pattern: str) -> None:
    with contextlib.suppress(PatternError):
        assert isinstance(to_llguidance(pattern), str)


def test_a_regex_matches_the_whole_answer(tokens: Tokens) -> None:
    grammar = tokens.compile(regex_spec(r"^(yes|no)/\d$", "regex"))
    assert tokens.accepts(grammar, "yes/3")
    assert not tokens.accepts(grammar, "yes/33")
    assert tokens.longest_prefix(grammar, "xyes/3") == ""


def test_choices_are_texts_and_nothing_else(tokens: Tokens) -> None:
    choices = ["a", "ab", 'q"\\\n', "漢", "/x/", string.punctuation]
    grammar = tokens.compile(choice_spec(choices, "choice"))
    for text in choices:
        assert tokens.accepts(grammar, text)
    assert not tokens.accepts(grammar, "abc")


LARK = """start: "(" start ")" | x // comment " /
x: %json {"type": "integer", "title": "/not a regex"} | /[a-c]+/
"""
GBNF = 'root ::= "(" root ")" | x  # comment\nx ::= [0-9]+ | "a" y?\ny ::= "b"{2,3}\n'


def test_lark_grammars(tokens: Tokens) -> None:
    grammar = tokens.compile(grammar_spec(LARK, "grammar"))
    for text in ("1", "((abc))", "(-12)"):
        assert tokens.accepts(grammar, text)
    assert not tokens.accepts(grammar, "(1")
    assert "title" not in grammar_spec(LARK, "grammar").text


def test_gbnf_grammars(tokens: Tokens) -> None:
    grammar = tokens.compile(grammar_spec(GBNF, "ebnf"))
    for text in ("1", "((123))", "(abb)", "a", "abbb"):
        assert tokens.accepts(grammar, text)
    for text in ("(1", "ab", "abbbb"):
        assert not tokens.accepts(grammar, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hello", "neither Lark"),
        ("root ::= x", "not found"),
        ('start: <[5]> "a"', "by number"),
        ('start: x\nx[temperature=0.5]: "a"', "temperature"),
        ('start: x\nx[max_tokens=5]: "a"', "max_tokens"),
        ('start: x "b"\nx[stop="b"]: /a*/', "stop"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "options"),
        ('start: %json {"uniqueItems": true}', "uniqueItems"),
        ('start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
        ("start: %json {", "no JSON"),
        ("start: %json " + '{"items":' * 100 + "{}" + "}" * 100, "deep"),
        ('start: %regex {"substring_words": "a b"}', "known are"),
        ('start: "a\0"', "NUL"),
        ('start: "a" ' + "#" * limits.MAX_LARK_BYTES, str(limits.MAX_LARK_BYTES)),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "100 deep"),
        ("".join(f'r{i} ::= "a"\n' for i in range(600)), "500 rules"),
    ],
    ids=lambda one: one[:30],
)
def test_grammars_that_can_not_be_taken_say_why(text: str, why: str) -> None:
    with pytest.raises(RequestError, match=re.escape(why)) as caught:
        grammar_spec(text, "structured_outputs.grammar")
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith("structured_outputs.grammar")


@pytest.mark.parametrize("text", ["start: nothing", 'start: "a', 'start: <none> "a"', "start: /a(?=b)/"])
def test_grammars_that_the_library_refuses_are_the_requests_error(text: str, tokens: Tokens) -> None:
    with pytest.raises(RequestError, match="grammar can't be used") as caught:
        tokens.compile(grammar_spec(text, "grammar"))
    assert (caught.value.status, caught.value.param) == (400, "grammar")


# Structural tags

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<call>{"city": "Paris"}</call>'


@pytest.fixture(scope="module", params=["plain", "special"])
def tagged(request: pytest.FixtureRequest) -> Tokens:
    """A tokenizer that has the tags as text, and one that has them as tokens outside of text."""
    return Tokens(
        make_tokenizer(special=["<call>", "</call>", "[THINK]"] if request.param == "special" else [])
    )


def triggered(**flags: bool) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": CITY}
    tag = {"begin": "<call>", "content": content, "end": "</call>"}
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag], **flags},
    }


def test_structures_with_triggers(tagged: Tokens) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<call>a=", "schema": CITY, "end": "</call>"},
            {"begin": "<call>b=", "schema": {"type": "integer"}, "end": ""},
        ],
        "triggers": ["<call>"],
    }
    grammar = tagged.compile(structural_tag_spec(json.dumps(tag), "response_format"))
    good = ["", "Hello.", 'So <call>a={"city":"P"}</call> and <call>b=12', "a < b", "<cal"]
    for text in good:
        assert tagged.accepts(grammar, text), text
    for text in ("<call>c", "x<call>a={}", "<call>b=x"):
        assert not tagged.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("flags", "good", "bad"),
    [
        ({}, ["", "a", CALL, f"a{CALL}b{CALL}"], ["<call>x", CALL[:-1]]),
        ({"at_least_one": True}, [CALL, CALL + CALL, f"{CALL}a{CALL}b"], ["", "a", f"a{CALL}"]),
        ({"stop_after_first": True}, ["", "a", CALL, f"a{CALL}"], [CALL + CALL, CALL + "a"]),
        ({"at_least_one": True, "stop_after_first": True}, [CALL], ["", CALL + CALL, CALL + "a", "a" + CALL]),
    ],
)
def test_triggered_tags(flags: dict[str, bool], good: list[str], bad: list[str], tagged: Tokens) -> None:
    grammar = tagged.compile(structural_tag_spec(triggered(**flags), "response_format"))
    for text in good:
        assert tagged.accepts(grammar, text), text
    for text in bad:
        assert not tagged.accepts(grammar, text), text


def test_a_trigger_counts_as_text_and_as_a_token() -> None:
    tokens = Tokens(make_tokenizer(special=["<call>", "</call>"]))
    grammar = tokens.compile(structural_tag_spec(triggered(), "response_format"))
    as_text = [one for char in "<call>" for one in tokens.ids(char)]
    as_token = tokens.ids("<call>")
    assert len(as_token) == 1
    for ids in (as_text, as_token):
        matcher = Matcher.rebuilt(grammar, [*tokens.ids("So "), *ids])
        assert allowed(matcher) <= set(tokens.ids('{" \n'))


def test_nested_parts(tagged: Tokens) -> None:
    number = {"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": r"\d+"}, "end": ["]", "}"]}
    parts = [
        {"type": "tag", "begin": "[THINK]", "content": {"type": "any_text"}, "end": "[/THINK]"},
        {"type": "optional", "content": {"type": "const_string", "value": "\n"}},
        {"type": "tags_with_separator", "tags": [number], "separator": ",", "at_least_one": True},
        {
            "type": "or",
            "elements": [
                {"type": "grammar", "grammar": 'start: "?"'},
                {"type": "const_string", "value": "!"},
            ],
        },
        {"type": "any_text"},
        {"type": "const_string", "value": "END"},
        {"type": "star", "content": {"type": "const_string", "value": "."}},
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": parts}}
    grammar = tagged.compile(structural_tag_spec(tag, "response_format"))
    for text in ("[THINK]hm[/THINK][1]!END", "[THINK][1][/THINK]\n[12],[3}?some textEND..."):
        assert tagged.accepts(grammar, text), text
    for text in ("[1]!END", "[THINK]hm[/THINK]!END", "[THINK]hm[/THINK][1],!END", "[THINK]a[/THINK][1]!ENDx"):
        assert not tagged.accepts(grammar, text), text


@pytest.mark.parametrize(
    ("tag", "place"),
    [
        ({"type": "json_schema"}, ".type"),
        ({"type": "structural_tag"}, ".structures"),
        ({"type": "structural_tag", "format": {"type": "qwen_xml_parameter"}}, ".format.type"),
        ({"type": "structural_tag", "format": {"type": "any_text", "excludes": ["a"]}}, ".format.excludes"),
        ({"type": "structural_tag", "format": {"type": "any_text", "more": 1}}, ".format.more"),
        ({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": True}}},
         ".format.json_schema.not"),
        ({"type": "structural_tag", "format": {"type": "regex", "pattern": "(?=a)"}}, ".format.pattern"),
        ({"type": "structural_tag", "format": {"type": "sequence", "elements": [
            {"type": "any_text"}, {"type": "regex", "pattern": "a"}]}}, ".format.elements[0]"),
        ({"type": "structural_tag", "format": {"type": "sequence", "elements": [
            triggered()["format"], {"type": "const_string", "value": "a"}]}}, ".format.elements[0]"),
        ({"type": "structural_tag", "triggers": ["<b"], "structures": [
            {"begin": "<a>", "schema": {}, "end": ""}]}, ".triggers"),
        ({"type": "structural_tag", "triggers": ["<a"], "structures": [
            {"begin": "<a>", "schema": {"contains": 1}, "end": ""}]}, ".structures[0].schema.contains"),
        ({"type": "structural_tag", "format": triggered(at_least_one=3)["format"]},  # pyright: ignore
         ".format.at_least_one"),
        ({"type": "structural_tag", "format": {"type": "const_string", "value": "a\0"}}, ".format.value"),
        ({"type": "structural_tag", "format": {"type": "or", "elements": [{"type": "any_text"}] * 600}},
         ".format.elements"),
    ],
    ids=lambda one: json.dumps(one)[-40:],
)  # fmt: skip
def test_parts_that_can_not_be_taken_are_named(tag: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError) as caught:
        structural_tag_spec(tag, "response_format")
    assert (caught.value.status, caught.value.param) == (400, "response_format" + place)


# Limits

BIG = "x" * limits.MAX_SPEC_BYTES


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("make", "limit"),
    [
        (lambda: json_schema_spec({"const": BIG}, "s"), limits.MAX_SPEC_BYTES),
        (lambda: json_schema_spec(f'{{"const": "{BIG}"}}', "s"), limits.MAX_SPEC_BYTES),
        (lambda: json_schema_spec({"const": "é" * (limits.MAX_SPEC_BYTES // 2)}, "s"), limits.MAX_SPEC_BYTES),
        (lambda: json_schema_spec(nested(limits.MAX_DEPTH), "s"), limits.MAX_DEPTH),
        (lambda: json_schema_spec(nested(100_000)[: limits.MAX_SPEC_BYTES], "s"), limits.MAX_DEPTH),
        (lambda: json_schema_spec(json.loads(nested(limits.MAX_DEPTH)), "s"), limits.MAX_DEPTH),
        (lambda: json_schema_spec({"enum": list(range(10_001))}, "s"), limits.MAX_ENUM_VALUES),
        (lambda: json_schema_spec({"required": [str(i) for i in range(5_001)]}, "s"), limits.MAX_PROPERTIES),
        (lambda: json_schema_spec({"properties": {str(i): {} for i in range(5_001)}}, "s"),
         limits.MAX_PROPERTIES),
        (lambda: json_schema_spec({"properties": {str(i): {} for i in range(501)}}, "s"),
         limits.MAX_OPTIONAL_PROPERTIES),
        (lambda: json_schema_spec({"anyOf": [{}] * 501}, "s"), limits.MAX_ALTERNATIVES),
        (lambda: json_schema_spec({"maxItems": 10**10}, "s"), limits.MAX_COUNT),
        (lambda: json_schema_spec({"pattern": "a" * 4097}, "s"), limits.MAX_PATTERN_CHARS),
        (lambda: json_schema_spec({"maximum": 2**53}, "s"), limits.MAX_NUMBER),
        (lambda: choice_spec([str(i) for i in range(10_001)], "s"), limits.MAX_ENUM_VALUES),
        (lambda: choice_spec(["x" * 9_999 + str(i) for i in range(30)], "s"), limits.MAX_LITERAL_CHARS),
        (lambda: choice_spec(["x" * 9_990 + str(i) for i in range(30)], "s"), limits.MAX_SPEC_BYTES),
        (lambda: json_schema_spec({"const": "x" * 10_001}, "s"), limits.MAX_LITERAL_CHARS),
        (lambda: grammar_spec(BIG, "s"), limits.MAX_LARK_BYTES),
    ],
)  # fmt: skip
def test_each_limit_is_in_its_error(make: Callable[[], GrammarSpec], limit: int) -> None:
    with pytest.raises(RequestError, match=str(limit)) as caught:
        make()
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.startswith("s")


def test_just_below_the_limits_all_is_well(tokens: Tokens) -> None:
    for spec in (
        json_schema_spec(nested(limits.MAX_DEPTH - 1), "s"),
        json_schema_spec({"enum": [f"value number {i}" for i in range(limits.MAX_ENUM_VALUES)]}, "s"),
        json_schema_spec({"type": "object", "properties": {str(i): {} for i in range(500)}}, "s"),
        choice_spec([f"choice {i}" for i in range(limits.MAX_ENUM_VALUES)], "s"),
    ):
        assert allowed(Matcher(tokens.compile(spec)))


def chain(length: int, kind: str) -> dict[str, Any]:
    """Definitions, each of which needs the next one."""

    def link(i: int) -> dict[str, Any]:
        following = {"$ref": f"#/$defs/d{i + 1}"}
        return {
            "$ref": following,
            "allOf": {"allOf": [following, {"type": "object"}]},
            "properties": {"type": "object", "properties": {"a": following}},
            "prefixItems": {"type": "array", "prefixItems": [following], "minItems": 1},
        }[kind]

    links = {f"d{i}": link(i) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": ["object", "null"]}}}


@pytest.mark.parametrize("kind", ["$ref", "allOf", "properties", "prefixItems"])
def test_long_chains_of_definitions_are_taken_or_refused_but_overflow_no_stack(
    kind: str, tokens: Tokens
) -> None:
    assert allowed(Matcher(tokens.schema(chain(240, kind))))
    with pytest.raises(RequestError, match=str(limits.MAX_LEVELS)):
        json_schema_spec(chain(3000, kind), "s")


@pytest.mark.parametrize("rule", ["r{i}: r{j}", 'r{i}: "(" r{j} ")"', "R{i}: R{j}", "R{i}: R{j} R{j}"])
def test_long_chains_of_rules_overflow_no_stack(rule: str, tokens: Tokens) -> None:
    def text(length: int) -> str:
        rules = [rule.format(i=i, j=i + 1) for i in range(length)]
        return "\n".join([f"start: {rule[0]}0", *rules, f'{rule[0]}{length}: "a"'])

    with contextlib.suppress(RequestError):
        tokens.compile(grammar_spec(text(498), "grammar"))
    with pytest.raises(RequestError, match=str(limits.MAX_RULES)):
        grammar_spec(text(3000), "grammar")


HOSTILE: dict[str, Callable[[], GrammarSpec]] = {
    "enum of 10,000": lambda: json_schema_spec({"enum": [f"{i:040}" for i in range(10_000)]}, "s"),
    "depth 200": lambda: json_schema_spec(nested(200), "s"),
    "only itself": lambda: json_schema_spec({"$ref": "#"}, "s"),
    "each other": lambda: json_schema_spec(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "s"
    ),
    "a chain of references": lambda: json_schema_spec(
        {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
            | {"d4000": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        "s",
    ),
    "a tree of references": lambda: json_schema_spec(
        {
            "$defs": {
                f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
                for i in range(40)
            }
            | {"d40": {"type": "null"}},
            "$ref": "#/$defs/d0",
        },
        "s",
    ),
    "products of alternatives": lambda: json_schema_spec(
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(3)]} for i in range(12)]}, "s"
    ),
    "two quantifiers inside each other": lambda: regex_spec("(a+)+$", "s"),
    "states that double": lambda: json_schema_spec({"type": "string", "pattern": "[ab]*a[ab]{200}c"}, "s"),
    "any text before each letter": lambda: regex_spec("(.*a){2000}", "s"),
    "repetitions of repetitions": lambda: regex_spec("((a{10}){100}){19}", "s"),
    "a long text": lambda: json_schema_spec({"const": "a" * 10_000}, "s"),
    "optional letters": lambda: regex_spec("a?" * 1000 + "a" * 1000, "s"),
    "a NUL in a pattern": lambda: json_schema_spec({"type": "string", "pattern": "a\0b"}, "s"),
    "a NUL in a name": lambda: json_schema_spec({"properties": {"a\0b": {}}}, "s"),
    "a schema of 1 MB": lambda: json_schema_spec(json.dumps({"enum": ["x" * 100] * 10_000}), "s"),
    "many small objects": lambda: json_schema_spec(
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {}, "k": {"const": i}}} for i in range(2000)]},
        "s",
    ),
    "5,000 required properties": lambda: json_schema_spec(
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(5_000)},
            "required": [f"p{i}" for i in range(5_000)],
        },
        "s",
    ),
    "128 tools": lambda: json_schema_spec(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": f"tool{i}"},
                        "arguments": {
                            "type": "object",
                            "properties": {f"a{j}": {"type": "string"} for j in range(20)},
                        },
                    },
                    "required": ["name", "arguments"],
                }
                for i in range(128)
            ]
        },
        "s",
    ),
    "an ambiguous grammar": lambda: grammar_spec('start: start start | "a" | ', "s"),
    "text that goes on in one way for ever": lambda: grammar_spec('start: A A\nA: "a"+', "s"),
    "text that goes on in one way for long": lambda: json_schema_spec(
        {"type": "string", "pattern": "^a+$", "minLength": 10**9}, "s", whitespace=False
    ),
    "a grammar of itself": lambda: grammar_spec("start: start", "s"),
    "a chain of GBNF rules": lambda: grammar_spec(
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(498)) + 'r498 ::= "a"', "s"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_answered_within_two_seconds(name: str, tokens: Tokens) -> None:
    began = time.process_time()
    with contextlib.suppress(RequestError, GrammarError):
        grammar = tokens.compile(HOSTILE[name]())
        for text in ('{"p7":"x', '"a', "aaaaaaaaaaaaaaaaaaaa"):
            tokens.longest_prefix(grammar, text)
    assert time.process_time() - began < 2
    assert not tokens.compiler._waiting


def test_patterns_that_multiply_are_bounded() -> None:
    def joined(count: int) -> dict[str, Any]:
        return {"type": "string", "allOf": [{"pattern": f"a{{{i}}}.*b"} for i in range(1, count + 1)]}

    most = limits.MAX_JOINED_PATTERNS
    assert json_schema_spec(joined(most), "x")
    chained = {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"pattern": "a", "type": "string", **({"$ref": f"#/$defs/d{i + 1}"} if i < most else {})}
            for i in range(most + 1)
        },
    }
    for schema in (joined(most + 1), chained):
        with pytest.raises(RequestError, match=f"at most {most} patterns and formats"):
            json_schema_spec(schema, "x")
    with pytest.raises(RequestError, match="more than 8 '&'"):
        grammar_spec("start: A\nA: " + " & ".join(["/a+/"] * (most + 2)), "x")


def test_anchors_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[object] = []
    real = json_schema._anchors
    monkeypatch.setattr(json_schema, "_anchors", lambda root: walks.append(root) or real(root))
    schema = {"items": [{"$ref": "#a"}] * 300, "$defs": {"a": {"$anchor": "a", "type": "string"}}}
    assert json_schema_spec(schema, "x")
    assert len(walks) == 1
    with pytest.raises(RequestError, match="at most"):
        json_schema_spec({"items": [True] * (limits.MAX_PROPERTIES + 1)}, "x")
