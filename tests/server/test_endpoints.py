"""The routes beside OpenAI's own: tokens, figures, aborting, /generate, the description of the API."""

import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import LIMIT_S, RunningServer, eventually
from small_model import CONTEXT, make_folder

from minisgl.engine.watch.request_times import RequestTimes
from minisgl.ipc.messages import Ready
from minisgl.ipc.questions import Status
from minisgl.lives import STEP_BOUNDS_MS
from minisgl.server.apis.models import ModelList
from minisgl.server.metrics import EngineFigures, exposition
from minisgl.server.stats import ServerStats
from minisgl.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if shout is defined %}{{ shout }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "@say hello"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = make_folder(tmp_path_factory.mktemp("endpoints") / "model", template=TEMPLATE)
    with RunningServer(folder, max_queued_requests=8, max_queued_tokens=60) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_folder(tmp_path_factory.mktemp("same") / "model"))


def raw(server: RunningServer, path: str, body: Any = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(server.url(path), data, timeout=LIMIT_S) as answer:
        return answer.read().decode()


def figures(server: RunningServer) -> dict[str, float]:
    """Every sample of /metrics by its name, the model's label left out."""
    found = {}
    for family in text_string_to_metric_families(raw(server, "/metrics")):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("minisgl:") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


class Waiting:
    """Calls that the engine does not answer, in threads; `results` get (status, body) when they end."""

    def __init__(self, server: RunningServer, *prompts: str) -> None:
        self.results: list[tuple[int, Any]] = []
        self._threads = [
            threading.Thread(target=lambda text=text: self.results.append(server.complete(text)), daemon=True)
            for text in prompts
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[tuple[int, Any]]:
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in self._threads)
        return self.results


@pytest.mark.parametrize("text", ["the quick fox", "好 🎉 é\n<|im_end|>", ""])
def test_tokenize_gives_the_tokenizers_ids_and_detokenize_the_text(
    server: RunningServer, tokenizer: Tokenizer, text: str
) -> None:
    status, answer, _ = server.call("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True})
    ids = tokenizer.encode(text, True)
    assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
    assert answer["max_model_len"] == CONTEXT
    assert len(answer["token_strs"]) == len(ids)
    assert server.call("/detokenize", {"tokens": ids})[1] == {"prompt": text}
    plain = text.replace("<|im_end|>", "")
    assert server.call("/detokenize", {"tokens": ids, "skip_special_tokens": True})[1] == {"prompt": plain}


def test_tokenize_renders_messages_as_the_chat_does(server: RunningServer, tokenizer: Tokenizer) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"shout": "HEY"}}
    _, answer, _ = server.call("/tokenize", body)
    prompt = "HEY<|im_start|>user\n@say hello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["tokens"] == tokenizer.encode(prompt, False)
    assert server.call("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"] == answer["count"]
    _, bare, _ = server.call("/tokenize", {"messages": [USER], "add_generation_prompt": False})
    assert bare["tokens"] == tokenizer.encode("<|im_start|>user\n@say hello<|im_end|>\n", False)
    chat = {"messages": [USER], "add_generation_prompt": False}
    assert server.call("/v1/chat/completions", chat)[1]["usage"]["prompt_tokens"] == bare["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "colour"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [100000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/generate", {"prompt": "a"}, "max_tokens"),
        ("/generate", {"prompt": "a", "max_tokens": 3, "temperature": 1}, "temperature"),
        ("/abort", {}, "request_id"),
        ("/abort", {"abort_all": True, "rid": "a"}, "rid"),
        ("/abort", {"request_id": "b", "rid": "a"}, "rid"),
        ("/v1/chat/completions", {"messages": [USER], "chat_template_kwargs": 3}, "chat_template_kwargs"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
        ),
        ("/v1/completions", {"prompt": "a", "priority": 2**31}, "priority"),
    ],
)
def test_a_body_with_a_mistake_is_refused_with_the_fields_name(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    status, answer, _ = server.call(path, body)
    assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)


