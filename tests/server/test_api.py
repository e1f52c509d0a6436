"""The API over real HTTP, with the fake engine behind a real server process."""

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import CONTEXT, make_folder

from minisgl.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "@say hello world"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(
        tmp_path_factory.mktemp("api") / "model", generation={"temperature": 0.6, "top_k": 20}
    )
    with RunningServer(folder, max_body_bytes=100_000, max_queued_requests=64) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("same") / "model"))


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, False))


def all_left(server: RunningServer) -> None:
    """No open request remains in the server or in the engine."""
    eventually(lambda: server.health()[1]["open_requests"] == 0, "no open request in the server")
    assert server.health()[1]["running_requests"] == 0
    eventually(lambda: server.report()["running"] == 0, "no running request in the engine")


def test_a_chat_answer_has_openais_form(server: RunningServer, tokenizer: Tokenizer) -> None:
    status, answer, headers = server.call("/v1/chat/completions", {"model": "tiny", "messages": [USER]})
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    assert abs(answer["created"] - server.call("/v1/models")[1]["data"][0]["created"]) < 1000
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    num_prompt, num_out = count(tokenizer, prompt), count(tokenizer, "hello world") + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_out,
        "total_tokens": num_prompt + num_out,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_completion_has_openais_form(server: RunningServer, tokenizer: Tokenizer) -> None:
    status, answer = server.complete("@say the fox")
    assert status == 200
    assert answer["object"] == "text_completion"
    choice = {"index": 0, "text": "the fox", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert answer["choices"] == [choice]
    assert answer["usage"]["completion_tokens"] == count(tokenizer, "the fox") + 1


def test_the_openai_client_reads_both_endpoints(server: RunningServer) -> None:
    with server.client() as client:
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "@say hi"}])
        assert chat.choices[0].message.content == "hi"
        assert chat.choices[0].finish_reason == "stop"
        text = client.completions.create(model="tiny", prompt="@say hello", max_tokens=1)
        assert text.choices[0].finish_reason == "length"
        assert text.usage is not None
        assert text.usage.completion_tokens == 1
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "minisgl"
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="Hi")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model="tiny", messages=[])
        assert refused.value.param == "messages"


@pytest.mark.parametrize("text", ["hello world", "好 🎉 é fox", ""])
def test_the_openai_client_streams_a_chat(server: RunningServer, tokenizer: Tokenizer, text: str) -> None:
    with server.client() as client:
        stream = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"@say {text}"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == text
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == count(tokenizer, text) + 1


def test_the_openai_client_streams_a_completion(server: RunningServer) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="@say hello world", stream=True, max_tokens=99
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


def test_the_events_on_the_wire_are_exact(server: RunningServer) -> None:
    async def read() -> tuple[str, bytes]:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "@burst hi"}], "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(server.url("/v1/chat/completions"), json=body) as answer,
        ):
            return answer.headers["Content-Type"], await answer.read()

    content_type, raw = asyncio.run(read())
    assert content_type.startswith("text/event-stream")
    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices] == [
        ({"role": "assistant", "content": "", "refusal": None}, None),
        ({"content": "hi"}, None),
        ({}, "stop"),
    ]


def test_many_tokens_in_one_event_count_as_tokens(server: RunningServer, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox jumps"
    status, answer = server.complete(f"@burst {text}")
    assert status == 200
    assert answer["usage"]["completion_tokens"] == count(tokenizer, text) + 1


def test_stop_strings_end_the_answer_and_reach_the_engine(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    aborted = server.report()["aborted"]
    status, answer = server.complete("@say hello world and more", stop=["orld a", "never"])
    assert status == 200
    assert answer["choices"][0]["text"] == "hello w"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] <= count(tokenizer, "hello world and")
    assert server.report()["aborted"] == aborted + 1


def test_special_and_stop_tokens_do_not_leak(server: RunningServer, tokenizer: Tokenizer) -> None:
    tool = tokenizer.encode("<tool>", False)
    _, answer = server.complete("@say hello<tool>more", stop_token_ids=tool)
    assert answer["choices"][0]["text"] == "hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    _, answer = server.complete("@say hello<|endoftext|> you")
    assert answer["choices"][0]["text"] == "hello you"


def test_n_and_several_prompts_give_choices_in_order(server: RunningServer, tokenizer: Tokenizer) -> None:
    prompts = ["@say fox", "@cached dog"]
    status, answer = server.complete(prompts, n=2, seed=5)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["fox", "fox", "dog", "dog"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    lengths = [count(tokenizer, prompt) for prompt in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == lengths[1] // 2
    with server.client() as client:
        chunks = list(
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "@say hi"}], n=3, stream=True
            )
        )
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == "hi"
        assert mine[-1].finish_reason == "stop"


