"""Every format, every way to cut its text: thoughts, text and calls come apart as they were put together."""

import dataclasses
import itertools
import json

import pytest
from families import AFTER, FAMILIES, TEXT, TOOLS, Family, merged, parse
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level
from tokenizers import AddedToken

from minisgl.text.detokenizer import Detokenizer
from minisgl.text.formats.events import Call, CallArguments, CallStart, Content, collect
from minisgl.text.formats.parser import new_parser
from minisgl.text.formats.table import CALL_ALIASES, CALLS, END_TOKENS, THOUGHT_ALIASES, THOUGHTS, Format
from minisgl.text.tokenizer import Tokenizer

NAMES = sorted(FAMILIES)
EXACT = {"hermes", "llama3_json", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "harmony"}
"""Rows whose arguments are JSON: they come out as they were written."""


def whole_reply(family: Family) -> str:
    return family.reply(family.message()) + family.after.format(AFTER) + family.end.rstrip()


def test_every_row_has_a_family_and_every_alias_a_row() -> None:
    assert set(FAMILIES) == {*CALLS, "harmony"}
    assert set(CALL_ALIASES.values()) <= set(FAMILIES)
    assert set(THOUGHT_ALIASES.values()) <= {*THOUGHTS, "harmony"}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_writes_is_read_back(name: str) -> None:
    family = FAMILIES[name]
    reply = collect(parse(family, [whole_reply(family)]))
    message = family.message()
    assert reply.reasoning == message.get("reasoning_content", "")
    assert reply.content == f"{TEXT}\n{AFTER}"
    assert [call.name for call in reply.calls] == [called for called, _ in family.calls]
    assert all(call.complete for call in reply.calls)
    assert [json.loads(call.arguments) for call in reply.calls] == [given for _, given in family.calls]
    if name in EXACT:
        expected = [json.dumps(given, ensure_ascii=name.startswith("deepseek")) for _, given in family.calls]
        assert [call.arguments for call in reply.calls] == expected


@pytest.mark.parametrize("name", NAMES)
def test_without_thought_and_text_only_the_calls_are_left(name: str) -> None:
    family = FAMILIES[name]
    if "{{ m.reasoning_content }}" in family.turn[:25]:
        family = family._replace(
            begin=family.begin.split("<think>")[0], turn=family.turn.partition("</think>")[2]
        )
    reply = collect(
        parse(family, [family.reply(family.message(thinks=False) | {"content": ""}) + family.end])
    )
    assert (reply.reasoning, reply.content.strip()) == ("", "")
    assert [json.loads(call.arguments) for call in reply.calls] == [given for _, given in family.calls]


@pytest.mark.parametrize("name", NAMES)
def test_character_by_character_and_at_every_place_cut_in_two(name: str) -> None:
    family = FAMILIES[name]
    text = whole_reply(family)
    expected = parse(family, [text])
    assert parse(family, text) == expected
    for cut in range(1, len(text)):
        assert parse(family, [text[:cut], text[cut:]]) == expected, (text[:cut], text[cut:])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 5000), max_size=40))
def test_random_cuts(name: str, cuts: list[int]) -> None:
    family = FAMILIES[name]
    text = whole_reply(family)
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    assert parse(family, [text[a:b] for a, b in itertools.pairwise(places)]) == parse(family, [text])


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_with_special_tokens_skipped_but_for_the_markers(name: str) -> None:
    """The tokenizer has all markers as special tokens, and the end tokens, which do not reach the text."""
    family = FAMILIES[name]
    fast = byte_level()
    special = [marker for marker in family.format.markers if len(marker) > 2 and "\n" not in marker]
    fast.add_special_tokens([AddedToken(text, special=True) for text in [*special, *END_TOKENS]])
    tokenizer = Tokenizer(fast, {})
    ids = tokenizer.encode(whole_reply(family), False)
    kept = tokenizer.special_ids(family.format.keeps)
    detokenizer = Detokenizer(tokenizer, [], kept_special=kept)
    pieces = [detokenizer.push([one]) for one in ids] + [detokenizer.finish()]
    assert parse(family, pieces) == parse(family, [whole_reply(family)])
    assert not any(tokenizer.token_text(one) in END_TOKENS for one in kept)


