"""--otlp-endpoint: spans of calls and of their choices, through a server to a collector."""

import http.client
import itertools
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from collector import Collector
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from watched_scheduler import WatchedScheduler

from minisgl.config import ServerConfig, check_server_config
from minisgl.errors import ConfigError
from minisgl.server.tracing.call_tracer import LAST_SPANS_S, load_export
from minisgl.server.tracing.spans import SpanData, spans_of_life

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARTS = ["queue", "prefill", "decode"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tracing") / "model")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(folder: Path, collector: Collector) -> Iterator[RunningServer]:
    with RunningServer(folder, otlp_endpoint=collector.url) as running:
        yield running.ready()


def post(server: RunningServer, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Status and body of a call with these headers (`_` stands for `-`)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"} | named)
    answer = connection.getresponse()
    read = answer.status, answer.read()
    connection.close()
    return read


def ask(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 50, **fields}


def test_a_call_has_a_span_with_its_figures_and_its_parts_below_it(
    server: RunningServer, collector: Collector
) -> None:
    call_id = "plain"
    before_s = time.time()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "@cached a secret prompt"}],
        "max_tokens": 50,
    }
    status, answer = post(server, "/v1/chat/completions", body, X_Request_Id=call_id)
    after_s = time.time()
    assert status == 200
    usage = json.loads(answer)["usage"]
    root, children = collector.call(call_id)
    assert (root.name, root.kind, root.parent_id, root.failed) == ("chat tiny", "SERVER", "", False)
    figures = root.attributes.copy()
    assert 0 < figures.pop("gen_ai.response.time_to_first_chunk") <= root.end_s - root.begin_s
    assert figures == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "minisgl",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens"] // 2,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ["stop"],
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "minisgl.request_id": call_id,
    }
    assert root.resource["service.name"] == "minisgl"
    assert [child.name for child in children] == PARTS
    assert before_s - 0.01 <= root.begin_s <= children[0].begin_s
    assert children[-1].end_s <= root.end_s <= after_s + 0.01
    for before, after in itertools.pairwise(children):
        assert before.end_s == pytest.approx(after.begin_s, abs=1e-5)
    queue, prefill, decode = (child.attributes for child in children)
    assert queue["minisgl.wait.rows_ms"] == pytest.approx(
        1e3 * (children[0].end_s - children[0].begin_s), abs=0.01
    )
    assert prefill["minisgl.prompt_tokens"] == usage["prompt_tokens"]
    assert prefill["minisgl.cached_tokens"] == usage["prompt_tokens"] // 2
    assert prefill["minisgl.chunks"] == 1
    assert decode["minisgl.output_tokens"] == usage["completion_tokens"]
    assert decode["minisgl.end"] == "stop"
    assert "secret" not in str([root, *children])


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", ask("@say a b c d"), "text_completion tiny"),
        ("/v1/completions", ask("@say a b c d", stream=True), "text_completion tiny"),
        ("/generate", {"text": "@say a b c d", "sampling_params": {}}, "text_completion tiny"),
        ("/v1/responses", {"model": "tiny", "input": "@say a b c d"}, "chat tiny"),
        (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "@say a b c d"}]},
            "chat tiny",
        ),
    ],
    ids=["completions", "streamed", "generate", "responses", "messages"],
)
def test_every_api_has_spans(
    server: RunningServer, collector: Collector, path: str, body: Any, name: str
) -> None:
    call_id = f"api-{path}-{body.get('stream', False)}"
    status, answer = post(server, path, body, X_Request_Id=call_id)
    assert status == 200, answer
    root, children = collector.call(call_id)
    assert (root.name, root.attributes["http.route"]) == (name, path)
    assert root.attributes["gen_ai.request.stream"] == body.get("stream", False)
    assert [child.name for child in children] == PARTS


def test_a_trace_of_the_client_goes_on(server: RunningServer, collector: Collector) -> None:
    call_id = "continued"
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}
    post(server, "/v1/completions", ask("@say a"), X_Request_Id=call_id, **headers)
    root, children = collector.call(call_id)
    assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, PARENT, "vendor=x")
    assert {child.trace_id for child in children} == {TRACE}
    assert len(children) == 3


