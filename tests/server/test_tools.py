"""Tools, calls and thoughts in chats: openai's client, the server, and an engine that says given texts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from running_server import RunningServer
from served_routes import model
from small_model import make_folder
from tool_model import TEMPLATE
from tool_model import make_tool_model as make_model

from minisgl.errors import ConfigError, RequestError
from minisgl.replies.conversation import Conversation, EncodedCall
from minisgl.replies.plan import plan_reply
from minisgl.replies.tools import MAX_TOOLS, Tool, ask_tools, read_tools
from minisgl.request import SamplingParams
from minisgl.server.apis.chat import ChatChunk, parse_chat
from minisgl.server.open_choices import Delta
from minisgl.server.served_model import ServedModel, load_served_model
from minisgl.text.formats.choose import choose_format
from minisgl.text.formats.events import collect

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS},
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS: list[Any] = [WEATHER, TIME]
ARGUMENTS = ['{"city": "R\\u00f6m }{ \\" 好"}', "{}"]
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    for name, arguments in zip(["get_weather", "get_time"], ARGUMENTS, strict=True)
)
HOWS = ("say", "burst", "chars")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(make_model(tmp_path_factory.mktemp("tools") / "model")) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_served_model(make_model(tmp_path_factory.mktemp("served") / "model"), "tiny")


def whole(server: RunningServer, text: str, how: str = "say", **fields: Any) -> ChatCompletion:
    with server.client() as client:
        messages: Any = [{"role": "user", "content": f"@{how} {text}"}]
        return client.chat.completions.create(**{"model": "tiny", "messages": messages, **fields})


def streamed(server: RunningServer, text: str, how: str, **fields: Any) -> list[ChatCompletionChunk]:
    with server.client() as client:
        messages: Any = [{"role": "user", "content": f"@{how} {text}"}]
        return list(
            client.chat.completions.create(
                **{"model": "tiny", "messages": messages, "stream": True, **fields}
            )
        )


def joined(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client makes of a stream's deltas; their form is checked on the way."""
    answer: dict[str, Any] = {"content": "", "thought": "", "calls": [], "reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            answer["content"] += delta.content or ""
            answer["thought"] += extra.get("reasoning") or ""
            answer["reason"] = choice.finish_reason or answer["reason"]
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.index == len(answer["calls"]):
                    assert call.id is not None
                    assert call.id.startswith("call_")
                    assert (call.type, call.function.arguments) == ("function", "")
                    answer["calls"].append([call.function.name, ""])
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                    assert call.index == len(answer["calls"]) - 1
                    answer["calls"][-1][1] += call.function.arguments
    return answer


def parts(answer: ChatCompletion) -> dict[str, Any]:
    """The same of a whole answer."""
    choice = answer.choices[0]
    extra = choice.message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    calls: Any = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return {
        "content": choice.message.content or "",
        "thought": extra.get("reasoning", ""),
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "reason": choice.finish_reason,
    }


@pytest.mark.parametrize("how", HOWS)
def test_thought_text_and_calls_come_apart_whole_and_streamed(server: RunningServer, how: str) -> None:
    text = f"<think>\nIs {{it}} <b>?\n</think>\n\nI look.\n{CALLS}"
    answer = whole(server, text, how, tools=TOOLS)
    expected = {
        "content": "I look.",
        "thought": "Is {it} <b>?",
        "calls": [["get_weather", ARGUMENTS[0]], ["get_time", ARGUMENTS[1]]],
        "reason": "tool_calls",
    }
    assert parts(answer) == expected
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    thought_tokens = usage.completion_tokens_details.reasoning_tokens
    assert thought_tokens is not None
    assert 3 < thought_tokens < usage.completion_tokens
    options = {"stream_options": {"include_usage": True}}
    chunks = streamed(server, text, how, tools=TOOLS, **options)
    assert joined(chunks) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details == usage.completion_tokens_details


def test_calls_alone_have_no_content(server: RunningServer) -> None:
    answer = whole(server, CALLS, tools=TOOLS)
    assert answer.choices[0].message.content is None
    assert "reasoning" not in (answer.choices[0].message.model_extra or {})
    assert [chunk for chunk in streamed(server, CALLS, "say", tools=TOOLS) if text_of(chunk)] == []


def text_of(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def test_a_reply_cut_in_a_call_ends_by_length(server: RunningServer) -> None:
    answer = parts(whole(server, CALLS, tools=TOOLS, max_tokens=40))
    assert answer["reason"] == "length"
    assert [name for name, _ in answer["calls"]] == ["get_weather"]
    assert ARGUMENTS[0].startswith(answer["calls"][0][1])


@pytest.mark.parametrize("arguments", ['{"city": "R', '{"city": Rom}'])
def test_a_call_that_the_model_breaks_off_does_not_end_in_calls(
    server: RunningServer, arguments: str
) -> None:
    text = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}'
    answer = parts(whole(server, text, tools=TOOLS))
    assert answer["reason"] == "stop"
    [[name, written]] = answer["calls"]
    assert name == "get_weather"
    assert arguments.startswith(written)
    assert len(written) >= len('{"city": ')
    assert joined(streamed(server, text, "chars", tools=TOOLS)) == answer


def test_without_tools_or_with_none_a_call_is_text(server: RunningServer) -> None:
    cases: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for fields in cases:
        answer = parts(whole(server, f"<think>hm</think>{CALLS}", **fields))
        assert (answer["content"], answer["thought"], answer["calls"]) == (CALLS, "hm", [])
        assert answer["reason"] == "stop"


def test_choices_are_read_each_for_itself(server: RunningServer) -> None:
    answer = whole(server, f"<think>hm</think>ok{CALLS}", tools=TOOLS, n=3)
    assert [choice.message.content for choice in answer.choices] == ["ok"] * 3
    calls: Any = [call for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len({call.id for call in calls}) == 6


def test_reasoning_may_be_left_out(server: RunningServer) -> None:
    fields: dict[str, Any] = {"extra_body": {"include_reasoning": False}}
    text = "<think>hm</think>ok"
    assert parts(whole(server, text, **fields)) | {"reason": None} == {
        "content": "ok", "thought": "", "calls": [], "reason": None
    }  # fmt: skip
    assert joined(streamed(server, text, "say", **fields))["thought"] == ""


def test_a_prompt_that_opens_the_thought(server: RunningServer) -> None:
    body = {"chat_template_kwargs": {"opened": True}}
    answer = parts(whole(server, "hm</think>ok", extra_body=body))
    assert (answer["thought"], answer["content"]) == ("hm", "ok")
    closed = parts(whole(server, "ok", extra_body={"chat_template_kwargs": {"enable_thinking": False}}))
    assert (closed["thought"], closed["content"]) == ("", "ok")


def test_details_of_tokens_stay_whole(server: RunningServer) -> None:
    text = f"<think>hm</think>{CALLS}"
    answer = whole(server, text, tools=TOOLS, extra_body={"return_token_ids": True})
    ids = (answer.choices[0].model_extra or {})["token_ids"]
    assert answer.usage is not None
    assert len(ids) == answer.usage.completion_tokens
    chunks = streamed(server, text, "say", tools=TOOLS, extra_body={"return_token_ids": True})
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [one for choice in choices for one in (choice.model_extra or {}).get("token_ids") or []] == ids


def test_chunks_are_as_their_struct_says(server: RunningServer) -> None:
    for chunk in streamed(server, f"<think>hm</think>ok{CALLS}", "say", tools=TOOLS):
        made = msgspec.convert(chunk.model_dump(exclude_unset=True), ChatChunk)
        assert made.choices[0].index == 0


def test_results_of_calls_go_back_to_the_model(server: RunningServer) -> None:
    first = whole(server, CALLS, tools=TOOLS).choices[0].message
    assert first.tool_calls is not None
    turns: list[Any] = [
        {"role": "user", "content": "Weather?"},
        first.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls),
        {"role": "user", "content": "@say It is sunny."},
    ]
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=turns, tools=TOOLS)
    assert answer.choices[0].message.content == "It is sunny."


