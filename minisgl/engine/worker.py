"""The engine process: the module `minisgl.engine.worker`, started by the server.

It reads one JSON line from stdin, a `WorkerConfig`; a spare process reads a second one when it is needed. The
pipe then stays open. It closes when the parent ends, and this process exits.

Promise: the process never outlives its parent, answers every message, and reports why it ends.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from compile_cache.bytecode import keep_bytecode
from minisgl.config import EngineConfig
from minisgl.engine.device_faults import device_fault_of, exit_after_device_fault
from minisgl.engine.parent_watch import ParentWatch
from minisgl.engine.start.gc_freeze import pause_then_freeze_gc
from minisgl.errors import (
    DEVICE_FAULT_EXIT_CODE,
    ConfigError,
    DeviceFaultError,
    MinisglError,
    ModelError,
)
from minisgl.grammar.limits import MAX_QUEUED
from minisgl.ipc.messages import (
    AbortRequest,
    AddRequest,
    Fatal,
    Ready,
    Shutdown,
    StartupStage,
    StepOutput,
    ToEngine,
    ToServer,
)
from minisgl.ipc.questions import (
    AskProfile,
    AskRequests,
    AskTimeline,
    CacheFlushed,
    DebugAnswer,
    FlushCache,
    Ping,
)
from minisgl.ipc.transport import EngineSocket
from minisgl.log import setup_logging

if TYPE_CHECKING:  # it imports torch
    from minisgl.engine.engine import Engine

logger = logging.getLogger(__name__)

IDLE_WAIT_MS = 500
CHECK_INTERVAL_S = 60
"""The least time between two counts of all pages, which happen only while nothing runs."""
EXIT_DEADLINE_S = 3.0
"""How long this process may live after another rank of --tp has ended."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """The JSON line on stdin."""

    engine: EngineConfig
    model_folder: str
    ipc_dir: str
    """The directory of the sockets of this life of the engine; "" = wait for further settings."""
    log_level: str = "info"
    num_servers: int = 1
    """Number of server processes connected to the sockets."""
    private_dir: str = ""
    """The server's directory, which holds `ipc_dir`; removed when the server is killed. "" = `ipc_dir`."""
    num_engines: int = 1
    """Engines of this host that share the processor."""
    visible_gpus: str = ""
    """What CUDA_VISIBLE_DEVICES is set to; "" = it is left as it is."""
    sent_s: float = msgspec.field(default_factory=time.monotonic)
    """`time.monotonic()` when the server started the process, or sent this to one that waits."""


def main() -> int:
    """Run until told to stop. Returns exit code 0, or 1 after a failure; a GPU fault ends the process."""
    # A terminal or an init system may signal the whole process group. The server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch = ParentWatch()
    config = msgspec.json.decode(watch.next_line(), type=WorkerConfig)
    if not config.ipc_dir:
        setup_logging(config.log_level, "spare")
        _import_for(config)
        config = msgspec.json.decode(watch.next_line(), type=WorkerConfig)
    setup_logging(config.log_level, "engine")
    socket = EngineSocket(config.ipc_dir, config.num_servers)
    try:
        _run(config, socket)
        return 0
    except Exception as error:
        fatal = fatal_message(error)
        if fatal.is_device_fault or not isinstance(error, MinisglError):
            logger.exception("the engine failed")
        socket.send(fatal)
        if fatal.is_device_fault:
            socket.close()
            exit_after_device_fault()
        return 1
    finally:
        socket.close()


def _import_for(config: WorkerConfig) -> None:
    """Import what the start of an engine with these settings needs; `_run` reports what goes wrong."""
    _set_environment(config)
    try:
        with pause_then_freeze_gc():
            import minisgl.engine.start.build  # noqa: F401  (imported for its time)
            from minisgl.engine.graphs.decode_graphs import import_compiler

            if config.engine.compile_mode != "off":
                import_compiler()
    except Exception:
        logger.exception("a spare process could not import everything")


def _set_environment(config: WorkerConfig) -> None:
    """Call it before torch is imported."""
    if config.visible_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.visible_gpus  # CUDA reads it when it starts
    if config.engine.compile_cache:
        keep_bytecode(Path(config.engine.compile_cache).expanduser())


