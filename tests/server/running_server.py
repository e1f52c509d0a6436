"""A real server process with the fake engine behind it, for tests."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

LIMIT_S = 10.0
DRIVER = """
import json, sys, time
from pathlib import Path
started_at = time.monotonic()
from minisgl.config import EngineConfig, ServerConfig
from minisgl.errors import MinisglError
from minisgl.log import setup_logging
from minisgl.server.engines.launch import run_server
settings = json.loads(sys.argv[1])
server = {name: tuple(v) if isinstance(v, list) else v for name, v in settings["server"].items()}
setup_logging("info", "server")
try:
    sys.exit(
        run_server(
            ServerConfig(**server),
            EngineConfig(model=settings["folder"]),
            Path(settings["folder"]),
            worker_command=settings["worker"],
            engine_secret=settings["secret"],
            started_at=started_at,
        )
    )
except MinisglError as error:
    print("minisgl: error:", error, file=sys.stderr)
    sys.exit(2)
"""
FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


class RunningServer:
    """Start it, talk to it, look at its end. A context manager that leaves nothing running."""

    def __init__(
        self,
        folder: Path,
        worker: list[str] | None = None,
        wrap: tuple[str, ...] = (),
        secret: str | None = None,
        **server: Any,
    ) -> None:
        """`wrap` stands before the command, as a shell does that closes its stdout.

        `secret` is that of --engine-listen.
        """
        settings = {
            "folder": str(folder),
            "server": {"port": 0, "served_model_name": "tiny", **server},
            "worker": worker or [sys.executable, str(FAKE_ENGINE)],
            "secret": secret,
        }
        self.tmp = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short, for the sockets in it
        self.errors = folder.parent / f"{folder.name}.stderr"
        self.out: list[str] = []
        self.port = server.get("port", 0)
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*wrap, sys.executable, "-c", DRIVER, json.dumps(settings)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "TMPDIR": str(self.tmp)},
            )

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.tmp, ignore_errors=True)  # the engine, left alone, deletes its part just now

    def read_until(self, word: str) -> str:
        """The first line of its output with `word` in it; learns the port on the way."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out.append(line.rstrip("\n"))
            port = re.search(r"https?://[^/ ]*:(\d+)", line)
            if port:
                self.port = int(port[1])
            if word in line:
                return line
        raise AssertionError(f"no {word!r} in the output: {self.out}\n{self.errors.read_text()}")

    def ready(self) -> "RunningServer":
        """Wait for the start-up's last line."""
        self.read_until("curl ")
        return self

    def ipc_dirs(self) -> list[Path]:
        """The sockets' directories there are now."""
        return list(self.tmp.iterdir())

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def call(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any, dict[str, str]]:
        """(status, decoded JSON, headers) of one call; `body` bytes go out as they are, others as JSON."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url(path), data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return answer.status, json.loads(answer.read()), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read()), dict(error.headers)

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, Any]:
        """One call of /v1/completions."""
        status, answer, _ = self.call(
            "/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 200, **fields}
        )
        return status, answer

    def report(self) -> dict[str, Any]:
        """What the fake engine has seen."""
        status, answer = self.complete("@report", max_tokens=250)
        assert status == 200, answer
        return json.loads(answer["choices"][0]["text"])

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url("/v1"), api_key="none", max_retries=0, timeout=LIMIT_S)

    def health(self) -> tuple[int, dict[str, Any]]:
        status, body, _ = self.call("/health")
        return status, body


def eventually(check: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Ask again and again until `check()` is true."""
    deadline = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)