def test_what_must_be_guaranteed_reaches_the_engine_as_a_grammar(server: RunningServer) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    strict = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    where = "response_format.json_schema.schema"
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"tools": TOOLS}, None),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}, None),
        ({"tools": TOOLS, "tool_choice": "required"}, ["lark", "tools", 0]),
        ({"tools": TOOLS, "tool_choice": named}, ["lark", "tools", 0]),
        ({"tools": strict}, ["lark", "tools", 0]),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ["lark", "tools", 0]),
        ({"response_format": schema}, ["json_schema", where, 1]),
        ({"response_format": schema, "tools": TOOLS, "tool_choice": "none"}, ["json_schema", where, 1]),
        ({"response_format": schema, "tools": TOOLS}, ["json_schema", where, 2]),
    ]
    for fields, expected in cases:
        assert parts(whole(server, "ok", **fields))["content"] == "ok"
        assert server.report()["grammars"] == [expected, None], fields


def test_the_server_says_how_replies_are_read(server: RunningServer) -> None:
    _, facts, _ = server.call("/server_info")
    assert facts["reply_format"] == {"tool_parser": "hermes", "reasoning_parser": "think"}


def chat(served: Any = None, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_chat(msgspec.json.encode(body), served or model(300))


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def test_every_part_of_a_tool_counts() -> None:
    asked = chat(tools=function(description="d", parameters=PARAMETERS, strict=True)).conversation.asked
    assert asked.tools == (Tool("f", "d", PARAMETERS, True, "tools[0].function.parameters"),)
    assert asked.for_template == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
    ]
    assert (asked.choice, asked.parallel, asked.needs_grammar) == ("auto", True, True)
    (bare,) = chat(tools=function()).conversation.asked.for_template
    assert bare["function"]["parameters"] == {"type": "object", "properties": {}}
    assert chat(tools=[]).conversation.asked.for_template == []