def test_defaults_of_the_model_reach_the_engine(server: RunningServer) -> None:
    assert server.report()["params"] == [0.6, 1.0, 20]
    status, answer = server.complete("@report", temperature=0, top_k=0, max_tokens=250)
    assert status == 200
    assert json.loads(answer["choices"][0]["text"])["params"] == [0.0, 1.0, 0]


def test_token_prompts_are_taken_as_they_are(server: RunningServer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("@say fox", False)
    for prompt in (ids, [ids]):
        status, answer = server.complete(prompt)
        assert (status, answer["choices"][0]["text"]) == (200, "fox")
        assert answer["usage"]["prompt_tokens"] == len(ids)


def test_a_prompt_that_leaves_no_room_is_a_400_and_max_tokens_are_clamped_to_the_room(
    server: RunningServer, tokenizer: Tokenizer
) -> None:
    one = tokenizer.encode("a", False)
    status, answer = server.complete(one * CONTEXT)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "prompt"
    status, answer = server.complete(one * (CONTEXT - 1), max_tokens=10**30)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    long = {"model": "tiny", "messages": [{"role": "user", "content": "a " * 30_000}]}
    status, answer, _ = server.call("/v1/chat/completions", long)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_template_that_refuses_is_a_400_and_the_server_is_well(server: RunningServer) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "template error"}]}
    status, answer, _ = server.call("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "chat_template_error")
    assert "not this" in answer["error"]["message"]
    assert server.health()[0] == 200


def test_a_refusal_of_the_engine_keeps_its_status_streaming_or_not(server: RunningServer) -> None:
    for stream in (False, True):
        status, answer = server.complete("@refuse", stream=stream)
        assert status == 422
        assert answer["error"]["message"] == "this engine will not"
        assert answer["error"]["code"] == "refused"
    all_left(server)


def test_an_error_in_the_middle_is_the_whole_answer_or_the_last_event(server: RunningServer) -> None:
    prompt, error = "@spoil some text", {"code": "no_finite_logits", "message": "all NaN"}
    for n in (1, 3):
        status, answer = server.complete(prompt, n=n)
        assert (status, answer["error"] | error) == (500, answer["error"])
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 99, "n": n, "stream": True})
        request = urllib.request.Request(
            server.url("/v1/completions"), body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as stream:
            events = re.findall(r"data: (.*)", stream.read().decode())
        assert len(events) > 2
        assert "[DONE]" not in events
        last = json.loads(events[-1])["error"]
        assert last | error == last
    all_left(server)


def test_ghost_tokens_of_the_engine_reach_nobody(server: RunningServer, tokenizer: Tokenizer) -> None:
    status, answer = server.complete("@ghost boo")
    assert (status, answer["choices"][0]["text"]) == (200, "boo")
    assert answer["usage"]["completion_tokens"] == count(tokenizer, "boo") + 1
    all_left(server)


@pytest.mark.parametrize(
    ("path", "body", "method", "status", "code"),
    [
        ("/v1/nothing", None, "GET", 404, "not_found"),
        ("/v1/chat/completions", None, "GET", 405, "method_not_allowed"),
        ("/health", {}, "POST", 405, "method_not_allowed"),
        ("/v1/models/other", None, "GET", 404, "model_not_found"),
        ("/v1/completions", b"{", "POST", 400, "invalid_json"),
        ("/v1/completions", b"\xff\xfe", "POST", 400, "invalid_json"),
        ("/v1/completions", [1], "POST", 400, "invalid_json"),
        ("/v1/completions", b" " * 100_001, "POST", 413, "body_too_large"),
        ("/v1/chat/completions", {"model": "no", "messages": [USER]}, "POST", 404, "model_not_found"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "POST", 400, "invalid_value"),
    ],
)
def test_every_error_is_openais_object(
    server: RunningServer, path: str, body: Any, method: str, status: int, code: str
) -> None:
    got, answer, _ = server.call(path, body, method)
    assert (got, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


def test_version_and_models(server: RunningServer) -> None:
    assert server.call("/version")[1]["version"]
    listing = server.call("/v1/models")[1]
    assert listing["object"] == "list"
    assert listing["data"][0]["object"] == "model"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_takes_its_requests_out_of_the_engine(
    server: RunningServer, stream: bool
) -> None:
    before = server.report()

    async def leave() -> None:
        body = {"model": "tiny", "prompt": "@wait some text", "stream": stream, "n": 2, "max_tokens": 100}
        async with aiohttp.ClientSession() as session:
            call = asyncio.ensure_future(session.post(server.url("/v1/completions"), json=body))
            if stream:
                answer = await asyncio.wait_for(call, LIMIT_S)
                await asyncio.wait_for(answer.content.readany(), LIMIT_S)
                answer.close()
            else:
                loop = asyncio.get_running_loop()
                while (await loop.run_in_executor(None, server.health))[1]["running_requests"] < 2:
                    pass
                call.cancel()

    asyncio.run(leave())
    all_left(server)
    assert server.report()["aborted"] == before["aborted"] + 2


def test_too_many_open_requests_get_a_429_with_retry_after(server: RunningServer) -> None:
    async def crowd() -> None:
        body = {"model": "tiny", "prompt": "@wait", "stream": True, "n": 32, "max_tokens": 100}
        url = server.url("/v1/completions")
        async with aiohttp.ClientSession() as session:
            for _ in range(2):
                asyncio.ensure_future(session.post(url, json=body))  # noqa: RUF006  ends with the session
            loop = asyncio.get_running_loop()
            while (await loop.run_in_executor(None, server.health))[1]["open_requests"] < 64:
                pass
            async with session.post(url, json={"model": "tiny", "prompt": "x"}) as answer:
                assert answer.status == 429
                assert int(answer.headers["Retry-After"]) > 0
                assert (await answer.json())["error"]["type"] == "rate_limit_error"

    asyncio.run(asyncio.wait_for(crowd(), 2 * LIMIT_S))
    all_left(server)


BAD: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user", "content": "template error"}]},
    {"messages": "hi"},
    {"messages": [USER], "max_tokens": -5},
    {"messages": [USER], "temperature": "hot"},
    {"messages": [USER], "top_p": 1e300},
    {"messages": [USER], "n": 10**20},
    {"messages": [USER], "tools": [{}]},
    {"messages": [USER], "model": "unknown"},
    {"messages": [{"role": "user", "content": "long " * 1000}]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [10**9]},
    {"prompt": [1] * 10_000},
    {"prompt": "x", "seed": 10**40},
    b"{",
    b"\xc3\x28",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"temperature": NaN}',
    b"null",
    b"",
]


