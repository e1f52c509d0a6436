"""POST /generate with SGLang's fields, over real HTTP, and its call's parameters."""

import itertools
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer
from small_model import make_folder

from minisgl.errors import RequestError
from minisgl.server.apis.generate import parse_generate
from minisgl.server.apis.native_generate import NativeCall, NativeSampling
from minisgl.server.served_model import ServedModel, load_served_model
from minisgl.text.tokenizer import Tokenizer

SAY = "@say hello world"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("native") / "model", generation={"temperature": 0.6})


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return load_served_model(folder, "tiny")


def ask(server: RunningServer, **fields: Any) -> Any:
    status, answer, _ = server.call("/generate", fields)
    assert status == 200, answer
    return answer


def events(server: RunningServer, **fields: Any) -> list[Any]:
    body = json.dumps({"stream": True, **fields}).encode()
    with urllib.request.urlopen(server.url("/generate"), body, timeout=LIMIT_S) as answer:
        found = answer.read().decode().split("\n\n")
    assert found[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in found[:-2]]


def parse(served: ServedModel, **fields: Any) -> NativeCall:
    call = parse_generate(json.dumps(fields).encode(), served)
    assert isinstance(call, NativeCall)
    return call


def test_an_answer_has_sglangs_form(server: RunningServer, served: ServedModel) -> None:
    answer = ask(server, text=SAY, rid="mine", lora_path=None)
    info = answer["meta_info"]
    assert (answer["text"], info.pop("e2e_latency") > 0, len(info.pop("id")) > 8) == (
        "hello world",
        True,
        True,
    )
    tokenizer = served.tokenizer
    ids = [*tokenizer.encode("hello world", False), 2]
    assert answer["output_ids"] == ids
    assert info == {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": len(tokenizer.encode(SAY, True)),
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "default",
    }
    assert ask(server, input_ids=tokenizer.encode(SAY, True))["text"] == "hello world"


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        ({"max_new_tokens": 2}, {"type": "length", "length": 2}),
        ({"stop": ["wor"]}, {"type": "stop", "matched": "wor"}),
        ({}, {"type": "stop", "matched": 2}),
    ],
)
def test_a_stream_ends_with_the_whole_answer(
    server: RunningServer, sampling: dict[str, Any], finish: dict[str, Any]
) -> None:
    whole = ask(server, text=SAY, sampling_params=sampling)
    parts = events(server, text=SAY, sampling_params=sampling)
    assert whole["meta_info"]["finish_reason"] == finish
    for one in (whole, parts[-1]):
        del one["meta_info"]["id"], one["meta_info"]["e2e_latency"]
    assert parts[-1] == whole
    for earlier, later in itertools.pairwise(parts):
        assert later["text"].startswith(earlier["text"]), "each event has all text so far"
        assert earlier["meta_info"]["finish_reason"] is None
        assert earlier["output_ids"] == later["output_ids"][: earlier["meta_info"]["completion_tokens"]]


def test_several_prompts_or_choices_are_a_list(server: RunningServer) -> None:
    for fields in ({"text": [SAY, "@say x"]}, {"text": SAY, "sampling_params": {"n": 2}}):
        answers = ask(server, **fields)
        assert [one["text"] for one in answers] == [
            "hello world",
            "x" if "n" not in str(fields) else "hello world",
        ]
        last = {one["index"]: one["text"] for one in events(server, **fields)}
        assert last == dict(enumerate(one["text"] for one in answers))
    assert [one["text"] for one in ask(server, text=[SAY])] == ["hello world"], "a list of one is a list"


def test_mini_sglangs_body_is_answered_as_before(server: RunningServer) -> None:
    body = json.dumps({"prompt": SAY, "max_tokens": 50}).encode()
    with urllib.request.urlopen(server.url("/generate"), body, timeout=LIMIT_S) as answer:
        assert answer.read().decode().replace("data: ", "").replace("\n\n", "") == "hello world[DONE]"