def test_every_way_to_choose() -> None:
    def asked(choice: Any, **fields: Any) -> tuple[Any, ...]:
        found = chat(tools=TOOLS, tool_choice=choice, **fields).conversation.asked
        names = [tool.name for tool in found.allowed]
        return found.choice, names, found.parallel, len(found.for_template)

    both = ["get_weather", "get_time"]
    assert asked(None) == asked("auto") == ("auto", both, True, 2)
    assert asked("none") == ("none", both, True, 0)
    assert asked("required", parallel_tool_calls=False) == ("required", both, False, 2)
    one = {"type": "function", "function": {"name": "get_time"}}
    assert asked(one) == ("required", ["get_time"], False, 2)
    for mode in ("auto", "required"):
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [one]}}
        assert asked(allowed) == (mode, ["get_time"], True, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, {**TIME, "mood": 1}]}, "tools[1].mood"),
        ({"tools": function(mood=1)}, "tools[0].function.mood"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="x" * 129)}, "tools[0].function.name"),
        ({"tools": [TIME, TIME]}, "tools[1].function.name"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "string"})}, "tools[0].function.parameters.type"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict"),
        ({"tools": [TIME] * (MAX_TOOLS + 1)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "deep"}, "reasoning_effort"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"separate_reasoning": False}, "separate_reasoning"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_efforts_are_the_templates_own_variables(served: ServedModel) -> None:
    def variables(effort: str, **kwargs: Any) -> Any:
        return chat(
            served, reasoning_effort=effort, chat_template_kwargs=kwargs
        ).conversation.template_variables

    assert variables("none") == {"enable_thinking": False}
    assert variables("low") == {"enable_thinking": True}
    assert variables("low", enable_thinking=False) == {"enable_thinking": False}
    assert chat(reasoning_effort="none").conversation.template_variables == {}


def encoded(served: ServedModel, **fields: Any) -> EncodedCall:
    return chat(served, **fields).encode(served, 4096)


def refused(served: ServedModel, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        encoded(served, **fields)
    assert caught.value.status == 400
    return caught.value


def test_a_model_that_cannot_be_given_tools_refuses_them(served: ServedModel, tmp_path: Path) -> None:
    other = load_served_model(make_folder(tmp_path / "plain"), "tiny", tool_parser="hermes")
    assert "--chat-template" in refused(other, tools=TOOLS).message
    unread = served._replace(reply_format=None)
    assert "--tool-parser" in refused(unread, tools=TOOLS, tool_choice="required").message
    for one in (other, unread):
        plan = encoded(one, tools=TOOLS, tool_choice="none").plan
        assert plan.params.grammar is None
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    mended = load_served_model(tmp_path / "plain", "tiny", chat_template=str(file))
    assert mended.format_facts == {"tool_parser": "hermes", "reasoning_parser": "think"}
    assert encoded(mended, tools=TOOLS).plan.tools


@pytest.mark.parametrize("broken", ["{% if %}", None])
def test_a_template_that_cannot_be_used_ends_the_start(tmp_path: Path, broken: str | None) -> None:
    file = tmp_path / "own.jinja"
    if broken is not None:
        file.write_text(broken)
    with pytest.raises(ConfigError, match="--chat-template"):
        load_served_model(make_folder(tmp_path / "model"), "tiny", chat_template=str(file))


def test_unknown_parsers_end_the_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    for flag in ("tool_parser", "reasoning_parser"):
        wrong: dict[str, Any] = {flag: "hermse"}
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} must be one of"):
            load_served_model(folder, "tiny", **wrong)


