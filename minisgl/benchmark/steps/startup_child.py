"""The child process of `minisgl bench startup`, which starts an engine once.

The process reads one JSON line from stdin (`StartOrder`). It writes one line to stdout after each stage
(`StageFinished`); the last one follows the first token. After a user's mistake it writes `StartFailed`.
"""

import sys
import time
from pathlib import Path

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.config import EngineConfig
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.errors import MinisglError

PROMPT_TOKENS = 16


class StartOrder(msgspec.Struct, frozen=True):
    """The engine to start."""

    engine: EngineConfig
    folder: str
    started_at: float
    """time.monotonic() of the parent when it started this process; all processes of a machine share it."""


class StageFinished(msgspec.Struct, frozen=True, tag="stage"):
    """A stage, and its milliseconds since the end of the stage before."""

    name: str
    duration_ms: float
    is_last: bool = False


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The error message after a user's mistake."""

    message: str


def main() -> int:
    """Start an engine, generate one token, and end; the exit code is 2 after a user's mistake."""
    arrived_at = time.monotonic()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartOrder)
    _write_line(StageFinished("start Python", 1e3 * (arrived_at - order.started_at)))
    try:
        _start(order, arrived_at)
    except MinisglError as error:
        _write_line(StartFailed(str(error)))
        return 2
    return 0


def _write_line(line: StageFinished | StartFailed) -> None:
    """Write one line to stdout and flush it."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _start(order: StartOrder, arrived_at: float) -> None:
    if order.engine.compile_cache:
        keep_bytecode(Path(order.engine.compile_cache).expanduser())
    with pause_then_freeze_gc():  # as a server's engine starts
        import numpy as np

        from minisgl.engine.start.build import build_engine
        from minisgl.ipc.messages import AddRequest
        from minisgl.request import SamplingParams

        _write_line(StageFinished("import torch and engine", 1e3 * (time.monotonic() - arrived_at)))
        engine = build_engine(
            order.engine, Path(order.folder), lambda name, ms: _write_line(StageFinished(name, ms))
        )
    began_at = time.monotonic()
    engine.add(
        AddRequest(
            request_id=0,
            prompt_ids=np.arange(PROMPT_TOKENS, dtype="<i4").tobytes(),
            params=SamplingParams(temperature=0, max_tokens=1),
        )
    )
    while engine.has_work:
        engine.step()
    _write_line(StageFinished("first token", 1e3 * (time.monotonic() - began_at), is_last=True))
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
