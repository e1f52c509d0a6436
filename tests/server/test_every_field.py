"""Every field of every body does something: the server, with the real engine, answers otherwise with it.

The fields are those of the document of the API, so that a new one without a case here fails.
"""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from running_server import LIMIT_S
from served_routes import served_routes
from small_model import EOS, make_folder
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from minisgl.errors import RequestError
from minisgl.fields import refuse_unknown
from minisgl.replies.tools import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionName,
    FunctionTool,
    NamedTool,
    ToolDefinition,
)
from minisgl.server.apis import messages, messages_answer, responses, responses_answer
from minisgl.server.apis.chat import ChatAnswer
from minisgl.server.apis.completions import CompletionAnswer
from minisgl.server.apis.native_generate import NativeFields, NativeSampling
from minisgl.server.apis.tokenize import DetokenizeAnswer, TokenizeAnswer
from minisgl.server.app import MESSAGE
from minisgl.server.calls.output_format import (
    JsonSchema,
    OutputFields,
    StructuralTagFormat,
    StructuredOutputs,
)
from minisgl.server.http.bodies import Body
from minisgl.server.http.errors import ErrorAnswer
from minisgl.server.http.openapi import openapi_document
from minisgl.server.reload.changes import ReloadFields

VOCAB = 308  # as many as the tokenizer has
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": [2, *range(6, VOCAB, 2)],  # so that any reply meets one soon; not the quotation mark
    "bos_token_id": 1,
}
TEMPLATE = (
    "{{ tune }}{% for message in messages %}{{ message.role }}{{ message.name }}{{ message.tool_call_id }}"
    "{{ message.reasoning_content }}: {{ message.content }}{% for call in message.tool_calls %}{{ call.id }}"
    "{{ call.function.name }}{{ call.function.arguments }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOLD = "{{ reasoning_effort }}{% if tools %}{{ tools | tojson }}{% endif %}"
FLAGS = [
    *("--dummy-weights", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--port", "0"),
    *("--num-pages", "200", "--tool-parser", "hermes"),
]


class Case(NamedTuple):
    """The field with `value` changes the answer to `base`."""

    value: Any
    base: dict[str, Any] = {}  # noqa: RUF012  never changed


def message(**fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hello", **fields}]


def call(function: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    one = {"id": "call_1", "function": {"name": "f", "arguments": "{}", **(function or {})}, **fields}
    return message(role="assistant", tool_calls=[one])


WITH_CALL = {"messages": call()}
TOOL = {"type": "function", "function": {"name": "f"}}
SAMPLED = {"temperature": 1, "seed": 7}
GREEDY = {"temperature": 0}
ALWAYS_I = {**GREEDY, "logit_bias": {"43": 100}}
ONE_OF_SIX = {**GREEDY, "allowed_token_ids": [5, 6, 7, 8, 9, 10], "return_token_ids": True}
MANY = {str(token_id): -100 for token_id in range(1, VOCAB, 2)}
SHARED = {
    "model": Case("other"),
    "stream": Case(True),
    "stream_options": Case({"include_usage": True}, {"stream": True}),
    "n": Case(2),
    "temperature": Case(0, {"seed": 7}),
    "top_p": Case(0.001, SAMPLED),
    "stop": Case("I", ALWAYS_I),
    "seed": Case(8, SAMPLED),
    "presence_penalty": Case(2, ONE_OF_SIX),
    "frequency_penalty": Case(2, ONE_OF_SIX),
    "repetition_penalty": Case(100, ONE_OF_SIX),
    "logit_bias": Case({"65": 100}, {**GREEDY, "return_token_ids": True}),
    "top_k": Case(1, SAMPLED),
    "min_p": Case(1, SAMPLED),
    "ignore_eos": Case(False, {"logit_bias": {"2": 100}}),
    "stop_token_ids": Case(list(range(VOCAB)), GREEDY),
    "min_tokens": Case(3, {**GREEDY, "ignore_eos": False, "logit_bias": MANY}),
    "include_stop_str_in_output": Case(True, {**GREEDY, "logit_bias": {"71": 100}, "stop_token_ids": [71]}),
    "skip_special_tokens": Case(False, {**GREEDY, "logit_bias": {"2": 100}}),
    "allowed_token_ids": Case([65], {**GREEDY, "return_token_ids": True}),
    "bad_words": Case(["I"], ALWAYS_I),
    "prompt_logprobs": Case(1),
    "json_schema": Case('{"enum": [13]}', SAMPLED | {"ignore_eos": False}),
    "regex": Case("[135]{3}", SAMPLED | {"ignore_eos": False}),
    "ebnf": Case('root ::= "a" | "c"', SAMPLED | {"ignore_eos": False}),
    "response_format": Case({"type": "json_object"}, SAMPLED | {"ignore_eos": False}),
    "structured_outputs": Case({"choice": ["a", "c"]}, SAMPLED | {"ignore_eos": False}),
    "return_token_ids": Case(True),
    "return_cached_tokens_details": Case(True),
    "truncate_prompt_tokens": Case(2, {"return_token_ids": True}),
    "truncation_side": Case("right", {"return_token_ids": True, "truncate_prompt_tokens": 2}),
}
CASES: dict[str, dict[str, Case]] = {
    "ChatBody": {
        **SHARED,
        "messages": Case(message(content="other")),
        "max_tokens": Case(2),
        "max_completion_tokens": Case(2),
        "logprobs": Case(True),
        "top_logprobs": Case(2, {"logprobs": True}),
        "chat_template_kwargs": Case({"tune": "la"}),
        "add_generation_prompt": Case(False),
        "tools": Case([TOOL]),
        "tool_choice": Case("none", {"tools": [TOOL]}),
        "reasoning_effort": Case("low"),
        "continue_final_message": Case(True, {"messages": message(role="assistant")}),
        "echo": Case(True, {"messages": message(role="assistant")}),
        "return_tokens_as_token_ids": Case(True, {"logprobs": True}),
        "logprob_token_ids": Case([70, 71], {"logprobs": True}),
    },
    "CompletionBody": {
        **SHARED,
        "prompt": Case("other"),
        "max_tokens": Case(2),
        "echo": Case(True),
        "logprobs": Case(1),
        "return_tokens_as_token_ids": Case(True, {"logprobs": 1}),
        "logprob_token_ids": Case([70, 71], {"logprobs": 1}),
    },
    "TokenizeBody": {
        "model": Case("other"),
        "prompt": Case("other"),
        "messages": Case(message(content="other"), {"prompt": None, "messages": message()}),
        "add_special_tokens": Case(False),
        "add_generation_prompt": Case(False, {"prompt": None, "messages": message()}),
        "continue_final_message": Case(True, {"prompt": None, "messages": message()}),
        "chat_template_kwargs": Case({"tune": "la"}, {"prompt": None, "messages": message()}),
        "tools": Case([TOOL], {"prompt": None, "messages": message()}),
        "return_token_strs": Case(True),
    },
    "DetokenizeBody": {
        "tokens": Case([70]),
        "model": Case("other"),
        "skip_special_tokens": Case(True),
    },
    "GenerateBody": {
        "prompt": Case("other"),
        "max_tokens": Case(1, {"ignore_eos": True}),
        "ignore_eos": Case(True, {"prompt": "ab"}),
    },
    "Message": {
        "role": Case(message(role="tool")),
        "content": Case(message(content="other")),
        "name": Case(message(name="Ann")),
        "tool_call_id": Case(message(tool_call_id="t1")),
        "tool_calls": Case(call(), {"messages": message(role="assistant")}),
        "reasoning_content": Case(message(reasoning_content="because")),
        "reasoning": Case(message(reasoning="because")),
        "refusal": Case(message(role="assistant", content=None, refusal="no")),
    },
    "ToolCall": {
        "id": Case(call(id="other"), WITH_CALL),
        "function": Case(call({"name": "other"}), WITH_CALL),
        "type": Case(call(type="custom"), WITH_CALL),
    },
    "FunctionCall": {
        "name": Case(call({"name": "other"}), WITH_CALL),
        "arguments": Case(call({"arguments": '{"a": 1}'}), WITH_CALL),
    },
    "TextPart": {
        "type": Case(message(content=[{"type": "image_url", "text": "hello"}])),
        "text": Case(message(content=[{"type": "text", "text": "other"}])),
    },
    "RefusalPart": {
        "type": Case(message(content=[{"type": "refuse", "refusal": "hello"}])),
        "refusal": Case(message(content=[{"type": "refusal", "refusal": "other"}])),
    },
    "StreamOptions": {
        "include_usage": Case({"include_usage": True}, {"stream": True}),
        "continuous_usage_stats": Case(
            {"include_usage": True, "continuous_usage_stats": True},
            {"stream": True, "stream_options": {"include_usage": True}},
        ),
    },
}
NOT_IN_ALL = ("stream_options", "n", "prompt_logprobs", *OutputFields.__struct_fields__, "return_token_ids")
NOT_IN_ALL += ("return_cached_tokens_details", "truncate_prompt_tokens", "truncation_side")
SAMPLING = {
    name: case._replace(base={key: case.base[key] for key in case.base if key != "return_token_ids"})
    for name, case in SHARED.items()
    if name not in NOT_IN_ALL
}
FLAT_TOOL = {"type": "function", "name": "f"}
INPUT_TOOL = {"name": "f", "input_schema": {"type": "object"}}
CASES["ResponseBody"] = {
    **SAMPLING,
    "input": Case("other"),
    "instructions": Case("be brief"),
    "max_output_tokens": Case(2),
    "tools": Case([FLAT_TOOL]),
    "tool_choice": Case("none", {"tools": [FLAT_TOOL]}),
    "parallel_tool_calls": Case(False),
    "text": Case({"format": {"type": "json_object"}}, SAMPLED | {"ignore_eos": False}),
    "reasoning": Case({"effort": "low"}),
    "metadata": Case({"a": "b"}),
    "user": Case("me"),
    "chat_template_kwargs": Case({"tune": "la"}),
}
PROMPT = {
    "messages": Case(message(content="other")),
    "model": Case("other"),
    "system": Case("be brief"),
    "tools": Case([INPUT_TOOL]),
    "tool_choice": Case({"type": "none"}, {"tools": [INPUT_TOOL]}),
    "output_config": Case({"effort": "low"}),
}
CASES["CountTokensBody"] = PROMPT
CASES["MessagesBody"] = {
    **{name: case for name, case in SAMPLING.items() if name != "stop"},
    **PROMPT,
    "max_tokens": Case(2),
    "stop_sequences": Case(["I"], ALWAYS_I),
}
AGENTS = {
    "test_responses.py::test_items_become_turns": (responses.InputItem, responses.ItemPart),
    "test_responses.py::test_tool_choices": (responses.FlatTool, responses.FlatName, responses.FlatAllowed),
    "test_responses.py::test_text_formats": (responses.TextOptions,),
    "test_responses.py::test_effort_sets_the_templates_variables": (responses.ReasoningOptions,),
    "test_responses.py::test_what_changes_no_answer_is_ignored": (responses.ResponseStreamOptions,),
    "test_anthropic.py::test_blocks_become_turns": (messages.TextBlock, messages.Block, messages.Turn),
    "test_anthropic.py::test_tool_choices": (messages.InputTool, messages.ToolChoice),
    "test_anthropic.py::test_thinking_sets_the_templates_variables": (
        messages.Thinking,
        messages.JsonFormat,
        messages.OutputConfig,
    ),
}
FORMATS = [
    *(("TextFormat", "type"), ("JsonObjectFormat", "type")),
    *(("JsonSchemaFormat", name) for name in ("type", "json_schema")),
    *(("JsonSchema", name) for name in JsonSchema.__struct_fields__),
    *(("StructuralTagFormat", name) for name in ("type", *StructuralTagFormat.__struct_fields__)),
    *(("StructuredOutputs", name) for name in StructuredOutputs.__struct_fields__),
]
TOOL_FIELDS = {
    "test_every_part_of_a_tool_counts": (ToolDefinition, FunctionTool),
    "test_every_way_to_choose": (NamedTool, FunctionName, AllowedToolsChoice, AllowedTools),
}
ELSEWHERE = {
    **dict.fromkeys(
        [("ReloadBody", name) for name in ReloadFields.__struct_fields__],
        "test_reload_settings.py::test_every_setting_of_a_reload_changes_itself_alone",
    ),
    **{
        (kind.__name__, name): test
        for test, kinds in AGENTS.items()
        for kind in kinds
        for name in kind.__struct_fields__
    },
    **dict.fromkeys(
        [("ResponseBody", "include"), ("ResponseBody", "stream_options")],
        "test_responses.py::test_what_changes_no_answer_is_ignored",
    ),
    **dict.fromkeys(
        [("MessagesBody", "thinking"), ("CountTokensBody", "thinking")],
        "test_anthropic.py::test_thinking_sets_the_templates_variables",
    ),
    **{
        (kind.__name__, name): f"test_tools.py::{test}"
        for test, kinds in TOOL_FIELDS.items()
        for kind in kinds
        for name in kind.__struct_fields__
    },
    (
        "ChatBody",
        "parallel_tool_calls",
    ): "test_tools.py::test_what_must_be_guaranteed_reaches_the_engine_as_a_grammar",
    **dict.fromkeys(
        [("ChatBody", "thinking_token_budget"), ("ResponseBody", "thinking_token_budget")],
        "test_thought_limit.py::test_each_api_has_a_field_for_the_limit",
    ),
    ("ChatBody", "include_reasoning"): "test_tools.py::test_reasoning_may_be_left_out",
    **{
        (kind, name): "test_output_format.py::"
        + ("test_structured_outputs" if kind == "StructuredOutputs" else "test_response_formats")
        for kind, name in FORMATS
    },
    ("ChatBody", "priority"): "test_endpoints.py::test_priority_reaches_the_engine",
    ("CompletionBody", "priority"): "test_endpoints.py::test_priority_reaches_the_engine",
    **{
        (f"{kind}Body", "cache_salt"): "test_every_field.py::test_a_salt_has_a_prefix_cache_of_its_own"
        for kind in ("Chat", "Completion", "Response", "Messages")
    },
    **{
        ("GenerateBody", name): "test_native_generate.py::test_sglangs_fields_count"
        for name in NativeFields.__struct_fields__
    },
    **{
        (
            "NativeSampling",
            name,
        ): "test_native_generate.py::test_sampling_params_mean_what_they_mean"
        for name in NativeSampling.__struct_fields__
    },
    ("AbortBody", "request_id"): "test_endpoints.py::test_abort_ends_the_named_call_or_all",
    ("AbortBody", "rid"): "test_endpoints.py::test_abort_ends_the_named_call_or_all",
    ("AbortBody", "abort_all"): "test_endpoints.py::test_abort_ends_the_named_call_or_all",
    (
        "StreamOptions",
        "include_obfuscation",
    ): "test_every_field.py::test_padding_of_a_streams_events_changes_no_text",
}
"""What no answer of one call can show: the tests that see it."""
EXAMPLES = {
    "ChatBody": (
        "/v1/chat/completions",
        {"messages": message(), "max_tokens": 8, "seed": 1, "ignore_eos": True},
    ),
    "CompletionBody": (
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 8, "seed": 1, "ignore_eos": True},
    ),
    "ResponseBody": (
        "/v1/responses",
        {"input": "hello", "max_output_tokens": 8, "seed": 1, "ignore_eos": True},
    ),
    "MessagesBody": (
        "/v1/messages",
        {"messages": message(), "max_tokens": 8, "seed": 1, "ignore_eos": True},
    ),
    "CountTokensBody": ("/v1/messages/count_tokens", {"messages": message()}),
    "TokenizeBody": ("/tokenize", {"prompt": "hello"}),
    "DetokenizeBody": ("/detokenize", {"tokens": [2, 71]}),
    "GenerateBody": ("/generate", {"prompt": "hello", "max_tokens": 100}),
}
ANSWERS = {
    "/v1/chat/completions": ChatAnswer,
    "/v1/completions": CompletionAnswer,
    "/v1/responses": responses_answer.ResponseAnswer,
    "/v1/messages": messages_answer.MessageAnswer,
    "/v1/messages/count_tokens": messages_answer.TokenCount,
    "/tokenize": TokenizeAnswer,
    "/detokenize": DetokenizeAnswer,
}
BODIES = {route.body.name: route.body for route in served_routes() if route.body} | {"Message": MESSAGE}
INSIDE = {
    **dict.fromkeys(("Message", "TextPart", "RefusalPart", "ToolCall", "FunctionCall"), "messages"),
    "StreamOptions": "stream_options",
}
"""A structure in a chat's body -> its field."""


NEW = re.compile(
    r'"((\w+_)?id|created(_at)?)":("[^"]*"|\d+)'
    r'|"cached_tokens":\d+|"input_tokens":\d+,"cache_read_input_tokens":\d+'
)
"""What differs between two answers to the same call: ids, the time, and what of the prompt was cached."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = make_folder(tmp_path_factory.mktemp("fields") / "tiny", template=TOLD + TEMPLATE)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id(EOS) == 2
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(folder), *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        yield line.split("/v1/")[0].removeprefix("curl ")
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stdout.close()


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of the answer, without what is new in each; it must be as the document says."""
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            status, text = answer.status, answer.read().decode()
            if answer.headers.get_content_type() == "application/json":
                msgspec.json.decode(text, type=ANSWERS[path])
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
            is_anthropics = path.startswith("/v1/messages")
            msgspec.json.decode(text, type=messages_answer.MessagesError if is_anthropics else ErrorAnswer)
    text = re.sub(NEW, "", text)
    return status, text


def fields_of_document() -> list[tuple[str, str]]:
    """(schema, field) of everything that a body may hold and that is honoured."""
    document = openapi_document(served_routes(), "tiny", VOCAB, [MESSAGE])
    schemas = document["components"]["schemas"]
    unread = {(name, other) for name, body in BODIES.items() for other in body.unsupported}
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names: set[str] = set()
    more = [operation["requestBody"] for operation in operations if "requestBody" in operation]
    while more:
        found = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(more))) - names
        names |= found
        more = [schemas[name] for name in found]
    return sorted({(name, field) for name in names for field in schemas[name]["properties"]} - unread)


def test_every_field_of_the_document_has_a_case() -> None:
    cases = {(name, field) for name, fields in CASES.items() for field in fields}
    assert sorted(cases | ELSEWHERE.keys()) == fields_of_document()
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in Path(__file__).with_name(file).read_text(), place


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, fields in CASES.items() for field in fields]
)
def test_the_answer_is_another_with_the_field(url: str, name: str, field: str) -> None:
    case = CASES[name][field]
    path, whole = EXAMPLES["ChatBody" if name in INSIDE else name]
    sent = INSIDE.get(name, field)
    base = {**whole, **case.base}
    without = {**base, **({sent: None} if sent not in base else {})}
    answers = [ask(url, path, without) for _ in range(2)]
    assert answers[0] == answers[1], "a poor example: the answer differs by itself"
    assert answers[0][0] == 200, answers[0]
    status, text = ask(url, path, {**base, sent: case.value})
    assert (status, text) != answers[0]
    assert status == {"model": 404, "type": 400}.get(field, 200), text