def test_generate_streams_the_text_itself(server: RunningServer) -> None:
    lines = raw(server, "/generate", {"prompt": "@say hello\nworld 🎉", "max_tokens": 50}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = ["\n".join(part.removeprefix("data: ") for part in event.split("\n")) for event in lines[:-2]]
    assert len(events) > 2
    assert "".join(events) == "hello\nworld 🎉"
    assert server.report()["params"][0] == 1.0
    raw(server, "/generate", {"prompt": "@say hello", "max_tokens": 2, "ignore_eos": True})


def test_metrics_count_what_happened_and_only_that(server: RunningServer, tokenizer: Tokenizer) -> None:
    before = figures(server)
    prompt = "@say hello world"
    server.complete(prompt)
    server.complete(prompt, max_tokens=1)
    server.complete(prompt, temperature=-1)
    after = figures(server)

    def more(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    num_prompt, num_out = len(tokenizer.encode(prompt, True)), len(tokenizer.encode("hello world", False)) + 1
    assert more("prompt_tokens_total") == 2 * num_prompt
    assert more("generation_tokens_total") == num_out + 1
    assert more("request_success_total{finished_reason=stop}") == 1
    assert more("request_success_total{finished_reason=length}") == 1
    route = "http_requests_total{handler=/v1/completions,method=POST,status=%d}"
    assert (more(route % 200), more(route % 400)) == (2, 1)
    for name, count, total in (
        ("time_to_first_token_seconds", 2, None),
        ("inter_token_latency_seconds", num_out - 1, None),
        ("e2e_request_latency_seconds", 2, None),
        ("request_time_per_output_token_seconds", 1, None),
        ("request_prompt_tokens", 2, 2 * num_prompt),
        ("request_generation_tokens", 2, num_out + 1),
    ):
        assert more(f"{name}_count") == count, name
        assert more(f"{name}_bucket{{le=+Inf}}") == count, name
        assert total is None or more(f"{name}_sum") == total, name
    assert after["num_requests_running"] == 0
    assert after["kv_cache_usage_perc"] == 0


def test_metrics_count_the_requests_that_got_no_token() -> None:
    status = Status(0, num_without_logits=2, num_without_token=1)
    text = exposition("tiny", ServerStats(), [EngineFigures(status, Ready(9, 9, 4, 2, "cpu", {}))]).decode()
    name = 'minisgl:engine_request_errors_total{code="%s",model_name="tiny"} %.1f'
    assert name % ("no_finite_logits", 2) in text
    assert name % ("no_token_left", 1) in text


def test_metrics_have_the_pages_of_layers_that_share_a_window() -> None:
    status = Status(0, window_pages=[[512, 100, 60, 30]])
    text = exposition("tiny", ServerStats(), [EngineFigures(status, Ready(9, 9, 4, 2, "cpu", {}))]).decode()
    for state, pages in (("free", 60), ("held", 30), ("cached", 10)):
        assert f'minisgl:kv_window_pages{{model_name="tiny",state="{state}",window="512"}} {pages}.0' in text


def test_metrics_have_the_times_that_the_engine_counts() -> None:
    times = RequestTimes()
    times.queued(1_500_000)
    times.queued(3_000)
    times.prefilled(20_000)
    steps = [0] * len(STEP_BOUNDS_MS) + [1]
    status = Status(
        0,
        request_counts=times.counts,
        request_part_s=times.seconds,
        step_counts=steps,
        step_part_s=[20.0, 1.0],
        gc_s=0.5,
    )
    text = exposition("tiny", ServerStats(), [EngineFigures(status, Ready(9, 9, 4, 2, "cpu", {}))]).decode()
    found = {
        (sample.name.removeprefix("minisgl:"), sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    buckets = [
        found["request_queue_time_seconds_bucket", le] for le in ("0.002", "0.005", "1.0", "2.0", "+Inf")
    ]
    assert buckets == [0, 1, 1, 2, 2]
    assert found["request_queue_time_seconds_sum", ""] == pytest.approx(1.503)
    assert found["request_prefill_time_seconds_bucket", "0.02"] == 1
    assert found["request_decode_time_seconds_count", ""] == 0
    assert found["request_inference_time_seconds_count", ""] == 0
    assert (found["engine_step_seconds_count", ""], found["engine_step_seconds_sum", ""]) == (1, 21)
    assert found["engine_gc_seconds_total", ""] == 0.5
    assert "engine_step" not in exposition("tiny", ServerStats(), [EngineFigures(Status(0), None)]).decode()


def test_server_info_and_load_show_what_is_held_now(server: RunningServer) -> None:
    def held() -> tuple[int, int, int, int]:
        info = server.call("/server_info")[1]
        assert info["server"]["num_open_requests"] == info["processes"][0]["open_requests"]
        sums = info["server"]
        return (
            sums["num_open_requests"],
            sums["num_running_requests"],
            sums["num_queued_tokens"],
            info["engine"]["num_held_rows"],
        )

    assert held() == (0, 0, 0, 0)
    waiting = Waiting(server, "@wait", "@wait")
    eventually(lambda: held()[3] == 2, "both requests run")
    open_requests, running, queued, _ = held()
    assert (open_requests, running) == (2, 2)
    assert queued > 0
    load = server.call("/load")[1]
    assert (load["server_load"], load["running"], load["queued_tokens"]) == (2, 2, queued)
    server.complete("@go")
    assert [status for status, _ in waiting.join()] == [200, 200]
    assert held() == (0, 0, 0, 0)


def test_abort_ends_the_named_call_or_all(server: RunningServer) -> None:
    waiting = Waiting(server, "@wait")
    other = urllib.request.Request(
        server.url("/v1/completions"),
        json.dumps({"prompt": "@wait hello", "stream": True, "max_tokens": 50}).encode(),
        {"X-Request-Id": "mine-1"},
    )
    with urllib.request.urlopen(other, timeout=LIMIT_S) as stream:
        first = json.loads(stream.readline().decode().removeprefix("data: "))
        assert first["id"] == "cmpl-mine-1"
        eventually(lambda: server.health()[1]["running_requests"] == 2, "both run")
        assert server.call("/abort", {"request_id": "nobody"})[1] == {"aborted": 0}
        assert server.call("/abort", {"rid": "cmpl-mine-1"})[1] == {"aborted": 1}
        assert "request_aborted" in stream.read().decode()
    assert server.health()[1]["running_requests"] == 1
    assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 1}
    status, answer = waiting.join()[0]
    assert (status, answer["error"]["code"]) == (409, "request_aborted")
    eventually(lambda: server.call("/server_info")[1]["engine"]["num_held_rows"] == 0, "the engine is empty")


def test_openais_client_does_not_send_an_aborted_call_again(server: RunningServer) -> None:
    client = server.client().with_options(max_retries=2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(client.completions.create, model="tiny", prompt="@wait")
        eventually(lambda: server.health()[1]["running_requests"] == 1, "it runs")
        assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 1}
        with pytest.raises(openai.ConflictError):
            call.result(LIMIT_S)


def test_flush_cache_reaches_the_engine(server: RunningServer) -> None:
    assert server.call("/flush_cache", method="POST")[:2] == (200, {"freed_pages": 5})


def test_ready_asks_the_engine_and_models_say_how_long_a_request_may_be(server: RunningServer) -> None:
    assert server.call("/health/ready")[:2] == (200, {"ready": True, "reason": None})
    assert server.call("/v1/models")[1]["data"][0]["max_model_len"] == CONTEXT
    assert server.call("/v1/models/tiny")[1]["max_model_len"] == CONTEXT
    msgspec.convert(server.call("/v1/models")[1], ModelList)
    assert re.fullmatch(r"\d+\.\d+.*", server.call("/version")[1]["version"])


def test_priority_reaches_the_engine(server: RunningServer) -> None:
    _, answer = server.complete("@report", priority=-7, max_tokens=250)
    assert json.loads(answer["choices"][0]["text"])["priority"] == -7
    assert server.report()["priority"] == 0


def test_too_many_queued_tokens_get_a_429_until_there_is_room(server: RunningServer) -> None:
    words = "fox " * 20 + "@wait"
    num_tokens = server.call("/tokenize", {"prompt": words})[1]["count"]
    assert 20 < num_tokens <= 60
    waiting = Waiting(server, words)
    eventually(lambda: server.health()[1]["running_requests"] == 1, "it runs")
    eventually(lambda: server.call("/load")[1]["queued_tokens"] == num_tokens, "its prompt is queued")
    status, answer, headers = server.call("/v1/completions", {"prompt": "a" * 100, "max_tokens": 5})
    assert (status, answer["error"]["code"]) == (429, "too_many_tokens")
    assert 1 <= int(headers["Retry-After"]) <= 300
    server.complete("@go")
    waiting.join()
    assert server.complete("a" * 100, max_tokens=5)[0] == 200


def test_the_document_of_the_api_names_every_route_and_field(server: RunningServer) -> None:
    document = server.call("/openapi.json")[1]
    assert document["openapi"].startswith("3.1")
    elsewhere = {"/debug/requests/{id}", "/debug/events"}  # unknown, and without an end (test_watch.py)
    for path, operations in document["paths"].items():
        for method in {"get", "post"} & operations.keys() if path not in elsewhere else ():
            status = (
                server.call(path.replace("{model}", "tiny").replace("{id}", "x"), None, method.upper())[0]
                if path != "/metrics"
                else 200
            )
            assert status not in (404, 405), path
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"temperature", "stop", "priority", "seed"} <= fields.keys()
    refs = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert refs <= document["components"]["schemas"].keys()


def test_more_choices_than_the_server_ever_takes_are_a_400(server: RunningServer) -> None:
    for prompts, n, param in ((["a", "b", "c"], 3, "prompt"), (["a"] * 10_000, 1, "prompt"), (["a"], 9, "n")):
        status, answer = server.complete(prompts, n=n)
        assert (status, answer["error"]["param"]) == (400, param)
