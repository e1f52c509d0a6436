"""A server's life: start, health, drain, and what happens when either process is killed."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder

from minisgl.engine.worker import fatal_message
from minisgl.errors import ConfigError, EngineDeadError, ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model")


class OpenStream:
    """A streaming request in a thread of its own; collects the events."""

    def __init__(self, server: RunningServer, prompt: str) -> None:
        self.events: list[str] = []
        self.first = threading.Event()
        self._server = server
        self._prompt = prompt
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self, limit_s: float = LIMIT_S) -> list[str]:
        """All events; fails if the stream has not ended by then."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"the stream goes on: {self.events}"
        return self.events

    def _run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        body = {"model": "tiny", "prompt": self._prompt, "stream": True, "max_tokens": 100}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._server.url("/v1/completions"), json=body) as answer,
        ):
            async for line in answer.content:
                if line.strip():
                    self.events.append(line.decode().strip().removeprefix("data: "))
                    self.first.set()


def gone(pid: int) -> bool:
    """Whether no such process runs (a zombie nobody has reaped yet does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def exit_code(server: RunningServer, limit_s: float = LIMIT_S) -> int:
    return server.process.wait(limit_s)


def open_stream(server: RunningServer, prompt: str = "@wait hello") -> OpenStream:
    stream = OpenStream(server, prompt)
    assert stream.first.wait(LIMIT_S)
    return stream


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(folder, heartbeat_timeout_s=2.0, engine_restarts=0) as running:
        yield running.ready()


def test_the_start_up_prints_stages_a_waterfall_and_a_curl_line_that_works(server: RunningServer) -> None:
    text = "\n".join(server.out)
    assert "engine: import" in text
    assert "engine: weights" in text
    assert "unaccounted" in text
    rows = [line for line in server.out if line.startswith("  ")]
    rows = rows[rows.index(next(row for row in rows if "server:" in row)) :]
    seconds = [float(found[1]) for row in rows if (found := re.search(r"(-?\d+\.\d\d) s\b", row))]
    assert len(seconds) == len(rows)
    assert sum(seconds[:-1]) == pytest.approx(seconds[-1], abs=0.006 * len(seconds))
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = shlex.split(server.out[-1])
    done = subprocess.run([*command, "-s"], capture_output=True, text=True, timeout=LIMIT_S)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "ok", done.stderr


def test_kill_9_of_the_engine_ends_streams_and_server(server: RunningServer) -> None:
    assert len(server.ipc_dirs()) == 1
    streams = [open_stream(server) for _ in range(3)]
    engine = server.health()[1]["engine_pid"]
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        events = stream.result(5.0)
        assert "[DONE]" not in events
        error = json.loads(events[-1])["error"]
        assert error["type"] == "server_error"
        assert "SIGKILL" in error["message"]
    assert exit_code(server, 5.0) != 0
    assert time.monotonic() - began < 5.0
    eventually(lambda: gone(engine), "the engine is gone")
    assert server.ipc_dirs() == []


def test_kill_9_of_the_engine_answers_calls_that_do_not_stream(server: RunningServer) -> None:
    answers: list[tuple[int, Any]] = []
    call = threading.Thread(target=lambda: answers.append(server.complete("@wait")), daemon=True)
    call.start()
    eventually(lambda: server.health()[1]["running_requests"] == 1, "the request runs")
    os.kill(server.health()[1]["engine_pid"], signal.SIGKILL)
    call.join(5.0)
    assert answers[0][0] == 503
    assert answers[0][1]["error"]["code"] == "engine_dead"
    assert exit_code(server) == 1


def test_a_frozen_engine_is_noticed_and_killed(server: RunningServer) -> None:
    stream = open_stream(server)
    engine = server.health()[1]["engine_pid"]
    os.kill(engine, signal.SIGSTOP)
    events = stream.result(LIMIT_S)
    assert "neither stepped nor answered" in json.loads(events[-1])["error"]["message"]
    assert exit_code(server) == 1
    assert gone(engine)


def test_health_is_well_while_idle_and_says_why_not(server: RunningServer) -> None:
    status, body = server.health()
    assert (status, body["status"], body["reason"]) == (200, "ok", None)
    first = body["engine"]["sequence"] if body["engine"] else 0
    eventually(lambda: (server.health()[1]["engine"] or {}).get("sequence", 0) > first + 1, "pings go on")
    assert server.health()[0] == 200


def test_the_engines_last_words_reach_client_and_log(server: RunningServer) -> None:
    stream = OpenStream(server, "@fatal")
    eventually(lambda: server.process.poll() is not None, "the server ends")
    stream._thread.join(LIMIT_S)
    assert server.process.returncode == 1
    assert "lower --memory-fraction" in server.errors.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_end_and_refuses_new_ones(
    server: RunningServer, number: signal.Signals
) -> None:
    stream = open_stream(server)
    engine = server.health()[1]["engine_pid"]
    assert len(server.ipc_dirs()) == 1
    server.process.send_signal(number)
    eventually(lambda: server.health()[0] == 503, "health says so")
    status, answer = server.complete("@say more")
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert not stream.events[-1].startswith('{"error')
    assert server.process.poll() is None
    # The open request is let go through the engine itself: nobody may open a new one to do it.
    os.kill(engine, signal.SIGUSR1)
    events = stream.result()
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
    assert exit_code(server) == 0
    assert gone(engine)
    assert server.ipc_dirs() == []


def test_draining_has_an_end(folder: Path) -> None:
    with RunningServer(folder, drain_timeout_s=0.2) as server:
        server.ready()
        stream = open_stream(server)
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.result()[-1])["error"]["code"] == "shutting_down"
        assert exit_code(server) == 0
    assert "Traceback" not in server.errors.read_text()


def test_a_second_interrupt_stops_now(server: RunningServer) -> None:
    stream = open_stream(server)
    engine = server.health()[1]["engine_pid"]
    server.process.send_signal(signal.SIGINT)
    eventually(lambda: server.health()[0] == 503, "draining")
    server.process.send_signal(signal.SIGINT)
    assert exit_code(server) == 130
    stream.result()
    assert gone(engine)


def test_kill_9_of_the_server_leaves_no_process(server: RunningServer) -> None:
    engine = server.health()[1]["engine_pid"]
    assert not gone(engine)
    assert len(server.ipc_dirs()) == 1
    server.process.kill()
    eventually(lambda: gone(engine), "the engine is gone", 5.0)
    assert server.ipc_dirs() == []


def test_while_loading_every_call_gets_a_503_and_a_signal_ends_it(tmp_path: Path) -> None:
    with RunningServer(make_folder(tmp_path / "model", start="hang")) as server:
        server.read_until("Listening")
        status, body = server.health()
        assert status == 503
        assert "loading" in body["reason"]
        status, _, headers = server.call("/v1/completions", {"model": "tiny", "prompt": "Hi"})
        assert status == 503
        assert int(headers["Retry-After"]) > 0
        server.process.send_signal(signal.SIGTERM)
        assert exit_code(server) == 0
        assert gone(body["engine_pid"])


def test_an_engine_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    with RunningServer(make_folder(tmp_path / "model", start="hang"), startup_timeout_s=0.5) as server:
        assert exit_code(server) == 1
        assert "--startup-timeout-s" in server.errors.read_text()


@pytest.mark.parametrize(("start", "words"), [("fatal", "no GPU; use --device cpu"), ("exit", "exit code 3")])
def test_an_engine_that_fails_to_start_ends_the_server_with_its_words(
    tmp_path: Path, start: str, words: str
) -> None:
    with RunningServer(make_folder(tmp_path / "model", start=start)) as server:
        assert exit_code(server) == 1
        assert words in server.errors.read_text()


@pytest.mark.parametrize("api_workers", [1, 2])
def test_a_gpu_fault_ends_streams_and_server_with_an_exit_code_of_its_own(
    folder: Path, api_workers: int
) -> None:
    with RunningServer(folder, api_workers=api_workers, engine_restarts=0) as server:
        server.ready()
        streams = [open_stream(server) for _ in range(3)]
        streams.append(OpenStream(server, "@fault GPU fault: the memory lost data"))
        for stream in streams:
            error = json.loads(stream.result()[-1])["error"]
            assert (error["code"], error["type"]) == ("engine_dead", "server_error")
            assert "GPU fault: the memory lost data" in error["message"]
        assert exit_code(server) == 74
        assert server.ipc_dirs() == []
    assert "the engine died: GPU fault: the memory lost data" in server.errors.read_text()
    assert "Traceback" not in server.errors.read_text()


def test_an_engine_that_cannot_report_its_gpu_fault_is_known_by_its_exit_code(server: RunningServer) -> None:
    error = json.loads(OpenStream(server, "@fault").result()[-1])["error"]
    assert "exit code 74, a GPU fault" in error["message"]
    assert exit_code(server) == 74


@pytest.mark.parametrize("api_workers", [1, 2])
def test_settings_that_the_engine_refuses_at_its_start_are_one_line_as_any_mistake(
    tmp_path: Path, api_workers: int
) -> None:
    folder = make_folder(tmp_path / "model", start="refuse")
    with RunningServer(folder, api_workers=api_workers) as server:
        assert exit_code(server) == 2
        assert server.errors.read_text() == "minisgl: error: no GPU; use --device cpu\n"


@pytest.mark.parametrize(
    ("error", "is_user_error"),
    [(ConfigError("x"), True), (ModelError("x"), True), (EngineDeadError("x"), False), (OSError("x"), False)],
)
def test_the_engine_tells_mistakes_from_failures_of_its_own(error: Exception, is_user_error: bool) -> None:
    assert fatal_message(error).is_user_error == is_user_error


def test_a_busy_port_is_known_at_once(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with RunningServer(folder, port=port) as server:
            assert exit_code(server) == 2
            assert f"port {port}" in server.errors.read_text()
            assert "--port" in server.errors.read_text()


def test_a_command_that_does_not_exist_is_a_config_error(folder: Path) -> None:
    with RunningServer(folder, worker=["/no/such/engine"]) as server:
        assert exit_code(server) == 2
        assert "/no/such/engine" in server.errors.read_text()


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as server:
        assert exit_code(server) == 2
        assert "tokenizer.json" in server.errors.read_text()
        assert server.ipc_dirs() == []


def test_two_servers_live_side_by_side(folder: Path) -> None:
    with RunningServer(folder) as one, RunningServer(folder) as two:
        one.ready()
        two.ready()
        assert one.complete("@say first")[1]["choices"][0]["text"] == "first"
        assert two.complete("@say second")[1]["choices"][0]["text"] == "second"
        assert one.report()["added"] == two.report()["added"]


def test_a_request_that_takes_too_long_gets_a_504(folder: Path) -> None:
    with RunningServer(folder, request_timeout_s=0.3) as server:
        server.ready()
        status, answer = server.complete("@wait")
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        stream = open_stream(server)
        assert json.loads(stream.result()[-1])["error"]["code"] == "request_timeout"
        assert server.report()["aborted"] == 2


def test_the_server_process_has_no_torch(server: RunningServer) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert "libtorch" not in maps.read_text()


@pytest.mark.parametrize("is_spare", [False, True])
def test_the_real_engine_process_ends_with_its_parent_and_takes_the_sockets_directory(
    is_spare: bool, tmp_path: Path
) -> None:
    ipc_dir = tmp_path / "ipc"
    ipc_dir.mkdir()
    (ipc_dir / "to_server").touch()
    line = {"engine": {}, "model_folder": str(tmp_path), "ipc_dir": str(ipc_dir)}
    lines = [{**line, "ipc_dir": ""}] * is_spare + [line]  # it waits after the first one
    process = subprocess.Popen([sys.executable, "-m", "minisgl.engine.worker"], stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(b"".join(json.dumps(one).encode() + b"\n" for one in lines))
        process.stdin.close()  # what the kernel does when the parent is killed
        assert process.wait(LIMIT_S) == 1
    finally:
        process.kill()
        process.wait()
    assert not ipc_dir.exists()


def test_the_watch_starts_before_torch_is_imported() -> None:
    code = "import sys, minisgl.engine.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"host": "a..b"}, "--host"),
        ({"host": "no\0host"}, "--host"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
        ({"heartbeat_timeout_s": 0}, "--heartbeat-timeout-s"),
    ],
)
def test_an_impossible_server_setting_is_one_line_before_anything_starts(
    folder: Path, settings: dict[str, Any], flag: str
) -> None:
    with RunningServer(folder, **settings) as server:
        assert exit_code(server) == 2
        words = server.errors.read_text()
        assert words.startswith("minisgl: error: ")
        assert flag in words
        assert len(words.splitlines()) == 1


@pytest.mark.parametrize(
    "shell",
    [
        'PYTHONIOENCODING=ascii exec "$@"',
        'exec "$@" >&-',
        'exec "$@" > /dev/full',
        '"$@" | true; exit ${PIPESTATUS[0]}',
    ],
    ids=["ascii", "closed", "full", "a pipe nobody reads"],
)
def test_a_start_up_report_that_cannot_be_written_does_not_end_the_server(folder: Path, shell: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with RunningServer(folder, port=port, wrap=("bash", "-c", shell, "sh")) as server:
        eventually(lambda: is_well(server), "ready")
        assert server.complete("@say fine")[1]["choices"][0]["text"] == "fine"
        engine = server.health()[1]["engine_pid"]
        parent = int(Path(f"/proc/{engine}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(parent, signal.SIGTERM)
        assert exit_code(server) == 0
        assert "Traceback" not in server.errors.read_text()
        assert "can't be read" not in server.errors.read_text()


def test_the_server_takes_as_many_open_files_as_it_may_and_says_when_they_are_few(folder: Path) -> None:
    shell = 'ulimit -Sn 200 && ulimit -Hn 500 && exec "$@"'
    with RunningServer(folder, wrap=("bash", "-c", shell, "sh")) as server:
        limits = Path(f"/proc/{server.process.pid}/limits")
        eventually(lambda: re.search(r"Max open files +500 +500 ", limits.read_text()), "raised")
        eventually(lambda: "500 open files" in server.errors.read_text(), "a warning")


def is_well(server: RunningServer) -> bool:
    with contextlib.suppress(OSError):
        return server.health()[0] == 200
    return False