FRAGMENTS = [
    *(
        "<think>",
        "</think>",
        " ",
        "\n",
        "{",
        "}",
        '"',
        "\\",
        "a",
        "é",
        "[",
        "]",
        "(",
        ")",
        ",",
        ":",
        "=",
        "'",
    ),
    *(
        '{"name": "ping", "arguments": {}}',
        "ping",
        '{"city": "x}"}',
        "ping()",
        "get_weather(city='x'",
        "call:",
    ),
    *("null", "1", "\\u00e9", "}}", "<|im_end|>", "```", "<"),
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(data=st.data())
def test_of_any_nonsense_every_cut_gives_the_same(name: str, data: st.DataObject) -> None:
    family = FAMILIES[name]
    fragments = st.sampled_from([*FRAGMENTS, *family.format.markers, *family.format.markers])
    pieces = data.draw(st.lists(fragments, max_size=14))
    text = "".join(pieces)
    expected = parse(family, [text])
    assert parse(family, text) == expected
    assert parse(family, pieces) == expected
    for call in collect(expected).calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)
    if name != "harmony" and not any(token in text for token in END_TOKENS):
        without_thought = family._replace(format=dataclasses.replace(family.format, thought=None))
        for tools in ([], TOOLS):
            reply = collect(parse(without_thought, pieces, tools))
            assert reply.content == text or reply.calls, "what is no call is content as it was written"


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_cut_at_any_place_loses_no_call_that_began(name: str) -> None:
    family = FAMILIES[name]
    text = whole_reply(family)
    whole = collect(parse(family, [text]))
    for cut in range(0, len(text), 7):
        calls = collect(parse(family, [text[:cut]])).calls
        for call, full in zip(calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full == call or not call.complete
        for call, full in zip(calls[:-1], whole.calls, strict=False):
            assert call == full


@pytest.mark.parametrize("name", NAMES)
def test_a_call_of_no_tool_is_content_as_it_was_written(name: str) -> None:
    family = FAMILIES[name]
    reply = family.reply(family.message())
    events = collect(parse(family, reply, tools=TOOLS[:1]))
    assert [call.name for call in events.calls] == ["get_weather"]
    assert "run-code" in events.content
    assert "if a < b and c >" in events.content
    assert events == collect(parse(family, [reply], tools=TOOLS[:1]))


@pytest.mark.parametrize("name", NAMES)
def test_without_tools_in_the_request_every_name_may_be_called_and_with_an_empty_list_none(name: str) -> None:
    family = FAMILIES[name]
    reply = family.reply(family.message())
    assert [call.name for call in collect(parse(family, [reply], tools=None)).calls] == [
        called for called, _ in family.calls
    ]
    none = collect(parse(family, [reply], tools=[]))
    assert none.calls == ()
    assert "get_weather" in none.content


def hermes(text: str) -> tuple[str, tuple[Call, ...]]:
    reply = collect(parse(FAMILIES["hermes"], text))
    return reply.content, reply.calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "ping"}</tool_call>', "", [("ping", "{}", True)]),
        ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", [("ping", "{}", True)]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "ping"}</tool_call>', "", [("ping", '{"a": 1}', True)]),
        (
            '<tool_call>{"name":"ping","arguments":"{\\"a\\": 1}"}</tool_call>',
            "",
            [("ping", '{"a": 1}', True)],
        ),
        ('<tool_call>{"id": [1, "}"], "name": "ping", "arguments": {}}', "", [("ping", "{}", True)]),
        ('<tool_call>{"name": "p\\u0069ng", "arguments": {}}', "", [("ping", "{}", True)]),
        ('<tool_call>{"name": "ping", "arguments": {}}\n{"name": "ping"}', "", [("ping", "{}", True)] * 2),
        ('<tool_call>{"name": "ping", "arguments": {"a": }}', "", [("ping", '{"a": }', False)]),
        ('<tool_call>{"name": "ping", "arguments": {"a": 1', "", [("ping", '{"a": 1', False)]),
        ('<tool_call>{"name": "ping", "arguments": {"a": \'}}', "'}}", [("ping", '{"a": ', False)]),
        ('<tool_call>{"name": "ping", "arguments": {}} oh', "oh", [("ping", "{}", True)]),
        (
            '<tool_call>{"name": "ping", "args": {"a": 1}}',
            '<tool_call>{"name": "ping", "args": {"a": 1}}',
            [],
        ),
        (
            '<tool_call>{"name": "ping", "arguments": {"a": [}], "b": 1}}',
            '}], "b": 1}}',
            [("ping", '{"a": [', False)],
        ),
        (
            'a <tool_call>{"name": "ping", "arguments": [1]}',
            'a <tool_call>{"name": "ping", "arguments": [1]}',
            [],
        ),
        ('a <tool_call>{"name": 5} b', 'a <tool_call>{"name": 5} b', []),
        ("a <tool_call>ping</tool_call> b", "a <tool_call>ping</tool_call> b", []),
        (
            '<tool_call>{"name": "ping", "arguments": {\'a\': 1}}',
            '<tool_call>{"name": "ping", "arguments": {\'a\': 1}}',
            [],
        ),
        ('<tool_call>{"name": "pi', '<tool_call>{"name": "pi', []),
        ("<tool_call>", "<tool_call>", []),
        ("<tool_cal", "<tool_cal", []),
        ("a <|im_end|> b <|im_end|>\n<|endoftext|>", "a <|im_end|> b ", []),
        (" \n a \n", " \n a \n", []),
    ],
)
def test_broken_calls_and_odd_ones(text: str, content: str, calls: list[tuple[str, str, bool]]) -> None:
    assert hermes(text) == (content, tuple(Call(*call) for call in calls))


