"""Conversations with calls: what templates want of them, and what they refuse."""

import json
from typing import Any

import pytest

from minisgl.errors import RequestError
from minisgl.text.chat_template import ChatTemplate
from minisgl.text.history import Habits, short_id
from minisgl.text.messages import normalize_messages

ARGUMENTS = '{"city":  "Köln", "days": 3}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]
EACH_CALL = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"
TEMPLATES = {
    "object": EACH_CALL + "<{{ c.function.name }}:{{ c.function.arguments | tojson }}>" + END,
    "items": EACH_CALL
    + "<{{ c.function.name }}:{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}>"
    + END,
    "text": EACH_CALL + "{{ '<' + c.function.name + ':' + c.function.arguments + '>' }}" + END,
    "shown": EACH_CALL + "<{{ c.function.name }}:{{ c.function.arguments }}>" + END,
    "none": "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<' + c.function.name + ':' + c.function.arguments + '>' }}{% endfor %}{% else %}{{ m.content }}"
    "{% endif %}{% endfor %}",
    "nine": "{% for m in messages %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('9!') }}"
    "{% endif %}{{ c.id }}:{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}",
}
AS_OBJECT = '{"city": "Köln", "days": 3}'


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("object", f"Hi<weather:{AS_OBJECT}>rain"),
        ("items", "Hi<weather:city=Köln;days=3;>rain"),
        ("text", f"Hi<weather:{ARGUMENTS}>rain"),
        ("shown", f"Hi<weather:{ARGUMENTS}>rain"),
        ("none", f"Hi<weather:{ARGUMENTS}>rain"),
        ("nine", f"{short_id('call_1')}:weather{AS_OBJECT}{short_id('call_1')}"),
    ],
)
def test_calls_are_written_as_the_template_wants_them(name: str, expected: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    assert template.render(normalize_messages(CONVERSATION), False) == expected
    given = [dict(message) for message in CONVERSATION]
    given[1] = {
        **given[1],
        "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": json.loads(ARGUMENTS)}}],
    }
    if name in ("object", "items"):
        assert template.render(normalize_messages(given), False) == expected


def test_a_template_that_drops_calls_is_refused_for_conversations_with_calls_only() -> None:
    for source in ("{% for m in messages %}{{ m.content }}{% endfor %}", "{{ raise_exception('no') }}"):
        template = ChatTemplate(source, {})
        with pytest.raises(RequestError, match="can't write tool calls") as caught:
            template.render(normalize_messages(CONVERSATION))
        assert caught.value.status == 400
    assert ChatTemplate("{{ messages[0].content }}", {}).render(normalize_messages(CONVERSATION[:1])) == "Hi"


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    template = ChatTemplate(
        "{% if tools %}{{ tools[0].function.name }}{% else %}{{ tools is none }}{% endif %}", {}
    )
    assert template.writes_tools
    assert template.render(CONVERSATION[:1], tools=tools) == "weather"
    assert template.render(CONVERSATION[:1], tools=[]) == template.render(CONVERSATION[:1]) == "True"
    assert not ChatTemplate("{{ messages }}", {}).writes_tools
    assert not ChatTemplate("{{ raise_exception('no') }}", {}).writes_tools


def test_short_ids_are_the_same_for_the_same_id() -> None:
    assert short_id("abcdefgh1") == "abcdefgh1"
    ids = [short_id(f"call_{rank}") for rank in range(100)]
    assert len(set(ids)) == 100
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert short_id("call_7") == ids[7]
    assert ChatTemplate(TEMPLATES["nine"], {})._habits == Habits(False, False, True)


def test_messages_with_calls_come_out_in_one_form() -> None:
    given = [
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "because"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}],
            "tool_calls": [CALL, {**CALL, "index": 1, "type": None}],
        },
        {"role": "assistant", "content": "x", "tool_calls": [], "reasoning": "b", "reasoning_content": "c"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": " "}}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"é": 1}}}],
        },
    ]

    def call(arguments: str) -> dict[str, Any]:
        return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}

    assert normalize_messages(given) == [
        {"role": "assistant", "content": "", "reasoning_content": "because", "tool_calls": [CALL]},
        {"role": "assistant", "content": "a", "tool_calls": [CALL, CALL]},
        {"role": "assistant", "content": "x", "reasoning_content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call("{}")]},
        {"role": "assistant", "content": "", "tool_calls": [call('{"é": 1}')]},
    ]


def with_function(**fields: Any) -> list[Any]:
    return [CALL, {"id": "b", "function": {"name": "f", "arguments": "{}", **fields}}]


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ("x", ""),
        ({"id": "a"}, ""),
        (5, ""),
        ([CALL, 5], "[1]"),
        ([CALL, {"function": CALL["function"]}], "[1].id"),
        ([CALL, {"id": 5, "function": CALL["function"]}], "[1].id"),
        ([CALL, {"id": "", "function": CALL["function"]}], "[1].id"),
        ([CALL, {"id": "a"}], "[1].function"),
        ([CALL, {"id": "a", "function": "f"}], "[1].function"),
        ([CALL, {**CALL, "type": "custom"}], "[1].type"),
        ([CALL, {**CALL, "colour": "red"}], "[1].colour"),
        (with_function(name=None), "[1].function.name"),
        (with_function(name=""), "[1].function.name"),
        (with_function(arguments=None), "[1].function.arguments"),
        (with_function(arguments=5), "[1].function.arguments"),
        (with_function(arguments="{"), "[1].function.arguments"),
        (with_function(arguments="[1]"), "[1].function.arguments"),
        (with_function(arguments='{"a": ' * 5000), "[1].function.arguments"),
        (with_function(arguments={"a": float("nan")}), "[1].function.arguments"),
        (with_function(colour="red"), "[1].function.colour"),
    ],
)
def test_a_bad_call_is_a_400_that_names_the_place(calls: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert (caught.value.status, caught.value.param) == (400, f"messages[0].tool_calls{place}")
    assert len(caught.value.message) < 250


def test_only_the_assistant_has_calls_and_only_with_calls_it_needs_no_content() -> None:
    for message, param in (
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
    ):
        with pytest.raises(RequestError) as caught:
            normalize_messages([message])
        assert caught.value.param == param
