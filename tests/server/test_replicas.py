"""Several engines behind one server: calls go to the cached prompt; the end of one disturbs no other."""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_engine_restarts import text_of, wait_for_events
from test_launch import OpenStream, exit_code, gone, open_stream

from minisgl.config import EngineConfig, ServerConfig, check_server_config
from minisgl.errors import ConfigError
from minisgl.server.engines.replicas import check_replicas, replica_workers

ALPHABET = "abcdefghijklmnopqrstuvwxyz" * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, replicas=2) as running:
        yield running.ready()


@pytest.fixture
def paced(tmp_path: Path) -> Iterator[RunningServer]:
    """Its engines take a while for each step."""
    with RunningServer(make_folder(tmp_path / "model", pace_ms=20), replicas=2) as running:
        yield running.ready()


def engines_of(server: RunningServer) -> list[dict[str, Any]]:
    return server.health()[1]["engines"]


def running_in(server: RunningServer) -> list[int]:
    """How many requests each engine runs."""
    engines = server.call("/server_info")[1]["engines"]
    return [(one["status"] or {}).get("num_running", -1) for one in engines]


def test_new_calls_spread_and_known_prompts_return(server: RunningServer) -> None:
    prompts = [f"@wait {number} {ALPHABET}" for number in range(4)]
    streams = [open_stream(server, prompt) for prompt in prompts]
    eventually(lambda: running_in(server) == [2, 2], "two in each engine")
    assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 4}
    eventually(lambda: running_in(server) == [0, 0], "all have left")
    again = [open_stream(server, f"{prompts[1]} and more") for _ in range(3)]
    eventually(lambda: sorted(running_in(server)) == [0, 3], "all are with the prompt that they know")
    assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 3}
    for stream in streams + again:
        assert json.loads(stream.result()[-1])["error"]["code"] == "request_aborted"


def test_all_choices_and_prompts_of_a_call_go_to_one_engine(server: RunningServer) -> None:
    prompts = [f"@wait {number}{ALPHABET}" for number in range(3)]
    call = threading.Thread(target=lambda: server.complete(prompts, n=2))
    call.start()
    eventually(lambda: sorted(running_in(server)) == [0, 6], "all are in one engine")
    assert server.call("/abort", {"abort_all": True})[1] == {"aborted": 6}
    call.join(LIMIT_S)


def test_kill_9_of_one_engine_leaves_the_other_alone_and_its_streams_go_on(paced: RunningServer) -> None:
    texts = [f"{number}" + "abcdefghij" * 8 for number in range(8)]
    streams = [open_stream(paced, f"@chars {text}") for text in texts]
    eventually(lambda: running_in(paced) == [4, 4], "four in each engine")
    wait_for_events(streams, 10)
    before = engines_of(paced)
    os.kill(before[0]["pid"], signal.SIGKILL)
    eventually(lambda: not engines_of(paced)[0]["up"], "it has ended")
    assert paced.call("/health/ready")[0] == 200
    assert paced.complete("@say hello")[1]["choices"][0]["text"] == "hello"
    for text, stream in zip(texts, streams, strict=True):
        events = stream.result()
        assert text_of(events) == (text, "stop")
        assert not any(one.startswith(": the engine is being started again") for one in events)
    eventually(lambda: all(one["up"] for one in engines_of(paced)), "it is back")
    after = engines_of(paced)
    assert after[1]["pid"] == before[1]["pid"]
    assert [one["restarts"] for one in after] == [1, 0]
    assert gone(before[0]["pid"])
    assert paced.call("/server_info")[1]["server"]["num_open_requests"] == 0
    assert running_in(paced) == [0, 0]


