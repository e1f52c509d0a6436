"""`minisgl engine --server -` with a real engine: it follows its supervisor, and ends in good order."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import LIMIT_S, RunningServer, eventually
from small_model import make_folder
from test_engine_restarts import text_of, wait_for_events
from test_launch import OpenStream
from test_replicas import engines_of
from tiny_models import random_model

from minisgl.ipc.child_process import module_command
from minisgl.text.tokenizer import Tokenizer

SECRETS = ("a secret of the tests", "another secret of the tests")
FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-pages", "64", "--max-running-requests", "4"]


class Supervised:
    """A supervised engine, and who supervises it."""

    def __init__(self, folder: Path) -> None:
        command = module_command("minisgl.engine", "--server", "-", "--model", str(folder), *FLAGS)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send_to(self, server: RunningServer, secret: str) -> None:
        assert self.process.stdin is not None
        endpoint = next(line for line in server.out if "Engines connect to" in line).split()[-1]
        self.process.stdin.write(json.dumps({"server": endpoint, "secret": secret}) + "\n")
        self.process.stdin.flush()

    def pulse(self, **wanted: Any) -> dict[str, Any]:
        """The next pulse with these values."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            pulse = json.loads(line)
            if all(pulse[name] == value for name, value in wanted.items()):
                return pulse
        raise AssertionError(f"the engine ended without {wanted}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_folder(tmp_path / "model")
    random_model(num_hidden_layers=1, vocab_size=Tokenizer.from_folder(folder).vocab_size).save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def servers(folder: Path) -> Iterator[list[RunningServer]]:
    running = [RunningServer(folder, secret=secret, engine_listen="tcp://127.0.0.1:0") for secret in SECRETS]
    try:
        for server in running:
            server.read_until("Listening on")
        yield running
    finally:
        for server in running:
            server.__exit__()


@pytest.fixture
def engine(folder: Path) -> Iterator[Supervised]:
    supervised = Supervised(folder)
    yield supervised
    supervised.process.kill()
    supervised.process.wait(LIMIT_S)
    for pipe in (supervised.process.stdin, supervised.process.stdout):
        assert pipe is not None
        pipe.close()


def test_it_goes_where_its_supervisor_says_and_ends_its_requests_before(
    servers: list[RunningServer], engine: Supervised
) -> None:
    engine.send_to(servers[0], SECRETS[0])
    servers[0].ready()
    assert engine.pulse(in_service=True, running=0) == {
        **{"in_service": True, "running": 0, "waiting": 0, "rows": 4, "held_pages": 0, "pages": 63}
    }
    stream = OpenStream(servers[0], "the fox")
    wait_for_events([stream], 3)
    engine.send_to(servers[1], SECRETS[1])
    assert text_of(stream.result())[1] in ("length", "stop")
    eventually(lambda: not engines_of(servers[0])[0]["up"], "it has left the first server")
    engine.pulse(in_service=False)
    servers[1].ready()
    assert engines_of(servers[1])[0]["pid"] == engine.process.pid
    stream = OpenStream(servers[1], "the fox")
    wait_for_events([stream], 3)
    engine.process.terminate()
    assert text_of(stream.result())[1] in ("length", "stop")
    assert engine.process.wait(LIMIT_S) == 0


def test_it_ends_with_its_supervisor(servers: list[RunningServer], engine: Supervised) -> None:
    engine.send_to(servers[0], SECRETS[0])
    engine.pulse(in_service=True)
    assert engine.process.stdin is not None
    engine.process.stdin.close()
    assert engine.process.wait(LIMIT_S) == 1