def test_more_odd_texts_of_other_formats() -> None:
    def calls_of(name: str, text: str) -> tuple[str, list[tuple[str, str]]]:
        reply = collect(parse(FAMILIES[name], text))
        assert reply == collect(parse(FAMILIES[name], [text]))
        return reply.content, [(call.name, call.arguments) for call in reply.calls]

    assert calls_of("llama3_json", '{"x": 1} and {"name": 2}') == ('{"x": 1} and {"name": 2}', [])
    assert calls_of(
        "llama3_json", '<|python_tag|>{"type": "function", "name": "ping", "parameters": {}}<|eom_id|>'
    ) == (
        "",
        [("ping", "{}")],
    )
    assert calls_of(
        "mistral", '[TOOL_CALLS] ping[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]ping[ARGS]{}'
    ) == (
        "",
        [("ping", '{"a": 1}'), ("ping", "{}")],
    )
    assert calls_of("mistral_args", '[TOOL_CALLS][{"name": "ping", "arguments": {}}]') == (
        "",
        [("ping", "{}")],
    )
    assert calls_of("qwen3_coder", "x</think><function=ping>\n</function>\n</tool_call> b") == (
        "b",
        [("ping", "{}")],
    )
    assert calls_of("glm45", "<tool_call>ping</tool_call>") == ("", [("ping", "{}")])
    assert calls_of(
        "glm45", "<tool_call>get_weather<arg_key>days</arg_key><arg_value>many</arg_value></tool_call>"
    ) == (
        "",
        [("get_weather", '{"days": "many"}')],
    )
    assert calls_of("pythonic", "<|python_start|>[ping()]<|python_end|> [ping()") == (
        "",
        [("ping", "{}")] * 2,
    )
    assert calls_of("pythonic", 'See [1], [ping] and [ping("x")].') == (
        'See [1], [ping] and [ping("x")].',
        [],
    )
    assert calls_of("gemma4", "<|tool_call>call:get_weather{city:Paris,days:0}<tool_call|>") == (
        "",
        [("get_weather", '{"city": "Paris", "days": 0}')],
    )
    assert calls_of("harmony", "Just text.") == ("Just text.", [])
    assert calls_of("harmony", "<|channel|>commentary to=functions.ping<|message|><|call|>") == (
        "",
        [("ping", "{}")],
    )


