"""`minisgl serve --tp 2`: what clients see when one of the engine's ranks is killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from planted_modules import imported_from, plant_modules
from running_server import eventually
from small_model import make_folder
from tiny_models import random_model

from minisgl.ipc.child_process import module_command

LIMIT_S = 5.0
FLAGS = ("--tp", "2", "--port", "0", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1")
NO_RESTARTS = ("--engine-restarts", "0")


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """For sockets, whose paths may not be long."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def test_every_stream_ends_with_an_error_and_no_process_is_left(tmp_path: Path, short_tmp: Path) -> None:
    folder = make_folder(tmp_path / "model")
    random_model(vocab_size=401, num_attention_heads=4, num_key_value_heads=2).save_pretrained(folder)
    process = subprocess.Popen(
        module_command("minisgl", "serve", "--model", str(folder), *FLAGS, *NO_RESTARTS),
        cwd=(planted := plant_modules(tmp_path / "downloaded")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short_tmp)},
    )
    assert process.stdout is not None
    try:
        url = next(line.split("/v1/")[0][5:] for line in process.stdout if line.startswith("curl "))
        with urllib.request.urlopen(f"{url}/health", timeout=LIMIT_S) as answer:
            engine_pid = json.load(answer)["engine_pid"]
        children = Path(f"/proc/{engine_pid}/task/{engine_pid}/children").read_text().split()
        (rank_1,) = [int(pid) for pid in children if "follower" in Path(f"/proc/{pid}/cmdline").read_text()]
        ask = {"prompt": "the quick brown fox", "max_tokens": 480, "ignore_eos": True, "stream": True}
        stream = urllib.request.urlopen(f"{url}/v1/completions", json.dumps(ask).encode(), timeout=60)
        with stream:
            assert stream.readline().startswith(b"data: {")
            os.kill(rank_1, signal.SIGKILL)
            began = time.monotonic()
            events = re.findall(r"data: (.*)", stream.read().decode())
            assert process.wait(LIMIT_S) == 1
        assert time.monotonic() - began < LIMIT_S
    finally:
        process.kill()
        _, log = process.communicate()
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["code"] == "engine_dead"
    assert "rank 1 of --tp ended (killed by signal 9)" in error["message"], log
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (engine_pid, rank_1)), "all gone")
    assert list(short_tmp.glob("minisgl-*")) == []
    assert imported_from(planted) == []  # by the server, the engine or its rank
