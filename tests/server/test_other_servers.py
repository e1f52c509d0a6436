"""What clients of other servers notice: fields and answers that vLLM and SGLang have, over real HTTP."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer
from small_model import make_folder

from minisgl.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
USER = [{"role": "user", "content": "@say hello world"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("others") / "model")
    with RunningServer(folder) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("same") / "model"))


def ask(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    """The answer; the prompt is `USER`'s."""
    prompt = {"messages": USER} if path == CHAT else {"prompt": USER[0]["content"]}
    status, answer, _ = server.call(path, {**prompt, "max_tokens": 50, **fields})
    assert status == 200, answer
    return answer


def chunks(server: RunningServer, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without [DONE]."""
    prompt = {"messages": USER} if path == CHAT else {"prompt": USER[0]["content"]}
    body = json.dumps({**prompt, "max_tokens": 50, "stream": True, **fields}).encode()
    with urllib.request.urlopen(server.url(path), body, timeout=LIMIT_S) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_stop_reason_says_what_ended_the_answer(
    server: RunningServer, tokenizer: Tokenizer, path: str
) -> None:
    token_id = tokenizer.encode(" world", False)[0]
    cases: list[tuple[dict[str, Any], str, str | int | None]] = [
        ({}, "stop", None),
        ({"max_tokens": 1}, "length", None),
        ({"stop": ["nothing", "wor"]}, "stop", "wor"),
        ({"stop_token_ids": [7, token_id]}, "stop", token_id),
    ]
    for fields, finish_reason, stop_reason in cases:
        choice = ask(server, path, **fields)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
        last = chunks(server, path, **fields)[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == (finish_reason, stop_reason)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_first_chunk_has_the_prompts_token_ids(server: RunningServer, path: str) -> None:
    whole = ask(server, path, return_token_ids=True)
    first, *others = chunks(server, path, return_token_ids=True)
    place = "choices" if path == COMPLETION else None
    ids = [one[place][0] if place else one for one in (whole, first)]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"] != []
    assert not any("prompt_token_ids" in json.dumps(chunk) for chunk in others)


def test_a_model_says_where_it_comes_from(server: RunningServer) -> None:
    card = server.call("/v1/models")[1]["data"][0]
    assert card["root"].endswith("/model")
    assert card["id"] == "tiny"


def test_a_seed_of_minus_one_is_none(server: RunningServer) -> None:
    ask(server, CHAT, seed=-1, temperature=1)
    assert ask(server, CHAT, seed=-1)["choices"][0]["message"]["content"] == "hello world"


def test_errors_speak_json(server: RunningServer) -> None:
    for value, shown in ((True, "true"), ("x", '"x"'), ([None, 1.5], "[null, 1.5]")):
        status, answer, _ = server.call(CHAT, {"messages": USER, "temperature": value})
        assert (status, answer["error"]["message"].endswith(f"got {shown}")) == (400, True), answer


@pytest.mark.parametrize("text", [rb"\ud800", rb"a\udc00b", rb"\ud800\u0041", b"\xed\xa0\x80"])
def test_a_lone_surrogate_is_called_one(server: RunningServer, text: bytes) -> None:
    status, answer, _ = server.call(COMPLETION, b'{"max_tokens": 5, "prompt": "%s"}' % text)
    assert (status, answer["error"]["code"]) == (400, "invalid_unicode")
    assert "lone surrogate \\ud" in answer["error"]["message"]


def test_a_pair_of_surrogates_is_a_character(server: RunningServer) -> None:
    assert server.call(COMPLETION, rb'{"max_tokens": 5, "prompt": "\ud83d\ude00"}')[0] == 200
    status, answer, _ = server.call(COMPLETION, rb'{"prompt": "\ud83d\ude00", }')
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