OTHERS = [(body, field) for body in BODIES.values() for field in body.unsupported]


@pytest.mark.parametrize(("body", "field"), OTHERS, ids=[field for _, field in OTHERS])
def test_a_field_that_is_not_honoured_passes_only_if_it_asks_for_nothing(body: Body, field: str) -> None:
    neutral = body.unsupported[field]
    for value in (None, *(["anything"] if neutral is None else neutral)):
        refuse_unknown({field: value}, (), body.unsupported)
    if neutral is not None:
        with pytest.raises(RequestError, match=f'^{field} = "alien" is not supported here') as refused:
            refuse_unknown({field: "alien"}, (), body.unsupported)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize("name", ["ChatBody", "CompletionBody", "ResponseBody", "MessagesBody"])
def test_a_salt_has_a_prefix_cache_of_its_own(url: str, name: str) -> None:
    path, body = EXAMPLES[name]
    prompt = f"{name} " + "a prompt of several pages " * 8
    field = next(one for one in ("messages", "prompt", "input") if one in body)
    body = {**body, field: message(content=prompt) if field == "messages" else prompt}

    def num_cached(**salt: str) -> int:
        request = urllib.request.Request(url + path, json.dumps({**body, **salt}).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            usage = answer.read().decode()
        found = re.search(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)', usage)
        assert found is not None
        return int(found[1])

    assert num_cached(cache_salt="one") == 0
    assert num_cached() == 0
    assert num_cached(cache_salt="two") == 0
    assert num_cached(cache_salt="one") == num_cached() == num_cached(cache_salt="two") > 50


def test_asked_tokens_have_their_log_probabilities(url: str) -> None:
    def ask_one(**fields: Any) -> Any:
        body = {
            "prompt": "hello",
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 20,
            **fields,
        }
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.loads(answer.read())["choices"][0]["logprobs"]

    plain = ask_one(return_tokens_as_token_ids=True)
    assert all(one.startswith("token_id:") for one in plain["tokens"])
    likely = [list(step)[:3] for step in plain["top_logprobs"]]
    wanted = sorted({int(name.removeprefix("token_id:")) for step in likely for name in step})
    asked = ask_one(return_tokens_as_token_ids=True, logprob_token_ids=wanted)
    assert asked["tokens"] == plain["tokens"]
    assert asked["token_logprobs"] == plain["token_logprobs"]
    for step, all_likely in zip(asked["top_logprobs"], plain["top_logprobs"], strict=True):
        assert {f"token_id:{one}" for one in wanted} <= step.keys()
        assert len(step) <= len(wanted) + 1, "these, and the token itself"
        for name in step.keys() & all_likely.keys():
            assert step[name] == all_likely[name]


def test_padding_of_a_streams_events_changes_no_text(url: str) -> None:
    path, body = EXAMPLES["ChatBody"]
    assert ask(url, path, {**body, "stream": True, "stream_options": {"include_obfuscation": True}})[0] == 200
