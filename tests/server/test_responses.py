"""POST /v1/responses: bodies as agents send them, and the openai client and its types on the answers."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from running_server import RunningServer
from tool_model import ARGUMENTS, PARAMETERS, REPLY, make_tool_model

from minisgl.errors import RequestError
from minisgl.replies.tools import MAX_TOOLS
from minisgl.server.apis.responses import ResponseCall, parse_response
from minisgl.server.calls.turns import Turns
from minisgl.server.served_model import ServedModel, load_served_model

EVENTS: Any = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
TIME = {"type": "function", "name": "get_time", "description": "The time."}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]
THOUGHT_EVENTS = [name.replace("output_text", "reasoning_text") for name in TEXT_EVENTS[2:8]]
CALL_EVENTS = [
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(make_tool_model(tmp_path_factory.mktemp("responses") / "model")) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = make_tool_model(tmp_path_factory.mktemp("served") / "model")
    return load_served_model(folder, "tiny")


def parse(served: ServedModel, **fields: Any) -> ResponseCall:
    return parse_response(json.dumps({"input": "hello", **fields}).encode(), served)


def whole(server: RunningServer, text: str, **fields: Any) -> dict[str, Any]:
    """The answer's JSON, which must be what OpenAI's types say."""
    status, answer, _ = server.call("/v1/responses", {"model": "tiny", "input": text, **fields})
    assert status == 200, answer
    Response.model_validate(answer, strict=True)
    return answer


def streamed(server: RunningServer, text: str, **fields: Any) -> list[Any]:
    """The events, each of which must be what OpenAI's types say."""
    with server.client() as client:
        events = list(client.responses.create(model="tiny", input=text, stream=True, **fields))
    for number, event in enumerate(events):
        EVENTS.validate_python(event.model_dump(exclude_unset=True))
        assert event.sequence_number == number
    return events


def names(events: list[Any]) -> list[str]:
    """The events' names, with deltas in a row as one."""
    found = [event.type for event in events]
    return [
        name
        for before, name in zip([None, *found], found, strict=False)
        if name != before or not name.endswith(".delta")
    ]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_a_text_becomes_one_message(server: RunningServer) -> None:
    answer = whole(server, "@say hello world", metadata={"a": "b"}, user="me", temperature=0.5)
    assert answer["object"] == "response"
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    (message,) = answer["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [
        {"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}
    ]
    repeated = {"metadata": {"a": "b"}, "user": "me", "temperature": 0.5, "store": False, "tools": []}
    assert {name: answer[name] for name in repeated} == repeated
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert whole(server, "@cached hello")["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_the_client_reads_the_text(server: RunningServer) -> None:
    with server.client() as client:
        answer = client.responses.create(model="tiny", input="@say hello world", store=False)
        assert answer.output_text == "hello world"
        with client.responses.stream(model="tiny", input="@say hello world") as stream:
            events = list(stream)
            assert stream.get_final_response().output_text == "hello world"
        assert events[-1].type == "response.completed"


def test_a_text_has_every_event_once_and_in_order(server: RunningServer) -> None:
    events = streamed(server, "@say hello world")
    assert names(events) == TEXT_EVENTS
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == "hello world"
    assert next(event for event in events if event.type == "response.output_text.done").text == "hello world"
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert names(streamed(server, "@say ")) == [*TEXT_EVENTS[:4], *TEXT_EVENTS[5:]]


@pytest.mark.parametrize("how", ["say", "burst", "chars"])
def test_thought_text_and_calls_are_items(server: RunningServer, how: str) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, TIME]}
    answer = whole(server, f"@{how} {REPLY}", **fields)
    thought, message, weather, time = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm, {a}"}]
    assert message["content"][0]["text"] == "Let me see."
    assert (weather["name"], weather["arguments"], weather["status"]) == (
        "get_weather",
        ARGUMENTS,
        "completed",
    )
    assert (time["name"], time["arguments"]) == ("get_time", "{}")
    assert weather["call_id"] != time["call_id"]
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    assert answer["tools"][1]["description"] == "The time."

    events = streamed(server, f"@{how} {REPLY}", **fields)
    assert names(events) == [
        *TEXT_EVENTS[:2],
        *THOUGHT_EVENTS,
        *TEXT_EVENTS[2:8],
        *CALL_EVENTS,
        *CALL_EVENTS,
        "response.completed",
    ]
    last = events[-1].response
    assert without_ids(last.model_dump(exclude_unset=True)["output"]) == without_ids(answer["output"])
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done] == [item.id for item in last.output]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.output]
    for index, item in enumerate(last.output):
        parts = [event for event in events if getattr(event, "item_id", None) == item.id]
        assert {part.output_index for part in parts} == {index}
        text = "".join(part.delta for part in parts if part.type.endswith(".delta"))
        assert text == (item.arguments if item.type == "function_call" else item.content[0].text)


