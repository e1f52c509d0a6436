"""One engine over two hosts, which are torchrun agents on this one: a rank is killed, and answers go on."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, eventually
from small_model import make_folder
from tiny_models import random_model
from torch._C._distributed_c10d import HashStore

from minisgl.engine.ranks.job import Job, JobAnswers, ask, job_from
from minisgl.errors import ConfigError
from minisgl.text.tokenizer import Tokenizer

SECRET = "a secret of the tests"
START_S = 60.0
ENVIRON = {
    "TORCHELASTIC_RUN_ID": "job",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}
FLAGS = ["--device", "cpu", "--dtype", "float32", "--num-pages", "128", "--max-running-requests", "8"]
ASKS = [{"prompt": f"the {who} jumps", "seed": 1, "temperature": 0.8} for who in ("fox", "dog", "cat")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = make_folder(tmp_path / "model")
    vocab_size = Tokenizer.from_folder(folder).vocab_size
    model = random_model(
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab_size
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[RunningServer]:
    """Its only engine is a torchrun job with two agents of one rank each."""
    with RunningServer(folder, secret=SECRET, engine_listen="tcp://127.0.0.1:0") as running:
        endpoint = running.read_until("Engines connect to").split()[-1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "2"]
        command += ["--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
        command += [
            "-m",
            "minisgl.engine",
            "--server",
            endpoint,
            "--model",
            str(folder),
            *FLAGS,
            "--cpu-threads",
            "1",
        ]
        # With a short path: a unix socket's has at most 107 bytes.
        temporary = Path(tempfile.mkdtemp(dir="/tmp"))
        environ = {**os.environ, "MINISGL_ENGINE_SECRET": SECRET, "TMPDIR": str(temporary)}
        agents = [subprocess.Popen(command, env=environ) for _ in range(2)]
        try:
            yield running.ready()
        finally:
            for agent in agents:
                agent.terminate()  # it ends its workers
            for agent in agents:
                agent.wait(START_S)
            assert not list(temporary.glob("minisgl-*"))  # what a killed worker would leave
            shutil.rmtree(temporary)


def text_of(server: RunningServer, body: dict[str, Any], num_events: list[int]) -> str:
    """A stream's text; `num_events` has its events."""
    whole = {**body, "model": "tiny", "max_tokens": 120, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url("/v1/completions"), json.dumps(whole).encode(), {"Content-Type": "application/json"}
    )
    text = ""
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                num_events.append(1)
    return text


def ranks_of(folder: Path) -> dict[int, int]:
    """Rank -> process id of the job's workers."""
    found = {}
    for place in Path("/proc").iterdir():
        try:
            is_ours = place.name.isdigit() and str(folder).encode() in (place / "cmdline").read_bytes()
            environ = dict(
                one.split("=", 1) for one in (place / "environ").read_text().split("\0") if "=" in one
            )
        except (OSError, UnicodeDecodeError):
            continue
        if is_ours and "RANK" in environ:
            found[int(environ["RANK"])] = int(place.name)
    return found


def kill_rank_1(server: RunningServer, folder: Path, num_events: list[int]) -> int:
    """Kill it while the answers are under way; returns the process id of rank 0."""
    eventually(lambda: len(num_events) >= 30, "they run")
    first = server.health()[1]["engine_pid"]
    ranks = ranks_of(folder)
    assert sorted(ranks) == [0, 1]
    assert ranks[0] == first
    os.kill(ranks[1], signal.SIGKILL)
    return first


def test_a_killed_rank_changes_no_answer(server: RunningServer, folder: Path) -> None:
    alone = [text_of(server, one, []) for one in ASKS]
    num_events: list[int] = []
    with ThreadPoolExecutor(len(ASKS)) as pool:
        answers = [pool.submit(text_of, server, one, num_events) for one in ASKS]
        first = kill_rank_1(server, folder, num_events)
        assert [answer.result(START_S) for answer in answers] == alone
    after = server.health()[1]
    assert after["engine_restarts"] == 1
    assert after["engine_pid"] != first
    assert after["open_requests"] == 0


def test_the_place_in_a_job_is_read_from_torchruns_environment() -> None:
    assert job_from(ENVIRON) == Job(5, 8, 1, 4, "first", 29500)
    assert job_from({"RANK": "0"}) is None
    with pytest.raises(ConfigError, match="the same --nproc-per-node"):
        job_from({**ENVIRON, "LOCAL_RANK": "0"})
    with pytest.raises(ConfigError, match="'WORLD_SIZE'"):
        job_from({name: value for name, value in ENVIRON.items() if name != "WORLD_SIZE"})


def test_a_rank_never_gets_what_an_earlier_start_was_told() -> None:
    store = HashStore()
    answers = JobAnswers(store, 2, lambda rank: f"first {rank}".encode())
    assert ask(store, 1) == b"first 1"
    answers.close()
    answers = JobAnswers(store, 2, lambda rank: f"second {rank}".encode())
    assert ask(store, 1) == b"second 1"
    answers.close()
