"""`minisgl serve` with the built-in model: what happens when one of its two processes is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import eventually

from minisgl.errors import MinisglError
from minisgl.weights.sources import resolve_model_folder

LIMIT_S = 5.0
"""Within this the other process must be gone."""
FLAGS = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", "--num-pages", "64"),
    *("--engine-restarts", "0"),
)


class Served:
    """The command as a user starts it."""

    def __init__(self, tmp: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "serve", *FLAGS],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp)},
        )
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if line.startswith("curl "):
                self.url = line.split("/v1/")[0].removeprefix("curl ")
                break
        assert self.url, self.process.wait(LIMIT_S)
        with urllib.request.urlopen(f"{self.url}/health", timeout=LIMIT_S) as answer:
            self.engine_pid: int = json.load(answer)["engine_pid"]

    def open_stream(self) -> Any:
        """A long answer; its first event has been read."""
        ask = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "stream": True}
        answer = urllib.request.urlopen(f"{self.url}/v1/completions", json.dumps(ask).encode(), timeout=60)
        assert answer.readline().startswith(b"data: {")
        return answer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    try:
        resolve_model_folder("smollm2-135m")
    except MinisglError as error:
        pytest.skip(f"the built-in model is not on this machine and can't be fetched: {error}")
    made = Served(tmp_path)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
        assert made.process.stdout is not None
        made.process.stdout.close()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a short name: sockets in it must fit in the 107 bytes of a socket's path."""
    return tmp_path_factory.mktemp("ipc")


def is_gone(pid: int) -> bool:
    """Whether no such process runs; a zombie nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_kill_9_of_the_real_engine_ends_the_stream_and_the_server(served: Served, tmp_path: Path) -> None:
    with served.open_stream() as stream:
        os.kill(served.engine_pid, signal.SIGKILL)
        began = time.monotonic()
        events = re.findall(r"data: (.*)", stream.read().decode())
        assert served.process.wait(LIMIT_S) != 0
    assert time.monotonic() - began < LIMIT_S
    assert "[DONE]" not in events
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    assert is_gone(served.engine_pid)
    assert list(tmp_path.glob("minisgl-*")) == []


def test_the_real_engine_ends_when_its_server_is_killed(served: Served, tmp_path: Path) -> None:
    stream = served.open_stream()
    assert len(list(tmp_path.glob("minisgl-*"))) == 1
    served.process.kill()
    eventually(lambda: is_gone(served.engine_pid), "the engine is gone", LIMIT_S)
    assert list(tmp_path.glob("minisgl-*")) == []
    stream.close()