def test_the_server_is_well_after_1000_bad_requests_among_good_ones(
    server: RunningServer,
) -> None:
    rng = random.Random(0)

    async def one(session: aiohttp.ClientSession) -> tuple[bool, int, bytes]:
        good = rng.random() < 0.2
        body: Any = {"messages": [USER], "stream": rng.random() < 0.5} if good else rng.choice(BAD)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        chat = good or rng.random() < 0.5 if not isinstance(body, dict) else "messages" in body
        path = "/v1/chat/completions" if chat else "/v1/completions"
        async with session.post(server.url(path), data=data) as answer:
            return good, answer.status, await answer.read()

    async def storm() -> None:
        gate = asyncio.Semaphore(16)
        num_bad = 0

        async def guarded(session: aiohttp.ClientSession) -> bool:
            async with gate:
                good, status, body = await one(session)
            if good:
                assert status == 200, body
                return True
            assert 400 <= status < 500, (status, body)
            assert json.loads(body)["error"]["message"]
            return False

        async with aiohttp.ClientSession() as session:
            results = await asyncio.gather(*(guarded(session) for _ in range(1300)))
            num_bad = results.count(False)
        assert num_bad >= 1000

    asyncio.run(asyncio.wait_for(storm(), 60))
    all_left(server)
    assert server.health()[0] == 200
    assert server.complete("@say hello")[1]["choices"][0]["text"] == "hello"
