"""Engines that connect to the server: who is let in, and what happens to answers when one goes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from remote_fake_engine import SECRET
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_engine_restarts import text_of, wait_for_events
from test_launch import OpenStream, open_stream
from test_replicas import engines_of, running_in

from minisgl.config import EngineConfig, ServerConfig, check_server_config
from minisgl.errors import ConfigError
from minisgl.ipc.door_keys import derive_keys
from minisgl.server.engines.supervision.door import check_engine_listen

REMOTE = Path(__file__).with_name("remote_fake_engine.py")


class Door:
    """A server whose engines come from elsewhere, and the engines."""

    def __init__(self, folder: Path, listen: str = "tcp://127.0.0.1:0", **server: Any) -> None:
        self.folder = folder
        self.server = RunningServer(folder, secret=SECRET, engine_listen=listen, **server)
        self.endpoint = self.server.read_until("Engines connect to").split()[-1]
        self.server.read_until("Listening on")
        self._engines: list[subprocess.Popen[str]] = []

    def start_engine(self, folder: Path | None = None, **odd: Any) -> subprocess.Popen[str]:
        engine = subprocess.Popen(
            [sys.executable, str(REMOTE), self.endpoint, str(folder or self.folder), json.dumps(odd)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._engines.append(engine)
        return engine

    def ready(self, num_engines: int = 1) -> "Door":
        """Start engines, and wait until all of them serve."""
        for _ in range(num_engines):
            self.start_engine()
        self.server.ready()
        eventually(lambda: self.up() == [True] * num_engines, "all engines serve")
        return self

    def up(self) -> list[bool]:
        return [one["up"] for one in engines_of(self.server)]

    def num_ended(self) -> int:
        return sum(engine.poll() is not None for engine in self._engines)

    def engine_of(self, number: int) -> subprocess.Popen[str]:
        """The process in the server's seat `number`."""
        return next(engine for engine in self._engines if engine.pid == self.pid(number))

    def pid(self, number: int) -> int:
        return engines_of(self.server)[number]["pid"]

    def close(self) -> None:
        for engine in self._engines:
            engine.kill()
            engine.communicate()
        self.server.__exit__()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "model", pace_ms=20)


@pytest.fixture
def door(folder: Path) -> Iterator[Door]:
    opened = Door(folder, heartbeat_timeout_s=2.0)
    yield opened
    opened.close()


