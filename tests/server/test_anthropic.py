"""POST /v1/messages and its count_tokens: what Anthropic's clients send, answers, events and errors."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_server import LIMIT_S, RunningServer
from tool_model import ARGUMENTS, PARAMETERS, REPLY, make_tool_model

from minisgl.errors import RequestError
from minisgl.server.apis.messages import MessagesCall, parse_count, parse_messages
from minisgl.server.apis.messages_answer import MessageAnswer
from minisgl.server.served_model import ServedModel, load_served_model

WEATHER = {"name": "get_weather", "input_schema": PARAMETERS}
TIME = {"name": "get_time", "description": "The time.", "input_schema": {"type": "object"}}
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_model(tmp_path_factory.mktemp("messages") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return load_served_model(folder, "tiny")


def parse(served: ServedModel, **fields: Any) -> MessagesCall:
    return parse_messages(json.dumps({"messages": [USER], "max_tokens": 9, **fields}).encode(), served)


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 1000, "messages": [{"role": "user", "content": text}], **fields}


def whole(server: RunningServer, text: str, **fields: Any) -> dict[str, Any]:
    status, answer, _ = server.call("/v1/messages", body(text, **fields))
    assert status == 200, answer
    msgspec.convert(answer, MessageAnswer)
    return answer


def streamed(server: RunningServer, text: str, **fields: Any) -> list[dict[str, Any]]:
    """The events' data; each has its type as its name."""
    data = json.dumps(body(text, stream=True, **fields)).encode()
    headers = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
    request = urllib.request.Request(server.url("/v1/messages"), data, headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        events = answer.read().decode().removesuffix("\n\n").split("\n\n")
    found = []
    for event in events:
        name, _, line = event.partition("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream. Blocks come one after the other."""
    first, *middle, end, last = events
    assert (first["type"], end["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    answer = first["message"]
    assert (answer["content"], answer["stop_reason"]) == ([], None)
    is_open, text = False, ""
    for event in middle:
        kind, content = event["type"], answer["content"]
        assert event["index"] == len(content) - (kind != "content_block_start")
        assert is_open == (kind != "content_block_start")
        match kind:
            case "content_block_start":
                content.append(event["content_block"])
                is_open, text = True, ""
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "input_json_delta":
                    text += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    content[-1][field] += delta[field]
            case _:
                assert kind == "content_block_stop"
                is_open = False
                if text:
                    content[-1]["input"] = json.loads(text)
    assert not is_open
    return answer | end["delta"] | {"usage": end["usage"]}


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in answer["content"]]
    return {**answer, "id": "", "content": content}


def test_a_text_becomes_one_block(server: RunningServer) -> None:
    answer = whole(server, "@say hello world")
    assert answer["content"] == [{"type": "text", "text": "hello world"}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert whole(server, "@say ")["content"] == []


@pytest.mark.parametrize("how", ["say", "burst", "chars"])
def test_thought_text_and_calls_are_blocks(server: RunningServer, how: str) -> None:
    answer = whole(server, f"@{how} {REPLY}", tools=[WEATHER, TIME])
    thought, text, weather, time = answer["content"]
    assert thought == {"type": "thinking", "thinking": "hm, {a}", "signature": ""}
    assert text["text"] == "Let me see."
    assert (weather["name"], weather["input"]) == ("get_weather", json.loads(ARGUMENTS))
    assert (time["name"], time["input"]) == ("get_time", {})
    assert weather["id"].startswith("toolu_")
    assert weather["id"] != time["id"]
    assert answer["stop_reason"] == "tool_use"
    usage = answer["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("how", ["say", "burst", "chars"])
@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 20}, {"stop_sequences": ["see"]}, {"thinking": {"type": "disabled"}}]
)
def test_a_stream_adds_up_to_the_whole_answer(
    server: RunningServer, how: str, fields: dict[str, Any]
) -> None:
    asked = {"tools": [WEATHER, TIME], **fields}
    events = streamed(server, f"@{how} {REPLY}", **asked)
    answer = whole(server, f"@{how} {REPLY}", **asked)
    assert without_ids(put_together(events)) == without_ids(answer)


def test_the_stop_sequence_that_ended_the_answer_is_named(server: RunningServer) -> None:
    for how in ("say", "burst"):
        answer = whole(server, f"@{how} hello world", stop_sequences=["xyz", "o w", "ld"])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "o w")
        assert answer["content"][0]["text"] == "hell"


def test_the_limit_that_ended_the_answer_is_named(server: RunningServer) -> None:
    assert whole(server, "@say hello world", max_tokens=1)["stop_reason"] == "max_tokens"
    # Prompt and answer together fill the context of 4096 tokens.
    filled = whole(server, "@burst " + "hello " * 2500, max_tokens=4096)
    assert filled["stop_reason"] == "model_context_window_exceeded"
    assert filled["usage"]["input_tokens"] + filled["usage"]["output_tokens"] == 4096


@pytest.mark.parametrize(("max_tokens", "reason"), [(1000, "end_turn"), (60, "max_tokens")])
def test_a_call_that_breaks_off_is_not_shown_as_whole(
    server: RunningServer, max_tokens: int, reason: str
) -> None:
    text = '@chars <tool_call>\n{"name": "get_weather", "arguments": {"city": "R' + "o" * 40
    answer = whole(server, text, tools=[WEATHER], max_tokens=max_tokens)
    assert answer["stop_reason"] == reason
    [block] = answer["content"]
    assert (block["type"], block["name"], block["input"].keys()) == (
        "tool_use",
        "get_weather",
        {"INVALID_JSON"},
    )
    events = streamed(server, text, tools=[WEATHER], max_tokens=max_tokens)
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    written = "".join(piece["partial_json"] for piece in pieces)
    assert written == block["input"]["INVALID_JSON"]
    assert written.startswith('{"city": "Ro')
    assert events[-2]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_turn_without_blocks_is_empty_text(server: RunningServer, served: ServedModel, role: str) -> None:
    turns = [USER, {"role": role, "content": []}, *([USER] if role == "assistant" else [])]
    same = [USER, {"role": role, "content": ""}, *([USER] if role == "assistant" else [])]
    assert parse(served, messages=turns) == parse(served, messages=same)
    alone = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": []}]}
    assert server.call("/v1/messages", alone)[0] == 200
    for turn in ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, SYSTEM):
        with pytest.raises(RequestError, match="a turn of the user"):
            parse(served, messages=[turn])