def test_a_request_that_crashes_engines_ends_alone(paced: RunningServer) -> None:
    texts = [f"{number}" + "abcdefghij" * 8 for number in range(6)]
    streams = [open_stream(paced, f"@chars {text}") for text in texts]
    poison = OpenStream(paced, "@break ab")
    assert json.loads(poison.result(30.0)[-1])["error"]["code"] == "request_crashes_engine"
    for text, stream in zip(texts, streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    eventually(lambda: all(one["up"] for one in engines_of(paced)), "both are back")
    assert sum(one["restarts"] for one in engines_of(paced)) == 3


def test_the_server_goes_on_with_one_engine_and_ends_with_the_last(folder: Path) -> None:
    with RunningServer(folder, replicas=2, engine_restarts=0) as server:
        server.ready()
        stream = open_stream(server)
        eventually(lambda: sum(running_in(server)) == 1, "it runs")
        busy = running_in(server).index(1)
        os.kill(engines_of(server)[busy]["pid"], signal.SIGKILL)
        eventually(lambda: running_in(server)[1 - busy] == 1, "the other has it")
        states = [one["state"] for one in server.call("/debug/engines")[1]["engines"]]
        assert states[busy] == "dead"
        assert states[1 - busy] == "serving"
        assert server.complete("@say on")[1]["choices"][0]["text"] == "on"
        os.kill(engines_of(server)[1 - busy]["pid"], signal.SIGKILL)
        assert json.loads(stream.result()[-1])["error"]["code"] == "engine_dead"
        assert exit_code(server) == 1
        assert server.ipc_dirs() == []


def test_figures_tell_of_each_engine(server: RunningServer) -> None:
    stream = open_stream(server)
    text = urllib.request.urlopen(server.url("/metrics"), timeout=LIMIT_S).read().decode()
    found = re.findall(r'minisgl:num_requests_running\{engine="(\d)",model_name="tiny"\} (\d)', text)
    assert sorted(number for number, _ in found) == ["0", "1"]
    assert sum(int(value) for _, value in found) == 1
    assert len(re.findall(r"minisgl:engine_up\{.*\} 1\.0", text)) == 2
    for path in ("engines", "requests", "moments", "history"):
        told = server.call(f"/debug/{path}")[1]["engines"]
        assert [one["id"] for one in told] == [0, 1], path
    requests = server.call("/debug/requests")[1]["engines"]
    assert sum(len(one["requests"]) for one in requests) == 1
    number = next(one["requests"][0]["number"] for one in requests if one["requests"])
    assert sum(len(one["requests"]) for one in server.call(f"/debug/requests/{number}")[1]["engines"]) == 1
    assert server.call("/flush_cache", {})[1] == {"freed_pages": 10}
    assert server.call("/debug/timeline")[1]["traceEvents"] == []
    assert len(server.call("/debug/profile?steps=2", {})[1]["files"]) == 2
    assert server.call("/debug/requests/" + str(number) + "/abort", {})[1] == {"aborted": 1}
    assert json.loads(stream.result()[-1])["error"]["code"] == "request_aborted"


def test_a_signal_lets_the_answers_of_all_engines_end(paced: RunningServer) -> None:
    texts = [f"{number}" + "abcdefghij" * 3 for number in range(4)]
    streams = [open_stream(paced, f"@chars {text}") for text in texts]
    paced.process.send_signal(signal.SIGTERM)
    for text, stream in zip(texts, streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    assert exit_code(paced) == 0
    assert paced.ipc_dirs() == []


def test_kill_9_of_the_server_leaves_no_engine(server: RunningServer) -> None:
    pids = [one["pid"] for one in engines_of(server)]
    server.process.kill()
    eventually(lambda: all(gone(pid) for pid in pids) and not server.ipc_dirs(), "all is gone", 5.0)


def test_a_failed_first_start_ends_the_server(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", start="refuse")
    with RunningServer(folder, replicas=2) as server:
        assert exit_code(server) == 2
        assert "no GPU; use --device cpu" in server.errors.read_text()
        assert server.ipc_dirs() == []


def gpus(tmp_path: Path, num: int) -> Path:
    for number in range(num):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "num_there", "words"),
    [
        (None, 3, r"--replicas 2 with --tp 2 needs 4 GPUs, and 3 are here; lower one"),
        ("0,1,2", 8, r"needs 4 GPUs, and 3 are here \(CUDA_VISIBLE_DEVICES\)"),
        ("0,1,-1,2,3", 8, r"needs 4 GPUs, and 2 are here"),
    ],
)
def test_more_gpus_than_there_are_are_refused(
    tmp_path: Path, visible: str | None, num_there: int, words: str
) -> None:
    engine = EngineConfig(model="m", tp=2)
    with pytest.raises(ConfigError, match=words):
        check_replicas(ServerConfig(replicas=2), engine, visible, gpus(tmp_path, num_there))


def test_enough_gpus_or_none_needed_are_taken(tmp_path: Path) -> None:
    two, there = ServerConfig(replicas=2), gpus(tmp_path, 4)
    check_replicas(two, EngineConfig(model="m", tp=2), None, there)
    check_replicas(two, EngineConfig(model="m", tp=2), "4,5,6,7", tmp_path / "none")
    check_replicas(two, EngineConfig(model="m", tp=8, device="cpu"), None, there)
    check_replicas(ServerConfig(), EngineConfig(model="m", tp=8), None, there)


def test_each_engine_gets_gpus_of_its_own() -> None:
    told = replica_workers({"a": 1}, 2, 2, None)
    assert [one["visible_gpus"] for one in told] == ["0,1", "2,3"]
    assert [one["num_engines"] for one in told] == [2, 2]
    assert [one["visible_gpus"] for one in replica_workers({}, 3, 1, "7, GPU-ab,2,5")] == ["7", "GPU-ab", "2"]
    assert [one["visible_gpus"] for one in replica_workers({}, 2, 1, "")] == ["", ""]
    assert replica_workers({"a": 1}, 1, 2, "0") == [{"a": 1}]


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--replicas 2 needs --api-workers 1, got 3"):
        check_server_config(ServerConfig(replicas=2, api_workers=3))
    with pytest.raises(ConfigError, match="--replicas 2 does not go with --kv-events-endpoint"):
        check_replicas(
            ServerConfig(replicas=2), EngineConfig(model="m", kv_events_endpoint="tcp://*:5557"), None
        )
    with pytest.raises(ConfigError, match="replicas must be between 1 and 64, got 0"):
        check_server_config(ServerConfig(replicas=0))
