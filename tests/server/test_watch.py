"""The routes of /debug that say what the server does and why, through a server to a fake engine and back."""

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder

from minisgl.server.watch.history import NAMES
from minisgl.server.watch.views import (
    EnginesAnswer,
    Event,
    HistoryAnswer,
    MomentsAnswer,
    RequestsAnswer,
    RequestView,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("watch") / "model")


@pytest.fixture(scope="module", params=[1, 2], ids=["one-process", "two-processes"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, api_workers=request.param, max_queued_requests=8) as running:
        yield running.ready()


def ask(server: RunningServer, path: str, kind: Any) -> Any:
    status, body, headers = server.call(path)
    assert status == 200, body
    assert headers["Content-Type"].startswith("application/json")
    return msgspec.convert(body, kind)


class Open:
    """A streamed call that waits in the engine; its first token has come."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
        body = {"model": "tiny", "prompt": "@wait a", "max_tokens": 50, "stream": True}
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"X-Request-Id": name})
        self.answer = self.connection.getresponse()
        assert self.answer.readline()

    def close(self) -> None:
        self.connection.close()


def test_a_call_is_found_by_its_id_its_answers_id_and_its_number(server: RunningServer) -> None:
    one = Open(server, "my-call")
    listed = ask(server, "/debug/requests?state=running&limit=5", RequestsAnswer)
    (engine,) = listed.engines
    assert (engine.id, engine.state, engine.num_open) == (0, "serving", 1)
    (life,) = engine.requests
    assert (life.id, life.state) == ("my-call", "decoding")
    assert life.why.startswith("300 ms for a row: all 8 were taken; a higher --max-running-requests")
    assert [cause.reason for cause in life.causes] == ["rows", "prompt", "decoding"]
    for name in ("my-call", "cmpl-my-call", "chatcmpl-my-call", str(life.number)):
        found = ask(server, f"/debug/requests/{name}", RequestsAnswer)
        assert [view.number for view in found.engines[0].requests] == [life.number]
    for name in ("other", "99", "9" * 40):
        status, body, _ = server.call(f"/debug/requests/{name}")
        assert (status, body["error"]["code"]) == (404, "not_found")
    assert ask(server, "/debug/requests?state=waiting", RequestsAnswer).engines[0].requests == []
    one.close()
    eventually(lambda: server.call("/debug/requests")[1]["engines"][0]["num_open"] == 0, "it is aborted")


def test_the_newest_come_first_and_no_more_than_asked_for(server: RunningServer) -> None:
    calls = [Open(server, f"of-many-{number}") for number in range(4)]
    for limit in (0, 1, 3, 4, 100):
        (engine,) = ask(server, f"/debug/requests?limit={limit}", RequestsAnswer).engines
        numbers = [one.number for one in engine.requests]
        assert numbers == sorted(set(numbers), reverse=True)
        assert len(numbers) == min(limit, 4)
    for call in calls:
        call.close()
    eventually(lambda: server.call("/debug/requests")[1]["engines"][0]["num_open"] == 0, "they are aborted")


@pytest.mark.parametrize("by_number", [False, True])
def test_a_call_is_aborted_by_its_id_or_number(server: RunningServer, by_number: bool) -> None:
    one = Open(server, "to-end")
    name = "to-end"
    if by_number:
        name = str(ask(server, "/debug/requests", RequestsAnswer).engines[0].requests[0].number)
    assert server.call(f"/debug/requests/{name}/abort", method="POST")[1] == {"aborted": 1}
    assert b"aborted through /abort" in one.answer.read()
    assert server.call(f"/debug/requests/{name}/abort", method="POST")[1] == {"aborted": 0}
    assert server.call("/debug/requests/to-end/abort", method="GET")[0] == 405


def test_a_client_that_does_not_read_is_the_cause_of_its_own_wait(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    body = json.dumps({"model": "tiny", "prompt": "@wait " + 1500 * "x ", "n": 32, "max_tokens": 8000})
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f'X-Request-Id: %s\r\nContent-Length: {len(body) + 16}\r\n\r\n{body[:-1]}, "stream": true}}'
    )
    folder = make_folder(tmp_path_factory.mktemp("slow") / "model", context=16384)
    with RunningServer(folder) as server, socket.socket() as slow:
        server.ready()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(LIMIT_S)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall((head % "slow-call").encode())
        assert slow.recv(512).startswith(b"HTTP/1.1 200 OK")  # and from now on it reads nothing

        def told() -> list[RequestView]:
            lives = ask(server, "/debug/requests/slow-call", RequestsAnswer).engines[0].requests
            return [life for life in lives if life.client is not None]

        eventually(told, "it is named as slow")
        life = told()[0]
        assert life.client is not None
        assert life.client.unsent_bytes > 0
        cause = next(one for one in life.causes if one.reason == "client")
        assert cause.words.startswith("the client reads slowly: ")
        assert cause.knobs == ["--request-timeout-s"]
        assert server.complete("@say a")[0] == 200, "nobody else waits for it"

        def reads_again() -> bool:
            slow.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while slow.recv(1 << 20):
                    continue
            return not told()

        eventually(reads_again, "it is named no more")


@pytest.mark.parametrize(
    "query",
    ["state=none", "limit=x", "limit=-1", "limit=1001", "ended_after=then", "ended_after=1e5", "limit=1_0"],
)
def test_a_wrong_query_is_refused_by_its_name(server: RunningServer, query: str) -> None:
    status, body, _ = server.call(f"/debug/requests?{query}")
    assert status == 400
    assert body["error"]["param"] == query.partition("=")[0]


def test_slow_moments_and_refusals_have_words_and_knobs(server: RunningServer) -> None:
    status, body = server.complete(["a"] * 9)
    assert status == 400  # never taken: no refusal
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(server.complete, ["@wait a"] * 4) for _ in range(4)]
        eventually(lambda: any(wait.done() for wait in waits), "one is refused")

        def all_end() -> bool:
            server.call("/abort", {"abort_all": True})  # again for calls that came after the last time
            return all(wait.done() for wait in waits)

        eventually(all_end, "no call waits")
        statuses = [wait.result()[0] for wait in waits]
    assert 429 in statuses, body
    answer = ask(server, "/debug/moments", MomentsAnswer)
    (slow,) = answer.engines[0].moments
    assert slow.words.startswith("2 steps took up to 90 ms, usually 5.0 ms: it computed 512 prompt tokens")
    assert slow.knobs == ["--mixed-step-tokens", "--chunk-tokens"]
    full = [one for one in answer.refused if one.reason == "too_many_requests"]
    assert sum(one.count for one in full) == statuses.count(429)
    assert "--max-queued-requests" in full[0].words
    assert full[0].knobs[0] == "--max-queued-requests"


def test_an_engine_tells_what_it_runs_with(server: RunningServer) -> None:
    (engine,) = ask(server, "/debug/engines", EnginesAnswer).engines
    assert (engine.state, engine.reason, engine.device) == ("serving", None, "fake")
    assert (engine.num_pages, engine.page_size, engine.max_rows) == (100, 16, 8)
    assert engine.startup_ms == {"import": 12.0, "weights": 34.0}
    assert engine.settings["max_step_tokens"] is None
    assert engine.counters is not None
    eventually(lambda: server.call("/debug/engines")[1]["engines"][0]["sample"], "there is a sample")


def test_the_history_has_a_value_for_each_figure_and_second(server: RunningServer) -> None:
    found: dict[str, list[float | None]] = {}

    def has_idle_second() -> bool:
        answer = ask(server, "/debug/history?seconds=5", HistoryAnswer)
        assert answer.interval_s == 1
        found.update(answer.engines[0].columns)
        is_idle = [found[name][-1:] for name in ("running", "step_p50_ms")] == [[0], [None]]
        return len(found["time"]) >= 2 and is_idle

    eventually(has_idle_second, "a second without requests and steps")
    assert found.keys() == set(NAMES)
    assert len({len(values) for values in found.values()}) == 1
    times = [one for one in found["time"] if one is not None]
    assert times == sorted(times)
    for query in ("seconds=0", "seconds=601", "seconds=x"):
        status, body, _ = server.call(f"/debug/history?{query}")
        assert (status, body["error"]["param"]) == (400, "seconds")


def events_of(server: RunningServer, count: int) -> list[Event]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    connection.request("GET", "/debug/events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    found: list[Event] = []
    while len(found) < count:
        name, data, empty = (answer.readline() for _ in range(3))
        assert (name, empty) == (b"event: sample\n", b"\n")
        found.append(msgspec.json.decode(data.removeprefix(b"data: "), type=Event))
    connection.close()
    return found


def test_events_come_every_second_and_are_the_same_for_all(server: RunningServer) -> None:
    with ThreadPoolExecutor(20) as threads:
        all_events = list(threads.map(lambda _: events_of(server, 3), range(20)))
    for events in all_events:
        times = [event.time for event in events]
        assert times == sorted(times)
        assert len(set(times)) >= 2
        (engine,) = events[-1].engines
        assert (engine.id, engine.state) == (0, "serving")
        assert engine.sample is not None
    assert server.health()[0] == 200


def test_open_streams_of_events_do_not_hold_up_the_end(folder: Path) -> None:
    with RunningServer(folder) as running:
        running.ready()
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=LIMIT_S)
        connection.request("GET", "/debug/events")
        answer = connection.getresponse()
        assert answer.readline()
        began = time.monotonic()
        running.process.terminate()
        assert running.process.wait(LIMIT_S) == 0
        assert time.monotonic() - began < 2.0
        connection.close()


def test_while_the_engine_starts_it_says_so_with_its_stages(tmp_path: Path) -> None:
    with RunningServer(make_folder(tmp_path / "model", start="hang")) as running:
        running.read_until("Listening")
        assert running.complete("a")[0] == 503
        (engine,) = ask(running, "/debug/engines", EnginesAnswer).engines
        assert (engine.state, engine.device) == ("starting", None)
        assert "loading" in (engine.reason or "")
        eventually(
            lambda: running.call("/debug/engines")[1]["engines"][0]["startup_ms"] == {"import": 12.0},
            "stages",
        )
        assert ask(running, "/debug/requests", RequestsAnswer).engines[0].state == "starting"
        (refused,) = ask(running, "/debug/moments", MomentsAnswer).refused
        assert refused.reason == "loading"
        assert "wait until /health/ready answers 200" in refused.words
        assert ask(running, "/debug/history", HistoryAnswer).engines[0].columns["running"][-1] is None