def test_cached_tokens_are_no_input_tokens(server: RunningServer) -> None:
    count = server.call("/v1/messages/count_tokens", {"messages": body("@cached hello")["messages"]})
    assert count[0] == 200
    num_tokens = count[1]["input_tokens"]
    usage = whole(server, "@cached hello")["usage"]
    assert usage["cache_read_input_tokens"] == num_tokens // 2
    assert usage["input_tokens"] == num_tokens - num_tokens // 2
    assert usage["cache_creation_input_tokens"] == 0
    assert put_together(streamed(server, "@cached hello"))["usage"] == usage


def test_tokens_are_counted_as_the_call_has_them(server: RunningServer) -> None:
    prompt = {**body("@say ok"), "tools": [WEATHER], "system": "be brief"}
    usage = whole(server, "@say ok", tools=[WEATHER], system="be brief")["usage"]
    del prompt["max_tokens"]
    answer = server.call("/v1/messages/count_tokens", prompt)[1]
    assert answer == {"input_tokens": usage["input_tokens"]}


def test_errors_are_anthropics(server: RunningServer) -> None:
    def error(path: str, sent: Any, method: str | None = None) -> tuple[int, str]:
        status, answer, _ = server.call(path, sent, method)
        assert answer.keys() == {"type", "error"}
        assert answer["type"] == "error"
        return status, answer["error"]["type"]

    assert error("/v1/messages", {"messages": []}) == (400, "invalid_request_error")
    assert error("/v1/messages", body("hi", model="other")) == (404, "not_found_error")
    assert error("/v1/messages/batches", {}) == (404, "not_found_error")
    assert error("/v1/messages/nowhere", {}) == (404, "not_found_error")
    assert error("/v1/messages", None, "GET") == (405, "invalid_request_error")
    assert error("/v1/messages", body("@refuse"))[0] == 422
    assert server.call("/v1/messagesx", {})[1]["error"]["code"] == "not_found"


def test_an_error_in_the_stream_is_its_last_event(server: RunningServer) -> None:
    *_, last = streamed(server, "@spoil hello world")
    assert last == {"type": "error", "error": {"type": "api_error", "message": "all NaN"}}


def test_x_api_key_is_a_key(folder: Path) -> None:
    with RunningServer(folder, api_key=["secret"], max_queued_requests=1) as running:
        running.ready()

        def ask(**headers: str) -> tuple[int, Any]:
            data = json.dumps(body("@say ok")).encode()
            request = urllib.request.Request(running.url("/v1/messages"), data, headers)
            try:
                with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as refused:
                with refused:
                    return refused.code, json.loads(refused.read())

        assert ask(**{"x-api-key": "secret"})[0] == 200
        assert ask(Authorization="Bearer secret")[0] == 200
        status, answer = ask(**{"x-api-key": "other"})
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert ask()[0] == 401


