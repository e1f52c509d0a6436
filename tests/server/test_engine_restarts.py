"""The engine dies, hangs or faults, and answers go on: nothing twice, nothing lost, one end."""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_launch import OpenStream, exit_code, gone, open_stream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


@pytest.fixture(params=[1, 3], ids=["one process", "three processes"])
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, heartbeat_timeout_s=2.0, api_workers=request.param) as running:
        yield running.ready()


@pytest.fixture(params=[1, 3], ids=["one process", "three processes"])
def paced(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunningServer]:
    """Its engine takes a while for each step."""
    folder = make_folder(tmp_path / "model", pace_ms=20)
    with RunningServer(folder, api_workers=request.param) as running:
        yield running.ready()


def wait_for_events(streams: list[OpenStream], num_events: int) -> None:
    eventually(lambda: all(len(one.events) >= num_events for one in streams), "so many events")


def engine_of(server: RunningServer) -> int:
    return server.health()[1]["engine_pid"]


def is_back(server: RunningServer, num_restarts: int) -> bool:
    """Whether every server process, whichever answers, has the engine again."""
    told = [server.health() for _ in range(8)]
    return all(code == 200 and one["status"] == "ok" for code, one in told) and all(
        one["engine_restarts"] == num_restarts for _, one in told
    )


def text_of(events: list[str]) -> tuple[str, str]:
    """The text of a completion's stream, and how it ended; it has one end."""
    assert events[-1] == "[DONE]", events[-3:]
    chunks = [json.loads(one) for one in events[:-1] if not one.startswith(":")]
    choices = [one["choices"][0] for one in chunks if one.get("choices")]
    assert not any("error" in one for one in chunks), events[-3:]
    ends = [one["finish_reason"] for one in choices if one["finish_reason"]]
    assert len(ends) == 1, events
    return "".join(one["text"] for one in choices), ends[0]


def end_all(server: RunningServer, num_streams: int) -> None:
    """Once all of them run in the engine, let them end."""
    eventually(
        lambda: (server.call("/server_info")[1]["engine"] or {}).get("num_running") == num_streams,
        "all requests run",
    )
    os.kill(engine_of(server), signal.SIGUSR1)