def test_sglangs_fields_count(served: ServedModel) -> None:
    call = parse(
        served,
        text=["a", "b"],
        stream=True,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
        extra_key="salt",
        priority=2,
    )
    options, params = call.options, call.options.params
    assert (call.prompts, options.stream, options.cache_salt, options.priority) == (
        ["a", "b"],
        True,
        "salt",
        2,
    )
    assert (params.logprobs, params.prompt_logprobs, params.logprob_token_ids) == (3, 3, (5, 6))
    assert params.max_tokens == 128
    assert params.temperature == 0.6, "the model's default"
    assert parse(served, input_ids=[[5], [6, 7]]).prompts == [[5], [6, 7]]
    assert parse(served, text="a", return_logprob=True).options.params.prompt_logprobs is None


def test_sampling_params_mean_what_they_mean(served: ServedModel) -> None:
    given: dict[str, Any] = {
        **{"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x"]},
        **{
            "stop_token_ids": [9],
            "skip_special_tokens": False,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
        },
        **{
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1},
            "allowed_token_ids": [5, 6],
            "bad_words": ["y"],
        },
        **{"ignore_eos": True, "include_stop_str_in_output": True, "min_tokens": 2},
    }
    params = parse(served, text="a", sampling_params=given).options.params
    for name, value in given.items():
        found = getattr(params, name)
        expected = {5: 1.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert found == expected, name
    own = {"max_new_tokens": 7, "min_new_tokens": 3, "n": 2, "sampling_seed": 8, "no_stop_trim": True}
    call = parse(served, text="a", sampling_params=own)
    params = call.options.params
    assert (params.max_tokens, params.min_tokens, call.options.n, params.seed) == (7, 3, 2, 8)
    assert params.include_stop_str_in_output
    for name, value in (
        ("json_schema", '{"type": "object"}'),
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "any_text"}}),
    ):
        given[name] = value
        assert parse(served, text="a", sampling_params={name: value}).options.params.grammar is not None
        assert parse(served, text="a", sampling_params={name: ""}).options.params.grammar is None
    assert {*given, *own} == {*NativeSampling.__struct_fields__}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": "a", "prompt": "a", "max_tokens": 1}, "prompt"),
        ({"prompt": "a", "max_tokens": 1, "sampling_params": {}}, "sampling_params"),
        ({"prompt": "a"}, "max_tokens"),
        ({"text": "a", "max_tokens": 1}, "max_tokens"),
        ({"text": ""}, "text"),
        ({"text": [1]}, "text"),
        ({"input_ids": [10**6]}, "input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
    ],
)
def test_what_it_cant_do_is_refused_by_name(served: ServedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse(served, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_log_probabilities_have_sglangs_form(folder: Path) -> None:
    """With the formatter alone, since the fake engine knows no log probabilities."""
    from minisgl.replies.plan import ReplyPlan
    from minisgl.request import PackedLogprobs, TokenLogprobs
    from minisgl.server.calls.call import CallContext, EncodedCall, Usage
    from minisgl.server.open_choices import Delta

    served = load_served_model(folder, "tiny")
    tokenizer = Tokenizer.from_folder(folder)
    call = parse(served, text="ab", return_logprob=True, top_logprobs_num=1, return_text_in_logprobs=True)
    context = CallContext(tokenizer, "tiny", "id", Usage)
    answer = call.answer_format(EncodedCall([[5, 6]], ReplyPlan(call.options.params)), context)
    entry = TokenLogprobs(66, -0.5, 1, [66], [-0.5])
    info = json.loads(answer.whole([Delta(0, "a", 1, 0, "length", [66], [entry])]))["meta_info"]
    text = tokenizer.token_bytes(66).decode()
    assert info["output_token_logprobs"] == [[-0.5, 66, text]]
    assert info["output_top_logprobs"] == [[[-0.5, 66, text]]]
    assert info["input_token_logprobs"] == []
    call = parse(served, text="ab", return_logprob=True, logprob_start_len=0)
    answer = call.answer_format(EncodedCall([[5, 6]], ReplyPlan(call.options.params)), context)
    prompt = PackedLogprobs(b"\x06\0\0\0", b"\0\0\x80\xbf" + b"\0\0\0\0")  # token 6: -1.0, rank 1
    info = json.loads(answer.whole([Delta(0, "a", 1, 0, "length", [66], [entry], prompt)]))["meta_info"]
    assert info["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None]]