@pytest.mark.parametrize(
    "header", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "é", "0" * 5000]
)
def test_a_header_that_is_no_trace_context_begins_a_new_trace(
    server: RunningServer, collector: Collector, header: str
) -> None:
    call_id = f"odd-{len(header)}-{header[:3].encode().hex()}"
    status, _ = post(server, "/v1/completions", ask("@say a"), X_Request_Id=call_id, traceparent=header)
    assert status == 200
    root, _ = collector.call(call_id)
    assert root.parent_id == ""


def test_a_trace_that_is_not_sampled_has_no_spans(server: RunningServer, collector: Collector) -> None:
    call_id = "unsampled"
    header = f"00-{TRACE}-{PARENT}-00"
    post(server, "/v1/completions", ask("@say a"), X_Request_Id=call_id, traceparent=header)
    post(server, "/v1/completions", ask("@say a"), X_Request_Id=f"{call_id}-next")
    collector.call(f"{call_id}-next")
    assert call_id not in {span.call_id for span in collector.spans}


def test_each_choice_has_its_parts(server: RunningServer, collector: Collector) -> None:
    call_id = "choices"
    post(server, "/v1/completions", ask("@say a b", n=3, max_tokens=1), X_Request_Id=call_id)
    root, children = collector.call(call_id)
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert [(child.attributes["minisgl.choice"], child.name) for child in children] == [
        (choice, part) for choice in range(3) for part in PARTS
    ]
    assert len({child.attributes["minisgl.request_number"] for child in children}) == 3


def test_of_very_many_choices_the_first_sixteen_have_spans(
    server: RunningServer, collector: Collector
) -> None:
    call_id = "many"
    status, _ = post(server, "/v1/completions", ask("@say a", n=100), X_Request_Id=call_id)
    assert status == 200
    root, children = collector.call(call_id)
    assert root.attributes["gen_ai.request.choice.count"] == 100
    assert len(root.attributes["gen_ai.response.finish_reasons"]) == 16
    assert len(children) == 3 * 16


def test_a_stop_string_is_a_stop_though_the_engine_aborts(
    server: RunningServer, collector: Collector
) -> None:
    call_id = "stopped"
    post(server, "/v1/completions", ask("@wait a b c", stop="b"), X_Request_Id=call_id)
    root, children = collector.call(call_id)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert children[-1].attributes["minisgl.end"] == "abort"
    assert not any(span.failed for span in (root, *children))


@pytest.mark.parametrize(
    ("fields", "status", "code", "parts"),
    [
        (ask("@say a", temperature=-1), 400, "invalid_value", []),
        (ask("@say a") | {"model": "other"}, 404, "model_not_found", []),
        (ask("@refuse"), 422, "refused", []),
        (ask("@spoil a b"), 500, "no_finite_logits", PARTS),
        (ask("@spoil a b", stream=True), 200, "no_finite_logits", PARTS),
    ],
    ids=["invalid", "other-model", "refused", "failed", "failed-in-stream"],
)
def test_a_failed_call_has_a_failed_span(
    server: RunningServer, collector: Collector, fields: Any, status: int, code: str, parts: list[str]
) -> None:
    call_id = f"failed-{code}-{status}"
    assert post(server, "/v1/completions", fields, X_Request_Id=call_id)[0] == status
    root, children = collector.call(call_id)
    assert root.failed
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == (code, status)
    assert [child.name for child in children] == parts
    assert [child.failed for child in children] == [False, False, True][: len(parts)]


def test_a_client_that_leaves_has_a_span_that_did_not_fail(
    server: RunningServer, collector: Collector
) -> None:
    call_id = "left"
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    connection.request(
        "POST", "/v1/completions", json.dumps(ask("@wait a", stream=True)), {"X-Request-Id": call_id}
    )
    answer = connection.getresponse()
    assert answer.readline()
    answer.close()
    connection.close()
    root, children = collector.call(call_id)
    assert not root.failed
    assert "gen_ai.response.finish_reasons" not in root.attributes
    assert [child.name for child in children] == PARTS
    assert children[-1].attributes["minisgl.end"] == "abort"


def test_other_calls_have_no_spans(server: RunningServer, collector: Collector) -> None:
    call_id = "token"
    assert post(server, "/tokenize", {"prompt": "a"}, X_Request_Id=call_id)[0] == 200
    post(server, "/v1/completions", ask("@say a"), X_Request_Id=f"{call_id}-next")
    collector.call(f"{call_id}-next")
    assert call_id not in {span.call_id for span in collector.spans}


