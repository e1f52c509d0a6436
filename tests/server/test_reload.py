"""The engines get other settings or another model, and no call is refused, cut off or answered twice."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import CONTEXT, make_folder
from test_admin_key import ask
from test_engine_restarts import end_all, engine_of, is_back, text_of, wait_for_events
from test_launch import OpenStream, exit_code, gone, open_stream
from test_replicas import running_in

ADMIN = "admin-key"
PLACES = {"beside": "fake", "after": "cuda"}
"""What engines say that they run on: without a spare GPU, the new one starts after the old one."""
TEXTS = [f"{number}" + "abcdefghij" * 8 for number in range(6)]


class Reloads:
    """Reloads of a server, each in a thread."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._pool = ThreadPoolExecutor(8)

    def begin(self, **changes: Any) -> Future[tuple[int, Any]]:
        return self._pool.submit(ask, self._server, ADMIN, "POST", "/reload", changes)

    def __call__(self, **changes: Any) -> Any:
        status, answer = self.begin(**changes).result(LIMIT_S)
        assert status == 200, answer
        return answer


def running(folder: Path, **settings: Any) -> RunningServer:
    return RunningServer(folder, admin_key=(ADMIN,), **settings)


def settings_of(server: RunningServer) -> dict[str, Any]:
    """What the engine runs with that answers."""
    return json.loads(server.complete("@settings")[1]["choices"][0]["text"])


def write_knobs(folder: Path, **knobs: Any) -> None:
    (folder / "fake.json").write_text(json.dumps({"start": "ok", "context": CONTEXT, **knobs}))


@pytest.fixture
def folder(tmp_path: Path, place: str) -> Path:
    return make_folder(tmp_path / "model", device=PLACES[place])


@pytest.fixture
def server(folder: Path, num_processes: int) -> Iterator[RunningServer]:
    with running(folder, api_workers=num_processes) as started:
        yield started.ready()


ALL = pytest.mark.parametrize(
    ("num_processes", "place"), [(1, "beside"), (3, "beside"), (1, "after"), (3, "after")]
)
SOME = pytest.mark.parametrize(("num_processes", "place"), [(3, "beside"), (1, "after")])
BESIDE = pytest.mark.parametrize(("num_processes", "place"), [(1, "beside")])


def info_of(server: RunningServer) -> Any:
    return ask(server, ADMIN, "GET", "/server_info")[1]


def is_ready(server: RunningServer) -> bool:
    return server.call("/health/ready")[0] == 200


def check_all_went_on(streams: list[OpenStream]) -> None:
    for stream in streams:
        assert text_of(stream.result()) == ("hello!", "stop")


def another(tmp_path: Path, name: str = "other", **knobs: Any) -> Path:
    """Another model's folder."""
    folder = make_folder(tmp_path / name, **knobs)
    (folder / "config.json").write_text(json.dumps({"model": name}))
    return folder


@ALL
def test_streams_go_on_in_engines_with_other_settings_and_nothing_comes_twice(
    num_processes: int, place: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "model", pace_ms=300, device=PLACES[place])
    with running(folder, api_workers=num_processes) as server:
        server.ready()
        streams = [open_stream(server, f"@chars {text}") for text in TEXTS]
        reload = Reloads(server)
        for number, pace_ms in enumerate((300, 0)):
            wait_for_events(streams, 2 + 2 * number)
            write_knobs(folder, pace_ms=pace_ms, device=PLACES[place])
            engine = engine_of(server)
            told = reload(max_running_requests=20 + number)
            assert (told["beside"], told["streams"]) == (place == "beside", "moved")
            assert told["num_streams"] == len(TEXTS)
            assert told["engines"] == [{"id": 0, "pid": engine_of(server)}]
            assert gone(engine)
        for text, stream in zip(TEXTS, streams, strict=True):
            assert text_of(stream.result()) == (text, "stop")
        assert settings_of(server)["max_running_requests"] == 21
        assert server.report()["resumed"] == len(TEXTS)
        info = info_of(server)
        assert info["engine_settings"]["max_running_requests"] == 21
        assert info["server"]["num_open_requests"] == info["engine"]["num_held_rows"] == 0
        assert info["engine_restarts"] == 0
        (told,) = ask(server, ADMIN, "GET", "/debug/engines")[1]["engines"]
        assert [one["reason"] for one in told["ended_lives"]] == ["it was reloaded"] * 2
        assert len(list(server.ipc_dirs()[0].glob("e0.*"))) == 1


