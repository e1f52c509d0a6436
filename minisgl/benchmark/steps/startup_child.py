"""One start of an engine, in a process of its own: `python -m minisgl.benchmark.startup_child`.

Reads one JSON line from stdin (`StartOrder`) and writes one to stdout per stage (`StageOver`), the last one
when the engine has given its first token; a user's mistake is a `StartFailed` instead.
"""

import sys
import time
from pathlib import Path

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.config import EngineConfig
from minisgl.engine.garbage import collect_once
from minisgl.errors import MinisglError

PROMPT_TOKENS = 16


class StartOrder(msgspec.Struct, frozen=True):
    """What to start."""

    engine: EngineConfig
    folder: str
    started_at: float
    """time.monotonic() of the parent when it made this process: one clock for all processes of a machine."""


class StageOver(msgspec.Struct, frozen=True, tag="stage"):
    """A stage and the milliseconds it took, from the end of the one before."""

    name: str
    duration_ms: float
    is_last: bool = False


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The message of a user's mistake."""

    message: str


def main() -> int:
    """Start, give one token, end; the exit code is 2 after a user's mistake."""
    arrived_at = time.monotonic()
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartOrder)
    tell(StageOver("start Python", 1e3 * (arrived_at - order.started_at)))
    try:
        _start(order, arrived_at)
    except MinisglError as error:
        tell(StartFailed(str(error)))
        return 2
    return 0


def tell(line: StageOver | StartFailed) -> None:
    """One line on stdout, at once."""
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _start(order: StartOrder, arrived_at: float) -> None:
    if order.engine.compile_cache:
        keep_bytecode(Path(order.engine.compile_cache).expanduser())
    with collect_once():  # as a server's engine starts
        import numpy as np

        from minisgl.engine.build import build_engine
        from minisgl.messages import AddRequest
        from minisgl.request import SamplingParams

        tell(StageOver("import torch and engine", 1e3 * (time.monotonic() - arrived_at)))
        engine = build_engine(order.engine, Path(order.folder), lambda name, ms: tell(StageOver(name, ms)))
    began_at = time.monotonic()
    engine.add(
        AddRequest(
            request_id=0,
            prompt_ids=np.arange(PROMPT_TOKENS, dtype="<i4").tobytes(),
            params=SamplingParams(max_tokens=1),
        )
    )
    while engine.has_work:
        engine.step()
    tell(StageOver("first token", 1e3 * (time.monotonic() - began_at), is_last=True))
    engine.close()


if __name__ == "__main__":
    sys.exit(main())