def said(engine: subprocess.Popen[str], word: str) -> str:
    """The first line of the engine's output that begins with `word`."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(f"the engine ended without {word!r}")


def test_an_engine_with_another_secret_is_not_let_in(door: Door) -> None:
    engine = door.start_engine(secret="another secret of the tests")
    assert "another engine secret" in said(engine, "refused")
    assert engine.wait(LIMIT_S) == 2
    assert door.server.health()[1]["status"] == "unavailable"
    door.ready()


def _send_unless_refused(peer: zmq.Socket, data: bytes) -> None:
    """Queues `data`. After a refused handshake there is no queue, and a plain send would wait for ever."""
    with contextlib.suppress(zmq.Again):
        peer.send(data, zmq.DONTWAIT)


def test_bytes_of_strangers_are_read_by_nobody(door: Door) -> None:
    host, port = door.endpoint.removeprefix("tcp://").split(":")
    strangers = []
    for data in (b"\xff" * 500, b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)):
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(data)
        strangers.append(stranger)
    context = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(door.endpoint)
    _send_unless_refused(plain, b"\xc1 no message at all")
    # It knows the server's key, but has not the engines' own.
    keys = derive_keys(SECRET)
    half = context.socket(zmq.DEALER)
    half.curve_serverkey = keys.server.public
    half.curve_publickey, half.curve_secretkey = zmq.curve_keypair()
    half.connect(door.endpoint)
    _send_unless_refused(half, b"\xc1 no message at all")
    assert not half.poll(500)
    door.ready()
    assert door.server.complete("@say well")[1]["choices"][0]["text"] == "well"
    for stranger in strangers:
        stranger.close()
    context.destroy(linger=0)
    assert "first message" not in door.server.errors.read_text()


def test_an_engine_whose_first_message_is_nonsense_is_told_so(door: Door) -> None:
    keys = derive_keys(SECRET)
    with zmq.Context() as context, context.socket(zmq.DEALER) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        engine.curve_serverkey = keys.server.public
        engine.curve_publickey, engine.curve_secretkey = keys.engine
        engine.connect(door.endpoint)
        engine.send(b"\xc1")
        assert engine.poll(10_000)
        assert b"can't read its first message" in engine.recv()


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"version": "0.0.1"}, "this engine has 0.0.1"),
        ({"facts": {"the model's config.json": "0123"}}, "the model's config.json must be the same"),
        ({"facts": {"--dtype": "float16"}}, "--dtype must be the same: here it is float32"),
    ],
)
def test_another_version_model_or_dtype_is_refused_on_both_sides(
    door: Door, odd: dict[str, Any], reason: str
) -> None:
    door.ready()
    engine = door.start_engine(**odd)
    assert reason in said(engine, "refused")
    assert engine.wait(LIMIT_S) == 2
    assert reason in door.server.errors.read_text()
    assert door.up() == [True]


def test_another_tokenizer_is_refused_before_any_engine_has_come(door: Door, tmp_path: Path) -> None:
    other = make_folder(tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    assert "tokenizer.json must be the same" in said(door.start_engine(other), "refused")


def test_calls_spread_and_answers_of_a_lost_engine_go_on_in_the_other(door: Door) -> None:
    door.ready(2)
    texts = [f"{number}" + "abcdefghij" * 6 for number in range(6)]
    streams = [open_stream(door.server, f"@chars {text}") for text in texts]
    eventually(lambda: running_in(door.server) == [3, 3], "three in each engine")
    wait_for_events(streams, 10)
    os.kill(door.pid(0), signal.SIGKILL)
    for text, stream in zip(texts, streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    assert door.up() == [False, True]
    door.start_engine()
    eventually(lambda: door.up() == [True, True], "a new engine takes the seat")
    assert running_in(door.server) == [0, 0]
    assert [one["restarts"] for one in engines_of(door.server)] == [1, 0]


def test_without_engines_answers_wait_for_the_next_one_whatever_its_seat(door: Door) -> None:
    door.ready(2)
    texts = [f"{number}" + "abcdefghij" * 6 for number in range(4)]
    streams = [open_stream(door.server, f"@chars {text}") for text in texts]
    wait_for_events(streams, 10)
    for pid in (door.pid(0), door.pid(1)):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: door.up() == [False, False], "both have gone")
    assert door.server.health()[1]["status"] == "restarting"
    assert "is away" in door.server.call("/health/ready")[1]["reason"]
    streams.append(OpenStream(door.server, "@chars late"))
    door.start_engine()
    for text, stream in zip([*texts, "late"], streams, strict=True):
        assert text_of(stream.result()) == (text, "stop")
    assert sum(door.up()) == 1


def test_an_engine_that_leaves_gets_no_new_calls_and_ends_its_own(door: Door) -> None:
    door.ready(2)
    streams = [open_stream(door.server, f"@wait {number}") for number in range(4)]
    wait_for_events(streams, 1)
    leaving = door.engine_of(0)
    leaving.terminate()
    eventually(lambda: "is leaving; its 2 requests" in door.server.errors.read_text(), "the server knows it")
    streams += [open_stream(door.server, f"@wait {number}") for number in range(4, 8)]
    eventually(lambda: running_in(door.server) == [2, 6], "the others go to the other engine")
    leaving.send_signal(signal.SIGUSR1)
    assert "has left" in said(leaving, "out")
    assert leaving.wait(LIMIT_S) == 0
    door.engine_of(1).send_signal(signal.SIGUSR1)
    for number, stream in enumerate(streams):
        assert text_of(stream.result()) == (f"{number}!", "stop")
    assert door.up() == [False, True]


def test_behind_the_limit_of_an_engine_that_leaves_its_answers_go_on_in_the_other(door: Door) -> None:
    door.start_engine(leave_s=0.2)
    door.start_engine(leave_s=0.2)
    door.server.ready()
    eventually(lambda: door.up() == [True, True], "both engines serve")
    text = "abcdefghij" * 6
    streams = [open_stream(door.server, f"@chars {number}{text}") for number in range(4)]
    wait_for_events(streams, 5)
    leaving = door.engine_of(0)
    leaving.terminate()
    for number, stream in enumerate(streams):
        assert text_of(stream.result()) == (f"{number}{text}", "stop")
    assert leaving.wait(LIMIT_S) == 0
    assert "2 requests of another" in door.server.errors.read_text()


def test_leaving_again_and_again_is_no_crash_that_counts_against_an_answer(door: Door) -> None:
    door.start_engine(leave_s=0.0)
    door.server.ready()
    stream = open_stream(door.server, "@wait here")
    wait_for_events([stream], 1)
    for _ in range(4):
        leaving = door.engine_of(0)
        leaving.terminate()
        assert leaving.wait(LIMIT_S) == 0
        door.start_engine(leave_s=0.0)
        eventually(lambda: running_in(door.server) == [1], "the next engine has it")
    door.engine_of(0).send_signal(signal.SIGUSR1)
    assert text_of(stream.result()) == ("here!", "stop")


def test_a_hanging_engine_loses_its_life_and_comes_back_with_another(door: Door) -> None:
    door.ready()
    engine = door._engines[0]
    said(engine, "in")
    text = "abcdefghij" * 6
    stream = open_stream(door.server, f"@chars {text}")
    wait_for_events([stream], 10)
    os.kill(door.pid(0), signal.SIGSTOP)
    eventually(lambda: door.up() == [False], "it is counted as dead")
    os.kill(door.pid(0), signal.SIGCONT)
    assert "counts this engine as dead" in said(engine, "out")
    assert text_of(stream.result()) == (text, "stop")
    assert engines_of(door.server)[0]["restarts"] == 1


def test_a_request_that_crashes_engines_ends_alone(door: Door) -> None:
    door.ready(2)
    text = "abcdefghij" * 8
    stream = open_stream(door.server, f"@chars {text}")
    poison = open_stream(door.server, "@break ab")
    for num_crashes in (1, 2, 3):
        eventually(lambda num=num_crashes: door.num_ended() >= num, "it crashed")
        door.start_engine()
    assert json.loads(poison.result()[-1])["error"]["code"] == "request_crashes_engine"
    assert text_of(stream.result()) == (text, "stop")
    assert door.num_ended() == 3


def test_an_engine_outlives_its_server(door: Door, folder: Path) -> None:
    door.ready()
    engine = door._engines[0]
    said(engine, "in")
    door.server.process.terminate()
    assert door.server.process.wait(LIMIT_S) == 0
    said(engine, "out")
    next_door = Door(folder, door.endpoint)
    try:
        next_door.server.ready()
        assert next_door.pid(0) == engine.pid
        assert next_door.server.complete("@say again")[1]["choices"][0]["text"] == "again"
    finally:
        next_door.close()


@pytest.mark.parametrize(
    ("server", "engine", "flag"),
    [
        ({"replicas": 2}, {}, "--replicas"),
        ({"api_workers": 2}, {}, "--api-workers"),
        ({"engine_restarts": 0}, {}, "--engine-restarts"),
        ({"spare_process": True}, {}, "--spare-process"),
        ({}, {"tp": 2}, "--tp"),
        ({}, {"dtype": "float32"}, "--dtype"),
        ({}, {"num_pages": 64}, "--num-pages"),
    ],
)
def test_flags_of_engines_are_refused_by_name(
    server: dict[str, Any], engine: dict[str, Any], flag: str
) -> None:
    listening = ServerConfig(engine_listen="tcp://127.0.0.1:9000", **server)
    with pytest.raises(ConfigError, match=f"^{flag} does not go with --engine-listen"):
        check_engine_listen(listening, EngineConfig(**engine))
    check_engine_listen(ServerConfig(**server), EngineConfig(**engine))


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "tcp://host", "ipc:///tmp/x", "tcp://a b:1", ""])
def test_an_address_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--engine-listen must be as tcp://"):
        check_server_config(ServerConfig(engine_listen=endpoint))


def test_an_address_that_is_taken_and_a_short_secret_are_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        for listen, secret, word in (
            (taken, SECRET, "can't be used"),
            ("tcp://127.0.0.1:0", "short", "got 5"),
        ):
            with RunningServer(folder, secret=secret, engine_listen=listen) as server:
                assert server.process.wait(LIMIT_S) == 2
                assert word in server.errors.read_text()
                assert "Traceback" not in server.errors.read_text()