@SOME
def test_new_calls_during_a_reload_are_served(server: RunningServer) -> None:
    reload, answers = Reloads(server), []
    is_over = threading.Event()

    def call_again_and_again() -> None:
        while not is_over.is_set():
            answers.append(server.complete("@say hello"))

    callers = [threading.Thread(target=call_again_and_again) for _ in range(4)]
    for caller in callers:
        caller.start()
    for number in range(2):
        reload(max_running_requests=20 + number)
    is_over.set()
    for caller in callers:
        caller.join(LIMIT_S)
    assert len(answers) >= 4
    assert {(status, answer["choices"][0]["text"]) for status, answer in answers} == {(200, "hello")}


@ALL
def test_another_model_lets_open_answers_end_and_is_then_the_one_that_is_served(
    server: RunningServer, place: str, tmp_path: Path
) -> None:
    streams = [open_stream(server) for _ in range(6)]
    engine = engine_of(server)
    folder = another(tmp_path, context=128, device=PLACES[place])
    begun = Reloads(server).begin(model=str(folder), served_model_name="other")
    if place == "after":
        eventually(lambda: not any(is_ready(server) for _ in range(8)), "calls wait")
        assert server.health()[0] == 200
        with ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(server.complete, "@say later", model="other") for _ in range(4)]
            assert not any(one.done() for one in waiting)
            end_all(server, len(streams))
            answers = [one.result(LIMIT_S) for one in waiting]
        assert [answer["choices"][0]["text"] for _, answer in answers] == ["later"] * 4
        assert {answer["model"] for _, answer in answers} == {"other"}
    else:
        eventually(lambda: engine_of(server) != engine, "the new engine answers")
        assert server.complete("@say now", model="other")[1]["choices"][0]["text"] == "now"
        os.kill(engine, signal.SIGUSR1)
    check_all_went_on(streams)
    assert {json.loads(stream.events[0])["model"] for stream in streams} == {"tiny"}
    status, told = begun.result(LIMIT_S)
    assert status == 200, told
    assert (told["model"], told["streams"], told["beside"]) == ("other", "finished", place == "beside")
    assert told["num_streams"] == len(streams)
    assert gone(engine)
    for _ in range(8):  # whichever process answers
        (card,) = ask(server, None, "GET", "/v1/models")[1]["data"]
        assert (card["id"], card["root"], card["max_model_len"]) == ("other", str(folder), 128)
        assert server.complete("@say hello", model="tiny")[0] == 404
        assert server.complete("@say hello", model="other")[1]["choices"][0]["text"] == "hello"
    assert ask(server, None, "GET", "/openapi.json")[0] == 200


