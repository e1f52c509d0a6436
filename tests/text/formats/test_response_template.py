"""Templates of models against transformers' own parser, and those that are refused by name."""

import itertools
import json
from typing import Any

import pytest
from families import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import ResponseParser

from minisgl.errors import ModelError
from minisgl.text.formats.events import Reply, collect
from minisgl.text.formats.parser import new_parser
from minisgl.text.formats.patterns import Delimiter
from minisgl.text.formats.response_template import load_response_template

BY_MODEL = {types[0]: template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items()}
QWEN, QWEN_XML, GEMMA = BY_MODEL["qwen2"], BY_MODEL["qwen3_5"], BY_MODEL["gemma4"]
HARMONY_LIKE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
        "content": {"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)[^<]*"
            r"(?:<\|constrain\|>json)?<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
LISTED = {
    "start_anchor_pattern": r"\[/INST\]",
    "fields": {
        "content": {"close_pattern": "</s>|$"},
        "tool_calls": {
            "open": "[TOOL_CALLS]",
            "close": "</s>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
    },
}
JSON_KEYS = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "reasoning": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open_pattern": r"<call id=\d{2,3}>",
            "close_pattern": r"\s*</call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.tool}", "arguments": "{content.input}"}},
        },
    },
}
XML = (
    "\n<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln <b> {x\n</parameter>"
    "\n<parameter=days>\n3\n</parameter>\n<parameter=note>\nnull\n</parameter>"
    '\n<parameter=opts>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>'
)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "all": (
        QWEN,
        "<|im_start|>assistant\n",
        "<think>\nhm {no}\n</think>\n\nHi <b>.\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "a } x\\u00e9"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n<|endoftext|>',
    ),
    "prompt in a thought": (QWEN, "<|im_start|>assistant\n<think>\n", "hm\n</think>\n\nHi.<|im_end|>"),
    "closed thought": (QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi <thin"),
    "plain": (QWEN, "<|im_start|>assistant\n", " Hi there <b> </b>\n\n"),
    "tags": (
        QWEN_XML,
        "<|im_start|>assistant\n<think>\n",
        f"hm\n</think>\n\nHi.\n{XML}{XML}<|im_end|>\n<|endoftext|>",
    ),
    "no arguments": (
        QWEN_XML,
        "<|im_start|>assistant\n",
        "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    ),
    "gemma": (
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nhm\n<channel|>hi <|tool_call>call:get_weather{city:<|"|>x} "y"<|"|>,'
        "days:-3,flag:true,"
        'opts:{k:[1.5,<|"|>z<|"|>,{q:null}]}}<tool_call|><|tool_call>call:ping{}<tool_call|><turn|>',
    ),
    "harmony": (
        HARMONY_LIKE,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.ping <|constrain|>json"
        '<|message|>{"a": {"b": "}"}}<|call|><|start|>assistant<|channel|>final<|message|> Done.\n<|return|>',
    ),
    "list": (
        LISTED,
        "[INST]x[/INST]",
        'Hi[TOOL_CALLS] [{"name": "ping", "arguments": {}}, {"arguments": {"a": 1}, "name": "b"}]</s>',
    ),
    "keys": (JSON_KEYS, "A:", '<t> x</t>\nHi<call id=12>{"tool": "ping", "input": {"a": "<"}}\n</call>'),
}


def ours(template: dict[str, Any], prompt: str, pieces: list[str] | str) -> Reply:
    parser = new_parser(
        load_response_template(template), prompt=prompt, tools=None if template is LISTED else TOOLS
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collect([*events, *parser.finish()])


def theirs(template: dict[Any, Any], prompt: str, text: str) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = ResponseParser(template, prefix=prompt, tools=[*TOOLS])
    parser.feed(text)
    message, _ = parser.finalize()
    calls = message.get("tool_calls", [])
    thought = next(
        (message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message), ""
    )
    if template is LISTED:
        assert isinstance(calls, list)
    return (
        thought,
        message.get("content", ""),
        [(one["function"]["name"], one["function"]["arguments"]) for one in calls],
    )


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_reply_is_the_one_that_transformers_reads(name: str) -> None:
    template, prompt, text = CASES[name]
    reply = ours(template, "before" + prompt, [text])
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    assert (reply.reasoning, reply.content, calls) == theirs(template, "before" + prompt, text)
    assert all(call.complete for call in reply.calls)


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_every_cut_gives_the_same(name: str, cuts: list[int]) -> None:
    template, prompt, text = CASES[name]
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    whole = ours(template, prompt, [text])
    assert ours(template, prompt, [text[a:b] for a, b in itertools.pairwise(places)]) == whole
    assert ours(template, prompt, text) == whole


def test_what_transformers_refuses_is_content_or_incomplete() -> None:
    prompt = "<|im_start|>assistant\n"
    reply = ours(QWEN, prompt, 'a <tool_call>{"name": "ping"</tool_call> b')
    assert (reply.content, reply.calls) == ('a <tool_call>{"name": "ping"</tool_call> b', ())
    reply = ours(
        QWEN, prompt, 'a <tool_call>{"name": "ping", "arguments": {"a": "</tool_call>"}}</tool_call> b'
    )
    assert (reply.content, reply.calls[0].arguments) == ("a\nb", '{"a": "</tool_call>"}')
    reply = ours(QWEN, prompt, 'a <tool_call>{"name": "nobody", "arguments": {}}</tool_call> b')
    assert (reply.content, reply.calls) == (
        'a <tool_call>{"name": "nobody", "arguments": {}}</tool_call> b',
        (),
    )
    reply = ours(QWEN_XML, prompt, "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo")
    assert [(call.arguments, call.complete) for call in reply.calls] == [('{"city": "Ro', False)]


def changed(**field: Any) -> dict[str, Any]:
    calls = {
        "open": "<c>",
        "close": "</c>",
        "content": "json",
        "transform": {"function": "{content}"},
    } | field
    return {"start_anchor": "A", "fields": {"content": {}, "tool_calls": calls}}


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (5, "it must be an object"),
        ({"version": 2}, "version 2"),
        ({"start_anchor": "A", "fields": {"content": {}}, "extra": 1}, "'extra'"),
        ({"fields": {"content": {}}}, "start_anchor"),
        ({"start_anchor": "A", "fields": {}}, "fields"),
        ({"start_anchor": "A", "fields": {"content": {}, "thinking": {}}}, "only one may have no open"),
        ({"start_anchor": "A", "fields": {"mood": {}}}, "fields.mood"),
        ({"start_anchor": "A", "fields": {"content": {"content": "json"}}}, "fields.content"),
        ({"start_anchor": "A", "fields": {"content": {"content_args": {"strip": False}}}}, "fields.content"),
        ({"start_anchor": "A", "fields": {"content": {"colour": 1}}}, "'colour'"),
        (changed(content="kv-lines"), "'kv-lines'"),
        (changed(content_args={"allow_non_json": True}), "'allow_non_json'"),
        (changed(open=None, open_pattern="a(?=b)"), r"(?=b"),
        (changed(open=None, open_pattern=r"(a)\1"), r"\1"),
        (changed(open=None, open_pattern="a(b"), "not valid"),
        (changed(open="a", open_pattern="a"), "open must be"),
        (changed(transform={"function": {"name": "{who}", "arguments": "{content}"}}), "'who'"),
        (changed(transform="{content.x}"), "transform"),
        (
            changed(content="xml-inline", transform={"function": {"name": "f", "arguments": "{content}"}}),
            "tag_pattern",
        ),
        (
            changed(
                content_args={"string_delims": [["<", ">"]]},
                transform={"function": {"name": "f", "arguments": "{content}"}},
            ),
            "string_delims",
        ),
    ],
)
def test_what_we_lack_is_refused_by_name(template: Any, named: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_response_template(template)
    assert named in str(caught.value)
    assert "--tool-parser" in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"\s*<a>",
            r"<a(?P<n>[^>]+)>",
            r"(?:ab|abc)d?",
            r"a{2,3}b",
            r"x.*?y",
            r"\{[]x\]]\}",
            r"a+?b|$",
            r"ab*",
        ),
        *(r"(a|b)+c\Z", r"[^\n]\n"),
    ],
)
@settings(max_examples=60)
@given(text=st.text("ab<>c{}x]y \n", max_size=14))
def test_a_pattern_is_found_at_the_same_place_however_the_text_is_cut(pattern: str, text: str) -> None:
    def find(pieces: list[str]) -> list[str]:
        delimiter, seen, at, found = Delimiter(pattern=pattern), "", 0, []
        for rank, piece in enumerate(pieces):
            seen += piece
            while True:
                hit = delimiter.search(seen, at, rank == len(pieces) - 1)
                if hit.match is None or not hit.match[0]:
                    break
                found.append(f"{hit.match.start()}{hit.match[0]}")
                at = hit.match.end()
            at = max(at, min(hit.pending, len(seen)))
        return found

    assert find([*text, ""]) == find([text, ""]) == find([text])