def test_streams_go_on_after_each_kill_9_of_the_engine_and_nothing_comes_twice(paced: RunningServer) -> None:
    texts = [f"{number}" + "abcdefghij" * 8 for number in range(8)]
    streams = [open_stream(paced, f"@chars {text}") for text in texts]
    for number in range(2):
        wait_for_events(streams, 10 + 20 * number)
        engine = engine_of(paced)
        os.kill(engine, signal.SIGKILL)
        eventually(lambda number=number: is_back(paced, number + 1), "the engine is back")
        assert gone(engine)
    for text, stream in zip(texts, streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    assert paced.report()["resumed"] == 8
    info = paced.call("/server_info")[1]
    assert info["engine_restarts"] == 2
    assert info["server"]["num_open_requests"] == info["engine"]["num_held_rows"] == 0


def test_a_hanging_engine_is_killed_and_started_again(server: RunningServer) -> None:
    stream = open_stream(server)
    engine = engine_of(server)
    os.kill(engine, signal.SIGSTOP)
    eventually(lambda: is_back(server, 1), "the engine is back")
    assert gone(engine)
    assert "neither stepped nor answered" in server.errors.read_text()
    end_all(server, 1)
    assert text_of(stream.result()) == ("hello!", "stop")


def test_a_gpu_fault_is_named_and_the_engine_is_started_again(server: RunningServer) -> None:
    stream = OpenStream(server, "@fault GPU fault: the memory lost data")
    assert json.loads(stream.result(30.0)[-1])["error"]["code"] == "request_crashes_engine"
    assert "died of a GPU fault: GPU fault: the memory lost data" in server.errors.read_text()
    eventually(lambda: is_back(server, 3), "the engine is back")


def test_usage_and_counters_are_those_of_a_run_without_a_crash(folder: Path) -> None:
    with RunningServer(folder) as server:
        server.ready()
        answers: list[Any] = []
        calls = [
            threading.Thread(target=lambda: answers.append(server.complete("@wait one two three", n=2)))
            for _ in range(2)
        ]
        for call in calls:
            call.start()
        eventually(lambda: server.health()[1]["running_requests"] == 4, "they run")
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: is_back(server, 1), "the engine is back")
        end_all(server, 4)
        for call in calls:
            call.join(LIMIT_S)
        plain = server.complete("@say one two three!", n=2)[1]
        for status, answer in answers:
            assert status == 200
            assert [one["text"] for one in answer["choices"]] == ["one two three!"] * 2
            assert answer["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        text = urllib.request.urlopen(server.url("/metrics"), timeout=LIMIT_S).read().decode()
        assert re.search(r"minisgl:engine_restarts_total\{.*\} 1\.0", text)
        generated = re.search(r"minisgl:generation_tokens_total\{.*\} (\d+)", text)
        assert generated is not None
        assert int(generated[1]) == 3 * plain["usage"]["completion_tokens"]


def test_new_requests_wait_for_the_engine_and_the_server_says_why(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with RunningServer(folder, max_queued_requests=3) as server:
        server.ready()
        first = open_stream(server)
        # Its next start hangs until the file says something else.
        (folder / "fake.json").write_text(json.dumps({"start": "hang", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: server.health()[1]["status"] == "restarting", "a restart")
        assert server.health()[0] == 200
        status, ready, _ = server.call("/health/ready")
        assert (status, ready["ready"]) == (503, False)
        assert "SIGKILL" in ready["reason"]
        waiting = [OpenStream(server, f"@say number {number}") for number in range(2)]
        eventually(lambda: server.health()[1]["open_requests"] == 3, "they wait")
        status, answer = server.complete("@say too many")
        assert (status, answer["error"]["code"]) == (429, "too_many_requests")
        engine = server.call("/debug/engines")[1]["engines"][0]
        assert (engine["state"], engine["generation"], engine["restarts"]) == ("restarting", 2, 1)
        assert "SIGKILL" in engine["ended_lives"][0]["reason"]
        told = server.call("/debug/requests")[1]["engines"][0]["requests"]
        assert {one["state"] for one in told} == {"restart"}
        assert all("--engine-restarts" in one["why"] for one in told[:2])
        eventually(lambda: ": the engine is being started again" in first.events, "a comment")
        (folder / "fake.json").write_text(json.dumps({"start": "ok", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        for number, stream in enumerate(waiting):
            assert text_of(stream.result()) == (f"number {number}", "stop")
        end_all(server, 1)
        assert text_of(first.result()) == ("hello!", "stop")


def test_a_call_that_is_aborted_or_left_during_a_restart_is_not_sent_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with RunningServer(folder) as server:
        server.ready()
        stream = open_stream(server)
        (folder / "fake.json").write_text(json.dumps({"start": "hang", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: server.health()[1]["status"] == "restarting", "a restart")
        assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 1}
        assert json.loads(stream.result()[-1])["error"]["code"] == "request_aborted"
        (folder / "fake.json").write_text(json.dumps({"start": "ok", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: is_back(server, 2), "the engine is back")
        assert server.report()["added"] == 1


def test_a_signal_during_a_restart_lets_open_answers_end(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with RunningServer(folder) as server:
        server.ready()
        stream = open_stream(server)
        (folder / "fake.json").write_text(json.dumps({"start": "hang", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: server.health()[1]["status"] == "restarting", "a restart")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.health()[0] == 503, "it drains")
        (folder / "fake.json").write_text(json.dumps({"start": "ok", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        end_all(server, 1)
        assert text_of(stream.result()) == ("hello!", "stop")
        assert exit_code(server) == 0
        assert server.ipc_dirs() == []


@pytest.mark.parametrize("word", ["crash", "break"])
def test_a_request_that_crashes_the_engine_ends_alone(paced: RunningServer, word: str) -> None:
    texts = [f"{number}" + "abcdefghij" * 8 for number in range(6)]
    streams = [open_stream(paced, f"@chars {text}") for text in texts]
    poison = OpenStream(paced, f"@{word} ab")
    error = json.loads(poison.result(30.0)[-1])["error"]
    assert error["code"] == "request_crashes_engine"
    assert "while it ran alone" in error["message"]
    for text, stream in zip(texts, streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    assert "are tried alone" in paced.errors.read_text()
    assert is_back(paced, 3)
    assert paced.report()["running"] == 0


def test_after_the_last_restart_the_server_ends_as_without(folder: Path) -> None:
    with RunningServer(folder, engine_restarts=1) as server:
        server.ready()
        stream = open_stream(server)
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: is_back(server, 1), "the engine is back")
        os.kill(engine_of(server), signal.SIGKILL)
        error = json.loads(stream.result()[-1])["error"]
        assert error["code"] == "engine_dead"
        assert "started again 1 times within 10 minutes" in error["message"]
        assert exit_code(server) == 1
        assert server.ipc_dirs() == []


def test_settings_that_a_later_start_refuses_are_not_tried_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with RunningServer(folder) as server:
        server.ready()
        stream = open_stream(server)
        (folder / "fake.json").write_text(json.dumps({"start": "refuse", "context": 512}))
        os.kill(engine_of(server), signal.SIGKILL)
        assert exit_code(server) == 2
        assert "no GPU; use --device cpu" in json.loads(stream.result()[-1])["error"]["message"]
        assert "restart 2" not in server.errors.read_text()


def test_kill_9_of_the_server_after_a_restart_leaves_nothing(folder: Path) -> None:
    with RunningServer(folder) as server:
        server.ready()
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: is_back(server, 1), "the engine is back")
        engine = engine_of(server)
        server.process.kill()
        eventually(lambda: gone(engine) and not server.ipc_dirs(), "all is gone", 5.0)


def test_the_time_to_the_next_token_counts_in_the_restart(folder: Path) -> None:
    with RunningServer(folder, request_timeout_s=0.5) as server:
        server.ready()
        stream = open_stream(server)
        (folder / "fake.json").write_text(json.dumps({"start": "hang", "context": 512}))
        began = time.monotonic()
        os.kill(engine_of(server), signal.SIGKILL)
        assert json.loads(stream.result()[-1])["error"]["code"] == "request_timeout"
        assert time.monotonic() - began < LIMIT_S
