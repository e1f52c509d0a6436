"""A streamed answer is the whole answer, byte for byte, wherever tokens, events and stop strings are cut."""

import json
import random
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer
from small_model import make_folder

PIECES = [
    *("hello", "world", " ", "  ", "\n", "\t", "\r\n", "the quick fox", "data: ", "data: [DONE]", "\n\n"),
    *("🎉", "👩\u200d👩\u200d👧", "🇩🇪", "好", "日本語", "한국어", "e\u0301", "a\u0300\u0301\u0302", "ﷺ"),
    *("\u200d", "\ufeff", "def f(x):\n    return x", "{'a': [1, 2]}", "</div>", "\\n", '"', "\\", "\x00"),
    *("\x7f", "ÿ", "\U0010ffff"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("streams") / "model", context=4096)
    with RunningServer(folder) as running:
        yield running.ready()


def text_of(rng: random.Random) -> str:
    # The fake engine's command ends at the first space; what follows is the text.
    return "".join(rng.choices(PIECES, k=rng.randint(1, 12)))


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    status, answer, _ = server.call(path, body)
    assert status == 200, answer
    choice = answer["choices"][0]
    return (
        choice["message"]["content"] if "message" in choice else choice["text"],
        choice["finish_reason"],
        answer["usage"],
    )


def streamed(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with urllib.request.urlopen(server.url(path), json.dumps(asked).encode(), timeout=LIMIT_S) as answer:
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    text, reason = "", ""
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert reason == "", "nothing comes after the end"
        text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        reason = choice["finish_reason"] or ""
    return text, reason, last["usage"]


def both(server: RunningServer, text: str, verb: str, chat: bool, **fields: Any) -> tuple[str, str]:
    """The answer's text and end, after streaming has given the same."""
    body: dict[str, Any] = {"max_tokens": 2000, **fields}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = f"@{verb} {text}"
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    answer = whole(server, path, body)
    assert streamed(server, path, body) == answer
    return answer[:2]


def test_random_texts_come_whole_whether_streamed_or_not(server: RunningServer) -> None:
    rng = random.Random(1)
    for number in range(100):
        text = text_of(rng)
        verb = "burst" if number % 2 else "say"
        assert both(server, text, verb, chat=number % 3 == 0) == (text, "stop"), repr(text)


def test_random_stop_strings_end_the_text_where_they_begin(server: RunningServer) -> None:
    rng = random.Random(2)
    for number in range(100):
        text = text_of(rng) + text_of(rng)
        start = rng.randrange(len(text))
        stop = text[start : start + rng.randint(1, 6)]
        expected = text.partition(stop)[0]
        assert both(server, text, "say", chat=number % 2 == 0, stop=[stop, "never there"]) == (
            expected,
            "stop",
        )


@pytest.mark.parametrize("stop", ["🎉世", "e\u0301n", "STOP", "ab"])
def test_a_stop_string_is_found_wherever_the_tokens_cut_it(server: RunningServer, stop: str) -> None:
    """What stands before it moves the borders of tokens over it, and its own beginnings stand alone, too."""
    for length in range(8):
        for begun in range(1, len(stop)):
            before = "abcdefgh"[1 : 1 + length] + stop[:begun] + "🎊"
            assert both(server, before + stop + "after", "say", chat=False, stop=stop) == (before, "stop")


def test_an_answer_cut_by_max_tokens_inside_a_character_is_the_same_both_ways(server: RunningServer) -> None:
    for max_tokens in range(1, 9):
        text, reason = both(server, "🎉好e\u0301", "say", chat=False, max_tokens=max_tokens)
        assert reason == "length"
        assert "🎉好e\u0301".startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("chat", [True, False])
def test_every_chunk_says_what_the_call_has_used_so_far_if_asked(server: RunningServer, chat: bool) -> None:
    body: dict[str, Any] = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    body["stream_options"]["continuous_usage_stats"] = True
    prompt = "@say hello world"
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with urllib.request.urlopen(server.url(path), json.dumps(body).encode(), timeout=LIMIT_S) as answer:
        events = re.findall(r"data: ({.*})", answer.read().decode())
    used = [json.loads(event)["usage"] for event in events]
    counts = [usage["completion_tokens"] for usage in used]
    whole = server.call(path, {name: value for name, value in body.items() if "stream" not in name})[1]
    assert counts == sorted(counts)
    assert (counts[0] == 0) if chat else (1 <= counts[0] < counts[-1])
    assert all(usage["prompt_tokens"] == whole["usage"]["prompt_tokens"] for usage in used)
    assert used[-1] == whole["usage"]
    del body["stream_options"]["include_usage"]
    with urllib.request.urlopen(server.url(path), json.dumps(body).encode(), timeout=LIMIT_S) as answer:
        assert "usage" not in answer.read().decode(), "without include_usage, no chunk has it"