def fatal_message(error: Exception) -> Fatal:
    """The message that tells the server which error ends this process."""
    if not isinstance(error, MinisglError):
        fault = device_fault_of(error)
        if fault is None:
            return Fatal(f"the engine failed: {type(error).__name__}: {error}")
        error = fault
    return Fatal(
        str(error),
        is_user_error=isinstance(error, ConfigError | ModelError),
        is_device_fault=isinstance(error, DeviceFaultError),
    )


def _run(config: WorkerConfig, socket: EngineSocket) -> None:
    stages: dict[str, float] = {}

    def on_stage(name: str, duration_ms: float) -> None:
        stages[name] = duration_ms
        socket.send(StartupStage(name, duration_ms))

    _set_environment(config)
    with pause_then_freeze_gc():
        # Lazy: importing torch takes seconds, which this stage counts.
        from minisgl.engine.start.build import build_engine, reasons_for_settings

        on_stage("import torch", (time.monotonic() - config.sent_s) * 1e3)
        engine = build_engine(
            _with_share_of_threads(config.engine, config.num_engines),
            Path(config.model_folder),
            on_stage,
            ipc_dir=Path(config.ipc_dir),
            on_lost_rank=end_soon,
            max_queued_grammars=MAX_QUEUED,
        )
    try:
        choices = reasons_for_settings(config.engine, engine.config, Path(config.model_folder))
        socket.send(ready_message(engine, stages, [(one.flag, one.value, one.why) for one in choices]))
        serve(engine, socket)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            engine.close()
        raise
    engine.close()


def _with_share_of_threads(engine: EngineConfig, num_engines: int) -> EngineConfig:
    """The settings of one of several engines on a host: each gets as many of torch's threads."""
    if num_engines == 1 or engine.cpu_threads is not None:
        return engine
    import torch  # lazy: it takes seconds, which a stage counts

    num_threads = torch.get_num_threads() // (num_engines * engine.tp)
    return dataclasses.replace(engine, cpu_threads=max(1, num_threads))


class ToServerSocket(Protocol):
    """The engine's end of the connection to its server."""

    def receive(self, timeout_ms: int) -> list[ToEngine]:
        """The messages that wait, in order; when none does, wait up to `timeout_ms` (0 = don't wait)."""
        ...

    def send(self, message: ToServer, server: int | None = None) -> None:
        """Queue `message` for one server process, or for all; never waits for it to be read."""
        ...

    def send_outputs(self, step: StepOutput) -> None:
        """Queue a step's outputs."""
        ...


def ready_message(
    engine: "Engine", stages: dict[str, float], choices: Sequence[tuple[str, str, str]] = ()
) -> Ready:
    """What the engine says when it is ready.

    Args:
        stages: milliseconds of each stage of the start.
        choices: flag, value and reason of each setting.
    """
    return Ready(
        max_context_tokens=engine.max_context_tokens,
        num_pages=engine.num_pages,
        page_size=engine.config.page_size,
        max_rows=engine.config.max_running_requests,
        device=engine.config.device,
        startup_ms=stages,
        choices=list(choices),
        page_events=engine.page_events.addresses if engine.page_events else {},
    )


def serve(engine: "Engine", socket: ToServerSocket) -> None:
    """Step and answer messages until told to stop. Exceptions of `socket` leave the engine as it is."""
    next_check = time.monotonic() + CHECK_INTERVAL_S
    grammars_are_prepared = False
    while True:
        messages = socket.receive(0 if engine.has_work or engine.num_missing_graphs else IDLE_WAIT_MS)
        if not messages and not engine.has_work and engine.num_missing_graphs:
            engine.record_graph()
        elif not messages and not engine.has_work and not grammars_are_prepared:
            engine.prepare_grammars()  # not at the start, which would take longer
            grammars_are_prepared = True
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
                case AskRequests():
                    answer = DebugAnswer(message.sequence, engine.watch.answer(message))
                    socket.send(answer, message.server)
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


def end_soon(reason: str, is_device_fault: bool) -> None:
    """End this process soon after a rank is lost.

    The main thread normally reports the loss first. It can't if it waits for a GPU.
    """
    code = DEVICE_FAULT_EXIT_CODE if is_device_fault else 1
    timer = threading.Timer(EXIT_DEADLINE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
