"""The engine process: `python -m minisgl.engine.worker`, started by the server.

Reads one JSON line from stdin, a `WorkerConfig`. The pipe stays open as a sign of life: at its end the parent
is gone, and so is this process.

Promise: it never outlives its parent, answers every message, and says why when it has to end.
"""

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.config import EngineConfig
from minisgl.engine.garbage import collect_once
from minisgl.errors import ConfigError, MinisglError
from minisgl.log import setup_logging
from minisgl.messages import (
    AbortRequest,
    AddRequest,
    AskProfile,
    AskTimeline,
    CacheFlushed,
    DebugAnswer,
    Fatal,
    FlushCache,
    Ping,
    Ready,
    Shutdown,
    StartupStage,
    StepOutput,
)
from minisgl.transport import EngineSocket

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine.engine import Engine

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 500
CHECK_INTERVAL_S = 60
"""How often the pages are recounted, at most, and only while nothing runs."""
LAST_RESORT_S = 3.0
"""How long this process may go on after another rank of --tp has ended."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """The line on stdin."""

    engine: EngineConfig
    model_folder: str
    ipc_dir: str
    log_level: str = "info"
    num_servers: int = 1
    """Server processes at the other end of the sockets."""


def main() -> int:
    """Run until told to stop; the exit code is 0 then, 1 after a failure."""
    started = time.perf_counter()
    line = sys.stdin.buffer.readline()
    if not line:
        return 1  # the parent is gone already
    config = msgspec.json.decode(line, type=WorkerConfig)
    end_with_the_parent(config.ipc_dir)
    # A terminal or an init system may signal the whole group; the server decides what it means for us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setup_logging(config.log_level, "engine")
    socket = EngineSocket(config.ipc_dir, config.num_servers)
    try:
        _run(config, socket, started)
        return 0
    except MinisglError as error:
        socket.send(Fatal(str(error)))
        return 1
    except Exception as error:
        logger.exception("the engine failed")
        socket.send(Fatal(f"the engine failed: {type(error).__name__}: {error}"))
        return 1
    finally:
        socket.close()


def _run(config: WorkerConfig, socket: EngineSocket, started: float) -> None:
    stages: dict[str, float] = {}

    def on_stage(name: str, duration_ms: float) -> None:
        stages[name] = duration_ms
        socket.send(StartupStage(name, duration_ms))

    if config.engine.compile_cache:
        keep_bytecode(Path(config.engine.compile_cache).expanduser())
    with collect_once():
        # Lazy: torch takes seconds, and this is where they are counted.
        from minisgl.engine.build import build_engine

        on_stage("import torch", (time.perf_counter() - started) * 1e3)
        engine = build_engine(
            config.engine,
            Path(config.model_folder),
            on_stage,
            ipc_dir=Path(config.ipc_dir),
            on_lost_rank=_end_soon,
        )
    try:
        _serve(engine, socket, stages)
    except BaseException:
        with contextlib.suppress(Exception):  # what is broken already is said already
            engine.close()
        raise
    engine.close()


def _serve(engine: "Engine", socket: EngineSocket, stages: dict[str, float]) -> None:
    """Say that the engine is ready, then answer messages until told to stop."""
    socket.send(
        Ready(
            max_context_tokens=engine.max_context_tokens,
            num_pages=engine.num_pages,
            page_size=engine.config.page_size,
            max_rows=engine.config.max_running_requests,
            device=engine.config.device,
            startup_ms=stages,
        )
    )
    next_check = time.monotonic() + CHECK_INTERVAL_S
    while True:
        messages = socket.receive(0 if engine.has_work or engine.num_missing_graphs else IDLE_WAIT_MS)
        if not messages and not engine.has_work and engine.num_missing_graphs:
            engine.record_graph()
        if not messages and not engine.has_work and time.monotonic() > next_check:
            engine.check_at_idle()
            next_check = time.monotonic() + CHECK_INTERVAL_S
        for message in messages:
            match message:
                case AddRequest():
                    engine.add(message)
                case AbortRequest(request_id):
                    engine.abort(request_id)
                case Ping(sequence, server):
                    socket.send(engine.status(sequence), server)
                case FlushCache(sequence, server):
                    socket.send(CacheFlushed(sequence, engine.flush_prefix_cache()), server)
                case AskTimeline(sequence, server):
                    socket.send(DebugAnswer(sequence, engine.timeline.to_trace()), server)
                case AskProfile(sequence, server, num_steps):
                    socket.send(_start_profile(engine, sequence, num_steps), server)
                case Shutdown():
                    return
        outputs = engine.step()
        if outputs:
            socket.send_outputs(StepOutput(outputs))


def _start_profile(engine: "Engine", sequence: int, num_steps: int) -> DebugAnswer:
    try:
        return DebugAnswer(sequence, str(engine.profiler.start(num_steps)).encode())
    except ConfigError as error:
        return DebugAnswer(sequence, b"", str(error))


def _end_soon(reason: str) -> None:
    """The main thread reports that a rank is lost; where it waits for a GPU and can't, this ends it."""
    timer = threading.Timer(LAST_RESORT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


def end_with_the_parent(ipc_dir: str | None) -> None:
    """From now on end this process when stdin does, that is when the parent does, however it dies.

    A parent that was killed could not remove the sockets' directory, if it had one; then this does.
    """

    def wait_for_the_end_of_stdin() -> None:
        while os.read(0, 4096):
            pass
        if ipc_dir is not None:
            shutil.rmtree(ipc_dir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait_for_the_end_of_stdin, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