def test_a_schema_that_cannot_be_guaranteed_is_named(served: ServedModel) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    free = [TIME, *function(parameters=parameters)]
    assert encoded(served, tools=free).plan.params.grammar is None
    error = refused(served, tools=free, tool_choice="required")
    assert error.param == "tools[1].function.parameters.properties.a.uniqueItems"
    xml = served._replace(reply_format=load_format(served, "qwen3_coder"))
    parameters["properties"]["a"] = {"type": "string", "pattern": "^a"}
    only = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [only]}}
    error = refused(xml, tools=free, tool_choice=allowed)
    assert "tools[1].function.parameters.properties.a.pattern" in error.message


def load_format(served: ServedModel, name: str) -> Any:
    return choose_format(served.template.source, {}, name)


def test_calls_and_an_answer_by_schema_go_together_where_they_differ_at_once(served: ServedModel) -> None:
    schema = {"response_format": {"type": "json_object"}}
    grammar = encoded(served, tools=TOOLS, **schema).plan.params.grammar
    assert grammar is not None
    assert [name for name, _ in grammar.around] == ["reply", "calls"]
    llama = served._replace(reply_format=load_format(served, "llama3_json"))
    assert refused(llama, tools=TOOLS, **schema).param == "response_format"
    assert refused(served, tools=TOOLS, regex="a+").param == "regex"


def test_calls_that_must_be_made_leave_a_schema_of_the_answer_nothing_to_hold(served: ServedModel) -> None:
    inner: dict[str, Any] = {"name": "a", "schema": {}}
    schema = {"response_format": {"type": "json_schema", "json_schema": inner}}
    named = {"type": "function", "function": {"name": "get_time"}}
    for name in ("hermes", "llama3_json"):
        one = served._replace(reply_format=load_format(served, name))
        for choice in ("required", named):
            calls = encoded(one, tools=TOOLS, tool_choice=choice).plan.params.grammar
            assert encoded(one, tools=TOOLS, tool_choice=choice, **schema).plan.params.grammar == calls
    inner["schema"] = {"uniqueItems": True}
    assert "uniqueItems" in refused(served, tools=TOOLS, tool_choice="required", **schema).message
    assert refused(served, tools=TOOLS, tool_choice="required", regex="a+").param == "regex"


RESPONSE_TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    },
}


def test_a_models_own_response_template_reads_and_guarantees_nothing(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "own")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": RESPONSE_TEMPLATE}))
    served = load_served_model(folder, "tiny")
    assert served.format_facts["tool_parser"] == "response_template"
    plan = encoded(served, tools=TOOLS).plan
    text = f"<think>hm</think>ok{CALLS}"
    reply = collect(plan.reader().read(Delta(0, text, 9, 0, "stop", [5] * 9)))
    assert (reply.reasoning, len(reply.calls)) == ("hm", 2)
    assert "--tool-parser" in refused(served, tools=TOOLS, tool_choice="required").message
    json_object = {"response_format": {"type": "json_object"}}
    assert refused(served, tools=TOOLS, **json_object).param == "response_format"
    opened = {"chat_template_kwargs": {"opened": True}}
    assert "--reasoning-parser" in refused(served, **json_object, **opened).message
    assert encoded(served, **json_object).plan.params.grammar is not None


def test_reasoning_tokens_end_with_the_thoughts_last_token(served: ServedModel) -> None:
    text = "<think>hmm, </think>ok"
    ids = served.tokenizer.encode(text, False)
    expected = ids.index(served.marker_ids["</think>"]) + 1
    reader = plan_reply(served, "", SamplingParams()).reader()
    for index, token_id in enumerate(ids):
        piece = served.tokenizer.decode([token_id], skip_special_tokens=False)
        reader.read(Delta(0, piece, 1, 0, "stop" if index == len(ids) - 1 else None, [token_id]))
    assert reader.num_reasoning_tokens == expected
    cut = plan_reply(served, "", SamplingParams()).reader()
    cut.read(Delta(0, "<think>hmm", 4, 0, "length", ids[:4]))
    assert 1 <= cut.num_reasoning_tokens <= 4


def test_tools_of_other_apis_have_their_own_names_in_errors(served: ServedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    asked = ask_tools([Tool("f", None, schema, False, "tools[0].input_schema")], "required")
    call = Conversation([{"role": "user", "content": "x"}], asked)
    with pytest.raises(RequestError) as caught:
        call.encode(served, 4096, SamplingParams())
    assert caught.value.param == "tools[0].input_schema.properties.a.uniqueItems"
    assert read_tools(None, None).choice == "none"