def test_the_same_name_may_stand_for_another_model_with_another_template(tmp_path: Path) -> None:
    with running(make_folder(tmp_path / "model")) as server:
        server.ready()
        folder = make_folder(tmp_path / "other", template="{{ messages[0]['content'] }} too")
        (folder / "config.json").write_text("{}")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "@say hi"}]}
        before = server.call("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
        Reloads(server)(model=str(folder))
        after = server.call("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
        assert (before.strip(), after) == ("hi", "hi too")


@SOME
@pytest.mark.parametrize(
    ("start", "is_another"), [("exit", False), ("refuse", True)], ids=["the same model", "another model"]
)
def test_an_engine_that_does_not_start_leaves_the_one_before(
    server: RunningServer, folder: Path, place: str, tmp_path: Path, start: str, is_another: bool
) -> None:
    first = [open_stream(server) for _ in range(3)]
    model = another(tmp_path, start=start) if is_another else folder
    if not is_another:
        write_knobs(folder, start=start, only_with=30, device=PLACES[place])
    begun = Reloads(server).begin(model=str(model), max_running_requests=30)
    if is_another and place == "after":
        eventually(lambda: not is_ready(server), "calls wait")
        end_all(server, 3)
    status, answer = begun.result(LIMIT_S)
    assert status == (400 if start == "refuse" else 500), answer
    assert answer["error"]["code"] == ("reload_refused" if start == "refuse" else "reload_failed")
    assert ("exit code 3" if start == "exit" else "no GPU") in answer["error"]["message"]
    eventually(lambda: is_back(server, 0), "the engine before is there")
    second = [open_stream(server) for _ in range(3)]
    end_all(server, 3 if is_another and place == "after" else 6)
    check_all_went_on(first + second)
    told = settings_of(server)
    assert (told["folder"], told["max_running_requests"]) == (folder.name, None)
    assert server.call("/v1/models")[1]["data"][0]["id"] == "tiny"
    write_knobs(folder, device=PLACES[place])
    assert Reloads(server)(max_running_requests=31)["streams"] == "moved"


@BESIDE
def test_a_kill_of_the_old_engine_while_the_new_one_starts_costs_no_stream(
    server: RunningServer, folder: Path
) -> None:
    streams = [open_stream(server) for _ in range(4)]
    engine = engine_of(server)
    write_knobs(folder, start="hang", only_with=30)
    begun = Reloads(server).begin(max_running_requests=30)
    eventually(lambda: len(list(server.ipc_dirs()[0].glob("e0.*"))) == 2, "the new engine starts")
    os.kill(engine, signal.SIGKILL)
    eventually(lambda: is_back(server, 1), "the old engine is back")
    assert not begun.done()
    end_all(server, 4)
    check_all_went_on(streams)
    os.kill(hanging_engine(server), signal.SIGKILL)
    status, answer = begun.result(LIMIT_S)
    assert (status, answer["error"]["code"]) == (500, "reload_failed")
    assert "SIGKILL" in answer["error"]["message"]
    assert is_back(server, 1)


def hanging_engine(server: RunningServer) -> int:
    """The process of the engine that was started as the second one."""
    (pid,) = children_of(server) - {engine_of(server)}
    return pid


def children_of(server: RunningServer) -> set[int]:
    """The processes that the first server process has started."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return {int(pid) for one in children for pid in one.read_text().split()}


@BESIDE
def test_streams_of_the_model_before_survive_the_death_of_their_engine(
    server: RunningServer, tmp_path: Path
) -> None:
    streams = [open_stream(server) for _ in range(4)]
    old = engine_of(server)
    begun = Reloads(server).begin(model=str(another(tmp_path)))
    eventually(lambda: engine_of(server) != old, "the new engine answers")
    os.kill(old, signal.SIGKILL)
    eventually(lambda: "the engine is back" in server.errors.read_text(), "the old engine is back")
    assert settings_of(server)["folder"] == "other"
    os.kill(hanging_engine(server), signal.SIGUSR1)
    check_all_went_on(streams)
    assert begun.result(LIMIT_S)[0] == 200
    assert settings_of(server)["folder"] == "other"


@BESIDE
def test_a_call_of_the_model_before_can_be_aborted(server: RunningServer, tmp_path: Path) -> None:
    stream = open_stream(server)
    old = engine_of(server)
    begun = Reloads(server).begin(model=str(another(tmp_path)))
    eventually(lambda: engine_of(server) != old, "the new engine answers")
    assert ask(server, ADMIN, "POST", "/abort", {"abort_all": True})[1] == {"aborted": 1}
    assert begun.result(LIMIT_S)[0] == 200
    assert json.loads(stream.result()[-1])["error"]["code"] == "request_aborted"


@BESIDE
def test_one_reload_at_a_time(server: RunningServer, folder: Path) -> None:
    write_knobs(folder, start="hang", only_with=30)
    reload = Reloads(server)
    first = reload.begin(max_running_requests=30)
    eventually(lambda: len(list(server.ipc_dirs()[0].glob("e0.*"))) == 2, "the new engine starts")
    status, answer = ask(server, ADMIN, "POST", "/reload", {})
    assert (status, answer["error"]["code"]) == (409, "reload_in_progress")
    os.kill(hanging_engine(server), signal.SIGKILL)
    assert first.result(LIMIT_S)[0] == 500
    reload()


@pytest.mark.parametrize(("num_processes", "place"), [(1, "beside"), (3, "beside"), (1, "after")])
def test_a_signal_during_a_reload_lets_open_answers_end(
    server: RunningServer, folder: Path, place: str
) -> None:
    stream = open_stream(server)
    old = engine_of(server)
    write_knobs(folder, start="hang", only_with=30, device=PLACES[place])
    begun = Reloads(server).begin(max_running_requests=30)
    eventually(
        lambda: len(list(server.ipc_dirs()[0].glob("e0.*"))) == 2 or gone(old), "the new engine starts"
    )
    server.process.send_signal(signal.SIGTERM)
    eventually(lambda: server.health()[0] == 503, "it drains")
    if place == "beside":
        os.kill(old, signal.SIGUSR1)
    else:  # the answer waits for an engine
        eventually(lambda: engine_of(server) not in (0, old), "it starts")
        os.kill(engine_of(server), signal.SIGKILL)
        eventually(lambda: "the engine is back" in server.errors.read_text(), "an engine is back")
        os.kill(engine_of(server), signal.SIGUSR1)
    check_all_went_on([stream])
    assert exit_code(server) == 0
    assert server.ipc_dirs() == []
    if place == "beside":
        assert begun.result(LIMIT_S)[1]["error"]["code"] == "shutting_down"


@pytest.mark.parametrize("ends", ["a server process", "SIGINT twice"])
@pytest.mark.parametrize(("num_processes", "place"), [(3, "beside")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the stream is cut off
def test_a_server_that_fails_or_stops_at_once_during_a_reload_leaves_nothing(
    server: RunningServer, folder: Path, ends: str
) -> None:
    open_stream(server)
    write_knobs(folder, start="hang", only_with=30)
    Reloads(server).begin(max_running_requests=30)
    eventually(lambda: len(list(server.ipc_dirs()[0].glob("e0.*"))) == 2, "the new engine starts")
    children = children_of(server)
    if ends == "SIGINT twice":
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: server.health()[0] == 503, "it drains")
        server.process.send_signal(signal.SIGINT)
    else:
        is_worker = "minisgl.server.processes.api_worker"
        worker = next(pid for pid in children if is_worker in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(worker, signal.SIGKILL)
    assert exit_code(server) == (130 if ends == "SIGINT twice" else 1)
    assert all(gone(pid) for pid in children)
    assert server.ipc_dirs() == []


def test_a_call_that_waits_for_another_model_can_be_left_limited_and_shut_down(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", device="cuda")
    with running(folder, max_queued_requests=2, request_timeout_s=LIMIT_S) as server:
        server.ready()
        stream = open_stream(server)
        other = another(tmp_path, start="hang", device="cuda")
        Reloads(server).begin(model=str(other))
        eventually(lambda: not is_ready(server), "calls wait")
        waiting = OpenStream(server, "@say later")
        eventually(lambda: server.health()[1]["held_calls"] == 1, "it waits")
        assert server.complete("@say too many")[1]["error"]["code"] == "too_many_requests"
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(waiting.result()[-1])["error"]["code"] == "shutting_down"
        end_all(server, 1)
        check_all_went_on([stream])
        assert exit_code(server) == 0


@pytest.mark.parametrize("place", PLACES)
def test_replicas_are_replaced_one_after_the_other(place: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", device=PLACES[place])
    with running(folder, replicas=2) as server:
        server.ready()
        streams = [open_stream(server, f"@wait {number}") for number in range(6)]
        old = [one["pid"] for one in server.health()[1]["engines"]]
        told = Reloads(server)(max_running_requests=30)
        assert (told["beside"], told["streams"]) == (place == "beside", "moved")
        engines = server.health()[1]["engines"]
        assert all(gone(pid) for pid in old)
        assert [(one["id"], one["up"], one["restarts"]) for one in engines] == [(0, True, 0), (1, True, 0)]
        assert not any(one.startswith(": the engine") for stream in streams for one in stream.events)
        assert settings_of(server)["max_running_requests"] == 30
        eventually(lambda: sum(running_in(server)) == 6, "all run")
        for one in engines:
            os.kill(one["pid"], signal.SIGUSR1)
        for number, stream in enumerate(streams):
            assert text_of(stream.result()) == (f"{number}!", "stop")
        assert info_of(server)["server"]["num_open_requests"] == 0


@pytest.mark.parametrize("place", PLACES)
def test_replicas_of_another_model_start_together(place: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", device=PLACES[place])
    with running(folder, replicas=2) as server:
        server.ready()
        streams = [open_stream(server, f"@wait {number}") for number in range(4)]
        old = [one["pid"] for one in server.health()[1]["engines"]]
        begun = Reloads(server).begin(model=str(another(tmp_path, device=PLACES[place])))
        if place == "beside":
            eventually(lambda: engine_of(server) not in old, "the new engines answer")
            assert settings_of(server)["folder"] == "other"
        else:
            eventually(lambda: not is_ready(server), "calls wait")
        for pid in old:
            os.kill(pid, signal.SIGUSR1)
        for number, stream in enumerate(streams):
            assert text_of(stream.result()) == (f"{number}!", "stop")
        status, told = begun.result(LIMIT_S)
        assert (status, told["streams"], told["num_streams"]) == (200, "finished", 4)
        assert all(gone(pid) for pid in old)
        assert settings_of(server)["folder"] == "other"


def test_a_replica_that_does_not_start_leaves_those_before(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    with running(folder, replicas=2) as server:
        server.ready()
        old = [one["pid"] for one in server.health()[1]["engines"]]
        status, answer = Reloads(server).begin(model=str(another(tmp_path, start="exit"))).result(LIMIT_S)
        assert (status, answer["error"]["code"]) == (500, "reload_failed")
        assert [one["pid"] for one in server.health()[1]["engines"]] == old
        assert settings_of(server)["folder"] == "model"