def test_an_answer_that_is_cut_is_incomplete(server: RunningServer) -> None:
    answer = whole(server, "@say hello world", max_output_tokens=1)
    assert (answer["status"], answer["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert answer["output"][0]["status"] == "incomplete"
    *_, last = streamed(server, "@say hello world", max_output_tokens=1)
    assert last.type == "response.incomplete"
    assert last.response.max_output_tokens == 1
    reply = REPLY.partition("好")[0]
    call = streamed(server, f"@say {reply}", tools=[WEATHER])[-1].response.output[-1]
    assert (call.name, call.status) == ("get_weather", "incomplete")


def test_an_error_in_the_stream_is_its_last_event(server: RunningServer) -> None:
    events = streamed(server, "@spoil hello world")
    assert names(events) == [*TEXT_EVENTS[:5], "response.failed"]
    failed = events[-1].response
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "server_error", "all NaN")


def test_errors_are_openais(server: RunningServer) -> None:
    with server.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="tiny", input="hello", store=True)
        assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="other", input="hello")
        with pytest.raises(openai.NotFoundError, match="stores nothing"):
            client.responses.retrieve("resp_1")


def test_items_become_turns(served: ServedModel) -> None:
    given = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"role": "system", "content": "in French"},
        {"role": "user", "content": "c"},
    ]
    call = parse(served, input=given, instructions="You help.")
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert call.conversation.messages == [
        {"role": "system", "content": "You help.\n\nbe brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "one", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": "two", "name": "g"},
        {"role": "system", "content": "in French"},
        {"role": "user", "content": "c"},
    ]
    assert parse(served).conversation.messages == [{"role": "user", "content": "hello"}]


def test_late_instructions_stay_where_they_are() -> None:
    for late_system in (True, False):
        turns = Turns("", late_system)
        turns.add_system("be brief")
        turns.add_system("")
        turns.add_user("a")
        turns.add_reply("b")
        turns.add_system("in French")
        turns.add_user("c")
        turns.add_user("d")
        late = [{"role": "system", "content": "in French"}, {"role": "user", "content": "c"}]
        assert turns.messages() == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            *(late if late_system else [{"role": "user", "content": "in French\n\nc"}]),
            {"role": "user", "content": "d"},
        ]


def test_an_answers_items_can_be_sent_back(server: RunningServer, served: ServedModel) -> None:
    answer = whole(server, f"@say {REPLY}", tools=[WEATHER, TIME])
    given = [{"role": "user", "content": "hi"}, *answer["output"]]
    _, turn = parse(served, input=given).conversation.messages
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "hm, {a}")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["get_weather", "get_time"]


def test_tools_that_openai_runs_are_left_out(served: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    others: list[Any] = [
        {"type": "web_search"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        {"type": "namespace", "name": "n", "tools": [WEATHER]},
    ]
    with caplog.at_level(logging.DEBUG, logger="minisgl"):
        call = parse(served, tools=[*others, WEATHER])
    assert [tool.name for tool in call.conversation.asked.tools] == ["get_weather"]
    assert [tool["name"] for tool in call.echo["tools"]] == ["get_weather"]
    assert 'tools[1] of type "custom" is left out' in caplog.text
    assert not parse(served, tools=others, tool_choice="auto").conversation.asked.told


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True, ["get_weather", "get_time"])),
        ("none", ("none", True, ["get_weather", "get_time"])),
        ("required", ("required", True, ["get_weather", "get_time"])),
        ({"type": "function", "name": "get_time"}, ("required", False, ["get_time"])),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "get_weather"}],
            },
            ("auto", True, ["get_weather"]),
        ),
    ],
)
def test_tool_choices(served: ServedModel, choice: Any, expected: Any) -> None:
    asked = parse(served, tools=[WEATHER, TIME], tool_choice=choice).conversation.asked
    assert (asked.choice, asked.parallel, [tool.name for tool in asked.allowed]) == expected
    assert not parse(served, tools=[TIME], parallel_tool_calls=False).conversation.asked.parallel


def test_text_formats(served: ServedModel) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}, "strict": True}
    grammar = parse(served, text={"format": schema}).options.params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.where) == ("json_schema", "text.format.schema")
    free = parse(served, text={"format": {"type": "json_object"}}).options.params.grammar
    assert free is not None
    assert parse(served, text={"format": {"type": "text"}}).options.params.grammar is None
    assert parse(served, text={"format": schema}).echo["text"] == {"format": schema}


def test_effort_sets_the_templates_variables(served: ServedModel) -> None:
    call = parse(served, reasoning={"effort": "none", "summary": "auto"})
    assert call.conversation.template_variables == {"enable_thinking": False}
    assert call.echo["reasoning"] == {"effort": "none", "summary": None}


def test_what_changes_no_answer_is_ignored(served: ServedModel) -> None:
    ignored = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "stream_options": {"include_obfuscation": False},
        "previous_response_id": None,
    }
    assert parse(served, **ignored) == parse(served)


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a"]}, "input[0]"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input[1]"),
        ({"input": [USER, {"type": "computer_call"}]}, "input[1].type"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"messages": [USER]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"shape": 1}}, "text.shape"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"tools": [{**TIME, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TIME, TIME]}, "tools[1].name"),
        ({"tools": [{**TIME, "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [TIME] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_is_refused(served: ServedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(served, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