def test_blocks_become_turns(served: ServedModel) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "é"}},
                {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "one", **cached},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "two"}],
                },
                {"type": "text", "text": "e"},
            ],
        },
        {"role": "system", "content": "in French"},
        {"role": "user", "content": "f"},
    ]
    system = [
        {"type": "text", "text": "You help.", **cached},
        {"type": "text", "text": "Be brief."},
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}},
        {"id": "t2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert parse(served, messages=given, system=system).conversation.messages == [
        {"role": "system", "content": "You help.\nBe brief."},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "one", "name": "f"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: two", "name": "g"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "in French"},
        {"role": "user", "content": "f"},
    ]


def test_an_answers_blocks_can_be_sent_back(server: RunningServer, served: ServedModel) -> None:
    answer = whole(server, f"@say {REPLY}", tools=[WEATHER, TIME])
    results = [
        {"type": "tool_result", "tool_use_id": block["id"]}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    given = [
        USER,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results},
    ]
    turn = parse(served, messages=given).conversation.messages[1]
    assert (turn["content"], turn["reasoning_content"]) == ("Let me see.", "hm, {a}")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["get_weather", "get_time"]


@pytest.mark.parametrize("is_text", [True, False])
def test_the_billing_header_is_left_out(served: ServedModel, is_text: bool) -> None:
    def system(digest: str) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={digest};"
        return f"{header}\nYou help." if is_text else [text(header), text("You help.")]

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    prompts = [parse(served, system=system(digest)).conversation.messages for digest in ("a1", "b2")]
    assert prompts[0] == prompts[1] == [{"role": "system", "content": "You help."}, USER]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", True, 2)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False, 2)),
        ({"type": "any"}, ("required", True, 2)),
        ({"type": "tool", "name": "get_time"}, ("required", False, 1)),
        ({"type": "none"}, ("none", True, 2)),
    ],
)
def test_tool_choices(served: ServedModel, choice: Any, expected: Any) -> None:
    others = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    asked = parse(served, tools=[WEATHER, *others, TIME], tool_choice=choice).conversation.asked
    assert (asked.choice, asked.parallel, len(asked.allowed)) == expected
    assert [tool.name for tool in asked.tools] == ["get_weather", "get_time"]


def test_thinking_sets_the_templates_variables(server: RunningServer, served: ServedModel) -> None:
    for kind, variables in (
        ("enabled", {"enable_thinking": True}),
        ("disabled", {"enable_thinking": False}),
        ("adaptive", {}),
    ):
        call = parse(served, thinking={"type": kind, "budget_tokens": 1024})
        assert call.conversation.template_variables == variables
    for thinking in ({"type": "disabled"}, {"type": "enabled", "display": "omitted"}):
        assert whole(server, f"@say {REPLY}", thinking=thinking)["content"][0]["type"] == "text"
    assert parse(served, output_config={"effort": "high"}).conversation.template_variables == {}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammar = parse(
        served, output_config={"format": {"type": "json_schema", "schema": schema}}
    ).options.params.grammar
    assert grammar is not None
    assert grammar.where == "output_config.format.schema"


def test_what_changes_no_answer_is_ignored(served: ServedModel) -> None:
    ignored = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "mcp_servers": [],
    }
    assert parse(served, **ignored) == parse(served)
    params = parse(served, temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["a"]).options.params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.5, 0.9, 5, ("a",))


RESULT = {"type": "tool_result", "tool_use_id": "t"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [USER, {"role": "assistant", "content": [RESULT]}]}, "messages[1].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages[1]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{**TIME, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, None),
        ({"container": "c"}, "container"),
        ({"stop": ["a"]}, "stop"),
    ],
)
def test_what_is_refused(served: ServedModel, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as refused:
        parse(served, **fields)
    assert refused.value.status == 400
    assert param in (None, refused.value.param)


def test_count_tokens_takes_no_fields_of_generation(served: ServedModel) -> None:
    call = parse_count(json.dumps({"messages": [USER], "system": "s"}).encode(), served)
    assert len(call.conversation.messages) == 2
    with pytest.raises(RequestError):
        parse_count(json.dumps({"messages": [USER], "max_tokens": 1}).encode(), served)