def test_both_processes_send_their_calls(folder: Path) -> None:
    with (
        Collector() as collector,
        RunningServer(folder, api_workers=2, otlp_endpoint=collector.url) as server,
    ):
        server.ready()
        number = 0
        for number in range(200):
            post(server, "/v1/completions", ask("@say a"), X_Request_Id=f"call-{number}")
            if number % 8 == 7 and ranks(collector) == {0, 1}:
                break
        eventually(lambda: ranks(collector) == {0, 1}, "spans of both processes")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        sent = [span for span in collector.spans if span.call_id]
        assert len({span.call_id for span in sent}) == len(sent) == number + 1


def ranks(collector: Collector) -> set[int]:
    return {span.resource["minisgl.server_rank"] for span in list(collector.spans)}


def test_a_stop_sends_the_last_spans_with_all_their_parts(folder: Path) -> None:
    with (
        Collector() as collector,
        RunningServer(folder, otlp_endpoint=collector.url + "/v1/traces") as server,
    ):
        server.ready()
        post(server, "/v1/completions", ask("@say a"), X_Request_Id="last")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        _, children = collector.call("last")
        assert [child.name for child in children] == PARTS


class SilentCollector:
    """Accepts connections and never answers."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("kind", ["refuses", "silent"])
def test_a_collector_that_is_away_neither_slows_nor_breaks_answers(folder: Path, kind: str) -> None:
    silent = SilentCollector()
    if kind == "refuses":
        silent.close()
    with RunningServer(folder, otlp_endpoint=silent.url) as server:
        server.ready()

        def one(number: int) -> float:
            begin_s = time.monotonic()
            assert post(server, "/v1/completions", ask(f"@say a{number}"))[0] == 200
            return time.monotonic() - begin_s

        with ThreadPoolExecutor(4) as threads:
            took_s = sorted(threads.map(one, range(80)))
        assert took_s[40] < 0.2
        assert took_s[-1] < 2.0
        begin_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 0
        assert time.monotonic() - begin_s < LAST_SPANS_S + 3
    said = server.errors.read_text()
    assert "Traceback" not in said
    assert said.count("spans for") <= 1, said
    silent.close()


def test_the_packages_are_needed_only_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "minisgl.server.tracing.export", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'minisgl[otel]'")):
        load_export()


@pytest.mark.parametrize(
    "url", ["", "localhost:4318", "grpc://a:4317", "http://", "http://a b", "http://a:x", "http://a/?key=1"]
)
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be as http"):
        check_server_config(ServerConfig(otlp_endpoint=url))


def test_an_endpoint_with_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as caught:
        check_server_config(ServerConfig(otlp_endpoint="https://me:secret@collector"))
    assert "secret" not in str(caught.value)


def test_the_parts_of_real_lives_follow_each_other_and_have_their_figures() -> None:
    watched = WatchedScheduler(
        num_pages=30, page_size=4, max_context_tokens=100, output_reserve_tokens=0, chunk_tokens=8
    )
    for number in range(3):
        watched.add(number, 12 + number, max_tokens=60, arrived_ms=900.0)
    watched.run()
    num_preemptions = 0
    for life in watched.tell():
        spans = spans_of_life(life, 0)
        assert [span.name for span in spans] == PARTS
        for before, after in itertools.pairwise(spans):
            assert before.end_s == after.begin_s
        assert spans[0].begin_s == pytest.approx(life.arrived_at + 0.1)
        assert spans[-1].end_s == pytest.approx(life.arrived_at + life.total_ms / 1e3)
        waited = sum(wait.ms for phase in life.phases for wait in phase.waits)
        assert sum(map(waits_of, spans)) == pytest.approx(waited, abs=0.01)
        assert sum(number_of(span, "minisgl.preemptions") for span in spans) == life.num_preemptions
        assert sum(len(span.events) for span in spans) == life.num_preemptions
        assert number_of(spans[1], "minisgl.chunks") >= 2
        num_preemptions += life.num_preemptions
    assert num_preemptions > 0


def number_of(span: SpanData, name: str) -> float:
    found = span.attributes.get(name, 0)
    assert isinstance(found, int | float)
    return found


def waits_of(span: SpanData) -> float:
    return sum(number_of(span, name) for name in span.attributes if name.endswith("_ms"))