def test_a_marker_inside_an_argument_ends_nothing() -> None:
    for name, text in {
        "hermes": '<tool_call>\n{"name": "run-code", "arguments": {"code": "</tool_call>"}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "run-code", "arguments": {"code": "[TOOL_CALLS]]"}}]',
        "deepseek_v31": "</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run-code<｜tool▁sep｜>"
        '{"code": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "harmony": ' to=functions.run-code<|channel|>commentary json<|message|>{"code": "<|call|>"}<|call|>',
        "qwen3_coder": "</think><tool_call>\n<function=run-code>\n<parameter=code>\n</function></tool_call>\n"
        "</parameter>\n</function>\n</tool_call>",
        "olmo3": "</think><function_calls>\nrun-code(code='</function_calls>)')\n</function_calls>",
    }.items():
        reply = collect(parse(FAMILIES[name], text))
        assert reply.content == ""
        (call,) = reply.calls
        assert call.complete
        assert len(json.loads(call.arguments)["code"]) >= 8


def test_a_thought_is_one_only_at_the_begin_and_only_if_the_prompt_has_not_closed_it() -> None:
    form = Format(name="x", thought=THOUGHTS["think"])

    def run(prompt: str, text: str) -> tuple[str, str]:
        parser = new_parser(form, prompt=prompt)
        reply = collect([event for char in text for event in parser.feed(char)] + parser.finish())
        return reply.reasoning, reply.content

    assert run("a", "<think>b</think>c") == ("b", "c")
    assert run("a", " \n<think>\n b </think>\n\nc\n") == ("b", "c\n")
    assert run("a<think>\n", "b</think>c") == ("b", "c")
    assert run("a<think>\n", "<think>b</think>c") == ("b", "c")
    assert run("a<think>\n", "b is cut \n") == ("b is cut", "")
    assert run("a<think>\n\n</think>\n\n", "b <think>c</think>") == ("", "b <think>c</think>")
    assert run("a", "what is <think>?") == ("", "what is <think>?")
    assert run("a<think>", "</think>c") == ("", "c")


def test_only_what_may_belong_to_a_marker_is_held_back() -> None:
    parser = new_parser(FAMILIES["hermes"].format, tools=TOOLS)
    assert parser.feed("Hello ") == [Content("Hello")]
    assert parser.feed("you <") == [Content(" you")]
    assert parser.feed("b> <tool_") == [Content(" <b>")]
    assert parser.feed("box>") == [Content(" <tool_box>")]
    assert parser.feed('\n<tool_call>\n{"name": "ping", "arguments": {') == []  # it may be no object
    assert parser.feed('"') == [CallStart(0, "ping"), CallArguments(0, '{"')]
    text = 'a": [1, "}"], "b": "\\u00e9'
    for char in text:
        assert parser.feed(char) == [CallArguments(0, char)]


def test_text_of_a_string_between_tags_is_written_as_it_arrives() -> None:
    parser = new_parser(FAMILIES["qwen3_coder"].format, prompt="</think>", tools=TOOLS)
    parser.feed("<tool_call>\n<function=run-code>\n<parameter=code>\n")
    assert merged(parser.feed('say "hi"')) == [CallArguments(0, 'say \\"hi\\"')]
    assert parser.feed("\n") == []
    assert parser.feed("x</para") == [CallArguments(0, "\\nx")]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_does_not_grow_with_the_reply(name: str) -> None:
    family = FAMILIES[name]
    reply = family.reply(family.message())
    places = [reply.index(mark) for mark in ("{no}", "look", "c >") if mark in reply]
    for text in ("some words ", "x<y {z} ", " \n"):
        parser = new_parser(family.format, prompt=family.begin, tools=TOOLS)
        for start, end in itertools.pairwise([0, *places, len(reply)]):
            parser.feed(reply[start:end])
            for _ in range(300 if end < len(reply) else 0):
                parser.feed(text)
                assert len(parser._reader.text) < 80
        assert len(collect(parser.finish()).calls) <= 1
