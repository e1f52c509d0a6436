"""Request bodies: what is honoured, what is refused by name, what may pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_routes import model
from small_model import make_folder

from minisgl.errors import ModelError, RequestError
from minisgl.replies.conversation import EncodedCall
from minisgl.replies.plan import ReplyPlan
from minisgl.server.apis.chat import ChatCall, parse_chat
from minisgl.server.apis.completions import MAX_PROMPT_VALUES, CompletionCall, parse_completion
from minisgl.server.calls.call import CallContext, Usage
from minisgl.server.served_model import load_served_model
from minisgl.text.tokenizer import Tokenizer

VOCAB = 300
TINY = model(VOCAB)
USER = {"role": "user", "content": "Hi"}


def chat(served: Any = TINY, **fields: Any) -> ChatCall:
    return parse_chat(msgspec.json.encode({"model": "tiny", "messages": [USER], **fields}), served)


def completion(served: Any = TINY, **fields: Any) -> CompletionCall:
    return parse_completion(msgspec.json.encode({"model": "tiny", "prompt": "Hi", **fields}), served)


def refusal(parse: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    return caught.value


def test_a_chat_may_use_the_room_that_is_left_and_a_completion_gets_16_tokens() -> None:
    assert chat().options.params.max_tokens is None
    assert completion().options.params.max_tokens == 16
    assert completion(min_tokens=20).options.params.max_tokens == 20
    assert chat(max_tokens=5).options.params.max_tokens == 5
    assert chat(max_completion_tokens=7).options.params.max_tokens == 7
    for limits in ((5, 7), (7, 5)):
        both = chat(max_tokens=limits[0], max_completion_tokens=limits[1])
        assert both.options.params.max_tokens == 5, "both hold"


def test_sampling_defaults_come_from_the_model_and_the_client_wins() -> None:
    defaults = model(VOCAB, temperature=0.6, top_p=0.9, top_k=20)
    params = chat(defaults).options.params
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    params = chat(defaults, temperature=0, top_p=1, top_k=-1).options.params
    assert (params.temperature, params.top_p, params.top_k) == (0, 1, -1)
    plain = chat().options.params
    assert (plain.temperature, plain.top_p, plain.top_k, plain.min_p) == (1.0, 1.0, 0, 0.0)


def test_every_field_that_is_honoured_arrives() -> None:
    call = completion(
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        seed=11,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
    )
    options, params = call.options, call.options.params
    assert (options.stream, call.shown.usage, options.n, options.model) == (True, True, 3, "tiny")
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.25, 4)
    assert (params.min_p, params.seed, params.stop) == (0.125, 11, ("a", "b"))
    assert (params.stop_token_ids, params.ignore_eos) == ((7,), True)
    assert completion(stop="x").options.params.stop == ("x",)


@pytest.mark.parametrize("parse", [chat, completion])
def test_every_sampling_field_arrives(parse: Any) -> None:
    fields = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 3,
    }
    lists = {"allowed_token_ids": [5, 6], "bad_words": ["a", "b"]}
    call = parse(**fields, **lists, logit_bias={"5": 1.5, "7": -100}, return_token_ids=True)
    options = call.options
    assert {name: getattr(options.params, name) for name in fields} == fields
    assert {name: list(getattr(options.params, name)) for name in lists} == lists
    assert options.params.logit_bias == {5: 1.5, 7: -100}
    assert call.shown.token_ids
    assert not parse().shown.token_ids
    assert parse() == parse(**dict.fromkeys([*fields, *lists, "logit_bias", "return_token_ids"]))


def test_the_models_defaults_can_be_switched_off(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", generation={"temperature": 0.6, "repetition_penalty": 1.1})
    assert load_served_model(folder, "tiny").defaults == {"temperature": 0.6, "repetition_penalty": 1.1}
    assert load_served_model(folder, "tiny", "openai").defaults == {}


def test_a_models_default_out_of_range_is_named_with_its_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", generation={"top_p": 5})
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p must be .* at most 1, got 5"):
        load_served_model(folder, "tiny")


def test_the_ways_to_ask_for_logprobs() -> None:
    def asked(call: ChatCall | CompletionCall) -> tuple[int | None, int | None]:
        return call.options.params.logprobs, call.options.params.prompt_logprobs

    assert asked(chat(logprobs=True)) == (0, None)
    assert asked(chat(logprobs=True, top_logprobs=7)) == (7, None)
    assert asked(chat(logprobs=False, top_logprobs=0)) == (None, None)
    assert asked(completion(logprobs=0)) == (0, None)
    assert asked(completion(logprobs=5, echo=True)) == (5, 5)
    assert asked(completion(echo=True)) == (None, None)
    assert asked(completion(logprobs=2, echo=True, prompt_logprobs=4)) == (2, 4)
    assert completion(echo=True).echo
    assert completion(logprobs=2, echo=True).prompt_logprobs is None
    assert completion(logprobs=2, echo=True, prompt_logprobs=1).prompt_logprobs == 1


def test_no_tokens_at_all_only_where_the_prompt_is_of_interest() -> None:
    assert completion(max_tokens=0, echo=True).options.params.max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).options.params.max_tokens == 0
    for parse in (chat, completion):
        assert refusal(parse, max_tokens=0).param == "max_tokens"


def test_the_models_repetition_penalty_is_a_default_like_the_others() -> None:
    defaults = model(VOCAB, repetition_penalty=1.1)
    assert chat(defaults).options.params.repetition_penalty == 1.1
    assert chat(defaults, repetition_penalty=1).options.params.repetition_penalty == 1


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        *[
            (parse, fields, next(iter(fields)))
            for parse in (chat, completion)
            for fields in (
                {"presence_penalty": False},
                {"presence_penalty": 2.1},
                {"frequency_penalty": -2.1},
                {"repetition_penalty": 0},
                {"logit_bias": {"one": 1}},
                {"logit_bias": {"5": 101}},
                {"logit_bias": {"-5": 1}},
                {"logit_bias": {"99999999999": 1}},
                {"min_tokens": -1},
                {"min_tokens": 9, "max_tokens": 8},
                {"prompt_logprobs": 21},
                {"prompt_logprobs": 1, "stream": True},
                {"allowed_token_ids": []},
                {"allowed_token_ids": [-1]},
                {"allowed_token_ids": [5] * 8193},
                {"allowed_token_ids": [VOCAB]},
                {"stop_token_ids": [VOCAB]},
                {"logit_bias": {str(VOCAB): 1}},
                {"logit_bias": {"05": 1}},
                {"logit_bias": {"5\n": 1}},
                {"bad_words": [""]},
            )
        ],
    ],
)
def test_a_sampling_field_that_cannot_be_honoured_is_named(
    parse: Any, fields: dict[str, Any], param: str
) -> None:
    error = refusal(parse, **fields)
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (chat, {"functions": [{}]}),
        (chat, {"function_call": "auto"}),
        (chat, {"audio": {}}),
        (chat, {"modalities": ["audio"]}),
        (chat, {"prediction": {"type": "content"}}),
        (chat, {"reasoning_effort": "high"}),
        (chat, {"store": True}),
        (completion, {"best_of": 2}),
        (completion, {"suffix": "end"}),
    ],
)
def test_what_we_lack_is_refused_by_name(parse: Any, fields: dict[str, Any]) -> None:
    error = refusal(parse, **fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", next(iter(fields)))
    assert next(iter(fields)) in error.message


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (
            chat,
            {
                "tools": [],
                "tool_choice": "none",
                "functions": None,
                "response_format": {"type": "text"},
                "logprobs": False,
                "top_logprobs": 0,
                "modalities": ["text"],
                "audio": None,
                "parallel_tool_calls": True,
                "store": False,
            },
        ),
        (completion, {"best_of": 1, "echo": False, "suffix": "", "logprobs": None}),
        *[
            (
                parse,
                {
                    "n": 1,
                    "logit_bias": {},
                    "presence_penalty": 0,
                    "frequency_penalty": 0.0,
                    "repetition_penalty": 1.0,
                    "user": "me",
                    "metadata": {"a": "b"},
                    "service_tier": "auto",
                    "stop": None,
                    "stream": None,
                    "seed": None,
                },
            )
            for parse in (chat, completion)
        ],
    ],
)
def test_neutral_and_harmless_fields_pass(parse: Any, fields: dict[str, Any]) -> None:
    assert parse(**fields).options == parse().options


def test_a_field_nobody_knows_is_refused_unless_null() -> None:
    error = refusal(chat, temprature=0.5)
    assert (error.code, error.param) == ("unknown_parameter", "temprature")
    assert error.message.endswith("did you mean temperature?")
    assert len(refusal(chat, **{"x" * 10_000: 1}).message) < 200
    chat(temprature=None)
    refusal(chat, prompt="for the other endpoint")


def test_all_roles_and_list_content_are_taken() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    call = chat(
        messages=[
            {"role": "developer", "content": "D"},
            {"role": "system", "content": parts},
            {"role": "user", "content": "U", "name": "Ann"},
            {"role": "assistant", "content": "A", "refusal": None, "tool_calls": []},
            {"role": "tool", "content": "T", "tool_call_id": "x"},
        ]
    )
    assert call.conversation.messages == [
        {"role": "system", "content": "D"},
        {"role": "system", "content": "one two"},
        {"role": "user", "content": "U", "name": "Ann"},
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "T", "tool_call_id": "x"},
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([USER, {"content": "Hi"}], "messages[1].role"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
            "messages[0].tool_calls[0].function",
        ),
        ([{"role": "user", "content": "Hi", "mood": "good"}], "messages[0].mood"),
        ([{"role": "user", "content": "Hi", "name": 5}], "messages[0].name"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    error = refusal(chat, messages=messages)
    assert (error.status, error.param) == (400, param)


def test_the_four_forms_of_a_prompt() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], ["a", ""], [[]], [[1], []]),
        *(["a", 1], [1, "a"], [[1], "a"], [1.5], [True], [[1, "a"]], None, 5, {"a": 1}),
        *([-1], [VOCAB], [[VOCAB]], [10**30], [-(10**30)]),
    ],
)
def test_bad_prompts_are_refused(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert error.status == 400
    assert (error.param or "").startswith("prompt")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_tokens", value) for value in (0, -1, 2.5, "5", True, [1])],
        *[("temperature", value) for value in (-0.1, 101, 1e300, "hot", [1])],
        *[("top_p", value) for value in (0, -1, 1.1, "x")],
        *[("top_k", value) for value in (-2, 2**31, 10**30, 0.5)],
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("n", value) for value in (0, -1, 129, 10**30, "2")],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 10**30, 0.5, "x")],
        *[("stop", value) for value in ("", [""], [1], {"a": 1}, ["x"] * 17)],
        *[("stop_token_ids", value) for value in ([-1], [10**30], ["a"], 5)],
        *[("stream", value) for value in (1, "yes")],
        *[("model", value) for value in (5, ["tiny"])],
        ("stream_options", {"include_usage": True}),
    ],
)
def test_values_out_of_range_or_of_the_wrong_type_are_named(field: str, value: Any) -> None:
    for parse in (chat, completion):
        error = refusal(parse, **{field: value})
        assert (error.status, (error.param or "").split("[")[0]) == (400, field)


def test_huge_max_tokens_are_fine_because_they_are_clamped() -> None:
    assert chat(max_tokens=10**30).options.params.max_tokens == 10**30


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"5",
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"\xff\xfe",
        b'{"a":"\xed\xa0\x80"}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b"[" * 100_000,
        b'{"prompt":"a"} trailing',
    ],
)
def test_what_is_not_a_json_object_is_a_400(body: bytes) -> None:
    for parse in (
        lambda: parse_chat(body, TINY),
        lambda: parse_completion(body, TINY),
    ):
        with pytest.raises(RequestError) as caught:
            parse()
        assert caught.value.status == 400


def test_what_is_missing_is_named() -> None:
    for parse, param in (
        (lambda: parse_chat(b"{}", TINY), "messages"),
        (lambda: parse_completion(b"{}", TINY), "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            parse()
        assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)


FIELDS = st.sampled_from(
    [
        *(
            "model",
            "messages",
            "prompt",
            "stream",
            "stream_options",
            "n",
            "max_tokens",
            "temperature",
            "top_p",
        ),
        *("stop", "seed", "top_k", "min_p", "tools", "logprobs", "echo", "stop_token_ids", "user"),
        *("max_completion_tokens", "response_format"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(USER),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(FIELDS | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=400)
@given(fields=st.dictionaries(FIELDS, JSON, max_size=6), has_prompt=st.booleans())
def test_any_json_is_understood_or_refused_with_a_400(fields: dict[str, Any], has_prompt: bool) -> None:
    whole = {"messages": [USER], **fields} if has_prompt else fields
    body = msgspec.json.encode(whole)
    assert refused_or_fine(lambda: parse_chat(body, TINY))
    assert refused_or_fine(lambda: parse_completion(body, TINY))


def refused_or_fine(parse: Callable[[], object]) -> bool:
    try:
        parse()
    except RequestError as error:
        return error.status == 400 and bool(error.code)
    return True


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"prompt_logprobs": 20}, 21),
        ({"logprobs": 4, "echo": True}, 6),
        ({"prompt_logprobs": 0, "return_token_ids": True}, 2),
    ],
)
def test_what_several_choices_say_of_long_prompts_is_bounded(
    fields: dict[str, Any], values: int, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(tmp_path))
    context = CallContext(tokenizer, "tiny", "id", Usage)
    most = MAX_PROMPT_VALUES // (2 * values)
    two, one = completion(n=2, **fields), completion(**fields)
    two.answer_format(EncodedCall([[7] * most], ReplyPlan(two.options.params)), context)
    one.answer_format(
        EncodedCall([[7] * 3 * most], ReplyPlan(one.options.params)), context
    )  # one choice says all there is
    for call, prompts, param in (
        (two, [[7] * (most + 1)], "n"),
        (completion(prompt=["a", "b"], **fields), [[7] * (most + 1)] * 2, "prompt"),
    ):
        with pytest.raises(RequestError, match=f"up to {MAX_PROMPT_VALUES}") as caught:
            call.answer_format(EncodedCall(prompts, ReplyPlan(call.options.params)), context)
        assert (caught.value.status, caught.value.param) == (400, param)
    if "echo" not in fields:  # a chat says it once, beside the choices
        many = chat(n=128, **fields)
        many.answer_format(EncodedCall([[7] * (most + 1)], ReplyPlan(many.options.params)), context)
